"""The KV cache in pages: one buffer a layer for all sequences, which the tables of a PagePool cut up.

Each layer has a k and a v tensor of [heads * head size, pages * page], or a k alone, of whose rows v is the beginning.
Key j of a sequence lies in page table[j // page] at j % page. Layers with a sliding window have a pool of fewer pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Buffer, Bytes
from graphrt.errors import SessionError
from graphrt.models.cache import Cache, cache_layers, cache_sides
from graphrt.models.hparams import HParams
from graphrt.models.paging.pool import GONE, Copy, PagePool
from graphrt.models.paging.prefixes import Prefixes, PrefixRule, prefixes
from graphrt.ops.flash_attn_varlen import PAGES
from graphrt.tensor import Tensor


@dataclass(frozen=True)
class PageSizes:
    """page: tokens of a page; n_pages: by kind of cells; windows: by kind, 0 for all positions; max_blocks: the most
    that a sequence of n_ctx tokens has."""

    page: int
    n_pages: Mapping[str, int]
    windows: Mapping[str, int]
    max_blocks: int


def page_sizes(
    hp: HParams, windowed: Sequence[bool], n_ctx: int, n_new: int, n_seq: int, page: int, n_pages: int
) -> PageSizes:
    """The pages of a cache. n_new: the most tokens, of all sequences, that are written before any page is given back;
    n_pages: of layers that see all tokens, 0 for as many as n_seq whole contexts take. Raises SessionError."""
    if page not in PAGES:
        raise SessionError(
            f"a page must have one of {', '.join(map(str, PAGES))} tokens, or 0 for no pages, got {page}"
        )
    max_blocks = -(-n_ctx // page)
    whole = n_pages or n_seq * max_blocks
    if whole < 1:
        raise SessionError(f"a cache must have at least one page, or 0 for whole contexts, got n_pages {n_pages}")
    kinds: dict[str, int] = {} if all(windowed) else {"full": whole}
    windows = dict.fromkeys(kinds, 0)
    if any(windowed):  # beginning and end of a window are in the middle of a page
        kinds["swa"] = min(whole, n_seq * (-(-hp.window // page) + 2) + -(-n_new // page))
        windows["swa"] = hp.window
    return PageSizes(page, kinds, windows, max_blocks)


@dataclass(frozen=True)
class Swapped:
    """A sequence in host memory. ids: its tokens; rows: by kind and block, the bytes of the page in each of the kind's
    leafs; shares: see PagePool.restore(); key: see PagePool.put_below()."""

    ids: Sequence[int]
    rows: Mapping[tuple[str, int], Sequence[Bytes]]
    shares: bool
    key: bytes = b""

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for page in self.rows.values() for data in page)


class PagedCache(Cache):
    """Sequences in the pages of `pool`. Raises SessionError for a type that can't hold this model."""

    def __init__(
        self,
        hp: HParams,
        backend: Backend,
        windowed: Sequence[bool],
        n_ctx: int,
        types: tuple[str, str],
        sizes: PageSizes,
        *,
        n_seq: int = 1,
        share: bool = True,
    ) -> None:
        self.n_ctx, self.n_seq, self.sizes = n_ctx, n_seq, sizes
        self.type_k = types[0]
        cells = {kind: (n * sizes.page,) for kind, n in sizes.n_pages.items()}
        self.layers = cache_layers(hp, backend, windowed, cells, cache_sides(hp, *types))
        # tables as arrays, and by sequence which of its states they are of
        self._rows = {kind: np.full((n_seq, sizes.max_blocks), GONE, np.int32) for kind in sizes.n_pages}
        self._seen = {kind: [-1] * n_seq for kind in sizes.n_pages}
        page_bytes = sizes.page * sum(leaf.nb[1] for leaf in self.leafs("full"))
        self.prefix_rule = PrefixRule.of(hp, page_bytes)
        self.pool = PagePool(sizes.page, sizes.n_pages, sizes.windows, share=share)

    @property
    def kinds(self) -> Sequence[str]:
        return list(self.pool.kinds)

    def clear(self) -> None:
        """Shared beginnings too."""
        for seq in list(self.pool.held):
            self.pool.free(seq)
        self.pool.forget()

    def append(self, new: Mapping[int, int]) -> None:
        """PagePool.append(), and the copies that it asks for."""
        for copy in self.pool.append(new):
            self._copy(copy)

    def _copy(self, copy: Copy) -> None:
        for leaf in self.leafs(copy.kind):
            cell, page = leaf.nb[1], leaf.nb[1] * self.sizes.page
            _buffer(leaf).copy(copy.source * page, copy.target * page, copy.n * cell)

    def leafs(self, kind: str) -> Iterator[Tensor]:
        """Those of a kind of cells, layer by layer."""
        return (leaf for layer in self.layers if layer.kind == kind for leaf in layer.leafs)

    def cells(self, kind: str, seq: int, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Where a sequence's tokens of these positions lie; under 0 where a window has given them back."""
        positions = np.arange(first, stop)
        return cells_at(self.tables(kind, [seq]), np.zeros(len(positions), np.int64), positions, self.sizes.page)

    def tables(self, kind: str, seqs: Sequence[int]) -> npt.NDArray[np.int32]:
        """The tables of sequences: int32 [sequences, blocks of the longest], -1 where there is no page."""
        most, rows, seen = 0, self._rows[kind], self._seen[kind]
        for seq in seqs:
            held = self.pool.of(seq)
            table = held.tables[kind]
            most = max(most, len(table))
            if seen[seq] != held.changes:  # a step changes few tables
                seen[seq] = held.changes
                rows[seq, : len(table)], rows[seq, len(table) :] = table, GONE
        return rows[list(seqs), :most]

    # ---- prefixes ----

    def arranged(self, seqs: Sequence[int]) -> list[int]:
        """The sequences in an order in which those that begin with the same pages stand side by side."""
        tables = {seq: self.pool.of(seq).tables.get("full", []) for seq in seqs}
        first = [table[0] for table in tables.values() if table]
        return list(seqs) if len(set(first)) == len(first) else sorted(seqs, key=tables.__getitem__)

    def prefixes(self, new: Mapping[int, int]) -> Prefixes:
        """What a step that reads so many last tokens of these sequences reads once of pages that they share."""
        if "full" not in self.pool.kinds:
            return Prefixes(reason="all layers have windows, behind which no pages are shared")
        counts = np.fromiter(new.values(), np.int64, len(new))
        ends = np.array([self.pool.of(seq).reserved for seq in new], np.int64)
        whole = (ends - counts) // self.sizes.page
        return prefixes(self.tables("full", list(new)), whole, counts, self.prefix_rule)

    # ---- host memory and files ----

    def swap_out(self, seq: int) -> Swapped:
        """Takes a sequence out of the pool, with the bytes of its pages."""
        held = self.pool.of(seq)
        rows = {
            (kind, block): self.read_page(kind, page)
            for kind, table in held.tables.items()
            for block, page in enumerate(table)
            if page != GONE
        }
        away = Swapped(list(held.ids), rows, held.shares, self.pool.key(seq))
        self.pool.free(seq)
        return away

    def swap_in(self, seq: int, away: Swapped) -> None:
        """Brings it back, as an empty sequence. Raises CacheFullError, with nothing changed."""
        for fill in self.pool.restore(seq, away.ids, shares=away.shares):
            self.write_page(fill.kind, fill.page, away.rows[fill.kind, fill.block])
        self.pool.commit(seq)

    def read_page(self, kind: str, page: int) -> list[Bytes]:
        """A page's rows in each leaf of its kind."""
        size = self.sizes.page
        return [_buffer(leaf).read(page * size * leaf.nb[1], size * leaf.nb[1]) for leaf in self.leafs(kind)]

    def write_page(self, kind: str, page: int, rows: Sequence[Bytes]) -> None:
        """Fills a page with what read_page() gave."""
        for leaf, data in zip(self.leafs(kind), rows, strict=True):
            _buffer(leaf).write(page * data.size, data)

    def held(self, kind: str, seq: int = 0) -> int:
        held = self.pool.of(seq)
        return min(len(held.ids), max(0, len(held.ids) - held.tables[kind].count(GONE) * self.sizes.page))

    def saved_rows(self, leaf: Tensor, kind: str, first: int, stop: int, seq: int = 0) -> Bytes:
        found = np.empty((stop - first, leaf.nb[1]), np.uint8)
        for start, cell, n in self._runs(kind, seq, first, stop):
            found[start : start + n] = _buffer(leaf).read(cell * leaf.nb[1], n * leaf.nb[1]).reshape(n, -1)
        return found

    def take_back(self, ids: Sequence[int], held: Mapping[str, int], seq: int = 0) -> bool:
        for kind, window in self.sizes.windows.items():
            if held[kind] < min(len(ids), window - 1 if window else len(ids)):
                return False
        self._filled = {(fill.kind, fill.block) for fill in self.pool.restore(seq, ids, shares=False)}
        return True

    def put_saved_rows(self, leaf: Tensor, kind: str, first: int, rows: Bytes, seq: int = 0) -> None:
        """Into the pages that are this text's own alone: what others read is not a file's to change."""
        for start, cell, n in self._runs(kind, seq, first, first + len(rows)):
            if (kind, (first + start) // self.sizes.page) in self._filled:
                _buffer(leaf).write(cell * leaf.nb[1], np.ascontiguousarray(rows[start : start + n]).reshape(-1))

    def _runs(self, kind: str, seq: int, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Positions cut where pages end: (index of a run's first, its cell, how many)."""
        cells = self.cells(kind, seq, first, stop)
        page = self.sizes.page
        edges = [first, *range(first - first % page + page, stop, page), stop]
        for start, end in zip(edges, edges[1:]):
            if end > start:
                yield start - first, int(cells[start - first]), end - start


def cells_at(
    tables: npt.NDArray[np.int32], owner: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], page: int
) -> npt.NDArray[np.int64]:
    """The cells of tokens, each of a row of `tables` and at a position of its own: int64, as many; under 0 where a
    table has no page."""
    return tables[owner, positions // page].astype(np.int64) * page + positions % page


def _buffer(leaf: Tensor) -> Buffer:
    assert leaf.buffer is not None
    return leaf.buffer
