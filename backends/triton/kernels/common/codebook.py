"""Codes of 4 bits as the values of a codebook, four as the bytes of a word (plain Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.kinds import codebook_word, has_small_codebook


@triton.jit
def permuted(a, b, selector):
    """Byte i of the result is byte n of a (n < 4) or n - 4 of b, n being nibble i of the selector (below 8)."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=tl.int32,
                                     is_pure=True, pack=1)  # fmt: skip


@triton.constexpr_function
def _table_word(KIND, i, SHIFT):
    """Values 4i to 4i + 3 of a codebook, each with SHIFT, as an int32."""
    word = codebook_word(KIND, i, SHIFT)
    return word - (1 << 32) if word >= 1 << 31 else word


@triton.jit
def of_bytes(n, KIND: tl.constexpr, SHIFT: tl.constexpr):
    """Values of four codes, given as the bytes of a word, as bytes."""
    word = n & 0
    for j in tl.static_range(4):
        code = (n >> (8 * j)) & 15
        value = word
        for i in tl.static_range(4):
            value = tl.where(code // 4 == i, _table_word(KIND, i, SHIFT), value)
        word = word | (((value >> (8 * (code % 4))) & 255) << (8 * j))
    return word


@triton.jit
def _spread(nibbles):
    """The low four nibbles of a word as bytes."""
    pairs = (nibbles & 255) | ((nibbles & 0xFF00) << 8)
    return (pairs & 0x000F000F) | ((pairs & 0x00F000F0) << 4)


@triton.jit
def of_nibbles(w, KIND: tl.constexpr, SHIFT: tl.constexpr, PTX: tl.constexpr):
    """Values of a word's low four nibbles and of its high four, each with SHIFT, as bytes.

    SHIFT: 0, or what makes all values less than 128 and none negative, which takes fewer instructions.
    """
    if PTX:
        # prmt looks 4 codes up at once in 8 values: those of codes below 8, those of the others, then one of the two.
        T0: tl.constexpr = _table_word(KIND, 0, SHIFT)
        T1: tl.constexpr = _table_word(KIND, 1, SHIFT)
        T2: tl.constexpr = _table_word(KIND, 2, SHIFT)
        T3: tl.constexpr = _table_word(KIND, 3, SHIFT)
        if has_small_codebook(KIND):
            return permuted(T0, T1, w), permuted(T0, T1, w >> 16)
        elif SHIFT != 0:
            # A selector's fourth bit asks for the value's sign throughout, here 0: so the wrong half adds nothing.
            flipped = w ^ -0x77777778
            first = permuted(T0, T1, w) | permuted(T2, T3, flipped)
            return first, permuted(T0, T1, w >> 16) | permuted(T2, T3, flipped >> 16)
        else:
            code = w & 0x77777777
            half = ((w >> 1) & 0x44444444) | 0x32103210
            first = permuted(permuted(T0, T1, code), permuted(T2, T3, code), half)
            code = code >> 16
            return first, permuted(permuted(T0, T1, code), permuted(T2, T3, code), half >> 16)
    else:
        return of_bytes(_spread(w), KIND, SHIFT), of_bytes(_spread(w >> 16), KIND, SHIFT)
