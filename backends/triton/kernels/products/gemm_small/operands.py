"""Planes in shared memory as operands of mma.py and wgmma.py: codes become f16 where they are multiplied (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.common.gluon_scales import f16_scale, group_scale, half_scales, half_ue4m3
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    code_offset,
    has_codebook,
    has_f16_scales,
    has_half_scales,
    has_min,
    has_plain_nibbles,
    has_supers,
    high_bits,
    is_e2m1,
    is_signed,
    pairs_of_supers,
)
from graphrt.backends.triton.kernels.products.gemm_small.layouts import high_layout, mma_layout, words_layout, x_layout
from graphrt.backends.triton.kernels.products.gemm_small.pairs import centre_of, twice
from graphrt.backends.triton.kernels.products.gemm_small.rings import matrix_row
from graphrt.backends.triton.kernels.products.gemm_small.unpack import codebook_asm, mode_of, unpack_asm


@gluon.jit
def paired_scales_of(scales, supers, KIND: gl.constexpr):
    """scales_of() as f16_pairs() takes them."""
    s0, a0, s1, a1 = scales_of(scales, supers, KIND, -centre_of(KIND))
    if has_half_scales(KIND):
        return twice(s0, KIND), twice(a0, KIND), twice(s1, KIND), twice(a1, KIND)
    else:
        s0 = twice(s0, KIND)
        a0 = twice(a0, KIND)
        return s0, a0, s0, a0


@gluon.jit
def scales_of(scales, supers, KIND: gl.constexpr, BIAS: gl.constexpr):
    """(scale, add) of a group's first half, then of its second, of its integer in the plane of scales and its super.

    f16 for types with f16 scales or e2m1 codes, else f32, where add is for codes to which BIAS has been added.
    """
    if has_f16_scales(KIND):
        d, m = f16_scale(scales, KIND)
        return d, m, d, m
    elif is_e2m1(KIND) and has_half_scales(KIND):
        s0 = half_ue4m3(scales, 0, E2M1_SHIFT + 1).to(gl.float16)
        s1 = half_ue4m3(scales, 8, E2M1_SHIFT + 1).to(gl.float16)
        return s0, s0, s1, s1
    elif is_e2m1(KIND):
        s, off = group_scale(scales, supers, KIND, E2M1_SHIFT + 1)  # the codebook's values are doubled ones
        s = s.to(gl.float16)
        return s, s, s, s
    elif has_half_scales(KIND):
        first, second, d, m0, m1, d_min = half_scales(scales, supers, KIND)
        s0 = d * first
        s1 = d * second
        return s0, s0 * -BIAS - s0 * code_offset(KIND), s1, s1 * -BIAS - s1 * code_offset(KIND)
    else:
        s, off = group_scale(scales, supers, KIND, 0)
        if has_min(KIND):
            off = s * -BIAS - off
        return s, off, s, off


#: A code in the third byte of an f32, under this number's exponent, is that number plus the code.
BIAS = gl.constexpr(128.0)


@gluon.constexpr_function
def _scaled_asm():
    """PTX: f16 weights $0..$3 of the bytes of $4 (codes below 128): (BIAS + code) * $5 + $6 in f32, rounded once."""
    lines = [".reg .b32 f<4>, t<2>;"]
    for i in range(4):
        lines += [f"prmt.b32 f{i}, $4, 0x43000000, 0x7{i}44;", f"fma.rn.f32 f{i}, f{i}, $5, $6;"]
    lines += ["cvt.rn.f16x2.f32 t0, f1, f0;", "cvt.rn.f16x2.f32 t1, f3, f2;"]
    return "{\n" + "\n".join([*lines, "mov.b32 {$0, $1}, t0;", "mov.b32 {$2, $3}, t1;"]) + "\n}"


#: Codes of e2m1 are looked up as values times 2^-3 and their scales are multiplied by 2^3: products from f16's smallest
#: numbers up to 24576 then come from factors that f16 holds.
E2M1_SHIFT = gl.constexpr(3)


@gluon.constexpr_function
def _e2m1_asm():
    """PTX: the high bytes (the low ones are 0) of 2^-3 times e2m1's values as f16, for a word's nibbles: $0 of the low
    ones, $1 of the high ones. $2: the word. prmt picks sizes by three bits of a nibble; with the fourth bit it repeats
    the sign of the byte it picks, which is how signs come out of 0x80.
    """
    return """{
        .reg .b32 size, low, high, t, sign;
        and.b32 size, $2, 0x77777777;
        mov.b32 sign, 0x80808080;
        prmt.b32 low, 0x32302C00, 0x3A383634, size;
        prmt.b32 t, sign, sign, $2;
        shl.b32 t, t, 1;
        and.b32 t, t, 0x80808080;
        or.b32 low, low, t;
        shr.u32 size, size, 16;
        shr.u32 t, $2, 16;
        prmt.b32 high, 0x32302C00, 0x3A383634, size;
        prmt.b32 t, sign, sign, t;
        shl.b32 t, t, 1;
        and.b32 t, t, 0x80808080;
        or.b32 high, high, t;
        prmt.b32 $0, low, high, 0x6420;
        prmt.b32 $1, low, high, 0x7531;
        }"""


@gluon.constexpr_function
def _high_bytes_asm():
    """PTX: f16 weights $0..$3 of the bytes of $4, their high ones, times $5. $6 is not used."""
    lines = [".reg .b32 d, t0, t1;", "mov.b32 d, {$5, $5};", "prmt.b32 t0, $4, 0, 0x1404;"]
    lines += ["prmt.b32 t1, $4, 0, 0x3424;", "mul.rn.f16x2 t0, t0, d;", "mul.rn.f16x2 t1, t1, d;"]
    return "{\n" + "\n".join([*lines, "mov.b32 {$0, $1}, t0;", "mov.b32 {$2, $3}, t1;"]) + "\n}"


@gluon.constexpr_function
def _weights_asm(KIND, SHIFTED):
    if is_e2m1(KIND):
        return _high_bytes_asm()
    if mode_of(KIND) == "s":
        return _scaled_asm()
    return unpack_asm(is_signed(KIND), SHIFTED, code_offset(KIND), mode_of(KIND))


@gluon.jit
def f16_weights(codes, scale, add, KIND: gl.constexpr, SHIFTED: gl.constexpr):
    """Half groups' codes, the bytes of int32 [WK, ROWS, 4, 4], as weights: f16 [WK, ROWS, 64].

    scale, add: [WK, ROWS, 4]. Of k, steps of 16 are words, and elements of a step are byte / 2, group, byte % 2.
    """
    WK: gl.constexpr = codes.shape[0]
    ROWS: gl.constexpr = codes.shape[1]
    F: gl.constexpr = "h" if has_f16_scales(KIND) or is_e2m1(KIND) else "f"
    codes, scale = gl.broadcast(codes, gl.expand_dims(scale, 3))
    codes, add = gl.broadcast(codes, gl.expand_dims(add, 3))
    b0, b1, b2, b3 = gl.inline_asm_elementwise(
        _weights_asm(KIND, SHIFTED), "=h,=h,=h,=h,r," + F + "," + F, [codes, scale, add],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    w = gl.join(gl.join(b0, b2), gl.join(b1, b3))  # [WK, ROWS, 4, word, byte / 2, byte % 2]
    return gl.reshape(gl.permute(w, (0, 1, 3, 4, 2, 5)), [WK, ROWS, 64])


@gluon.jit
def operand(codes, scale, add, KIND: gl.constexpr, SHIFTED: gl.constexpr, WR: gl.constexpr):
    """f16_weights() as the first operand of a product."""
    w = f16_weights(codes, scale, add, KIND, SHIFTED)
    return gl.convert_layout(w, gl.DotOperandLayout(0, mma_layout(w.shape[0], WR), 2), assert_trivial=True)


@gluon.jit
def load_x(ring, i, TOKENS: gl.constexpr, WK: gl.constexpr, WR: gl.constexpr):
    """Half groups of x as the second operand, f16 [WK, 64, TOKENS], k in f16_weights()'s order."""
    x = gl.reshape(ring.index(i).load(x_layout(WK, WR, TOKENS)), [WK, TOKENS, 4, 4, 2, 2])
    x = gl.reshape(gl.permute(x, (0, 3, 4, 2, 5, 1)), [WK, 64, TOKENS])
    return gl.convert_layout(x, gl.DotOperandLayout(1, mma_layout(WK, WR), 2), assert_trivial=True)


@gluon.constexpr_function
def keeps_shift(KIND):
    """Codes of second halves stay in the bytes' high nibbles: what makes them f16 there costs the same."""
    return has_plain_nibbles(KIND) and has_f16_scales(KIND)


@gluon.jit
def halves_of(rings, slot, KIND: gl.constexpr, WR: gl.constexpr, PAIRS: gl.constexpr):
    """A step's codes as bytes: int32 [WK, ROWS, 4, 4] of elements 0..15 of the groups, and of 16..31.

    The latter's may be in the bytes' high nibbles: see keeps_shift. PAIRS: of plain nibbles both are the words.
    """
    quants, high, scales, supers = rings
    E: gl.constexpr = code_bits(KIND)
    WK: gl.constexpr = quants.shape[1]
    ROWS: gl.constexpr = quants.shape[2]
    L: gl.constexpr = words_layout(WK, WR, ROWS, 4)
    words = quants.index(slot).load(words_layout(WK, WR, ROWS, E))
    if E == 8:
        low, top = gl.split(gl.permute(gl.reshape(words, [WK, ROWS, 4, 2, 4]), (0, 1, 2, 4, 3)))
        low = gl.convert_layout(low, L, assert_trivial=True)
        top = gl.convert_layout(top, L, assert_trivial=True)
    elif has_codebook(KIND):
        asm: gl.constexpr = _e2m1_asm() if is_e2m1(KIND) else codebook_asm(KIND)
        low, top = gl.inline_asm_elementwise(asm, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    elif PAIRS and has_plain_nibbles(KIND):
        low = words
        top = words
    else:
        low = words & 0x0F0F0F0F
        if keeps_shift(KIND):
            top = words & -0x0F0F0F10  # 0xF0F0F0F0
        else:
            top = (words >> 4) & 0x0F0F0F0F
    if high_bits(KIND) == 1:  # bit 2i of a byte is for word i, the next one for its high nibbles
        h = gl.expand_dims(high.index(slot).reshape([WK, ROWS, 4]).load(gl.SliceLayout(3, L)), 3)
        i = axis_index(L, 4, 3, 4)
        low = low | (((h >> (2 * i)) & 0x01010101) << 4)
        top = top | (((h >> (2 * i + 1)) & 0x01010101) << 4)
    elif high_bits(KIND) == 2:  # word i has fields at bits 0 and 2, or 4 and 6, of the bytes of word i / 2
        LH: gl.constexpr = high_layout(WK, WR, ROWS)
        h = gl.expand_dims(high.index(slot).load(gl.SliceLayout(4, LH)), 4) >> (4 * axis_index(LH, 5, 4, 2))
        h = gl.convert_layout(gl.reshape(h, [WK, ROWS, 4, 4]), L, assert_trivial=True)
        low = low | ((h & 0x03030303) << 4)
        top = top | ((h & 0x0C0C0C0C) << 2)
    return low, top


@gluon.jit
def step_scales(
    rings, slot, step, first_row, left, k, KIND: gl.constexpr, WR: gl.constexpr, PAIR: gl.constexpr,
    BY_WORD: gl.constexpr = False,
):  # fmt: skip
    """(integers of the plane of scales, supers) of a step's groups, each [WK, ROWS, 4], in words_layout()'s lanes.
    Supers are [WK, ROWS, 1], d lowest; for types without them stand scales."""
    quants, high, scales, supers = rings
    WK: gl.constexpr = quants.shape[1]
    ROWS: gl.constexpr = quants.shape[2]
    L: gl.constexpr = gl.SliceLayout(3, words_layout(WK, WR, ROWS, 4, BY_WORD))
    found = scales.index(slot).load(L)
    su = found
    if has_supers(KIND):
        su = gl.expand_dims(supers.index(slot).load(gl.SliceLayout(2, L)), 2)
        if not pairs_of_supers(KIND):
            row = matrix_row(axis_index(L, 3, 1, ROWS), PAIR)
            at = (first_row + gl.minimum(row, left - 1)) * (k // 256) + (step * WK + axis_index(L, 3, 0, WK)) // 2
            su = su >> ((at & 1) * 16)
    return found, su
