"""What is always true of a page pool. Tests call it after whatever they do."""

from __future__ import annotations

from collections import Counter

from graphrt.models.paging.pool import GONE, Held, PagePool
from graphrt.models.paging.tree import Node, block_key


def check(pool: PagePool) -> None:
    """Raises AssertionError, with the rule, where a pool is not as it must be."""
    nodes = list(pool.root.below())
    _check_pages(pool, nodes)
    for seq, held in pool.held.items():
        _check_sequence(pool, seq, held)
    pins = Counter(id(node) for held in pool.held.values() for node in held.nodes)
    for node in nodes:
        assert node.pins == pins[id(node)], "a node is pinned once by each sequence that has its block"
        assert node.children or node.pages or node.pins, "a node that holds nothing and leads to nothing is gone"
        assert node.parent is not None and node.parent.children[node.key] is node, "a parent knows its children"


def _check_pages(pool: PagePool, nodes: list[Node]) -> None:
    for kind, pages in pool.kinds.items():
        users = Counter(page for held in pool.held.values() for page in held.tables[kind] if page != GONE)
        kept = {node.pages[kind]: node for node in nodes if kind in node.pages}
        assert all(pages.users[page] == users[page] for page in range(pages.n)), "a page has the users that tables say"
        assert pages.kept == kept, "the tree keeps the pages that it has nodes of, each for one"
        unused = {page for page in range(pages.n) if not users[page]}
        assert len(pages.free) == len(set(pages.free)), "a page is free once"
        assert set(pages.free) == unused - set(kept), "a page that nobody uses and nobody keeps is free, no other is"
        assert set(pages.idle) == unused & set(kept), "a page that the tree alone keeps is idle, no other is"


def _check_sequence(pool: PagePool, seq: int, held: Held) -> None:
    page, n = pool.page, held.reserved
    assert len(held.ids) <= n, "only tokens that have cells are written"
    for kind, pages in pool.kinds.items():
        table = held.tables[kind]
        assert len(table) == -(-n // page), "a table has as many blocks as the tokens need"
        assert GONE not in table[pool.first_seen(kind, len(held.ids)) :], "what a window sees is there"
        writing = table[len(held.ids) // page :] if n > len(held.ids) else []
        assert not any(pages.is_shared(p) for p in writing), "a page that is written is nobody else's"
    above = pool.root.children[pool.key(seq)] if pool.key(seq) and held.nodes else pool.root
    for block, node in enumerate(held.nodes):
        assert above.children.get(block_key(held.ids, block, page)) is node, "nodes are those of the tokens"
        for kind in pool.kinds:
            if not pool.windows[kind]:
                assert node.pages.get(kind) == held.tables[kind][block], "a block in the tree lies where the tree says"
        above = node
    assert len(held.nodes) <= len(held.ids) // page, "full blocks are in the tree, no others"
