"""The inputs of a model's step and the step as it is prepared to run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.execute import Executable
from graphrt.models.cache import KVCache, LayerCache
from graphrt.tensor import Tensor, new_input

Values = npt.NDArray[np.generic]
Logits = npt.NDArray[np.float32]

#: What the inputs' names of each kind of cells end in, as llama.cpp has it.
SUFFIX = {"full": "", "swa": "_swa"}


@dataclass(frozen=True)
class AttentionParams:
    """What a layer's attention is computed with: the op's own arguments."""

    scale: float
    max_bias: float
    softcap: float
    sinks: Tensor | None


@dataclass(frozen=True)
class Inputs(ABC):
    """The inputs of one graph, whatever cells its tokens lie in.

    tokens, positions: i32 [n_tokens]; rows: i32 [n_outputs], the tokens whose logits are wanted; cells: i64, where the
    tokens are written, by kind of cells; uniform: f64 [n_seq], what a token is drawn by, None where the likeliest is
    taken.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    cells: Mapping[str, Tensor]
    uniform: Tensor | None

    @property
    @abstractmethod
    def layers(self) -> list[LayerCache]:
        """The cache's leafs, by layer."""

    @property
    @abstractmethod
    def n_ctx(self) -> int:
        """The most tokens that a sequence may have."""

    @property
    @abstractmethod
    def n_seq(self) -> int:
        """Sequences that lie side by side in a cache, in a dimension of their own."""

    @abstractmethod
    def heads(self, cache: Tensor, head_size: int, n_head: int) -> Tensor:
        """A cache's rows of n_head heads, as attended() takes them."""

    @abstractmethod
    def attended(self, q: Tensor, k: Tensor, v: Tensor, kind: str, params: AttentionParams, name: str) -> Tensor:
        """Attention over the cells of a kind. q: [d_k, heads, tokens of a sequence, n_seq]; k, v: from heads(); the
        result: [d_v, heads, tokens of a sequence, n_seq]."""


In = TypeVar("In", bound=Inputs)


@dataclass(frozen=True)
class StepInputs(Inputs):
    """The inputs of a graph over rings. n is the number of tokens of each sequence, n_tokens = n * n_seq; those of a
    sequence lie side by side.

    cells: i64 [n, n_seq]; held: i32 [size, n_seq], the position in each cell; masks: f16 [size, n, 1, n_seq], made of
    those.
    """

    cache: KVCache
    held: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]

    @classmethod
    def of(cls, cache: KVCache, tokens: Tensor, n_outputs: int, alibi: bool, *, draws: bool = False) -> StepInputs:
        """New inputs beside `tokens`. alibi: the masks hold distances; draws: the next tokens are drawn."""
        cells, held, masks = {}, {}, {}
        n_seq = cache.n_seq
        n = tokens.ne[0] // n_seq
        positions = new_input("i32", n * n_seq, name="inp_pos")
        by_sequence = positions if n_seq == 1 else ops.reshape(positions, n, n_seq)
        for kind, of_kind in cache.cells.items():
            end = SUFFIX[kind]
            cells[kind] = new_input("i64", n, n_seq, name=f"attn_inp_k_idxs{end}")
            held[kind] = new_input("i32", of_kind.size, n_seq, name=f"attn_inp_kq_cells{end}")
            masks[kind] = ops.kq_mask(held[kind], by_sequence, of_kind.window, alibi, name=f"attn_inp_kq_mask{end}")
        rows = new_input("i32", n_outputs, name="inp_out_ids")
        uniform = new_input("f64", n_seq, name="inp_uniform") if draws else None
        return cls(tokens, positions, rows, cells, uniform, cache, held, masks)

    @property
    def layers(self) -> list[LayerCache]:
        return self.cache.layers

    @property
    def n_ctx(self) -> int:
        return self.cache.n_ctx

    @property
    def n_seq(self) -> int:
        return self.cache.n_seq

    def heads(self, cache: Tensor, head_size: int, n_head: int) -> Tensor:
        """[heads * head size, cells, n_seq] as [head size, cells, heads, n_seq]."""
        ne = (head_size, cache.ne[1], n_head, cache.ne[2])
        return ops.view(cache, ne, (cache.nb[1], cache.dtype.row_size(head_size), cache.nb[2]))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, kind: str, params: AttentionParams, name: str) -> Tensor:
        return ops.flash_attn_ext(
            ops.permute(q, 0, 2, 1, 3),
            k,
            v,
            self.masks[kind],
            params.scale,
            sinks=params.sinks,
            max_bias=params.max_bias,
            softcap=params.softcap,
            name=name,
        )

    def places(self, positions: npt.NDArray[np.int64]) -> dict[str, Values]:
        """Where the next tokens stand, by the inputs' names: their positions, given as int64 [n_seq, n], and their
        cells, which are noted as taken, and what all cells then hold."""
        values: dict[str, Values] = {self.positions.name: positions.reshape(-1).astype(np.int32)}
        for kind, cells in self.cache.cells.items():
            values[self.cells[kind].name] = cells.take(positions).reshape(-1)
            values[self.held[kind].name] = cells.positions.reshape(-1)
        return values


@dataclass(frozen=True)
class AnyStep(Generic[In]):
    """A step's inputs and the graph that reads them, prepared."""

    inputs: In
    exe: Executable

    def logits(self) -> Logits:
        """Those of the latest run: f32 [n_outputs, n_vocab], valid until the next one."""
        found = self._host_logits
        rows = np.asarray(self.exe.read("result_output") if found is None else found, np.float32)
        return rows.reshape(self.inputs.rows.ne[0], -1)

    @cached_property
    def _host_logits(self) -> Values | None:
        """The logits' own memory, which stays where it is, when the host can address it."""
        return self.exe.host_array("result_output")


class PreparedStep(AnyStep[StepInputs]):
    """One over rings."""

    def write(
        self,
        positions: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32] | None = None,
        rows: npt.NDArray[np.int32] | None = None,
        uniform: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Fills the inputs; what is left out stays as it is. positions: int64 [n_seq, n]; tokens: as many; rows: int32
        [n_outputs]; uniform: float64 [n_seq]."""
        values = self.inputs.places(positions)
        for leaf, value in ((self.inputs.tokens, tokens), (self.inputs.rows, rows), (self.inputs.uniform, uniform)):
            if leaf is not None and value is not None:
                values[leaf.name] = value.reshape(-1)
        self.exe.write_all(values)
