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
from graphrt.backends.triton.kernels.common.scales import f16_scale, group_scale, half_scales
from graphrt.backends.triton.kernels.kinds import (
    code_bits,
    has_f16_scales,
    has_half_scales,
    has_min,
    has_plain_nibbles,
    has_scales,
    has_supers,
    high_bits,
    pairs_of_supers,
    scale_bytes,
)
from graphrt.backends.triton.kernels.products.gemm_small.unpack import halves, weights

GROUP = tl.constexpr(32)


# ---- Scales ----


@triton.jit
def _scales(scales, supers, KIND: tl.constexpr):
    """(scale, add) of elements 0..15 of each group, then of 16..31: f16 where the type has f16 scales, else f32.

    scales: int32 [rows, groups]; supers: the same or [rows, 1].
    """
    if has_f16_scales(KIND):
        d, m = f16_scale(scales, KIND)
        return d, m, d, m
    elif has_half_scales(KIND):
        first, second, d, first_min, second_min, d_min = half_scales(scales, supers, KIND)
        s0, s1 = first * d, second * d
        a0, a1 = tl.zeros_like(s0), tl.zeros_like(s1)
        if has_min(KIND):
            a0, a1 = -(first_min * d_min), -(second_min * d_min)
        return s0, a0, s1, a1
    else:
        s, off = group_scale(scales, supers, KIND)
        a = -off if has_min(KIND) else tl.zeros_like(s)
        return s, a, s, a


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
    packed, row, p_x, x_row, k, first, last,
    KIND: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rows `row` of packed weights times rows x_row of x (f16, k elements each): f32 [rows, x's rows].

    row, x_row: int64. Steps `first` to last - 1 of k, GROUPS groups each. Planes and EVEN: as gemm_packed has them.
    """
    ROWS: tl.constexpr = row.shape[0]
    W: tl.constexpr = code_bits(KIND)
    H: tl.constexpr = high_bits(KIND)
    n_groups = k // GROUP
    p_quants = packed.quants + (row * (n_groups * W))[:, None] + tl.arange(0, GROUPS * W)[None, :]
    if H > 0:
        p_high = packed.high + (row * (n_groups * H))[:, None] + tl.arange(0, GROUPS * H)[None, :]
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
        else:
            words = tl.load(p_quants + i_group * W, mask=(tl.arange(0, GROUPS * W) // W < left)[None, :], other=0)
        words = words.reshape(ROWS, GROUPS, W)
        high = words
        if has_scales(KIND):
            if EVEN:
                scales = _load_scales(packed.scales, row_groups + i_group, KIND, ROWS, GROUPS)
            else:
                scales = _load_scales_masked(packed.scales, row_groups + i_group, m_scale, KIND, GROUPS)
        if H > 0:
            if EVEN:
                high = tl.load(p_high + i_group * H)
            else:
                high = tl.load(p_high + i_group * H, mask=(tl.arange(0, GROUPS * H) // H < left)[None, :], other=0)
            high = high.reshape(ROWS, GROUPS, H)
        if has_supers(KIND):
            # A tile of k lies in one superblock, or holds whole ones; rows of such types are whole superblocks.
            i_super = i_group // 8 + (tl.arange(0, GROUPS) // 8 if GROUPS > 8 else tl.arange(0, 1))
            supers = _load_supers(packed.supers, row_supers[:, None] + i_super[None, :], KIND)
        else:
            supers = scales
        if not has_scales(KIND):
            scales = supers
        s0, a0, s1, a1 = _scales(scales, supers, KIND)
        if W == 8:
            i_k = i_group * GROUP + tl.arange(0, GROUPS * 32)
            if EVEN:
                x = tl.load(p_x + i_k[:, None])
            else:
                x = tl.load(p_x + i_k[:, None], mask=(i_k < k)[:, None], other=0.0)
            acc = tl.dot(weights(words, s0, a0, KIND, False, ROWS, GROUPS * 32, PTX), x, acc)
        else:
            low, top = halves(words, high, scales, packed.grid, KIND, ROWS, GROUPS, PTX)
            i_k = i_group * GROUP + i_half
            if EVEN:
                x0 = tl.load(p_x + i_k[:, None])
                x1 = tl.load(p_x + (i_k + 16)[:, None])
            else:
                x0 = tl.load(p_x + i_k[:, None], mask=(i_k < k)[:, None], other=0.0)
                x1 = tl.load(p_x + (i_k + 16)[:, None], mask=(i_k < k)[:, None], other=0.0)
            acc = tl.dot(weights(low, s0, a0, KIND, False, ROWS, GROUPS * 16, PTX), x0, acc)
            acc = tl.dot(weights(top, s1, a1, KIND, has_plain_nibbles(KIND), ROWS, GROUPS * 16, PTX), x1, acc)
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


@accesses(reads="packed p_x p_factors p_bias p_residual", writes="p_out")
@triton.jit(do_not_specialize=_GENERAL)
def gemm_packed(
    packed, p_x, p_factors, p_bias, p_residual, p_out,
    m, n, n_batch, n_a2, ratio3, k, k_steps, steps_a_split, n_splits,
    KIND: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, HAS_FACTORS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """x: f16 [n_batch, n, k]; packed: Packed.word_planes() of [matrices * m, k]; out: f32 [n_batch, n, m], or parts
    before that; bias: f32 [m], of all matrices; residual: like out. EVEN: k is a multiple of 32 * GROUPS and of 128.
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
        packed, row, p_x, i_batch.to(tl.int64) * n + i_token, k, first, last,
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
