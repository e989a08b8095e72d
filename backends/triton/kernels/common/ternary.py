"""Digits of base 3, five in a byte (packing.py's `ternary`), in plain Triton.

A byte times a power of 3, modulo 256, has the next digit on top. A block's byte has digits of five groups of 32, so a
lane reads the bytes that its group shares with others: some 12 instructions make four digits of a word.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_words(group):
    """Where in a block's 12 words of quants a group's first and second four words begin; group: its number there.

    The second ones of the last group are not there: all four are its word of `high`.
    """
    late = group > 4
    return tl.where(late, 8, 0), tl.where(late, 8, 4)


@triton.jit
def _power(n):
    """3^n for n up to 4."""
    return tl.where(n == 0, 1, tl.where(n == 1, 3, tl.where(n == 2, 9, tl.where(n == 3, 27, 81))))


@triton.jit
def powers(group, i):
    """Which power of 3 a group's first 16 digits, and its second ones of word i, are multiplied by."""
    late = group > 4
    pair = 2 * (group - 5)
    return _power(tl.where(late, pair, group)), _power(tl.where(group == 7, i, tl.where(late, pair + 1, group)))


@triton.jit
def digits(word, power):
    """The digits, 0 to 2, of a word's bytes as bytes."""
    even = ((word & 0x00FF00FF) * power) & 0x00FF00FF
    odd = (((word >> 8) & 0x00FF00FF) * power) & 0x00FF00FF
    return (((even * 3) >> 8) & 0x00030003) | ((odd * 3) & 0x03000300)
