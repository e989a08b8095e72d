"""The inputs of a step over pages: any number of tokens of any sequences, one sequence after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.models.cache import LayerCache
from graphrt.models.cache_paged import PagedCache
from graphrt.models.step import SUFFIX, AnyStep, AttentionParams, Inputs, Values
from graphrt.tensor import Tensor, new_input


@dataclass(frozen=True)
class PagedInputs(Inputs):
    """The inputs of a graph over pages, of at most n_tokens tokens of at most n sequences: these are bounds, what they
    are is read from q_starts. Tokens beyond belong to nobody: they are written nowhere, and see nothing.

    cells: i64 [n_tokens], -1 for those of nobody; q_starts: i32 [n + 1], the first token of each sequence; lengths: i32
    [n], tokens of each, the new ones included; tables: by kind of cells, i32 [max_blocks, n], the pages of each.
    """

    cache: PagedCache
    q_starts: Tensor
    lengths: Tensor
    tables: Mapping[str, Tensor]

    @classmethod
    def of(cls, cache: PagedCache, tokens: Tensor, n: int, n_outputs: int, *, draws: bool = False) -> PagedInputs:
        """New inputs beside `tokens`, for n sequences. draws: the next tokens are drawn."""
        n_tokens, kinds = tokens.ne[0], cache.kinds
        return cls(
            tokens,
            new_input("i32", n_tokens, name="inp_pos"),
            new_input("i32", n_outputs, name="inp_out_ids"),
            {kind: new_input("i64", n_tokens, name=f"attn_inp_k_idxs{SUFFIX[kind]}") for kind in kinds},
            new_input("f64", n_outputs, name="inp_uniform") if draws else None,
            cache,
            new_input("i32", n + 1, name="attn_inp_q_starts"),
            new_input("i32", n, name="attn_inp_kv_lengths"),
            {k: new_input("i32", cache.sizes.max_blocks, n, name=f"attn_inp_pages{SUFFIX[k]}") for k in kinds},
        )

    @property
    def layers(self) -> list[LayerCache]:
        return self.cache.layers

    @property
    def n_ctx(self) -> int:
        return self.cache.n_ctx

    @property
    def n_seq(self) -> int:
        """All lie in the same pages."""
        return 1

    def heads(self, cache: Tensor, head_size: int, n_head: int) -> Tensor:
        """[heads * head size, cells] as [head size, page, heads, pages]."""
        page = self.cache.sizes.page
        ne = (head_size, page, n_head, cache.ne[1] // page)
        return ops.view(cache, ne, (cache.nb[1], cache.dtype.row_size(head_size), cache.nb[1] * page))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, kind: str, params: AttentionParams, name: str) -> Tensor:
        return ops.flash_attn_varlen(
            ops.permute(q, 0, 2, 1, 3),
            k,
            v,
            self.q_starts,
            params.scale,
            lengths=self.lengths,
            block_table=self.tables[kind],
            sinks=params.sinks,
            max_bias=params.max_bias,
            softcap=params.softcap,
            window=self.cache.sizes.windows[kind],
            name=name,
        )

    def places(self, new: Mapping[int, int]) -> dict[str, Values]:
        """Where the last tokens of some sequences stand, so many of each, by the inputs' names. They have cells
        already."""
        n_tokens, n, pool = self.tokens.ne[0], self.lengths.ne[0], self.cache.pool
        ends = {seq: pool.of(seq).reserved for seq in new}
        starts = np.cumsum([0, *new.values()], dtype=np.int32)
        values: dict[str, Values] = {
            self.positions.name: _filled(n_tokens, 0, [np.arange(e - new[s], e) for s, e in ends.items()], np.int32),
            self.q_starts.name: np.concatenate([starts, np.full(n + 1 - len(starts), starts[-1], np.int32)]),
            self.lengths.name: _filled(n, 0, [np.array(list(ends.values()))], np.int32),
        }
        for kind, table in self.tables.items():
            cells = [self.cache.cells(kind, seq, end - new[seq], end) for seq, end in ends.items()]
            values[self.cells[kind].name] = _filled(n_tokens, -1, cells, np.int64)
            values[table.name] = self.cache.table(kind, list(new), n).reshape(-1)
        return values


def _filled(n: int, rest: int, parts: Sequence[npt.NDArray[np.int64]], kind: type[np.int32] | type[np.int64]) -> Values:
    """The parts one after the other, and `rest` behind them: [n]."""
    found = np.full(n, rest, kind)
    joined = np.concatenate(parts) if parts else found[:0]
    found[: len(joined)] = joined
    return found


class PagedStep(AnyStep[PagedInputs]):
    """One over pages."""

    def write(
        self,
        new: Mapping[int, int],
        tokens: npt.NDArray[np.int32] | None = None,
        rows: npt.NDArray[np.int32] | None = None,
        uniform: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Fills the inputs; what is left out stays as it is. new: how many of each sequence's last tokens are read, in
        the order in which they lie in `tokens`; rows: indices among these; both may be shorter than the step's own."""
        values = self.inputs.places(new)
        for leaf, value in ((self.inputs.tokens, tokens), (self.inputs.rows, rows), (self.inputs.uniform, uniform)):
            if leaf is not None and value is not None:
                values[leaf.name] = np.concatenate([value, np.zeros(leaf.ne[0] - len(value), value.dtype)])
        self.exe.write_all({name: value for name, value in values.items() if name in self._asked})

    @cached_property
    def _asked(self) -> set[str]:
        """The inputs that the graph reads: without a rotation no positions."""
        return {leaf.name for leaf in self.exe.graph.inputs}
