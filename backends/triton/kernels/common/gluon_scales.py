"""scales.py for Gluon: the forms of types that the kernels with matrix units take."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.gluon_bits import f16_low
from graphrt.backends.triton.kernels.kinds import has_min, scale_form


@gluon.jit
def field(word, at: gl.constexpr, bits: gl.constexpr):
    """The number of so many bits from bit `at` on, as f32."""
    return ((word.to(gl.int32) >> at) & ((1 << bits) - 1)).to(gl.float32)


@gluon.jit
def signed_byte(word, at: gl.constexpr):
    """The int8 from bit `at` on, as f32."""
    return (word.to(gl.int32) >> at).to(gl.int8).to(gl.float32)


@gluon.jit
def half_ue4m3(scales, AT: gl.constexpr, POWER: gl.constexpr):
    """scales.half_ue4m3() times so many powers of two."""
    byte = (scales.to(gl.int32) >> AT) & 255
    number = ((byte & 127) << 20).to(gl.float32, bitcast=True) * (6.646139978924579e35 * (1 << POWER))
    return gl.where(byte == 127, 0.0, number)


@gluon.jit
def half_scales(scales, supers, KIND: gl.constexpr):
    """scales.half_scales() of types with supers."""
    gl.static_assert(scale_form(KIND) == "i8_halves")
    d = f16_low(supers).to(gl.float32)
    first = signed_byte(scales, 0)
    second = signed_byte(scales, 8)
    return first, second, d, first, second, d


@gluon.jit
def f16_scale(scales, KIND: gl.constexpr):
    """scales.f16_scale()."""
    d = f16_low(scales)
    if has_min(KIND):
        return d, f16_low(scales >> 16)
    else:
        return d, d


@gluon.jit
def group_scale(scales, supers, KIND: gl.constexpr, POWER: gl.constexpr):
    """scales.group_scale() of types without f16 scales. POWER: an exponent alone times so many powers of two."""
    if scale_form(KIND) == "u6_min":
        scale = field(scales, 0, 8) * f16_low(supers).to(gl.float32)
        off = field(scales, 8, 8) * f16_low(supers >> 16).to(gl.float32)
    elif scale_form(KIND) == "i8":
        scale = signed_byte(scales, 0) * f16_low(supers).to(gl.float32)
        off = scale
    else:
        gl.static_assert(scale_form(KIND) == "e8m0")
        e = scales.to(gl.int32) & 0xFF
        if POWER == 0:
            scale = gl.where(e < 2, 0x00200000 << e, (e - 1) << 23).to(gl.float32, bitcast=True)
        else:
            scale = (gl.minimum(e + (POWER - 1), 255) << 23).to(gl.float32, bitcast=True)
        off = scale
    return scale, off
