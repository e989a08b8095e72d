"""The KV cache: static buffers, written by SET_ROWS at index inputs, and their cells, which masks are made of.

Each layer has a k and a v tensor of [heads * head size, cells, sequences], or a k alone, of whose rows v is the
beginning. Layers with a sliding window share a smaller ring of cells: a token at position p lies in cell p mod size.
Nothing of a graph depends on the position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Buffer, Bytes, Usage
from graphrt.dtypes import CACHE_TYPES, DType, dtype
from graphrt.errors import GraphError, SessionError
from graphrt.models.cells import Cells, Ring
from graphrt.models.hparams import HParams
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


class KVCache:
    """The cache of n_seq sequences of at most n_ctx tokens each.

    n_batch: the most tokens of a sequence that are written at once; type_v: without effect where v lies in k. Raises
    SessionError for a type that can't hold this model.
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
    ) -> None:
        sides = [("k", _cache_type("k", type_k, hp.d_k), hp.d_k)]
        if hp.latent is None:
            sides.append(("v", _cache_type("v", type_v, hp.d_v), hp.d_v))
        elif hp.d_v % sides[0][1].block_size:
            raise SessionError(f"v lies in k, whose first {hp.d_v} elements must be whole blocks; use type_k f16")
        self.type_k = type_k
        self.n_seq = n_seq
        self.n_ctx = n_ctx
        # Sequences that read fewer tokens in a step than others write beyond their own end, even at a full context.
        longest = n_ctx if n_seq == 1 else -(-(n_ctx + n_batch) // CELLS) * CELLS
        self.cells: dict[str, Cells] = {"full": Ring(longest, 0, n_seq)}
        if any(windowed):
            self.cells["swa"] = Ring(min(longest, hp.window + n_batch), hp.window, n_seq)
        self.layers = [self._layer(hp, backend, il, swa, sides) for il, swa in enumerate(windowed)]
        if all(windowed):
            del self.cells["full"]

    def _layer(
        self, hp: HParams, backend: Backend, il: int, swa: bool, sides: Sequence[tuple[str, DType, int]]
    ) -> LayerCache:
        """sides: "k" and, where it has memory of its own, "v", each with its type and the size of a head."""
        kind = "swa" if swa else "full"
        cells = self.cells[kind].size
        leafs = []
        for side, dt, head_size in sides:
            leaf = new_tensor(dt, head_size * hp.n_head_kv[il], cells, self.n_seq, name=f"cache_{side}_l{il}")
            leaf.buffer = backend.alloc(leaf.nbytes, Usage.STATE)
            leafs.append(leaf)
        return LayerCache(leafs[0], leafs[1] if len(leafs) > 1 else None, kind)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for layer in self.layers for leaf in layer.leafs)

    def clear(self) -> None:
        """Forgets every token. The cells keep their bytes: nobody sees them any more."""
        for cells in self.cells.values():
            cells.clear()

    def forget_from(self, positions: npt.NDArray[np.int64]) -> None:
        """Forgets each sequence's tokens from a position of its own on: int64 [n_seq]."""
        for cells in self.cells.values():
            for seq, position in enumerate(positions):
                cells.forget_from(int(position), seq)

    def rows(self, leaf: Tensor, cells: npt.NDArray[np.int64]) -> Bytes:
        """The bytes of the first sequence's tokens in some cells of a layer: uint8 [cells, bytes of a row]."""
        n = int(cells.max(initial=-1)) + 1
        return _buffer(leaf).read(0, n * leaf.nb[1]).reshape(n, leaf.nb[1])[cells]

    def put_rows(self, leaf: Tensor, cells: npt.NDArray[np.int64], rows: Bytes) -> None:
        """Writes what rows() gave, for every sequence alike; what lies in other cells is lost."""
        memory = np.zeros((int(cells.max(initial=-1)) + 1, leaf.nb[1]), np.uint8)
        memory[cells] = rows
        for seq in range(self.n_seq if memory.size else 0):
            _buffer(leaf).write(seq * leaf.nb[2], memory.reshape(-1))

    def take_over(self, other: KVCache) -> None:
        """Every sequence gets the tokens of the only one of another cache of this model, as many as there are cells."""
        moved = {}
        for kind, cells in self.cells.items():
            held = other.cells[kind].positions[0]
            source = np.argsort(held)[np.count_nonzero(held < 0) :][-cells.size :]
            moved[kind] = source, cells.take(np.tile(held[source].astype(np.int64), (self.n_seq, 1)))[0]
        for mine, theirs in zip(self.layers, other.layers):
            source, target = moved[mine.kind]
            for leaf, from_leaf in zip(mine.leafs, theirs.leafs):
                self.put_rows(leaf, target, other.rows(from_leaf, source))

    def saved(self) -> dict[str, npt.NDArray[np.int32]]:
        """What the cells hold, for restore()."""
        return {kind: cells.saved() for kind, cells in self.cells.items()}

    def restore(self, saved: Mapping[str, npt.NDArray[np.int32]]) -> None:
        """What the cells held, whatever was written into them since: where a window lost tokens, other text stands."""
        for kind, cells in self.cells.items():
            cells.restore(saved[kind])


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
