"""The pages of one kind of cells: how many sequences use each, and which can be had."""

from __future__ import annotations

from collections import OrderedDict

from graphrt.models.paging.tree import Node


class Pages:
    """A page is in use (by as many tables as `users` counts), or free, or idle: kept by the tree alone, so that it can
    be taken back. kept: by page, the node of the tree that keeps it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.users = [0] * n
        self.kept: dict[int, Node] = {}
        self.free = list(range(n - 1, -1, -1))
        self.idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that take() can give."""
        return len(self.free) + len(self.idle)

    def take(self) -> tuple[int, Node | None]:
        """A page for one user, and the node that has lost it: the free ones first, then the idle one that was released
        longest ago. There must be one available."""
        node = None
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.idle.popitem(last=False)
            node = self.kept.pop(page)
        self.users[page] = 1
        return page, node

    def use(self, page: int) -> None:
        """One more user of a page that is in use or idle."""
        self.idle.pop(page, None)
        self.users[page] += 1

    def release(self, page: int) -> None:
        """One user fewer."""
        self.users[page] -= 1
        if not self.users[page]:
            if page in self.kept:
                self.idle[page] = None
            else:
                self.free.append(page)

    def keep(self, page: int, node: Node) -> None:
        """A page in use stays in the tree when its users are gone."""
        self.kept[page] = node

    def is_shared(self, page: int) -> bool:
        """Somebody else than its one user may read it."""
        return self.users[page] > 1 or page in self.kept
