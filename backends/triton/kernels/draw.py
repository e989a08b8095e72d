"""The truncations and the draw of SAMPLE and SAMPLE_EACH: one program a row, of candidates that are in order."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.ops.sample_each import (
    LEAST,
    MIN_KEEP,
    N_SETTINGS,
    TEMP,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    XTC_PROBABILITY,
    XTC_THRESHOLD,
)

COLUMN = tl.constexpr(N_SETTINGS)
I_TEMP, I_TOP_K, I_TOP_P, I_LEAST = (tl.constexpr(i) for i in (TEMP, TOP_K, TOP_P, LEAST))
I_MIN_KEEP, I_TYPICAL_P = tl.constexpr(MIN_KEEP), tl.constexpr(TYPICAL_P)
I_XTC_PROBABILITY, I_XTC_THRESHOLD = tl.constexpr(XTC_PROBABILITY), tl.constexpr(XTC_THRESHOLD)


@triton.jit
def _logits(keys):
    """What order_keys() made keys of; 0 for -0."""
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _shares(x, top, mask):
    """softmax in f64 of f32 logits, the highest of which is `top`; +inf logits share everything."""
    exact = tl.exp(x.to(tl.float64) - top.to(tl.float64))
    w = tl.where(tl.abs(top) == float("inf"), (x == top).to(tl.float64), exact)
    w = tl.where(mask, w, 0.0)
    return w / tl.sum(w, 0)


@triton.jit
def _typical(p_row, p_shares, x, top, n, least, min_keep, SIZE: tl.constexpr):
    """Leaves the keys whose surprise is nearest the entropy, in their order. How many there are."""
    j = tl.arange(0, SIZE)
    shares = _shares(x, top, j < n)
    surprise = -tl.log(tl.where(shares > 0, shares, 1.0))
    entropy = tl.sum(shares * surprise, 0)
    away = tl.where(shares > 0, tl.abs(surprise - entropy), float("inf"))
    tl.store(p_shares + j, away)
    tl.debug_barrier()
    rank = tl.zeros([SIZE], tl.int32)
    for i in range(0, n):
        other = tl.load(p_shares + i)
        rank += ((other < away) | ((other == away) & (i < j))).to(tl.int32)
    tl.store(p_shares + SIZE + rank, shares, mask=j < n)
    tl.debug_barrier()
    total = tl.full([], 0.0, tl.float64)
    covered = tl.full([], 0, tl.int32)
    for i in range(0, n):
        total += tl.load(p_shares + SIZE + i)
        covered += (total <= least).to(tl.int32)
    count = tl.minimum(tl.maximum(covered + 1, min_keep), n)
    keep = (j < n) & (rank < count)
    keys = tl.load(p_row + j, mask=j < n, other=0)
    tl.debug_barrier()
    tl.store(p_row + tl.cumsum(keep.to(tl.int32), 0) - 1, keys, mask=keep)
    tl.debug_barrier()
    return count


@accesses(reads="p_sorted p_uniforms p_slots p_settings p_shares", writes="p_sorted p_shares p_out")
@triton.jit
def draw(
    p_sorted, p_uniforms, p_slots, p_settings, p_shares, p_out, k, su, SIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (row) draws one of at most k keys in order, k <= SIZE, by the settings of its slot, of slot 0 without.

    sorted: [rows, k]; uniforms: of row i at i * su, and behind it where XTC is on; slots: int32 [rows]; settings: f64
    [slots, COLUMN]; shares: f64 [rows, 2, SIZE], scratch; out: int32 [rows]. Running sums go one by one, in order, as
    the host's do: equal logits have sums that meet top_p exactly.
    """
    take_turn(PDL)
    row = tl.program_id(0)
    j = tl.arange(0, SIZE)
    p_row, p_shares = p_sorted + row * k, p_shares + row * 2 * SIZE
    if p_slots is not None:
        p_settings += tl.load(p_slots + row) * COLUMN
    temp, min_keep = tl.load(p_settings + I_TEMP), tl.load(p_settings + I_MIN_KEEP).to(tl.int32)
    n = tl.maximum(tl.minimum(tl.load(p_settings + I_TOP_K).to(tl.int32), k), 1)
    x, top = _logits(tl.load(p_row + j, mask=j < k, other=0)), _logits(tl.load(p_row))
    place = tl.full([], 0, tl.int32)
    if (temp > 0) & (top > float("-inf")):
        typical_p = tl.load(p_settings + I_TYPICAL_P)
        if typical_p < 1:
            n = _typical(p_row, p_shares, x, top, n, typical_p, tl.maximum(min_keep, 1), SIZE)
            x, top = _logits(tl.load(p_row + j, mask=j < n, other=0)), _logits(tl.load(p_row))
        limit = tl.load(p_settings + I_TOP_P)
        if limit < 1:
            tl.store(p_shares + j, _shares(x, top, j < n))
            tl.debug_barrier()
            sums = tl.full([], 0.0, tl.float64)
            below = tl.full([], 0, tl.int32)
            for i in tl.range(0, n, loop_unroll_factor=8):
                sums += tl.load(p_shares + i)
                below += (sums < limit).to(tl.int32)
            n = tl.minimum(tl.maximum(below + 1, min_keep), n)
        least = tl.load(p_settings + I_LEAST)
        if least > float("-inf"):
            count = tl.sum(((j < n) & (x >= top + least.to(tl.float32))).to(tl.int32), 0)
            n = tl.minimum(tl.maximum(tl.maximum(count, min_keep), 1), n)
        first = tl.full([], 0, tl.int32)
        often = tl.load(p_settings + I_XTC_PROBABILITY)
        if often > 0:
            threshold = tl.load(p_settings + I_XTC_THRESHOLD)
            probable = (j < n) & (_shares(x, top, j < n) >= threshold)
            last = tl.sum(probable.to(tl.int32), 0) - 1
            leaves = (tl.load(p_uniforms + row * su + 1) <= often) & (threshold <= 0.5) & (n - last >= min_keep)
            first = tl.where(leaves, tl.maximum(last, 0), 0)
            top = _logits(tl.load(p_row + first))
        # The highest is moved to 0 first, so that a tiny temp leaves it finite; infinity can't be moved.
        moved = tl.where(tl.abs(top) == float("inf"), x, x - top)
        y = (moved.to(tl.float64) / temp).to(tl.float32)
        left = (j >= first) & (j < n)
        tl.store(p_shares + SIZE + j, _shares(y, tl.max(tl.where(left, y, float("-inf")), 0), left))
        tl.debug_barrier()
        total = tl.full([], 0.0, tl.float64)
        for i in tl.range(first, n, loop_unroll_factor=8):
            total += tl.load(p_shares + SIZE + i)
        target = tl.load(p_uniforms + row * su).to(tl.float64) * total
        total = tl.full([], 0.0, tl.float64)
        passed = tl.full([], 0, tl.int32)
        for i in tl.range(first, n, loop_unroll_factor=8):
            total += tl.load(p_shares + SIZE + i)
            passed += (total <= target).to(tl.int32)
        place = tl.minimum(first + passed, n - 1)
    tl.store(p_out + row, 0x7FFFFFFF - (tl.load(p_row + place) & 0x7FFFFFFF).to(tl.int32))
