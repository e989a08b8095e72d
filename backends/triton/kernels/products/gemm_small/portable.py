"""Products of few tokens in one kernel: weights are read once and dequantized in registers on their way to the dot.

out[t, r] = sum over k of x[t, k] W[r, k] for up to some 128 tokens t. Tiles have weights' rows as M and tokens as N:
matrix units want 64 rows of M and are content with 16 of N. Of a packed group of 32 the low and the high nibbles are
elements 0..15 and 16..31 (packing.py): two dots of half the width, against x's two halves, need no interleaving.
Weights become f16 rounded once from scale * code - min, as a dequantized matrix would hold them; sums are f32.
Where tiles are too few for the GPU, k is split: parts of a sum go to memory, and half.py's `finish` adds them in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    code_offset,
    codebook_word,
    has_codebook,
    has_f16_scales,
    has_plain_nibbles,
    has_supers,
    high_bits,
    is_signed,
    pairs_of_supers,
    scale_bytes,
    scale_form,
)

GROUP = tl.constexpr(32)


# ---- From words of codes to f16 ----


@triton.constexpr_function
def _unpack_asm(SIGNED, SHIFTED, OFFSET, MODE):
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
def _mode_of(KIND):
    if scale_form(KIND) == "f16_min":
        return "dm"
    elif has_f16_scales(KIND):
        return "d"
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
def _weights(
    words, scale, add, KIND: tl.constexpr, SHIFTED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """f16 [ROWS, WIDTH] of codes in the bytes of words [ROWS, groups, n]: scale * (code - offset) + add.

    scale, add: [ROWS, groups]; f16 where the type has f16 scales, else f32. add is for types with mins, and ignored for
    others.
    """
    SIGNED: tl.constexpr = is_signed(KIND)
    OFFSET: tl.constexpr = code_offset(KIND)
    MODE: tl.constexpr = _mode_of(KIND)
    if PTX:
        if MODE == "s":
            add = add - _bias_of(SIGNED, SHIFTED, OFFSET) * scale
        kind: tl.constexpr = "h" if has_f16_scales(KIND) else "f"
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _unpack_asm(SIGNED, SHIFTED, OFFSET, MODE), "=h,=h,=h,=h,r," + kind + "," + kind,
            [words, scale[:, :, None], add[:, :, None]], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=1,
        )  # fmt: skip
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
def _codebook_asm(KIND):
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
def _look_up(code, KIND: tl.constexpr):
    """The codebook's byte (0..255) for each 4-bit code."""
    word = tl.where(
        code < 8,
        tl.where(code < 4, codebook_word(KIND, 0), codebook_word(KIND, 1)),
        tl.where(code < 12, codebook_word(KIND, 2), codebook_word(KIND, 3)),
    )
    return ((word >> (8 * (code & 3))) & 0xFF).to(tl.int32)


@triton.jit
def _look_up_bytes(codes, KIND: tl.constexpr):
    """The same for the four codes in a word's bytes."""
    found = _look_up(codes & 15, KIND) | (_look_up((codes >> 8) & 15, KIND) << 8)
    return found | (_look_up((codes >> 16) & 15, KIND) << 16) | (_look_up((codes >> 24) & 15, KIND) << 24)


@triton.jit
def _pairs(words, MASK: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Fields of 2 bits at bits FIRST and FIRST + 4 of each byte as words of their own: [ROWS, GROUPS, 2] to 4."""
    return tl.join((words >> FIRST) & MASK, (words >> (FIRST + 4)) & MASK).reshape(ROWS, GROUPS, 4)


@triton.jit
def _halves(words, high, KIND: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PTX: tl.constexpr):
    """Codes as the bytes of words, [ROWS, GROUPS, 4] each: of elements 0..15 of each group, and of 16..31.

    The latter of plain nibbles stay in the bytes' high halves. words: [ROWS, GROUPS, code_bits];
    high: [ROWS, GROUPS, words], anything where the type has none.
    """
    if code_bits(KIND) == 2:
        low = _pairs(words, 0x03030303, 0, ROWS, GROUPS)
        top = _pairs(words, 0x03030303, 2, ROWS, GROUPS)
    elif has_codebook(KIND):
        if PTX:
            low, top = tl.inline_asm_elementwise(
                _codebook_asm(KIND), "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
        else:
            low = _look_up_bytes(words, KIND)
            top = _look_up_bytes(words >> 4, KIND)
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


# ---- Scales ----


@triton.jit
def _f16_low(bits):
    """The f16 in the low 16 bits of an int32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _low_byte(scales):
    """The int8 in the low byte of an integer, as f32; the next one is that of pair >> 8."""
    return (((scales & 0xFF) ^ 0x80) - 0x80).to(tl.float32)


@triton.jit
def _scales(scales, supers, KIND: tl.constexpr):
    """(scale, add) of elements 0..15 of each group, then of 16..31.

    scales: int32 [rows, groups]; supers: the same or [rows, 1].
    """
    if scale_form(KIND) == "f16":
        d = _f16_low(scales)
        return d, d, d, d
    elif scale_form(KIND) == "f16_min":
        d = _f16_low(scales)
        m = _f16_low(scales >> 16)
        return d, m, d, m
    elif scale_form(KIND) == "e8m0":
        e = scales & 0xFF
        s = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23).to(tl.float32, bitcast=True)  # 2^(e - 128)
        return s, tl.zeros_like(s), s, tl.zeros_like(s)
    elif scale_form(KIND) == "i8":
        s = _low_byte(scales) * _f16_low(supers).to(tl.float32)
        return s, tl.zeros_like(s), s, tl.zeros_like(s)
    else:
        if scale_form(KIND) == "i8_halves":
            d = _f16_low(supers).to(tl.float32)
            s0 = d * _low_byte(scales)
            s1 = d * _low_byte(scales >> 8)
            return s0, tl.zeros_like(s0), s1, tl.zeros_like(s1)
        else:
            d = _f16_low(supers).to(tl.float32)
            dmin = -_f16_low(supers >> 16).to(tl.float32)
            if scale_form(KIND) == "u4_min_halves":
                s0 = d * (scales & 0xF).to(tl.float32)
                m0 = dmin * ((scales >> 4) & 0xF).to(tl.float32)
                s1 = d * ((scales >> 8) & 0xF).to(tl.float32)
                m1 = dmin * ((scales >> 12) & 0xF).to(tl.float32)
                return s0, m0, s1, m1
            else:  # u6_min
                s0 = d * (scales & 0xFF).to(tl.float32)
                m0 = dmin * ((scales >> 8) & 0xFF).to(tl.float32)
                return s0, m0, s0, m0


@triton.constexpr_function
def scales_a_word(KIND):
    """Groups whose scales fill an int32."""
    return 4 // scale_bytes(KIND)


@triton.jit
def _load_scales(p_scales, first, KIND: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """What GROUPS groups from `first` on (int64 [ROWS], a multiple of 4) have of scales: int32 [ROWS, GROUPS].

    Loaded as words, which asynchronous copies take. The upper bits of the result may hold anything.
    """
    N: tl.constexpr = scales_a_word(KIND)
    words = tl.load(p_scales + (first // N)[:, None] + tl.arange(0, GROUPS // N)[None, :])
    if N == 1:
        return words
    elif N == 2:
        return tl.join(words, words >> 16).reshape(ROWS, GROUPS)
    else:
        return tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24)).reshape(ROWS, GROUPS)


@triton.jit
def _load_scales_masked(p_scales, first, m_load, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """The same from any group on, where m_load [1, GROUPS] says so."""
    N: tl.constexpr = scales_a_word(KIND)
    at = first[:, None] + tl.arange(0, GROUPS)[None, :]
    words = tl.load(p_scales + at // N, mask=m_load, other=0)
    return words >> ((at % N) * (32 // N)).to(tl.int32)


@triton.jit
def _load_supers(p_supers, at, KIND: tl.constexpr):
    """Superblocks' d and dmin, or d in the low bits of an int32. at: which, int64."""
    if pairs_of_supers(KIND):
        return tl.load(p_supers + at)
    else:
        return tl.load(p_supers + at // 2) >> ((at % 2) * 16).to(tl.int32)


# ---- Kernels ----


@triton.jit
def packed_sums(
    p_quants, p_high, p_scales, p_supers, row, p_x, x_row, k, first, last,
    KIND: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rows `row` of packed weights times rows x_row of x (f16, k elements each): f32 [rows, x's rows].

    row, x_row: int64. Steps `first` to last - 1 of k, GROUPS groups each. Planes and EVEN: as gemm_packed has them.
    """
    ROWS: tl.constexpr = row.shape[0]
    W: tl.constexpr = code_bits(KIND)
    H: tl.constexpr = high_bits(KIND)
    n_groups = k // GROUP
    p_quants += (row * (n_groups * W))[:, None] + tl.arange(0, GROUPS * W)[None, :]
    p_high += (row * (n_groups * H))[:, None] + tl.arange(0, GROUPS * H if H > 0 else 1)[None, :]
    row_groups, row_supers = row * n_groups, row * (k // 256)
    p_x += (x_row * k)[None, :]
    i_half = tl.arange(0, GROUPS * 16)
    i_half = i_half // 16 * 32 + i_half % 16
    acc = tl.zeros((ROWS, x_row.shape[0]), tl.float32)
    for i_step in range(first, last):
        i_group = i_step * GROUPS
        left = n_groups - i_group  # groups up to the row's end
        m_scale = (tl.arange(0, GROUPS) < left)[None, :]
        if EVEN:
            words = tl.load(p_quants + i_group * W)
            scales = _load_scales(p_scales, row_groups + i_group, KIND, ROWS, GROUPS)
        else:
            words = tl.load(p_quants + i_group * W, mask=(tl.arange(0, GROUPS * W) // W < left)[None, :], other=0)
            scales = _load_scales_masked(p_scales, row_groups + i_group, m_scale, KIND, GROUPS)
        words = words.reshape(ROWS, GROUPS, W)
        high = words
        if H > 0:
            if EVEN:
                high = tl.load(p_high + i_group * H)
            else:
                high = tl.load(p_high + i_group * H, mask=(tl.arange(0, GROUPS * H) // H < left)[None, :], other=0)
            high = high.reshape(ROWS, GROUPS, H)
        supers = scales
        if has_supers(KIND):
            # A tile of k lies in one superblock, or holds whole ones; rows of such types are whole superblocks.
            i_super = i_group // 8 + (tl.arange(0, GROUPS) // 8 if GROUPS > 8 else tl.arange(0, 1))
            supers = _load_supers(p_supers, row_supers[:, None] + i_super[None, :], KIND)
        s0, a0, s1, a1 = _scales(scales, supers, KIND)
        if W == 8:
            i_k = i_group * GROUP + tl.arange(0, GROUPS * 32)
            if EVEN:
                x = tl.load(p_x + i_k[:, None])
            else:
                x = tl.load(p_x + i_k[:, None], mask=(i_k < k)[:, None], other=0.0)
            acc = tl.dot(_weights(words, s0, a0, KIND, False, ROWS, GROUPS * 32, PTX), x, acc)
        else:
            low, top = _halves(words, high, KIND, ROWS, GROUPS, PTX)
            i_k = i_group * GROUP + i_half
            if EVEN:
                x0 = tl.load(p_x + i_k[:, None])
                x1 = tl.load(p_x + (i_k + 16)[:, None])
            else:
                x0 = tl.load(p_x + i_k[:, None], mask=(i_k < k)[:, None], other=0.0)
                x1 = tl.load(p_x + (i_k + 16)[:, None], mask=(i_k < k)[:, None], other=0.0)
            acc = tl.dot(_weights(low, s0, a0, KIND, False, ROWS, GROUPS * 16, PTX), x0, acc)
            acc = tl.dot(_weights(top, s1, a1, KIND, has_plain_nibbles(KIND), ROWS, GROUPS * 16, PTX), x1, acc)
    return acc


@triton.jit
def plain_sums(
    p_w, at, p_x, x_row, k, first, last,
    WIDTH: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for weights of f16, bf16 or f32 whose rows begin at elements `at`, int64; steps of WIDTH elements."""
    p_w += at[:, None]
    p_x += (x_row * k)[None, :]
    acc = tl.zeros((at.shape[0], x_row.shape[0]), tl.float32)
    for i_step in range(first, last):
        i_k = i_step * WIDTH + tl.arange(0, WIDTH)
        if EVEN:
            w = tl.load(p_w + i_k[None, :])
            x = tl.load(p_x + i_k[:, None])
        else:
            w = tl.load(p_w + i_k[None, :], mask=(i_k < k)[None, :], other=0.0)
            x = tl.load(p_x + i_k[:, None], mask=(i_k < k)[:, None], other=0.0)
        if WIDEN:
            acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(w, x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _range_of(k_steps, steps_a_split, i_split):
    first = i_split * steps_a_split
    return first, tl.minimum(first + steps_a_split, k_steps)


@triton.jit
def _matrix_of(i_batch, n_a2, ratio3):
    """Which matrix of the weights a batch of tokens is for."""
    return (i_batch // n_a2) // ratio3 * n_a2 + i_batch % n_a2


@triton.jit
def _store(
    acc, p_out, p_factors, p_bias, p_residual, first_row, first_token, i_batch, i_split, m, n, n_batch,
    SPLIT: tl.constexpr, HAS_FACTORS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """acc: f32 [rows, tokens] to out [split, batch, tokens, m]; times the token's factor, plus bias [m] and residual
    unless that is left to `finish`."""
    row = tl.arange(0, acc.shape[0])
    token = tl.arange(0, acc.shape[1])
    m_token = token < n - first_token
    m_store = (row < m - first_row)[:, None] & m_token[None, :]
    line = i_batch.to(tl.int64) * n + first_token
    start = line * m + first_row
    at = token[None, :] * m + row[:, None]  # from the tile's start on: int32 will do
    if SPLIT:
        start += i_split.to(tl.int64) * n_batch * n * m
    else:
        if HAS_FACTORS:
            acc = acc * tl.load(p_factors + line + token, mask=m_token, other=0.0)[None, :]
        if HAS_BIAS:
            acc = acc + tl.load(p_bias + first_row + row, mask=row < m - first_row, other=0.0)[:, None]
        if HAS_RESIDUAL:
            acc = acc + tl.load(p_residual + start + at, mask=m_store, other=0.0)
    tl.store(p_out + start + at, acc, mask=m_store)


_GENERAL = ("m", "n", "n_batch", "n_a2", "ratio3", "k_steps", "steps_a_split", "n_splits")


@accesses(reads="p_quants p_high p_scales p_supers p_x p_factors p_bias p_residual", writes="p_out")
@triton.jit(do_not_specialize=_GENERAL)
def gemm_packed(
    p_quants, p_high, p_scales, p_supers, p_x, p_factors, p_bias, p_residual, p_out,
    m, n, n_batch, n_a2, ratio3, k, k_steps, steps_a_split, n_splits,
    KIND: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, HAS_FACTORS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """x: f16 [n_batch, n, k]; weights: planes of [matrices * m, k]; out: f32 [n_batch, n, m], or parts before that.

    bias: f32 [m], of all matrices; residual: like out. All planes but x as int32. EVEN: k is a multiple of 32 * GROUPS
    and of 128.
    """
    i_split = tl.program_id(1) % n_splits
    first_token = tl.program_id(1) // n_splits * TOKENS
    i_token = tl.minimum(first_token + tl.arange(0, TOKENS), n - 1)
    i_batch = tl.program_id(2)
    first_row = tl.program_id(0) * ROWS
    i_row = tl.minimum(first_row + tl.arange(0, ROWS), m - 1)
    row = _matrix_of(i_batch, n_a2, ratio3).to(tl.int64) * m + i_row
    first, last = _range_of(k_steps, steps_a_split, i_split)
    acc = packed_sums(
        p_quants, p_high, p_scales, p_supers, row, p_x, i_batch.to(tl.int64) * n + i_token, k, first, last,
        KIND, GROUPS, EVEN, PTX,
    )  # fmt: skip
    _store(
        acc, p_out, p_factors, p_bias, p_residual, first_row, first_token, i_batch, i_split, m, n, n_batch, SPLIT,
        HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@accesses(reads="p_w p_x p_factors p_bias p_residual", writes="p_out")
@triton.jit(do_not_specialize=_GENERAL)
def gemm_plain(
    p_w, p_x, p_factors, p_bias, p_residual, p_out, row_stride, stride2, stride3,
    m, n, n_batch, n_a2, ratio3, k, k_steps, steps_a_split, n_splits,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    HAS_FACTORS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for weights of f16, bf16 or f32 whose rows lie anywhere. row_stride, stride2, stride3: in elements.

    x: of the weights' type. WIDEN: multiply in f32 (the interpreter knows no bf16).
    """
    i_split = tl.program_id(1) % n_splits
    first_token = tl.program_id(1) // n_splits * TOKENS
    i_token = tl.minimum(first_token + tl.arange(0, TOKENS), n - 1)
    i_batch = tl.program_id(2)
    first_row = tl.program_id(0) * ROWS
    i_row = tl.minimum(first_row + tl.arange(0, ROWS), m - 1)
    i_2, i_3 = i_batch % n_a2, i_batch // n_a2 // ratio3
    p_w += i_2.to(tl.int64) * stride2 + i_3.to(tl.int64) * stride3
    first, last = _range_of(k_steps, steps_a_split, i_split)
    acc = plain_sums(
        p_w, i_row.to(tl.int64) * row_stride, p_x, i_batch.to(tl.int64) * n + i_token, k, first, last, WIDTH, EVEN,
        WIDEN, PRECISION,
    )  # fmt: skip
    _store(
        acc, p_out, p_factors, p_bias, p_residual, first_row, first_token, i_batch, i_split, m, n, n_batch, SPLIT,
        HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
