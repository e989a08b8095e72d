"""What a PagedEngine's texts began with, as a file: the tree of full pages with their rows, for the engine of a later
process.

    16 bytes    "graphrt pages" and the format's version
    32 bytes    what engines must have in common
    u32         nodes
    for each node, a parent before what is below it: u32 its parent, 0 for the root, else the parent's number from 1 on;
                u32, a bit for each kind of cells of which it has a page; u32, bytes of its key; the key
    for each node, for each such kind: the page's rows in each of the kind's leafs
    4 bytes     the CRC-32 of all that

Numbers are little-endian. All texts read what is in it, so a file is believed only where no other user can have written
it (private_files.py). It is written in one step: a process that is killed leaves the file of the one before.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from graphrt import private_files
from graphrt.backend import Bytes
from graphrt.errors import SessionError
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.paging.pool import PagePool
from graphrt.models.paging.tree import Node
from graphrt.models.session_file import fingerprint, with_check

MAGIC = b"graphrt pages\0\0\1"
_HEADER = struct.Struct("<16s32sI")
_NODE = struct.Struct("<III")
#: Of a node: more is no block of tokens, nor a key of adapters.
_MOST_KEY = 4096


class Saved(NamedTuple):
    """A node of a file. parent: its number, 0 for the root; kinds: of which it has a page."""

    parent: int
    kinds: tuple[str, ...]
    key: bytes


class SaveStopped(SessionError):
    """A file was not written, since its writing was to stop."""


def save_prefixes(
    engine: PagedEngine,
    path: Path,
    most: int,
    costs: Mapping[str, int] | None = None,
    stops: Callable[[], bool] = lambda: False,
) -> int:
    """Writes what an engine's tree has, of what was used last as much as fits `most` bytes of rows; gives how many
    tokens that is. costs: bytes that a page of each kind counts as, page_bytes() unless given; stops: asked before each
    page whether to stop. Raises SessionError where the file can't be written, SaveStopped where it was to stop: then
    the file is as it was."""
    with engine.alone():
        nodes = _latest(engine.cache.pool, most, costs or page_bytes(engine))
        try:
            private_files.write(path, with_check(_pieces(engine, nodes, stops)))
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            raise SessionError(
                f"a file of prompts must be writable, {str(path)[:200]!r} is not: {error}; give another"
            ) from error
    return sum(bool(node.pages) for node in nodes) * engine.cache.sizes.page


def load_prefixes(engine: PagedEngine, path: Path) -> int:
    """Fills the tree of an engine whose sequences are empty from a file, as far as there are free pages; gives how many
    tokens that is, 0 where there is no file. Raises SessionError for a file that is none, is damaged, is of another
    model, context or cache, or that another user can have written; then nothing is known."""
    if not path.exists():
        return 0
    with engine.alone():
        if any(engine.lengths) or engine.cache.pool.root.children:
            raise SessionError("a file of prompts is read before anything else, this engine has had texts")
        made: list[tuple[str, int]] = []
        try:
            with private_files.opened(path) as file:
                n = _Reader(engine, file).fill(made)
        except BaseException as error:
            _release(engine.cache.pool, made)
            engine.cache.pool.forget()
            if isinstance(error, (OSError, _Unusable)):
                raise SessionError(
                    f"a file of prompts must be one that a server of this model has left, {str(path)[:200]!r} can't be "
                    f"taken: {error}; delete it"
                ) from error
            raise
        _release(engine.cache.pool, made)
        return n * engine.cache.sizes.page


class _Unusable(Exception):
    """Why a file can't be taken."""


def _common(engine: PagedEngine) -> bytes:
    """What engines that exchange rows must have in common."""
    sizes, options = engine.cache.sizes, engine.options
    said = (sizes.page, sorted(sizes.windows.items()), engine.n_ctx, options.type_k, options.type_v)
    return hashlib.sha256(fingerprint(engine.decoder, b"") + repr(said).encode()).digest()


def page_bytes(engine: PagedEngine) -> dict[str, int]:
    """By kind of cells, the bytes of a page's rows."""
    cache = engine.cache
    return {kind: sum(leaf.nb[1] for leaf in cache.leafs(kind)) * cache.sizes.page for kind in cache.pool.kinds}


# ---- writing ----


def _latest(pool: PagePool, most: int, costs: Mapping[str, int]) -> list[Node]:
    """The nodes to be kept, each after its parent."""
    found = dict[int, Node]()
    for node in _by_use(pool):
        chain = [each for each in _above(node) if id(each) not in found]
        whole = all(each.pages or each.parent is pool.root for each in chain)
        cost = sum(costs[kind] for each in chain for kind in each.pages)
        if whole and cost <= most:
            found |= {id(each): each for each in reversed(chain)}
            most -= cost
    return list(found.values())


def _by_use(pool: PagePool) -> Iterator[Node]:
    """Nodes with pages, those that are in use first, then what was used last."""
    for pages in pool.kinds.values():
        yield from (node for page, node in pages.kept.items() if page not in pages.idle)
        yield from (pages.kept[page] for page in reversed(pages.idle))


def _above(node: Node) -> Iterator[Node]:
    """A node and its parents, but for the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _pieces(engine: PagedEngine, nodes: Sequence[Node], stops: Callable[[], bool]) -> Iterator[bytes]:
    cache, kinds = engine.cache, list(engine.cache.pool.kinds)
    yield _HEADER.pack(MAGIC, _common(engine), len(nodes))
    places = {id(node): i for i, node in enumerate(nodes, 1)}
    for node in nodes:
        mask = sum(1 << i for i, kind in enumerate(kinds) if kind in node.pages)
        yield _NODE.pack(places.get(id(node.parent), 0), mask, len(node.key)) + node.key
    for node in nodes:
        for kind in (kind for kind in kinds if kind in node.pages):
            if stops():
                raise SaveStopped("a file of prompts was to be written no further")
            yield from (data.tobytes() for data in cache.read_page(kind, node.pages[kind]))


# ---- reading ----


class _Reader:
    """An open file that an engine is filled from."""

    def __init__(self, engine: PagedEngine, file: BinaryIO) -> None:
        self._engine, self._file, self._check = engine, file, 0

    def fill(self, made: list[tuple[str, int]]) -> int:
        """The number of blocks that the tree has got. made: pages that it has got, each with a user still."""
        engine, pool = self._engine, self._engine.cache.pool
        saved = self._header()
        nodes: list[Node | None] = [pool.root]
        for each in saved:
            parent, rows = nodes[each.parent], [self._rows(kind) for kind in each.kinds]
            room = all(pool.kinds[kind].free for kind in each.kinds)
            node = parent.child(each.key) if parent is not None and room else None
            nodes.append(node)
            if node is None:
                continue
            for kind, data in zip(each.kinds, rows):
                page = pool.enter(node, kind)
                made.append((kind, page))
                engine.cache.write_page(kind, page, data)
        check = self._check
        if struct.unpack("<I", self._bytes(4))[0] != check or self._file.read(1):
            raise _Unusable("it is damaged or cut short")
        for node in reversed(nodes[1:]):  # keys of adapters below which nothing had room
            if node is not None:
                node.prune()
        return sum(bool(each.kinds) and node is not None for each, node in zip(saved, nodes[1:]))

    def _header(self) -> list[Saved]:
        engine, kinds = self._engine, list(self._engine.cache.pool.kinds)
        magic, common, n = _HEADER.unpack(self._bytes(_HEADER.size))
        if magic != MAGIC:
            raise _Unusable("it begins otherwise, or is of another version")
        if common != _common(engine):
            raise _Unusable("it is of another model, context, page or cache type")
        found = list[Saved]()
        for i in range(n):
            parent, mask, size = _NODE.unpack(self._bytes(_NODE.size))
            if parent > i or mask >> len(kinds) or size > _MOST_KEY:
                raise _Unusable("it is damaged")
            of = tuple(kind for k, kind in enumerate(kinds) if mask >> k & 1)
            found.append(Saved(parent, of, self._bytes(size)))
        return found

    def _rows(self, kind: str) -> list[Bytes]:
        cache = self._engine.cache
        sizes = [leaf.nb[1] * cache.sizes.page for leaf in cache.leafs(kind)]
        return [np.frombuffer(self._bytes(size), np.uint8) for size in sizes]

    def _bytes(self, n: int) -> bytes:
        data = self._file.read(n)
        if len(data) != n:
            raise _Unusable("it is damaged or cut short")
        self._check = zlib.crc32(data, self._check)
        return data


def _release(pool: PagePool, made: Sequence[tuple[str, int]]) -> None:
    """Pages have no users any more; what is last in a text is given away first."""
    for kind, page in reversed(made):
        pool.kinds[kind].release(page)
