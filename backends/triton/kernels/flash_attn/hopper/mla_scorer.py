"""The scorer of mla.py: a tile's queries, the scores of its blocks, the online softmax and its weights."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from graphrt.backends.triton.kernels.common.constants import LOG2E, NEG_INF
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import (
    clear_unseen,
    hide_masked,
    hide_unseen,
    load_mask_rows,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.mla_parts import PART, READ_ORDER, REST
from graphrt.backends.triton.kernels.flash_attn.hopper.queries import fetch_columns, query_layout
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import mma_layout, tile_shared_layout
from graphrt.backends.triton.kernels.flash_attn.hopper.softcap import exactly_capped
from graphrt.backends.triton.kernels.flash_attn.hopper.softmax import NO_MAX, natural_lse, row_maximum, with_sink


@gluon.jit
def fetch_piece(p, seq, group, qt, piece: gl.constexpr):
    """The piece-th 64 columns of a tile's first query rows, f32 [rows, 64]."""
    return fetch_columns(p, seq, group, qt, piece * REST, REST, p.spec.rows)


@gluon.jit
def piece_of(q_pieces, q_rest, piece: gl.constexpr):
    """Where a piece of the queries lies in shared memory."""
    if piece < 8:
        return q_pieces.index(piece)
    else:
        return q_rest


@gluon.jit
def clear_queries(q_pieces, q_rest):
    """The rows that load_queries leaves out."""
    zeros = gl.full([64, REST], 0.0, gl.float32, query_layout(REST)).to(q_rest.dtype)
    for i in gl.static_range(9):
        piece_of(q_pieces, q_rest, i).store(zeros)


@gluon.jit
def load_queries(p, seq, group, qt, q_pieces, q_rest):
    """Queries of a tile to shared memory, 16 bits wide: with one wait for all pieces of few rows, of 64 rows with one
    for every two, since there are no registers for more."""
    at_once: gl.constexpr = 9 if p.spec.rows < 64 else 2
    for first in gl.static_range(0, 9, at_once):
        fetched = ()
        for i in gl.static_range(first, min(first + at_once, 9)):
            fetched = fetched + (fetch_piece(p, seq, group, qt, i),)
        for i in gl.static_range(first, min(first + at_once, 9)):
            rows = piece_of(q_pieces, q_rest, i)
            if p.spec.rows < 64:
                rows = rows.slice(0, p.spec.rows, 0)
            rows.store(fetched[i - first].to(q_rest.dtype))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def clear_hidden(p, columns, bits0, bits1, step):
    """Rows of a block's columns whose bits are not set become 0: 0 times the NaN that they may hold would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    key = gl.arange(0, p.spec.block_n, gl.SliceLayout(1, layout))
    seen = ((gl.where(key < 32, bits0, bits1) >> (key & 31)) & 1) != 0
    tile = columns.operand(step)
    values = tile.load(layout)
    tile.store(gl.where(seen[:, None], values, gl.full_like(values, 0.0)))


@gluon.jit
def multiply_part(q_parts, parts, i: gl.constexpr, s, step):
    """Start adding a part's share of the scores."""
    parts[i].wait_full(step)
    return warpgroup_mma(q_parts.index(i), parts[i].operand(step).permute((1, 0)), s, is_async=True)


@gluon.jit
def start_scores(p, q_parts, q_rest, parts, rest, step):
    """Start S = Q K^T for the step-th block, f32 [64, block_n], part by part as they arrive."""
    s = gl.full([64, p.spec.block_n], 0.0, gl.float32, mma_layout(p.spec.block_n))
    rest.wait_full(step)
    s = warpgroup_mma(q_rest, rest.operand(step).permute((1, 0)), s, use_acc=False, is_async=True)
    for i in gl.static_range(4):
        s = multiply_part(q_parts, parts, READ_ORDER[i], s, step)
    return s


@gluon.jit
def attend(
    p, q_parts, q_rest, parts, rest, weights, factors, tile, start, j, slope, m, den, step, message,
    partial: gl.constexpr,
):  # fmt: skip
    """One block in the scorer: its scores, the factors on what was summed before, its weights. Returns m and den."""
    s = start_scores(p, q_parts, q_rest, parts, rest, step)
    block = 0
    mask = 0
    if partial:
        block = p.block_ahead(start, j)
        seq, group, qt = tile
        if p.spec.has_mask:
            mask = load_mask_rows(p, seq, group, qt, block)
        if p.spec.varlen:
            token, _head = p.rows(seq, group, qt, 64, gl.SliceLayout(1, mma_layout(p.spec.block_n)))
            mask = (start, token)
    factors.wait_empty(message)  # long since: the accumulators copy them to registers
    s = warpgroup_mma_wait(0, [s])
    rest.release(step)
    if p.spec.ranges:
        return weigh_exactly(p, s, parts, weights, factors, start, block, mask, slope, m, den, step, partial)
    if partial and not p.spec.ranges:
        s = hide_masked(p, to_log2_units(p, s), mask, block, slope, 1.0)
        unit = 1.0
    elif p.spec.has_softcap:
        s = exactly_capped(p, s, LOG2E)
        unit = 1.0
    else:
        # The scale goes into the subtraction of the maximum (one fused multiply-add).
        unit = p.scale * LOG2E
    m_new = gl.maximum(m, row_maximum(s) * unit)
    decay = gl.exp2(m - m_new)
    factors.buffer.store(decay)
    if p.spec.early_decay:
        factors.publish()
    w = gl.exp2(s * unit - m_new[:, None])
    den = den * decay + gl.sum(w, 1)
    weights.wait_empty(step)
    weights.buffer.store(w.to(weights.buffer.dtype))
    fence_async_shared()
    weights.publish()
    if not p.spec.early_decay:
        # The barrier in between also covered these stores.
        mbarrier.arrive(factors.full.index(0), count=1)
    return m_new, den


@gluon.jit
def to_log2_units(p, s):
    """Scale (and soft-cap) raw scores, times log2(e)."""
    if p.spec.has_softcap:
        return exactly_capped(p, s, LOG2E)
    return s * (p.scale * LOG2E)


@gluon.jit
def weigh_exactly(p, s, parts, weights, factors, start, block, mask, slope, m, den, step, partial: gl.constexpr):
    """What follows the scores where work is shared out. s and m in units of the scores, as forward.py has them."""
    unit = score_unit(p)
    if p.spec.has_softcap:
        s = exactly_capped(p, s, LOG2E)
    if partial and p.spec.varlen:
        s = hide_unseen(p, s, block, mask, (slope / unit)[:, None] if p.spec.has_alibi else 0.0)
    elif partial:
        s = hide_masked(p, s, mask, block, slope, 1.0 / unit)
    m_new = gl.maximum(m, row_maximum(s))
    decay = gl.exp2((m - m_new) * unit)
    factors.buffer.store(decay)
    factors.publish()
    w = gl.exp2((s - m_new[:, None]) * unit)
    den = den * decay + gl.sum(w, 1)
    if partial and p.spec.varlen:
        for i in gl.static_range(4):
            clear_unseen(p, parts[i].operand(step), block, mask, 0)
    elif partial and p.spec.has_mask:
        words: gl.constexpr = p.spec.block_n // 32
        at = p.seen + (start + block) * words
        bits0 = gl.load(at)
        bits1 = gl.load(at + words - 1)
        if (bits0 & bits1) != -1:
            for i in gl.static_range(4):
                clear_hidden(p, parts[i], bits0, bits1, step)
    weights.wait_empty(step)
    weights.buffer.store(w.to(weights.buffer.dtype))
    fence_async_shared()
    weights.publish()
    return m_new, den


@gluon.jit
def score_unit(p):
    """Log2 units of a score as weigh_exactly has it."""
    if p.spec.has_softcap:
        return 1.0
    return p.scale * LOG2E


@gluon.jit
def score(p, q_pieces, q_rest, parts, rest, weights, factors):
    """The scorer. Of each tile it sends n_all weights, and n_all + 1 factors of rows, the last one for the output."""
    layout: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.block_n))
    # Swizzled rows of 128 bytes lie in panels of 64 columns, one after the other: two pieces are one operand.
    operands: gl.constexpr = tile_shared_layout(q_rest.dtype, 2)
    q_parts = q_pieces._reinterpret(q_rest.dtype, [4, 64, PART], operands)
    step = 0
    message = 0
    if p.spec.rows < 64:
        clear_queries(q_pieces, q_rest)
    for turn in range(p.rounds()):
        seq, group, qt = p.tile(turn)
        n_full, n_all, start = p.visits(seq, group, qt)
        low = 0
        first_partial = n_full
        if p.spec.ranges:
            low, n_all, whole, slot = p.segment(turn, n_all)
            n_full = gl.minimum(n_full, n_all)
            first_partial = gl.maximum(n_full, low)
        token, head = p.rows(seq, group, qt, 64, layout)
        stored = token < p.n_queries(seq)
        slope = 0.0
        if p.spec.has_alibi:
            slope = gl.load(p.slopes + head) * LOG2E
        load_queries(p, seq, group, qt, q_pieces, q_rest)
        m = gl.full([64], NO_MAX, gl.float32, layout)
        den = gl.full([64], 0.0, gl.float32, layout)
        for j in range(low, n_full):
            m, den = attend(
                p, q_parts, q_rest, parts, rest, weights, factors, (seq, group, qt), start, j, slope, m, den,
                step + j - low, message + j - low, False,
            )  # fmt: skip
        for j in range(first_partial, n_all):
            m, den = attend(
                p, q_parts, q_rest, parts, rest, weights, factors, (seq, group, qt), start, j, slope, m, den,
                step + j - low, message + j - low, True,
            )  # fmt: skip
        step += n_all - low
        message += n_all - low

        if p.spec.ranges:
            m = m * score_unit(p)
            if not whole:
                p_slot = p.slot_memory(slot, p.spec.d_v) + 4 * PART * 64 + gl.arange(0, 64, layout)
                gl.store(p_slot, gl.where(den == 0.0, NEG_INF, m), mask=stored)
                gl.store(p_slot + 64, den, mask=stored)
        shrink = gl.full([64], 1.0, gl.float32, layout)
        if p.spec.has_sinks:
            m, den, shrink = with_sink(m, den, p.sinks_of(seq, gl.load(p.sinks + head)) * LOG2E)
        factors.wait_empty(message)
        factors.buffer.store(gl.where(den == 0.0, 0.0, shrink / den))
        factors.publish()
        message += 1
        if p.spec.has_lse:
            at = p.lse_of(seq) + token.to(gl.int64) * p.n_head + head
            if p.spec.ranges:
                stored = stored & whole
            gl.store(at, natural_lse(m, den), mask=stored)
