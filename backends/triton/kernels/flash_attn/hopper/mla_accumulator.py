"""The accumulators of mla.py: each sums half of the columns of V, times the scorer's weights, and stores them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from graphrt.backends.triton.kernels.flash_attn.hopper.mla_parts import PART
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import mma_layout
from graphrt.backends.triton.kernels.flash_attn.hopper.softmax import not_finite


@gluon.jit
def accumulate(p, parts, weights, factors, half: gl.constexpr):
    """An accumulator: columns 256 * half .. 256 * half + 255 of the output, from two parts of V with those columns."""
    rows: gl.constexpr = gl.SliceLayout(1, mma_layout(PART))
    first, second = parts
    step = 0
    message = 0
    for turn in range(p.rounds()):
        seq, group, qt = p.tile(turn)
        n_full, n_all, start = p.visits(seq, group, qt)
        low = 0
        if p.spec.ranges:
            low, n_all, whole, slot = p.segment(turn, n_all)
        acc0 = gl.full([64, PART], 0.0, gl.float32, mma_layout(PART))
        acc1 = gl.full([64, PART], 0.0, gl.float32, mma_layout(PART))
        for j in range(low, n_all):
            factors.wait_full(message + j - low)
            decay = factors.buffer.load(rows)
            gl.thread_barrier()
            factors.release()
            acc0 = acc0 * decay[:, None]
            acc1 = acc1 * decay[:, None]
            weights.wait_full(step + j - low)
            first.wait_full(step + j - low)
            acc0 = warpgroup_mma(weights.buffer, first.operand(step + j - low), acc0, is_async=True)
            second.wait_full(step + j - low)
            acc1 = warpgroup_mma(weights.buffer, second.operand(step + j - low), acc1, is_async=True)
            acc0 = warpgroup_mma_wait(1, [acc0])
            gl.thread_barrier()
            first.release(step + j - low)
            acc1 = warpgroup_mma_wait(0, [acc1])
            gl.thread_barrier()
            weights.release()
            second.release(step + j - low)
        factors.wait_full(message + n_all - low)
        factor = factors.buffer.load(rows)
        gl.thread_barrier()
        factors.release()
        if p.spec.ranges:
            if whole:
                finish(p, acc0, factor, seq, group, qt, 2 * half)
                finish(p, acc1, factor, seq, group, qt, 2 * half + 1)
            else:
                store_part(p, acc0, slot, seq, group, qt, 2 * half)
                store_part(p, acc1, slot, seq, group, qt, 2 * half + 1)
        else:
            bad = finish(p, acc0, factor, seq, group, qt, 2 * half)
            bad = gl.maximum(bad, finish(p, acc1, factor, seq, group, qt, 2 * half + 1))
        if p.spec.has_bad:
            # Each accumulator owns half of the tile's int32, so that neither atomics nor a cleared array are needed.
            tile = (seq * p.groups() + group) * p.query_tiles() + qt
            flags = p.bad.to(gl.pointer_type(gl.int16), bitcast=True)
            gl.store(flags + 2 * tile + half, gl.max(bad, 0).to(gl.int16))
        step += n_all - low
        message += n_all - low + 1


@gluon.jit
def finish(p, acc, factor, seq, group, qt, part: gl.constexpr):
    """Store a quarter of a tile, times each row's factor (0: a row without keys). Returns int32 [64], 1 for each row
    that holds NaN or infinity."""
    layout: gl.constexpr = mma_layout(PART)
    token, head = p.rows(seq, group, qt, 64, gl.SliceLayout(1, layout))
    cols = part * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
    stored = token < p.n_queries(seq)
    values = gl.where((factor == 0.0)[:, None], 0.0, acc * factor[:, None])
    offsets = (token.to(gl.int64) * p.so_t + head.to(gl.int64) * p.so_h) * p.spec.q_vec
    gl.store(p.out_of(seq) + offsets[:, None] + cols[None, :], values, mask=stored[:, None])
    return gl.where(stored & not_finite(values), 1, 0)


@gluon.jit
def store_part(p, acc, slot, seq, group, qt, part: gl.constexpr):
    """Store a quarter of a tile's sums, as they are, into a slot."""
    layout: gl.constexpr = mma_layout(PART)
    token, _head = p.rows(seq, group, qt, 64, gl.SliceLayout(1, layout))
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = part * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
    at = p.slot_memory(slot, p.spec.d_v) + (row * (4 * PART))[:, None] + cols[None, :]
    gl.store(at, acc, mask=(token < p.n_queries(seq))[:, None])
