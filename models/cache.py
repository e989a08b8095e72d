"""The KV cache: static buffers, written by SET_ROWS at index inputs, and their cells, which masks are made of.

Each layer has a k and a v tensor of [heads * head size, cells, sequences], or a k alone, of whose rows v is the
beginning. Layers with a sliding window share a smaller ring of cells: a token at position p lies in cell p mod size.
Nothing of a graph depends on the position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Buffer, Bytes, Usage
from graphrt.dtypes import CACHE_TYPES, DType, dtype
from graphrt.errors import GraphError, SessionError
from graphrt.models.cells import Cells, Ring
from graphrt.models.hparams import HParams
from graphrt.ops.flash_attn_ext import PREC_DEFAULT
from graphrt.tensor import Tensor, new_tensor

#: Cells of several sequences are a multiple of this, as kernels like it.
CELLS = 64


@dataclass(frozen=True)
class LayerCache:
    """k, v: the leafs of a layer, v None where it lies in k; kind: the cells it uses, "full" or "swa"."""

    k: Tensor
    v: Tensor | None
    kind: str

    @property
    def leafs(self) -> tuple[Tensor, ...]:
        return (self.k,) if self.v is None else (self.k, self.v)


class Cache(ABC):
    """The memory of n_seq sequences of at most n_ctx tokens each, whatever cells they lie in. layers: its leafs;
    type_k: of its keys."""

    n_ctx: int
    n_seq: int
    type_k: str
    layers: list[LayerCache]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for layer in self.layers for leaf in layer.leafs)

    @property
    @abstractmethod
    def kinds(self) -> Sequence[str]:
        """The kinds of cells that layers have."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets every token."""

    @abstractmethod
    def held(self, kind: str, seq: int = 0) -> int:
        """How many of a sequence's last tokens the cells of a kind hold."""

    @abstractmethod
    def saved_rows(self, leaf: Tensor, kind: str, first: int, stop: int, seq: int = 0) -> Bytes:
        """What a file has of a sequence's tokens at these positions: uint8 [tokens, bytes of a row]."""

    @abstractmethod
    def take_back(self, ids: Sequence[int], held: Mapping[str, int], seq: int = 0) -> bool:
        """Cells for a text from a file, empty before, which has the rows of so many of its last tokens; False where a
        window needs more of them."""

    @abstractmethod
    def put_saved_rows(self, leaf: Tensor, kind: str, first: int, rows: Bytes, seq: int = 0) -> None:
        """Writes what saved_rows() gave, of the tokens from position `first` on."""


class KVCache(Cache):
    """A ring of cells for each sequence.

    windowed: of all layers of the model, of which hp may have a stage's; n_batch: the most tokens of a sequence that
    are written at once; type_v: without effect where v lies in k; flash_attn: whether FLASH_ATTN_EXT reads it; prec:
    that op's; others: of ranks that are played beside the first, whose layers come behind its own. Raises SessionError
    for a type that can't hold this model.
    """

    def __init__(
        self,
        hp: HParams,
        backend: Backend,
        windowed: Sequence[bool],
        n_ctx: int,
        n_batch: int,
        type_k: str,
        type_v: str,
        n_seq: int = 1,
        flash_attn: bool = True,
        prec: int = PREC_DEFAULT,
        others: Sequence[HParams] = (),
    ) -> None:
        self.flash_attn, self.prec = flash_attn, prec
        sides = cache_sides(hp, type_k, type_v)
        self.type_k = type_k
        self.n_seq = n_seq
        self.n_ctx = n_ctx
        # Sequences that read fewer tokens in a step than others write beyond their own end, even at a full context.
        longest = n_ctx if n_seq == 1 else -(-(n_ctx + n_batch) // CELLS) * CELLS
        self.cells: dict[str, Cells] = {"full": Ring(longest, 0, n_seq)}
        if any(windowed):
            self.cells["swa"] = Ring(min(longest, hp.window + n_batch), hp.window, n_seq)
        sizes = {kind: (cells.size, n_seq) for kind, cells in self.cells.items()}
        self.layers = [x for each in (hp, *others) for x in cache_layers(each, backend, each.windowed, sizes, sides)]
        if all(windowed):
            del self.cells["full"]

    @property
    def kinds(self) -> Sequence[str]:
        return list(self.cells)

    def clear(self) -> None:
        """The cells keep their bytes: nobody sees them any more."""
        for cells in self.cells.values():
            cells.clear()

    def forget_from(self, positions: npt.NDArray[np.int64]) -> None:
        """Forgets each sequence's tokens from a position of its own on: int64 [n_seq]."""
        for cells in self.cells.values():
            for seq, position in enumerate(positions):
                cells.forget_from(int(position), seq)

    def copy_from(self, other: KVCache) -> None:
        """Takes over the cells and the bytes of a cache of the same size and types, both of one sequence."""
        for kind, cells in self.cells.items():
            cells.restore(other.cells[kind].positions)
        for mine, theirs in zip(self.layers, other.layers):
            taken = np.flatnonzero(self.cells[mine.kind].positions[0] >= 0)
            for target, source in zip(mine.leafs, theirs.leafs):
                self.put_rows(target, taken, other.rows(source, taken))

    def held(self, kind: str, seq: int = 0) -> int:
        return int((self.cells[kind].positions[seq] >= 0).sum())

    def saved_rows(self, leaf: Tensor, kind: str, first: int, stop: int, seq: int = 0) -> Bytes:
        """Of the only sequence: see rows()."""
        return self.rows(leaf, self.cells[kind].where(np.arange(first, stop)))

    def take_back(self, ids: Sequence[int], held: Mapping[str, int], seq: int = 0) -> bool:
        for kind, cells in self.cells.items():
            n = min(held[kind], cells.size)  # a smaller ring keeps the last ones
            cells.take(np.arange(len(ids) - n, len(ids))[None])
        return all(cells.holds(len(ids), seq) for cells in self.cells.values())

    def put_saved_rows(self, leaf: Tensor, kind: str, first: int, rows: Bytes, seq: int = 0) -> None:
        cells = self.cells[kind]
        n = min(len(rows), cells.size)
        end = first + len(rows)
        self.put_rows(leaf, cells.where(np.arange(end - n, end)), rows[len(rows) - n :])

    def rows(self, leaf: Tensor, cells: npt.NDArray[np.int64]) -> Bytes:
        """The bytes of the first sequence's tokens in some cells of a layer: uint8 [cells, bytes of a row]."""
        n = int(cells.max(initial=-1)) + 1
        return _buffer(leaf).read(0, n * leaf.nb[1]).reshape(n, leaf.nb[1])[cells]

    def put_rows(self, leaf: Tensor, cells: npt.NDArray[np.int64], rows: Bytes) -> None:
        """Writes what rows() gave, what lies in other cells is lost."""
        memory = np.zeros((int(cells.max(initial=-1)) + 1, leaf.nb[1]), np.uint8)
        memory[cells] = rows
        if memory.size:
            _buffer(leaf).write(0, memory.reshape(-1))

    def saved(self) -> dict[str, npt.NDArray[np.int32]]:
        """What the cells hold, for restore()."""
        return {kind: cells.saved() for kind, cells in self.cells.items()}

    def restore(self, saved: Mapping[str, npt.NDArray[np.int32]]) -> None:
        """What the cells held, whatever was written into them since: where a window lost tokens, other text stands."""
        for kind, cells in self.cells.items():
            cells.restore(saved[kind])


#: "k" and, where it has memory of its own, "v", each with its type and the size of a head.
Sides = Sequence[tuple[str, DType, int]]


def cache_sides(hp: HParams, type_k: str, type_v: str) -> Sides:
    """What each layer of a model's cache has. Raises SessionError for a type that can't hold it."""
    sides = [("k", _cache_type("k", type_k, hp.d_k), hp.d_k)]
    if hp.latent is None:
        sides.append(("v", _cache_type("v", type_v, hp.d_v), hp.d_v))
    elif hp.d_v % sides[0][1].block_size:
        raise SessionError(f"v lies in k, whose first {hp.d_v} elements must be whole blocks; use type_k f16")
    return sides


def cache_layers(
    hp: HParams, backend: Backend, windowed: Sequence[bool], sizes: Mapping[str, tuple[int, ...]], sides: Sides
) -> list[LayerCache]:
    """The memory of all layers. windowed: by layer, whether it has a window; sizes: by kind of cells, the dimensions
    behind a row."""
    layers = []
    for il, swa in enumerate(windowed):
        kind = "swa" if swa else "full"
        leafs = []
        for side, dt, head_size in sides:
            leaf = new_tensor(dt, head_size * hp.n_head_kv[il], *sizes[kind], name=f"cache_{side}_l{il}")
            leaf.buffer = backend.alloc(leaf.nbytes, Usage.STATE)
            leafs.append(leaf)
        layers.append(LayerCache(leafs[0], leafs[1] if len(leafs) > 1 else None, kind))
    return layers


def _buffer(leaf: Tensor) -> Buffer:
    assert leaf.buffer is not None
    return leaf.buffer


def _cache_type(side: str, name: str, head_size: int) -> DType:
    try:
        dt = dtype(name)
    except GraphError:
        dt = None
    if dt is None or dt.name not in CACHE_TYPES:
        raise SessionError(f"a cache's type_{side} must be one of {', '.join(CACHE_TYPES)}, got {name!r}")
    if head_size % dt.block_size:
        raise SessionError(
            f"a {dt.name} cache needs heads of whole blocks of {dt.block_size} elements, this model's {side} heads "
            f"have {head_size}; use type_{side} f16"
        )
    return dt
