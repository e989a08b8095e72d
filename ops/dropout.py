"""Which weights of an attention are left out: one generator for forward and backward, numpy and torch, CPU and GPU.

Key j of query i, head h, sequence s is kept if word j mod 4 of philox4x32(counter, key) is at least the threshold, with
counter = (j div 4, i, h + 2^16 s, offset) and key = seed. Nothing of that depends on how many queries or keys there
are, or on who computes what. Philox is the counter-based generator of Salmon et al. (2011), "Parallel random numbers:
as easy as 1, 2, 3", with 10 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

ROUNDS = 10
#: The multipliers of the first and the third word, and what the two halves of the key grow by each round.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """The least word that keeps a weight."""
    return min(round(dropout_p * 2**32), WORD)


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


def kept_at(
    dropout_p: float, seed: int, offset: int, heads: npt.ArrayLike, queries: npt.ArrayLike, keys: npt.ArrayLike
) -> npt.NDArray[np.bool_]:
    """Which weights are kept at some places of the first sequence, arrays of numbers that broadcast."""
    head, query, key = np.broadcast_arrays(*(np.asarray(x).astype(np.uint64) for x in (heads, queries, keys)))
    words = np.stack(philox((key // np.uint64(4), query, head, np.uint64(offset)), seed))
    mine: Words = np.take_along_axis(words, (key % np.uint64(4)).astype(np.int64)[None], 0)[0]
    return np.asarray(mine >= threshold(dropout_p))


def kept(dropout_p: float, seed: int, offset: int, shape: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which weights are kept. shape: [n_seq, n_head, n_q, n_kv], which the result has too."""
    n_seq, n_head, n_q, n_kv = shape
    blocks = np.arange(-(-n_kv // 4), dtype=np.uint64)
    head = np.arange(n_head, dtype=np.uint64)[None, :, None, None]
    where = head + (np.arange(n_seq, dtype=np.uint64)[:, None, None, None] << np.uint64(16))
    rows = np.arange(n_q, dtype=np.uint64)[:, None]
    words = philox((blocks, rows, where, np.uint64(offset)), seed)
    every = np.stack([np.broadcast_to(w, (n_seq, n_head, n_q, len(blocks))) for w in words], axis=-1)
    return every.reshape(n_seq, n_head, n_q, -1)[..., :n_kv] >= threshold(dropout_p)
