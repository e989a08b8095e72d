"""Floats made of bits, and of what bits they are, in plain Triton. gluon_bits.py is the same for Gluon."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.device import interpreting

#: Triton 3.6's interpreter cuts an f32 off to bf16 instead of rounding it.
ROUND_BY_HAND = tl.constexpr(interpreting())


@triton.jit
def f16_low(word):
    """The f16 in the low 16 bits of an integer."""
    return word.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def stored_as(x, TYPE: tl.constexpr):
    """f32 values as a type of stored elements, rounded to nearest, ties to even."""
    if TYPE == tl.bfloat16 and ROUND_BY_HAND:
        bits = x.to(tl.int32, bitcast=True)
        up = tl.where(x == x, 0x7FFF + ((bits >> 16) & 1), 0)
        return ((bits + up) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TYPE)
