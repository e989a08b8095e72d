"""Flash attention for Hopper (sm_90) of MLA's shape: rows of K hold 576 numbers, V is the first 512 of each.

A tile is 64 query rows: of one sequence, `pack` heads that share a KV head, the heads of a query next to each other
(problem.py's Tiling). Its f32 output [64, 512] takes half of the register file, so the work on a block of keys is
split by what it is, not by query rows:

    scorer        one warpgroup; S_j = Q K_j^T (both operands in shared memory), the online softmax, P_j in 16 bits
    accumulators  two warpgroups; each O[:, half] += P_j V_j[:, half], 256 columns, P_j and V_j in shared memory
    producer      one warp; K_j by TMA, in five parts: columns 0..127, .., 384..511 (V) and 512..575

A part is freed, and its buffer filled anew, as soon as its last reader is done: each accumulator has two of the parts,
one product each. (One product of 256 columns does not compile: ptxas wants more registers for it than the 128 that 512
threads start with.) While the accumulators multiply with block j, the scorer is at block j + 1.

Why so. A wgmma of [64, 16] x [16, n] takes n / 2 cycles, and reads 2 KB (its left operand, unless in registers) and
32 n bytes of shared memory at 128 bytes a cycle. For 64 rows and 64 keys that is, in cycles,

                                       tensor cores          shared memory, TMA's writes (576) included
    scores once, this form             1152 + 1024 = 2176    1152 + 512 + 256 + 576 + 64 = 2560
    scores by both warpgroups          2304 + 1024 = 3328    2304 + 512 + 576            = 3392
    scores of 32 keys by each          1152 + 1024 = 2176    1728 + 512 + 256 + 576 + 64 = 3136
    two consumers that swap P          1152 + 1024 = 2176    1152 + 512 + 64 + 576 + 64  = 2368

Two consumers, each scoring every other block, need the running maximum from each other on the way, and the registers
of a score tile beside 128 for the output; here one warpgroup owns all of the softmax, and the accumulators get by
without any of it. What both have in common decides the rest: shared memory holds two blocks of 64 keys, so a block's
time in it (arrival, scores, softmax, output, about 4000 cycles) bounds the rate at one block per half of that. Starting
S_{j+1} ahead of the softmax of S_j would keep blocks for longer, which is why the scorer does not. Blocks of 32 keys
are bound by reading Q: 24 cycles of shared memory for 16 of the tensor cores.

Shared out (RANGES, for decode and few tiles): a program has a range of units, as stream_k.py says, and puts its part of
a tile into scratch for fixup.py. Rows past the real ones are padding: they cost shared memory's and the tensor cores'
time (2560 cycles a block), of which there is more than enough while a block takes 5700 cycles to arrive (72 KB, 132
multiprocessors, 3 TB/s). Here nothing is done again by another kernel: keys that the mask hides from all rows are made
0 in shared memory, and maxima are subtracted before they are scaled, as in forward.py.

Units and conventions are half.py's: log2 units, hidden scores -inf, a finite start of the running maximum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.constants import LOG2E, NEG_INF
from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import program_range
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import hide_masked, load_mask_rows
from graphrt.backends.triton.kernels.flash_attn.hopper.queries import fetch_columns, query_layout
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_ring, mma_layout, tile_shared_layout
from graphrt.backends.triton.kernels.flash_attn.hopper.softcap import exactly_capped
from graphrt.backends.triton.kernels.flash_attn.hopper.softmax import (
    NO_MAX,
    natural_lse,
    not_finite,
    row_maximum,
    with_sink,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.work import NUMBERS, Work

PART = gl.constexpr(128)  # columns of V of one product; an accumulator has two
REST = gl.constexpr(64)  # columns of K past those of V, and of a piece of Q
#: The order in which the scorer takes the parts: each accumulator's first one comes before both second ones.
READ_ORDER = gl.constexpr((0, 2, 1, 3))


@aggregate
class Channel:
    """One buffer from the scorer to both accumulators, and the barriers of its messages, counted from 0."""

    buffer: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, buffer, full, empty):
        self.buffer = buffer
        self.full = full
        self.empty = empty

    @gluon.jit
    def wait_empty(self, message):
        """Scorer: wait until both accumulators are done with the message before."""
        mbarrier.wait(self.empty.index(0), (message & 1) ^ 1)

    @gluon.jit
    def publish(self):
        """Scorer: the buffer's new contents are complete (every thread's stores: hence the barrier)."""
        gl.thread_barrier()
        mbarrier.arrive(self.full.index(0), count=1)

    @gluon.jit
    def wait_full(self, message):
        """Accumulator: wait for a message."""
        mbarrier.wait(self.full.index(0), message & 1)

    @gluon.jit
    def release(self):
        """Accumulator: this warpgroup no longer reads the message."""
        mbarrier.arrive(self.empty.index(0), count=1)


@gluon.jit
def make_channel(buffer):
    full = make_barriers(1, 1)
    empty = make_barriers(1, 2)
    return Channel(buffer, full, empty)


@gluon.jit
def produce(p, part_desc, rest_desc, parts, rest):
    """The producer warp: stream the blocks of every tile, the parts in the order in which the scorer takes them."""
    step = 0
    for turn in range(p.rounds()):
        seq, group, qt = p.tile(turn)
        kv_head = group * p.spec.pack // p.gqa
        n_full, n_all, start = p.visits(seq, group, qt)
        low = 0
        high = n_all
        if p.spec.ranges:
            low, high, _whole, _slot = p.segment(turn, n_all)
        block = p.block_ahead(start, low)
        for j in range(low, high):
            row = p.first_row(block)
            block = p.block_ahead(start, j + 1)  # before the waits
            rest.fill(rest_desc, seq, kv_head, row, step + j - low)
            for i in gl.static_range(4):
                parts[READ_ORDER[i]].fill(part_desc, seq, kv_head, row, step + j - low)
        step += high - low
    if p.spec.pdl:
        gdc_launch_dependents()


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
        if p.spec.has_mask:
            seq, group, qt = tile
            mask = load_mask_rows(p, seq, group, qt, block)
    factors.wait_empty(message)  # long since: the accumulators copy them to registers
    s = warpgroup_mma_wait(0, [s])
    rest.release(step)
    if p.spec.ranges:
        return weigh_exactly(p, s, parts, weights, factors, start, block, mask, slope, m, den, step, partial)
    if partial:
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
    if partial:
        s = hide_masked(p, s, mask, block, slope, 1.0 / unit)
    m_new = gl.maximum(m, row_maximum(s))
    decay = gl.exp2((m - m_new) * unit)
    factors.buffer.store(decay)
    factors.publish()
    w = gl.exp2((s - m_new[:, None]) * unit)
    den = den * decay + gl.sum(w, 1)
    if partial and p.spec.has_mask:
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
        token, head = p.rows(group, qt, 64, layout)
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
                p_slot = p.slot_memory(slot) + 4 * PART * 64 + gl.arange(0, 64, layout)
                gl.store(p_slot, gl.where(den == 0.0, NEG_INF, m), mask=token < p.n_q)
                gl.store(p_slot + 64, den, mask=token < p.n_q)
        shrink = gl.full([64], 1.0, gl.float32, layout)
        if p.spec.has_sinks:
            m, den, shrink = with_sink(m, den, gl.load(p.sinks + head) * LOG2E)
        factors.wait_empty(message)
        factors.buffer.store(gl.where(den == 0.0, 0.0, shrink / den))
        factors.publish()
        message += 1
        if p.spec.has_lse:
            at = p.lse + (seq.to(gl.int64) * p.n_q + token) * p.n_head + head
            stored = token < p.n_q
            if p.spec.ranges:
                stored = stored & whole
            gl.store(at, natural_lse(m, den), mask=stored)


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
                store_part(p, acc0, slot, group, qt, 2 * half)
                store_part(p, acc1, slot, group, qt, 2 * half + 1)
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
    token, head = p.rows(group, qt, 64, gl.SliceLayout(1, layout))
    cols = part * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
    stored = token < p.n_q
    values = gl.where((factor == 0.0)[:, None], 0.0, acc * factor[:, None])
    offsets = (token.to(gl.int64) * p.so_t + head.to(gl.int64) * p.so_h) * p.spec.q_vec
    base = p.out + seq.to(gl.int64) * p.so_s * p.spec.q_vec
    gl.store(base + offsets[:, None] + cols[None, :], values, mask=stored[:, None])
    return gl.where(stored & not_finite(values), 1, 0)


@gluon.jit
def store_part(p, acc, slot, group, qt, part: gl.constexpr):
    """Store a quarter of a tile's sums, as they are, into a slot."""
    layout: gl.constexpr = mma_layout(PART)
    token, _head = p.rows(group, qt, 64, gl.SliceLayout(1, layout))
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = part * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
    at = p.slot_memory(slot) + (row * (4 * PART))[:, None] + cols[None, :]
    gl.store(at, acc, mask=(token < p.n_q)[:, None])


@accesses(reads="q part_desc rest_desc mask counts blocks slopes sinks seen unit_start", writes="out bad lse part")
@gluon.jit(do_not_specialize=(*NUMBERS, "programs", "splits", "n_tiles"))
def hopper_mla_attn(
    q, part_desc, rest_desc, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
    sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
    n_seq, n_head, gqa, n_q, n_kv, section, programs, splits, n_tiles, part, seen, unit_start, spec: gl.constexpr,
):  # fmt: skip
    if spec.pdl:
        gdc_wait()
    first_tile = n_tiles
    first_unit = n_tiles
    stop_unit = n_tiles
    turns = n_tiles
    if spec.ranges:
        first_tile, last_tile, first_unit, stop_unit = program_range(
            gl.program_id(0), programs, splits, n_tiles, gl.cdiv(n_kv, spec.block_n), counts, unit_start,
            spec.has_mask, spec.uniform, True,
        )  # fmt: skip
        turns = gl.where(first_unit < stop_unit, last_tile - first_tile + 1, 0)
    p = Work(
        spec, q, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
        sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
        n_seq, n_head, gqa, n_q, n_kv, section, part, seen, unit_start, splits, first_tile, first_unit, stop_unit,
        turns,
    )  # fmt: skip
    dtype: gl.constexpr = part_desc.dtype
    q_pieces = gl.allocate_shared_memory(dtype, [8, 64, REST], tile_shared_layout(dtype, 2))
    q_rest = gl.allocate_shared_memory(dtype, [64, REST], tile_shared_layout(dtype, 2))
    # The last to read the columns of a block frees them: of V's that is their accumulator, because P_j comes after S_j;
    # of the rest it is the scorer.
    part0 = make_ring(dtype, PART, 1, spec, 0)
    part1 = make_ring(dtype, PART, 1, spec, PART)
    part2 = make_ring(dtype, PART, 1, spec, 2 * PART)
    part3 = make_ring(dtype, PART, 1, spec, 3 * PART)
    rest = make_ring(dtype, REST, 1, spec, 4 * PART)
    parts = (part0, part1, part2, part3)
    weights = make_channel(
        gl.allocate_shared_memory(dtype, [64, spec.block_n], tile_shared_layout(dtype, 2, spec.block_n))
    )
    factors = make_channel(gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0])))
    # setmaxnreg moves registers from the producer's warpgroup to the accumulators; the scorer, the default partition,
    # takes what the others leave of the 64 Ki registers: 512 a lane, less 2 * 168 and 24.
    gl.warp_specialize(
        [
            (score, (p, q_pieces, q_rest, parts, rest, weights, factors)),
            (accumulate, (p, (part0, part1), weights, factors, 0)),
            (accumulate, (p, (part2, part3), weights, factors, 1)),
            (produce, (p, part_desc, rest_desc, parts, rest)),
        ],
        [4, 4, 1],
        [168, 168, 24],
    )
