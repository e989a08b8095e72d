"""Which weights of an attention are left out: one generator for forward and backward, numpy and torch, CPU and GPU.

dropout_p is rounded first (`left_out`). The weights of 128 keys from 128 b on, of query i, head h, sequence s, are four
words of 32 bits, a bit a weight; `bit_of` says which. For word t, counters (4 b + t + 2^30 c, i, h + 2^16 s, offset)
with c = 0, 1, .. and the key = seed give four words of Philox4x32 each. The same bit of these, word after word, is a
number of 16 bits, the first one its highest; a weight is kept if its number is at least the threshold, 2^16 times the
rounded dropout_p. Where the threshold ends in zeros the last bits don't matter, and are not drawn: one call of Philox
is 8 to 32 weights. Nothing of that depends on how many queries or keys there are, or on who computes what.

Philox is the counter-based generator of Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3", with 7
rounds, the fewest that passed all their tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]

ROUNDS = 7
#: The multipliers of the first and the third word, and what the two halves of the key grow by each round.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
#: Keys that four words are drawn for, and bits of a weight's number.
KEYS, BITS = 128, 16


def threshold(dropout_p: float) -> int:
    """The least number that keeps a weight, of 16 bits. From 1/16 on of 8 bits, as torch's fused attention has it:
    half as many words are drawn."""
    if dropout_p >= 1 / 16:
        return min(round(dropout_p * 256), 255) * 256
    return round(dropout_p * 65536)


def left_out(dropout_p: float) -> float:
    """The share of weights that is left out: a multiple of 1/256, below 1/16 of 1/65536."""
    return threshold(dropout_p) / float(2**BITS)


def calls(dropout_p: float) -> int:
    """How often Philox is called for each word, 0 to 4: so many bits of the threshold, in fours, are not just zeros."""
    low = threshold(dropout_p)
    return -(-(BITS - (low & -low).bit_length() + 1) // 4) if low else 0


def bit_of(key: Any) -> tuple[Any, Any]:
    """(word, bit) of a key, an int or any array of them. A thread of a GPU's matrix units has two neighbouring columns
    of each eight, so that all its weights of a row share a word."""
    eight = key // 8 % 16
    return key // KEYS * 4 + key % 8 // 2, eight % 8 + key % 2 * 8 + eight // 8 * 16


def philox(counter: tuple[Any, Any, Any, Any], seed: int, high: Any = None) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 bits for counters of four, each in 64-bit integers of any array type, which broadcast.

    high: gives the upper 32 bits of the product of a 32-bit multiplier and a word, where 64 bits with a sign don't hold
    it; without it uint64 is shifted.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, seed >> 32
    upper = high if high is not None else (lambda m, word: (word * np.uint64(m)) >> np.uint64(32))
    for _ in range(ROUNDS):
        low0, low1 = (c0 * MULTIPLIERS[0]) & WORD, (c2 * MULTIPLIERS[1]) & WORD
        high0, high1 = upper(MULTIPLIERS[0], c0), upper(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def kept_words(dropout_p: float, seed: int, place: tuple[Any, Any, Any, Any], high: Any = None) -> Any:
    """Words with a bit set for each weight that is kept. place: (word of the row, query, head + 2^16 sequence, offset)
    in 64-bit integers of any array type, which broadcast; high: see philox()."""
    word, query, where, offset = place
    low, kept = threshold(dropout_p), (word + query + where) * 0 + WORD
    for call in reversed(range(calls(dropout_p))):
        drawn = philox((word + (call << 30), query, where, offset), seed, high)
        for i in reversed(range(4)):  # from the lowest bit up: so far kept is what is at least the threshold's end
            is_set = low >> (BITS - 1 - 4 * call - i) & 1
            kept = kept & drawn[i] if is_set else kept | drawn[i]
    return kept


def kept_at(
    dropout_p: float, seed: int, offset: int, heads: npt.ArrayLike, queries: npt.ArrayLike, keys: npt.ArrayLike
) -> Bools:
    """Which weights are kept at some places of the first sequence, arrays of numbers that broadcast."""
    head, query, key = np.broadcast_arrays(*(np.asarray(x).astype(np.uint64) for x in (heads, queries, keys)))
    word, bit = bit_of(np.asarray(keys).astype(np.int64))
    place = np.asarray(word).astype(np.uint64), query, head, np.uint64(offset)
    found: Bools = (kept_words(dropout_p, seed, place) >> bit.astype(np.uint64) & np.uint64(1)) != 0
    return found


def kept(dropout_p: float, seed: int, offset: int, shape: Sequence[int]) -> Bools:
    """Which weights are kept. shape: [n_seq, n_head, n_q, n_kv], which the result has too."""
    n_seq, n_head, n_q, n_kv = shape
    words = np.arange(-(-n_kv // KEYS) * 4, dtype=np.uint64)
    where = np.arange(n_head)[:, None, None] + (np.arange(n_seq)[:, None, None, None] << 16)
    rows = np.arange(n_q, dtype=np.uint64)[:, None]
    made = kept_words(dropout_p, seed, (words, rows, where.astype(np.uint64), np.uint64(offset)))
    word, bit = bit_of(np.arange(n_kv))
    found: Bools = (made[..., word] >> bit.astype(np.uint64) & np.uint64(1)) != 0
    return found
