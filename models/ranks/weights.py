"""The weights of one rank: its part of each tensor, read where the file is mapped."""

from __future__ import annotations

import hashlib
import math
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Buffer
from graphrt.models.gguf import GGUFFile, TensorInfo
from graphrt.models.ranks.plan import Cut, RankPlan
from graphrt.models.weights import Weights
from graphrt.progress import Advance, ignore
from graphrt.tensor import Tensor, full_dims, new_tensor

#: Bytes of the rows that columns are taken out of at once.
TOGETHER = 4 << 20
Bytes = npt.NDArray[np.uint8]


class RankWeights(Weights):
    """Hands out a rank's part of each tensor under the tensor's name. Only that part of the file is touched: rows that
    lie together are read in place where the backend can, others are copied once. What other stages have is handed out
    too, without memory: no node of this stage's graphs reads it. rank: its number among all; own: in its stage."""

    def __init__(self, file: GGUFFile, backend: Backend, plan: RankPlan, rank: int, advance: Advance = ignore) -> None:
        super().__init__(file, backend, advance)
        self.plan, self.rank, self.own = plan, rank, rank % plan.ranks
        self.share = plan.share(rank)

    def __call__(self, name: str, *ne: int, optional: bool = False) -> Any:  # as Weights' overloads have it
        info = self.file.tensors.get(name)
        if info is None or self.plan.has(name, self.rank):
            return super().__call__(name, *ne, optional=optional)
        self.leave(name)
        return new_tensor(info.dtype, *self.shape(info, name), name=name)

    def tied(self, embedding: Tensor) -> Tensor:
        """This rank's rows of the embedding, as the output matrix."""
        info = self.file.tensors[embedding.name]
        leaf = new_tensor(info.dtype, *self.shape(info, "output.weight"), name="output.weight")
        if not self.plan.has(leaf.name, self.rank):
            return leaf
        leaf.buffer = self._bound(leaf, embedding.name)
        self.loaded[leaf.name] = leaf
        return leaf

    @cached_property
    def fingerprint(self) -> bytes:
        """Of the file and of what this rank has of it: what is kept of one rank is no other one's."""
        own = self.plan.size, self.rank, self.plan.stages, self.plan.layers
        return hashlib.sha256(super().fingerprint + repr(own).encode()).digest()

    def shape(self, info: TensorInfo, name: str) -> tuple[int, ...]:
        return self.plan.cuts[name].ne(info.ne, self.own)

    def _bind(self, leaf: Tensor) -> Buffer:
        return self._bound(leaf, leaf.name)

    def _bound(self, leaf: Tensor, source: str) -> Buffer:
        """The memory of a leaf, of this rank's part of the file's tensor `source`."""
        return self._held(leaf, part_of(self.file, source, self.plan.cuts[leaf.name], self.own))


def part_of(file: GGUFFile, name: str, cut: Cut, rank: int) -> Bytes:
    """A rank's part of a file's tensor, 1-D. Rows are read as they lie; columns are taken out of a few rows at a time,
    so that of a file whose bytes are made when they are asked for never much more than the part is in memory."""
    info = file.tensors[name]
    if not cut.spans:
        return cut_bytes(file.data(name), info, cut, rank)
    ne = full_dims(info.ne)
    row, n_rows = info.dtype.row_size(ne[0]), math.prod(ne[1:])
    if cut.dim == 0 and n_rows == 1 and len(cut.spans[rank]) == 1:  # a vector's part is a run of its bytes
        return file.span(name, *map(info.dtype.row_size, cut.spans[rank][0]))
    if cut.dim == 0:
        mine = np.empty((n_rows, info.dtype.row_size(cut.ne(ne, rank)[0])), np.uint8)
        step = max(1, TOGETHER // row)
        for first in range(0, n_rows, step):
            rows = file.span(name, first * row, min(first + step, n_rows) * row).reshape(-1, row)
            at = 0
            for a, b in (map(info.dtype.row_size, span) for span in cut.spans[rank]):
                mine[first : first + step, at : at + b - a] = rows[:, a:b]
                at += b - a
        return mine.reshape(-1)
    unit, outer = row * math.prod(ne[1 : cut.dim]), math.prod(ne[cut.dim + 1 :])
    spans = [(i * ne[cut.dim] + a, i * ne[cut.dim] + b) for i in range(outer) for a, b in cut.spans[rank]]
    if len(spans) == 1:
        return file.span(name, spans[0][0] * unit, spans[0][1] * unit)
    found, at = np.empty(sum(b - a for a, b in spans) * unit, np.uint8), 0
    for a, b in spans:
        found[at : at + (b - a) * unit] = file.span(name, a * unit, b * unit)
        at += (b - a) * unit
    return found


def cut_bytes(data: Bytes, info: TensorInfo, cut: Cut, rank: int) -> Bytes:
    """A rank's part of a tensor's bytes, 1-D: a view of them where they lie together."""
    if cut.by == "rank 0" and rank:
        return np.zeros(data.size, np.uint8)
    if not cut.spans:
        return data
    block, ne = info.dtype.block_size, full_dims(info.ne)
    blocks = data.reshape(ne[3], ne[2], ne[1], ne[0] // block, info.dtype.type_size)
    step = block if cut.dim == 0 else 1
    at = [slice(None)] * 4
    parts = []
    for start, stop in cut.spans[rank]:
        at[3 - cut.dim] = slice(start // step, stop // step)
        parts.append(blocks[tuple(at)])
    mine = parts[0] if len(parts) == 1 else np.concatenate(parts, 3 - cut.dim)
    return np.ascontiguousarray(mine).reshape(-1)
