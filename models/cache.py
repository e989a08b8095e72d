"""The KV cache: static buffers, written by SET_ROWS at index inputs, and what the cells hold, which masks are made of.

Each layer has a k and a v tensor of [heads * head size, cells, sequences], or a k alone, of whose rows v is the
beginning. Layers with a sliding window share a smaller ring of cells: a token at position p lies in cell p mod size.
Nothing of a graph depends on the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Usage
from graphrt.dtypes import DType, dtype
from graphrt.errors import GraphError, SessionError
from graphrt.models.hparams import HParams
from graphrt.tensor import Tensor, new_tensor

#: Types that a cache may have.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")


class Ring:
    """Cells shared by the layers of one kind.

    positions: int32 [n_seq, size], the position in each cell of a sequence, -1: it is empty; window: how many positions
    back a token sees, itself included, 0 for all. What KQ_MASK takes.
    """

    def __init__(self, size: int, window: int, n_seq: int = 1) -> None:
        self.size = size
        self.window = window
        self.positions = np.full((n_seq, size), -1, np.int32)

    def take(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The cells of new tokens, noted as taken. positions: [n_seq, n_tokens], rising one by one; cells: the same."""
        cells = positions % self.size
        np.put_along_axis(self.positions, cells, positions, 1)
        return cells

    def saved(self) -> npt.NDArray[np.int32]:
        """What restore() brings back."""
        return self.positions.copy()

    def restore(self, positions: npt.NDArray[np.int32]) -> None:
        """The cells as saved() found them, whatever was written into them since."""
        self.positions[:] = positions

    def clear(self) -> None:
        """Empties all cells."""
        self.positions[:] = -1

    def forget_from(self, position: int, seq: int = 0) -> None:
        """Empties a sequence's cells of tokens from `position` on. What they overwrote was out of every later token's
        window."""
        held = self.positions[seq]
        held[held >= position] = -1


@dataclass(frozen=True)
class LayerCache:
    """k, v: the leafs of a layer, v None where it lies in k; kind: the ring it uses, "full" or "swa"."""

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
            raise SessionError(f"v lies in k, whose first {hp.d_v} elements must be whole blocks; use -ctk f16")
        self.type_k = type_k
        self.n_seq = n_seq
        self.n_ctx = n_ctx
        self.rings = {"full": Ring(n_ctx, 0, n_seq)}
        if any(windowed):
            self.rings["swa"] = Ring(min(n_ctx, hp.window + n_batch), hp.window, n_seq)
        self.layers = [self._layer(hp, backend, il, swa, sides) for il, swa in enumerate(windowed)]
        if all(windowed):
            del self.rings["full"]

    def _layer(
        self, hp: HParams, backend: Backend, il: int, swa: bool, sides: Sequence[tuple[str, DType, int]]
    ) -> LayerCache:
        """sides: "k" and, where it has memory of its own, "v", each with its type and the size of a head."""
        kind = "swa" if swa else "full"
        cells = self.rings[kind].size
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
        for ring in self.rings.values():
            ring.clear()


def _cache_type(side: str, name: str, head_size: int) -> DType:
    try:
        dt = dtype(name)
    except GraphError:
        dt = None
    if dt is None or dt.name not in CACHE_TYPES:
        raise SessionError(f"a cache type (-ct{side}) must be one of {', '.join(CACHE_TYPES)}, got {name!r}")
    if head_size % dt.block_size:
        raise SessionError(
            f"a {dt.name} cache needs heads of whole blocks of {dt.block_size} elements, this model's {side} heads "
            f"have {head_size}; use -ct{side} f16"
        )
    return dt
