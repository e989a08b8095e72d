"""Quantizes to ggml's K types: super-blocks of 256 values in groups, whose scales are themselves small whole numbers.

Each function takes x and w, float32 [blocks, 256], the values and how much the square of each one's error counts, and
gives the blocks' bytes, uint8 [blocks, bytes a block]. The layouts are ggml's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphrt.models.quantize.fit import Grid, ratio, scales, scales_and_minimums

SUPER = 256


def q2_k(x: Tensor, w: Tensor) -> Tensor:
    """Sixteen groups of codes 0 to 3, 4-bit scales and minimums."""
    d, dmin, k, m, codes = _affine(x, w, 16, 3, 15)
    return torch.cat([k | m << 4, _two_bits(codes), halves(d), halves(dmin)], 1)


def q4_k(x: Tensor, w: Tensor) -> Tensor:
    """Eight groups of codes 0 to 15, 6-bit scales and minimums."""
    d, dmin, k, m, codes = _affine(x, w, 32, 15, 63)
    return torch.cat([halves(d), halves(dmin), _six_bits(k, m), _nibbles(codes)], 1)


def q5_k(x: Tensor, w: Tensor) -> Tensor:
    """The same with codes 0 to 31: their fifth bits apart, of each group in a bit of its own."""
    d, dmin, k, m, codes = _affine(x, w, 32, 31, 63)
    return torch.cat([halves(d), halves(dmin), _six_bits(k, m), bits(codes >> 4), _nibbles(codes & 15)], 1)


def q3_k(x: Tensor, w: Tensor) -> Tensor:
    """Sixteen groups of codes -4 to 3, 6-bit scales of either sign."""
    d, k, codes = _signed(x, w, Grid(-4, 3), 32)
    codes, k = (codes + 4).byte(), (k + 32).byte()
    low, high = k & 15, k >> 4
    packed = [low[:, :8] | low[:, 8:] << 4]
    packed.append(high[:, :4] | high[:, 4:8] << 2 | high[:, 8:12] << 4 | high[:, 12:] << 6)
    return torch.cat([bits(codes >> 2), _two_bits(codes & 3), *packed, halves(d)], 1)


def q6_k(x: Tensor, w: Tensor) -> Tensor:
    """Sixteen groups of codes -32 to 31, 8-bit scales of either sign."""
    d, k, codes = _signed(x, w, Grid(-32, 31), 128)
    quarters = (codes + 32).byte().reshape(-1, 2, 4, 32)
    low = (quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4).reshape(-1, 128)
    return torch.cat(
        [low, _two_bits(quarters.reshape(-1, SUPER) >> 4), k.to(torch.int8).view(torch.uint8), halves(d)], 1
    )


def _affine(x: Tensor, w: Tensor, size: int, high: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Blocks of groups of `size` with codes 0 to `high`, scales and minimums being 0 to `most` times d and dmin.

    d, dmin: float32 [blocks, 1]; scales, minimums: uint8 [blocks, groups]; codes: uint8 [blocks, 256].
    """
    n_groups = SUPER // size
    x, w = x.reshape(-1, size), w.reshape(-1, size)
    s, m = scales_and_minimums(x, w, high)
    codes = _codes(x, s[:, None], m[:, None], high)
    d, k = _of_scales(s, (w * codes.square()).sum(1), n_groups, most)
    s = (d * k).reshape(-1, 1)
    codes = _codes(x, s, m[:, None], high)
    sum_w = w.sum(1)
    m = ratio((w * (s * codes - x)).sum(1), sum_w).clamp_(min=0.0)  # the best one with the scale as it is stored
    dmin, km = _of_scales(m, sum_w, n_groups, most)
    codes = _codes(x, s, (dmin * km).reshape(-1, 1), high)
    return d, dmin, k.byte(), km.byte(), codes.byte().reshape(-1, SUPER)


def _codes(x: Tensor, s: Tensor, m: Tensor, high: int) -> Tensor:
    return ratio(x + m, s).round_().clamp_(0, high)


def _of_scales(values: Tensor, weights: Tensor, n_groups: int, most: int) -> tuple[Tensor, Tensor]:
    """Positive values as d times whole numbers up to `most`: d as an f16 holds it, [blocks, 1], and the numbers."""
    values, weights = values.reshape(-1, n_groups), weights.reshape(-1, n_groups)
    d = as_half(scales(values, weights, Grid(0, most)))[:, None]
    return d, ratio(values, d).round_().clamp_(0, most)


def _signed(x: Tensor, w: Tensor, grid: Grid, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 16 groups without minimums, scales being -most to most - 1 times d.

    d: float32 [blocks, 1]; scales: float32 [blocks, 16]; codes: float32 [blocks, 256].
    """
    groups, weights = x.reshape(-1, 16), w.reshape(-1, 16)
    s = scales(groups, weights, grid)
    squares = (weights * grid.snap(ratio(groups, s[:, None])).square()).sum(1)
    s, squares = s.reshape(-1, 16), squares.reshape(-1, 16)
    of_scales = Grid(-most, most - 1)
    d = as_half(scales(s, squares, of_scales))[:, None]
    k = of_scales.snap(ratio(s, d))
    codes = grid.snap(ratio(groups, (d * k).reshape(-1, 1)))
    return d, k, codes.reshape(-1, SUPER)


# ---- layouts ----


def as_half(x: Tensor) -> Tensor:
    """What an f16 holds of it, as float32."""
    return x.half().float()


def halves(x: Tensor) -> Tensor:
    """The bytes of [blocks, n] as f16: uint8 [blocks, 2n]."""
    return x.half().contiguous().view(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    """Of each 64 codes the second half in the high bits: [blocks, 256] to [blocks, 128]."""
    pairs = codes.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)


def _two_bits(codes: Tensor) -> Tensor:
    """Of each 128 codes four quarters in two bits each: [blocks, 256] to [blocks, 64]."""
    q = codes.reshape(-1, 2, 4, 32)
    return (q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6).reshape(-1, 64)


def bits(ones: Tensor) -> Tensor:
    """Bit i of byte j is code 32 i + j: [blocks, 256] zeros and ones to [blocks, 32]."""
    places = torch.arange(8, dtype=torch.uint8).reshape(1, 8, 1)
    return (ones.reshape(-1, 8, 32) << places).sum(1).byte()


def _six_bits(k: Tensor, m: Tensor) -> Tensor:
    """Eight scales and minimums of 6 bits: [blocks, 8] each to [blocks, 12]."""
    first = k[:, :4] | k[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    return torch.cat([first, second, k[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1)
