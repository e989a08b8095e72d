"""Operands of int8.py: codes and activations as bytes for mma.sync, scales apart from supers, and sums as f32 (Gluon).

Axes: int8_layouts.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.common.gluon_scales import (
    f16_scale,
    field,
    group_scale,
    half_ue4m3,
    signed_byte,
)
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    code_offset,
    has_codebook,
    has_f16_scales,
    high_bits,
    scale_form,
)
from graphrt.backends.triton.kernels.products.activations import FINER
from graphrt.backends.triton.kernels.products.gemm_small.int8_layouts import (
    scales_unit,
    unit_layout,
    weights_unit,
    x_scales_unit,
    x_unit,
)
from graphrt.backends.triton.kernels.products.gemm_small.layouts import high_layout, words_layout
from graphrt.backends.triton.kernels.products.gemm_small.unpack import codebook_asm

#: 1.5 * 2**23, as the bits of an f32: an integer added to these bits is added to the number.
NUMBER = gl.constexpr(0x4B400000)


# --- weights ---


@gluon.jit
def rows_apart(words, WR: gl.constexpr, N: gl.constexpr):
    """Words [WK, ROWS, 4, 4] of all groups as operands: of rows g of each 16, and of rows g + 8."""
    WK: gl.constexpr = words.shape[0]
    M: gl.constexpr = words.shape[1] // 16
    words = gl.permute(gl.reshape(words, [WK, M, 2, 8, 4, 4]), (0, 1, 4, 3, 5, 2))
    first, second = gl.split(words)
    L: gl.constexpr = weights_unit(WK, WR, M, N)
    first = gl.expand_dims(gl.convert_layout(first, L, assert_trivial=True), 2)
    second = gl.expand_dims(gl.convert_layout(second, L, assert_trivial=True), 2)
    return first, second


@gluon.constexpr_function
def raised(KIND):
    """By so many bits codes with an offset are multiplied as they become int8: as far as a byte goes. There the offset,
    which is the middle of all codes, is the byte's sign."""
    if code_offset(KIND) == 0:
        return 0
    assert code_offset(KIND) == 1 << (code_bits(KIND) + high_bits(KIND) - 1)
    return 8 - code_bits(KIND) - high_bits(KIND)


@gluon.constexpr_function
def _mask(FIRST, BITS):
    """The bits FIRST to FIRST + BITS - 1 of every byte, as an int32."""
    mask = (((1 << BITS) - 1) << FIRST) * 0x01010101
    return mask - (1 << 32) if mask >= 1 << 31 else mask


@gluon.jit
def int8_halves(rings, slot, KIND: gl.constexpr, WR: gl.constexpr):
    """A step's codes, offset taken off, as int8, raised(): words [WK, ROWS, 4, 4] of the groups' first halves, and of
    their second ones."""
    quants, high, scales, supers = rings
    E: gl.constexpr = code_bits(KIND)
    H: gl.constexpr = high_bits(KIND)
    UP: gl.constexpr = raised(KIND)
    WK: gl.constexpr = quants.shape[1]
    ROWS: gl.constexpr = quants.shape[2]
    L: gl.constexpr = words_layout(WK, WR, ROWS, 4, True)
    words = quants.index(slot).load(words_layout(WK, WR, ROWS, E, True))
    if E == 8:
        low, top = gl.split(gl.permute(gl.reshape(words, [WK, ROWS, 4, 2, 4]), (0, 1, 2, 4, 3)))
        low = gl.convert_layout(low, L, assert_trivial=True)
        top = gl.convert_layout(top, L, assert_trivial=True)
    elif has_codebook(KIND):
        low, top = gl.inline_asm_elementwise(
            codebook_asm(KIND), "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        low = (words << UP) & _mask(UP, 4)
        top = (words >> (4 - UP)) & _mask(UP, 4)
        sign: gl.constexpr = _mask(7, 1) if UP > 0 else 0
        if H == 0:
            low = low ^ sign
            top = top ^ sign
        elif H == 1:  # bit 2i of a byte is for word i, the next one for its high nibbles
            h = gl.expand_dims(high.index(slot).reshape([WK, ROWS, 4]).load(gl.SliceLayout(3, L)), 3)
            h = h >> (2 * axis_index(L, 4, 3, 4))
            low = low | (((h << (4 + UP)) & _mask(4 + UP, 1)) ^ sign)
            top = top | (((h << (3 + UP)) & _mask(4 + UP, 1)) ^ sign)
        else:  # word i has fields at bits 0 and 2, or 4 and 6, of the bytes of word i / 2
            LH: gl.constexpr = high_layout(WK, WR, ROWS, True)
            h = gl.expand_dims(high.index(slot).load(gl.SliceLayout(4, LH)), 4) >> (4 * axis_index(LH, 5, 4, 2))
            h = gl.convert_layout(gl.reshape(h, [WK, ROWS, 4, 4]), L, assert_trivial=True)
            low = low | (((h << (4 + UP)) & _mask(4 + UP, 2)) ^ sign)
            top = top | (((h << (2 + UP)) & _mask(4 + UP, 2)) ^ sign)
    return low, top


@gluon.jit
def bare_scales(scales, KIND: gl.constexpr):
    """(scale of a group's first half, of its second, what is taken off), f32, without what their super multiplies. The
    scales of codes that were raised() without a super are made for that."""
    if has_f16_scales(KIND):
        d, m = f16_scale(scales, KIND)
        d = d.to(gl.float32) * (0.5 ** raised(KIND))
        return d, d, -m.to(gl.float32)
    elif scale_form(KIND) == "u6_min":
        scale = field(scales, 0, 8)
        return scale, scale, field(scales, 8, 8)
    elif scale_form(KIND) == "i8":
        scale = signed_byte(scales, 0)
        return scale, scale, scale
    elif scale_form(KIND) == "i8_halves":
        scale = signed_byte(scales, 0)
        return scale, signed_byte(scales, 8), scale
    elif scale_form(KIND) == "ue4m3_halves":
        scale = half_ue4m3(scales, 0, 0)
        return scale, half_ue4m3(scales, 8, 0), scale
    else:
        scale, off = group_scale(scales, scales, KIND, 0)
        return scale, scale, off


@gluon.jit
def scales_apart(x, WR: gl.constexpr, N: gl.constexpr):
    """What rows have in each group, [WK, ROWS, 4], for the sums of rows g and of rows g + 8."""
    WK: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1] // 16
    first, second = gl.split(gl.permute(gl.reshape(x, [WK, M, 2, 8, 4]), (0, 1, 4, 3, 2)))
    L: gl.constexpr = scales_unit(WK, WR, M, N)
    first = gl.expand_dims(gl.expand_dims(gl.convert_layout(first, L, assert_trivial=True), 2), 5)
    second = gl.expand_dims(gl.expand_dims(gl.convert_layout(second, L, assert_trivial=True), 2), 5)
    return first, second


@gluon.jit
def supers_apart(x, WR: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """What rows have in a step, [WK, ROWS, 1], for sums over its groups: of rows g and of rows g + 8."""
    WK: gl.constexpr = x.shape[0]
    first, second = gl.split(gl.permute(gl.reshape(x, [WK, M, 2, 8]), (0, 1, 3, 2)))
    L: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, gl.SliceLayout(3, unit_layout(WK, WR, M, N))))
    first = gl.expand_dims(gl.expand_dims(gl.convert_layout(first, L, assert_trivial=True), 2), 4)
    second = gl.expand_dims(gl.expand_dims(gl.convert_layout(second, L, assert_trivial=True), 2), 4)
    return first, second


# --- activations ---


@gluon.jit
def x_halves(words, WR: gl.constexpr, M: gl.constexpr):
    """Words [WK, TOKENS, 4, 8] of x as operands: of groups' first halves, and of their second ones."""
    WK: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1] // 8
    first, second = gl.split(gl.permute(gl.reshape(words, [WK, N, 8, 4, 2, 4]), (0, 1, 3, 2, 5, 4)))
    L: gl.constexpr = x_unit(WK, WR, M, N)
    first = gl.expand_dims(gl.convert_layout(first, L, assert_trivial=True), 1)
    second = gl.expand_dims(gl.convert_layout(second, L, assert_trivial=True), 1)
    return first, second


@gluon.jit
def tokens_apart(x, WR: gl.constexpr, M: gl.constexpr):
    """What tokens have in each group, [WK, TOKENS, 4], for the sums of tokens 2t and of tokens 2t + 1."""
    WK: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1] // 8
    first, second = gl.split(gl.permute(gl.reshape(x, [WK, N, 4, 2, 4]), (0, 1, 4, 2, 3)))
    L: gl.constexpr = x_scales_unit(WK, WR, M, N)
    first = gl.expand_dims(gl.expand_dims(gl.convert_layout(first, L, assert_trivial=True), 1), 4)
    second = gl.expand_dims(gl.expand_dims(gl.convert_layout(second, L, assert_trivial=True), 1), 4)
    return first, second


# --- products ---


@gluon.constexpr_function
def _mma_asm(K):
    """PTX: $0..$3, rows g and g + 8 by tokens 2t and 2t + 1: NUMBER and the products of K bytes."""
    operands = "{$4, $5, $6, $7}, {$8, $9}" if K == 32 else "{$4, $5}, {$6}"
    return f"""{{
        .reg .b32 c;
        mov.b32 c, 0x{NUMBER.value:08x};
        mma.sync.aligned.m16n8k{K}.row.col.s32.s8.s8.s32 {{$0, $1, $2, $3}}, {operands}, {{c, c, c, c}};
        }}"""


@gluon.jit
def mma_32(a0, a1, a2, a3, b0, b1):
    """Products of 32 bytes and their sums: (rows g by tokens 2t, by 2t + 1, rows g + 8 by both), as _number() reads it.

    mma.sync itself, not mma_v2: that has no products of 16 bytes, and would want tensors of int8, whose elements are
    parts of registers. What lanes hold is fixed by unit_layout().
    """
    a0, b0 = gl.broadcast(a0, b0)
    a1, b1 = gl.broadcast(a1, b1)
    a2, b0 = gl.broadcast(a2, b0)
    a3, b0 = gl.broadcast(a3, b0)
    return gl.inline_asm_elementwise(
        _mma_asm(32), "=r,=r,=r,=r,r,r,r,r,r,r", [a0, a1, a2, a3, b0, b1],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mma_16(a0, a1, b0):
    """The same of 16 bytes."""
    a0, b0 = gl.broadcast(a0, b0)
    a1, b0 = gl.broadcast(a1, b0)
    return gl.inline_asm_elementwise(
        _mma_asm(16), "=r,=r,=r,=r,r,r,r", [a0, a1, b0],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _number(total):
    """What a matrix unit has added to NUMBER, below 2**22, as f32."""
    return total.to(gl.float32, bitcast=True) - 12582912.0


@gluon.jit
def group_sums(a0, a1, a2, a3, b0, b1, c0, c1, PARTS: gl.constexpr):
    """Groups' sums of code times activation, f32: rows g by tokens 2t, by 2t + 1, rows g + 8 by both. c: of the
    activations' second part, if PARTS is 2."""
    y00, y01, y80, y81 = mma_32(a0, a1, a2, a3, b0, b1)
    y00, y01, y80, y81 = _number(y00), _number(y01), _number(y80), _number(y81)
    if PARTS == 2:
        z00, z01, z80, z81 = mma_32(a0, a1, a2, a3, c0, c1)
        y00 = y00 * FINER + _number(z00)
        y01 = y01 * FINER + _number(z01)
        y80 = y80 * FINER + _number(z80)
        y81 = y81 * FINER + _number(z81)
    return y00, y01, y80, y81


@gluon.jit
def half_group_sums(a0, a1, b0, c0, PARTS: gl.constexpr):
    """group_sums() of half groups."""
    y00, y01, y80, y81 = mma_16(a0, a1, b0)
    y00, y01, y80, y81 = _number(y00), _number(y01), _number(y80), _number(y81)
    if PARTS == 2:
        z00, z01, z80, z81 = mma_16(a0, a1, c0)
        y00 = y00 * FINER + _number(z00)
        y01 = y01 * FINER + _number(z01)
        y80 = y80 * FINER + _number(z80)
        y81 = y81 * FINER + _number(z81)
    return y00, y01, y80, y81
