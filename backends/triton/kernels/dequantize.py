"""Packed matrices (packing.py) as numbers: whole, or some rows. One program takes a tile of groups of 32 elements.

In a tile values are two halves [GROUPS, 16]: elements 0..15 and 16..31 of every group. A thread then has 16 elements of
one group in its registers, which are one wide load of 4-bit or 8-bit codes, and shifts of its words are constants.
Values are bit for bit what gguf's dequantization gives in f32: scales of scales are exact products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.grid import point_codes, signs_of
from graphrt.backends.triton.kernels.common.scales import group_scale, half_scales
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    code_offset,
    codebook_half,
    has_codebook,
    has_grid,
    has_half_scales,
    has_min,
    has_scales,
    has_supers,
    high_bits,
)
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.packing import GROUP, Packed, packing_of

#: Groups of a program, and its warps: a group or two a thread, so that all loads of a thread are in flight at once.
_TILE, _WARPS = 256, 4
#: The same of one row that is gathered: rows are few and short, and more programs wait for memory side by side.
_ROW_TILE, _ROW_WARPS = 32, 1


@triton.jit
def looked_up(code, KIND: tl.constexpr):
    """Codes of 4 bits (int32) as their codebook's values, int8."""
    first = tl.full([1, 1], codebook_half(KIND, 0), tl.int64)
    second = tl.full([1, 1], codebook_half(KIND, 1), tl.int64)
    return (tl.where(code < 8, first, second) >> (8 * (code & 7)).to(tl.int64)).to(tl.int8)


@triton.jit
def two_bits(word, i):
    """Codes of 2 bits of elements i (of 0..15) and 16 + i, int32, from a group's int64 word [GROUPS, 1]."""
    at = 32 * (i // 8) + 8 * (i % 4) + 4 * (i // 4 % 2)
    word = word >> at.to(tl.int64)
    return (word & 3).to(tl.int32), (word >> 2 & 3).to(tl.int32)


@triton.jit
def group_codes(packed, first, n_live, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """What scales multiply, f32, halves [GROUPS, 16]: codes less their offset, or the codebook's values."""
    group = tl.arange(0, GROUPS)
    live = group < n_live
    i = tl.arange(0, 16)[None, :]
    BITS: tl.constexpr = code_bits(KIND)
    HIGH: tl.constexpr = high_bits(KIND)
    if BITS == 2:
        low, high = two_bits(tl.load(packed.quants + first + group, mask=live, other=0)[:, None], i)
    elif BITS == 4:
        byte = tl.load(packed.quants + first * 16 + (group[:, None] * 16 + i), mask=live[:, None], other=0).to(tl.int32)
        low, high = byte & 0xF, byte >> 4
    else:
        at = packed.quants + first * 32 + (group[:, None] * 32 + i)
        low = tl.load(at, mask=live[:, None], other=0).to(tl.int8, bitcast=True)
        high = tl.load(at + 16, mask=live[:, None], other=0).to(tl.int8, bitcast=True)
    if HIGH == 1:
        word = tl.load(packed.high + first + group, mask=live, other=0)[:, None] >> (8 * (i % 4) + 2 * (i // 4))
        low, high = low | (word & 1) << BITS, high | (word >> 1 & 1) << BITS
    elif HIGH == 2:
        more_low, more_high = two_bits(tl.load(packed.high + first + group, mask=live, other=0)[:, None], i)
        low, high = low | more_low << BITS, high | more_high << BITS
    if has_codebook(KIND):
        low, high = looked_up(low, KIND), looked_up(high, KIND)
    elif code_offset(KIND) != 0:
        low, high = low - code_offset(KIND), high - code_offset(KIND)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def grid_codes(packed, first, n_live, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """group_codes() of types with a grid."""
    group = tl.arange(0, GROUPS)
    live = group < n_live
    BITS: tl.constexpr = code_bits(KIND)
    p_quants = packed.quants + (first + group) * BITS
    quants = tl.load(p_quants, mask=live, other=0)[:, None]
    second = quants
    if BITS == 2:
        second = tl.load(p_quants + 1, mask=live, other=0)[:, None]
    scales = tl.load(packed.scales + first + group, mask=live, other=0)[:, None]
    high = scales
    if high_bits(KIND) > 0:
        high = tl.load(packed.high + first + group, mask=live, other=0)[:, None]
    signs = signs_of(second, high, scales, KIND)
    codes = point_codes(packed.grid, quants, second, high, scales, signs, tl.arange(0, 4)[None, :], KIND)
    codes = ((codes[:, :, None] >> (4 * tl.arange(0, 8)[None, None, :])) & 15).reshape(GROUPS, 32)
    values = looked_up(codes, KIND).to(tl.float32)
    return tl.split(tl.permute(values.reshape(GROUPS, 2, 16), (0, 2, 1)))


@triton.jit
def scales_and_mins(packed, first, n_live, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """Scale and min of both halves of each group, f32 [GROUPS]: a value is scale * code - min."""
    group = tl.arange(0, GROUPS)
    live = group < n_live
    if has_scales(KIND):
        scales = tl.load(packed.scales + first + group, mask=live, other=0)
    if has_supers(KIND):
        supers = tl.load(packed.supers + first // 8 + group // 8, mask=live, other=0)
    else:
        supers = scales
    if not has_scales(KIND):
        scales = supers
    if has_half_scales(KIND):
        low, high, d, m_low, m_high, d_min = half_scales(scales, supers, KIND)
        return d * low, d * high, d_min * m_low, d_min * m_high
    else:
        scale, off = group_scale(scales, supers, KIND)
        return scale, scale, off, off


@triton.jit
def group_values(packed, first, n_live, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """Values of groups `first` to first + n_live - 1 of a packed matrix (rows one after the other).

    -> f32 [GROUPS, 16] of elements 0..15 and of 16..31; rows from n_live on hold no values. packed: Planes as
    plane_args() makes them; first: a multiple of 8 for types with supers, int64 where addresses need it; n_live: at
    most GROUPS.
    """
    if has_grid(KIND):
        low, high = grid_codes(packed, first, n_live, KIND, GROUPS)
    else:
        low, high = group_codes(packed, first, n_live, KIND, GROUPS)
    d_low, d_high, m_low, m_high = scales_and_mins(packed, first, n_live, KIND, GROUPS)
    low, high = d_low[:, None] * low, d_high[:, None] * high
    if has_min(KIND):
        low, high = low - m_low[:, None], high - m_high[:, None]
    return low, high


@triton.jit
def store_groups(p_out, low, high, n_live, GROUPS: tl.constexpr):
    """Halves of values to the n_live groups of 32 elements from p_out on, rounded once."""
    group = tl.arange(0, GROUPS)[:, None]
    at = p_out + (group * 32 + tl.arange(0, 16)[None, :])
    tl.store(at, low.to(p_out.dtype.element_ty), mask=group < n_live)
    tl.store(at + 16, high.to(p_out.dtype.element_ty), mask=group < n_live)


@accesses(reads="packed", writes="p_out")
@triton.jit
def dequantize_groups(packed, p_out, n_groups, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """Program i: groups i * GROUPS on, of all rows as one."""
    first = tl.program_id(0).to(tl.int64) * GROUPS
    n_live = tl.minimum(n_groups - first, GROUPS).to(tl.int32)
    low, high = group_values(packed, first, n_live, KIND, GROUPS)
    store_groups(p_out + first * 32, low, high, n_live, GROUPS)


@accesses(reads="packed p_ids", writes="p_out")
@triton.jit
def gather_groups(
    packed, p_ids, p_out, n_ids, d2, stride_0, stride_1, stride_2,
    n_rows, n_groups, KIND: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): groups j * GROUPS on of the row that index i names; n_groups: of a row; n_rows: of a matrix."""
    i = tl.program_id(0)
    i_matrix = i // n_ids
    p_id = p_ids + (i % n_ids).to(tl.int64) * stride_0
    p_id += (i_matrix % d2).to(tl.int64) * stride_1 + (i_matrix // d2).to(tl.int64) * stride_2
    row = tl.load(p_id) + i_matrix.to(tl.int64) * n_rows
    start = tl.program_id(1) * GROUPS
    n_live = tl.minimum(n_groups - start, GROUPS)
    low, high = group_values(packed, row * n_groups + start, n_live, KIND, GROUPS)
    store_groups(p_out + (i.to(tl.int64) * n_groups + start) * 32, low, high, n_live, GROUPS)


def plane_args(packed: Packed) -> dict[str, Any]:
    """The planes as the kernels here take them, in words that a group, or a half of it, is one of, and their type."""
    packing = packing_of(packed.kind)
    assert packing is not None
    planes = packed.planes()
    if packing.grid is None:
        planes = planes._replace(quants=packed.quants.view(torch.int64 if packing.bits == 2 else torch.uint8))
        if packed.high is not None and packing.high_bits == 2:
            planes = planes._replace(high=packed.high.view(torch.int64))
    return {"packed": planes, "KIND": packed.kind}


def dequantize(packed: Packed, out: torch.Tensor) -> Launch:
    """All rows: out f32 or f16 [rows, k], contiguous. f16 values are f32 ones rounded once."""
    assert out.is_contiguous() and out.dtype in (torch.float32, torch.float16) and out.numel() == packed.rows * packed.k
    n_groups = packed.rows * packed.k // GROUP
    args = plane_args(packed) | {"p_out": out, "n_groups": n_groups, "GROUPS": _TILE}
    return Launch(dequantize_groups, (triton.cdiv(n_groups, _TILE),), args, {"num_warps": _WARPS})


def gather_rows(packed: Packed, ids: torch.Tensor, out: torch.Tensor) -> Launch:
    """Rows by index, as GET_ROWS takes them. ids: i32 [d3, d2, n], any strides; out: f32 [d3 * d2 * n, k], contiguous.

    The packed rows are those of d3 * d2 matrices of equal height, and indices count from the first row of their own.
    """
    d3, d2, n_ids = ids.shape
    assert out.is_contiguous() and out.numel() == ids.numel() * packed.k
    groups = packed.k // GROUP
    args = plane_args(packed) | {
        "p_ids": ids, "p_out": out, "n_ids": n_ids, "d2": d2,
        "stride_0": ids.stride(2), "stride_1": ids.stride(1), "stride_2": ids.stride(0),
        "n_rows": packed.rows // (d3 * d2), "n_groups": groups, "GROUPS": _ROW_TILE,
    }  # fmt: skip
    grid = (ids.numel(), triton.cdiv(groups, _ROW_TILE))
    return Launch(gather_groups, grid, args, {"num_warps": _ROW_WARPS})
