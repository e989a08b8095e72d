"""PagePool: where tokens lie, who shares what, and what a full one does."""

from __future__ import annotations

from collections import Counter

import pytest
from support.page_plays import play

from graphrt.errors import CacheFullError, SessionError
from graphrt.models.paging.check import check
from graphrt.models.paging.pool import GONE, Copy, PagePool

PAGE = 4


def pool_of(n: int = 8, **windows: int) -> PagePool:
    kinds = {"full": 0, **windows}
    return PagePool(PAGE, dict.fromkeys(kinds, n), kinds)


def read(pool: PagePool, seq: int, ids: list[int]) -> list[Copy]:
    copies = pool.append({seq: len(ids)})
    pool.commit(seq, ids)
    check(pool)
    return copies


def table(pool: PagePool, seq: int, kind: str = "full") -> list[int]:
    return list(pool.of(seq).tables[kind])


@pytest.mark.parametrize("part", range(4))
def test_random_operations(part: int) -> None:
    """A hundred thousand of them against a plain model: nothing is lost, nothing leaks, nobody reads another's text."""
    done: Counter[str] = Counter()
    for seed in range(50 * part, 50 * part + 50):
        done += play(seed, 500)
    assert all(done[what] > 500 for what in ("full", "read", "fork", "swap_in", "truncate", "tokens that were there"))


def test_full_changes_nothing() -> None:
    pool = pool_of(3)
    read(pool, 0, list(range(6)))
    with pytest.raises(CacheFullError, match="3 pages of 4 tokens, of which 1 can be had and .* 2 sequences need 2"):
        pool.append({0: 3, 1: 4})
    check(pool)
    assert pool.of(0).reserved == 6 and pool.of(1).reserved == 0
    pool.append({0: 2, 1: 4})
    check(pool)


def test_a_fork_copies_the_partial_page_alone() -> None:
    pool = pool_of()
    read(pool, 0, list(range(6)))
    pool.fork(0, 1)
    check(pool)
    assert table(pool, 1) == table(pool, 0)
    first, last = table(pool, 0)
    assert read(pool, 1, [9]) == [Copy("full", last, table(pool, 1)[1], 2)]
    assert table(pool, 0) == [first, last] and table(pool, 1)[0] == first
    assert read(pool, 0, [8]) == [], "its other reader has left"


def test_forks_that_go_on_together_leave_one_the_page() -> None:
    pool = pool_of(4)
    read(pool, 0, list(range(5)))
    pool.fork(0, 1)
    pool.fork(0, 2)
    assert len(pool.append({0: 1, 1: 1, 2: 1})) == 2, "4 pages are enough"
    check(pool)


def test_equal_beginnings_are_shared() -> None:
    pool = pool_of()
    text = list(range(10))
    read(pool, 0, text)
    assert pool.adopt(1, text) == 8 and table(pool, 1) == table(pool, 0)[:2]
    assert pool.adopt(2, text[:8]) == 4, "a token is left to be read"
    assert pool.adopt(3, [1, *text[1:]]) == 0
    read(pool, 3, text)
    assert table(pool, 3)[:2] == table(pool, 0)[:2], "whoever read the same at the same time shares afterwards"
    pool.free(0)
    pool.free(1)
    assert pool.adopt(1, text) == 8, "they stay when nobody uses them"
    check(pool)


def test_who_shares_nothing() -> None:
    pool = PagePool(PAGE, {"full": 4}, {"full": 0}, share=False)
    read(pool, 0, list(range(8)))
    assert pool.adopt(1, list(range(9))) == 0
    pool.free(0)
    assert pool.kinds["full"].available == len(pool.kinds["full"].free) == 4


def test_the_longest_unused_goes_first() -> None:
    pool = pool_of(4)
    for seq, first in enumerate((10, 20)):
        read(pool, seq, [first] * 8)
    pool.free(0)
    pool.free(1)
    assert pool.adopt(2, [10] * 9) == 8, "used again"
    pool.free(2)
    read(pool, 3, [30] * 4)
    assert pool.adopt(4, [10] * 9) == 8 and pool.adopt(5, [20] * 9) == 4, "its end goes before its beginning"
    with pytest.raises(CacheFullError):
        pool.append({3: 4})  # all others are in use
    check(pool)


def test_a_page_in_the_tree_is_not_written() -> None:
    pool = pool_of()
    read(pool, 0, list(range(8)))
    assert pool.truncate(0, 6) == 6
    (copy,) = read(pool, 0, [99, 98])
    assert copy.n == 2 and pool.adopt(1, [*range(8), 0]) == 8, "what was there is still there"
    check(pool)


def test_windows_give_pages_back() -> None:
    pool = pool_of(6, swa=6)
    for _ in range(4):
        read(pool, 0, [7] * PAGE)
    assert table(pool, 0, "swa") == [GONE, GONE, *table(pool, 0, "swa")[2:]] and GONE not in table(pool, 0)
    assert pool.adopt(1, [7] * 17) == 16 and table(pool, 1, "swa")[:2] == [GONE, GONE]
    assert pool.holds(0, 16) and not pool.holds(0, 12)
    assert pool.truncate(0, 13) == 13 and pool.truncate(0, 12) == 0, "what the window needs is gone"
    check(pool)


def test_queued_tokens_need_their_window_until_they_are_taken() -> None:
    pool = PagePool(1, {"swa": 6}, {"swa": 2}, share=False)
    read(pool, 0, [1, 2])
    pool.append({0: 2})
    assert GONE not in table(pool, 0, "swa")[1:]
    pool.commit(0, [3])
    assert pool.truncate(0, 3) == 3
    check(pool)


def test_what_was_away_is_filled_or_found() -> None:
    pool = pool_of(6, swa=5)
    ids = list(range(11))
    read(pool, 0, ids)
    pool.free(0)
    fills = pool.restore(1, ids)
    assert {(f.kind, f.block) for f in fills} == {("full", 2), ("swa", 2)}, "full pages were in the tree still"
    pool.commit(1)
    check(pool)
    pool.free(1)
    pool.forget()
    fills = pool.restore(1, ids)
    assert {(f.kind, f.block) for f in fills} == {("full", 0), ("full", 1), ("full", 2), ("swa", 1), ("swa", 2)}
    pool.commit(1)
    check(pool)
    with pytest.raises(CacheFullError, match="of which 3 can be had and a sequence of 16 tokens needs 4"):
        pool.restore(2, list(range(50, 66)))
    check(pool)


def test_what_can_not_be() -> None:
    pool = pool_of()
    read(pool, 0, [1, 2])
    with pytest.raises(SessionError, match="must be empty, got one of 2; free it"):
        pool.fork(0, 0)
    with pytest.raises(SessionError, match="2 have them, got 3; append them first"):
        pool.commit(0, [3])
    pool.append({0: 1})
    with pytest.raises(SessionError, match="between its steps"):
        pool.fork(0, 1)
