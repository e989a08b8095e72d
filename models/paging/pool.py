"""PagePool: which pages of a cache the tokens of which sequences lie in. No tensors: what is written where is the
caller's work, in the order in which the pool tells it.

A sequence's tokens lie in blocks of `page` tokens, a block in a page of each kind of cells, whose numbers are its
tables. Pages are shared between sequences that were forked and, full ones, between all that begin with the same
tokens; a page that somebody else may read is never written: the last, partly filled one is copied first. Whatever is
refused has changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from graphrt.errors import CacheFullError, SessionError
from graphrt.models.paging.pages import Pages
from graphrt.models.paging.tree import Node, block_key, known
from graphrt.printing import count_text

#: The entry of a table for a block that has no page any more: it is out of a window.
GONE = -1


class Copy(NamedTuple):
    """The first n cells of page `source` are to be copied to page `target`, in all layers of a kind."""

    kind: str
    source: int
    target: int
    n: int


class Fill(NamedTuple):
    """The page of a block that has to be filled from elsewhere."""

    kind: str
    block: int
    page: int


@dataclass
class Held:
    """What the pool knows of a sequence. ids: its tokens, which lie in the cache; reserved: those and the ones that
    have cells and are still to be written; tables: by kind, the page of each block; changes: another number whenever
    these are others; nodes: of its first blocks, those that are in the tree; shares: its full pages go there."""

    tables: dict[str, list[int]]
    changes: int
    ids: list[int] = field(default_factory=list)
    reserved: int = 0
    nodes: list[Node] = field(default_factory=list)
    shares: bool = True


class PagePool:
    """A fixed number of pages of `page` tokens of each kind of cells.

    n_pages: by kind; windows: by kind, how many positions back a token sees, itself included, 0 for all; share: full
    pages stay for others that begin with the same tokens. Sequences are called by numbers of the caller's; one that it
    never named is empty.
    """

    def __init__(
        self, page: int, n_pages: Mapping[str, int], windows: Mapping[str, int], *, share: bool = True
    ) -> None:
        self.page = page
        self.windows = dict(windows)
        self._windowed = [kind for kind, window in self.windows.items() if window]
        self.share = share
        self.kinds = {kind: Pages(n) for kind, n in n_pages.items()}
        self.root = Node(None, b"")
        self._below: dict[int, bytes] = {}  # by sequence, the key of the node that its own hang below
        self.held: dict[int, Held] = {}
        self._changes = count()  # of all sequences, so that one that is new is not taken for an older one

    # ---- what there is ----

    def of(self, seq: int) -> Held:
        """A sequence, empty at first."""
        held = self.held.get(seq)
        if held is None:
            held = self.held[seq] = Held({kind: [] for kind in self.kinds}, next(self._changes))
        return held

    def _changed(self, held: Held) -> None:
        """Its tables are others from now on."""
        held.changes = next(self._changes)

    def first_seen(self, kind: str, position: int) -> int:
        """The first block that a token at this position sees something of."""
        window = self.windows[kind]
        return max(0, position - window + 1) // self.page if window else 0

    def holds(self, seq: int, n: int) -> bool:
        """Whether all that a token behind the first n of a sequence sees lies in pages."""
        last = -(-n // self.page)
        tables = self.of(seq).tables
        return all(GONE not in table[self.first_seen(kind, n) : last] for kind, table in tables.items())

    def put_below(self, seq: int, key: bytes) -> None:
        """An empty sequence shares pages with those of the same key alone, whatever becomes of it: its tokens' rows
        are made in another way than others'. The key is of no whole number of tokens' bytes, b"" for the usual way.
        Raises SessionError for a sequence that is not empty."""
        self._empty(seq)
        self._below[seq] = key

    def key(self, seq: int) -> bytes:
        """What put_below() has put a sequence below."""
        return self._below.get(seq, b"")

    def _known(self, seq: int, ids: Sequence[int], most: int) -> list[Node]:
        """What the tree has of a sequence's beginning, at most so many blocks."""
        key = self.key(seq)
        root = self.root.children.get(key) if key else self.root
        return known(root, ids, self.page, most) if self.share and root is not None else []

    def n_known(self, seq: int, ids: Sequence[int]) -> int:
        """How many first tokens of `ids` the tree has for sequences that share pages with `seq`, in whole pages."""
        return len(self._known(seq, ids, len(ids) // self.page)) * self.page

    # ---- reading and writing ----

    def append(self, new: Mapping[int, int]) -> list[Copy]:
        """Cells for so many more tokens of some sequences, all of them or none. The copies are to be made before
        anything is written. Raises CacheFullError where pages are missing."""
        self.check_room(new)
        copies: list[Copy] = []
        for seq, n in new.items():
            held = self.of(seq)
            if not n:
                continue
            filled = held.reserved % self.page
            for kind, pages in self.kinds.items():
                table = held.tables[kind]
                if filled and pages.is_shared(table[-1]):
                    page = self._take(kind)
                    copies.append(Copy(kind, table[-1], page, filled))
                    pages.release(table[-1])
                    table[-1] = page
                    self._changed(held)
                while len(table) * self.page < held.reserved + n:
                    table.append(self._take(kind))
                    self._changed(held)
            held.reserved += n
        return copies

    def check_room(self, new: Mapping[int, int], *, windowed: bool = True) -> None:
        """Raises CacheFullError where append() would. windowed: False to ask for the kinds alone whose pages are not
        given back on the way, where tokens are appended in several parts."""
        for kind, pages in self.kinds.items():
            if self.windows[kind] and not windowed:
                continue
            needed, page, users, kept = 0, self.page, pages.users, pages.kept
            writers: dict[int, int] = {}
            for seq, n in new.items():
                held = self.of(seq)
                table, reserved = held.tables[kind], held.reserved
                needed += -(-(reserved + n) // page) - len(table)
                if n and reserved % page:
                    last = table[-1]
                    if users[last] > 1 or last in kept:
                        writers[last] = writers.get(last, 0) + 1
            for last, n in writers.items():  # the last of those that share a page by a fork can have it for itself
                needed += n if last in kept else min(n, users[last] - 1)
            self._check_available(kind, needed, f"the next tokens of {count_text(len(new), 'sequence')} need")

    def _check_available(self, kind: str, needed: int, who: str) -> None:
        pages = self.kinds[kind]
        if needed > pages.available:
            raise CacheFullError(
                f"a cache's tokens must fit its {pages.n} pages of {self.page} tokens, of which {pages.available} can "
                f"be had and {who} {needed}; free a sequence, swap one out, or give it more (n_pages)"
            )

    def _take(self, kind: str) -> int:
        page, node = self.kinds[kind].take()
        if node is not None:
            node.lose(kind)
        return page

    def commit(self, seq: int, ids: Sequence[int] = ()) -> None:
        """The next reserved tokens of a sequence are written, and these are they. Full pages go into the tree, those
        out of a window are given back."""
        held = self.of(seq)
        if len(held.ids) + len(ids) > held.reserved:
            raise SessionError(
                f"tokens must have cells before they are written, {held.reserved} have them, got "
                f"{len(held.ids) + len(ids)}; append them first"
            )
        held.ids.extend(map(int, ids))
        if self.share and held.shares:
            while (len(held.nodes) + 1) * self.page <= len(held.ids):
                self._enter(seq, held)
        for kind in self._windowed:
            pages, table = self.kinds[kind], held.tables[kind]
            block = self.first_seen(kind, len(held.ids)) - 1
            while block >= 0 and table[block] != GONE:  # all before one that is gone are gone
                pages.release(table[block])
                table[block] = GONE
                block -= 1
                self._changed(held)

    def _enter(self, seq: int, held: Held) -> None:
        """Puts a sequence's next full block into the tree; one that is there already is used instead of its own."""
        block = len(held.nodes)
        key = self.key(seq)
        root = self.root.child(key) if key else self.root
        node = (held.nodes[-1] if block else root).child(block_key(held.ids, block, self.page))
        for kind, pages in self.kinds.items():
            table = held.tables[kind]
            if kind in node.pages and node.pages[kind] != table[block] != GONE:
                pages.use(node.pages[kind])
                pages.release(table[block])
                table[block] = node.pages[kind]
                self._changed(held)
            elif kind not in node.pages and table[block] != GONE and table[block] not in pages.kept:
                node.pages[kind] = table[block]
                pages.keep(table[block], node)
        node.pins += 1
        held.nodes.append(node)

    def truncate(self, seq: int, n: int) -> int:
        """Forgets a sequence's tokens behind the first n, and gives how many stay: n, or 0 where a window would need
        pages that were given back."""
        held = self.of(seq)
        n = min(n, held.reserved)
        if not self.holds(seq, n):
            n = 0
        for kind, pages in self.kinds.items():
            table = held.tables[kind]
            while len(table) * self.page >= n + self.page:
                page = table.pop()
                self._changed(held)
                if page != GONE:
                    pages.release(page)
        while len(held.nodes) * self.page > n:
            node = held.nodes.pop()
            node.pins -= 1
            node.prune()
        del held.ids[n:]
        held.reserved = n
        held.shares = held.shares or not n
        return n

    def free(self, seq: int) -> None:
        """Forgets a sequence. What the tree has of it stays until pages are needed."""
        self.truncate(seq, 0)
        del self.held[seq]

    # ---- sharing ----

    def fork(self, seq: int, into: int) -> None:
        """The empty sequence `into` begins with all tokens of `seq`, in the same pages. Raises SessionError for one
        that is not empty, and where tokens of `seq` are still to be written."""
        held = self.of(seq)
        if held.reserved != len(held.ids):
            raise SessionError("a sequence is forked between its steps, and this one is in the middle of one; end it")
        other = self._empty(into)
        self._below[into] = self.key(seq)
        for kind, pages in self.kinds.items():
            for page in held.tables[kind]:
                if page != GONE:
                    pages.use(page)
            other.tables[kind] = list(held.tables[kind])
        other.shares = held.shares
        self._begin(other, held.ids, held.nodes)

    def adopt(self, seq: int, ids: Sequence[int]) -> int:
        """An empty sequence takes what the tree has of the beginning of `ids`; gives how many tokens that is. At least
        the last one is left to be read. Raises SessionError for one that is not empty."""
        held = self._empty(seq)
        nodes = self._known(seq, ids, max(0, len(ids) - 1) // self.page)
        while nodes and not self._seen_is_there(nodes):
            nodes.pop()
        for kind, pages in self.kinds.items():
            first = self.first_seen(kind, len(nodes) * self.page)
            held.tables[kind] = [GONE] * first + [node.pages[kind] for node in nodes[first:]]
            for page in held.tables[kind][first:]:
                pages.use(page)
        self._begin(held, ids[: len(nodes) * self.page], nodes)
        return held.reserved

    def _seen_is_there(self, nodes: Sequence[Node]) -> bool:
        """Whether the tree has all pages that a token behind these blocks sees."""
        end = len(nodes) * self.page
        return all(kind in node.pages for kind in self.kinds for node in nodes[self.first_seen(kind, end) :])

    def restore(self, seq: int, ids: Sequence[int], *, shares: bool = True) -> list[Fill]:
        """An empty sequence gets all of `ids`, and pages for what the next token sees of them: from the tree what it
        has; the others are to be filled, and commit() then be called. shares: False where what they are filled with is
        a stranger's word, which nobody else is to read. Raises SessionError for one that is not empty, CacheFullError
        where pages are missing."""
        self._empty(seq)
        n = -(-len(ids) // self.page)
        nodes = self._known(seq, ids, len(ids) // self.page)
        wholly = [k for k, window in self.windows.items() if not window]
        while nodes and not all(kind in node.pages for kind in wholly for node in nodes):
            nodes.pop()
        for kind, pages in self.kinds.items():
            there = [node.pages.get(kind, GONE) for node in nodes] + [GONE] * (n - len(nodes))
            seen = there[self.first_seen(kind, len(ids)) :]
            idle = sum(page != GONE and not pages.users[page] for page in seen)
            self._check_available(kind, seen.count(GONE) + idle, f"a sequence of {len(ids)} tokens needs")
        held = self.of(seq)
        held.shares = shares
        self._begin(held, ids, nodes)  # pins the nodes before pages are taken
        return [Fill(kind, block, page) for kind in self.kinds for block, page in self._restored(held, kind, n)]

    def _restored(self, held: Held, kind: str, n: int) -> list[tuple[int, int]]:
        """Makes a table of n blocks; those whose pages are new, with these."""
        pages, first = self.kinds[kind], self.first_seen(kind, held.reserved)
        table = [GONE] * n
        for block in range(first, len(held.nodes)):
            table[block] = held.nodes[block].pages.get(kind, GONE)
            if table[block] != GONE:
                pages.use(table[block])
        new = [block for block in range(first, n) if table[block] == GONE]
        for block in new:
            table[block] = self._take(kind)
        held.tables[kind] = table
        self._changed(held)
        return [(block, table[block]) for block in new]

    def _empty(self, seq: int) -> Held:
        held = self.of(seq)
        if held.reserved:
            raise SessionError(f"a sequence that takes tokens over must be empty, got one of {held.reserved}; free it")
        return held

    def _begin(self, held: Held, ids: Sequence[int], nodes: Sequence[Node]) -> None:
        held.ids, held.nodes, held.reserved = list(ids), list(nodes), len(ids)
        self._changed(held)
        for node in nodes:
            node.pins += 1

    def enter(self, node: Node, kind: str) -> int:
        """A free page for a node that has none of this kind; the caller fills it, is its one user, and releases it."""
        page, _ = self.kinds[kind].take()
        node.pages[kind] = page
        self.kinds[kind].keep(page, node)
        return page

    def forget(self) -> None:
        """Empties the tree of all that no sequence uses."""
        for kind, pages in self.kinds.items():
            while pages.idle:
                page, _ = pages.idle.popitem(last=False)
                pages.free.append(page)
                pages.kept.pop(page).lose(kind)
