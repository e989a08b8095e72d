"""Kernels before and after a product in 16 bits: see half.py."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.activation import glu
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.products.activations import in_order, ordered_element


@triton.jit
def scaling(most):
    """(2^-e, 2^e) for a row whose largest value has the size `most`, f32."""
    exponent = (most.to(tl.int32, bitcast=True) >> 23) - 127
    shift = tl.where(exponent >= 15, exponent - 14, tl.where(exponent < -6, tl.maximum(exponent, -126), 0))
    shift = tl.where(exponent == -127, 0, shift)  # a row of zeros, or of what is no more than that in f32
    return ((127 - shift) << 23).to(tl.float32, bitcast=True), ((127 + shift) << 23).to(tl.float32, bitcast=True)


@triton.jit
def larger(size, most):
    """Of each pair. NaN never is; with an infinity nothing else counts."""
    return tl.where(size > most, size, most)


@triton.jit
def scaling_of(x):
    """scaling() of a row."""
    return scaling(tl.max(larger(tl.abs(x), tl.zeros_like(x)), 0))


@accesses(reads="p_x", writes="p_out p_factors", helper=True)
@triton.jit(do_not_specialize=("n_1", "n_2", "k"))
def round_rows(
    p_x, p_out, p_factors, stride_0, stride_1, stride_2, stride_3, n_1, n_2, k,
    WHOLE: tl.constexpr, ORDERED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: row i of x f32 [.., n_2, n_1, k], of any strides, to f16 [rows, k] and its factor.

    WHOLE: a block holds a row, which stays in registers until its largest value is known. ORDERED: as half.Activations;
    of rows that no block holds, what is read is out of order, not what is written: reads come through a cache.
    """
    i_row = tl.program_id(0)
    i_1, i_2, i_3 = i_row % n_1, i_row // n_1 % n_2, i_row // n_1 // n_2
    p_x += i_1.to(tl.int64) * stride_1 + i_2.to(tl.int64) * stride_2 + i_3.to(tl.int64) * stride_3
    if ORDERED:
        k = k // 128 * 128  # as it is: now the compiler knows, too, and loads and stores many at once
    p_out += i_row.to(tl.int64) * k
    i_block = tl.arange(0, BLOCK)
    take_turn(PDL)
    if WHOLE:
        m = i_block // 128 < k // 128 if ORDERED else i_block < k
        x = tl.load(p_x + i_block.to(tl.int64) * stride_0, mask=m, other=0.0)
        scale, factor = scaling_of(x)
        x = (x * scale).to(tl.float16)
        if ORDERED:
            x = tl.reshape(in_order(x), x.shape)
        tl.store(p_out + i_block, x, mask=m)
    else:
        most = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, k, BLOCK):
            i = start + i_block
            size = tl.abs(tl.load(p_x + i.to(tl.int64) * stride_0, mask=i < k, other=0.0))
            most = larger(size, most)
        scale, factor = scaling(tl.max(most, 0))
        for start in range(0, k, BLOCK):
            i = start + i_block
            element = ordered_element(i) if ORDERED else i
            x = tl.load(p_x + element.to(tl.int64) * stride_0, mask=i < k, other=0.0)
            tl.store(p_out + i, (x * scale).to(tl.float16), mask=i < k)
    tl.store(p_factors + i_row, factor)


@triton.jit
def _sum_parts(p, at, m, part_stride, PARTS: tl.constexpr):
    total = tl.load(p + at, mask=m, other=0.0)
    for i in tl.static_range(1, PARTS):
        total += tl.load(p + i * part_stride + at, mask=m, other=0.0)
    return total


@accesses(reads="p_a p_a_factors p_b p_b_factors p_bias p_residual", writes="p_out", helper=True)
@triton.jit(do_not_specialize=("part_stride", "cols", "alpha", "limit"))
def finish(
    p_a, p_a_factors, p_b, p_b_factors, p_bias, p_residual, p_out, part_stride, cols, alpha, limit,
    A_PARTS: tl.constexpr, A_FACTORS: tl.constexpr, B_PARTS: tl.constexpr, B_FACTORS: tl.constexpr, GLU: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ONLY_FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = a[i], summed over its parts, times its row's factor, plus bias and residual; with a GLU, gated with b's.

    bias: f32 [cols], for all rows. Program (i, j): blocks j, j + (number of such), ... of row i, f32. ONLY_FACTORS: out
    is a, nothing is added.
    """
    i_row = tl.program_id(0).to(tl.int64)
    a_factor = 1.0
    if A_FACTORS:
        a_factor = tl.load(p_a_factors + i_row)
    if not ONLY_FACTORS or a_factor != 1.0:
        for start in range(tl.program_id(1) * BLOCK, cols, tl.num_programs(1) * BLOCK):
            i = start + tl.arange(0, BLOCK)
            at, m = i_row * cols + i, i < cols
            y = _sum_parts(p_a, at, m, part_stride, A_PARTS) * a_factor
            if GLU != "":
                up = _sum_parts(p_b, at, m, part_stride, B_PARTS)
                if B_FACTORS:
                    up = up * tl.load(p_b_factors + i_row)
                y = glu(y, up, alpha, limit, GLU, True)
            if HAS_BIAS:
                y += tl.load(p_bias + i, mask=m, other=0.0)
            if HAS_RESIDUAL:
                y += tl.load(p_residual + at, mask=m, other=0.0)
            tl.store(p_out + at, y, mask=m)


@accesses(reads="p_a p_a_factors p_b p_b_factors", writes="p_out p_factors", helper=True)
@triton.jit(do_not_specialize=("part_stride", "alpha", "limit"))
def finish_rounded(
    p_a, p_a_factors, p_b, p_b_factors, p_out, p_factors, part_stride, cols, alpha, limit,
    A_PARTS: tl.constexpr, A_FACTORS: tl.constexpr, B_PARTS: tl.constexpr, B_FACTORS: tl.constexpr, GLU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """finish's gate, and round_rows of what comes of it: f16 [rows, cols] and the rows' factors, cols <= BLOCK.

    Program i: row i, which stays in registers until its largest value is known.
    """
    i_row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    at, m = i_row.to(tl.int64) * cols + i, i < cols
    gate = _sum_parts(p_a, at, m, part_stride, A_PARTS)
    up = _sum_parts(p_b, at, m, part_stride, B_PARTS)
    if A_FACTORS:
        gate = gate * tl.load(p_a_factors + i_row)
    if B_FACTORS:
        up = up * tl.load(p_b_factors + i_row)
    y = glu(gate, up, alpha, limit, GLU, True)
    scale, factor = scaling_of(tl.where(m, y, 0.0))
    tl.store(p_factors + i_row, factor)
    tl.store(p_out + at, (y * scale).to(tl.float16), mask=m)


@accesses(reads="p_out p_factors", writes="p_out", helper=True)
@triton.jit(do_not_specialize=("stride_0", "stride_1", "n_1", "cols"))
def rescale_rows(p_out, p_factors, stride_0, stride_1, n_1, cols, BLOCK: tl.constexpr):
    """Program i: row i of out, f32 [.., n_1, cols], times its factor, which for almost all rows is 1."""
    i_row = tl.program_id(0)
    factor = tl.load(p_factors + i_row)
    if factor != 1.0:
        p_out += (i_row // n_1).to(tl.int64) * stride_0 + (i_row % n_1).to(tl.int64) * stride_1
        for start in range(0, cols, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(p_out + i, tl.load(p_out + i, mask=i < cols) * factor, mask=i < cols)
