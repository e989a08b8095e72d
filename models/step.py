"""The inputs of a model's step and the step as it is prepared to run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.execute import Executable
from graphrt.host import host_type
from graphrt.models.attention import AttentionParams, standard_attention
from graphrt.models.cache import Cache, KVCache, LayerCache
from graphrt.models.sampling import check_logits
from graphrt.tensor import Tensor, new_input

Values = npt.NDArray[np.generic]
Logits = npt.NDArray[np.float32]

#: What the inputs' names of each kind of cells end in, as llama.cpp has it.
SUFFIX = {"full": "", "swa": "_swa"}


C = TypeVar("C", bound=Cache)


@dataclass(frozen=True)
class Inputs(ABC, Generic[C]):
    """The inputs of one graph, whatever cells its tokens lie in.

    cache: where its tokens lie; tokens, positions: i32 [n_tokens]; rows: i32 [n_outputs], the tokens whose logits are
    wanted; cells: i64, where the tokens are written, by kind of cells; uniform: f64 [n_seq], what a token is drawn by,
    None where the likeliest is taken; gates: f32 [R, n_tokens], or [R, 1] for all of them, how much of which adapter
    tokens have (adapters.py), None for none.
    """

    cache: C
    tokens: Tensor
    positions: Tensor
    rows: Tensor
    cells: Mapping[str, Tensor]
    uniform: Tensor | None
    gates: Tensor | None

    @property
    def layers(self) -> list[LayerCache]:
        """The cache's leafs, by layer."""
        return self.cache.layers

    @property
    def n_ctx(self) -> int:
        """The most tokens that a sequence may have."""
        return self.cache.n_ctx

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


AnyInputs: TypeAlias = Inputs[Any]
In = TypeVar("In", bound=AnyInputs)


@dataclass(frozen=True)
class StepInputs(Inputs[KVCache]):
    """The inputs of a graph over rings. n is the number of tokens of each sequence, n_tokens = n * n_seq; those of a
    sequence lie side by side.

    cells: i64 [n, n_seq]; held: i32 [size, n_seq], the position in each cell; masks: f16 [size, n, 1, n_seq], made of
    those.
    """

    held: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        cache: KVCache,
        tokens: Tensor,
        n_outputs: int,
        alibi: bool,
        *,
        draws: bool = False,
        gates: Tensor | None = None,
    ) -> StepInputs:
        """New inputs beside `tokens`. alibi: the masks hold distances; draws: the next tokens are drawn; gates: of all
        tokens."""
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
        return cls(cache, tokens, positions, rows, cells, uniform, gates, held, masks)

    @property
    def n_seq(self) -> int:
        return self.cache.n_seq

    def heads(self, cache: Tensor, head_size: int, n_head: int) -> Tensor:
        """[heads * head size, cells, n_seq] as [head size, cells, heads, n_seq]."""
        ne = (head_size, cache.ne[1], n_head, cache.ne[2])
        return ops.view(cache, ne, (cache.nb[1], cache.dtype.row_size(head_size), cache.nb[2]))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, kind: str, params: AttentionParams, name: str) -> Tensor:
        if not self.cache.flash_attn:
            return standard_attention(ops.permute(q, 0, 2, 1, 3), k, v, self.masks[kind], params, name)
        return ops.flash_attn_ext(
            ops.permute(q, 0, 2, 1, 3),
            k,
            v,
            self.masks[kind],
            params.scale,
            sinks=params.sinks,
            max_bias=params.max_bias,
            softcap=params.softcap,
            prec=self.cache.prec,
            name=name,
        )

    def places(self, positions: npt.NDArray[np.int64]) -> list[tuple[Tensor, Values]]:
        """Where the next tokens stand, by inputs: their positions, given as int64 [n_seq, n], and their cells, which
        are noted as taken, and what all cells then hold."""
        values: list[tuple[Tensor, Values]] = [(self.positions, positions)]
        for kind, cells in self.cache.cells.items():
            values += [(self.cells[kind], cells.take(positions)), (self.held[kind], cells.positions)]
        return values


class Filled:
    """A prepared graph whose inputs are filled again and again. exe: it."""

    exe: Executable

    def own(self, leaf: Tensor) -> Values:
        """Where an input's values are put, flat; filled() then. Where the host can address the input, it is its own
        memory, which is a sixth of the work of Executable.write_all(); one that the graph doesn't read has some
        too."""
        found = self._own.get(leaf)
        if found is None:
            array = self.exe.host_array(leaf) if self.in_place and leaf in self._asked else None
            found = np.zeros(leaf.n_elements, host_type(leaf.dtype)) if array is None else array.reshape(-1)
            self._own[leaf] = found
        return found

    def filled(self, leafs: Iterable[Tensor]) -> None:
        """The values of these inputs are in own(), and are read by the next run."""
        if not self.in_place:
            self.exe.write_all({leaf: self.own(leaf) for leaf in leafs if leaf in self._asked})

    def fill(self, values: Mapping[Tensor | None, Values | None]) -> list[Tensor]:
        """Puts whole inputs, or the first elements of them, there, and zeros behind; those that are None are left as
        they are. Gives the others, for filled()."""
        given = [(leaf, value) for leaf, value in values.items() if leaf is not None and value is not None]
        for leaf, value in given:
            target = self.own(leaf)
            target[: value.size] = value.reshape(-1)
            target[value.size :] = 0
        return [leaf for leaf, _ in given]

    @cached_property
    def in_place(self) -> bool:
        """The host can address all inputs."""
        return all(self.exe.place(leaf)[0].host_view() is not None for leaf in self._asked)

    @cached_property
    def _own(self) -> dict[Tensor, Values]:
        return {}

    @cached_property
    def _asked(self) -> set[Tensor]:
        """The inputs that the graph reads: without a rotation no positions."""
        return set(self.exe.graph.inputs)

    @property
    def nbytes(self) -> int:
        """Of memory that it keeps."""
        return sum(arena.buffer.nbytes for arena in self.exe.arenas.values())


@dataclass(frozen=True)
class AnyStep(Filled, Generic[In]):
    """A step's inputs and the graph that reads them, prepared."""

    inputs: In
    exe: Executable

    def logits(self) -> Logits:
        """Those of the latest run: f32 [n_outputs, n_vocab], valid until the next one."""
        found = self._host_logits
        return self._by_row(self.exe.read("result_output")) if found is None else found

    def _by_row(self, logits: Values) -> Logits:
        return np.asarray(logits, np.float32).reshape(self.inputs.rows.ne[0], -1)

    def check_chosen(self, tokens: npt.NDArray[np.int32]) -> None:
        """Raises SessionError where the latest run's logits are no numbers, so that its choice, int32 [n_seq], is none:
        a NaN is the likeliest. Looks only at logits that stay."""
        if not self.logits_stay:
            return
        logits = self.logits()
        for row, token in zip(logits, tokens):
            if not row[token] > -math.inf:
                check_logits(row)

    @cached_property
    def logits_stay(self) -> bool:
        """The logits are an output, and the host can address them."""
        kept = any(output.name == "result_output" for output in self.exe.graph.outputs)
        return kept and self._host_logits is not None

    @cached_property
    def _host_logits(self) -> Logits | None:
        """The logits' own memory, which stays where it is, when the host can address it."""
        found = self.exe.host_array("result_output")
        return None if found is None else self._by_row(found)


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
        inputs = self.inputs
        values = inputs.places(positions)
        for leaf, value in ((inputs.tokens, tokens), (inputs.rows, rows), (inputs.uniform, uniform)):
            if value is not None and leaf is not None:
                values.append((leaf, value))
        for leaf, given in values:
            self.own(leaf)[:] = given.reshape(-1)
        if not self.in_place:
            self.filled(leaf for leaf, _ in values)
