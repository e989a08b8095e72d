"""Activations as packed_gemv multiplies them: a tile of rows rounded before, or rounded here for each program.

Of each group of 32: eight words of int8, the step of the last part, and the sums of both halves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.products.activations import FINER, finer, magnitude, rounded, scale_of
from graphrt.backends.triton.kernels.products.gemv_codes import eight, split4


@triton.jit
def x_tile(p_q, p_d, p_s, token, n, i_tile, NG: tl.constexpr, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
            SUMS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """A tile of n rows of Q8Rows as round_groups() has it, all [G, W, 1, U, N]. token: which of the rows.

    Past a row's last group d and the sums are 0.
    """
    N: tl.constexpr = token.shape[0]
    g = tl.arange(0, G)[:, None, None, None, None]
    at = tl.max_contiguous(token[None, None, None, None, :] * NG + g, (1, 1, 1, 1, 1))
    at = tl.broadcast_to(at, (G, W, 1, 1, N))  # every warp loads for itself: all have the layout of the weights
    step = tl.arange(0, U)[None, None, None, :, None] * G
    first = i_tile * (U * G)
    m = None
    m_words = None
    zero = None
    if NG % (U * G) != 0:
        m = first + step + g < NG
        m_words = m[:, :, :, :, :, None]
        zero = 0.0
    word = tl.arange(0, 4)[None, None, None, None, None, :]
    p = (p_q + first * 8) + at[:, :, :, :, :, None] * 8 + (step[:, :, :, :, :, None] * 8 + word)
    low = tl.load(p, mask=m_words, eviction_policy="evict_last")
    high = tl.load(p + 4, mask=m_words, eviction_policy="evict_last")
    d = tl.load((p_d + first) + at + step, mask=m, other=zero, eviction_policy="evict_last")
    s_low, s_high = d, d
    if SUMS:
        half = tl.arange(0, 2)[None, None, None, None, None, :]
        p_sums = (p_s + first * 2) + at[:, :, :, :, :, None] * 2 + (step[:, :, :, :, :, None] * 2 + half)
        s_low, s_high = tl.split(tl.load(p_sums, mask=m_words, other=zero, eviction_policy="evict_last"))
    first_words = eight(low, high)
    second = first_words
    if PARTS == 2:
        p += n * (NG * 8)
        low = tl.load(p, mask=m_words, eviction_policy="evict_last")
        high = tl.load(p + 4, mask=m_words, eviction_policy="evict_last")
        second = eight(low, high)
    return first_words, second, d, s_low, s_high


@triton.jit
def _packed_bytes(byte):
    """Four int8, in the low bytes of the int32 of the last axis, as a word."""
    shift = 8 * tl.arange(0, 4)[None, None, None, None, None, :]
    return tl.sum((byte & 255) << shift, 5)


@triton.jit
def _x_chunk(p, m, J: tl.constexpr):
    """Elements 4J to 4J + 3 of each group."""
    return tl.load(p + 4 * J, mask=m, other=0.0)


@triton.jit
def round_groups(x, PARTS: tl.constexpr):
    """Groups rounded: (eight words of the first part, of the second, d, both halves' sums). x[J]: elements 4J to 4J + 3
    of each group. Without a second part the first is returned again."""
    most = tl.maximum(tl.maximum(magnitude(x[0]), magnitude(x[1])), tl.maximum(magnitude(x[2]), magnitude(x[3])))
    more = tl.maximum(tl.maximum(magnitude(x[4]), magnitude(x[5])), tl.maximum(magnitude(x[6]), magnitude(x[7])))
    d, inverse = scale_of(tl.max(tl.maximum(most, more), 5))
    i = inverse[:, :, :, :, :, None]
    n0, b0 = rounded(x[0] * i)
    n1, b1 = rounded(x[1] * i)
    n2, b2 = rounded(x[2] * i)
    n3, b3 = rounded(x[3] * i)
    n4, b4 = rounded(x[4] * i)
    n5, b5 = rounded(x[5] * i)
    n6, b6 = rounded(x[6] * i)
    n7, b7 = rounded(x[7] * i)
    first = (_packed_bytes(b0), _packed_bytes(b1), _packed_bytes(b2), _packed_bytes(b3), _packed_bytes(b4),
             _packed_bytes(b5), _packed_bytes(b6), _packed_bytes(b7))  # fmt: skip
    second = first
    low, high = n0 + n1 + n2 + n3, n4 + n5 + n6 + n7
    if PARTS == 2:
        e = d[:, :, :, :, :, None]
        m0, b0 = finer(x[0], n0, e, i)
        m1, b1 = finer(x[1], n1, e, i)
        m2, b2 = finer(x[2], n2, e, i)
        m3, b3 = finer(x[3], n3, e, i)
        m4, b4 = finer(x[4], n4, e, i)
        m5, b5 = finer(x[5], n5, e, i)
        m6, b6 = finer(x[6], n6, e, i)
        m7, b7 = finer(x[7], n7, e, i)
        second = (_packed_bytes(b0), _packed_bytes(b1), _packed_bytes(b2), _packed_bytes(b3), _packed_bytes(b4),
                  _packed_bytes(b5), _packed_bytes(b6), _packed_bytes(b7))  # fmt: skip
        low = low * FINER + (m0 + m1 + m2 + m3)
        high = high * FINER + (m4 + m5 + m6 + m7)
        d *= 1.0 / FINER
    return first, second, d, tl.sum(low, 5) * d, tl.sum(high, 5) * d


@triton.jit
def round_x(p_x, x_row, p_norm, eps, token, NG: tl.constexpr, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
             NORM: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The only tile of f32 activations (after an RMS norm, if NORM) as round_groups() has it, all [G, W, 1, U, N].

    A lane has its whole group, so that only a norm's sum takes more than one."""
    N: tl.constexpr = token.shape[0]
    g = tl.arange(0, U)[None, None, None, :, None] * G + tl.arange(0, G)[:, None, None, None, None]
    g = tl.broadcast_to(g, (G, W, 1, U, N))
    m = (g < NG)[:, :, :, :, :, None]
    at = g[:, :, :, :, :, None] * 32 + tl.arange(0, 4)[None, None, None, None, None, :]
    p = p_x + token[None, None, None, None, :, None] * x_row + at
    x0, x1, x2, x3 = _x_chunk(p, m, 0), _x_chunk(p, m, 1), _x_chunk(p, m, 2), _x_chunk(p, m, 3)
    x4, x5, x6, x7 = _x_chunk(p, m, 4), _x_chunk(p, m, 5), _x_chunk(p, m, 6), _x_chunk(p, m, 7)
    if NORM:
        squares = x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3 + x4 * x4 + x5 * x5 + x6 * x6 + x7 * x7
        total = tl.sum(tl.sum(tl.sum(squares, 5), 3), 0)  # [W, 1, N]
        factor = (1.0 / tl.sqrt_rn(total / (NG * 32) + eps))[None, :, :, None, :, None]
        p = p_norm + at
        x0 = x0 * factor * _x_chunk(p, m, 0)
        x1 = x1 * factor * _x_chunk(p, m, 1)
        x2 = x2 * factor * _x_chunk(p, m, 2)
        x3 = x3 * factor * _x_chunk(p, m, 3)
        x4 = x4 * factor * _x_chunk(p, m, 4)
        x5 = x5 * factor * _x_chunk(p, m, 5)
        x6 = x6 * factor * _x_chunk(p, m, 6)
        x7 = x7 * factor * _x_chunk(p, m, 7)
    return round_groups((x0, x1, x2, x3, x4, x5, x6, x7), PARTS)


@triton.jit
def _to_lanes(x, U: tl.constexpr, W: tl.constexpr):
    """Some values a group, [N, U * G, values], for the lanes that have it: [G, W, 1, U, N, values]."""
    N: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1] // U
    V: tl.constexpr = x.shape[2]
    x = tl.permute(tl.reshape(x, (N, U, G, V)), (2, 1, 0, 3))
    return tl.broadcast_to(x[:, None, None, :, :, :], (G, W, 1, U, N, V))


@triton.jit
def _words_to_lanes(byte, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr):
    """Groups' bytes, the low ones of [N, U * G, 32], as words for the lanes that have them."""
    N: tl.constexpr = byte.shape[0]
    shift = 8 * tl.arange(0, 4)[None, None, None, :]
    words = tl.sum((tl.reshape(byte, (N, U * G, 8, 4)) & 255) << shift, 3)
    words = tl.reshape(_to_lanes(words, U, W), (G, W, 1, U, N, 2, 4))
    low, high = tl.split(tl.permute(words, (0, 1, 2, 3, 4, 6, 5)))
    return eight(low, high)


@triton.jit
def _round_together(x, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr):
    """What round_groups() returns, of x [N, U * G, 32] that the lanes of all warps share."""
    N: tl.constexpr = x.shape[0]
    d, inverse = scale_of(tl.max(magnitude(x), 2))
    number, byte = rounded(x * inverse[:, :, None])
    first = _words_to_lanes(byte, U, W, G)
    second = first
    if PARTS == 2:
        more, byte = finer(x, number, d[:, :, None], inverse[:, :, None])
        second = _words_to_lanes(byte, U, W, G)
        number = number * FINER + more
        d *= 1.0 / FINER
    sums = tl.sum(tl.reshape(number, (N, U * G, 2, 16)), 3) * d[:, :, None]
    d2 = tl.broadcast_to(d[:, :, None], (N, U * G, 2))
    scales = _to_lanes(tl.reshape(tl.join(sums, d2), (N, U * G, 4)), U, W)  # one exchange for all
    s_low, d_lane, s_high, d_again = split4(scales)
    return first, second, d_lane, s_low, s_high


@triton.jit
def round_x_together(p_x, x_row, token, NG: tl.constexpr, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
                      PARTS: tl.constexpr):  # fmt: skip
    """What round_x() returns, without a norm: every value is rounded once in a program, and lanes get theirs through
    shared memory. (In round_x() each warp rounds all, and its lanes' loads are a line apart.)"""
    group = tl.arange(0, U * G)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(p_x + token[:, None, None] * x_row + at[None], mask=(group < NG)[None, :, None], other=0.0)
    return _round_together(x, U, W, G, PARTS)
