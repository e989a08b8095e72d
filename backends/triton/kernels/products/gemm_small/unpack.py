"""Words of packed codes as f16 weights, in plain Triton and in PTX, which Gluon kernels take too."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common.codebook import of_bytes
from graphrt.backends.triton.kernels.common.grid import grid_words
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    code_offset,
    codebook_word,
    has_codebook,
    has_f16_scales,
    has_grid,
    has_min,
    high_bits,
    is_signed,
)


@triton.constexpr_function
def unpack_asm(SIGNED, SHIFTED, OFFSET, MODE):
    """PTX that turns a word's four bytes into f16 weights $0..$3. $4: the word; $5 and $6: scale and what is added.

    SHIFTED: codes are in the bytes' high nibbles. MODE: "d": f16 scale; "dm": f16 scale and min; "s": both f32, in the
    latter what the codes' bias comes to; "e": f32 scale alone. A byte b under the exponent of 1024 is the f16
    1024 + b; a code c in a high nibble under that of 64 is 64 + c.
    """
    base = "0x54545454" if SHIFTED else "0x64646464"
    bits = 0x5400 + 16 * OFFSET if SHIFTED else 0x6400 + OFFSET + (128 if SIGNED else 0)  # the bias as an f16
    both = f"0x{bits:04x}{bits:04x}"
    lines = [".reg .b32 w, t0, t1;", "mov.b32 w, $4;"]
    if SIGNED:
        lines += ["xor.b32 w, w, 0x80808080;"]
    lines += [f"prmt.b32 t0, w, {base}, 0x4140;", f"prmt.b32 t1, w, {base}, 0x4342;"]
    if MODE != "s":
        lines += [".reg .b32 bias;", f"mov.b32 bias, {both};", "sub.f16x2 t0, t0, bias;", "sub.f16x2 t1, t1, bias;"]
    if MODE in ("d", "dm"):
        lines += [".reg .b32 d;", "mov.b32 d, {$5, $5};"]
        if MODE == "d":
            lines += ["mul.rn.f16x2 t0, t0, d;", "mul.rn.f16x2 t1, t1, d;"]
        else:
            lines += [".reg .b32 m;", "mov.b32 m, {$6, $6};"]
            lines += ["fma.rn.f16x2 t0, t0, d, m;", "fma.rn.f16x2 t1, t1, d, m;"]
    else:
        lines += [".reg .b16 h<4>;", ".reg .f32 f<4>;", "mov.b32 {h0, h1}, t0;", "mov.b32 {h2, h3}, t1;"]
        for i in range(4):
            lines += [f"cvt.f32.f16 f{i}, h{i};"]
            lines += [f"fma.rn.f32 f{i}, f{i}, $5, $6;" if MODE == "s" else f"mul.rn.f32 f{i}, f{i}, $5;"]
        lines += ["cvt.rn.f16x2.f32 t0, f1, f0;", "cvt.rn.f16x2.f32 t1, f3, f2;"]
    lines += ["mov.b32 {$0, $1}, t0;", "mov.b32 {$2, $3}, t1;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _bias_of(SIGNED, SHIFTED, OFFSET):
    return (64.0 if SHIFTED else 1024.0) + OFFSET + (128.0 if SIGNED else 0.0)


@triton.constexpr_function
def mode_of(KIND):
    if has_f16_scales(KIND):
        return "dm" if has_min(KIND) else "d"
    elif is_signed(KIND):
        return "e"
    else:
        return "s"


@triton.jit
def _byte(words, i: tl.constexpr, SIGNED: tl.constexpr, SHIFTED: tl.constexpr):
    code = (words >> (8 * i)) & 0xFF
    if SIGNED:
        code = (code ^ 0x80) - 0x80
    if SHIFTED:
        code = code >> 4
    return code


@triton.jit
def _in_order(b0, b1, b2, b3, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes 0 to 3 of words [ROWS, groups, words] side by side: [ROWS, WIDTH]."""
    return tl.join(tl.join(b0, b2), tl.join(b1, b3)).reshape(ROWS, WIDTH)


@triton.jit
def weights(
    words, scale, add, KIND: tl.constexpr, SHIFTED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """f16 [ROWS, WIDTH] of codes in the bytes of words [ROWS, groups, n]: scale * (code - offset) + add.

    scale, add: [ROWS, groups]; f16 where the type has f16 scales, else f32. add is for types with mins, and ignored for
    others.
    """
    SIGNED: tl.constexpr = is_signed(KIND)
    OFFSET: tl.constexpr = code_offset(KIND)
    MODE: tl.constexpr = mode_of(KIND)
    if PTX:
        if MODE == "s":
            add = add - _bias_of(SIGNED, SHIFTED, OFFSET) * scale
        kind: tl.constexpr = "h" if has_f16_scales(KIND) else "f"
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            unpack_asm(SIGNED, SHIFTED, OFFSET, MODE), "=h,=h,=h,=h,r," + kind + "," + kind,
            [words, scale[:, :, None], add[:, :, None]], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=1,
        )  # fmt: skip
        if has_grid(KIND):
            # For sm_100 Triton 3.6 fails at f16 of these layouts whose last step is a reshape; here that is a bitcast.
            b0, b1 = b0.to(tl.int16, bitcast=True), b1.to(tl.int16, bitcast=True)
            b2, b3 = b2.to(tl.int16, bitcast=True), b3.to(tl.int16, bitcast=True)
            return _in_order(b0, b1, b2, b3, ROWS, WIDTH).to(tl.float16, bitcast=True)
        else:
            return _in_order(b0, b1, b2, b3, ROWS, WIDTH)
    else:
        c0 = _byte(words, 0, SIGNED, SHIFTED)
        c1 = _byte(words, 1, SIGNED, SHIFTED)
        c2 = _byte(words, 2, SIGNED, SHIFTED)
        c3 = _byte(words, 3, SIGNED, SHIFTED)
        scale = scale.to(tl.float32)[:, :, None]
        w0 = (c0 - OFFSET).to(tl.float32) * scale
        w1 = (c1 - OFFSET).to(tl.float32) * scale
        w2 = (c2 - OFFSET).to(tl.float32) * scale
        w3 = (c3 - OFFSET).to(tl.float32) * scale
        if MODE == "dm" or MODE == "s":
            add = add.to(tl.float32)[:, :, None]
            w0, w1, w2, w3 = w0 + add, w1 + add, w2 + add, w3 + add
        return _in_order(w0.to(tl.float16), w1.to(tl.float16), w2.to(tl.float16), w3.to(tl.float16), ROWS, WIDTH)


@triton.constexpr_function
def codebook_asm(KIND):
    """PTX: the codebook's bytes for a word's nibbles, $0 of the low ones and $1 of the high ones. $2: the word.

    prmt picks bytes by 3 bits of a nibble from 8: from each half of the codebook, then by the fourth bit between these.
    """
    t0, t1, t2, t3 = (f"0x{codebook_word(KIND, i):08x}" for i in range(4))
    return f"""{{
        .reg .b32 low, high, three, which, t0, t1, t2, t3;
        mov.b32 t0, {t0};
        mov.b32 t1, {t1};
        mov.b32 t2, {t2};
        mov.b32 t3, {t3};
        and.b32 three, $2, 0x77777777;
        and.b32 which, $2, 0x88888888;
        shr.u32 which, which, 1;
        or.b32 which, which, 0x32103210;
        prmt.b32 low, t0, t1, three;
        prmt.b32 high, t2, t3, three;
        prmt.b32 low, low, high, which;
        shr.u32 three, three, 16;
        shr.u32 which, which, 16;
        prmt.b32 t0, t0, t1, three;
        prmt.b32 t2, t2, t3, three;
        prmt.b32 high, t0, t2, which;
        prmt.b32 $0, low, high, 0x6420;
        prmt.b32 $1, low, high, 0x7531;
        }}"""


@triton.jit
def _four(w0, w1, w2, w3, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Words [ROWS, GROUPS] side by side."""
    return tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(ROWS, GROUPS, 4)


@triton.jit
def _pairs(words, MASK: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Fields of 2 bits at bits FIRST and FIRST + 4 of each byte as words of their own: [ROWS, GROUPS, 2] to 4."""
    return tl.join((words >> FIRST) & MASK, (words >> (FIRST + 4)) & MASK).reshape(ROWS, GROUPS, 4)


@triton.jit
def _halves_of_points(
    words, high, scales, p_grid, KIND: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """halves() of types with a grid."""
    if code_bits(KIND) == 2:
        first, second = tl.split(words)
    else:
        first = words.reshape(ROWS, GROUPS)
        second = first
    if high_bits(KIND) > 0:
        high = high.reshape(ROWS, GROUPS)
    else:
        high = first
    w0, w1, w2, w3, w4, w5, w6, w7 = grid_words(p_grid, first, second, high, scales, KIND, 0, PTX)
    return _four(w0, w1, w2, w3, ROWS, GROUPS), _four(w4, w5, w6, w7, ROWS, GROUPS)


@triton.jit
def _halves_of_codes(words, high, KIND: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PTX: tl.constexpr):
    """halves() of codes that lie in the planes."""
    if code_bits(KIND) == 2:
        low = _pairs(words, 0x03030303, 0, ROWS, GROUPS)
        top = _pairs(words, 0x03030303, 2, ROWS, GROUPS)
    elif has_codebook(KIND):
        if PTX:
            low, top = tl.inline_asm_elementwise(
                codebook_asm(KIND), "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
        else:
            low = of_bytes(words, KIND, 0)
            top = of_bytes(words >> 4, KIND, 0)
    elif high_bits(KIND) == 0:
        low = words & 0x0F0F0F0F
        top = words & -0x0F0F0F10  # 0xF0F0F0F0
    else:
        low = words & 0x0F0F0F0F
        top = (words >> 4) & 0x0F0F0F0F
    if high_bits(KIND) == 2:
        low = low | (_pairs(high, 0x03030303, 0, ROWS, GROUPS) << 4)
        top = top | (_pairs(high, 0x03030303, 2, ROWS, GROUPS) << 4)
    elif high_bits(KIND) == 1:
        AT: tl.constexpr = code_bits(KIND)
        i_word = tl.arange(0, 4)[None, None, :]
        low = low | (((high >> (2 * i_word)) & 0x01010101) << AT)
        top = top | (((high >> (2 * i_word + 1)) & 0x01010101) << AT)
    return low, top


@triton.jit
def halves(
    words, high, scales, p_grid, KIND: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Codes as the bytes of words, [ROWS, GROUPS, 4] each: of elements 0..15 of each group, and of 16..31.

    The latter of plain nibbles stay in the bytes' high halves. words: [ROWS, GROUPS, code_bits];
    high: [ROWS, GROUPS, words], anything where the type has none; scales: [ROWS, GROUPS].
    """
    if has_grid(KIND):
        return _halves_of_points(words, high, scales, p_grid, KIND, ROWS, GROUPS, PTX)
    else:
        return _halves_of_codes(words, high, KIND, ROWS, GROUPS, PTX)
