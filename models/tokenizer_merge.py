"""Pair merging: the part that SentencePiece BPE and byte-level BPE share.

A text is a row of symbols, at first one per character. While any two neighbours can merge, the pair of lowest
rank merges, the leftmost of equals first. What differs between vocabularies is only which pairs can merge and at
which rank, so `merge` takes a dict: the key of a pair is its two symbols with `separator` between them.

  SPM: separator "", rank by falling score of the merged token (equal scores share a rank)
  BPE: separator " ", rank = index in tokenizer.ggml.merges

This is llama.cpp's definition of both. The `tokenizers` library ranks pairs, not results, so it can't express
equal scores, and would need every split of every SPM token as a merge: seconds to build for 262144 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

SPACE = "\u2581"  # what SentencePiece writes for a space
_INNER_SPACE = re.compile(f"([^{SPACE}\0]){SPACE}")


def score_ranks(texts: Sequence[str], scores: np.ndarray) -> dict[str, int]:
    """Ranks for SPM: token text -> rank, 0 for the highest score. scores: [n] float."""
    _, rank = np.unique(-scores, return_inverse=True)
    return dict(zip(texts, rank.tolist()))


def merge_ranks(merges: Sequence[str]) -> dict[str, int]:
    """Ranks for BPE: "left right" -> index. A pair listed twice keeps its first rank, as in llama.cpp.

    llama.cpp splits an entry at its first space after index 0. Symbols never hold a space (spaces are mapped to
    another character first), so the entry itself is the key; an entry without a space can't be met.
    """
    n = len(merges)
    return dict(zip(reversed(merges), range(n - 1, -1, -1)))


def merge(symbols: list[str], ranks: dict[str, int], separator: str) -> list[str]:
    """Merges neighbours until none can; returns the symbols left. Time O(n log n) for n symbols.

    A heap entry is rank * n + position of the left symbol, so equal ranks come out leftmost first. An entry is
    stale when the pair that now starts at its position has another rank.
    """
    n = len(symbols)
    if n < 2:
        return symbols
    get = ranks.get
    after = list(range(1, n + 1))
    before = list(range(-1, n - 1))
    rank = [get(f"{a}{separator}{b}", -1) for a, b in pairwise(symbols)]
    rank.append(-1)
    heap = [r * n + i for i, r in enumerate(rank) if r >= 0]
    heapify(heap)
    while heap:
        r, i = divmod(heappop(heap), n)
        if rank[i] != r:
            continue
        j = after[i]
        k = after[j]
        text = symbols[i] = symbols[i] + symbols[j]
        symbols[j] = ""
        rank[j] = -1
        after[i] = k
        if k < n:
            before[k] = i
            r = rank[i] = get(f"{text}{separator}{symbols[k]}", -1)
            if r >= 0:
                heappush(heap, r * n + i)
        else:
            rank[i] = -1
        p = before[i]
        if p >= 0:
            r = rank[p] = get(f"{symbols[p]}{separator}{text}", -1)
            if r >= 0:
                heappush(heap, r * n + p)
    return [s for s in symbols if s]


def word_cuts(mergeable: Iterable[str]) -> re.Pattern[str]:
    """A pattern whose empty matches are places where a text may be cut without changing what merges.

    mergeable: the texts that a merge can produce. A merge across a place between characters a and b produces a
    text with a followed by b. So where no mergeable text has "a▁", no merge crosses from a to the ▁ behind it, and
    the two sides merge independently; a cut before a run of ▁ behind any other character is therefore exact.
    """
    joined = set(_INNER_SPACE.findall("\0".join(mergeable)))
    glued = "".join(re.escape(c) for c in sorted(joined))
    return re.compile(f"(?<=[^{SPACE}{glued}])(?={SPACE})")
