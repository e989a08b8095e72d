# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""Which weights dropout keeps, in kernels: ops/dropout.py, bit for bit.

Four keys side by side share a counter, so a tile's words are made for a quarter of its columns.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from graphrt.ops import dropout
from graphrt.ops.dropout import threshold

ROUNDS = tl.constexpr(dropout.ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = (tl.constexpr(x) for x in dropout.MULTIPLIERS)
WEYL_0, WEYL_1 = (tl.constexpr(x) for x in dropout.WEYL)


@triton.jit
def quarters(a, b, c, d):
    """Words 0 to 3 of blocks [..., n] as [..., 4 n]: a key's word after the other."""
    words = tl.join(tl.join(a, c), tl.join(b, d))
    if len(a.shape) == 2:
        return tl.reshape(words, (a.shape[0], 4 * a.shape[1]))
    else:
        return tl.reshape(words, (a.shape[0], a.shape[1], 4 * a.shape[2]))


@triton.jit
def drawn_words(i_query, i_four, i_head, i_seq, offset, seed_low, seed_high):
    """The four words of a counter, uint32 [..., queries, keys / 4], as kept_weights takes its arguments."""
    rows = (i_query + i_four * 0).to(tl.uint32, bitcast=True)
    fours = (i_four + i_query * 0).to(tl.uint32, bitcast=True)
    where = (i_query * 0 + i_four * 0 + i_head + i_seq * 65536).to(tl.uint32, bitcast=True)
    last = (rows.to(tl.int32, bitcast=True) * 0 + offset).to(tl.uint32, bitcast=True)
    low, high = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    for _i in tl.static_range(ROUNDS):
        first = tl.mul(fours.to(tl.uint64), MULTIPLIER_0, sanitize_overflow=False)
        third = tl.mul(where.to(tl.uint64), MULTIPLIER_1, sanitize_overflow=False)
        fours, where = (third >> 32).to(tl.uint32) ^ rows ^ low, (first >> 32).to(tl.uint32) ^ last ^ high
        rows, last = third.to(tl.uint32), first.to(tl.uint32)
        low, high = tl.add(low, WEYL_0, sanitize_overflow=False), tl.add(high, WEYL_1, sanitize_overflow=False)
    return fours, rows, where, last


@triton.jit
def kept_weights(i_query, i_four, i_head, i_seq, offset, seed_low, seed_high, least):
    """Which weights are kept, [..., queries, keys]. i_query, i_head: of rows, [..., queries, 1] or numbers; i_four: a
    quarter of the keys, [..., 1, keys / 4]; the seed's halves, the offset and the threshold as int32 of the same bits.
    """
    a, b, c, d = drawn_words(i_query, i_four, i_head, i_seq, offset, seed_low, seed_high)
    least = least.to(tl.uint32, bitcast=True)
    # Of one byte each: what goes from the layout of the words to that of the scores is a quarter as much.
    return quarters(
        (a >= least).to(tl.int8), (b >= least).to(tl.int8), (c >= least).to(tl.int8), (d >= least).to(tl.int8)
    ) != 0  # fmt: skip


def _signed(x: int) -> int:
    """The int32 of the same 32 bits."""
    return x - 2**32 if x >= 2**31 else x


def dropout_arguments(params: Any) -> dict[str, Any]:
    """What kernels take of an attention's dropout: its numbers as int32, and what kept weights are multiplied with."""
    rate = float(getattr(params, "dropout_p", 0.0))
    seed, offset = (params.seed, params.offset) if rate else (0, 0)
    return {
        "seed_low": _signed(seed & 0xFFFFFFFF), "seed_high": _signed(seed >> 32), "offset": _signed(offset),
        "least": _signed(threshold(rate)), "inverse": 1.0 / (1.0 - rate),
    }  # fmt: skip
