"""Codes as wgmma.py's first operand: two at a time, in f16 throughout (Gluon).

A code under the exponent of 1024 is the f16 1024 + code; one in the high nibble of its byte under that of 64 is
64 + code. Bytes 0 and 2 of a word lie where a pair of f16 has its low bits, so a mask and an exponent make two numbers
of them at once; bytes 1 and 3 do after a shift by 8. From these the exponent and a centre are taken, which is exact,
then they are multiplied with the group's scale, and what is added is added, which rounds once.

Scales that are products (d times an integer) are rounded to f16 first. What that loses is in proportion to what is
multiplied with it, so codes are taken from their middle, and what is to be added is made for that, in f32. Scales below
6e-5, f16's smallest normal number, lose more: those of weights that are all below 1e-3 or so.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    code_offset,
    has_f16_scales,
    has_min,
    has_plain_nibbles,
    high_bits,
    is_e2m1,
    is_signed,
)


@gluon.constexpr_function
def centre_of(KIND):
    """The code that counts as 0 when a scale is multiplied with it."""
    if has_min(KIND) and not has_f16_scales(KIND):
        return 1 << (code_bits(KIND) + high_bits(KIND) - 1)
    return code_offset(KIND)


@gluon.constexpr_function
def _pairs_asm(KIND, SHIFTED):
    """PTX: f16 weights $0..$3 of the bytes of $4. $5, $6: scale and what is added, each twice in a word.

    SHIFTED: codes are in the bytes' high nibbles. Bytes of e2m1 are the numbers' high ones.
    """
    lines = [".reg .b32 w, t0, t1;"]
    if is_e2m1(KIND):
        lines += ["prmt.b32 t0, $4, 0, 0x2404;", "prmt.b32 t1, $4, 0, 0x3414;"]
    elif has_plain_nibbles(KIND):
        mask, base = ("0x00F000F0", "0x54005400") if SHIFTED else ("0x000F000F", "0x64006400")
        lines += [f"lop3.b32 t0, $4, {mask}, {base}, 0xEA;", "shr.u32 w, $4, 8;"]
        lines += [f"lop3.b32 t1, w, {mask}, {base}, 0xEA;"]  # (w & mask) | base
    else:
        lines += ["xor.b32 w, $4, 0x80808080;" if is_signed(KIND) else "mov.b32 w, $4;"]
        lines += ["prmt.b32 t0, w, 0x64646464, 0x4240;", "prmt.b32 t1, w, 0x64646464, 0x4341;"]
    if not is_e2m1(KIND):
        zero = centre_of(KIND) + (128 if is_signed(KIND) else 0)
        bits = 0x5400 + 16 * zero if SHIFTED else 0x6400 + zero
        lines += [".reg .b32 zero;", f"mov.b32 zero, 0x{bits:04x}{bits:04x};"]
        lines += ["sub.f16x2 t0, t0, zero;", "sub.f16x2 t1, t1, zero;"]
    if has_min(KIND):
        lines += ["fma.rn.f16x2 t0, t0, $5, $6;", "fma.rn.f16x2 t1, t1, $5, $6;"]
    else:
        lines += ["mul.rn.f16x2 t0, t0, $5;", "mul.rn.f16x2 t1, t1, $5;"]
    return "{\n" + "\n".join([*lines, "mov.b32 {$0, $2}, t0;", "mov.b32 {$1, $3}, t1;"]) + "\n}"


@gluon.jit
def twice(x, KIND: gl.constexpr):
    """Scales as scales_of() has them as f16, each in both halves of a word."""
    if not (has_f16_scales(KIND) or is_e2m1(KIND)):
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise("mov.b32 $0, {$1, $1};", "=r,h", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def f16_pairs(codes, scale, add, KIND: gl.constexpr, SHIFTED: gl.constexpr):
    """Half groups' codes, the bytes of int32 [WK, ROWS, 4, 4], as weights: f16 [WK, ROWS, 64].

    scale, add: [WK, ROWS, 4], as twice() has them. Of k, steps of 16 are words, and elements of a step are byte % 2,
    group, byte / 2.
    """
    WK: gl.constexpr = codes.shape[0]
    ROWS: gl.constexpr = codes.shape[1]
    codes, scale = gl.broadcast(codes, gl.expand_dims(scale, 3))
    codes, add = gl.broadcast(codes, gl.expand_dims(add, 3))
    b0, b1, b2, b3 = gl.inline_asm_elementwise(
        _pairs_asm(KIND, SHIFTED), "=h,=h,=h,=h,r,r,r", [codes, scale, add],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    w = gl.join(gl.join(b0, b1), gl.join(b2, b3))  # [WK, ROWS, 4, word, byte % 2, byte / 2]
    return gl.reshape(gl.permute(w, (0, 1, 3, 4, 2, 5)), [WK, ROWS, 64])
