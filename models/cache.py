"""The KV cache: static buffers, written by SET_ROWS at index inputs, and the masks that say who sees which cell.

Each layer has a k and a v tensor of [heads * head size, cells, sequences]. Layers with a sliding window share a smaller
ring of cells: a token at position p lies in cell p mod size. Nothing of a graph depends on the position.
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
    """Cells shared by the layers of one kind. positions[s, c]: the position in cell c of sequence s, -1: it is empty.

    window: how many positions back a token sees, itself included; 0 for all.
    """

    def __init__(self, size: int, window: int, n_seq: int = 1) -> None:
        self.size = size
        self.window = window
        self.positions = np.full((n_seq, size), -1, np.int64)
        self._last: list[int | None] = [None] * n_seq  # of a sequence known to be unbroken, see _unbroken

    def take(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The cells of new tokens, noted as taken. positions: [n_seq, n_tokens], rising one by one; cells: the same."""
        cells = positions % self.size
        np.put_along_axis(self.positions, cells, positions, 1)
        for seq, last in enumerate(self._last):
            self._last[seq] = int(positions[seq, -1]) if last is not None and positions[seq, 0] == last + 1 else None
        return cells

    def saved(self) -> npt.NDArray[np.int64]:
        """What restore() brings back."""
        return self.positions.copy()

    def restore(self, positions: npt.NDArray[np.int64]) -> None:
        """The cells as saved() found them, whatever was written into them since."""
        self.positions[:] = positions
        self._last = [None] * len(self._last)

    def clear(self) -> None:
        """Empties all cells."""
        self.restore(np.full_like(self.positions, -1))

    def forget_from(self, position: int, seq: int = 0) -> None:
        """Empties a sequence's cells of tokens from `position` on. What they overwrote was out of every later token's
        window."""
        held = self.positions[seq]
        held[held >= position] = -1
        self._last[seq] = None

    def mask(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float16]:
        """f16 [n_seq, 1, n_tokens, size]: 0 where the token sees the cell; -inf where that is empty, later, or out of
        sight."""
        n_seq, n_tokens = positions.shape
        mask = np.full((n_seq, 1, n_tokens, self.size), np.float16(-np.inf))
        for seq, (rows, held, at) in enumerate(zip(mask[:, 0], self.positions, positions)):
            if self._last[seq] is None and _unbroken(held):
                self._last[seq] = int(held.max())
            last = self._last[seq]
            if last is None:
                self._show_any(rows, held, at)
            else:
                self._show_runs(rows, last, at)
        return mask

    def _show_runs(self, rows: npt.NDArray[np.float16], last: int, at: npt.NDArray[np.int64]) -> None:
        """Zeros where tokens at `at` see cells that hold positions without a gap, each at its own modulo the size.

        last: the last of them. What a token sees is one run of cells, or two around the end: far less work than a look
        at each cell.
        """
        first = max(0, last - self.size + 1)
        for row, position in zip(rows, at.tolist()):
            low = max(first, position - self.window + 1 if self.window else 0)
            n = min(position, last) + 1 - low
            start = low % self.size
            row[start : start + n] = 0
            if start + n > self.size:
                row[: start + n - self.size] = 0

    def _show_any(self, rows: npt.NDArray[np.float16], held: npt.NDArray[np.int64], at: npt.NDArray[np.int64]) -> None:
        back = at[:, None] - held[None, :]
        seen = (held[None, :] >= 0) & (back >= 0)
        if self.window:
            seen &= back < self.window
        rows[seen] = 0


def _unbroken(held: npt.NDArray[np.int64]) -> bool:
    """The cells hold the last positions there are, each in the cell of its position modulo their number."""
    size, last = len(held), int(held.max())
    expected = last - (last - np.arange(size)) % size
    return last >= 0 and bool(np.array_equal(np.where(expected < 0, -1, expected), held))


@dataclass(frozen=True)
class LayerCache:
    """k, v: the leafs of a layer; kind: the ring it uses, "full" or "swa"."""

    k: Tensor
    v: Tensor
    kind: str


class KVCache:
    """The cache of n_seq sequences of at most n_ctx tokens each.

    n_batch: the most tokens of a sequence that are written at once. Raises SessionError for a type that can't hold this
    model.
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
        types = _cache_type("k", type_k, hp.d_k), _cache_type("v", type_v, hp.d_v)
        self.type_k = type_k
        self.n_seq = n_seq
        self.rings = {"full": Ring(n_ctx, 0, n_seq)}
        if any(windowed):
            self.rings["swa"] = Ring(min(n_ctx, hp.window + n_batch), hp.window, n_seq)
        self.layers = [self._layer(hp, backend, il, swa, types) for il, swa in enumerate(windowed)]
        if all(windowed):
            del self.rings["full"]

    def _layer(self, hp: HParams, backend: Backend, il: int, swa: bool, types: tuple[DType, DType]) -> LayerCache:
        kind = "swa" if swa else "full"
        cells = self.rings[kind].size
        leafs = []
        for side, dt, head_size in (("k", types[0], hp.d_k), ("v", types[1], hp.d_v)):
            leaf = new_tensor(dt, head_size * hp.n_head_kv[il], cells, self.n_seq, name=f"cache_{side}_l{il}")
            leaf.buffer = backend.alloc(leaf.nbytes, Usage.STATE)
            leafs.append(leaf)
        return LayerCache(leafs[0], leafs[1], kind)

    @property
    def nbytes(self) -> int:
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)

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
