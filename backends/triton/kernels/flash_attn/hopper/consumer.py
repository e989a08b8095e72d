"""The consumer warpgroups of half.py and quant.py: 64 query rows each, against every block that their tile visits.

See half.py's docstring for what they compute in which order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from graphrt.backends.triton.kernels.common.constants import LN2, LOG2E, NEG_INF
from graphrt.backends.triton.kernels.flash_attn.hopper.dropout import dropped, kept_of_queries
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import (
    clear_unseen,
    hide,
    hide_past_end,
    hide_unseen,
    load_mask,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.queries import fetch_queries, row_values, slot_elements
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import mma_layout
from graphrt.backends.triton.kernels.flash_attn.hopper.scored import rows_of_score, weigh_scored
from graphrt.backends.triton.kernels.flash_attn.hopper.softcap import cap_level, capped, capped_scores, capped_weights
from graphrt.backends.triton.kernels.flash_attn.hopper.softmax import (
    NO_MAX,
    natural_lse,
    not_finite,
    row_maximum,
    settle,
    softmax_step,
    with_sink,
)

# Up to this |maximum| in log2 units, half a unit of its last place (3e-5) is nothing beside f16's rounding of a weight.
EXACT_TO = gl.constexpr(512.0)


@gluon.jit
def slope_of(p, group, layout: gl.constexpr):
    """What the mask of a tile is multiplied by in log2 units, and the scores' scale divided by it; with packed heads
    under ALiBi one of each for every row."""
    if p.spec.has_alibi:
        slope = row_values(p, p.slopes, group, layout) * LOG2E
        return slope, p.scale * LOG2E / slope
    else:
        return gl.to_tensor(1.0) * LOG2E, p.scale


@gluon.jit
def weigh(p, s, m, den, mask, block, slope, partial: gl.constexpr):
    """Scores of one block to softmax weights. slope: what slope_of says, and rows_of_score; mask: its values, or what a
    varlen tile sees."""
    slope, ratio, rows = slope
    if p.spec.score is not None:
        weights, decay, m, den = weigh_scored(p, s, m, den, mask, block, slope, rows, partial)
    elif partial and p.spec.varlen and p.spec.has_alibi:
        by_row: gl.constexpr = p.spec.pack > 1
        if p.spec.has_softcap:
            away = slope * LN2
            s = capped_scores(p, s, 0.0, 8)
            s = hide_unseen(p, s, block, mask, away[:, None] if by_row else away)
            weights, decay, m, den = softmax_step(p, s, m, den, LOG2E)
        else:  # in units of the slope
            s = hide_unseen(p, s * (ratio[:, None] if by_row else ratio), block, mask, 1.0)
            weights, decay, m, den = softmax_step(p, s, m, den, slope, by_row)
    elif partial and p.spec.has_mask:
        by_row: gl.constexpr = p.spec.has_alibi and p.spec.pack > 1
        bias = mask.to(gl.float32)
        if p.spec.has_softcap:
            if p.spec.has_alibi:
                bias = bias * ((slope[:, None] if by_row else slope) * LN2)
            # By few at a time, since all of a bias in f32 takes too many registers.
            at_once: gl.constexpr = 4 if p.spec.has_alibi else 16
            s = hide_past_end(p, capped_scores(p, s, bias, at_once), block)
            weights, decay, m, den = softmax_step(p, s, m, den, LOG2E)
        else:
            # In units of the slope, so that scale, mask and maximum take two fused multiply-adds.
            s = hide_past_end(p, s * (ratio[:, None] if by_row else ratio) + bias, block)
            weights, decay, m, den = softmax_step(p, s, m, den, slope, by_row)
    elif p.spec.has_softcap and (partial or p.spec.k_kind != ""):
        s = capped_scores(p, s, 0.0, 8)
        if partial:
            s = hide_unseen(p, s, block, mask, 0.0) if p.spec.varlen else hide(p, s, block)
        weights, decay, m, den = softmax_step(p, s, m, den, LOG2E)
    elif partial:
        s = s * (p.scale * LOG2E)
        s = hide_unseen(p, s, block, mask, 0.0) if p.spec.varlen else hide(p, s, block)
        weights, decay, m, den = softmax_step(p, s, m, den, 1.0)
    elif p.spec.has_softcap:
        # The cap keeps the order, so that the maximum can be found first and is the only one to be capped twice.
        top = row_maximum(s)
        level = cap_level(p, s, m, top, not p.spec.large_cap)
        m_new = gl.maximum(m, capped(p, top, 0.0, level, LOG2E, 2))
        low, high, total = capped_weights(p, s, m_new, level)
        weights = gl.join(low, high).reshape([s.shape[0], s.shape[1]])
        weights = gl.convert_layout(weights, s.type.layout, assert_trivial=True)
        decay = gl.exp2(m - m_new)
        m = m_new
        den = den * decay + gl.convert_layout(gl.sum(total, 1), m.type.layout, assert_trivial=True)
    else:
        # The scale goes into the subtraction of the maximum (one fused multiply-add).
        weights, decay, m, den = softmax_step(p, s, m, den, p.scale * LOG2E)
    return weights, decay, m, den


@gluon.jit
def packed(weights, dtype: gl.constexpr):
    """Softmax weights in 16 bits, neighbouring columns in one int32: what a loop carries as 16-bit numbers would be
    moved from register to register each turn."""
    rows: gl.constexpr = weights.shape[0]
    cols: gl.constexpr = weights.shape[1]
    low, high = weights.reshape([rows, cols // 2, 2]).split()
    source: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if dtype == gl.float16 else "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(source, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_operand(p, pairs, dtype: gl.constexpr):
    """Packed softmax weights as the left operand of the second product; the registers already lie as it wants them."""
    layout: gl.constexpr = gl.DotOperandLayout(0, mma_layout(p.spec.d), 2)
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    weights = gl.join(low, high).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(weights, layout, assert_trivial=True)


@gluon.jit
def rescale(p, acc, decay):
    """Multiply the accumulator's rows."""
    layout: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.d))
    return acc * gl.convert_layout(decay, layout, assert_trivial=True)[:, None]


@gluon.jit
def start_scores(p, queries, k_ring, step):
    """Start S = Q K^T for the step-th block."""
    zero = gl.full([64, p.spec.block_n], 0.0, gl.float32, mma_layout(p.spec.block_n))
    k_ring.wait_full(step)
    return warpgroup_mma(queries, k_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def fetch_mask(p, mask_ring, seq, group, token, block, step, wg: gl.constexpr):
    """[64, block_n] mask values in the scores' registers, for the step-th block of the mask's ring, if there is one."""
    if p.spec.mask_stages == 0:
        return load_mask(p, seq, group, token, block)
    else:
        return mask_ring.read(step, wg)


@gluon.jit
def advance(
    p, rings, tile, slope, acc, pairs, m, den, step, block, before, partial: gl.constexpr, wg: gl.constexpr
):  # fmt: skip
    """One turn of the skewed loop: start S of block `step` and O += P V of the block before, then do the softmax of
    block `step` while the latter runs. Returns the accumulator, the new P, m and l. before: the block before, of a
    varlen tile."""
    queries, k_ring, v_ring, turns, mask_ring = rings
    seq, group, token, taken, mask_step, sight = tile
    if partial and p.spec.varlen:
        clear_values(p, v_ring, step - 1, before, sight)
    if p.spec.pingpong:
        # Warpgroup 0 opens; each later turn is handed on by the neighbour once both of its products are issued.
        first: gl.constexpr = 1 if wg == 0 else 0
        mbarrier.wait(turns.index(wg), (taken & 1) ^ first)
    words = kept_of_queries(p, seq, group, token, block * p.spec.block_n)
    probs = as_operand(p, pairs, queries.dtype)
    scores = start_scores(p, queries, k_ring, step)
    v_ring.wait_full(step - 1)
    acc = warpgroup_mma(probs, v_ring.operand(step - 1), acc, is_async=True)
    if p.spec.pingpong:
        mbarrier.arrive(turns.index((wg + 1) % p.spec.n_wg), count=1)
    mask = sight
    if partial and p.spec.has_mask:
        mask = fetch_mask(p, mask_ring, seq, group, token, block, mask_step, wg)
    scores = warpgroup_mma_wait(1, [scores])
    k_ring.release(step)
    weights, decay, m, den = weigh(p, scores, m, den, mask, block, slope, partial)
    den = settle(den)
    acc, probs = warpgroup_mma_wait(0, [acc, probs])
    if partial and p.spec.mask_stages > 0:
        gl.thread_barrier()
        mask_ring.release(mask_step)
    v_ring.release(step - 1)
    if p.spec.has_dropout:
        weights = dropped(weights, words, p.spec.block_n)
    return rescale(p, acc, decay), packed(weights, queries.dtype), m, den


@gluon.jit
def finish(p, acc, m, den, tile, qt, wg: gl.constexpr):
    """Divide by the denominator (the sink's share included) and store the rows, their LSE and the tile's flag."""
    seq, group, token, taken, mask_step, sight = tile
    head = group * p.spec.pack
    acc_rows: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.d))
    m = gl.convert_layout(m, acc_rows, assert_trivial=True)
    den = gl.convert_layout(den, acc_rows, assert_trivial=True)
    # One multiply-add scales a score and subtracts the maximum; with large ones its rounding shows in the weight of the
    # largest, which should be 1. Such tiles are done again, exactly.
    far = (gl.maximum(m, -m) > EXACT_TO) & (m > NO_MAX)
    factor = gl.full([64], 1.0, gl.float32, acc_rows)
    if p.spec.has_sinks:
        m, den, factor = with_sink(m, den, p.sinks_of(seq, row_values(p, p.sinks, group, acc_rows)) * LOG2E)
    rows = gl.arange(0, 64, acc_rows)
    kind: gl.constexpr = p.spec.v_kind
    cols = slot_elements(gl.arange(0, p.spec.d, gl.SliceLayout(0, mma_layout(p.spec.d))), kind)
    place = rows // p.spec.pack
    lane = rows % p.spec.pack
    stored = token + place < p.n_queries(seq)
    if p.spec.has_dropout:
        factor = factor * p.inverse
    values = gl.where((den == 0.0)[:, None], 0.0, acc * (factor / den)[:, None])
    vec: gl.constexpr = p.spec.q_vec
    base = p.out_of(seq) + (head.to(gl.int64) * p.so_h + token.to(gl.int64) * p.so_t) * vec
    places = place * (p.so_t * vec) + lane * (p.so_h * vec)
    gl.store(base + places[:, None] + cols[None, :], values, mask=stored[:, None])
    if p.spec.has_lse:
        at = p.lse_of(seq) + (token + place).to(gl.int64) * p.n_head + head + lane
        gl.store(at, natural_lse(m, den), mask=stored)
    if p.spec.has_bad:
        spoilt = gl.where(stored & (far | not_finite(values)), 1, 0)
        store_flag(p, gl.max(spoilt, 0), (seq * p.groups() + group) * p.query_tiles() + qt, wg)


@gluon.jit
def store_part(p, acc, m, den, tile, slot, wg: gl.constexpr):
    """Store the rows' sums, maxima and sums of weights into a slot of scratch, for fixup.py."""
    seq, group, token, taken, mask_step, sight = tile
    acc_rows: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.d))
    m = gl.convert_layout(m, acc_rows, assert_trivial=True)
    den = gl.convert_layout(den, acc_rows, assert_trivial=True)
    row = gl.arange(0, 64, acc_rows)
    cols = gl.arange(0, p.spec.d, gl.SliceLayout(0, mma_layout(p.spec.d)))
    stored = token + row // p.spec.pack < p.n_queries(seq)
    p_slot = p.slot_memory(slot, p.spec.d)
    gl.store(p_slot + ((64 * wg + row) * p.spec.d)[:, None] + cols[None, :], acc, mask=stored[:, None])
    p_sums = p_slot + p.spec.block_m * p.spec.d + 64 * wg + row
    gl.store(p_sums, gl.where(den == 0.0, NEG_INF, m), mask=stored)
    gl.store(p_sums + p.spec.block_m, den, mask=stored)


@gluon.jit
def clear_values(p, v_ring, step, block, sight):
    """Of a varlen tile's block: rows of V that no row of the tile sees become 0, see clear_unseen. Each warpgroup does
    so for itself: they write the same."""
    if p.has_unseen(block, sight[0]):
        at_once: gl.constexpr = 16
        v_ring.wait_full(step)
        values = v_ring.operand(step)
        for i in gl.static_range(p.spec.block_n // at_once):
            clear_unseen(p, values.slice(i * at_once, at_once, dim=0), block, sight, i * at_once)
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def store_flag(p, flag, tile, wg: gl.constexpr):
    """Each warpgroup owns a part of the tile's int32, so that neither atomics nor a cleared array are needed."""
    if p.spec.n_wg == 2:
        gl.store(p.bad.to(gl.pointer_type(gl.int16), bitcast=True) + 2 * tile + wg, flag.to(gl.int16))
    elif wg == 0:
        gl.store(p.bad.to(gl.pointer_type(gl.int16), bitcast=True) + 2 * tile, flag.to(gl.int16))
    else:
        gl.store(p.bad.to(gl.pointer_type(gl.int8), bitcast=True) + 4 * tile + wg + 1, flag.to(gl.int8))


@gluon.jit
def consume(p, query_buffers, k_ring, v_ring, turns, wg: gl.constexpr, mask_ring=None):
    """A consumer warpgroup: rows 64 * wg .. 64 * wg + 63 of every tile."""
    dtype: gl.constexpr = query_buffers.dtype
    queries = query_buffers.index(wg)
    rings = (queries, k_ring, v_ring, turns, mask_ring)
    row_layout: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.block_n))
    # The next tile's queries are fetched into registers while the last product of a tile runs, if they fit beside it.
    # (A permuted tile's addresses would take as many again.)
    ahead: gl.constexpr = (
        p.spec.persistent and p.spec.d * (p.spec.n_wg - 1) <= 128 and p.spec.k_kind == "" and not p.spec.ranges
    )
    step = 0
    taken = 0
    mask_step = 0
    rounds = p.rounds()
    if ahead:
        fetched = fetch_queries(p, p.tile(0), wg)
    for turn in range(rounds):
        seq, group, qt = p.tile(turn)
        token = p.first_token(seq, qt, wg)
        if not ahead:
            fetched = fetch_queries(p, (seq, group, qt), wg)
        n_full, n_all, start = p.visits(seq, group, qt)
        sight = 0
        if p.spec.varlen:
            sight = (start, token + gl.arange(0, 64, row_layout) // p.spec.pack)
        slope, ratio = slope_of(p, group, row_layout)
        slope = (slope, ratio, rows_of_score(p, seq, group, token, start, row_layout))

        queries.store(fetched.to(dtype))
        fence_async_shared()
        gl.thread_barrier()

        m = gl.full([64], NO_MAX, gl.float32, row_layout)
        den = gl.full([64], 0.0, gl.float32, row_layout)
        acc = gl.full([64, p.spec.d], 0.0, gl.float32, mma_layout(p.spec.d))
        tile = (seq, group, token, taken, mask_step, sight)
        scores = start_scores(p, queries, k_ring, step)
        scores = warpgroup_mma_wait(0, [scores])
        k_ring.release(step)
        if n_full > 0:
            block = p.block(start, 0) if p.spec.score is not None else 0
            weights, decay, m, den = weigh(p, scores, m, den, 0, block, slope, False)
        else:
            block = p.block(start, 0)
            mask = sight
            if p.spec.has_mask:
                mask = fetch_mask(p, mask_ring, seq, group, token, block, mask_step, wg)
            weights, decay, m, den = weigh(p, scores, m, den, mask, block, slope, True)
            if p.spec.mask_stages > 0:
                den = settle(den)
                gl.thread_barrier()
                mask_ring.release(mask_step)
        if p.spec.has_dropout:
            words = kept_of_queries(p, seq, group, token, p.block(start, 0) * p.spec.block_n)
            weights = dropped(weights, words, p.spec.block_n)
        pairs = packed(weights, dtype)

        for j in range(1, n_full):
            now = (seq, group, token, taken + j - 1, 0, sight)
            block = p.block(start, j) if p.spec.has_dropout or p.spec.score is not None else 0
            acc, pairs, m, den = advance(p, rings, now, slope, acc, pairs, m, den, step + j, block, 0, False, wg)
        for j in range(gl.maximum(n_full, 1), n_all):
            now = (seq, group, token, taken + j - 1, mask_step + j - n_full, sight)
            block = p.block(start, j)
            before = p.block(start, j - 1) if p.spec.varlen else block
            acc, pairs, m, den = advance(p, rings, now, slope, acc, pairs, m, den, step + j, block, before, True, wg)

        if p.spec.varlen:
            clear_values(p, v_ring, step + n_all - 1, p.block(start, n_all - 1), sight)
        probs = as_operand(p, pairs, dtype)
        v_ring.wait_full(step + n_all - 1)
        acc = warpgroup_mma(probs, v_ring.operand(step + n_all - 1), acc, is_async=True)
        if ahead:
            fetched = fetch_queries(p, p.tile(gl.minimum(turn + 1, rounds - 1)), wg)
        acc, probs = warpgroup_mma_wait(0, [acc, probs])
        v_ring.release(step + n_all - 1)
        if p.spec.ranges:
            _low, _high, whole, slot = p.segment(turn, n_all)
            if whole:
                finish(p, acc, m, den, tile, qt, wg)
            else:
                store_part(p, acc, m, den, tile, slot, wg)
        else:
            finish(p, acc, m, den, tile, qt, wg)
        step += n_all
        taken += n_all - 1
        mask_step += n_all - n_full
