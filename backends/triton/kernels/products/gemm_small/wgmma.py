"""mma.py's products on Hopper (sm_90), with warps of their own for copies: weights go from memory to wgmma.

A tile is 64 rows for each of some warpgroups (with a gate 32 rows of it and the same 32 of its up), which dequantize
their weights into registers, the first operand of wgmma; x in shared memory is the second one and serves all of them.
Four more warps, the producer, copy planes by cp.async into one ring of buffers and x by TMA into another. A buffer of
planes holds a chunk of some steps of 128 elements of k, since memory is slow where few bytes of a row are asked for at
a time. Of each buffer a barrier says that it is full. Another one of each buffer of x says that its step has been read:
its x may be written over and, when the step is the last of a chunk, the chunk's planes.

What a lane holds of k is free (mma.py), but wgmma reads x from shared memory itself. So x comes in the order of
f16_pairs(): the bits c1 c0 h i1 i0 b1 b0 of an element's place in 128 (group, half, word, byte) become h i1 i0 b0 c1
c0 b1.

While a half step's product runs, the next one is dequantized: two are under way at a time, each with its own registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.kinds import has_plain_nibbles
from graphrt.backends.triton.kernels.products.gemm_small.mma import matrix_of, place_of
from graphrt.backends.triton.kernels.products.gemm_small.operands import halves_of, paired_scales_of, step_scales
from graphrt.backends.triton.kernels.products.gemm_small.pairs import f16_pairs
from graphrt.backends.triton.kernels.products.gemm_small.results import hand_over, hand_over_shares
from graphrt.backends.triton.kernels.products.gemm_small.rings import allocate_planes, copy_weights, steps_of

#: Rows of a warpgroup.
ROWS = gl.constexpr(64)


@dataclass(frozen=True)
class Shape:
    """Compile-time choices of a kernel whose warpgroups multiply what a producer's warps copy.

    tokens: of a tile; warpgroups: 1 to 4, beside the producer; chunk: steps of a buffer of planes or codes; stages:
    such buffers; x_stages: buffers of a step's x; glu: a gate's kind, or ""; registers: of a thread of a second
    warpgroup and of the producer.
    """

    kind: str
    tokens: int
    warpgroups: int
    chunk: int
    stages: int
    x_stages: int
    glu: str
    pdl: bool
    registers: tuple[int, int]

    @property
    def pair(self) -> bool:
        return self.glu != ""

    @property
    def tile(self) -> int:
        """Rows of a matrix that a warpgroup has."""
        return 32 if self.pair else 64


@dataclass(frozen=True)
class Form(Shape):
    """batch_wgmma's choices. tokens: a power of two, 16 to 256; segments: matrices; shares: of a split, see
    results.py."""

    segments: int
    split: bool
    shares: bool
    has_factors: bool
    has_bias: bool
    has_residual: bool


@gluon.constexpr_function
def sums_layout(tokens):
    """A warpgroup's sums [ROWS, tokens]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.constexpr_function
def x_shared():
    """Shared memory of half a step's x [tokens, 64] as wgmma reads it."""
    return gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def rows_of(first_row, m, wg: gl.constexpr, form: gl.constexpr):
    """(the first of the rows that a warpgroup reads, how many there are from there on): one at least."""
    row = gl.minimum(first_row + wg * form.tile, m - 1)
    return row, m - row


@gluon.jit
def copy_chunk(rings, full, planes, planes_up, i, chunk, k, first_row, m, form: gl.constexpr):
    """Starts the copies of a chunk's planes for all warpgroups. What is past the last step of k becomes 0."""
    KIND: gl.constexpr = form.kind
    WARPGROUPS: gl.constexpr = form.warpgroups
    slot = i % form.stages
    for wg in gl.static_range(WARPGROUPS):
        row, left = rows_of(first_row, m, wg, form)
        place = slot * form.warpgroups + wg
        copy_weights(rings, planes, planes_up, place, chunk, k, row, left, k // 128, KIND, ROWS, form.chunk, form.pair)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def copy_x(x_ring, full, empty, x_desc, i, row, step, form: gl.constexpr):
    """Starts the copies of a step of x, the i-th of all, from a row on, once its buffer is free. What is past x's rows
    and k becomes 0."""
    slot = i % form.x_stages
    # A fresh barrier counts as having completed the phase before its first, so the first round does not wait.
    mbarrier.wait(empty.index(slot), ((i // form.x_stages) & 1) ^ 1)
    mbarrier.expect(full.index(slot), 2 * x_desc.block_type.nbytes)
    for half in gl.static_range(2):
        place = [row, step * 128 + half * 64]
        tma.async_copy_global_to_shared(x_desc, place, full.index(slot), x_ring.index(slot * 2 + half))


@gluon.jit
def produce(copies, form: gl.constexpr):
    """The producer: copies each chunk's planes, for each warpgroup, and each step's x."""
    rings, x_ring, barriers, planes, planes_up, x_desc, first_row, m, k, first, count, turn = copies
    full, x_full, x_empty = barriers
    AHEAD: gl.constexpr = form.stages - 1
    for i in gl.static_range(AHEAD):  # what the launch before makes is not among the weights
        copy_chunk(rings, full, planes, planes_up, i, place_of(i, first, count, turn), k, first_row, m, form)
    if form.pdl:
        gdc_wait()
        gdc_launch_dependents()
    # A chunk's planes take the place of those of the chunk before this one, which is given back only when this one's
    # first step has been read. So x comes first, as far ahead as its own buffers allow.
    turn_of_planes: gl.constexpr = min(form.x_stages, form.chunk) - 1
    for i in range(count * form.chunk):
        chunk = i // form.chunk
        step = place_of(chunk, first, count, turn) * form.chunk + i % form.chunk
        copy_x(x_ring, x_full, x_empty, x_desc, i, 0, step, form)
        if i % form.chunk == turn_of_planes:
            ahead = chunk + AHEAD
            if ahead < count:
                # With as many buffers of x as that, the copy of x above has waited for the same step.
                if turn_of_planes + 1 < form.x_stages:
                    last = gl.maximum(chunk * form.chunk - 1, 0)
                    mbarrier.wait(x_empty.index(last % form.x_stages), (last // form.x_stages) & 1, pred=chunk > 0)
                copy_chunk(
                    rings, full, planes, planes_up, ahead, place_of(ahead, first, count, turn), k, first_row, m, form
                )
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def half_product(codes, scale, add, x_ring, i, acc, SHIFTED: gl.constexpr, form: gl.constexpr):
    """Starts the product of half a step: (the sums, the weights, which must keep their registers until it is done)."""
    KIND: gl.constexpr = form.kind
    w = gl.reshape(f16_pairs(codes, scale, add, KIND, SHIFTED), [ROWS, 64])
    w = gl.convert_layout(w, gl.DotOperandLayout(0, sums_layout(form.tokens), 2), assert_trivial=True)
    return warpgroup_mma(w, x_ring.index(i).permute((1, 0)), acc, is_async=True), w


@gluon.jit
def read_step(steps, barriers, i, chunk, row, left, k, wg: gl.constexpr, form: gl.constexpr):
    """(codes of the first and of the second halves of groups, scale and add of either) of the i-th step, in `chunk`."""
    KIND: gl.constexpr = form.kind
    full, x_full, x_empty = barriers
    i_chunk = i // form.chunk
    slot = i_chunk % form.stages
    mbarrier.wait(full.index(slot), (i_chunk // form.stages) & 1)
    place = (slot * form.warpgroups + wg) * form.chunk + i % form.chunk
    low, top = halves_of(steps, place, KIND, 4, True)
    step = chunk * form.chunk + i % form.chunk
    scales, supers = step_scales(steps, place, step, row, left, k, KIND, 4, form.pair)
    s0, a0, s1, a1 = paired_scales_of(scales, supers, KIND)
    mbarrier.wait(x_full.index(i % form.x_stages), (i // form.x_stages) & 1)
    return low, top, s0, a0, s1, a1


@gluon.jit
def release(barriers, i, form: gl.constexpr):
    """This warpgroup is done with the i-th step."""
    full, x_full, x_empty = barriers
    gl.thread_barrier()
    mbarrier.arrive(x_empty.index(i % form.x_stages), count=1)


@gluon.jit
def consume(
    rings, x_ring, barriers, pointers, work, wg: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its rows' sums over all steps, then out."""
    p_out, p_factors, p_bias, p_residual, p_parts, p_counter = pointers
    first_row, m, n, k, first, count, turn, i_tile, i_split, n_splits = work
    KIND: gl.constexpr = form.kind
    GLU: gl.constexpr = form.glu
    keep: gl.constexpr = has_plain_nibbles(form.kind)
    steps = steps_of(rings, KIND)
    row, left = rows_of(first_row, m, wg, form)
    acc = warpgroup_mma_init(gl.full([ROWS, form.tokens], 0.0, gl.float32, sums_layout(form.tokens)))
    low, top, s0, a0, s1, a1 = read_step(steps, barriers, 0, place_of(0, first, count, turn), row, left, k, wg, form)
    acc, w0 = half_product(low, s0, a0, x_ring, 0, acc, False, form)
    acc, w1 = half_product(top, s1, a1, x_ring, 1, acc, keep, form)
    for i in range(1, count * form.chunk):
        chunk = place_of(i // form.chunk, first, count, turn)
        low, top, s0, a0, s1, a1 = read_step(steps, barriers, i, chunk, row, left, k, wg, form)
        w0 = warpgroup_mma_wait(1, [w0])
        slot = i % form.x_stages
        acc, w0 = half_product(low, s0, a0, x_ring, slot * 2, acc, False, form)
        w1 = warpgroup_mma_wait(1, [w1])
        release(barriers, i - 1, form)
        acc, w1 = half_product(top, s1, a1, x_ring, slot * 2 + 1, acc, keep, form)
    sums, w0, w1 = warpgroup_mma_wait(0, [acc, w0, w1])
    if form.pdl:
        gdc_wait()
    row = first_row + wg * form.tile
    part = i_tile * form.warpgroups + wg
    if form.shares:
        hand_over_shares(
            sums, p_out, p_factors, p_bias, p_residual, p_parts, p_counter, row, m, n, part, i_split, n_splits, GLU,
            form.has_factors, form.has_bias, form.has_residual,
        )  # fmt: skip
    else:
        hand_over(
            sums, p_out, p_factors, p_bias, p_residual, p_parts, p_counter, row, m, n, part, i_split, n_splits, GLU,
            form.split, form.has_factors, form.has_bias, form.has_residual,
        )  # fmt: skip


@accesses(
    reads=(
        "p_quants0 p_high0 p_scales0 p_supers0 p_bias0 p_quants1 p_high1 p_scales1 p_supers1 p_bias1 "
        "p_quants2 p_high2 p_scales2 p_supers2 p_bias2 x_desc p_factors p_residual p_parts p_counter"
    ),
    writes="p_out0 p_out1 p_out2 p_parts p_counter",
    early=(
        "p_quants0 p_high0 p_scales0 p_supers0 p_quants1 p_high1 p_scales1 p_supers1 p_quants2 p_high2 "
        "p_scales2 p_supers2"
    ),
)
@gluon.jit(do_not_specialize=("m0", "m1", "m2", "n", "k", "n_splits", "steps_a_split"))
def batch_wgmma(
    p_quants0, p_high0, p_scales0, p_supers0, p_out0, p_bias0, m0,
    p_quants1, p_high1, p_scales1, p_supers1, p_out1, p_bias1, m1,
    p_quants2, p_high2, p_scales2, p_supers2, p_out2, p_bias2, m2,
    x_desc, p_factors, p_residual, p_parts, p_counter, n, k, n_splits, steps_a_split, form: gl.constexpr,
):  # fmt: skip
    """batch_mma's arguments, but: x_desc of x f16 [n, k] in the order above, in blocks [tokens, 64]; steps_a_split in
    chunks; parts: f32 [tiles, warpgroups, n_splits, tokens, ROWS]; counter: int32 zeros,
    one for each tile and warpgroup, two with shares. Four warps at launch.
    """
    tile = gl.program_id(0)
    i_split = tile * 0
    if form.split:
        i_split = tile % n_splits
        tile = tile // n_splits
    matrices = (
        ((p_quants0, p_high0, p_scales0, p_supers0), p_out0, p_bias0, m0),
        ((p_quants1, p_high1, p_scales1, p_supers1), p_out1, p_bias1, m1),
        ((p_quants2, p_high2, p_scales2, p_supers2), p_out2, p_bias2, m2),
    )
    i_tile = tile
    TILE: gl.constexpr = form.tile * form.warpgroups
    tile, planes, planes_up, p_out, p_bias, m = matrix_of(tile, matrices, TILE, form.segments, form.pair)
    first_row = tile * TILE
    first = i_split * steps_a_split
    count = gl.minimum(first + steps_a_split, gl.cdiv(k, 128 * form.chunk)) - first
    turn = i_tile % count

    KIND: gl.constexpr = form.kind
    rings = allocate_planes(KIND, ROWS, form.chunk, form.stages * form.warpgroups)
    x_ring = gl.allocate_shared_memory(gl.float16, [form.x_stages * 2, form.tokens, 64], x_shared())
    full = make_barriers(form.stages, 128)
    x_full = make_barriers(form.x_stages, 1)
    x_empty = make_barriers(form.x_stages, form.warpgroups)
    barriers = (full, x_full, x_empty)
    pointers = (p_out, p_factors, p_bias, p_residual, p_parts, p_counter)
    work = (first_row, m, n, k, first, count, turn, i_tile, i_split, n_splits)
    copies = (rings, x_ring, barriers, planes, planes_up, x_desc, first_row, m, k, first, count, turn)
    if form.warpgroups == 1:
        gl.warp_specialize(
            [(consume, (rings, x_ring, barriers, pointers, work, 0, form)), (produce, (copies, form))],
            [4],
            [form.registers[1]],
        )
    elif form.warpgroups == 2:
        gl.warp_specialize(
            [
                (consume, (rings, x_ring, barriers, pointers, work, 0, form)),
                (consume, (rings, x_ring, barriers, pointers, work, 1, form)),
                (produce, (copies, form)),
            ],
            [4, 4],
            [form.registers[0], form.registers[1]],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (rings, x_ring, barriers, pointers, work, 0, form)),
                (consume, (rings, x_ring, barriers, pointers, work, 1, form)),
                (consume, (rings, x_ring, barriers, pointers, work, 2, form)),
                (consume, (rings, x_ring, barriers, pointers, work, 3, form)),
                (produce, (copies, form)),
            ],
            [4, 4, 4, 4],
            [form.registers[0], form.registers[0], form.registers[0], form.registers[1]],
        )
