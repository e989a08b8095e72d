"""Prefixes: leading pages that several sequences of a step share, which attention can read once for all of them. Which
groups of sequences do so is chosen by the bytes that it saves and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphrt.models.hparams import HParams
from graphrt.printing import count_text, human_bytes

Ints = npt.NDArray[np.int32]

#: What the launches cost that read a prefix and join what was found there with the rest, in each layer, as bytes that a
#: device could have read meanwhile: 2 us at 4 TB/s.
LAUNCH_BYTES = 8 * 2**20
#: How often a head's result is moved more: written and read again, of the prefix and of the rest.
MOVED = 4


class Prefix(NamedTuple):
    """Sequences `first` to first + n_seq - 1 of a step have the first n_pages entries of their tables in common."""

    first: int
    n_seq: int
    n_pages: int


@dataclass(frozen=True)
class PrefixRule:
    """What it takes to read a prefix once, in bytes, all layers together. page: of a page; query: what is moved more of
    a token's results; launches: what further launches are worth, once a step."""

    page: int
    query: int
    launches: int

    @classmethod
    def of(cls, hp: HParams, page_bytes: int) -> PrefixRule:
        """A model's, whose pages have so many bytes in the layers that see all tokens."""
        heads = [n for n, windowed in zip(hp.n_head, hp.windowed) if not windowed]
        return cls(page_bytes, MOVED * 4 * (hp.d_v + 1) * sum(heads), LAUNCH_BYTES * len(heads))

    def gain(self, n_seq: int, n_pages: int, n_queries: int) -> int:
        """Bytes that one group saves beside the launches: all but one of the sequences' reading of its pages, less what
        is moved more."""
        return (n_seq - 1) * n_pages * self.page - n_queries * self.query


@dataclass(frozen=True)
class Prefixes:
    """Those of a step, none where nothing is shared or reading it once does not pay; reason: why."""

    groups: Sequence[Prefix] = ()
    reason: str = "no two sequences side by side begin with the same pages"


def common_pages(tables: Ints, whole: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many leading pages each sequence has in common with the next one: [n - 1]. tables: int32 [n, blocks], under 0
    where there is no page; whole: pages that are full before the sequence's new tokens, [n]."""
    same = (tables[1:] == tables[:-1]) & (tables[1:] >= 0)
    leading: npt.NDArray[np.int64] = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    return np.minimum(leading, np.minimum(whole[1:], whole[:-1])).astype(np.int64)


def prefixes(
    tables: Ints, whole: npt.NDArray[np.int64], n_queries: npt.NDArray[np.int64], rule: PrefixRule
) -> Prefixes:
    """The groups of a step's sequences, in their order, that save the most by the rule; a sequence is in one at most.
    tables, whole: as common_pages() has them; n_queries: new tokens of each."""
    if len(tables) < 2 or not tables.shape[1]:
        return Prefixes()
    common = common_pages(tables, whole)
    if not common.any():
        return Prefixes()
    gain, groups = _best(common, n_queries, rule)
    if gain <= rule.launches:
        return Prefixes((), _refused(int(common.max()), gain, rule))
    return Prefixes(groups, _chosen(groups, gain, rule))


def _best(
    common: npt.NDArray[np.int64], n_queries: npt.NDArray[np.int64], rule: PrefixRule
) -> tuple[int, list[Prefix]]:
    """The most that groups save, and these. Of all ways to cut the sequences into groups of neighbours, by the best one
    for the first j of them; where all are alike they are one group or none."""
    n = len(n_queries)
    if (common == common[0]).all() and (n_queries == n_queries[0]).all():
        gain = rule.gain(n, int(common[0]), int(n_queries.sum()))
        return (gain, [Prefix(0, n, int(common[0]))]) if gain > 0 else (0, [])
    before = np.concatenate([[0], np.cumsum(n_queries)])
    best, last = np.zeros(n + 1, np.int64), [Prefix(0, 0, 0)] * (n + 1)
    shared = np.zeros(n, np.int64)  # pages that sequence i has in common with all up to the one before j
    firsts = np.arange(n)
    for j in range(2, n + 1):
        shared[j - 2] = common[j - 2]
        np.minimum(shared[: j - 1], common[j - 2], out=shared[: j - 1])
        gains = best[: j - 1] + (j - 1 - firsts[: j - 1]) * shared[: j - 1] * rule.page
        gains -= (before[j] - before[: j - 1]) * rule.query
        i = int(gains.argmax())
        if gains[i] > best[j - 1]:
            best[j], last[j] = gains[i], Prefix(i, j - i, int(shared[i]))
        else:
            best[j], last[j] = best[j - 1], Prefix(j - 1, 1, 0)
    groups, end = list[Prefix](), n
    while end > 1:
        if last[end].n_seq > 1:
            groups.insert(0, last[end])
        end = last[end].first
    return int(best[n]), groups


def _chosen(groups: Sequence[Prefix], gain: int, rule: PrefixRule) -> str:
    named = ", ".join(f"{g.n_seq} sequences share {count_text(g.n_pages, 'page')}" for g in groups[:4])
    more = f" and {len(groups) - 4} more" if len(groups) > 4 else ""
    return (
        f"prefixes are read once ({named}{more}): that saves {human_bytes(gain)} of what a step's attention moves, and "
        f"its launches are worth {human_bytes(rule.launches)}"
    )


def _refused(widest: int, gain: int, rule: PrefixRule) -> str:
    return (
        f"{count_text(widest, 'page')} shared by sequences side by side are read by each: once would save "
        f"{human_bytes(max(0, gain))}, and its launches are worth {human_bytes(rule.launches)}"
    )
