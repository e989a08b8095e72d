"""Packed codes times activations rounded to 8 bits, as packed_gemv multiplies them: sums of integers, group by group.

Tensors are [G, W, R, U, N] as gemv_packed.py has them; words are int32 of four bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common.codebook import of_bytes, of_nibbles, permuted
from graphrt.backends.triton.kernels.common.grid import grid_words
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    codebook_shift,
    has_codebook,
    has_grid,
    has_half_scales,
    high_bits,
)


@triton.jit
def dot4(a, b, total, UNSIGNED: tl.constexpr, PTX: tl.constexpr):
    """total + the products of four bytes each of int32 words a (int8, or uint8 if UNSIGNED) and b (int8)."""
    if PTX:
        if UNSIGNED:
            total = tl.inline_asm_elementwise("dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total],
                                              dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip
        else:
            total = tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total],
                                              dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip
    else:
        for i in tl.static_range(4):
            if UNSIGNED:
                total += ((a >> (8 * i)) & 255) * ((b << (24 - 8 * i)) >> 24)
            else:
                total += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return total


@triton.jit
def split4(x):
    """The four words of the last axis, of [G, W, R, U, N, 4]."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    D: tl.constexpr = x.shape[3]
    E: tl.constexpr = x.shape[4]
    even, odd = tl.split(tl.reshape(x, (A, B, C, D, E, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def eight(low, high):
    """A group's words, of [G, W, R, U, N, 4] of its first and of its second half."""
    l0, l1, l2, l3 = split4(low)
    h0, h1, h2, h3 = split4(high)
    return l0, l1, l2, l3, h0, h1, h2, h3


@triton.jit
def _codebook(w, KIND: tl.constexpr, PTX: tl.constexpr):
    """Values of a word's low and of its high nibbles as bytes, with codebook_shift()."""
    SHIFT: tl.constexpr = codebook_shift(KIND)
    if PTX:
        first, second = of_nibbles(w, KIND, SHIFT, PTX)
        return permuted(first, second, 0x6420), permuted(first, second, 0x7531)
    else:
        return of_bytes(w & 0x0F0F0F0F, KIND, SHIFT), of_bytes((w >> 4) & 0x0F0F0F0F, KIND, SHIFT)


@triton.jit
def words_of_points(p_grid, quants, high, scales, KIND: tl.constexpr, PTX: tl.constexpr):
    """A tile's codes of a type with a grid as code_sums() takes them: eight words of [G, W, R, U, 1]."""
    if code_bits(KIND) == 2:
        first, second = tl.split(quants[:, :, :, :, None, :])
    else:
        first = quants[:, :, :, :, None]
        second = first
    high = high[:, :, :, :, None]
    return grid_words(p_grid, first, second, high, scales[:, :, :, :, None], KIND, codebook_shift(KIND), PTX)


@triton.jit
def _chain(a0, a1, a2, a3, b0, b1, b2, b3, total, UNSIGNED: tl.constexpr, PTX: tl.constexpr):
    total = dot4(a0, b0, total, UNSIGNED, PTX)
    total = dot4(a1, b1, total, UNSIGNED, PTX)
    total = dot4(a2, b2, total, UNSIGNED, PTX)
    return dot4(a3, b3, total, UNSIGNED, PTX)


@triton.jit
def _two_bit_half(q0, q1, x0, x1, x2, x3, zero, PTX: tl.constexpr):
    """Sum over 16 elements of codes in bits 0 and 1 (elements of even words) and 4 and 5 of the bytes of two words."""
    total = dot4(q0 & 0x30303030, x1, zero, True, PTX)
    total = dot4(q1 & 0x30303030, x3, total, True, PTX) >> 4
    total = dot4(q0 & 0x03030303, x0, total, True, PTX)
    return dot4(q1 & 0x03030303, x2, total, True, PTX)


@triton.jit
def _three_bit_half(q0, q1, h, x0, x1, x2, x3, zero, PTX: tl.constexpr):
    """The same with a third bit: of word i in bits 2i of h's bytes."""
    total = dot4((q0 & 0x30303030) | ((h << 4) & 0x40404040), x1, zero, True, PTX)
    total = dot4((q1 & 0x30303030) | (h & 0x40404040), x3, total, True, PTX) >> 4
    total = dot4((q0 & 0x03030303) | ((h << 2) & 0x04040404), x0, total, True, PTX)
    return dot4((q1 & 0x03030303) | ((h >> 2) & 0x04040404), x2, total, True, PTX)


@triton.jit
def code_sums(quants, high, words, KIND: tl.constexpr, PTX: tl.constexpr):
    """Integer sums of code * activation over a group's first and second half: int32 [G, W, R, U, N].

    Where a group has one scale, both are the group's sum. words: of activations, [G, W, 1, U, N] each. quants: of
    decoded codes their eight words.
    """
    l0, l1, l2, l3, h0, h1, h2, h3 = words
    if not has_grid(KIND):
        quants = quants[:, :, :, :, None, :]
    if PTX:
        zero = 0
    else:
        zero = l0 & 0
    F: tl.constexpr = 0x0F0F0F0F
    UNSIGNED: tl.constexpr = codebook_shift(KIND) != 0
    if has_grid(KIND):
        low = _chain(quants[0], quants[1], quants[2], quants[3], l0, l1, l2, l3, zero, UNSIGNED, PTX)
        above = zero if has_half_scales(KIND) else low
        total = _chain(quants[4], quants[5], quants[6], quants[7], h0, h1, h2, h3, above, UNSIGNED, PTX)
    elif code_bits(KIND) == 2 and high_bits(KIND) == 0:
        q0, q1 = tl.split(quants)
        low = _two_bit_half(q0, q1, l0, l1, l2, l3, zero, PTX)
        total = _two_bit_half(q0 >> 2, q1 >> 2, h0, h1, h2, h3, zero, PTX)
        if not has_half_scales(KIND):
            total += low
    elif code_bits(KIND) == 2:
        q0, q1 = tl.split(quants)
        t = high[:, :, :, :, None]
        low = _three_bit_half(q0, q1, t, l0, l1, l2, l3, zero, PTX)
        total = _three_bit_half(q0 >> 2, q1 >> 2, t >> 1, h0, h1, h2, h3, zero, PTX)
    else:
        w0, w1, w2, w3 = split4(quants)
        if code_bits(KIND) == 8:
            w4, w5, w6, w7 = split4(high[:, :, :, :, None, :])
            total = _chain(w0, w1, w2, w3, l0, l1, l2, l3, zero, False, PTX)
            total = _chain(w4, w5, w6, w7, h0, h1, h2, h3, total, False, PTX)
            low = total
        elif has_codebook(KIND):
            a0, b0 = _codebook(w0, KIND, PTX)
            a1, b1 = _codebook(w1, KIND, PTX)
            a2, b2 = _codebook(w2, KIND, PTX)
            a3, b3 = _codebook(w3, KIND, PTX)
            low = _chain(a0, a1, a2, a3, l0, l1, l2, l3, zero, UNSIGNED, PTX)
            above = zero if has_half_scales(KIND) else low
            total = _chain(b0, b1, b2, b3, h0, h1, h2, h3, above, UNSIGNED, PTX)
        elif high_bits(KIND) == 0:
            M: tl.constexpr = -0x0F0F0F10  # 0xF0F0F0F0: high nibbles where they are count 16 times
            total = _chain(w0 & M, w1 & M, w2 & M, w3 & M, h0, h1, h2, h3, zero, True, PTX) >> 4
            total = _chain(w0 & F, w1 & F, w2 & F, w3 & F, l0, l1, l2, l3, total, True, PTX)
            low = total
        elif high_bits(KIND) == 2:
            T: tl.constexpr = 0x30303030
            t0, t1 = tl.split(high[:, :, :, :, None, :])
            a0 = (w0 & F) | ((t0 << 4) & T)
            a1 = (w1 & F) | (t0 & T)
            a2 = (w2 & F) | ((t1 << 4) & T)
            a3 = (w3 & F) | (t1 & T)
            b0 = ((w0 >> 4) & F) | ((t0 << 2) & T)
            b1 = ((w1 >> 4) & F) | ((t0 >> 2) & T)
            b2 = ((w2 >> 4) & F) | ((t1 << 2) & T)
            b3 = ((w3 >> 4) & F) | ((t1 >> 2) & T)
            low = _chain(a0, a1, a2, a3, l0, l1, l2, l3, zero, True, PTX)
            total = _chain(b0, b1, b2, b3, h0, h1, h2, h3, zero, True, PTX)
        else:  # a fifth bit
            B: tl.constexpr = 0x10101010
            t = high[:, :, :, :, None]
            a0 = (w0 & F) | ((t << 4) & B)
            a1 = (w1 & F) | ((t << 2) & B)
            a2 = (w2 & F) | (t & B)
            a3 = (w3 & F) | ((t >> 2) & B)
            b0 = ((w0 >> 4) & F) | ((t << 3) & B)
            b1 = ((w1 >> 4) & F) | ((t << 1) & B)
            b2 = ((w2 >> 4) & F) | ((t >> 1) & B)
            b3 = ((w3 >> 4) & F) | ((t >> 3) & B)
            total = _chain(a0, a1, a2, a3, l0, l1, l2, l3, zero, True, PTX)
            total = _chain(b0, b1, b2, b3, h0, h1, h2, h3, total, True, PTX)
            low = total
    return low if has_half_scales(KIND) else total, total
