"""A few vectors times packed matrices: y[t, row] = W[row, :] . x[t, :], for up to 8 tokens.

Bound by how fast weights come from memory, so everything serves two ends: wide loads in flight, and few instructions a
weight. A lane works on whole groups of 32 elements: one 16-byte load has a group's 4-bit codes, and 8 dp4a multiply
them with activations rounded to int8; of short rows 8 more with what that rounding left (activations.py). A tile is
[G, W, R, U] groups: G lie side by side along k over the lanes of a warp (over several warps from G = 64 on), W rows
over the remaining lanes and warps, R rows and U steps along k in the registers of a lane; tensors with tokens are
[G, W, R, U, N]. Triton gives lanes and warps to a tensor's axes in this order (words of one load, which come last,
before all), so that every tensor has the same layout and none goes through shared memory. A row's sum stays in its lane
until the end, where G lanes add theirs.

The next tile's weights are loaded before the present one is multiplied; the first tile's before this kernel waits for
the one that makes its activations (weights depend on no kernel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.common.activation import glu
from graphrt.backends.triton.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    code_offset,
    codebook_shift,
    codebook_word,
    has_codebook,
    has_min,
    has_supers,
    high_bits,
    scale_form,
)
from graphrt.backends.triton.kernels.products.activations import (
    FINER,
    GLU_KINDS,
    Q8Rows,
    Rows,
    finer,
    magnitude,
    parts_of,
    rounded,
    scale_of,
    uses_ptx,
)
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.packing import Packed, packing_of

#: Tokens that one launch serves.
MAX_TOKENS = 8
#: Elements of a row up to which a program can round its activations itself: a tile holds them.
MAX_INLINE = 2048
#: Rows longer than this are rounded by a program's warps together, shorter ones by each warp for itself.
MAX_ALONE = 1024


# --- loads ---


@triton.jit
def _load_planes(p_quants, p_high, p_scales, p_supers, row, i_tile, KIND: tl.constexpr, NG: tl.constexpr,
                 U: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """A tile's (quants [G, W, R, U, words], high or further quants, scales, supers [G, W, R, U]), all as integers.

    row: int32 [1, W, R, 1]. Past a row's last group scales are 0 and quants anything. What a kind lacks is its scales
    again.
    """
    g = tl.arange(0, G)[:, None, None, None]
    # A lane shall take one group's scale, though it could take several neighbours' at once: hide that they are.
    at = tl.max_contiguous(row * NG + g, (1, 1, 1, 1))
    # Steps are added to pointers as numbers known to the compiler, which then are part of the instruction.
    step = tl.arange(0, U)[None, None, None, :] * G
    first = i_tile * (U * G)
    m = None
    m_words = None
    zero = None
    if NG % (U * G) != 0:
        m = first + step + g < NG
        m_words = m[:, :, :, :, None]
        zero = 0
    four = tl.arange(0, 4)[None, None, None, None, :]
    two = tl.arange(0, 2)[None, None, None, None, :]
    if code_bits(KIND) == 8:
        p = (p_quants + first * 8) + at[:, :, :, :, None] * 8 + (step[:, :, :, :, None] * 8 + four)
    elif code_bits(KIND) == 2:
        p = (p_quants + first * 2) + at[:, :, :, :, None] * 2 + (step[:, :, :, :, None] * 2 + two)
    else:
        p = (p_quants + first * 4) + at[:, :, :, :, None] * 4 + (step[:, :, :, :, None] * 4 + four)
    quants = tl.load(p, mask=m_words, eviction_policy="evict_first")
    scales = tl.load((p_scales + first) + at + step, mask=m, other=zero, eviction_policy="evict_first")
    supers = scales
    if has_supers(KIND):
        tl.static_assert(G % 8 == 0)
        p_super = (p_supers + first // 8) + (row * (NG // 8) + g // 8) + step // 8
        supers = tl.load(p_super, mask=m, other=zero, eviction_policy="evict_first")
    high = scales
    if code_bits(KIND) == 8:
        high = tl.load(p + 4, mask=m_words, eviction_policy="evict_first")
    elif high_bits(KIND) == 2:
        p_pair = (p_high + first * 2) + at[:, :, :, :, None] * 2 + (step[:, :, :, :, None] * 2 + two)
        high = tl.load(p_pair, mask=m_words, eviction_policy="evict_first")
    elif high_bits(KIND) != 0:
        high = tl.load((p_high + first) + at + step, mask=m, eviction_policy="evict_first")
    return quants, high, scales, supers


@triton.jit
def _x_tile(p_q, p_d, p_s, token, n, i_tile, NG: tl.constexpr, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
            SUMS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """A tile of n rows of Q8Rows as _round_groups has it, all [G, W, 1, U, N]. token: which of the rows.

    Past a row's last group d and the sums are 0.
    """
    N: tl.constexpr = token.shape[0]
    g = tl.arange(0, G)[:, None, None, None, None]
    at = tl.max_contiguous(token[None, None, None, None, :] * NG + g, (1, 1, 1, 1, 1))
    at = tl.broadcast_to(at, (G, W, 1, 1, N))  # every warp loads for itself: all have the layout of the weights
    step = tl.arange(0, U)[None, None, None, :, None] * G
    first = i_tile * (U * G)
    m = None
    m_words = None
    zero = None
    if NG % (U * G) != 0:
        m = first + step + g < NG
        m_words = m[:, :, :, :, :, None]
        zero = 0.0
    word = tl.arange(0, 4)[None, None, None, None, None, :]
    p = (p_q + first * 8) + at[:, :, :, :, :, None] * 8 + (step[:, :, :, :, :, None] * 8 + word)
    low = tl.load(p, mask=m_words, eviction_policy="evict_last")
    high = tl.load(p + 4, mask=m_words, eviction_policy="evict_last")
    d = tl.load((p_d + first) + at + step, mask=m, other=zero, eviction_policy="evict_last")
    s_low, s_high = d, d
    if SUMS:
        half = tl.arange(0, 2)[None, None, None, None, None, :]
        p_sums = (p_s + first * 2) + at[:, :, :, :, :, None] * 2 + (step[:, :, :, :, :, None] * 2 + half)
        s_low, s_high = tl.split(tl.load(p_sums, mask=m_words, other=zero, eviction_policy="evict_last"))
    first_words = _eight(low, high)
    second = first_words
    if PARTS == 2:
        p += n * (NG * 8)
        low = tl.load(p, mask=m_words, eviction_policy="evict_last")
        high = tl.load(p + 4, mask=m_words, eviction_policy="evict_last")
        second = _eight(low, high)
    return first_words, second, d, s_low, s_high


# --- integer products ---


@triton.jit
def _dot4(a, b, total, UNSIGNED: tl.constexpr, PTX: tl.constexpr):
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
def _split4(x):
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
def _eight(low, high):
    """A group's words, of [G, W, R, U, N, 4] of its first and of its second half."""
    l0, l1, l2, l3 = _split4(low)
    h0, h1, h2, h3 = _split4(high)
    return l0, l1, l2, l3, h0, h1, h2, h3


@triton.jit
def _permuted(a, b, selector):
    """Byte i of the result is byte n of a (n < 4) or n - 4 of b, n being nibble i of the selector (below 8)."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=tl.int32,
                                     is_pure=True, pack=1)  # fmt: skip


@triton.constexpr_function
def _table_word(KIND, i):
    """Values 4i to 4i + 3 of a codebook as an int32, shifted so that none is negative if that can be."""
    word = codebook_word(KIND, i, codebook_shift(KIND))
    return word - (1 << 32) if word >= 1 << 31 else word


@triton.jit
def _codebook_word(n, KIND: tl.constexpr):
    """Values of four codes, given as the bytes of a word, as bytes."""
    word = n & 0
    for j in tl.static_range(4):
        code = (n >> (8 * j)) & 15
        value = word
        for i in tl.static_range(4):
            value = tl.where(code // 4 == i, _table_word(KIND, i), value)
        word = word | (((value >> (8 * (code % 4))) & 255) << (8 * j))
    return word


@triton.jit
def _codebook(w, KIND: tl.constexpr, PTX: tl.constexpr):
    """Values of a word's low and of its high nibbles as bytes."""
    if PTX:
        # prmt looks 4 codes up at once in 8 values: those of codes below 8, those of the others, then one of the two.
        T0: tl.constexpr = _table_word(KIND, 0)
        T1: tl.constexpr = _table_word(KIND, 1)
        T2: tl.constexpr = _table_word(KIND, 2)
        T3: tl.constexpr = _table_word(KIND, 3)
        if codebook_shift(KIND) != 0:
            # A selector's fourth bit asks for the value's sign throughout, here 0: so the wrong half adds nothing.
            flipped = w ^ -0x77777778
            first = _permuted(T0, T1, w) | _permuted(T2, T3, flipped)
            second = _permuted(T0, T1, w >> 16) | _permuted(T2, T3, flipped >> 16)
        else:
            code = w & 0x77777777
            half = ((w >> 1) & 0x44444444) | 0x32103210
            first = _permuted(_permuted(T0, T1, code), _permuted(T2, T3, code), half)
            code = code >> 16
            second = _permuted(_permuted(T0, T1, code), _permuted(T2, T3, code), half >> 16)
        return _permuted(first, second, 0x6420), _permuted(first, second, 0x7531)
    else:
        return _codebook_word(w & 0x0F0F0F0F, KIND), _codebook_word((w >> 4) & 0x0F0F0F0F, KIND)


@triton.jit
def _chain(a0, a1, a2, a3, b0, b1, b2, b3, total, UNSIGNED: tl.constexpr, PTX: tl.constexpr):
    total = _dot4(a0, b0, total, UNSIGNED, PTX)
    total = _dot4(a1, b1, total, UNSIGNED, PTX)
    total = _dot4(a2, b2, total, UNSIGNED, PTX)
    return _dot4(a3, b3, total, UNSIGNED, PTX)


@triton.jit
def _two_bit_half(q0, q1, x0, x1, x2, x3, zero, PTX: tl.constexpr):
    """Sum over 16 elements of codes in bits 0 and 1 (elements of even words) and 4 and 5 of the bytes of two words."""
    total = _dot4(q0 & 0x30303030, x1, zero, True, PTX)
    total = _dot4(q1 & 0x30303030, x3, total, True, PTX) >> 4
    total = _dot4(q0 & 0x03030303, x0, total, True, PTX)
    return _dot4(q1 & 0x03030303, x2, total, True, PTX)


@triton.jit
def _three_bit_half(q0, q1, h, x0, x1, x2, x3, zero, PTX: tl.constexpr):
    """The same with a third bit: of word i in bits 2i of h's bytes."""
    total = _dot4((q0 & 0x30303030) | ((h << 4) & 0x40404040), x1, zero, True, PTX)
    total = _dot4((q1 & 0x30303030) | (h & 0x40404040), x3, total, True, PTX) >> 4
    total = _dot4((q0 & 0x03030303) | ((h << 2) & 0x04040404), x0, total, True, PTX)
    return _dot4((q1 & 0x03030303) | ((h >> 2) & 0x04040404), x2, total, True, PTX)


@triton.jit
def _sums(quants, high, words, KIND: tl.constexpr, PTX: tl.constexpr):
    """Integer sums of code * activation over a group's first and second half: int32 [G, W, R, U, N].

    Where a group has one scale, both are the group's sum. words: of activations, [G, W, 1, U, N] each.
    """
    l0, l1, l2, l3, h0, h1, h2, h3 = words
    quants = quants[:, :, :, :, None, :]
    if PTX:
        zero = 0
    else:
        zero = l0 & 0
    F: tl.constexpr = 0x0F0F0F0F
    if code_bits(KIND) == 2 and high_bits(KIND) == 0:
        q0, q1 = tl.split(quants)
        low = _two_bit_half(q0, q1, l0, l1, l2, l3, zero, PTX)
        total = _two_bit_half(q0 >> 2, q1 >> 2, h0, h1, h2, h3, zero, PTX)
    elif code_bits(KIND) == 2:
        q0, q1 = tl.split(quants)
        t = high[:, :, :, :, None]
        low = _three_bit_half(q0, q1, t, l0, l1, l2, l3, zero, PTX)
        total = _three_bit_half(q0 >> 2, q1 >> 2, t >> 1, h0, h1, h2, h3, zero, PTX)
    else:
        w0, w1, w2, w3 = _split4(quants)
        if code_bits(KIND) == 8:
            w4, w5, w6, w7 = _split4(high[:, :, :, :, None, :])
            total = _chain(w0, w1, w2, w3, l0, l1, l2, l3, zero, False, PTX)
            total = _chain(w4, w5, w6, w7, h0, h1, h2, h3, total, False, PTX)
            low = total
        elif has_codebook(KIND):
            UNSIGNED: tl.constexpr = codebook_shift(KIND) != 0
            a0, b0 = _codebook(w0, KIND, PTX)
            a1, b1 = _codebook(w1, KIND, PTX)
            a2, b2 = _codebook(w2, KIND, PTX)
            a3, b3 = _codebook(w3, KIND, PTX)
            total = _chain(a0, a1, a2, a3, l0, l1, l2, l3, zero, UNSIGNED, PTX)
            total = _chain(b0, b1, b2, b3, h0, h1, h2, h3, total, UNSIGNED, PTX)
            low = total
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
    return low, total


# --- scales ---


@triton.jit
def _half_float(bits):
    """The f16 in the low 16 bits of an integer, as f32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.constexpr_function
def taken_off(KIND):
    """What is taken off each code, f32."""
    return float(code_offset(KIND) + codebook_shift(KIND))


@triton.constexpr_function
def needs_sums(KIND):
    """Sums of the activations enter the product: the type has mins or an offset."""
    return has_min(KIND) or taken_off(KIND) != 0.0


@triton.jit
def _scaled(low, high, scales, supers, d, s_low, s_high, KIND: tl.constexpr):
    """Each group's part of the product, from its integer sums: (what is to be added, what to be subtracted).

    f32 [G, W, R, U, N] each, the latter of types with mins only. Apart, so that sums of them are fused multiply-adds.
    """
    scales = scales[:, :, :, :, None]
    supers = supers[:, :, :, :, None]
    OFFSET: tl.constexpr = taken_off(KIND)
    if scale_form(KIND) == "i8_halves":
        pair = scales.to(tl.int32)
        first = ((pair << 24) >> 24).to(tl.float32)
        second = (pair >> 8).to(tl.float32)
        more = first * (low.to(tl.float32) * d - s_low * OFFSET) + second * (high.to(tl.float32) * d - s_high * OFFSET)
        more *= _half_float(supers)
        less = more
    elif scale_form(KIND) == "u4_min_halves":
        pair = scales.to(tl.int32)
        more = (pair & 15).to(tl.float32) * low.to(tl.float32) + ((pair >> 8) & 15).to(tl.float32) * high.to(tl.float32)
        more *= _half_float(supers) * d
        less = ((pair >> 4) & 15).to(tl.float32) * s_low + ((pair >> 12) & 15).to(tl.float32) * s_high
        less *= _half_float(supers >> 16)
    elif scale_form(KIND) == "u6_min":
        pair = scales.to(tl.int32)
        more = low.to(tl.float32) * ((pair & 255).to(tl.float32) * _half_float(supers) * d)
        less = (((pair >> 8) & 255).to(tl.float32) * _half_float(supers >> 16)) * (s_low + s_high)
    elif scale_form(KIND) == "f16_min":
        more = low.to(tl.float32) * (_half_float(scales) * d)
        less = _half_float(scales >> 16) * -(s_low + s_high)
    else:
        if scale_form(KIND) == "i8":
            scale = scales.to(tl.float32) * _half_float(supers)
        elif (
            scale_form(KIND) == "e8m0"
        ):  # 2^(e - 128), the codebook's values being doubled; below the smallest normal f32 as well
            e = scales.to(tl.int32) & 255
            scale = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23).to(tl.float32, bitcast=True)
        else:
            scale = _half_float(scales)
        if OFFSET != 0.0:
            more = scale * (low.to(tl.float32) * d - (s_low + s_high) * OFFSET)
        else:
            more = low.to(tl.float32) * (scale * d)
        less = more
    return more, less


# --- activations rounded here ---


@triton.jit
def _packed_bytes(byte):
    """Four int8, in the low bytes of the int32 of the last axis, as a word."""
    shift = 8 * tl.arange(0, 4)[None, None, None, None, None, :]
    return tl.sum((byte & 255) << shift, 5)


@triton.jit
def _x_chunk(p, m, J: tl.constexpr):
    """Elements 4J to 4J + 3 of each group."""
    return tl.load(p + 4 * J, mask=m, other=0.0)


@triton.jit
def _round_groups(x, PARTS: tl.constexpr):
    """Groups rounded: (eight words of the first part, of the second, d, both halves' sums). x[J]: elements 4J to 4J + 3
    of each group. Without a second part the first is returned again."""
    most = tl.maximum(tl.maximum(magnitude(x[0]), magnitude(x[1])), tl.maximum(magnitude(x[2]), magnitude(x[3])))
    more = tl.maximum(tl.maximum(magnitude(x[4]), magnitude(x[5])), tl.maximum(magnitude(x[6]), magnitude(x[7])))
    d, inverse = scale_of(tl.max(tl.maximum(most, more), 5))
    i = inverse[:, :, :, :, :, None]
    n0, b0 = rounded(x[0] * i)
    n1, b1 = rounded(x[1] * i)
    n2, b2 = rounded(x[2] * i)
    n3, b3 = rounded(x[3] * i)
    n4, b4 = rounded(x[4] * i)
    n5, b5 = rounded(x[5] * i)
    n6, b6 = rounded(x[6] * i)
    n7, b7 = rounded(x[7] * i)
    first = (_packed_bytes(b0), _packed_bytes(b1), _packed_bytes(b2), _packed_bytes(b3), _packed_bytes(b4),
             _packed_bytes(b5), _packed_bytes(b6), _packed_bytes(b7))  # fmt: skip
    second = first
    low, high = n0 + n1 + n2 + n3, n4 + n5 + n6 + n7
    if PARTS == 2:
        e = d[:, :, :, :, :, None]
        m0, b0 = finer(x[0], n0, e, i)
        m1, b1 = finer(x[1], n1, e, i)
        m2, b2 = finer(x[2], n2, e, i)
        m3, b3 = finer(x[3], n3, e, i)
        m4, b4 = finer(x[4], n4, e, i)
        m5, b5 = finer(x[5], n5, e, i)
        m6, b6 = finer(x[6], n6, e, i)
        m7, b7 = finer(x[7], n7, e, i)
        second = (_packed_bytes(b0), _packed_bytes(b1), _packed_bytes(b2), _packed_bytes(b3), _packed_bytes(b4),
                  _packed_bytes(b5), _packed_bytes(b6), _packed_bytes(b7))  # fmt: skip
        low = low * FINER + (m0 + m1 + m2 + m3)
        high = high * FINER + (m4 + m5 + m6 + m7)
        d *= 1.0 / FINER
    return first, second, d, tl.sum(low, 5) * d, tl.sum(high, 5) * d


@triton.jit
def _round_x(p_x, x_row, p_norm, eps, token, NG: tl.constexpr, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
             NORM: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The only tile of f32 activations (after an RMS norm, if NORM) as _round_groups has it, all [G, W, 1, U, N].

    A lane has its whole group, so that only a norm's sum takes more than one."""
    N: tl.constexpr = token.shape[0]
    g = tl.arange(0, U)[None, None, None, :, None] * G + tl.arange(0, G)[:, None, None, None, None]
    g = tl.broadcast_to(g, (G, W, 1, U, N))
    m = (g < NG)[:, :, :, :, :, None]
    at = g[:, :, :, :, :, None] * 32 + tl.arange(0, 4)[None, None, None, None, None, :]
    p = p_x + token[None, None, None, None, :, None] * x_row + at
    x0, x1, x2, x3 = _x_chunk(p, m, 0), _x_chunk(p, m, 1), _x_chunk(p, m, 2), _x_chunk(p, m, 3)
    x4, x5, x6, x7 = _x_chunk(p, m, 4), _x_chunk(p, m, 5), _x_chunk(p, m, 6), _x_chunk(p, m, 7)
    if NORM:
        squares = x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3 + x4 * x4 + x5 * x5 + x6 * x6 + x7 * x7
        total = tl.sum(tl.sum(tl.sum(squares, 5), 3), 0)  # [W, 1, N]
        factor = (1.0 / tl.sqrt_rn(total / (NG * 32) + eps))[None, :, :, None, :, None]
        p = p_norm + at
        x0 = x0 * factor * _x_chunk(p, m, 0)
        x1 = x1 * factor * _x_chunk(p, m, 1)
        x2 = x2 * factor * _x_chunk(p, m, 2)
        x3 = x3 * factor * _x_chunk(p, m, 3)
        x4 = x4 * factor * _x_chunk(p, m, 4)
        x5 = x5 * factor * _x_chunk(p, m, 5)
        x6 = x6 * factor * _x_chunk(p, m, 6)
        x7 = x7 * factor * _x_chunk(p, m, 7)
    return _round_groups((x0, x1, x2, x3, x4, x5, x6, x7), PARTS)


@triton.jit
def _to_lanes(x, U: tl.constexpr, W: tl.constexpr):
    """Some values a group, [N, U * G, values], for the lanes that have it: [G, W, 1, U, N, values]."""
    N: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1] // U
    V: tl.constexpr = x.shape[2]
    x = tl.permute(tl.reshape(x, (N, U, G, V)), (2, 1, 0, 3))
    return tl.broadcast_to(x[:, None, None, :, :, :], (G, W, 1, U, N, V))


@triton.jit
def _words_to_lanes(byte, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr):
    """Groups' bytes, the low ones of [N, U * G, 32], as words for the lanes that have them."""
    N: tl.constexpr = byte.shape[0]
    shift = 8 * tl.arange(0, 4)[None, None, None, :]
    words = tl.sum((tl.reshape(byte, (N, U * G, 8, 4)) & 255) << shift, 3)
    words = tl.reshape(_to_lanes(words, U, W), (G, W, 1, U, N, 2, 4))
    low, high = tl.split(tl.permute(words, (0, 1, 2, 3, 4, 6, 5)))
    return _eight(low, high)


@triton.jit
def _round_together(x, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr):
    """What _round_groups returns, of x [N, U * G, 32] that the lanes of all warps share."""
    N: tl.constexpr = x.shape[0]
    d, inverse = scale_of(tl.max(magnitude(x), 2))
    number, byte = rounded(x * inverse[:, :, None])
    first = _words_to_lanes(byte, U, W, G)
    second = first
    if PARTS == 2:
        more, byte = finer(x, number, d[:, :, None], inverse[:, :, None])
        second = _words_to_lanes(byte, U, W, G)
        number = number * FINER + more
        d *= 1.0 / FINER
    sums = tl.sum(tl.reshape(number, (N, U * G, 2, 16)), 3) * d[:, :, None]
    d2 = tl.broadcast_to(d[:, :, None], (N, U * G, 2))
    scales = _to_lanes(tl.reshape(tl.join(sums, d2), (N, U * G, 4)), U, W)  # one exchange for all
    s_low, d_lane, s_high, d_again = _split4(scales)
    return first, second, d_lane, s_low, s_high


@triton.jit
def _round_x_together(p_x, x_row, token, NG: tl.constexpr, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
                      PARTS: tl.constexpr):  # fmt: skip
    """What _round_x returns, without a norm: every value is rounded once in a program, and lanes get theirs through
    shared memory. (In _round_x each warp rounds all, and its lanes' loads are a line apart.)"""
    group = tl.arange(0, U * G)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(p_x + token[:, None, None] * x_row + at[None], mask=(group < NG)[None, :, None], other=0.0)
    return _round_together(x, U, W, G, PARTS)


# --- the kernel ---


@triton.jit
def _add_tile(acc, planes, x, KIND: tl.constexpr, PTX: tl.constexpr, PARTS: tl.constexpr):
    """acc, f32 [G, W, R, N], and a tile's products summed over U. x: as _round_groups has it."""
    words, second, d, s_low, s_high = x
    low, high = _sums(planes[0], planes[1], words, KIND, PTX)
    if PARTS == 2:
        low2, high2 = _sums(planes[0], planes[1], second, KIND, PTX)
        low = low * FINER + low2
        high = high * FINER + high2
    more, less = _scaled(low, high, planes[2], planes[3], d, s_low, s_high, KIND)
    acc += tl.sum(more, 3)
    if has_min(KIND):
        acc -= tl.sum(less, 3)
    return acc


@triton.jit
def _first_sums(p_bias, row, N: tl.constexpr, G: tl.constexpr):
    """What sums begin with, f32 [G, W, R, N]: rows `row` of a bias in the first of a row's lanes, else 0.

    A bias is asked for with the weights, and no kernel writes it either.
    """
    W: tl.constexpr = row.shape[1]
    R: tl.constexpr = row.shape[2]
    if p_bias is None:
        return tl.zeros([G, W, R, N], tl.float32)
    else:
        row = tl.broadcast_to(tl.max_contiguous(row, (1, 1, 1, 1)), (G, W, R, N))
        return tl.load(p_bias + row, mask=tl.arange(0, G)[:, None, None, None] == 0, other=0.0)


@triton.jit
def products(
    p_quants, p_high, p_scales, p_supers, p_quants1, p_high1, p_scales1, p_supers1, row, token, n,
    p_q, p_d, p_s, p_x, x_row, p_norm, eps,
    KIND: tl.constexpr, KIND1: tl.constexpr, X_FORM: tl.constexpr, PARTS: tl.constexpr, NG: tl.constexpr,
    U: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr, p_bias=None,
):  # fmt: skip
    """Rows `row` ([1, W, R, 1]) of one matrix, or of two (KIND1 is not ""), times x: f32 [W, R, N] each.

    bias: f32, of the first one's rows.
    """
    N: tl.constexpr = token.shape[0]
    W: tl.constexpr = row.shape[1]
    R: tl.constexpr = row.shape[2]
    TILES: tl.constexpr = (NG + U * G - 1) // (U * G)
    SUMS: tl.constexpr = needs_sums(KIND) or (KIND1 != "" and needs_sums(KIND1))
    planes = _load_planes(p_quants, p_high, p_scales, p_supers, row, 0, KIND, NG, U, G)
    if KIND1 != "":
        planes1 = _load_planes(p_quants1, p_high1, p_scales1, p_supers1, row, 0, KIND1, NG, U, G)
    acc = _first_sums(p_bias, row, N, G)
    acc1 = tl.zeros([G, W, R, N], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if X_FORM == "q8":
        for i_tile in range(1, TILES):
            next_planes = _load_planes(p_quants, p_high, p_scales, p_supers, row, i_tile, KIND, NG, U, G)
            if KIND1 != "":
                next_planes1 = _load_planes(p_quants1, p_high1, p_scales1, p_supers1, row, i_tile, KIND1, NG, U, G)
            x = _x_tile(p_q, p_d, p_s, token, n, i_tile - 1, NG, U, W, G, SUMS, PARTS)
            acc = _add_tile(acc, planes, x, KIND, PTX, PARTS)
            planes = next_planes
            if KIND1 != "":
                acc1 = _add_tile(acc1, planes1, x, KIND1, PTX, PARTS)
                planes1 = next_planes1
        x = _x_tile(p_q, p_d, p_s, token, n, TILES - 1, NG, U, W, G, SUMS, PARTS)
    else:
        tl.static_assert(TILES == 1)
        if X_FORM == "together":
            x = _round_x_together(p_x, x_row, token, NG, U, W, G, PARTS)
        else:
            x = _round_x(p_x, x_row, p_norm, eps, token, NG, U, W, G, X_FORM == "norm", PARTS)
    y = tl.sum(_add_tile(acc, planes, x, KIND, PTX, PARTS), 0)
    y1 = y
    if KIND1 != "":
        y1 = tl.sum(_add_tile(acc1, planes1, x, KIND1, PTX, PARTS), 0)
    return y, y1


@triton.jit
def _finish(y, p_out, out_stride, p_residual, residual_stride, first, m, n, G: tl.constexpr):
    """Adds what there is to add and stores y [W, R, N] as out[token * out_stride + row]. first: the first row."""
    W: tl.constexpr = y.shape[0]
    R: tl.constexpr = y.shape[1]
    N: tl.constexpr = y.shape[2]
    # The first of a row's lanes stores, from where the sum is.
    g = tl.arange(0, G)[:, None, None, None]
    row = first + tl.arange(0, R)[None, None, :, None] * W + tl.arange(0, W)[None, :, None, None]
    row = tl.broadcast_to(tl.max_contiguous(row, (1, 1, 1, 1)), (G, W, R, N))
    token = tl.arange(0, N)[None, None, None, :]
    y = tl.broadcast_to(y[None], (G, W, R, N))
    m_out = (row < m) & (token < n) & (g == 0)
    if p_residual is not None:
        y += tl.load(p_residual + token * residual_stride + row, mask=m_out, other=0.0)
    tl.store(p_out + token * out_stride + row, y, mask=m_out)


#: Numbers that vary between a model's matrices and between runs, and make no difference to a kernel.
_GENERAL = ["out_stride0", "out_stride1", "out_stride2", "residual_stride", "m0", "m1", "m2", "n"]


@accesses(
    reads=(
        "p_quants0 p_high0 p_scales0 p_supers0 p_quants1 p_high1 p_scales1 p_supers1 p_quants2 p_high2 "
        "p_scales2 p_supers2 p_q p_d p_s p_x p_norm p_bias0 p_bias1 p_bias2 p_residual"
    ),
    writes="p_out0 p_out1 p_out2",
    early=(
        "p_quants0 p_high0 p_scales0 p_supers0 p_quants1 p_high1 p_scales1 p_supers1 p_quants2 p_high2 "
        "p_scales2 p_supers2 p_bias0 p_bias1 p_bias2"
    ),
)
@triton.jit(do_not_specialize=_GENERAL)
def packed_gemv(
    p_quants0, p_high0, p_scales0, p_supers0, p_out0, out_stride0, m0,
    p_quants1, p_high1, p_scales1, p_supers1, p_out1, out_stride1, m1,
    p_quants2, p_high2, p_scales2, p_supers2, p_out2, out_stride2, m2,
    p_q, p_d, p_s, p_x, x_row, p_norm, eps, p_bias0, p_bias1, p_bias2, p_residual, residual_stride, n,
    KIND0: tl.constexpr, KIND1: tl.constexpr, KIND2: tl.constexpr, GLU: tl.constexpr, X_FORM: tl.constexpr,
    PARTS: tl.constexpr, NG: tl.constexpr, N: tl.constexpr, U: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = W x of up to three matrices with rows of NG groups. Programs: R * W rows each, matrix after matrix.

    p_quants .. p_supers: planes of Packed, scales and supers as integers as wide as what they hold of a group; p_out:
    f32, element (token, row) at token * out_stride + row; m: rows of each; KIND: types, "" for no matrix.
    GLU: its kind: the first two matrices are a gate and an up of m0 rows, and out0 has activation(gate) * up; else "".
    X_FORM: "q8": q, d, s are Q8Rows; "f32": x, rows x_row apart, is rounded here by each warp, "together":
    by all of them; "norm": as "f32", after an RMS norm with weights p_norm and eps (a tile holds the row but for "q8").
    PARTS: of the activations; N: a power of two from n on; bias: of each, f32 [m] or None; residual: of matrix 0.
    """
    i_program = tl.program_id(0)
    token = tl.minimum(tl.arange(0, N), n - 1)
    PAIR: tl.constexpr = KIND1 if GLU != "" else ""
    i_row = tl.arange(0, R)[None, None, :, None] * W + tl.arange(0, W)[None, :, None, None]
    programs0 = (m0 + (R * W - 1)) // (R * W)
    programs1 = 0
    if KIND1 != "" and GLU == "":
        programs1 = (m1 + (R * W - 1)) // (R * W)
    if i_program < programs0 or (KIND1 == "" or GLU != ""):
        first = i_program * (R * W)
        y, y1 = products(
            p_quants0, p_high0, p_scales0, p_supers0, p_quants1, p_high1, p_scales1, p_supers1,
            tl.minimum(first + i_row, m0 - 1), token, n, p_q, p_d, p_s, p_x, x_row, p_norm, eps,
            KIND0, PAIR, X_FORM, PARTS, NG, U, G, PTX, PDL, p_bias0,
        )  # fmt: skip
        if GLU != "":
            y = glu(y, y1, 0.0, 0.0, GLU, True)
        _finish(y, p_out0, out_stride0, p_residual, residual_stride, first, m0, n, G)
    elif i_program < programs0 + programs1 or KIND2 == "":
        first = (i_program - programs0) * (R * W)
        y, y1 = products(
            p_quants1, p_high1, p_scales1, p_supers1, None, None, None, None,
            tl.minimum(first + i_row, m1 - 1), token, n, p_q, p_d, p_s, p_x, x_row, p_norm, eps,
            KIND1, "", X_FORM, PARTS, NG, U, G, PTX, PDL, p_bias1,
        )  # fmt: skip
        _finish(y, p_out1, out_stride1, None, 0, first, m1, n, G)
    else:
        first = (i_program - programs0 - programs1) * (R * W)
        y, y1 = products(
            p_quants2, p_high2, p_scales2, p_supers2, None, None, None, None,
            tl.minimum(first + i_row, m2 - 1), token, n, p_q, p_d, p_s, p_x, x_row, p_norm, eps,
            KIND2, "", X_FORM, PARTS, NG, U, G, PTX, PDL, p_bias2,
        )  # fmt: skip
        _finish(y, p_out2, out_stride2, None, 0, first, m2, n, G)


# --- plain weights ---


@triton.jit
def _load_dense(p, stride, row, i_tile, K: tl.constexpr, U: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """A tile's weights [G, W, R, U, V]: V side by side, 0 past a row's end. row: int32 [1, W, R, 1]."""
    at = tl.arange(0, G)[:, None, None, None, None] * V + tl.arange(0, V)[None, None, None, None, :]
    step = tl.arange(0, U)[None, None, None, :, None] * (G * V)
    first = i_tile * (U * G * V)
    p = (p + first) + (row.to(tl.int64) * stride)[:, :, :, :, None] + at + step
    if K % (U * G * V) != 0:
        return tl.load(p, mask=first + step + at < K, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(p, eviction_policy="evict_first")


@triton.jit
def _load_dense_x(p, x_row, token, i_tile, FROM: tl.constexpr, K: tl.constexpr, W: tl.constexpr, U: tl.constexpr,
                  G: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """Four of each V activations, from number FROM on: f32 [G, W, 1, U, N, 4]."""
    at = tl.arange(0, G)[:, None, None, None, None, None] * V + tl.arange(0, 4)[None, None, None, None, None, :] + FROM
    at = tl.broadcast_to(at, (G, W, 1, 1, 1, 4))
    step = tl.arange(0, U)[None, None, None, :, None, None] * (G * V)
    first = i_tile * (U * G * V)
    p = (p + first) + token[None, None, None, None, :, None] * x_row + at + step
    if K % (U * G * V) != 0:
        return tl.load(p, mask=first + step + at < K, other=0.0, eviction_policy="evict_last")
    else:
        return tl.load(p, eviction_policy="evict_last")


@triton.jit
def _dense_tile(acc, w, x, x1):
    """acc [G, W, R, N] and a tile's products. x, x1: the first and the second four of each eight weights."""
    G: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[1]
    R: tl.constexpr = w.shape[2]
    U: tl.constexpr = w.shape[3]
    V: tl.constexpr = w.shape[4]
    w = w.to(tl.float32)
    if V == 8:
        w, w1 = tl.split(tl.permute(tl.reshape(w, (G, W, R, U, 2, 4)), (0, 1, 2, 3, 5, 4)))
        products = w[:, :, :, :, None, :] * x + w1[:, :, :, :, None, :] * x1
    else:
        products = w[:, :, :, :, None, :] * x
    return acc + tl.sum(tl.sum(products, 5), 3)


@triton.jit
def dense_products(
    p_w, stride, p_w1, stride1, row, token, p_x, x_row,
    PAIR: tl.constexpr, K: tl.constexpr, U: tl.constexpr, G: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr,
    p_bias=None,
):  # fmt: skip
    """Rows `row` ([1, W, R, 1]) of one matrix, or of two if PAIR, times x: f32 [W, R, N] each. bias: as products."""
    W: tl.constexpr = row.shape[1]
    TILES: tl.constexpr = (K + U * G * V - 1) // (U * G * V)
    w = _load_dense(p_w, stride, row, 0, K, U, G, V)
    if PAIR:
        w1 = _load_dense(p_w1, stride1, row, 0, K, U, G, V)
    acc = _first_sums(p_bias, row, token.shape[0], G)
    acc1 = tl.zeros(acc.shape, tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i_tile in range(1, TILES):
        next_w = _load_dense(p_w, stride, row, i_tile, K, U, G, V)
        if PAIR:
            next_w1 = _load_dense(p_w1, stride1, row, i_tile, K, U, G, V)
        x = _load_dense_x(p_x, x_row, token, i_tile - 1, 0, K, W, U, G, V)
        x1 = _load_dense_x(p_x, x_row, token, i_tile - 1, V - 4, K, W, U, G, V)
        acc = _dense_tile(acc, w, x, x1)
        w = next_w
        if PAIR:
            acc1 = _dense_tile(acc1, w1, x, x1)
            w1 = next_w1
    x = _load_dense_x(p_x, x_row, token, TILES - 1, 0, K, W, U, G, V)
    x1 = _load_dense_x(p_x, x_row, token, TILES - 1, V - 4, K, W, U, G, V)
    y = tl.sum(_dense_tile(acc, w, x, x1), 0)
    y1 = y
    if PAIR:
        y1 = tl.sum(_dense_tile(acc1, w1, x, x1), 0)
    return y, y1


@accesses(
    reads="p_w0 p_w1 p_w2 p_x p_bias0 p_bias1 p_bias2 p_residual",
    writes="p_out0 p_out1 p_out2",
    early="p_w0 p_w1 p_w2 p_bias0 p_bias1 p_bias2",
)
@triton.jit(do_not_specialize=_GENERAL)
def dense_gemv(
    p_w0, stride0, p_out0, out_stride0, m0, p_w1, stride1, p_out1, out_stride1, m1,
    p_w2, stride2, p_out2, out_stride2, m2, p_x, x_row, p_bias0, p_bias1, p_bias2, p_residual, residual_stride, n,
    MATRICES: tl.constexpr, GLU: tl.constexpr, K: tl.constexpr, N: tl.constexpr, U: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """packed_gemv for f32, f16 or bf16 weights, element (row, i) at row * stride + i, and f32 x: nothing is rounded."""
    i_program = tl.program_id(0)
    token = tl.minimum(tl.arange(0, N), n - 1)
    i_row = tl.arange(0, R)[None, None, :, None] * W + tl.arange(0, W)[None, :, None, None]
    programs0 = (m0 + (R * W - 1)) // (R * W)
    programs1 = 0
    if MATRICES > 1 and GLU == "":
        programs1 = (m1 + (R * W - 1)) // (R * W)
    if i_program < programs0 or (MATRICES == 1 or GLU != ""):
        first = i_program * (R * W)
        row = tl.minimum(first + i_row, m0 - 1)
        y, y1 = dense_products(
            p_w0, stride0, p_w1, stride1, row, token, p_x, x_row, GLU != "", K, U, G, V, PDL, p_bias0
        )
        if GLU != "":
            y = glu(y, y1, 0.0, 0.0, GLU, True)
        _finish(y, p_out0, out_stride0, p_residual, residual_stride, first, m0, n, G)
    elif i_program < programs0 + programs1 or MATRICES == 2:
        first = (i_program - programs0) * (R * W)
        row = tl.minimum(first + i_row, m1 - 1)
        y, y1 = dense_products(p_w1, stride1, None, 0, row, token, p_x, x_row, False, K, U, G, V, PDL, p_bias1)
        _finish(y, p_out1, out_stride1, None, 0, first, m1, n, G)
    else:
        first = (i_program - programs0 - programs1) * (R * W)
        row = tl.minimum(first + i_row, m2 - 1)
        y, y1 = dense_products(p_w2, stride2, None, 0, row, token, p_x, x_row, False, K, U, G, V, PDL, p_bias2)
        _finish(y, p_out2, out_stride2, None, 0, first, m2, n, G)


# --- launches ---


@dataclass(frozen=True, eq=False)
class Segment:
    """One of the matrices that a launch multiplies: packed, or plain [m, k] with elements of a row side by side.

    out: flat f32; the result of row r for token t goes to out[t * stride + r]. bias: f32 [m], is added to each token's.
    """

    weight: Packed | torch.Tensor
    out: torch.Tensor
    stride: int
    bias: torch.Tensor | None = None

    @property
    def m(self) -> int:
        return self.weight.rows if isinstance(self.weight, Packed) else self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.k if isinstance(self.weight, Packed) else self.weight.shape[1]


@dataclass(frozen=True)
class GemvConfig:
    """g: lanes side by side along k (8 to 32; more: several warps share a row); r: rows, u: steps along k in a lane's
    registers; registers: the most a thread may have, 0: as many as the compiler likes. Speed only.
    """

    warps: int = 4
    g: int = 32
    r: int = 1
    u: int = 1
    registers: int = 0

    @property
    def w(self) -> int:
        """Rows side by side over lanes and warps."""
        return 32 * self.warps // self.g

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return self.r * self.w


def config_for(kind: str, m: int, k: int, n: int) -> GemvConfig:
    """A launch's shape: kind of weights ("f32", "f16", "bf16" or a packed type), rows in all, their length, tokens."""
    dense = packing_of(kind) is None
    step = (4 if kind == "f32" else 8) if dense else 32
    pieces = -(-k // step)  # what a lane loads at once
    g = 32 if pieces > 16 else 16 if pieces > 8 else 8
    tiles = -(-pieces // g)
    if n > 4 and not dense and parts_of(k) == 2:
        # Twice the activations on their way: with two rows, or fewer registers, some of them would be spilled.
        return GemvConfig(4, g, 1, 1)
    if n > 1:
        # Tokens fill the registers; two rows share a token's loads. From 5 tokens on the compiler would take over 200
        # registers, to have all activations on their way at once.
        return GemvConfig(4, g, 2 if m >= 2048 else 1, 1, 168 if n > 4 else 0)
    if not dense and m < 1024 and tiles > 4:
        # Too few rows to fill the multiprocessors with a row a warp.
        return GemvConfig(4, 128, 1, 1 if tiles < 8 else 2)
    if dense and m <= 256 and 4 < tiles <= 32:
        # The same, as of a mixture's router: all of a row on its way at once, before x is there.
        return GemvConfig(4, 128, 1, 1 << (-(-pieces // 128) - 1).bit_length())
    # One row a warp, so that programs are many and small; all of a short row on its way at once.
    return GemvConfig(4, g, 1, 1 << (tiles - 1).bit_length() if tiles <= 4 else 4 if dense else 2)


def gemv(
    target: Target, segments: Sequence[Segment], x: Q8Rows | Rows, *, glu: str = "",
    residual: tuple[torch.Tensor, int] | None = None, norm: tuple[torch.Tensor, float] | None = None,
    config: GemvConfig | None = None,
) -> Launch:  # fmt: skip
    """Up to three matrices of one k times up to MAX_TOKENS vectors, in one launch.

    segments: all packed or all plain; types may differ. x: Q8Rows for packed weights; Rows of f32 (elements side
    by side) for plain ones, and for packed ones of k up to MAX_INLINE, which every program then rounds for itself.
    glu: one of GLU_KINDS: the two segments are gate and up, without biases, and the first one's out gets
    activation(gate) * up. residual: (flat f32, stride) added to the first segment's result; it may be its `out`.
    norm: (weights f32 [k], eps) of an RMS norm before the rounding of f32 x. config: instead of config_for's.
    """
    first = segments[0]
    assert 1 <= len(segments) <= 3 and 1 <= x.n <= MAX_TOKENS and all(s.k == x.k for s in segments)
    assert glu == "" or (glu in GLU_KINDS and len(segments) == 2 and segments[1].m == first.m)
    assert glu == "" or all(s.bias is None for s in segments)
    kind = first.weight.kind if isinstance(first.weight, Packed) else _PLAIN[first.weight.dtype]
    counted = segments[:1] if glu else segments
    c = config or config_for(kind, sum(s.m for s in counted), x.k, x.n)
    if isinstance(first.weight, Packed) and isinstance(x, Rows):  # one tile is the row
        c = replace(c, u=max(c.u, 1 << (-(-x.k // (32 * c.g)) - 1).bit_length()))
    args: dict[str, Any] = {
        "p_residual": residual and residual[0], "residual_stride": residual[1] if residual else 0,
        "n": x.n, "GLU": glu, "N": 1 << (x.n - 1).bit_length(), "U": c.u, "R": c.r, "W": c.w, "G": c.g,
        "PDL": target.has_pdl,
    }  # fmt: skip
    for i in range(3):
        s = segments[i] if i < len(segments) else None
        args |= {
            f"p_out{i}": None if s is None or (glu and i) else s.out,
            f"out_stride{i}": 0 if s is None else s.stride,
            f"m{i}": 0 if s is None else s.m,
            f"p_bias{i}": None if s is None else s.bias,
        }
    if isinstance(first.weight, Packed):
        args |= _packed_arguments(segments, x, norm) | {"PTX": uses_ptx(target)}
    else:
        assert isinstance(x, Rows) and norm is None
        args |= _dense_arguments(segments, x)
    grid = sum(-(-s.m // c.rows) for s in counted)
    options = launch_options(target, c.warps)
    if c.registers and target.is_nvidia:
        options["maxnreg"] = c.registers
    kernel = packed_gemv if isinstance(first.weight, Packed) else dense_gemv
    return Launch(kernel, (grid,), args, options)


_PLAIN = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _packed_arguments(
    segments: Sequence[Segment], x: Q8Rows | Rows, norm: tuple[torch.Tensor, float] | None
) -> dict[str, Any]:
    args: dict[str, Any] = {"NG": x.k // 32, "p_norm": norm and norm[0], "eps": norm[1] if norm else 0.0}
    args["PARTS"] = x.parts if isinstance(x, Q8Rows) else parts_of(x.k)
    for i in range(3):
        w = segments[i].weight if i < len(segments) else None
        assert w is None or isinstance(w, Packed)
        planes = (None,) * 4 if w is None else (w.quants, w.high, whole_plane(w.scales), whole_plane(w.supers))
        args |= {f"p_{name}{i}": plane for name, plane in zip(("quants", "high", "scales", "supers"), planes)}
        args[f"KIND{i}"] = "" if w is None else w.kind
    if isinstance(x, Q8Rows):
        assert norm is None
        form = {"X_FORM": "q8", "p_q": x.q.view(torch.int32), "p_d": x.d, "p_s": x.s, "p_x": None, "x_row": 0}
    else:
        assert x.stride == 1 and x.k <= MAX_INLINE and x.data.dtype == torch.float32
        form = {
            "X_FORM": "norm" if norm else "together" if x.k > MAX_ALONE else "f32",
            "p_q": None,
            "p_d": None,
            "p_s": None,
        }
        form |= {"p_x": x.data, "x_row": x.row_stride}
    return args | form


def whole_plane(plane: torch.Tensor | None) -> torch.Tensor | None:
    """A plane with what it has of a group, or of a block, as one integer."""
    if plane is None:
        return None
    return plane.view(_INTEGERS[plane.shape[-1] * plane.element_size()])


def _dense_arguments(segments: Sequence[Segment], x: Rows) -> dict[str, Any]:
    assert x.stride == 1 and x.data.dtype == torch.float32
    args: dict[str, Any] = {"K": x.k, "MATRICES": len(segments), "p_x": x.data, "x_row": x.row_stride}
    for i in range(3):
        w = segments[i].weight if i < len(segments) else None
        assert w is None or (isinstance(w, torch.Tensor) and (w.stride(1) == 1 or w.shape[1] == 1))
        args |= {f"p_w{i}": w, f"stride{i}": 0 if w is None else w.stride(0)}
    args["V"] = 4 if any(s.weight.dtype == torch.float32 for s in segments) else 8  # type: ignore[union-attr]
    return args
