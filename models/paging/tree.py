"""The tree of full pages by what they hold: a page's node hangs below that of the page before it, so that two pages are
the same node when all tokens up to their end are equal. Children are found by their tokens, which dict hashes and
compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


class Node:
    """The tokens of one block of a text, after all those of its parents. pages: by kind of cells, where they lie, as
    far as they still do; pins: sequences that have the block."""

    __slots__ = ("children", "key", "pages", "parent", "pins")

    def __init__(self, parent: Node | None, key: bytes) -> None:
        self.parent, self.key = parent, key
        self.children: dict[bytes, Node] = {}
        self.pages: dict[str, int] = {}
        self.pins = 0

    def child(self, key: bytes) -> Node:
        """The node of the next block; made if it isn't there."""
        node = self.children.get(key)
        if node is None:
            node = self.children[key] = Node(self, key)
        return node

    def lose(self, kind: str) -> None:
        """The page of a kind is somebody else's now."""
        del self.pages[kind]
        self.prune()

    def prune(self) -> None:
        """Takes nodes off the tree that hold nothing and lead to nothing, from this one up."""
        node = self
        while node.parent is not None and not (node.children or node.pages or node.pins):
            del node.parent.children[node.key]
            node = node.parent

    def below(self) -> Iterator[Node]:
        """All nodes below this one."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


def block_key(ids: Sequence[int], block: int, page: int) -> bytes:
    """What a block's node is found by among its parent's children."""
    return np.asarray(ids[block * page : (block + 1) * page], "<i4").tobytes()


def known(root: Node, ids: Sequence[int], page: int, most: int) -> list[Node]:
    """The nodes of the blocks that `ids` begins with, at most so many, as far as the tree has them."""
    found: list[Node] = []
    node: Node | None = root
    while len(found) < most and node is not None:
        node = node.children.get(block_key(ids, len(found), page))
        if node is not None:
            found.append(node)
    return found
