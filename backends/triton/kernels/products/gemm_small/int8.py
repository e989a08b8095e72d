"""Products of 2 to 16 tokens with packed weights in Gluon, from sm_80 on: codes are multiplied as integers by mma.sync.

out[t, r] = sum over groups of 32 of d_t d_r (sum of x codes) - s_t min_r, x being Q8Rows (activations.py), rounded as
gemv_packed.py's is: the sums of integers are exact, all else is f32. So a weight costs what takes its nibble out of a
word, and a share of what scales a group's sum; nothing becomes f16.

Tiles, warps, splits of k and copies are as in mma.py; where lanes have what is in int8_layouts.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_bits import f16_low
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.kinds import has_half_scales, has_min, has_supers
from graphrt.backends.triton.kernels.products.gemm_small.int8_layouts import (
    unit_layout,
    x_numbers_layout,
    x_words_layout,
)
from graphrt.backends.triton.kernels.products.gemm_small.int8_operands import (
    bare_scales,
    group_sums,
    half_group_sums,
    int8_halves,
    raised,
    rows_apart,
    scales_apart,
    supers_apart,
    tokens_apart,
    x_halves,
)
from graphrt.backends.triton.kernels.products.gemm_small.layouts import (
    pieces_copy,
    rows_copy,
    rows_shared,
    turned_shared,
)
from graphrt.backends.triton.kernels.products.gemm_small.mma import matrix_of, place_of
from graphrt.backends.triton.kernels.products.gemm_small.operands import step_scales
from graphrt.backends.triton.kernels.products.gemm_small.results import deliver
from graphrt.backends.triton.kernels.products.gemm_small.rings import allocate_planes, copy_weights


@gluon.jit
def allocate_x(
    TOKENS: gl.constexpr, WK: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """Rings of x's words, of its second part's, of d and of s; the first stand for what isn't wanted."""
    L: gl.constexpr = turned_shared(WK, TOKENS, 8)
    first = gl.allocate_shared_memory(gl.int32, [STAGES, WK, TOKENS, 4, 8], L)
    second = first
    if PARTS == 2:
        second = gl.allocate_shared_memory(gl.int32, [STAGES, WK, TOKENS, 4, 8], L)
    d = gl.allocate_shared_memory(gl.float32, [STAGES, WK, TOKENS, 4], rows_shared([WK, TOKENS, 4]))
    s = d
    if SUMS:
        s = gl.allocate_shared_memory(gl.float32, [STAGES, WK, TOKENS, 8], rows_shared([WK, TOKENS, 8]))
    return first, second, d, s


@gluon.jit
def _copy_numbers(ring, p, slot, step, k, n, q_end, V: gl.constexpr, TOKENS: gl.constexpr, WK: gl.constexpr):
    """Starts the copies of a step's V numbers of every 128 elements."""
    L: gl.constexpr = rows_copy([WK, TOKENS, V], 4, gl.num_warps())
    q = step * WK + axis_index(L, 3, 0, WK)
    token = gl.minimum(axis_index(L, 3, 1, TOKENS), n - 1)
    at = (token * (k // 128) + q) * V + axis_index(L, 3, 2, V)
    async_copy.async_copy_global_to_shared(ring.index(slot), p + at, q < q_end)


@gluon.jit
def copy_x(
    rings, p_q, p_d, p_s, slot, step, k, n, q_end,
    TOKENS: gl.constexpr, WK: gl.constexpr, PARTS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a step's x. What is past q_end (in 128 elements of k) becomes 0."""
    first, second, d, s = rings
    L: gl.constexpr = pieces_copy(WK, TOKENS, 8, 4, gl.num_warps())
    q = step * WK + axis_index(L, 4, 0, WK)
    token = gl.minimum(axis_index(L, 4, 1, TOKENS), n - 1)
    at = ((token * (k // 128) + q) * 4 + axis_index(L, 4, 2, 4)) * 8 + axis_index(L, 4, 3, 8)
    async_copy.async_copy_global_to_shared(first.index(slot), p_q + at, q < q_end)
    if PARTS == 2:
        async_copy.async_copy_global_to_shared(second.index(slot), p_q + (at + n * (k // 128 * 32)), q < q_end)
    _copy_numbers(d, p_d, slot, step, k, n, q_end, 4, TOKENS, WK)
    if SUMS:
        _copy_numbers(s, p_s, slot, step, k, n, q_end, 8, TOKENS, WK)


@gluon.jit
def add_step(
    acc, rings, x_rings, slot, step, first_row, left, k,
    KIND: gl.constexpr, WR: gl.constexpr, PAIR: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """acc, four f32 [WK, M, N, 8, 4], rows g and g + 8 by tokens 2t and 2t + 1, and a step's products."""
    xq, xq2, xd, xs = x_rings
    WK: gl.constexpr = xq.shape[1]
    TOKENS: gl.constexpr = xq.shape[2]
    M: gl.constexpr = rings[0].shape[2] // 16
    N: gl.constexpr = TOKENS // 8
    low, top = int8_halves(rings, slot, KIND, WR)
    a0, a1 = rows_apart(low, WR, N)
    a2, a3 = rows_apart(top, WR, N)
    b0, b1 = x_halves(xq.index(slot).load(x_words_layout(WK, WR, TOKENS)), WR, M)
    c0, c1 = b0, b1
    if PARTS == 2:
        c0, c1 = x_halves(xq2.index(slot).load(x_words_layout(WK, WR, TOKENS)), WR, M)
    scales, supers = step_scales(rings, slot, step, first_row, left, k, KIND, WR, PAIR, True)
    scale, scale1, off = bare_scales(scales, KIND)
    s0, s8 = scales_apart(scale, WR, N)
    d0, d1 = tokens_apart(xd.index(slot).load(x_numbers_layout(WK, WR, TOKENS, 1)), WR, M)
    if has_half_scales(KIND):
        t0, t8 = scales_apart(scale1, WR, N)
        l00, l01, l80, l81 = half_group_sums(a0, a1, b0, c0, PARTS)
        h00, h01, h80, h81 = half_group_sums(a2, a3, b1, c1, PARTS)
        y00 = gl.sum((l00 * s0 + h00 * t0) * d0, 3)
        y01 = gl.sum((l01 * s0 + h01 * t0) * d1, 3)
        y80 = gl.sum((l80 * s8 + h80 * t8) * d0, 3)
        y81 = gl.sum((l81 * s8 + h81 * t8) * d1, 3)
    else:
        y00, y01, y80, y81 = group_sums(a0, a1, a2, a3, b0, b1, c0, c1, PARTS)
        y00 = gl.sum(y00 * (s0 * d0), 3)
        y01 = gl.sum(y01 * (s0 * d1), 3)
        y80 = gl.sum(y80 * (s8 * d0), 3)
        y81 = gl.sum(y81 * (s8 * d1), 3)
    acc = _with(acc, (y00, y01, y80, y81), supers, 0, 0.5 ** raised(KIND), KIND, WR)
    if has_min(KIND):
        half, other = gl.split(gl.reshape(xs.index(slot).load(x_numbers_layout(WK, WR, TOKENS, 2)), [WK, TOKENS, 4, 2]))
        m0, m1 = tokens_apart(half + other, WR, M)
        o0, o8 = scales_apart(off, WR, N)
        less = (gl.sum(o0 * m0, 3), gl.sum(o0 * m1, 3), gl.sum(o8 * m0, 3), gl.sum(o8 * m1, 3))
        acc = _with(acc, less, supers, 16, -1.0, KIND, WR)
    return acc


@gluon.jit
def _with(acc, y, supers, AT: gl.constexpr, FACTOR: gl.constexpr, KIND: gl.constexpr, WR: gl.constexpr):
    """acc and a step's sums, times the f16 at bit AT of the rows' supers and a factor, or -1 where there are none."""
    M: gl.constexpr = acc[0].shape[1]
    N: gl.constexpr = acc[0].shape[2]
    if has_supers(KIND):
        f0, f8 = supers_apart(f16_low(supers >> AT).to(gl.float32) * FACTOR, WR, M, N)
        return acc[0] + y[0] * f0, acc[1] + y[1] * f0, acc[2] + y[2] * f8, acc[3] + y[3] * f8
    elif AT == 0:
        return acc[0] + y[0], acc[1] + y[1], acc[2] + y[2], acc[3] + y[3]
    else:
        return acc[0] - y[0], acc[1] - y[1], acc[2] - y[2], acc[3] - y[3]


@gluon.jit
def tile_sums(acc):
    """add_step()'s sums as [WK, ROWS, TOKENS]."""
    WK: gl.constexpr = acc[0].shape[0]
    ROWS: gl.constexpr = acc[0].shape[1] * 16
    TOKENS: gl.constexpr = acc[0].shape[2] * 8
    both = gl.join(gl.join(acc[0], acc[1]), gl.join(acc[2], acc[3]))  # [WK, M, N, 8, 4, token % 2, row / 8]
    return gl.reshape(gl.permute(both, (0, 1, 6, 3, 2, 4, 5)), [WK, ROWS, TOKENS])


@accesses(
    reads=(
        "p_quants0 p_high0 p_scales0 p_supers0 p_bias0 p_quants1 p_high1 p_scales1 p_supers1 p_bias1 "
        "p_quants2 p_high2 p_scales2 p_supers2 p_bias2 p_q p_d p_s p_residual p_parts p_counter"
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
def batch_int8(
    p_quants0, p_high0, p_scales0, p_supers0, p_out0, p_bias0, m0,
    p_quants1, p_high1, p_scales1, p_supers1, p_out1, p_bias1, m1,
    p_quants2, p_high2, p_scales2, p_supers2, p_out2, p_bias2, m2,
    p_q, p_d, p_s, p_residual, p_parts, p_counter, n, k, n_splits, steps_a_split,
    KIND: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, PARTS: gl.constexpr, WK: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, SEGMENTS: gl.constexpr, GLU: gl.constexpr, SPLIT: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """q (as int32 words), d, s: Q8Rows of n tokens in PARTS, k a multiple of 128 (256 where the type has supers). All
    else is as batch_mma() has it."""
    WR: gl.constexpr = gl.num_warps() // WK
    PAIR: gl.constexpr = GLU != ""
    TILE: gl.constexpr = ROWS // 2 if PAIR else ROWS
    SUMS: gl.constexpr = has_min(KIND)
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

    rings = allocate_planes(KIND, ROWS, WK, STAGES, True)
    x_rings = allocate_x(TOKENS, WK, STAGES, PARTS, SUMS)
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
        copy_x(x_rings, p_q, p_d, p_s, i, step, k, n, q_end, TOKENS, WK, PARTS, SUMS)
        async_copy.commit_group()

    L: gl.constexpr = gl.SliceLayout(3, unit_layout(WK, WR, ROWS // 16, TOKENS // 8))
    zero = gl.full([WK, ROWS // 16, TOKENS // 8, 8, 4], 0.0, gl.float32, layout=L)
    acc = (zero, zero, zero, zero)
    slot = 0
    free = STAGES - 1
    for i in range(0, count):
        async_copy.wait_group(STAGES - 2)
        ahead = place_of(i + (STAGES - 1), first, count, turn)
        copy_weights(rings, planes, planes_up, free, ahead, k, first_row, left, q_end, KIND, ROWS, WK, PAIR)
        copy_x(x_rings, p_q, p_d, p_s, free, ahead, k, n, q_end, TOKENS, WK, PARTS, SUMS)
        async_copy.commit_group()
        step = place_of(i, first, count, turn)
        acc = add_step(acc, rings, x_rings, slot, step, first_row, left, k, KIND, WR, PAIR, PARTS)
        free = slot
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    deliver(
        tile_sums(acc), p_out, p_out, p_bias, p_residual, p_parts, p_counter, first_row, m, n, i_tile, i_split,
        n_splits, GLU, SPLIT, False, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
