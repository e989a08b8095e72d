"""Flash decoding in Gluon: attention of few query rows over f16, bf16, q8_0 and q4_0 caches, from sm_80 on.

It does what forward.py's `flash_attn` does for BLOCK_M = 16 rows that share one KV head, and shares its ranges of
units, lists of k-blocks, slots of scratch and fixup.py; only how the work inside a program is done differs:

- Copies of the first STAGES k-blocks start before Q is read: a ring of buffers in shared memory, filled by cp.async.
- Each warp has its own keys of a k-block ("way") with sums of its own; the ways meet once, at the end of a segment.
  Where such sums leave a warp no registers (f16 and bf16 heads of 256) the warps own columns of the result instead:
  keys are shared out for Q K^T only, and every k-block's maxima and weights pass through shared memory.
- Quantized rows are copied as they are: where a head's keys lie side by side, a k-block as one run of memory by 16
  bytes; else row by row, in units of 16 bytes where keys are so far apart, else of words. They are read from shared
  memory by words, straight into the registers where the matrix units want the dequantized values: which element
  of a row a slot of an operand holds is free as long as Q (for K) or the result (for V) follows the same order, and the
  orders here are made so that no value changes its lane.
- Up to 8 query rows over quantized rows have a loop of their own (decode_thin.py), which may multiply K's codes and
  scale the scores (decode_codes.py).

Of a pair of q8_0 or q4_0 blocks (2 * J + 1 words, J = 8 or 4) these words are read: 1 .. 2J, the values, as
[NB = D / 32 blocks, J]; and words 0 and J, the "heads", as [NB]. A row may begin within a unit, and has a unit more
than its values fill: so its tiles are views of shared memory from some word on, with gaps (PaddedSharedLayout). See
tiles.py: in an even block the head's low half is d and its high half the first two values, which here take the place
of the two after the last ones (the block is "turned"); in an odd block the head's high half is d.

Axes: W ways (warps), NW = BLOCK_N / W keys a way, 16 query rows, D head size (of K and V).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.constants import NEG_INF
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_wait
from graphrt.backends.triton.kernels.flash_attn.decode_append import (
    copy_early,
    has_row,
    key_of_row,
    put_row,
    turned_rows,
    write_row,
)
from graphrt.backends.triton.kernels.flash_attn.decode_blocks import copy_and_append
from graphrt.backends.triton.kernels.flash_attn.decode_join import deliver, joined_ways
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import (
    ROWS,
    column_mma_layout,
    dot_dtype,
    join_layout,
    mma_layout,
    query_layout,
)
from graphrt.backends.triton.kernels.flash_attn.decode_operands import (
    allocate,
    block_rows,
    load_k,
    load_q,
    load_v,
    slot_order,
)
from graphrt.backends.triton.kernels.flash_attn.decode_pieces import (
    copy_block,
    load_bias,
    logits,
    mask_rows,
    query_rows,
    softmax_step,
)
from graphrt.backends.triton.kernels.flash_attn.decode_thin import thin_sums
from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import (
    part_of_tile,
    planned,
    program_range,
    quotient,
    tile_units,
)
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import (
    mask_tile,
)


@accesses(
    reads=("p_q p_k p_v p_mask p_sinks p_slopes p_counts p_blocks p_seen p_runs p_unit_start p_part p_counter"),
    writes="p_out p_lse p_part p_counter",
    early_if={"PLAN_EARLY": "p_counts p_runs p_unit_start"},
    uncached="p_counts p_runs p_unit_start",
)
@gluon.jit(
    do_not_specialize=[
        "n_q",
        "n_kv",
        "n_groups",
        "n_blocks",
        "n_tiles",
        "programs",
        "splits",
        "has_sinks",
        "has_lse",
        "sm_t",
        "sm_h",
        "sm_s",
    ],  # fmt: skip
)
def flash_attn_decode(
    p_q, p_k, p_v, p_mask, p_sinks, p_slopes, p_out, p_lse, p_counts, p_blocks, p_seen, p_runs, p_unit_start, p_part,
    p_counter, sq_t, sq_h, sq_s, sk_h, sk_s, sv_h, sv_s, sm_t, sm_h, sm_s,
    n_q, n_kv, n_head, n_groups, n_blocks, n_tiles, m2, m3, mask_groups, programs, splits, sign, factor, softcap,
    has_sinks, has_lse,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, HAS_MASK: gl.constexpr, PACK: gl.constexpr, PER_HEAD: gl.constexpr,
    RANGES: gl.constexpr, UNIFORM: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
    JOIN: gl.constexpr, JOIN_PARTS: gl.constexpr, PLAN_EARLY: gl.constexpr, COLUMNS: gl.constexpr,
    THIN: gl.constexpr, IN_RUNS: gl.constexpr,
):  # fmt: skip
    """Arguments are those of forward.py's flash_attn with one query tile a KV head.

    At most 16 rows, all heads of a KV head in one tile (PACK of them, n_groups = KV heads, n_qt = 1), and not BIG nor
    WIDE. D: of K and V. K and V of f16 and bf16 have rows aligned to 16 bytes; q8_0 and q4_0 are int32, rows aligned to
    4 bytes.

    JOIN: rows that are joined in this launch, JOIN_PARTS parts at a time, by the last of a tile's programs to be done,
    which counter [n_tiles] tells; 0: fixup.py joins.

    PLAN_EARLY: the mask's plan is older than the launch before this one. Kernels let their successors start only after
    a gdc_wait of their own, so that when this one starts, all launches but the one before it are complete.

    COLUMNS: the warps own columns of the result and not keys; K and V are f16 or bf16. THIN: of at most 8 query
    rows, K and V of blocks or floats of 8 bits: decode_thin.py's loop, which multiplies K's "values" or "codes"; else
    "". IN_RUNS: K and V are of blocks and each head's keys lie side by side, see decode_configs.in_runs.
    """
    decode_range(
        p_q, p_k, p_v, p_mask, p_sinks, p_slopes, p_out, p_lse, p_counts, p_blocks, p_seen, p_runs,
        p_unit_start, p_part, p_counter, sq_t, sq_h, sq_s, sk_h, sk_s, sv_h, sv_s, sm_t, sm_h, sm_s, n_q, n_kv,
        n_head, n_groups, n_blocks, n_tiles, m2, m3, mask_groups, programs, splits, sign, factor, softcap,
        has_sinks, has_lse, sk_n, sv_n, D, K_KIND, V_KIND, BLOCK_N, SOFTCAP, HAS_MASK, PACK, PER_HEAD, RANGES,
        UNIFORM, PDL, STAGES, JOIN, JOIN_PARTS, PLAN_EARLY, COLUMNS, THIN, IN_RUNS, (), "", 0,
    )  # fmt: skip


@accesses(
    reads=(
        "p_q p_k p_v p_mask p_sinks p_slopes p_counts p_blocks p_seen p_runs p_unit_start p_part p_counter p_k_new "
        "p_v_new p_ids p_cos p_sin"
    ),
    writes="p_out p_lse p_part p_counter p_k p_v",
    early_if={"PLAN_EARLY": "p_counts p_runs p_unit_start p_blocks p_seen p_k p_v"},
    uncached="p_counts p_runs p_unit_start p_blocks p_seen p_k p_v",
)
@gluon.jit(
    do_not_specialize=[
        "n_q", "n_kv", "n_groups", "n_blocks", "n_tiles", "programs", "splits", "has_sinks", "has_lse", "sm_t", "sm_h",
        "sm_s", "s_id", "n_cells",
    ]
)  # fmt: skip
def flash_attn_decode_append(
    p_q, p_k, p_v, p_mask, p_sinks, p_slopes, p_out, p_lse, p_counts, p_blocks, p_seen, p_runs, p_unit_start, p_part,
    p_counter, sq_t, sq_h, sq_s, sk_h, sk_s, sv_h, sv_s, sm_t, sm_h, sm_s,
    n_q, n_kv, n_head, n_groups, n_blocks, n_tiles, m2, m3, mask_groups, programs, splits, sign, factor, softcap,
    has_sinks, has_lse,
    p_k_new, p_v_new, p_ids, p_cos, p_sin, s_id, n_cells,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, HAS_MASK: gl.constexpr, PACK: gl.constexpr, PER_HEAD: gl.constexpr,
    RANGES: gl.constexpr, UNIFORM: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
    JOIN: gl.constexpr, JOIN_PARTS: gl.constexpr, PLAN_EARLY: gl.constexpr, COLUMNS: gl.constexpr,
    kn_t: gl.constexpr, kn_h: gl.constexpr, vn_t: gl.constexpr, APPEND: gl.constexpr, N_DIMS: gl.constexpr,
):  # fmt: skip
    """flash_attn_decode, and before it the rotation of q and k and the writing of a step's k and v into the cache: one
    token a sequence, K and V of f16 or bf16.

    q: before its rotation. k_new: f32, of token t and KV head h from kn_t t + kn_h h on; v_new: f32, from vn_t t + D h
    on; ids: i32 or i64, the cell of token t at s_id t, none of the n_cells cells for a token that is not written; cos,
    sin: f32 [tokens, N_DIMS / 2]. APPEND: which elements are a pair, "neox" or "normal", as rope.py has them.

    Nobody waits for the cell to be written: who visits its k-block puts the row into shared memory itself, in the place
    of whatever the copy brought, and who has the tile's first k-block writes it to memory, for later launches. So the
    copies need not wait for the launch before: with PLAN_EARLY they start while it ends.
    """
    decode_range(
        p_q, p_k, p_v, p_mask, p_sinks, p_slopes, p_out, p_lse, p_counts, p_blocks, p_seen, p_runs,
        p_unit_start, p_part, p_counter, sq_t, sq_h, sq_s, sk_h, sk_s, sv_h, sv_s, sm_t, sm_h, sm_s, n_q, n_kv,
        n_head, n_groups, n_blocks, n_tiles, m2, m3, mask_groups, programs, splits, sign, factor, softcap,
        has_sinks, has_lse, sk_n, sv_n, D, K_KIND, V_KIND, BLOCK_N, SOFTCAP, HAS_MASK, PACK, PER_HEAD, RANGES,
        UNIFORM, PDL, STAGES, JOIN, JOIN_PARTS, PLAN_EARLY, COLUMNS, "", False,
        (p_k_new, p_v_new, p_ids, p_cos, p_sin, s_id, n_cells, kn_t, kn_h, vn_t), APPEND, N_DIMS,
    )  # fmt: skip


@accesses(
    reads=(
        "p_q p_k p_v p_mask p_sinks p_slopes p_counts p_blocks p_seen p_runs p_unit_start p_part p_counter p_k_new "
        "p_v_new p_ids"
    ),
    writes="p_out p_lse p_part p_counter p_k p_v",
    early_if={"PLAN_EARLY": "p_counts p_runs p_unit_start"},
    uncached="p_counts p_runs p_unit_start",
)
@gluon.jit(
    do_not_specialize=[
        "n_q", "n_kv", "n_groups", "n_blocks", "n_tiles", "programs", "splits", "has_sinks", "has_lse", "sm_t", "sm_h",
        "sm_s", "k_head", "k_seq", "v_head", "v_seq", "n_cells",
    ]
)  # fmt: skip
def flash_attn_decode_blocks(
    p_q, p_k, p_v, p_mask, p_sinks, p_slopes, p_out, p_lse, p_counts, p_blocks, p_seen, p_runs, p_unit_start, p_part,
    p_counter, sq_t, sq_h, sq_s, sk_h, sk_s, sv_h, sv_s, sm_t, sm_h, sm_s,
    n_q, n_kv, n_head, n_groups, n_blocks, n_tiles, m2, m3, mask_groups, programs, splits, sign, factor, softcap,
    has_sinks, has_lse,
    p_k_new, p_v_new, p_ids, k_head, k_seq, v_head, v_seq, n_cells,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, HAS_MASK: gl.constexpr, PACK: gl.constexpr, PER_HEAD: gl.constexpr,
    RANGES: gl.constexpr, UNIFORM: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
    JOIN: gl.constexpr, JOIN_PARTS: gl.constexpr, PLAN_EARLY: gl.constexpr, COLUMNS: gl.constexpr,
    THIN: gl.constexpr, IN_RUNS: gl.constexpr,
):  # fmt: skip
    """flash_attn_decode, and before it the writing of a step's k and v into caches of q8_0 or q4_0, one token a
    sequence: decode_blocks.py.

    k_new, v_new: f32 or f16, of sequence s and KV head h from k_seq s + k_head h on; ids: i32 or i64, the sequences'
    cells, none of the n_cells for a token that is not written; k, v: the caches from their first cell on.
    """
    decode_range(
        p_q, p_k, p_v, p_mask, p_sinks, p_slopes, p_out, p_lse, p_counts, p_blocks, p_seen, p_runs,
        p_unit_start, p_part, p_counter, sq_t, sq_h, sq_s, sk_h, sk_s, sv_h, sv_s, sm_t, sm_h, sm_s, n_q, n_kv,
        n_head, n_groups, n_blocks, n_tiles, m2, m3, mask_groups, programs, splits, sign, factor, softcap,
        has_sinks, has_lse, sk_n, sv_n, D, K_KIND, V_KIND, BLOCK_N, SOFTCAP, HAS_MASK, PACK, PER_HEAD, RANGES,
        UNIFORM, PDL, STAGES, JOIN, JOIN_PARTS, PLAN_EARLY, COLUMNS, THIN, IN_RUNS,
        (p_k_new, p_v_new, p_ids, k_head, k_seq, v_head, v_seq, n_cells), "blocks", 0,
    )  # fmt: skip


@gluon.jit
def decode_range(
    p_q, p_k, p_v, p_mask, p_sinks, p_slopes, p_out, p_lse, p_counts, p_blocks, p_seen, p_runs, p_unit_start, p_part,
    p_counter, sq_t, sq_h, sq_s, sk_h, sk_s, sv_h, sv_s, sm_t, sm_h, sm_s,
    n_q, n_kv, n_head, n_groups, n_blocks, n_tiles, m2, m3, mask_groups, programs, splits, sign, factor, softcap,
    has_sinks, has_lse,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, HAS_MASK: gl.constexpr, PACK: gl.constexpr, PER_HEAD: gl.constexpr,
    RANGES: gl.constexpr, UNIFORM: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
    JOIN: gl.constexpr, JOIN_PARTS: gl.constexpr, PLAN_EARLY: gl.constexpr, COLUMNS: gl.constexpr,
    THIN: gl.constexpr, IN_RUNS: gl.constexpr, new, APPEND: gl.constexpr, N_DIMS: gl.constexpr,
):  # fmt: skip
    """What a program of these kernels does. new: flash_attn_decode_append's rows, with APPEND, or with "blocks" there
    flash_attn_decode_blocks's."""
    TURNED: gl.constexpr = "" if APPEND == "blocks" else APPEND
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    SEES: gl.constexpr = "mask" if HAS_MASK else ""
    # How full k-blocks are copied, and the first ones: by code that all take, unless that is much slower.
    FULL: gl.constexpr = "run" if IN_RUNS else "whole"
    FIRST: gl.constexpr = FULL if COLUMNS or IN_RUNS else "masked"
    # All that is read of a plan before the first copies is what list_blocks and sum_units made of it.
    WAIT_LATE: gl.constexpr = PLAN_EARLY or (UNIFORM and not HAS_MASK)
    gl.static_assert(NW % (8 if COLUMNS else 16) == 0 and (NW <= 32 or not HAS_MASK))
    pid = gl.program_id(0)
    if PDL and not WAIT_LATE:  # what follows reads what the mask's kernels wrote
        gdc_wait()
    # A mask that all tiles share has one mask tile: all that is known of it is loaded at once, first of all.
    n_full = n_kv // BLOCK_N
    n_all = n_blocks
    run_first = 0
    run = 0
    if HAS_MASK and UNIFORM:
        n_full = planned(p_counts)
        n_all = n_full + planned(p_counts + 1)
        run_first = planned(p_runs)
        run = planned(p_runs + 1)
    if RANGES:
        tile, _, unit, stop = program_range(
            pid, programs, splits, n_tiles, n_blocks, p_counts, p_unit_start, HAS_MASK, UNIFORM, False
        )
    else:
        tile = pid
        unit = pid
        stop = n_tiles

    while unit < stop:
        if not RANGES:
            tile = unit
        i_seq = quotient(tile, n_groups)
        i_group = tile - i_seq * n_groups
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
        if RANGES:
            start, n_units = tile_units(tile, p_counts, n_blocks, p_unit_start, HAS_MASK, UNIFORM)
            low, high, finishes, whole = part_of_tile(start, n_units, unit, stop)
            unit = start + high
            high = gl.minimum(high, n_all)
        else:
            low = unit * 0
            high = n_all
            finishes = unit >= 0
            whole = finishes
            unit += programs

        p_list = p_blocks + i_mask.to(gl.int64) * n_blocks
        p_bits = p_seen + i_mask.to(gl.int64) * n_blocks * (BLOCK_N // 32)
        k_first = i_seq.to(gl.int64) * sk_s + i_group.to(gl.int64) * sk_h
        v_first = i_seq.to(gl.int64) * sv_s + i_group.to(gl.int64) * sv_h
        ring_k = allocate(STAGES, NW, D, K_KIND, False, sk_n, k_first)
        ring_v = allocate(STAGES, NW, D, V_KIND, True, sv_n, v_first)
        # What goes together: K and V, the list of k-blocks, Q, the mask.
        caches = (ring_k, ring_v, p_k + k_first, p_v + v_first, p_bits, n_kv)
        visits = (p_list, run_first, run, n_full, high)
        queries = (p_q + i_seq.to(gl.int64) * sq_s, sq_t, sq_h, 0, n_q, sign)
        mask = (p_mask, p_slopes, sm_t, sm_h, sm_s, m2, m3)
        gl.static_assert(APPEND == "" or not COLUMNS)

        if TURNED != "" and PLAN_EARLY:  # what the step before has left of the caches is there already
            copy_early(caches, visits, low, sk_n, sv_n, NW, D, BLOCK_N, SEES, STAGES)
        if PDL and WAIT_LATE:  # so late that all that comes before overlaps with the kernel before
            gdc_wait()
        # A buffer's copies are two groups, K's and V's; where there is no k-block left, they are empty.
        if APPEND == "blocks":
            copy_and_append(
                new, (p_k, k_first, p_v, v_first), caches, visits, low, n_all, i_seq, i_group, sk_n, sv_n, NW, D,
                K_KIND, V_KIND, BLOCK_N, SEES, PDL, FIRST, STAGES,
            )  # fmt: skip
        elif APPEND == "" or not PLAN_EARLY:
            for i in range(STAGES):
                copy_block(
                    caches, visits, low + i, i, sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, SEES, 0, PDL, FIRST
                )  # fmt: skip

        if COLUMNS:
            m, l, acc = column_sums(
                queries, mask, caches, visits, low, i_seq, i_group, factor, softcap, sk_n, sv_n, D, K_KIND, V_KIND,
                BLOCK_N, SOFTCAP, SEES, 0, PACK, PER_HEAD, PDL, STAGES,
            )  # fmt: skip
            LAYOUT: gl.constexpr = column_mma_layout(W)
        else:
            if THIN != "":
                m, l, acc = thin_sums(
                    queries, mask, caches, visits, low, i_seq, i_group, factor, softcap, sk_n, sv_n, D, K_KIND, V_KIND,
                    BLOCK_N, SOFTCAP, SEES, 0, PACK, PER_HEAD, PDL, STAGES, FULL, THIN == "codes",
                )  # fmt: skip
            else:
                m, l, acc = way_sums(
                    queries, mask, caches, visits, low, i_seq, i_group, factor, softcap, sk_n, sv_n, D, K_KIND, V_KIND,
                    BLOCK_N, SOFTCAP, SEES, 0, PACK, PER_HEAD, PDL, STAGES, FULL, new, TURNED, N_DIMS,
                )  # fmt: skip
            m, l, acc = joined_ways(m, l, acc, D, V_KIND)
            LAYOUT: gl.constexpr = gl.SliceLayout(0, join_layout(D, W, m.shape[0]))
        deliver(
            p_sinks, p_out, p_lse, p_part, m, l, acc, pid, splits, i_seq * n_q, 0, i_group, whole, finishes, n_q,
            n_head, has_sinks, has_lse, p_counter, p_counts, p_unit_start, tile, programs, n_tiles, n_blocks,
            LAYOUT, PACK, D, V_KIND, HAS_MASK, UNIFORM, JOIN, JOIN_PARTS,
        )  # fmt: skip
        tile += 1


@gluon.jit
def way_sums(
    queries, mask, caches, visits, low, i_seq, i_group, factor, softcap,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, SEES: gl.constexpr, PAGE: gl.constexpr, PACK: gl.constexpr,
    PER_HEAD: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr, FULL: gl.constexpr, new,
    APPEND: gl.constexpr, N_DIMS: gl.constexpr,
):  # fmt: skip
    """(m, l, acc) of a segment, k-blocks low .. high - 1 of the list, of which copies of the first STAGES have started.

    m: f32 [W, 16], each way's row maxima, log2; l: f32 [W, 16], its sums of weights; acc: f32 [W, 16, D], its weighted
    sums of V, in the order of slots. new: with APPEND, see turned_rows: the row is in its cell
    behind.
    """
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    MMA: gl.constexpr = mma_layout(W)
    ring_k, ring_v, _, _, _, n_kv = caches
    p_q, _, _, row0, n_q, sign = queries
    _, _, _, _, high = visits
    if APPEND != "":
        q, row = turned_rows(queries, new, i_seq, i_group, n_kv, BLOCK_N, D, K_KIND, V_KIND, PACK, APPEND, N_DIMS)
    else:
        token_q, p_row = query_rows(queries, axis_index(query_layout(D, W, K_KIND), 3, 1, ROWS), i_group, PACK)
        q = load_q(p_q, p_row, token_q < n_q, sign, D, K_KIND, dot_dtype(K_KIND), False)

    i_row = row0 + axis_index(MMA, 3, 1, ROWS)
    token, slope, p_mask_rows = mask_rows(
        mask, i_row, i_seq, i_group, n_q, factor, SOFTCAP, SEES, PACK, PER_HEAD
    )  # fmt: skip
    i_key = axis_index(MMA, 3, 0, W) * NW + axis_index(MMA, 3, 2, NW)
    m = gl.full([W, ROWS], NEG_INF, gl.float32, layout=gl.SliceLayout(2, MMA))
    l = gl.full([W, ROWS], 0.0, gl.float32, layout=gl.SliceLayout(2, MMA))
    acc = gl.full([W, ROWS, D], 0.0, gl.float32, layout=MMA)
    buffer = 0
    at = low - 1
    if APPEND != "":
        for i in range(low, low + STAGES):
            at = gl.where(has_row(row, visits, i, SEES), i, at)
    for i in range(low, high):
        zero = gl.full([W, ROWS, NW], 0.0, gl.float32, layout=MMA)
        # Loaded before the wait for K, so that it takes no time of its own.
        bias = load_bias(zero, p_mask_rows, token < n_q, visits, i, i_key, n_kv, BLOCK_N, SEES)
        async_copy.wait_group(2 * STAGES - 1)
        if APPEND != "":
            if i == at:
                put_row(ring_k, buffer, key_of_row(row, caches, visits, i, BLOCK_N, SEES), row[0], NW, D)
        s = mma_v2(q, load_k(ring_k, buffer, NW, D, K_KIND, sk_n), zero)
        s = logits(
            s, bias, mask, p_mask_rows, slope, i, i_key, n_kv, factor, softcap, BLOCK_N, SOFTCAP, SEES
        )  # fmt: skip
        p, m, alpha = softmax_step(s, m, factor, 2, SOFTCAP)
        l = l * alpha + gl.sum(p, 2)
        acc = acc * gl.expand_dims(alpha, 2)
        p = gl.convert_layout(p.to(dot_dtype(V_KIND)), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
        async_copy.wait_group(2 * STAGES - 2)
        if APPEND != "":
            if i == at:
                put_row(ring_v, buffer, key_of_row(row, caches, visits, i, BLOCK_N, SEES), row[1], NW, D)
            at = gl.where(has_row(row, visits, i + STAGES, SEES), i + STAGES, at)
        acc = mma_v2(p, load_v(ring_v, buffer, NW, D, V_KIND, sv_n), acc)
        copy_block(
            caches, visits, i + STAGES, buffer, sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, SEES, PAGE, PDL, FULL
        )  # fmt: skip
        buffer = gl.where(buffer == STAGES - 1, 0, buffer + 1)

    if APPEND != "":
        write_row(row, new, caches, i_seq, i_group, low, sk_n, sv_n, D)
    if not SOFTCAP:
        m = m * factor
    return m, l, slot_order(acc, D, V_KIND)


@gluon.jit
def column_sums(
    queries, mask, caches, visits, low, i_seq, i_group, factor, softcap,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, SEES: gl.constexpr, PAGE: gl.constexpr, PACK: gl.constexpr,
    PER_HEAD: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As way_sums, with the keys of all warps together: (m, l, acc) f32 [16, 1], [16, 1], [16, D].

    Of S = Q K^T a warp has 8 keys of every 8 W, of acc as many columns.
    """
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    MMA: gl.constexpr = column_mma_layout(W)
    FIRST: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    q = gl.allocate_shared_memory(
        dot_dtype(K_KIND), [ROWS, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]),
        load_rows(queries, i_group, D, PACK).to(dot_dtype(K_KIND)),
    ).load(FIRST)  # fmt: skip
    ring_k, ring_v, _, _, _, n_kv = caches
    _, _, _, row0, n_q, _ = queries
    _, _, _, _, high = visits

    row = row0 + axis_index(MMA, 2, 0, ROWS)
    token, slope, p_mask_rows = mask_rows(
        mask, row, i_seq, i_group, n_q, factor, SOFTCAP, SEES, PACK, PER_HEAD
    )  # fmt: skip
    i_key = axis_index(MMA, 2, 1, BLOCK_N)
    m = gl.full([ROWS], NEG_INF, gl.float32, layout=gl.SliceLayout(1, MMA))
    l = lane_sums(gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=MMA))
    acc = gl.full([ROWS, D], 0.0, gl.float32, layout=MMA)
    buffer = 0
    for i in range(low, high):
        zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=MMA)
        # Loaded before the wait for K, so that it takes no time of its own.
        bias = load_bias(zero, p_mask_rows, token < n_q, visits, i, i_key, n_kv, BLOCK_N, SEES)
        async_copy.wait_group(2 * STAGES - 1)
        k = block_rows(ring_k, buffer, BLOCK_N, D).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
        s = mma_v2(q, k, zero)
        s = logits(
            s, bias, mask, p_mask_rows, slope, i, i_key, n_kv, factor, softcap, BLOCK_N, SOFTCAP, SEES
        )  # fmt: skip
        p, m, alpha = softmax_step(s, m, factor, 1, SOFTCAP)
        shrink = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)
        l = l * gl.expand_dims(shrink, 1) + lane_sums(p)
        acc = acc * gl.expand_dims(alpha, 1)
        p = gl.convert_layout(p.to(dot_dtype(V_KIND)), FIRST)
        async_copy.wait_group(2 * STAGES - 2)
        acc = mma_v2(p, block_rows(ring_v, buffer, BLOCK_N, D).load(gl.DotOperandLayout(1, MMA, 2)), acc)
        copy_block(
            caches, visits, i + STAGES, buffer, sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, SEES, PAGE, PDL, "whole"
        )  # fmt: skip
        buffer = gl.where(buffer == STAGES - 1, 0, buffer + 1)

    if not SOFTCAP:
        m = m * factor
    l = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, MMA), assert_trivial=True)
    return gl.expand_dims(m, 1), gl.expand_dims(l, 1), acc


@gluon.jit
def load_rows(queries, i_group, D: gl.constexpr, PACK: gl.constexpr):
    """A tile's rows of Q times sign, f32 [16, D], each thread with four columns side by side; rows past n_q are 0."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    p_q, _, _, _, n_q, sign = queries
    row = axis_index(L, 2, 0, ROWS)
    column = axis_index(L, 2, 1, D)
    token, p_row = query_rows(queries, row, i_group, PACK)
    return gl.load(p_q + p_row + column, mask=(token < n_q) & (column >= 0), other=0.0) * sign


@gluon.jit
def lane_sums(p):
    """Row sums of [16, n] in column_mma_layout as far as a thread has them, so that none waits: [16, 4 W]."""
    W: gl.constexpr = gl.num_warps()
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, p.shape[1] // (8 * W), 4 * W, 2]), 3), 1)
