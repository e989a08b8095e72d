"""Pair merging: what a word becomes after its neighbouring symbols, at first one per character, have merged.

Both functions that end in _merger build a Merger: word -> symbols, a token as its id and anything else as its
text. Both follow llama.cpp: the pair of lowest rank merges, the leftmost of equals first, until none can.

  BPE: tokenizer.ggml.merges ranks pairs. The `tokenizers` library does the merging.
  SPM: scores rank merged tokens, equal ones alike; the library gives every pair a rank of its own. With no scores it
       got 934 of 2013 texts wrong, and ties that overlap can't be refused: Llama, Phi-3, Gemma and Baichuan have some.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, count, pairwise

import numpy as np
from tokenizers.models import BPE

Merger = Callable[[str], list[int | str]]

SPACE = "\u2581"  # what SentencePiece writes for a space
_INNER_SPACE = re.compile(f"([^{SPACE}\0]){SPACE}")
_SURROGATE = re.compile("[\ud800-\udfff]")


def pair_merger(ids: Mapping[str, int], merges: Sequence[str]) -> Merger:
    """BPE by the library. ids: token text -> id. merges: "left right", best first; the first of equals counts.

    llama.cpp merges pieces that are no tokens too (they may become one, or end as bytes), but the library refuses
    them, so they get ids above the vocabulary's. The token "" stands for a character that is in no piece at all.
    """
    pairs = _pairs(merges)
    pieces = set(chain.from_iterable(pairs)).union(map("".join, pairs))
    first = max(ids.values()) + 1
    vocab = dict(ids) | dict(zip([*sorted(pieces - ids.keys()), ""], count(first)))
    for text in filter(_SURROGATE.search, ids) if _SURROGATE.search("".join(ids)) else ():
        del vocab[text]  # bytes that were not UTF-8 in the file, which no text can hold
    model = BPE(vocab, pairs, unk_token="", cache_capacity=0)  # the words are cached by the tokenizer

    def merged(word: str) -> list[int | str]:
        tokens = model.tokenize(word)
        if all(token.id < first for token in tokens):
            return [token.id for token in tokens]
        spelt = word.encode("utf-8")  # offsets count bytes
        return [token.id if token.id < first else spelt[slice(*token.offsets)].decode("utf-8") for token in tokens]

    return merged


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs that a text can meet. Symbols are never empty, hold no space and, as texts, no lone surrogate."""
    if _SURROGATE.search("".join(merges)):
        merges = [entry for entry in merges if not _SURROGATE.search(entry)]
    # tuples, as lists of strings would burden the garbage collector: a second for 500000 pairs
    split = (tuple(entry.split(" ")) for entry in dict.fromkeys(merges))
    return [pair for pair in split if len(pair) == 2 and all(pair)]


def score_merger(texts: Sequence[str], ids: Mapping[str, int], scores: np.ndarray) -> Merger:
    """SPM: two symbols merge if the text of both is a token, the highest score first. scores: [n] float."""
    ranks = score_ranks(texts, scores)
    return lambda word: [ids.get(symbol, symbol) for symbol in merge(list(word), ranks)]


def score_ranks(texts: Sequence[str], scores: np.ndarray) -> dict[str, int]:
    """Token text -> rank, 0 for the highest score; equal scores share a rank."""
    _, rank = np.unique(-scores, return_inverse=True)
    return dict(zip(texts, rank.tolist()))


def merge(symbols: list[str], ranks: Mapping[str, int]) -> list[str]:
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
    rank = [get(a + b, -1) for a, b in pairwise(symbols)]
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
            r = rank[i] = get(text + symbols[k], -1)
            if r >= 0:
                heappush(heap, r * n + i)
        else:
            rank[i] = -1
        p = before[i]
        if p >= 0:
            r = rank[p] = get(symbols[p] + text, -1)
            if r >= 0:
                heappush(heap, r * n + p)
    return [s for s in symbols if s]


def word_cuts(mergeable: Iterable[str]) -> Callable[[str], Iterator[str]]:
    """A function that cuts a text, as its pieces are asked for, where that does not change what merges.

    mergeable: the texts that a merge can produce. A merge across a place between characters a and b produces a
    text with a followed by b. So where no mergeable text has "a▁", no merge crosses from a to the ▁ behind it, and
    the two sides merge independently; a cut before a run of ▁ behind any other character is therefore exact.
    """
    joined = set(_INNER_SPACE.findall("\0".join(mergeable)))
    glued = "".join(re.escape(c) for c in sorted(joined))
    places = re.compile(f"(?<=[^{SPACE}{glued}])(?={SPACE})")

    def cut(text: str) -> Iterator[str]:
        last = 0
        for match in places.finditer(text):
            yield text[last : match.start()]
            last = match.start()
        yield text[last:]

    return cut
