"""Random operations on a page pool, held against a plain model of it: each sequence is a list of tokens, and each cell
remembers of which text it was written. What a sequence sees through its tables must be its own text."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from graphrt.errors import CacheFullError
from graphrt.models.paging.check import check
from graphrt.models.paging.pool import GONE, Copy, PagePool

#: Kinds of cells with the windows of each, as models have them.
WINDOWS = ({"full": 0}, {"full": 0, "swa": 5}, {"full": 0, "swa": 24}, {"swa": 9}, {"full": 0, "swa": 1})
SEQUENCES = 6


def written(ids: list[int], position: int) -> tuple[int, ...]:
    """What a cell holds of a text: it depends on all tokens up to it."""
    return (position, hash(tuple(ids[: position + 1])))


@dataclass
class Play:
    """A pool, its memory and the plain model. ids: the tokens of each sequence; queued: how many at its end are
    appended and not committed; away: texts that were swapped out."""

    pool: PagePool
    random: random.Random
    ids: dict[int, list[int]] = field(default_factory=lambda: {seq: [] for seq in range(SEQUENCES)})
    queued: Counter[int] = field(default_factory=Counter)
    away: list[list[int]] = field(default_factory=list)
    memory: dict[tuple[str, int, int], tuple[int, ...]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    looks: bool = True
    tables: dict[int, object] = field(default_factory=dict)

    def once(self) -> None:
        """One operation, and at times a look at everything."""
        name = self.random.choice(
            ("append", "append", "append", "commit", "commit", "truncate", "fork", "fork", "free", "begin", "begin",
             "swap_out", "swap_in", "read", "read", "read", "read", "forget")
        )  # fmt: skip
        before = self._state() if self.looks else None
        try:
            getattr(self, name)()
            self.done[name] += 1
        except CacheFullError:
            self.done["full"] += 1
            assert before is None or self._state() == before, "a full pool changes nothing"
            self.free()
        if self.looks:
            self.look()
        self.looks = self.random.random() < 0.25

    def _state(self) -> object:
        held = self.pool.held
        tables = {s: {k: list(t) for k, t in h.tables.items()} for s, h in held.items() if h.reserved}
        free = {k: (sorted(p.free), list(p.idle), list(p.users)) for k, p in self.pool.kinds.items()}
        return tables, free, len(list(self.pool.root.below()))

    def look(self) -> None:
        """Every sequence sees its own text, and the pool is in order."""
        check(self.pool)
        for seq, ids in self.ids.items():
            held = self.pool.of(seq)
            n = len(ids) - self.queued[seq]
            assert held.reserved == len(ids) and held.ids == ids[:n], "tokens are neither lost nor made up"
            now = {kind: list(table) for kind, table in held.tables.items()}
            assert self.tables.setdefault(held.changes, now) == now, "tables that change say so"
            for kind, window in self.pool.windows.items():
                first = max(0, n - window + 1) if window else 0
                for position in range(first, len(ids)):
                    page = held.tables[kind][position // self.pool.page]
                    assert page != GONE, "what is seen has a page"
                    found = self.memory.get((kind, page, position % self.pool.page))
                    assert found == written(ids, position), "a cell holds what its sequence wrote"

    def _copied(self, copies: list[Copy]) -> None:
        for kind, source, target, n in copies:
            for slot in range(self.pool.page):
                self.memory.pop((kind, target, slot), None)
            for slot in range(n):
                self.memory[kind, target, slot] = self.memory[kind, source, slot]

    def _write(self, seq: int, first: int) -> None:
        for kind, table in self.pool.of(seq).tables.items():
            for position in range(first, len(self.ids[seq])):
                page = table[position // self.pool.page]
                self.memory[kind, page, position % self.pool.page] = written(self.ids[seq], position)

    def _any(self) -> int:
        return self.random.randrange(SEQUENCES)

    def _empty(self) -> int | None:
        return next((seq for seq in self.random.sample(range(SEQUENCES), SEQUENCES) if not self.ids[seq]), None)

    # ---- operations ----

    def append(self) -> None:
        """Tokens of some sequences, which stay queued."""
        r = self.random
        new = {seq: r.choice((0, 1, 1, 1, 2, 3, 7, 20)) for seq in r.sample(range(SEQUENCES), r.randint(1, 3))}
        self._copied(self.pool.append(new))
        for seq, n in new.items():
            first = len(self.ids[seq])
            self.ids[seq] = self.ids[seq] + [r.randrange(3) for _ in range(n)]
            self.queued[seq] += n
            self._write(seq, first)

    def commit(self) -> None:
        seq = self._any()
        n = self.random.randint(0, self.queued[seq])
        end = len(self.ids[seq]) - self.queued[seq]
        self.pool.commit(seq, self.ids[seq][end : end + n])
        self.queued[seq] -= n

    def read(self) -> None:
        """A step: tokens are appended, written and committed, those queued before too."""
        self.append()
        for seq, ids in self.ids.items():
            self.pool.commit(seq, ids[len(ids) - self.queued[seq] :])
            self.queued[seq] = 0

    def truncate(self) -> None:
        seq = self._any()
        n = self.random.randint(0, len(self.ids[seq]))
        n = self.pool.truncate(seq, n if self.random.random() < 0.7 else max(n, len(self.ids[seq]) - 3))
        end = len(self.ids[seq]) - self.queued[seq]
        self.ids[seq] = self.ids[seq][:n]
        self.queued[seq] = max(0, n - end)

    def fork(self) -> None:
        seq, into = self._any(), self._empty()
        if into is None or self.queued[seq] or seq == into:
            return
        self.pool.fork(seq, into)
        self.ids[into] = list(self.ids[seq])

    def free(self) -> None:
        seq = self._any()
        self.pool.free(seq)
        self.ids[seq], self.queued[seq] = [], 0

    def begin(self) -> None:
        """A text that begins as another one: what the tree has of it is not read again."""
        seq, like = self._empty(), self.ids[self._any()]
        if seq is None:
            return
        like = [*like[: self.random.randint(0, len(like))], *self.random.choices(range(3), k=self.random.randint(1, 9))]
        n = self.pool.adopt(seq, like)
        assert n < len(like) and n % self.pool.page == 0
        self.done["tokens that were there"] += n
        self.ids[seq] = like[:n]

    def swap_out(self) -> None:
        seq = self._any()
        if not self.queued[seq] and len(self.away) < SEQUENCES:
            self.away.append(self.ids[seq])
            self.pool.free(seq)
            self.ids[seq] = []

    def swap_in(self) -> None:
        seq = self._empty()
        if seq is None or not self.away:
            return
        ids = self.away[-1]
        fills = self.pool.restore(seq, ids)
        self.away.pop()
        for kind, block, page in fills:
            for slot in range(self.pool.page):
                position = block * self.pool.page + slot
                if position < len(ids):
                    self.memory[kind, page, slot] = written(ids, position)
        self.pool.commit(seq)
        self.ids[seq] = ids
        self.done["pages that were there"] += sum(map(len, self.pool.of(seq).tables.values())) - len(fills)

    def forget(self) -> None:
        if self.random.random() < 0.1:
            self.pool.forget()


def play(seed: int, n: int) -> Counter[str]:
    """n operations on a pool that the seed makes, with what was done, how often. Raises AssertionError where pool and
    model part, and where something is not given back at the end."""
    r = random.Random(f"pages {seed}")
    windows = r.choice(WINDOWS)
    page, share = r.choice((1, 2, 4, 16)), r.random() < 0.8
    pool = PagePool(page, {kind: r.choice((3, 9, 20, 60)) for kind in windows}, windows, share=share)
    game = Play(pool, r)
    for _ in range(n):
        game.once()
    for seq in range(SEQUENCES):
        pool.free(seq)
    check(pool)
    pool.forget()
    check(pool)
    assert all(len(pages.free) == pages.n for pages in pool.kinds.values()), "all pages come back"
    assert not pool.root.children and not pool.held
    return game.done
