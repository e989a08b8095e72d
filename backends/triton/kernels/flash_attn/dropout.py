# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""Which weights dropout keeps, in kernels: ops/dropout.py, bit for bit.

Words are made by 32 weights; what keeps a weight is a bit of them. So a tile's words are few, and each of its weights
takes a shift.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from graphrt.ops import dropout
from graphrt.ops.dropout import left_out, threshold

ROUNDS = tl.constexpr(dropout.ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = (tl.constexpr(x) for x in dropout.MULTIPLIERS)
WEYL_0, WEYL_1 = (tl.constexpr(x) for x in dropout.WEYL)
KEYS, BITS = tl.constexpr(dropout.KEYS), tl.constexpr(dropout.BITS)


@triton.jit
def drawn_words(i_query, i_word, i_head, i_seq, offset, seed_low, seed_high, CALL: tl.constexpr):
    """The four words of call CALL, uint32, as kept_words takes its arguments."""
    rows = (i_query + i_word * 0).to(tl.uint32, bitcast=True)
    words = (i_word + i_query * 0).to(tl.uint32, bitcast=True) | (CALL << 30)
    where = (i_query * 0 + i_word * 0 + i_head + i_seq * 65536).to(tl.uint32, bitcast=True)
    last = (rows.to(tl.int32, bitcast=True) * 0 + offset).to(tl.uint32, bitcast=True)
    low, high = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    for _i in tl.static_range(ROUNDS):
        first = tl.mul(words.to(tl.uint64), MULTIPLIER_0, sanitize_overflow=False)
        third = tl.mul(where.to(tl.uint64), MULTIPLIER_1, sanitize_overflow=False)
        words, where = (third >> 32).to(tl.uint32) ^ rows ^ low, (first >> 32).to(tl.uint32) ^ last ^ high
        rows, last = third.to(tl.uint32), first.to(tl.uint32)
        low, high = tl.add(low, WEYL_0, sanitize_overflow=False), tl.add(high, WEYL_1, sanitize_overflow=False)
    return words, rows, where, last


@triton.jit
def _with_plane(kept, plane, least, N: tl.constexpr):
    """kept, of the bits of numbers from below bit N of the highest on, with these bits too: `and` where the threshold
    has a 1, else `or`, one instruction for both."""
    is_zero = ((least >> (BITS - 1 - N)) & 1) - 1
    return (kept & plane) | (is_zero.to(tl.uint32, bitcast=True) & (kept | plane))


@triton.jit
def kept_words(i_query, i_word, i_head, i_seq, offset, seed_low, seed_high, least, CALLS: tl.constexpr):
    """Words with a bit set for each weight that is kept, uint32. i_query, i_word: queries and words of their rows,
    int32, which broadcast; i_head, i_seq: likewise, or numbers; the rest as dropout_arguments() has it."""
    kept = (i_query * 0 + i_word * 0 - 1).to(tl.uint32, bitcast=True)
    for i in tl.static_range(CALLS):  # the last call, of the lowest bits, first
        a, b, c, d = drawn_words(i_query, i_word, i_head, i_seq, offset, seed_low, seed_high, CALLS - 1 - i)
        kept = _with_plane(kept, d, least, 4 * (CALLS - i) - 1)
        kept = _with_plane(kept, c, least, 4 * (CALLS - i) - 2)
        kept = _with_plane(kept, b, least, 4 * (CALLS - i) - 3)
        kept = _with_plane(kept, a, least, 4 * (CALLS - i) - 4)
    return kept


@triton.jit
def kept_weights(
    i_query, first_key, i_eight, i_head, i_seq, offset, seed_low, seed_high, least, CALLS: tl.constexpr,
):  # fmt: skip
    """Which weights of a tile are kept, [..., queries, keys]. i_query: int32 [..., queries, 1]; first_key: a number, no
    key of the tile lies past the 128 that it lies in; i_eight: of each eight keys, counted from the tile's first,
    [..., 1, keys / 8]; i_head: of rows, or a number."""
    word = tl.arange(0, 4)[None, :] if len(i_query.shape) == 2 else tl.arange(0, 4)[None, None, :]
    words = kept_words(
        i_query, first_key // KEYS * 4 + word, i_head, i_seq, offset, seed_low, seed_high, least, CALLS
    )  # fmt: skip
    eight = first_key % KEYS // 8 + i_eight
    if len(i_query.shape) == 2:
        words, eight = words[:, None, :, None], eight[:, :, None, None]
        odd = tl.arange(0, 2)[None, None, None, :]
    else:
        words, eight = words[:, :, None, :, None], eight[:, :, :, None, None]
        odd = tl.arange(0, 2)[None, None, None, None, :]
    kept = (words >> (eight % 8 + odd * 8 + eight // 8 * 16).to(tl.uint32)).to(tl.int8) & 1
    if len(i_query.shape) == 2:
        return tl.reshape(kept, (kept.shape[0], 8 * kept.shape[1])) != 0
    else:
        return tl.reshape(kept, (kept.shape[0], kept.shape[1], 8 * kept.shape[2])) != 0


def _signed(x: int) -> int:
    """The int32 of the same 32 bits."""
    return x - 2**32 if x >= 2**31 else x


def dropout_calls(params: Any) -> int:
    """Calls of Philox a word, which kernels are compiled for; 0 without dropout."""
    return dropout.calls(float(getattr(params, "dropout_p", 0.0)))


def dropout_arguments(params: Any) -> dict[str, Any]:
    """What kernels take of an attention's dropout: its numbers as int32, and what kept weights are multiplied with."""
    rate = float(getattr(params, "dropout_p", 0.0))
    seed, offset = (params.seed, params.offset) if rate else (0, 0)
    return {
        "seed_low": _signed(seed & 0xFFFFFFFF), "seed_high": _signed(seed >> 32), "offset": _signed(offset),
        "least": threshold(rate), "inverse": 1.0 / (1.0 - left_out(rate)),
    }  # fmt: skip
