"""The weights of one rank: its part of each tensor, read where the file is mapped."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Buffer
from graphrt.models.gguf import GGUFFile, TensorInfo
from graphrt.models.ranks.plan import Cut, RankPlan
from graphrt.models.weights import Weights
from graphrt.progress import Advance, ignore
from graphrt.tensor import Tensor, full_dims, new_tensor

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

    def shape(self, info: TensorInfo, name: str) -> tuple[int, ...]:
        return self.plan.cuts[name].ne(info.ne, self.own)

    def _bind(self, leaf: Tensor) -> Buffer:
        return self._bound(leaf, leaf.name)

    def _bound(self, leaf: Tensor, source: str) -> Buffer:
        """The memory of a leaf, of this rank's part of the file's tensor `source`."""
        info, cut = self.file.tensors[source], self.plan.cuts[leaf.name]
        return self._held(leaf, cut_bytes(self.file.data(source), info, cut, self.own))


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
