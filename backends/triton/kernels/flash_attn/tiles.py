"""Tiles of K and V as the matrix units take them: loads of every cache type, dequantized in registers.

A tile is [n, D] with n rows of the cache. Dequantizing leaves the D values in the order in which the bytes lie, which
for a dot product may be any order as long as both sides share it: `slot_elements` says which element each slot holds,
and Q is loaded, or the result stored, by it.

Blocks of q8_0, q4_0, iq4_nl and q5_0 have 2 bytes more than a whole number of 4-byte words, so that only every second
block starts on a word. Where rows are aligned (ALIGNED), a pair of blocks is read as words: the second block's values
lie on words, the first one's 2 bytes off, and its last word takes the two values that precede its first. Otherwise
words are put together from 16-bit halves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common.bits import BYTES_TIMES_F16, f16_low
from graphrt.backends.triton.kernels.common.blocks import halves_a_block, is_quantized, values_at, words_a_block
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    code_offset,
    codebook_half,
    has_codebook,
    has_min,
    has_plain_nibbles,
    high_bits,
)


@triton.jit
def slot_elements(i_slot, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Which element of a row each slot of a tile holds. i_slot: int32, any shape."""
    if is_quantized(KIND):
        i_block = i_slot // 32
        turned = (i_block % 2 == 0) & (ALIGNED and halves_a_block(KIND) % 2 == 1)
        if code_bits(KIND) == 8:
            i = i_slot % 32
            return i_block * 32 + tl.where(turned, (i + 2) % 32, i)
        else:
            i = (i_slot % 32) // 2  # slots 2i and 2i+1: the low and the high half of byte i
            return i_block * 32 + tl.where(turned, (i + 2) % 16, i) + 16 * (i_slot % 2)
    else:
        return i_slot


def same_order(kind: str, aligned: bool) -> tuple[str, bool]:
    """One (KIND, ALIGNED) for all that have an order of elements in common, so that less is compiled."""
    if not is_quantized(kind):
        return "f32", True
    return "q8_0" if code_bits(kind) == 8 else "q4_0", aligned and halves_a_block(kind) % 2 == 1


@triton.jit
def _word(p_halves, i_half, m_load):
    """Words put together from two 16-bit loads. p_halves: int16 pointers."""
    low = tl.load(p_halves + i_half, mask=m_load, other=0).to(tl.int32)
    high = tl.load(p_halves + i_half + 1, mask=m_load, other=0).to(tl.int32)
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def _load_blocks_aligned(p_rows, i_block, m_block, KIND: tl.constexpr):
    """(values [n, blocks, words], header, second header [n, blocks]) of rows whose pairs of blocks are words.

    p_rows: int32 pointers [n]; i_block: int32 [blocks]; m_block: [n, blocks], what to load.
    """
    J: tl.constexpr = words_a_block(KIND)
    HALVES: tl.constexpr = halves_a_block(KIND)
    i_word = tl.arange(0, J)
    p_2d = p_rows[:, None]
    p_3d = p_rows[:, None, None]
    if HALVES % 2 == 1:
        odd = i_block % 2
        base = (i_block // 2) * HALVES
        first = base + odd * (HALVES // 2)  # the word with d: in its low half in an even block, high in an odd one
        at = base + (values_at(KIND) + 1) // 2 + odd * ((HALVES + values_at(KIND)) // 2 - (values_at(KIND) + 1) // 2)
        head = tl.load(p_2d + first[None, :], mask=m_block, other=0)
        words = tl.load(p_3d + at[None, :, None] + i_word[None, None, :], mask=m_block[:, :, None], other=0)
        # Of an even block the two values before its first whole word: in the word before `at`.
        if high_bits(KIND) == 0:
            second = head
        else:  # as q5_0: d0 qh | qh v v; ...; v v d1; qh
            second = tl.load(p_2d + (at - 1)[None, :], mask=m_block, other=0)
        turned = (odd[None, :, None] == 0) & (i_word[None, None, :] == J - 1)
        words = tl.where(turned, (words & 0xFFFF) | (second[:, :, None] & -65536), words)
        d = tl.where(odd[None, :] == 0, head, head >> 16)
        if high_bits(KIND) != 0:
            high = ((head >> 16) & 0xFFFF) | (second << 16)
            second = tl.where(odd[None, :] == 0, high, second)
        return words, d, second
    else:
        first = i_block * (HALVES // 2)
        head = tl.load(p_2d + first[None, :], mask=m_block, other=0)
        second = head
        if high_bits(KIND) != 0:
            second = tl.load(p_2d + first[None, :] + 1, mask=m_block, other=0)
        at = first + values_at(KIND) // 2
        words = tl.load(p_3d + at[None, :, None] + i_word[None, None, :], mask=m_block[:, :, None], other=0)
        return words, head, second


@triton.jit
def _load_blocks_any(p_rows, i_block, m_block, KIND: tl.constexpr):
    """The same for rows at any even address. p_rows: int16 pointers [n]."""
    HALVES: tl.constexpr = halves_a_block(KIND)
    FIRST: tl.constexpr = values_at(KIND)
    i_word = tl.arange(0, words_a_block(KIND))
    p_2d = p_rows[:, None]
    first = (i_block * HALVES)[None, :]
    if has_min(KIND):
        head = _word(p_2d, first, m_block)
    else:
        head = tl.load(p_2d + first, mask=m_block, other=0).to(tl.int32)
    second = head
    if high_bits(KIND) != 0:
        second = _word(p_2d, first + FIRST - 2, m_block)
    words = _word(p_rows[:, None, None], first[:, :, None] + FIRST + 2 * i_word[None, None, :], m_block[:, :, None])
    return words, head, second


@triton.jit
def _byte_values(words, d):
    """Four f16 of each word of four int8, times d: f16, d of words' shape."""
    # A byte b under the exponent of 1024 is the f16 number 1024 + b; with its sign bit turned, 1152 + int8.
    a = (((words) & 0xFF) ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    b = (((words >> 8) & 0xFF) ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    c = (((words >> 16) & 0xFF) ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    e = (((words >> 24) & 0xFF) ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    return a * d, b * d, c * d, e * d


@triton.jit
def _byte_values_ptx(words, d):
    """The same in PTX: two words at once, so that each f16 instruction serves two values."""
    return tl.inline_asm_elementwise(
        BYTES_TIMES_F16,
        "=r,=r,=r,=r,r,r,r", [words, d], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _nibbles_ptx(words, d, m):
    """Eight f16 of each word of eight 4-bit numbers n: (n - 1024 + 1024) * d + m, low and high half of each byte."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t<4>, h<4>, base;
        mov.b32 base, 0x64006400;
        prmt.b32 t0, $8, $9, 0x0400;
        prmt.b32 t1, $8, $9, 0x0501;
        prmt.b32 t2, $8, $9, 0x0602;
        prmt.b32 t3, $8, $9, 0x0703;
        shr.b32 h0, t0, 4;
        shr.b32 h1, t1, 4;
        shr.b32 h2, t2, 4;
        shr.b32 h3, t3, 4;
        lop3.b32 t0, t0, 0x000F000F, base, 0xEA;
        lop3.b32 t1, t1, 0x000F000F, base, 0xEA;
        lop3.b32 t2, t2, 0x000F000F, base, 0xEA;
        lop3.b32 t3, t3, 0x000F000F, base, 0xEA;
        lop3.b32 h0, h0, 0x000F000F, base, 0xEA;
        lop3.b32 h1, h1, 0x000F000F, base, 0xEA;
        lop3.b32 h2, h2, 0x000F000F, base, 0xEA;
        lop3.b32 h3, h3, 0x000F000F, base, 0xEA;
        sub.f16x2 t0, t0, base;
        sub.f16x2 t1, t1, base;
        sub.f16x2 t2, t2, base;
        sub.f16x2 t3, t3, base;
        sub.f16x2 h0, h0, base;
        sub.f16x2 h1, h1, base;
        sub.f16x2 h2, h2, base;
        sub.f16x2 h3, h3, base;
        fma.rn.f16x2 $0, t0, $10, $11;
        fma.rn.f16x2 $1, h0, $10, $11;
        fma.rn.f16x2 $2, t1, $10, $11;
        fma.rn.f16x2 $3, h1, $10, $11;
        fma.rn.f16x2 $4, t2, $10, $11;
        fma.rn.f16x2 $5, h2, $10, $11;
        fma.rn.f16x2 $6, t3, $10, $11;
        fma.rn.f16x2 $7, h3, $10, $11;
        }
        """,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words, d, m],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _of_codebook(n, KIND: tl.constexpr):
    """The values that 4-bit numbers stand for, from the halves of a codebook."""
    low = tl.full([], codebook_half(KIND, 0), tl.int64)
    high = tl.full([], codebook_half(KIND, 1), tl.int64)
    shift = ((n & 7) * 8).to(tl.int64)
    return (tl.where(n < 8, low, high) >> shift).to(tl.int8)


@triton.jit
def _nibble_values(n, i_byte, high_half, second, d, m, KIND: tl.constexpr):
    """f16 of 4-bit numbers. i_byte: which of the block's 16 bytes; second: the fifth bits, if any."""
    if has_codebook(KIND):
        return _of_codebook(n, KIND).to(tl.float16) * d
    if high_bits(KIND) != 0:
        n = n | (((second >> (i_byte + high_half)) & 1) << 4)
    x = n.to(tl.float16)
    if not has_min(KIND):
        return (x - 1.0 * code_offset(KIND)) * d
    else:  # one rounding, as a fused multiply-add has
        return (x.to(tl.float32) * d.to(tl.float32) + m.to(tl.float32)).to(tl.float16)


@triton.jit
def load_quantized(p_rows, i_block, m_block, KIND: tl.constexpr, ALIGNED: tl.constexpr, PTX: tl.constexpr):
    """A tile of quantized rows as f16 [n, 32 * blocks] in the order of slot_elements; 0 where m_block is false.

    p_rows: [n] pointers, int32 if ALIGNED else int16; i_block: int32 [blocks]; m_block: [n, blocks]. PTX: the matrix
    units' machine is NVIDIA's.
    """
    N: tl.constexpr = p_rows.shape[0]
    NB: tl.constexpr = i_block.shape[0]
    J: tl.constexpr = words_a_block(KIND)
    if ALIGNED:
        words, head, second = _load_blocks_aligned(p_rows, i_block, m_block, KIND)
    else:
        words, head, second = _load_blocks_any(p_rows, i_block, m_block, KIND)
    d = f16_low(head)
    m = f16_low(head >> 16)
    d3 = tl.broadcast_to(d[:, :, None], (N, NB, J))
    if code_bits(KIND) == 8:
        if PTX:
            a, b, c, e = _byte_values_ptx(words, d3)
        else:
            a, b, c, e = _byte_values(words, d3)
        tile = tl.join(tl.join(a, c), tl.join(b, e))
    else:
        tl.static_assert(code_bits(KIND) == 4)
        if PTX and has_plain_nibbles(KIND):
            if not has_min(KIND):
                m = d * (-1.0 * code_offset(KIND))
            m3 = tl.broadcast_to(m[:, :, None], (N, NB, J))
            a, a1, b, b1, c, c1, e, e1 = _nibbles_ptx(words, d3, m3)
        else:
            i_byte = 4 * tl.arange(0, J)[None, None, :] + tl.zeros([1, NB, 1], tl.int32)
            if ALIGNED and halves_a_block(KIND) % 2 == 1:
                i_byte += tl.where(i_block[None, :, None] % 2 == 0, 2, 0)
            second3 = tl.broadcast_to(second[:, :, None], (N, NB, J))
            m3 = tl.broadcast_to(m[:, :, None], (N, NB, J))
            a = _nibble_values(words & 15, i_byte % 16, 0, second3, d3, m3, KIND)
            a1 = _nibble_values((words >> 4) & 15, i_byte % 16, 16, second3, d3, m3, KIND)
            b = _nibble_values((words >> 8) & 15, (i_byte + 1) % 16, 0, second3, d3, m3, KIND)
            b1 = _nibble_values((words >> 12) & 15, (i_byte + 1) % 16, 16, second3, d3, m3, KIND)
            c = _nibble_values((words >> 16) & 15, (i_byte + 2) % 16, 0, second3, d3, m3, KIND)
            c1 = _nibble_values((words >> 20) & 15, (i_byte + 2) % 16, 16, second3, d3, m3, KIND)
            e = _nibble_values((words >> 24) & 15, (i_byte + 3) % 16, 0, second3, d3, m3, KIND)
            e1 = _nibble_values((words >> 28) & 15, (i_byte + 3) % 16, 16, second3, d3, m3, KIND)
        # join() puts its second argument last: of three levels the innermost index is the outermost join's.
        low = tl.join(tl.join(a, c), tl.join(b, e))
        high = tl.join(tl.join(a1, c1), tl.join(b1, e1))
        tile = tl.join(low, high)
    return tl.reshape(tile, (N, NB * 32))
