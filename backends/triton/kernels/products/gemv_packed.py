"""A few vectors times packed matrices: y[t, row] = W[row, :] . x[t, :], for up to 8 tokens.

Bound by how fast weights come from memory, so everything serves two ends: wide loads in flight, and few instructions a
weight. A lane works on whole groups of 32 elements: one 16-byte load has a group's 4-bit codes, and 8 dp4a multiply
them with activations rounded to int8; of short rows 8 more with what that rounding left (activations.py). A tile is
[G, W, R, U] groups: G lie side by side along k over the lanes of a warp (over several warps from G = 64 on), W rows
over the remaining lanes and warps, R rows and U steps along k in the registers of a lane; tensors with tokens are
[G, W, R, U, N]. Triton gives lanes and warps to a tensor's axes in this order (words of one load, which come last,
before all), so that every tensor has the same layout and none goes through shared memory. A row's sum stays in its lane
until the end, where G lanes add theirs.

The next tile's weights are loaded before the present one is multiplied; the first tile's before this kernel waits for
the one that makes its activations (weights depend on no kernel).
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.activation import glu
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.common.scales import group_scale, half_scales
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    code_offset,
    codebook_shift,
    has_grid,
    has_half_scales,
    has_min,
    has_scales,
    has_supers,
    high_bits,
)
from graphrt.backends.triton.kernels.products.activations import FINER
from graphrt.backends.triton.kernels.products.gemv_activations import round_x, round_x_together, x_tile
from graphrt.backends.triton.kernels.products.gemv_codes import code_sums, words_of_points

# --- loads ---


@triton.jit
def _load_planes(
    packed, row, i_tile, KIND: tl.constexpr, NG: tl.constexpr, U: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    """A tile's (quants [G, W, R, U, words], high or further quants, scales, supers [G, W, R, U]), all as integers.

    row: int32 [1, W, R, 1]. Past a row's last group scales are 0 and quants anything. What a kind lacks is its scales
    again.
    """
    g = tl.arange(0, G)[:, None, None, None]
    # A lane shall take one group's scale, though it could take several neighbours' at once: hide that they are.
    at = tl.max_contiguous(row * NG + g, (1, 1, 1, 1))
    # Steps are added to pointers as numbers known to the compiler, which then are part of the instruction.
    step = tl.arange(0, U)[None, None, None, :] * G
    first = i_tile * (U * G)
    m = None
    m_words = None
    zero = None
    if NG % (U * G) != 0:
        m = first + step + g < NG
        m_words = m[:, :, :, :, None]
        zero = 0
    four = tl.arange(0, 4)[None, None, None, None, :]
    two = tl.arange(0, 2)[None, None, None, None, :]
    if code_bits(KIND) == 8:
        p = (packed.quants + first * 8) + at[:, :, :, :, None] * 8 + (step[:, :, :, :, None] * 8 + four)
    elif code_bits(KIND) == 2:
        p = (packed.quants + first * 2) + at[:, :, :, :, None] * 2 + (step[:, :, :, :, None] * 2 + two)
    elif code_bits(KIND) == 1:
        p = (packed.quants + first) + at + step
        m_words = m
    else:
        p = (packed.quants + first * 4) + at[:, :, :, :, None] * 4 + (step[:, :, :, :, None] * 4 + four)
    quants = tl.load(p, mask=m_words, eviction_policy="evict_first")
    if has_scales(KIND):
        scales = tl.load((packed.scales + first) + at + step, mask=m, other=zero, eviction_policy="evict_first")
    if has_supers(KIND):
        tl.static_assert(G % 8 == 0)
        p_super = (packed.supers + first // 8) + (row * (NG // 8) + g // 8) + step // 8
        supers = tl.load(p_super, mask=m, other=zero, eviction_policy="evict_first")
    else:
        supers = scales
    if not has_scales(KIND):
        scales = supers
    high = scales
    if code_bits(KIND) == 8:
        high = tl.load(p + 4, mask=m_words, eviction_policy="evict_first")
    elif high_bits(KIND) == 2:
        p_pair = (packed.high + first * 2) + at[:, :, :, :, None] * 2 + (step[:, :, :, :, None] * 2 + two)
        high = tl.load(p_pair, mask=m_words, eviction_policy="evict_first")
    elif high_bits(KIND) != 0:
        high = tl.load((packed.high + first) + at + step, mask=m, eviction_policy="evict_first")
    return quants, high, scales, supers


# --- scales ---


@triton.constexpr_function
def taken_off(KIND):
    """What is taken off each code, f32."""
    return float(code_offset(KIND) + codebook_shift(KIND))


@triton.constexpr_function
def needs_sums(KIND):
    """Sums of the activations enter the product: the type has mins or an offset."""
    return has_min(KIND) or taken_off(KIND) != 0.0


@triton.jit
def _scaled(low, high, scales, supers, d, s_low, s_high, KIND: tl.constexpr):
    """Each group's part of the product, from its integer sums: (what is to be added, what to be subtracted).

    f32 [G, W, R, U, N] each, the latter of types with mins only. Apart, so that sums of them are fused multiply-adds.
    """
    scales = scales[:, :, :, :, None]
    supers = supers[:, :, :, :, None]
    OFFSET: tl.constexpr = taken_off(KIND)
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    if has_half_scales(KIND):
        first, second, d_weight, first_min, second_min, d_min = half_scales(scales, supers, KIND)
        if has_min(KIND):
            more = (first * low + second * high) * (d_weight * d)
        else:
            more = (first * (low * d - s_low * OFFSET) + second * (high * d - s_high * OFFSET)) * d_weight
        less = (first_min * s_low + second_min * s_high) * d_min
    else:
        scale, off = group_scale(scales, supers, KIND)
        if OFFSET != 0.0:
            more = scale * (low * d - (s_low + s_high) * OFFSET)
        else:
            more = low * (scale * d)
        less = off * (s_low + s_high)
    return more, less


# --- the kernel ---


@triton.jit
def _add_tile(acc, planes, p_grid, x, KIND: tl.constexpr, PTX: tl.constexpr, PARTS: tl.constexpr):
    """acc, f32 [G, W, R, N], and a tile's products summed over U. x: as round_groups() has it."""
    words, second, d, s_low, s_high = x
    codes = planes[0]
    if has_grid(KIND):
        codes = words_of_points(p_grid, planes[0], planes[1], planes[2], KIND, PTX)
    low, high = code_sums(codes, planes[1], words, KIND, PTX)
    if PARTS == 2:
        low2, high2 = code_sums(codes, planes[1], second, KIND, PTX)
        low = low * FINER + low2
        high = high * FINER + high2
    more, less = _scaled(low, high, planes[2], planes[3], d, s_low, s_high, KIND)
    acc += tl.sum(more, 3)
    if has_min(KIND):
        acc -= tl.sum(less, 3)
    return acc


@triton.jit
def first_sums(p_bias, row, N: tl.constexpr, G: tl.constexpr):
    """What sums begin with, f32 [G, W, R, N]: rows `row` of a bias in the first of a row's lanes, else 0.

    A bias is asked for with the weights, and no kernel writes it either.
    """
    W: tl.constexpr = row.shape[1]
    R: tl.constexpr = row.shape[2]
    if p_bias is None:
        return tl.zeros([G, W, R, N], tl.float32)
    else:
        row = tl.broadcast_to(tl.max_contiguous(row, (1, 1, 1, 1)), (G, W, R, N))
        return tl.load(p_bias + row, mask=tl.arange(0, G)[:, None, None, None] == 0, other=0.0)


@triton.jit
def products(
    packed, packed1, row, token, n, p_q, p_d, p_s, p_x, x_row, p_norm, eps,
    KIND: tl.constexpr, KIND1: tl.constexpr, X_FORM: tl.constexpr, PARTS: tl.constexpr, NG: tl.constexpr,
    U: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr, p_bias=None,
):  # fmt: skip
    """Rows `row` ([1, W, R, 1]) of one matrix, or of two (KIND1 is not ""), times x: f32 [W, R, N] each.

    bias: f32, of the first one's rows.
    """
    N: tl.constexpr = token.shape[0]
    W: tl.constexpr = row.shape[1]
    R: tl.constexpr = row.shape[2]
    TILES: tl.constexpr = (NG + U * G - 1) // (U * G)
    SUMS: tl.constexpr = needs_sums(KIND) or (KIND1 != "" and needs_sums(KIND1))
    planes = _load_planes(packed, row, 0, KIND, NG, U, G)
    if KIND1 != "":
        planes1 = _load_planes(packed1, row, 0, KIND1, NG, U, G)
    acc = first_sums(p_bias, row, N, G)
    acc1 = tl.zeros([G, W, R, N], tl.float32)
    take_turn(PDL)
    if X_FORM == "q8":
        for i_tile in range(1, TILES):
            next_planes = _load_planes(packed, row, i_tile, KIND, NG, U, G)
            if KIND1 != "":
                next_planes1 = _load_planes(packed1, row, i_tile, KIND1, NG, U, G)
            x = x_tile(p_q, p_d, p_s, token, n, i_tile - 1, NG, U, W, G, SUMS, PARTS)
            acc = _add_tile(acc, planes, packed.grid, x, KIND, PTX, PARTS)
            planes = next_planes
            if KIND1 != "":
                acc1 = _add_tile(acc1, planes1, packed1.grid, x, KIND1, PTX, PARTS)
                planes1 = next_planes1
        x = x_tile(p_q, p_d, p_s, token, n, TILES - 1, NG, U, W, G, SUMS, PARTS)
    else:
        tl.static_assert(TILES == 1)
        if X_FORM == "together":
            x = round_x_together(p_x, x_row, token, NG, U, W, G, PARTS)
        else:
            x = round_x(p_x, x_row, p_norm, eps, token, NG, U, W, G, X_FORM == "norm", PARTS)
    y = tl.sum(_add_tile(acc, planes, packed.grid, x, KIND, PTX, PARTS), 0)
    y1 = y
    if KIND1 != "":
        y1 = tl.sum(_add_tile(acc1, planes1, packed1.grid, x, KIND1, PTX, PARTS), 0)
    return y, y1


@triton.jit
def finish(y, p_out, out_stride, p_residual, residual_stride, first, m, n, G: tl.constexpr):
    """Adds what there is to add and stores y [W, R, N] as out[token * out_stride + row]. first: the first row."""
    W: tl.constexpr = y.shape[0]
    R: tl.constexpr = y.shape[1]
    N: tl.constexpr = y.shape[2]
    # The first of a row's lanes stores, from where the sum is.
    g = tl.arange(0, G)[:, None, None, None]
    row = first + tl.arange(0, R)[None, None, :, None] * W + tl.arange(0, W)[None, :, None, None]
    row = tl.broadcast_to(tl.max_contiguous(row, (1, 1, 1, 1)), (G, W, R, N))
    token = tl.arange(0, N)[None, None, None, :]
    y = tl.broadcast_to(y[None], (G, W, R, N))
    m_out = (row < m) & (token < n) & (g == 0)
    if p_residual is not None:
        y += tl.load(p_residual + token * residual_stride + row, mask=m_out, other=0.0)
    tl.store(p_out + token * out_stride + row, y, mask=m_out)


#: Numbers that vary between a model's matrices and between runs, and make no difference to a kernel.
GENERAL = ["out_stride0", "out_stride1", "out_stride2", "residual_stride", "m0", "m1", "m2", "n"]


@accesses(
    reads=("packed0 packed1 packed2 p_q p_d p_s p_x p_norm p_bias0 p_bias1 p_bias2 p_residual"),
    writes="p_out0 p_out1 p_out2",
    early=("packed0 packed1 packed2 p_bias0 p_bias1 p_bias2"),
)
@triton.jit(do_not_specialize=GENERAL)
def packed_gemv(
    packed0, p_out0, out_stride0, m0,
    packed1, p_out1, out_stride1, m1,
    packed2, p_out2, out_stride2, m2,
    p_q, p_d, p_s, p_x, x_row, p_norm, eps, p_bias0, p_bias1, p_bias2, p_residual, residual_stride, n,
    KIND0: tl.constexpr, KIND1: tl.constexpr, KIND2: tl.constexpr, GLU: tl.constexpr, X_FORM: tl.constexpr,
    PARTS: tl.constexpr, NG: tl.constexpr, N: tl.constexpr, U: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = W x of up to three matrices with rows of NG groups. Programs: R * W rows each, matrix after matrix.

    packed: Packed.planes() of each; p_out: f32, element (token, row) at token * out_stride + row; m: rows of each;
    KIND: types, "" for no matrix.
    GLU: its kind: the first two matrices are a gate and an up of m0 rows, and out0 has activation(gate) * up; else "".
    X_FORM: "q8": q, d, s are Q8Rows; "f32": x, rows x_row apart, is rounded here by each warp, "together":
    by all of them; "norm": as "f32", after an RMS norm with weights p_norm and eps (a tile holds the row but for "q8").
    PARTS: of the activations; N: a power of two from n on; bias: of each, f32 [m] or None; residual: of matrix 0.
    """
    i_program = tl.program_id(0)
    token = tl.minimum(tl.arange(0, N), n - 1)
    PAIR: tl.constexpr = KIND1 if GLU != "" else ""
    i_row = tl.arange(0, R)[None, None, :, None] * W + tl.arange(0, W)[None, :, None, None]
    programs0 = (m0 + (R * W - 1)) // (R * W)
    programs1 = 0
    if KIND1 != "" and GLU == "":
        programs1 = (m1 + (R * W - 1)) // (R * W)
    if i_program < programs0 or (KIND1 == "" or GLU != ""):
        first = i_program * (R * W)
        y, y1 = products(
            packed0, packed1, tl.minimum(first + i_row, m0 - 1), token, n, p_q, p_d, p_s, p_x, x_row, p_norm, eps,
            KIND0, PAIR, X_FORM, PARTS, NG, U, G, PTX, PDL, p_bias0,
        )  # fmt: skip
        if GLU != "":
            y = glu(y, y1, 0.0, 0.0, GLU, True)
        finish(y, p_out0, out_stride0, p_residual, residual_stride, first, m0, n, G)
    elif i_program < programs0 + programs1 or KIND2 == "":
        first = (i_program - programs0) * (R * W)
        y, y1 = products(
            packed1, None, tl.minimum(first + i_row, m1 - 1), token, n, p_q, p_d, p_s, p_x, x_row, p_norm, eps,
            KIND1, "", X_FORM, PARTS, NG, U, G, PTX, PDL, p_bias1,
        )  # fmt: skip
        finish(y, p_out1, out_stride1, None, 0, first, m1, n, G)
    else:
        first = (i_program - programs0 - programs1) * (R * W)
        y, y1 = products(
            packed2, None, tl.minimum(first + i_row, m2 - 1), token, n, p_q, p_d, p_s, p_x, x_row, p_norm, eps,
            KIND2, "", X_FORM, PARTS, NG, U, G, PTX, PDL, p_bias2,
        )  # fmt: skip
        finish(y, p_out2, out_stride2, None, 0, first, m2, n, G)
