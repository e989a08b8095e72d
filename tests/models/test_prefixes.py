"""Prefixes: which sequences of a step share pages that are read once, held against all ways to group them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny import write_model

from graphrt.models import load
from graphrt.models.paging.prefixes import LAUNCH_BYTES, Prefix, PrefixRule, common_pages, prefixes

FREE = PrefixRule(page=100, query=0, launches=0)


def groupings(n: int, first: int = 0) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut n sequences into groups of neighbours: (first, how many) of each."""
    if first == n:
        yield []
    for stop in range(first + 1, n + 1):
        for rest in groupings(n, stop):
            yield [(first, stop - first), *rest]


def best(tables: np.ndarray, whole: np.ndarray, queries: np.ndarray, rule: PrefixRule) -> int:
    """The most that any grouping saves."""
    most = 0
    for cut in groupings(len(tables)):
        gain = 0
        for first, n in cut:
            group = tables[first : first + n]
            pages = 0
            while pages < min(whole[first : first + n]) and len(set(group[:, pages])) == 1 and group[0, pages] >= 0:
                pages += 1
            gain += max(0, (n - 1) * pages * rule.page - int(queries[first : first + n].sum()) * rule.query)
        most = max(most, gain)
    return most


def told(groups: list[Prefix], tables: np.ndarray, queries: np.ndarray, rule: PrefixRule) -> int:
    """What groups save; they must be what the op is promised."""
    end = 0
    for first, n, pages in groups:
        assert first >= end and n > 1 and pages > 0
        assert (tables[first : first + n, :pages] == tables[first, :pages]).all() and (tables[first, :pages] >= 0).all()
        end = first + n
    assert end <= len(tables)
    return sum(rule.gain(g.n_seq, g.n_pages, int(queries[g.first : g.first + g.n_seq].sum())) for g in groups)


@pytest.mark.parametrize("query", [0, 30, 60])
def test_no_grouping_saves_more(query: int) -> None:
    rng = np.random.default_rng(query)
    rule, chosen = PrefixRule(100, query, 0), 0
    for _ in range(150):
        n, blocks = int(rng.integers(1, 8)), int(rng.integers(1, 6))
        tables = np.sort(rng.integers(0, 2, (n, blocks)).cumsum(1), 0).astype(np.int32)
        tables = tables[np.lexsort(tables.T[::-1])]
        tables[rng.random(tables.shape) < 0.05] = -1
        whole, queries = rng.integers(0, blocks + 1, n), rng.integers(1, 4, n)
        found = prefixes(tables, whole, queries, rule)
        gain = told(list(found.groups), tables, queries, rule)
        assert gain == best(tables, whole, queries, rule)
        assert all(g.n_pages <= whole[g.first : g.first + g.n_seq].min() for g in found.groups)
        chosen += bool(found.groups)
    assert chosen > 10


def test_a_system_prompt_and_forks_below_it() -> None:
    """Four share two pages, two of them four: what the pair saves by itself is less than two pages of all four."""
    tables = np.array([[7, 8, 1, -1, -1], [7, 8, 2, 3, 4], [7, 8, 2, 3, 5], [7, 8, 9, -1, -1]], np.int32)
    ones, whole = np.ones(4, np.int64), np.array([2, 5, 5, 2])
    assert common_pages(tables, whole).tolist() == [2, 4, 2]
    found = prefixes(tables, whole, ones, FREE)
    assert list(found.groups) == [Prefix(0, 4, 2)]
    assert "4 sequences share 2 pages" in found.reason and "saves 600 B" in found.reason
    assert list(prefixes(tables[1:3], whole[1:3], ones[:2], FREE).groups) == [Prefix(0, 2, 4)]


def test_what_does_not_pay_says_so() -> None:
    tables, ones = np.array([[3, 4], [3, 4]], np.int32), np.ones(2, np.int64)
    whole = ones * 2
    assert prefixes(tables, whole, ones, PrefixRule(100, 0, 199)).groups
    found = prefixes(tables, whole, ones, PrefixRule(100, 0, 200))
    assert not found.groups and "2 pages shared" in found.reason and "200 B" in found.reason
    assert not prefixes(tables, whole, ones * 4, PrefixRule(100, 25, 0)).groups, "results cost what pages save"
    assert "no two sequences" in prefixes(tables[:1], whole[:1], ones[:1], FREE).reason
    assert "no two sequences" in prefixes(tables, whole * 0, ones, FREE).reason


def test_the_rule_of_a_model(tmp_path: Path) -> None:
    """Only the heads of layers that see all tokens move results."""
    hp = load(write_model(tmp_path / "m.gguf", "gemma3"), "cpu").decoder.hp
    full = [n for n, windowed in zip(hp.n_head, hp.windowed) if not windowed]
    rule = PrefixRule.of(hp, 1000)
    assert 0 < len(full) < hp.n_layer and rule.page == 1000 and rule.launches == LAUNCH_BYTES * len(full)
    assert rule.query == 16 * (hp.d_v + 1) * sum(full)
