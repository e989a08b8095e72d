"""Products of 9 to 64 tokens with packed weights in Gluon, from sm_80 on: weights go from memory to mma.sync in order.

out[t, r] = sum over k of x[t, k] W[r, k], as portable.py's `gemm_packed` and rounded as there: weights become f16 once
from scale * code - min, sums are f32. A matrix unit's first operand are 16 rows of weights, its second 8 tokens; lane
4g + c holds of both four elements of k a step, and which those are is free as long as both hold the same. Here lane c
has a whole group of 32 (packing.py) of each 128 elements of k: 16 bytes of 4-bit codes are its operands of 8 steps,
the low nibbles of word i those of one and the high ones of another, and no value changes its lane.

A tile is ROWS rows (of one matrix, or half of them a gate's and half its up's), by WR x WK warps: WK of them share each
step of 128 * WK elements of k, and their sums meet once, at the end, in order. Planes and x are copied to shared memory
by cp.async, some steps ahead, the weights' first steps before what the launch before has made is waited for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.products.gemm_small.layouts import mma_layout
from graphrt.backends.triton.kernels.products.gemm_small.operands import (
    BIAS,
    halves_of,
    keeps_shift,
    load_x,
    operand,
    scales_of,
    step_scales,
)
from graphrt.backends.triton.kernels.products.gemm_small.results import deliver
from graphrt.backends.triton.kernels.products.gemm_small.rings import allocate_planes, allocate_x, copy_weights, copy_x


@gluon.jit
def place_of(i, first, count, turn):
    """The step of k that a tile does as its i-th of `count` from `first` on; past them the one behind the last.

    Tiles begin at steps of their own, `turn`: else all would ask the same few parts of the L2 cache for the same part
    of x at a time.
    """
    j = i + turn
    return first + gl.where(count > i, gl.where(j < count, j, j - count), count)


@gluon.jit
def matrix_of(tile, matrices, ROWS: gl.constexpr, SEGMENTS: gl.constexpr, PAIR: gl.constexpr):
    """(the number of a tile in its matrix, this one's planes, those of its up, out, bias, m). matrices: of each of
    three (planes, out, bias, m); with PAIR the first's up is the second."""
    planes, p_out, p_bias, m = matrices[0]
    planes_up = planes
    if PAIR:
        planes_up, _, _, _ = matrices[1]
    elif SEGMENTS > 1:
        tiles0 = (m + ROWS - 1) // ROWS
        planes1, p_out1, p_bias1, m1 = matrices[1]
        tiles1 = (m1 + ROWS - 1) // ROWS
        if SEGMENTS > 2 and tile >= tiles0 + tiles1:
            tile -= tiles0 + tiles1
            planes, p_out, p_bias, m = matrices[2]
        elif tile >= tiles0:
            tile -= tiles0
            planes, p_out, p_bias, m = planes1, p_out1, p_bias1, m1
        planes_up = planes
    return tile, planes, planes_up, p_out, p_bias, m


@accesses(
    reads=(
        "p_quants0 p_high0 p_scales0 p_supers0 p_bias0 p_quants1 p_high1 p_scales1 p_supers1 p_bias1 "
        "p_quants2 p_high2 p_scales2 p_supers2 p_bias2 p_x p_factors p_residual p_parts p_counter"
    ),
    writes="p_out0 p_out1 p_out2 p_parts p_counter",
    early=(
        "p_quants0 p_high0 p_scales0 p_supers0 p_quants1 p_high1 p_scales1 p_supers1 p_quants2 p_high2 "
        "p_scales2 p_supers2"
    ),
)
@gluon.jit(
    do_not_specialize=["m0", "m1", "m2", "n", "k", "n_splits", "steps_a_split"],
)
def batch_mma(
    p_quants0, p_high0, p_scales0, p_supers0, p_out0, p_bias0, m0,
    p_quants1, p_high1, p_scales1, p_supers1, p_out1, p_bias1, m1,
    p_quants2, p_high2, p_scales2, p_supers2, p_out2, p_bias2, m2,
    p_x, p_factors, p_residual, p_parts, p_counter, n, k, n_splits, steps_a_split,
    KIND: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, WK: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, SEGMENTS: gl.constexpr, GLU: gl.constexpr, SPLIT: gl.constexpr, HAS_FACTORS: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """x: f16 [n, k], k a multiple of 128 (256 where the type has supers); out: f32 [n, m] of each of SEGMENTS matrices
    of one type. Planes: as copy_weights has them, 16-byte aligned (supers 4).

    GLU: its kind: matrices 0 and 1 are a gate and an up, and out0 gets activation(gate) * up; else "". SPLIT: k is in
    n_splits ranges of steps_a_split steps of 128 * WK, a program each; parts: f32 [tiles, n_splits, TOKENS, ROWS];
    counter: int32 [tiles], zeros. factors: f32 [n], of x's rows; bias: f32 [m], of each matrix (no GLU); residual: f32
    [n, m], is added to out (one matrix, no GLU) and may be it. EARLY: steps whose weights are asked for before the
    launch before is done. Programs: tiles * n_splits.
    """
    WR: gl.constexpr = gl.num_warps() // WK
    PAIR: gl.constexpr = GLU != ""
    TILE: gl.constexpr = ROWS // 2 if PAIR else ROWS
    tile = gl.program_id(0)
    i_split = tile * 0
    if SPLIT:
        i_split = tile % n_splits
        tile = tile // n_splits
    matrices = (
        ((p_quants0, p_high0, p_scales0, p_supers0), p_out0, p_bias0, m0),
        ((p_quants1, p_high1, p_scales1, p_supers1), p_out1, p_bias1, m1),
        ((p_quants2, p_high2, p_scales2, p_supers2), p_out2, p_bias2, m2),
    )
    i_tile = tile
    tile, planes, planes_up, p_out, p_bias, m = matrix_of(tile, matrices, ROWS, SEGMENTS, PAIR)
    first_row = tile * TILE
    left = m - first_row
    n_q = k // 128
    first = i_split * steps_a_split
    last = gl.minimum(first + steps_a_split, (n_q + WK - 1) // WK)
    q_end = gl.minimum(last * WK, n_q)

    rings = allocate_planes(KIND, ROWS, WK, STAGES)
    x_rings = allocate_x(TOKENS, WK, STAGES)
    count = last - first
    turn = i_tile % count
    for i in gl.static_range(EARLY):
        step = place_of(i, first, count, turn)
        copy_weights(rings, planes, planes_up, i, step, k, first_row, left, q_end, KIND, ROWS, WK, PAIR)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in gl.static_range(STAGES - 1):
        step = place_of(i, first, count, turn)
        if i >= EARLY:
            copy_weights(rings, planes, planes_up, i, step, k, first_row, left, q_end, KIND, ROWS, WK, PAIR)
        copy_x(x_rings, p_x, i, step, k, n, q_end, TOKENS, WK)
        async_copy.commit_group()

    acc = gl.full([WK, ROWS, TOKENS], 0.0, gl.float32, layout=mma_layout(WK, WR))
    slot = 0
    free = STAGES - 1
    for i in range(0, count):
        async_copy.wait_group(STAGES - 2)
        ahead = place_of(i + (STAGES - 1), first, count, turn)
        copy_weights(rings, planes, planes_up, free, ahead, k, first_row, left, q_end, KIND, ROWS, WK, PAIR)
        copy_x(x_rings, p_x, free, ahead, k, n, q_end, TOKENS, WK)
        async_copy.commit_group()
        step = place_of(i, first, count, turn)
        low, top = halves_of(rings, slot, KIND, WR, False)
        scales, supers = step_scales(rings, slot, step, first_row, left, k, KIND, WR, PAIR)
        s0, a0, s1, a1 = scales_of(scales, supers, KIND, BIAS)
        acc = mma_v2(operand(low, s0, a0, KIND, False, WR), load_x(x_rings[0], slot, TOKENS, WK, WR), acc)
        acc = mma_v2(operand(top, s1, a1, KIND, keeps_shift(KIND), WR), load_x(x_rings[1], slot, TOKENS, WK, WR), acc)
        free = slot
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    deliver(
        acc, p_out, p_factors, p_bias, p_residual, p_parts, p_counter, first_row, m, n, i_tile, i_split, n_splits,
        GLU, SPLIT, HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
