"""Products of 9 to 64 tokens with packed weights in Gluon, from sm_80 on: weights go from memory to mma.sync in order.

out[t, r] = sum over k of x[t, k] W[r, k], as portable.py's `gemm_packed` and rounded as there: weights become f16 once
from scale * code - min, sums are f32. A matrix unit's first operand are 16 rows of weights, its second 8 tokens; lane
4g + c holds of both four elements of k a step, and which those are is free as long as both hold the same. Here lane c
has a whole group of 32 (packing.py) of each 128 elements of k: 16 bytes of 4-bit codes are its operands of 8 steps,
the low nibbles of word i those of one and the high ones of another, and no value changes its lane.

A tile is ROWS rows (of one matrix, or half of them a gate's and half its up's), by WR x WK warps: WK of them share each
step of 128 * WK elements of k, and their sums meet once, at the end, in order. Planes and x are copied to shared memory
by cp.async, some steps ahead, the weights' first steps before what the launch before has made is waited for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_activation import glu
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    code_offset,
    has_codebook,
    has_f16_scales,
    has_plain_nibbles,
    has_supers,
    high_bits,
    is_e2m1,
    is_signed,
    pairs_of_supers,
    scale_form,
)
from graphrt.backends.triton.kernels.products.gemm_small.layouts import (
    high_layout,
    mma_layout,
    pieces_copy,
    pieces_shared,
    rows_copy,
    rows_shared,
    scale_type,
    sums_layout,
    sums_shared,
    words_layout,
    x_layout,
)
from graphrt.backends.triton.kernels.products.gemm_small.portable import (
    _codebook_asm,
    _mode_of,
    _unpack_asm,
)

# --- shared memory and copies ---


@gluon.jit
def allocate_codes(KIND: gl.constexpr, ROWS: gl.constexpr, WK: gl.constexpr, STAGES: gl.constexpr):
    """Rings of (quants, high); quants stand for what a type lacks."""
    E: gl.constexpr = code_bits(KIND)
    quants = gl.allocate_shared_memory(gl.int32, [STAGES, WK, ROWS, 4, E], pieces_shared(WK, ROWS, E, 4))
    high = quants
    if high_bits(KIND) > 0:
        H: gl.constexpr = high_bits(KIND)
        high = gl.allocate_shared_memory(gl.int32, [STAGES, WK, ROWS, 4, H], rows_shared([WK, ROWS, 4, H]))
    return quants, high


@gluon.jit
def allocate_planes(KIND: gl.constexpr, ROWS: gl.constexpr, WK: gl.constexpr, STAGES: gl.constexpr):
    """Rings of (quants, high, scales, supers); quants stand for what a type lacks."""
    quants, high = allocate_codes(KIND, ROWS, WK, STAGES)
    supers = quants
    scales = gl.allocate_shared_memory(scale_type(KIND), [STAGES, WK, ROWS, 4], rows_shared([WK, ROWS, 4]))
    if has_supers(KIND):
        supers = gl.allocate_shared_memory(gl.int32, [STAGES, WK, ROWS], rows_shared([WK, ROWS]))
    return quants, high, scales, supers


@gluon.jit
def steps_of_codes(quants, high, KIND: gl.constexpr):
    """allocate_codes' rings of WK steps a buffer as rings of one step."""
    ROWS: gl.constexpr = quants.shape[2]
    N: gl.constexpr = quants.shape[0] * quants.shape[1]
    E: gl.constexpr = code_bits(KIND)
    H: gl.constexpr = high_bits(KIND)
    quants = quants._reinterpret(gl.int32, [N, 1, ROWS, 4, E], pieces_shared(1, ROWS, E, 4))
    if H > 0:
        high = high._reinterpret(gl.int32, [N, 1, ROWS, 4, H], rows_shared([1, ROWS, 4, H]))
    else:
        high = quants
    return quants, high


@gluon.jit
def steps_of(rings, KIND: gl.constexpr):
    """allocate_planes' rings of WK steps a buffer as rings of one step."""
    quants, high, scales, supers = rings
    ROWS: gl.constexpr = quants.shape[2]
    N: gl.constexpr = quants.shape[0] * quants.shape[1]
    quants, high = steps_of_codes(quants, high, KIND)
    scales = scales._reinterpret(scale_type(KIND), [N, 1, ROWS, 4], rows_shared([1, ROWS, 4]))
    if has_supers(KIND):
        supers = supers._reinterpret(gl.int32, [N, 1, ROWS], rows_shared([1, ROWS]))
    else:
        supers = quants
    return quants, high, scales, supers


@gluon.jit
def allocate_x(TOKENS: gl.constexpr, WK: gl.constexpr, STAGES: gl.constexpr):
    """Rings of x's first and second half groups."""
    x_low = gl.allocate_shared_memory(gl.float16, [STAGES, WK, TOKENS, 4, 16], pieces_shared(WK, TOKENS, 16, 8))
    x_top = gl.allocate_shared_memory(gl.float16, [STAGES, WK, TOKENS, 4, 16], pieces_shared(WK, TOKENS, 16, 8))
    return x_low, x_top


@gluon.jit
def rows_in_plane(p, p_up, offset, row, left, PAIR: gl.constexpr):
    """(a tile's rows in the plane of p, offset from the tile's first one on, as pointers, rows of it that there are)"""
    if PAIR:
        p = gl.where(row % 16 < 8, p + offset, p_up + offset)
    else:
        p = p + offset
    return p, gl.minimum(matrix_row(row, PAIR), left - 1)


@gluon.jit
def matrix_row(row, PAIR: gl.constexpr):
    """The row of its matrix that a row of a tile is, from the tile's first one on: with PAIR of 16 rows the first eight
    are a gate's and the others its up's, which thus are in the same lanes."""
    if PAIR:
        return row // 16 * 8 + row % 8
    else:
        return row


@gluon.jit
def copy_codes(
    rings, planes, planes_up, slot, step, n_groups, first_row, left, q_end,
    KIND: gl.constexpr, ROWS: gl.constexpr, WK: gl.constexpr, PAIR: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a step's quants and high into buffer `slot`. What is past q_end (in 128 elements of k), or
    unless EVEN past a row's n_groups, becomes 0."""
    W: gl.constexpr = gl.num_warps()
    E: gl.constexpr = code_bits(KIND)
    H: gl.constexpr = high_bits(KIND)
    base = first_row.to(gl.int64) * n_groups
    L: gl.constexpr = pieces_copy(WK, ROWS, E, 4, W)
    q = step * WK + axis_index(L, 4, 0, WK)
    group = q * 4 + axis_index(L, 4, 2, 4)
    p, row = rows_in_plane(planes[0], planes_up[0], base * E, axis_index(L, 4, 1, ROWS), left, PAIR)
    at = (row * n_groups + group) * E + axis_index(L, 4, 3, E)
    async_copy.async_copy_global_to_shared(rings[0].index(slot), p + at, q < q_end if EVEN else group < n_groups)
    if H > 0:
        LH: gl.constexpr = rows_copy([WK, ROWS, 4, H], 4, W)
        q = step * WK + axis_index(LH, 4, 0, WK)
        group = q * 4 + axis_index(LH, 4, 2, 4)
        p, row = rows_in_plane(planes[1], planes_up[1], base * H, axis_index(LH, 4, 1, ROWS), left, PAIR)
        at = (row * n_groups + group) * H + axis_index(LH, 4, 3, H)
        async_copy.async_copy_global_to_shared(rings[1].index(slot), p + at, q < q_end if EVEN else group < n_groups)


@gluon.jit
def copy_weights(
    rings, planes, planes_up, slot, step, k, first_row, left, q_end,
    KIND: gl.constexpr, ROWS: gl.constexpr, WK: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a step's planes into buffer `slot`. What is past q_end (in 128 elements of k) becomes 0.

    planes: pointers to int32 but for the scales, which are as wide as what a group has of them.
    """
    W: gl.constexpr = gl.num_warps()
    n_groups = k // 128 * 4  # so that the compiler knows what it is a multiple of
    first = step * WK
    copy_codes(rings, planes, planes_up, slot, step, n_groups, first_row, left, q_end, KIND, ROWS, WK, PAIR, True)
    LS: gl.constexpr = rows_copy([WK, ROWS, 4], 4, W)
    q = first + axis_index(LS, 3, 0, WK)
    base = first_row.to(gl.int64) * n_groups
    p, row = rows_in_plane(planes[2], planes_up[2], base, axis_index(LS, 3, 1, ROWS), left, PAIR)
    at = (row * n_groups + q * 4) + axis_index(LS, 3, 2, 4)
    async_copy.async_copy_global_to_shared(rings[2].index(slot), p + at, q < q_end)
    if has_supers(KIND):
        LU: gl.constexpr = rows_copy([WK, ROWS], 1, W)
        q = first + axis_index(LU, 2, 0, WK)
        p, row = rows_in_plane(planes[3], planes_up[3], 0, axis_index(LU, 2, 1, ROWS), left, PAIR)
        at = (first_row + row).to(gl.int64) * (k // 256) + q // 2
        if not pairs_of_supers(KIND):
            at = at // 2
        async_copy.async_copy_global_to_shared(rings[3].index(slot), p + at, q < q_end)


@gluon.jit
def copy_x(x_rings, p_x, slot, step, k, n, q_end, TOKENS: gl.constexpr, WK: gl.constexpr):
    """Starts the copies of a step's x, f16 [n, k]: of each group of 32 its two halves go to buffers of their own."""
    L: gl.constexpr = pieces_copy(WK, TOKENS, 16, 8, gl.num_warps())
    q = step * WK + axis_index(L, 4, 0, WK)
    token = gl.minimum(axis_index(L, 4, 1, TOKENS), n - 1)
    at = (token * (k // 32) + q * 4 + axis_index(L, 4, 2, 4)) * 32 + axis_index(L, 4, 3, 16)
    async_copy.async_copy_global_to_shared(x_rings[0].index(slot), p_x + at, q < q_end)
    async_copy.async_copy_global_to_shared(x_rings[1].index(slot), p_x + (at + 16), q < q_end)


# --- operands ---


@gluon.jit
def f16_low(word):
    """The f16 in the low 16 bits of an integer."""
    return word.to(gl.int16).to(gl.float16, bitcast=True)


@gluon.jit
def low_byte(word):
    """The int8 in the low byte of an integer, as f32."""
    return word.to(gl.int8).to(gl.float32)


@gluon.jit
def scales_of(scales, supers, KIND: gl.constexpr):
    """(scale, add) of a group's first half, then of its second, of its integer in the plane of scales and its super.

    f16 for types with f16 scales or e2m1 codes, else f32.
    """
    if scale_form(KIND) == "f16_min":
        d = f16_low(scales)
        m = f16_low(scales >> 16)
        return d, m, d, m
    elif has_f16_scales(KIND):
        d = f16_low(scales)
        return d, d, d, d
    elif scale_form(KIND) == "e8m0":
        e = (scales.to(gl.int32) & 0xFF) + E2M1_SHIFT
        s = (gl.minimum(e, 255) << 23).to(gl.float32, bitcast=True).to(gl.float16)
        return s, s, s, s
    elif scale_form(KIND) == "i8":
        s = scales.to(gl.float32) * f16_low(supers).to(gl.float32)
        return s, s, s, s
    else:
        scales = scales.to(gl.int32)
        d = f16_low(supers).to(gl.float32)
        if scale_form(KIND) == "i8_halves":
            s0 = d * low_byte(scales)
            s1 = d * low_byte(scales >> 8)
            return s0, s0 * -BIAS - s0 * code_offset(KIND), s1, s1 * -BIAS - s1 * code_offset(KIND)
        else:
            s = d * (scales & 0xFF).to(gl.float32)
            m = f16_low(supers >> 16).to(gl.float32) * ((scales >> 8) & 0xFF).to(gl.float32)
            a = s * -BIAS - m
            return s, a, s, a


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
    if _mode_of(KIND) == "s":
        return _scaled_asm()
    return _unpack_asm(is_signed(KIND), SHIFTED, code_offset(KIND), _mode_of(KIND))


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
def halves_of(rings, slot, KIND: gl.constexpr, WR: gl.constexpr):
    """A step's codes as bytes: int32 [WK, ROWS, 4, 4] of elements 0..15 of the groups, and of 16..31.

    The latter's may be in the bytes' high nibbles: see keeps_shift.
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
        asm: gl.constexpr = _e2m1_asm() if is_e2m1(KIND) else _codebook_asm(KIND)
        low, top = gl.inline_asm_elementwise(asm, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
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
def step_scales(rings, slot, step, first_row, left, k, KIND: gl.constexpr, WR: gl.constexpr, PAIR: gl.constexpr):
    """scales_of() a step's groups, each [WK, ROWS, 4]."""
    quants, high, scales, supers = rings
    WK: gl.constexpr = quants.shape[1]
    ROWS: gl.constexpr = quants.shape[2]
    L: gl.constexpr = gl.SliceLayout(3, words_layout(WK, WR, ROWS, 4))
    found = scales.index(slot).load(L)
    su = found
    if has_supers(KIND):
        su = gl.expand_dims(supers.index(slot).load(gl.SliceLayout(2, L)), 2)
        if not pairs_of_supers(KIND):
            row = matrix_row(axis_index(L, 3, 1, ROWS), PAIR)
            at = (first_row + gl.minimum(row, left - 1)) * (k // 256) + (step * WK + axis_index(L, 3, 0, WK)) // 2
            su = su >> ((at & 1) * 16)
    return scales_of(found, su, KIND)


# --- the kernel ---


@gluon.jit
def place_of(i, first, count, turn):
    """The step of k that a tile does as its i-th of `count` from `first` on; past them the one behind the last.

    Tiles begin at steps of their own, `turn`: else all would ask the same few parts of the L2 cache for the same part
    of x at a time.
    """
    j = i + turn
    return first + gl.where(count > i, gl.where(j < count, j, j - count), count)


@gluon.jit
def deliver(
    acc, p_out, p_factors, p_bias, p_residual, p_parts, p_counter, first_row, m, n, tile, i_split, n_splits,
    GLU: gl.constexpr, SPLIT: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """The warps' sums [WK, ROWS, TOKENS], added up in order, to hand_over()."""
    WK: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    TOKENS: gl.constexpr = acc.shape[2]
    L: gl.constexpr = sums_layout(WK, ROWS, TOKENS, gl.num_warps(), GLU != "")
    sums = gl.allocate_shared_memory(gl.float32, [WK, ROWS, TOKENS], sums_shared(WK, ROWS, TOKENS), acc)
    hand_over(
        gl.sum(sums.load(L), 0), p_out, p_factors, p_bias, p_residual, p_parts, p_counter, first_row, m, n, tile,
        i_split, n_splits, GLU, SPLIT, HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@gluon.jit
def hand_over(
    y, p_out, p_factors, p_bias, p_residual, p_parts, p_counter, first_row, m, n, tile, i_split, n_splits,
    GLU: gl.constexpr, SPLIT: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """A tile's sums [ROWS, TOKENS] to out [n, m]. With SPLIT the last of a tile's programs adds the parts of all.

    Whichever it is, it adds them in the same order.
    """
    ROWS: gl.constexpr = y.shape[0]
    TOKENS: gl.constexpr = y.shape[1]
    if SPLIT:
        L: gl.constexpr = y.type.layout
        at = axis_index(L, 2, 1, TOKENS) * ROWS + axis_index(L, 2, 0, ROWS)
        p_first = p_parts + (tile * n_splits).to(gl.int64) * (ROWS * TOKENS)
        gl.store(p_first + i_split * (ROWS * TOKENS) + at, y)
        # All threads' stores come before the count, and all reads of others' parts after it.
        gl.thread_barrier()
        done = gl.atomic_add(p_counter + tile, 1, sem="acq_rel", scope="gpu")
        if done == n_splits - 1:
            gl.store(p_counter + tile, 0)  # for the next launch; in this one nobody counts here any more
            y = gl.load(p_first + at, cache_modifier=".cg")  # past the L1 cache: others wrote it
            for i in range(1, n_splits):
                y += gl.load(p_first + i * (ROWS * TOKENS) + at, cache_modifier=".cg")
            write(y, p_out, p_factors, p_bias, p_residual, first_row, m, n, GLU, HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL)
    else:
        write(y, p_out, p_factors, p_bias, p_residual, first_row, m, n, GLU, HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL)


@gluon.jit
def write(
    y, p_out, p_factors, p_bias, p_residual, first_row, m, n,
    GLU: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """A tile's sums [ROWS, TOKENS] to out [n, m], times the tokens' factors, with what is to be done to them."""
    ROWS: gl.constexpr = y.shape[0]
    TOKENS: gl.constexpr = y.shape[1]
    if GLU != "":
        R: gl.constexpr = ROWS // 2
        y, up = gl.split(gl.permute(gl.reshape(y, [ROWS // 16, 2, 8, TOKENS]), (0, 2, 3, 1)))
        y = gl.reshape(y, [R, TOKENS])
        up = gl.reshape(up, [R, TOKENS])
    else:
        R: gl.constexpr = ROWS
        up = y
    L: gl.constexpr = y.type.layout
    row = first_row + axis_index(L, 2, 0, R)
    token = axis_index(L, 2, 1, TOKENS)
    if HAS_FACTORS:
        factor = gl.load(p_factors + token, mask=token < n, other=0.0)
        y = y * factor
        up = up * factor
    if GLU != "":
        y = glu(y, up, 0.0, 0.0, GLU)
    at = token * m + row
    stored = (row < m) & (token < n)
    if HAS_BIAS:
        y += gl.load(p_bias + row, mask=row < m, other=0.0)
    if HAS_RESIDUAL:
        y += gl.load(p_residual + at, mask=stored, other=0.0)
    gl.store(p_out + at, y, mask=stored)


@gluon.jit
def matrix_of(tile, matrices, ROWS: gl.constexpr, SEGMENTS: gl.constexpr, PAIR: gl.constexpr):
    """(the number of a tile in its matrix, this one's planes, those of its up, out, bias, m). matrices: of each of
    three (planes, out, bias, m); with PAIR the first's up is the second."""
    planes, p_out, p_bias, m = matrices[0]
    planes_up = planes
    if PAIR:
        planes_up, _, _, _ = matrices[1]
    elif SEGMENTS > 1:
        tiles0 = (m + ROWS - 1) // ROWS
        planes1, p_out1, p_bias1, m1 = matrices[1]
        tiles1 = (m1 + ROWS - 1) // ROWS
        if SEGMENTS > 2 and tile >= tiles0 + tiles1:
            tile -= tiles0 + tiles1
            planes, p_out, p_bias, m = matrices[2]
        elif tile >= tiles0:
            tile -= tiles0
            planes, p_out, p_bias, m = planes1, p_out1, p_bias1, m1
        planes_up = planes
    return tile, planes, planes_up, p_out, p_bias, m


@accesses(
    reads=(
        "p_quants0 p_high0 p_scales0 p_supers0 p_bias0 p_quants1 p_high1 p_scales1 p_supers1 p_bias1 "
        "p_quants2 p_high2 p_scales2 p_supers2 p_bias2 p_x p_factors p_residual p_parts p_counter"
    ),
    writes="p_out0 p_out1 p_out2 p_parts p_counter",
    early=(
        "p_quants0 p_high0 p_scales0 p_supers0 p_quants1 p_high1 p_scales1 p_supers1 p_quants2 p_high2 "
        "p_scales2 p_supers2"
    ),
)
@gluon.jit(
    do_not_specialize=["m0", "m1", "m2", "n", "k", "n_splits", "steps_a_split"],
)
def batch_mma(
    p_quants0, p_high0, p_scales0, p_supers0, p_out0, p_bias0, m0,
    p_quants1, p_high1, p_scales1, p_supers1, p_out1, p_bias1, m1,
    p_quants2, p_high2, p_scales2, p_supers2, p_out2, p_bias2, m2,
    p_x, p_factors, p_residual, p_parts, p_counter, n, k, n_splits, steps_a_split,
    KIND: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, WK: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, SEGMENTS: gl.constexpr, GLU: gl.constexpr, SPLIT: gl.constexpr, HAS_FACTORS: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """x: f16 [n, k], k a multiple of 128 (256 where the type has supers); out: f32 [n, m] of each of SEGMENTS matrices
    of one type. Planes: as copy_weights has them, 16-byte aligned (supers 4).

    GLU: its kind: matrices 0 and 1 are a gate and an up, and out0 gets activation(gate) * up; else "". SPLIT: k is in
    n_splits ranges of steps_a_split steps of 128 * WK, a program each; parts: f32 [tiles, n_splits, TOKENS, ROWS];
    counter: int32 [tiles], zeros. factors: f32 [n], of x's rows; bias: f32 [m], of each matrix (no GLU); residual: f32
    [n, m], is added to out (one matrix, no GLU) and may be it. EARLY: steps whose weights are asked for before the
    launch before is done. Programs: tiles * n_splits.
    """
    WR: gl.constexpr = gl.num_warps() // WK
    PAIR: gl.constexpr = GLU != ""
    TILE: gl.constexpr = ROWS // 2 if PAIR else ROWS
    tile = gl.program_id(0)
    i_split = tile * 0
    if SPLIT:
        i_split = tile % n_splits
        tile = tile // n_splits
    matrices = (
        ((p_quants0, p_high0, p_scales0, p_supers0), p_out0, p_bias0, m0),
        ((p_quants1, p_high1, p_scales1, p_supers1), p_out1, p_bias1, m1),
        ((p_quants2, p_high2, p_scales2, p_supers2), p_out2, p_bias2, m2),
    )
    i_tile = tile
    tile, planes, planes_up, p_out, p_bias, m = matrix_of(tile, matrices, ROWS, SEGMENTS, PAIR)
    first_row = tile * TILE
    left = m - first_row
    n_q = k // 128
    first = i_split * steps_a_split
    last = gl.minimum(first + steps_a_split, (n_q + WK - 1) // WK)
    q_end = gl.minimum(last * WK, n_q)

    rings = allocate_planes(KIND, ROWS, WK, STAGES)
    x_rings = allocate_x(TOKENS, WK, STAGES)
    count = last - first
    turn = i_tile % count
    for i in gl.static_range(EARLY):
        step = place_of(i, first, count, turn)
        copy_weights(rings, planes, planes_up, i, step, k, first_row, left, q_end, KIND, ROWS, WK, PAIR)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in gl.static_range(STAGES - 1):
        step = place_of(i, first, count, turn)
        if i >= EARLY:
            copy_weights(rings, planes, planes_up, i, step, k, first_row, left, q_end, KIND, ROWS, WK, PAIR)
        copy_x(x_rings, p_x, i, step, k, n, q_end, TOKENS, WK)
        async_copy.commit_group()

    acc = gl.full([WK, ROWS, TOKENS], 0.0, gl.float32, layout=mma_layout(WK, WR))
    slot = 0
    free = STAGES - 1
    for i in range(0, count):
        async_copy.wait_group(STAGES - 2)
        ahead = place_of(i + (STAGES - 1), first, count, turn)
        copy_weights(rings, planes, planes_up, free, ahead, k, first_row, left, q_end, KIND, ROWS, WK, PAIR)
        copy_x(x_rings, p_x, free, ahead, k, n, q_end, TOKENS, WK)
        async_copy.commit_group()
        step = place_of(i, first, count, turn)
        low, top = halves_of(rings, slot, KIND, WR)
        s0, a0, s1, a1 = step_scales(rings, slot, step, first_row, left, k, KIND, WR, PAIR)
        acc = mma_v2(operand(low, s0, a0, KIND, False, WR), load_x(x_rings[0], slot, TOKENS, WK, WR), acc)
        acc = mma_v2(operand(top, s1, a1, KIND, keeps_shift(KIND), WR), load_x(x_rings[1], slot, TOKENS, WK, WR), acc)
        free = slot
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    deliver(
        acc, p_out, p_factors, p_bias, p_residual, p_parts, p_counter, first_row, m, n, i_tile, i_split, n_splits,
        GLU, SPLIT, HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
