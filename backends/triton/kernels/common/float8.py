"""Floats of 8 bits (dtypes.FLOATS8) in plain Triton: memory has their codes, as uint8, and registers their numbers.

A code is read as an f16 of its exponent and mantissa bits, times the difference of the biases: exact, small numbers
too, so products of f16 multiply what is stored. Nothing here asks Triton for a type of 8 bits: sm_80 has none, and
gfx942's instructions mean another format (fnuz) of the same name.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.dtypes import FLOATS8

_FACTS = tl.constexpr(FLOATS8)


@triton.constexpr_function
def is_float8(KIND):
    return KIND in _FACTS.value


@triton.constexpr_function
def mantissa_bits(KIND):
    return _FACTS.value[KIND].mantissa


@triton.constexpr_function
def exponent_bias(KIND):
    return _FACTS.value[KIND].bias


@triton.constexpr_function
def largest_number(KIND):
    return _FACTS.value[KIND].largest


@triton.constexpr_function
def nan_code(KIND):
    return _FACTS.value[KIND].nan


@triton.constexpr_function
def has_one_nan(KIND):
    """NaN has one code a sign, whose f16 would be a number: e4m3. (f16 has e5m2's infinities and NaN as they are.)"""
    return _FACTS.value[KIND].mantissa == 3


#: Two f16 of two codes each. sm_89 and later have an instruction. (Of e5m2 every GPU shifts.)
E4M3_CVT = tl.constexpr(
    """
    {
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
    }
    """
)
#: The same before sm_89: a code under the f16's sign, exponent and mantissa, times 2^8. NaN's code is 480 then, the one
#: number that times 144 is infinite in f16; 0 times that, added, is NaN, and 0 else.
E4M3_BITS = tl.constexpr(
    """
    {
    .reg .b32 a, b, s, t, up, over, none;
    mov.b32 up, 0x5C005C00;
    mov.b32 over, 0x58805880;
    mov.b32 none, 0x00000000;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 s, a, 1;
    shr.u32 t, b, 1;
    and.b32 s, s, 0x3F803F80;
    and.b32 t, t, 0x3F803F80;
    and.b32 a, a, 0x80008000;
    and.b32 b, b, 0x80008000;
    or.b32 a, a, s;
    or.b32 b, b, t;
    mul.rn.f16x2 a, a, up;
    mul.rn.f16x2 b, b, up;
    mul.rn.f16x2 s, a, over;
    mul.rn.f16x2 t, b, over;
    fma.rn.f16x2 $0, s, none, a;
    fma.rn.f16x2 $1, t, none, b;
    }
    """
)


@triton.jit
def float8_values(codes, KIND: tl.constexpr, PTX: tl.constexpr):
    """f16 of codes, uint8, each the number that is stored. PTX: the compute capability times 10, or 0."""
    if PTX >= 89 and has_one_nan(KIND):
        return tl.inline_asm_elementwise(E4M3_CVT, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    elif PTX > 0 and has_one_nan(KIND):
        return tl.inline_asm_elementwise(E4M3_BITS, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        wide = codes.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << (10 - mantissa_bits(KIND)))
        x = bits.to(tl.float16, bitcast=True)
        if has_one_nan(KIND):
            x = tl.where((wide & 0x7F) == nan_code(KIND), float("nan"), x * 256.0)
        return x


@triton.jit
def float8_codes(x, KIND: tl.constexpr):
    """The codes of f32 values, uint8: the nearest numbers, of two the even code; what is larger than the largest
    number, infinity too, becomes that; NaN stays NaN."""
    DROP: tl.constexpr = 23 - mantissa_bits(KIND)
    LEAST: tl.constexpr = 1 - exponent_bias(KIND)  # the exponent of the least normal number
    size = tl.abs(x)
    size = tl.where(size > largest_number(KIND), largest_number(KIND), size)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP) - (
        (127 - exponent_bias(KIND)) << mantissa_bits(KIND)
    )
    # Below that numbers are multiples of one step: added to 2^23, which has steps of 1, they are rounded to these.
    small = (size * 2.0 ** (mantissa_bits(KIND) - LEAST) + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(size < 2.0**LEAST, small, normal)
    code = tl.where(x == x, code, nan_code(KIND))
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
