"""Flash decoding whose parts agree on each row's maximum before they finish: decode.py's loops in two passes.

A tile's keys are shared out in parts, as under schedule "split". With S a part's scores, R their row maxima over the
part and M over all parts, a part delivers sums of 2^(S - M), which others add up as they are:

    partial  the first pass is the whole of decode.py's way_sums, by R; after the wait it multiplies its sums by
             2^(R - M)
    global   the first pass makes R alone and reads no V; after the wait weights are made by M at once

(GLOBAL tells which.) Between the passes every part of a tile must have written its R. That is a wait in one launch
(PASSES "both"), for which all programs must be resident together, see wait_for_parts; or the end of a launch (PASSES
"first", then "second"). The global form needs its scores twice: KEEP writes them to memory, where the L2 cache has them
still; else the second pass multiplies with K again. What is written after the second pass is joined by the last of a
tile's programs (decode_join.py), whose factors are all 1 here.

All else, names and layouts too, is decode.py's. K and V are f16 or bf16, and warps own keys, not columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.constants import NEG_INF
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index, axis_layout
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.flash_attn.decode import way_sums
from graphrt.backends.triton.kernels.flash_attn.decode_join import deliver, joined_ways
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import (
    ROWS,
    dot_dtype,
    join_layout,
    join_shared,
    mma_layout,
    query_layout,
    sums_layout,
)
from graphrt.backends.triton.kernels.flash_attn.decode_operands import (
    allocate,
    copy_tile,
    load_k,
    load_q,
    load_v,
    seen_bits,
)
from graphrt.backends.triton.kernels.flash_attn.decode_pieces import (
    copy_block,
    load_bias,
    logits,
    mask_rows,
    query_rows,
)
from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import (
    part_of_tile,
    planned,
    program_range,
    quotient,
    tile_units,
)
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import block_of_run, first_row, mask_tile

#: Row maxima that a program reads at a time.
MAXIMA = gl.constexpr(32)


@accesses(
    reads=(
        "p_q p_k p_v p_mask p_sinks p_slopes p_counts p_blocks p_seen p_runs p_unit_start p_part p_counter p_top "
        "p_turns p_scores"
    ),
    writes="p_out p_lse p_part p_counter p_top p_turns p_scores",
)
@gluon.jit(
    do_not_specialize=[
        "n_q", "n_kv", "n_groups", "n_blocks", "n_tiles", "programs", "splits", "has_sinks", "has_lse", "sm_t", "sm_h",
        "sm_s", "kept_blocks",
    ]
)  # fmt: skip
def flash_attn_decode_passes(
    p_q, p_k, p_v, p_mask, p_sinks, p_slopes, p_out, p_lse, p_counts, p_blocks, p_seen, p_runs, p_unit_start, p_part,
    p_counter, p_top, p_turns, p_scores, sq_t, sq_h, sq_s, sk_h, sk_s, sv_h, sv_s, sm_t, sm_h, sm_s,
    n_q, n_kv, n_head, n_groups, n_blocks, n_tiles, m2, m3, mask_groups, programs, splits, sign, factor, softcap,
    has_sinks, has_lse, kept_blocks,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, HAS_MASK: gl.constexpr, PACK: gl.constexpr, PER_HEAD: gl.constexpr,
    UNIFORM: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr, JOIN: gl.constexpr, JOIN_PARTS: gl.constexpr,
    GLOBAL: gl.constexpr, PASSES: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Arguments are those of decode.py's flash_attn_decode under schedule "split", with those of the forms beside them.

    top: f32 [programs, 4 warps or 1, 16], row maxima in the units of the scores; turns: int32 [tiles, 2], zeros at
    first, see wait_for_parts; scores: f32 [programs, kept_blocks, JOIN rows, BLOCK_N], KEEP's. JOIN is never 0.
    """
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    SEES: gl.constexpr = "mask" if HAS_MASK else ""
    TOPS: gl.constexpr = W if GLOBAL else 1
    LAYOUT: gl.constexpr = gl.SliceLayout(0, join_layout(D, W, ROWS))
    gl.static_assert(JOIN > 0 and NW % 16 == 0 and (NW <= 32 or not HAS_MASK))
    gl.static_assert(GLOBAL or PASSES == "both")
    gl.static_assert(PASSES == "both" or not KEEP)
    pid = gl.program_id(0)
    if PDL:
        gdc_wait()
    tile, _, unit, stop = program_range(
        pid, programs, splits, n_tiles, n_blocks, p_counts, p_unit_start, HAS_MASK, UNIFORM, False
    )
    i_seq = quotient(tile, n_groups)
    i_group = tile - i_seq * n_groups
    n_full = n_kv // BLOCK_N
    n_all = n_blocks
    run_first = 0
    run = 0
    i_mask = i_seq
    if HAS_MASK:
        if UNIFORM:
            i_mask = i_seq * 0
        else:
            i_mask = mask_tile(i_seq, i_group, 0, 1, mask_groups, m3)
        n_full = planned(p_counts + 2 * i_mask)
        n_all = n_full + planned(p_counts + 2 * i_mask + 1)
        run_first = planned(p_runs + 2 * i_mask)
        run = planned(p_runs + 2 * i_mask + 1)
    start, n_units = tile_units(tile, p_counts, n_blocks, p_unit_start, HAS_MASK, UNIFORM)
    low, high, finishes, whole = part_of_tile(start, n_units, unit, stop)
    high = gl.minimum(high, n_all)

    p_kh = p_k + i_seq.to(gl.int64) * sk_s + i_group.to(gl.int64) * sk_h
    p_vh = p_v + i_seq.to(gl.int64) * sv_s + i_group.to(gl.int64) * sv_h
    p_list = p_blocks + i_mask.to(gl.int64) * n_blocks
    p_bits = p_seen + i_mask.to(gl.int64) * n_blocks * (BLOCK_N // 32)
    visits = (p_list, run_first, run, n_full, high)
    queries = (p_q + i_seq.to(gl.int64) * sq_s, sq_t, sq_h, 0, n_q, sign)
    mask = (p_mask, p_slopes, sm_t, sm_h, sm_s, m2, m3)
    p_own = p_scores + (pid * kept_blocks - low).to(gl.int64) * (JOIN * BLOCK_N)
    p_tops = p_top + tile * splits * (TOPS * ROWS)

    if GLOBAL:
        # One ring, first of K and then of V, where the second pass reads no K.
        ring_k = allocate(2 * STAGES if KEEP else STAGES, NW, D, K_KIND, False, sk_n, 0)
        if KEEP:
            ring_v = ring_k
        else:
            ring_v = allocate(STAGES, NW, D, V_KIND, True, sv_n, 0)
        caches = (ring_k, ring_v, p_kh, p_vh, p_bits, n_kv)
        if PASSES != "second":
            top = row_maxima(
                queries, mask, caches, visits, low, i_seq, i_group, factor, softcap, p_own, sk_n, D, K_KIND, BLOCK_N,
                SOFTCAP, SEES, PACK, PER_HEAD, 2 * STAGES if KEEP else STAGES, JOIN, KEEP,
            )  # fmt: skip
            L: gl.constexpr = gl.SliceLayout(2, mma_layout(W))
            i_top = axis_index(L, 2, 0, W) * ROWS + axis_index(L, 2, 1, ROWS)
            gl.store(p_top + pid * (TOPS * ROWS) + i_top, top)
        if PASSES == "first":
            if PDL:
                gdc_launch_dependents()
        else:
            start_copies(
                caches, visits, low, sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, SEES, PDL, STAGES, KEEP
            )  # fmt: skip
            if PASSES == "both":
                wait_for_parts(p_turns + 2 * tile, splits)
            most = all_maxima(p_tops, splits * TOPS)
            l, acc = weighted_sums(
                queries, mask, caches, visits, low, most, i_seq, i_group, factor, softcap, p_own, sk_n, sv_n, D, K_KIND,
                V_KIND, BLOCK_N, SOFTCAP, SEES, PACK, PER_HEAD, PDL, STAGES, JOIN, KEEP,
            )  # fmt: skip
            l, acc = added_ways(l, acc, D, V_KIND)
            m = gl.expand_dims(gl.convert_layout(most, axis_layout(LAYOUT, 2, 0)), 1)
            if not SOFTCAP:
                m = m * factor
            finish(
                p_sinks, p_out, p_lse, p_part, m, l, acc, pid, splits, i_seq * n_q, i_group, low < high, whole,
                finishes, n_q, n_head, has_sinks, has_lse, p_counter, p_counts, p_unit_start, tile, programs, n_tiles,
                n_blocks, n_all, LAYOUT, PACK, D, V_KIND, HAS_MASK, UNIFORM, JOIN, JOIN_PARTS,
            )  # fmt: skip
    else:
        ring_k = allocate(STAGES, NW, D, K_KIND, False, sk_n, 0)
        ring_v = allocate(STAGES, NW, D, V_KIND, True, sv_n, 0)
        caches = (ring_k, ring_v, p_kh, p_vh, p_bits, n_kv)
        start_copies(caches, visits, low, sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, SEES, PDL, STAGES, False)
        m, l, acc = way_sums(
            queries, mask, caches, visits, low, i_seq, i_group, factor, softcap, sk_n, sv_n, D, K_KIND, V_KIND,
            BLOCK_N, SOFTCAP, SEES, 0, PACK, PER_HEAD, PDL, STAGES, "whole", (), "", 0,
        )  # fmt: skip
        m, l, acc = joined_ways(m, l, acc, D, V_KIND)
        gl.store(p_top + pid * ROWS + axis_index(LAYOUT, 2, 0, ROWS), m)
        wait_for_parts(p_turns + 2 * tile, splits)
        most = all_maxima(p_tops, splits)
        most = gl.expand_dims(gl.convert_layout(most, axis_layout(LAYOUT, 2, 0)), 1)
        shrink = gl.exp2(m - gl.where(most == NEG_INF, 0.0, most))
        finish(
            p_sinks, p_out, p_lse, p_part, most, l * shrink, acc * shrink, pid, splits, i_seq * n_q, i_group,
            low < high, whole, finishes, n_q, n_head, has_sinks, has_lse, p_counter, p_counts, p_unit_start, tile,
            programs, n_tiles, n_blocks, n_all, LAYOUT, PACK, D, V_KIND, HAS_MASK, UNIFORM, JOIN, JOIN_PARTS,
        )  # fmt: skip


@gluon.jit
def finish(
    p_sinks, p_out, p_lse, p_part, m, l, acc, pid, splits, first_token, i_group, visits_any, whole, finishes, n_q,
    n_head, has_sinks, has_lse, p_counter, p_counts, p_unit_start, tile, programs, n_tiles, n_blocks, n_all,
    LAYOUT: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, HAS_MASK: gl.constexpr,
    UNIFORM: gl.constexpr, JOIN: gl.constexpr, JOIN_PARTS: gl.constexpr,
):  # fmt: skip
    """deliver(), of a program that has a part: a tile without k-blocks has one unit, which is its last program's."""
    if visits_any or (finishes and n_all == 0):
        deliver(
            p_sinks, p_out, p_lse, p_part, m, l, acc, pid, splits, first_token, 0, i_group, whole, finishes, n_q,
            n_head, has_sinks, has_lse, p_counter, p_counts, p_unit_start, tile, programs, n_tiles, n_blocks,
            LAYOUT, PACK, D, KIND, HAS_MASK, UNIFORM, JOIN, JOIN_PARTS,
        )  # fmt: skip


@gluon.jit
def wait_for_parts(p_turn, parts):
    """Returns when all programs of a tile have called it; what they wrote before is visible then.

    p_turn: int32 [2]: how many have come, and how often all have: so it needs no reset between launches. Every program
    that it waits for must run: a launch that calls it has no more programs than the device holds at once.
    """
    round = gl.atomic_add(p_turn + 1, 0, sem="acquire", scope="gpu")
    gl.thread_barrier()  # all threads' stores come before the count
    come = gl.atomic_add(p_turn, 1, sem="acq_rel", scope="gpu")
    if come == parts - 1:
        gl.store(p_turn, 0)  # nobody counts before the round is over
        gl.thread_barrier()
        gl.atomic_add(p_turn + 1, 1, sem="release", scope="gpu")
    else:
        while gl.atomic_add(p_turn + 1, 0, sem="acquire", scope="gpu") == round:
            pass
    gl.thread_barrier()


@gluon.jit
def all_maxima(p_top, n):
    """Row maxima f32 [16] of a table [n, 16], read past the L1 cache: other programs wrote it."""
    S: gl.constexpr = sums_layout(MAXIMA, ROWS, gl.num_warps())
    most = gl.full([ROWS], NEG_INF, gl.float32, layout=axis_layout(S, 2, 1))
    for base in range(0, n, MAXIMA):
        i = base + axis_index(S, 2, 0, MAXIMA)
        found = gl.load(p_top + (i * ROWS + axis_index(S, 2, 1, ROWS)), mask=i < n, other=NEG_INF, cache_modifier=".cg")
        most = gl.maximum(most, gl.max(found, 0))
    return most


@gluon.jit
def copy_rows(
    ring, p_h, p_bits, visits, n_kv, i, buffer, STRIDE: gl.constexpr, NW: gl.constexpr, D: gl.constexpr,
    KIND: gl.constexpr, BLOCK_N: gl.constexpr, SEES: gl.constexpr,
):  # fmt: skip
    """Starts the copies of K or V of the i-th k-block of the list, as one group; it is empty if i is not below high."""
    p_list, run_first, run, n_full, high = visits
    if i < high:
        i_kb = i
        hidden = i
        SKIP: gl.constexpr = "bits" if SEES == "mask" else ""
        if SEES == "mask":
            i_kb = block_of_run(p_list, i, run_first, run)
            hidden = seen_bits(p_bits + i_kb * (BLOCK_N // 32), i >= n_full, NW)
        left = n_kv - i_kb * BLOCK_N
        p_kb = p_h + first_row(i_kb, BLOCK_N).to(gl.int64) * STRIDE
        copy_tile(ring, p_kb, left, hidden, (), STRIDE, NW, D, KIND, True, SKIP, 0, buffer)
    async_copy.commit_group()


@gluon.jit
def start_copies(
    caches, visits, low, sk_n: gl.constexpr, sv_n: gl.constexpr, NW: gl.constexpr, D: gl.constexpr,
    K_KIND: gl.constexpr, V_KIND: gl.constexpr, BLOCK_N: gl.constexpr, SEES: gl.constexpr, PDL: gl.constexpr,
    STAGES: gl.constexpr, V_ALONE: gl.constexpr,
):  # fmt: skip
    """Fills the rings with the first k-blocks: K and V of STAGES, or V alone of twice as many."""
    if V_ALONE:
        ring, _, _, p_vh, p_bits, n_kv = caches
        for i in range(2 * STAGES):
            copy_rows(ring, p_vh, p_bits, visits, n_kv, low + i, i, sv_n, NW, D, V_KIND, BLOCK_N, SEES)
    else:
        for i in range(STAGES):
            copy_block(
                caches, visits, low + i, i, sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, SEES, 0, PDL, "whole"
            )  # fmt: skip


@gluon.jit
def row_maxima(
    queries, mask, caches, visits, low, i_seq, i_group, factor, softcap, p_own, sk_n: gl.constexpr, D: gl.constexpr,
    KIND: gl.constexpr, BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, SEES: gl.constexpr, PACK: gl.constexpr,
    PER_HEAD: gl.constexpr, STAGES: gl.constexpr, KEPT: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Each way's row maxima of k-blocks low .. high - 1, f32 [W, 16], in the units of the scores.

    KEEP: scores of the first KEPT rows go to p_own, f32 [high, KEPT, BLOCK_N], whose first block is the low-th.
    """
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    MMA: gl.constexpr = mma_layout(W)
    ring, _, p_kh, _, p_bits, n_kv = caches
    _, _, _, row0, n_q, _ = queries
    _, _, _, _, high = visits
    for i in range(STAGES):
        copy_rows(ring, p_kh, p_bits, visits, n_kv, low + i, i, sk_n, NW, D, KIND, BLOCK_N, SEES)
    q = operand_of_rows(queries, i_group, D, KIND, PACK)
    i_row = axis_index(MMA, 3, 1, ROWS)
    token, slope, p_mask_rows = mask_rows(
        mask, row0 + i_row, i_seq, i_group, n_q, factor, SOFTCAP, SEES, PACK, PER_HEAD
    )  # fmt: skip
    i_key = axis_index(MMA, 3, 0, W) * NW + axis_index(MMA, 3, 2, NW)
    top = gl.full([W, ROWS], NEG_INF, gl.float32, layout=gl.SliceLayout(2, MMA))
    buffer = 0
    for i in range(low, high):
        zero = gl.full([W, ROWS, NW], 0.0, gl.float32, layout=MMA)
        bias = load_bias(zero, p_mask_rows, token < n_q, visits, i, i_key, n_kv, BLOCK_N, SEES)
        async_copy.wait_group(STAGES - 1)
        s = mma_v2(q, load_k(ring, buffer, NW, D, KIND, 0), zero)
        s = logits(
            s, bias, mask, p_mask_rows, slope, i, i_key, n_kv, factor, softcap, BLOCK_N, SOFTCAP, SEES
        )  # fmt: skip
        top = gl.maximum(top, gl.max(s, 2))
        if KEEP:
            p_kept = p_own + i.to(gl.int64) * (KEPT * BLOCK_N) + (i_row * BLOCK_N + i_key)
            gl.store(p_kept, s, mask=(i_row < KEPT) & (i_key >= 0))
        copy_rows(ring, p_kh, p_bits, visits, n_kv, i + STAGES, buffer, sk_n, NW, D, KIND, BLOCK_N, SEES)
        buffer = gl.where(buffer == STAGES - 1, 0, buffer + 1)
    async_copy.wait_group(0)
    return top


@gluon.jit
def operand_of_rows(queries, i_group, D: gl.constexpr, KIND: gl.constexpr, PACK: gl.constexpr):
    """A tile's rows of Q as the first operand of Q K^T, [W, 16, D]."""
    p_q, _, _, _, n_q, sign = queries
    W: gl.constexpr = gl.num_warps()
    token, p_row = query_rows(queries, axis_index(query_layout(D, W, KIND), 3, 1, ROWS), i_group, PACK)
    return load_q(p_q, p_row, token < n_q, sign, D, KIND, dot_dtype(KIND), False)


@gluon.jit
def weighted_sums(
    queries, mask, caches, visits, low, most, i_seq, i_group, factor, softcap, p_own,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, SEES: gl.constexpr, PACK: gl.constexpr, PER_HEAD: gl.constexpr,
    PDL: gl.constexpr, STAGES: gl.constexpr, KEPT: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """way_sums' (l, acc) by the maxima `most` f32 [16], in the units of the scores: no k-block changes what was summed
    before it.

    Copies of the first k-blocks have started, see start_copies. KEEP: scores are those that row_maxima left.
    """
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    MMA: gl.constexpr = mma_layout(W)
    OF_ROWS: gl.constexpr = gl.SliceLayout(2, MMA)
    ring_k, ring_v, _, p_vh, p_bits, n_kv = caches
    _, _, _, row0, n_q, _ = queries
    _, _, _, _, high = visits
    i_row = axis_index(MMA, 3, 1, ROWS)
    i_key = axis_index(MMA, 3, 0, W) * NW + axis_index(MMA, 3, 2, NW)
    top = gl.expand_dims(gl.convert_layout(most, gl.SliceLayout(0, OF_ROWS)), 0)
    top = gl.expand_dims(gl.where(top == NEG_INF, 0.0, top), 2)
    l = gl.full([W, ROWS], 0.0, gl.float32, layout=OF_ROWS)
    acc = gl.full([W, ROWS, D], 0.0, gl.float32, layout=MMA)
    if not KEEP:
        q = operand_of_rows(queries, i_group, D, K_KIND, PACK)
        token, slope, p_mask_rows = mask_rows(
            mask, row0 + i_row, i_seq, i_group, n_q, factor, SOFTCAP, SEES, PACK, PER_HEAD
        )  # fmt: skip
    buffer = 0
    for i in range(low, high):
        if KEEP:
            p_kept = p_own + i.to(gl.int64) * (KEPT * BLOCK_N) + (i_row * BLOCK_N + i_key)
            s = gl.load(p_kept, mask=(i_row < KEPT) & (i_key >= 0), other=0.0)
        else:
            zero = gl.full([W, ROWS, NW], 0.0, gl.float32, layout=MMA)
            bias = load_bias(zero, p_mask_rows, token < n_q, visits, i, i_key, n_kv, BLOCK_N, SEES)
            async_copy.wait_group(2 * STAGES - 1)
            s = mma_v2(q, load_k(ring_k, buffer, NW, D, K_KIND, sk_n), zero)
            s = logits(
                s, bias, mask, p_mask_rows, slope, i, i_key, n_kv, factor, softcap, BLOCK_N, SOFTCAP, SEES
            )  # fmt: skip
        if SOFTCAP:
            p = gl.exp2(s - top)
        else:
            p = gl.exp2((s - top) * factor)
        l = l + gl.sum(p, 2)
        p = gl.convert_layout(p.to(dot_dtype(V_KIND)), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
        if KEEP:
            async_copy.wait_group(2 * STAGES - 1)
            acc = mma_v2(p, load_v(ring_v, buffer, NW, D, V_KIND, sv_n), acc)
            copy_rows(
                ring_v, p_vh, p_bits, visits, n_kv, i + 2 * STAGES, buffer, sv_n, NW, D, V_KIND, BLOCK_N, SEES
            )  # fmt: skip
            buffer = gl.where(buffer == 2 * STAGES - 1, 0, buffer + 1)
        else:
            async_copy.wait_group(2 * STAGES - 2)
            acc = mma_v2(p, load_v(ring_v, buffer, NW, D, V_KIND, sv_n), acc)
            copy_block(
                caches, visits, i + STAGES, buffer, sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, SEES, 0, PDL, "whole"
            )  # fmt: skip
            buffer = gl.where(buffer == STAGES - 1, 0, buffer + 1)
    return l, acc


@gluon.jit
def added_ways(l, acc, D: gl.constexpr, KIND: gl.constexpr):
    """joined_ways() of sums by one maximum: f32 [16, 1], [16, D]."""
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = join_layout(D, W, ROWS)
    sums = gl.allocate_shared_memory(gl.float32, [W, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), l)
    rows = gl.allocate_shared_memory(gl.float32, [W, ROWS, D], join_shared(D, W, KIND, ROWS), acc)
    return gl.sum(gl.expand_dims(sums.load(gl.SliceLayout(2, L)), 2), 0), gl.sum(rows.load(L), 0)
