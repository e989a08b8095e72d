"""Floats made of bits, and of what bits they are, in plain Triton. gluon_bits.py is the same for Gluon."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.device import interpreting

#: Triton 3.6's interpreter cuts an f32 off to bf16 instead of rounding it.
ROUND_BY_HAND = tl.constexpr(interpreting())
#: PTX that makes f16 of two words' four int8 each and multiplies them by $6, a pair of f16: $0 to $3 are pairs, of both
#: words' first bytes and so on. A byte under the exponent of 1024, its sign bit turned, is the f16 number 1152 + int8.
BYTES_TIMES_F16 = tl.constexpr(
    """
    {
    .reg .b32 t<4>, base;
    mov.b32 base, 0x64806480;
    prmt.b32 t0, $4, $5, 0x0400;
    prmt.b32 t1, $4, $5, 0x0501;
    prmt.b32 t2, $4, $5, 0x0602;
    prmt.b32 t3, $4, $5, 0x0703;
    lop3.b32 t0, t0, 0x00FF00FF, base, 0x6A;
    lop3.b32 t1, t1, 0x00FF00FF, base, 0x6A;
    lop3.b32 t2, t2, 0x00FF00FF, base, 0x6A;
    lop3.b32 t3, t3, 0x00FF00FF, base, 0x6A;
    sub.f16x2 t0, t0, base;
    sub.f16x2 t1, t1, base;
    sub.f16x2 t2, t2, base;
    sub.f16x2 t3, t3, base;
    mul.f16x2 $0, t0, $6;
    mul.f16x2 $1, t1, $6;
    mul.f16x2 $2, t2, $6;
    mul.f16x2 $3, t3, $6;
    }
    """
)


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
