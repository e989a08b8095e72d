"""The scales of packed groups, in plain Triton: a form of packing.py's ScaleForm is a branch here and nowhere else.

scales: an integer of what a group has in that plane, supers: of what 256 elements have, d lowest; bits above those may
be anything. A value is scale * code less what is taken off. gluon_scales.py is the same for Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common.bits import f16_low
from graphrt.backends.triton.kernels.kinds import (
    has_f16_scales,
    has_min,
    number_at,
    number_power,
    number_width,
    scale_form,
)


@triton.jit
def f32_low(word):
    """The f16 in the low 16 bits of an integer, as f32."""
    return f16_low(word).to(tl.float32)


@triton.jit
def _field(word, at, bits: tl.constexpr):
    """The number of so many bits from bit `at` on, as f32."""
    return ((word.to(tl.int32) >> at) & ((1 << bits) - 1)).to(tl.float32)


@triton.jit
def _signed_byte(word, at):
    """The int8 from bit `at` on, as f32."""
    return (word.to(tl.int32) >> at).to(tl.int8).to(tl.float32)


@triton.jit
def _odd(scales, HALF: tl.constexpr, KIND: tl.constexpr):
    """Twice a half's number and one, times the form's power of two."""
    number = _field(scales, number_at(KIND, HALF), number_width(KIND))
    return number * (2.0 * number_power(KIND)) + number_power(KIND)


@triton.jit
def half_ue4m3(scales, AT: tl.constexpr):
    """Half of the number whose exponent's 4 bits and mantissa's 3 begin at a bit; as gguf has it 0 for a byte 0x7F."""
    byte = (scales.to(tl.int32) >> AT) & 255
    # As an f32 the bits' exponent is off by 119, also where they are a denormal number.
    number = ((byte & 127) << 20).to(tl.float32, bitcast=True) * 6.646139978924579e35
    return tl.where(byte == 127, 0.0, number)


@triton.jit
def half_scales(scales, supers, KIND: tl.constexpr):
    """Of types with a scale for each half group: (first, second, d, first_min, second_min, d_min), f32.

    The first half's scale is first * d, what is taken off first_min * d_min; for types without mins these are d.
    """
    d = f32_low(supers)
    d_min = d
    if scale_form(KIND) == "i8_halves":
        first, second = _signed_byte(scales, 0), _signed_byte(scales, 8)
        first_min, second_min = first, second
    elif scale_form(KIND) == "odd":
        first, second = _odd(scales, 0, KIND), _odd(scales, 1, KIND)
        first_min, second_min = first, second
    elif scale_form(KIND) == "ue4m3_halves":
        first, second = half_ue4m3(scales, 0), half_ue4m3(scales, 8)
        first_min, second_min = first, second
        d = tl.full(first.shape, 1.0, tl.float32)
        d_min = d
    else:  # u4_min_halves
        tl.static_assert(scale_form(KIND) == "u4_min_halves")
        first, second = _field(scales, 0, 4), _field(scales, 8, 4)
        first_min, second_min = _field(scales, 4, 4), _field(scales, 12, 4)
        d_min = f32_low(supers >> 16)
    return first, second, d, first_min, second_min, d_min


@triton.jit
def f16_scale(scales, KIND: tl.constexpr):
    """Of types whose scales are f16 as they lie: (d, m), f16: a value is d * code + m; d again for types without m."""
    d = f16_low(scales)
    return d, f16_low(scales >> 16) if has_min(KIND) else d


@triton.jit
def group_scale(scales, supers, KIND: tl.constexpr):
    """Of types with one scale a group: (scale, what is taken off), f32; the scale again for types without mins."""
    if has_f16_scales(KIND):
        d, m = f16_scale(scales, KIND)
        scale, off = d.to(tl.float32), -m.to(tl.float32)
    elif scale_form(KIND) == "u6_min":
        scale = _field(scales, 0, 8) * f32_low(supers)
        off = _field(scales, 8, 8) * f32_low(supers >> 16)
    elif scale_form(KIND) == "odd":
        scale = _odd(scales, 0, KIND) * f32_low(supers)
        off = scale
    elif scale_form(KIND) == "d":
        scale = f32_low(supers)
        off = scale
    elif scale_form(KIND) == "i8":
        scale = _signed_byte(scales, 0) * f32_low(supers)
        off = scale
    else:  # 2^(e - 128), since a codebook of e2m1 has doubled values; below the smallest normal f32 as well
        tl.static_assert(scale_form(KIND) == "e8m0")
        e = scales.to(tl.int32) & 255
        scale = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23).to(tl.float32, bitcast=True)
        off = scale
    return scale, off
