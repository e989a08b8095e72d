"""The inputs of a step over pages: any number of tokens of any sequences, one sequence after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.models.attention import AttentionParams
from graphrt.models.cache_paged import PagedCache, cells_at
from graphrt.models.choice_rows import Rows
from graphrt.models.paging.pool import GONE
from graphrt.models.paging.prefixes import Prefix
from graphrt.models.sampling_device import RowInputs
from graphrt.models.step import SUFFIX, AnyStep, Inputs
from graphrt.tensor import Tensor, new_input


class StepSize(NamedTuple):
    """What a step has room for: tokens, sequences, tokens whose logits are wanted, pages of each sequence, and groups
    of sequences that share their first ones."""

    n_tokens: int
    n_seq: int
    n_outputs: int
    n_blocks: int
    n_groups: int = 0


@dataclass(frozen=True)
class PagedInputs(Inputs[PagedCache]):
    """The inputs of a graph over pages, of at most n_tokens tokens of at most n sequences: these are bounds, what they
    are is read from q_starts. Tokens beyond belong to nobody: they are written nowhere, and see nothing.

    source: i32 [n_tokens], in which row of a board each token is found (Decoder.paged_scored()), None where they are an
    input; cells: i64 [n_tokens], -1 for those of nobody; q_starts: i32 [n + 1], the first
    token of each sequence; lengths: i32 [n], tokens of each, the new ones included; tables: by kind of cells, i32
    [n_blocks, n], the pages of each; prefixes: i32 [3, n_groups], what sequences share of the kind "full", None where
    nothing is read once; owners: i32 [n_tokens], the engine's sequence of each token, None where no adapters are asked
    for; choice: what the tokens after wanted ones are chosen by, None where the step's graph chooses nothing.
    """

    source: Tensor | None
    q_starts: Tensor
    lengths: Tensor
    tables: Mapping[str, Tensor]
    prefixes: Tensor | None
    owners: Tensor | None
    choice: RowInputs | None = None

    @classmethod
    def of(
        cls,
        cache: PagedCache,
        size: StepSize,
        board: Tensor | None = None,
        *,
        gates: Tensor | None = None,
        chooses: bool = False,
    ) -> PagedInputs:
        """New inputs. board: where the tokens are found; gates: of adapters, f32 [R, sequences of the engine]; chooses:
        the next tokens are chosen too."""
        (n_tokens, n, n_outputs, n_blocks, n_groups), kinds = size, cache.kinds
        if board is None:
            source, tokens = None, new_input("i32", n_tokens, name="inp_tokens")
        else:
            source = new_input("i32", n_tokens, name="inp_token_rows")
            tokens = ops.reshape(ops.get_rows(board, source), n_tokens, name="inp_tokens")
        owners = new_input("i32", n_tokens, name="inp_owners") if gates is not None else None
        return cls(
            cache,
            tokens,
            new_input("i32", n_tokens, name="inp_pos"),
            new_input("i32", n_outputs, name="inp_out_ids"),
            {kind: new_input("i64", n_tokens, name=f"attn_inp_k_idxs{SUFFIX[kind]}") for kind in kinds},
            None,
            ops.get_rows(gates, owners) if gates is not None and owners is not None else None,
            source,
            new_input("i32", n + 1, name="attn_inp_q_starts"),
            new_input("i32", n, name="attn_inp_kv_lengths"),
            {k: new_input("i32", n_blocks, n, name=f"attn_inp_pages{SUFFIX[k]}") for k in kinds},
            new_input("i32", 3, n_groups, name="attn_inp_prefixes") if n_groups else None,
            owners,
            RowInputs.of(n_outputs) if chooses else None,
        )

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
            prefixes=self.prefixes if kind == "full" else None,
            max_bias=params.max_bias,
            softcap=params.softcap,
            window=self.cache.sizes.windows[kind],
            name=name,
        )


class PagedStep(AnyStep[PagedInputs]):
    """One over pages."""

    def write(
        self,
        new: Mapping[int, int],
        tokens: npt.NDArray[np.int32] | None = None,
        rows: npt.NDArray[np.int32] | None = None,
        prefixes: Sequence[Prefix] = (),
        choice: Rows | None = None,
    ) -> None:
        """Fills the inputs; what is left out stays as it is. new: how many of each sequence's last tokens are read, in
        the order in which they lie in `tokens`; they have cells already. tokens: their ids, or where they are found on
        the board; rows: indices among these; both may be shorter than the step's own. prefixes: of sequences by their
        places in `new`; choice: what the tokens after `rows` are chosen by, of a step that chooses."""
        inputs = self.inputs
        read = inputs.tokens if inputs.source is None else inputs.source
        shared = np.array([number for prefix in prefixes for number in prefix], np.int32)
        given = self.fill({read: tokens, inputs.rows: rows, inputs.prefixes: shared})
        if inputs.choice is not None and choice is not None:
            given += self.fill(dict(choice.values(inputs.choice).items()))
        self.filled([*given, *self._place(new)])

    def _place(self, new: Mapping[int, int]) -> list[Tensor]:
        """Where the tokens stand. The inputs that say so."""
        inputs, cache = self.inputs, self.inputs.cache
        seqs = list(new)
        counts = np.fromiter(new.values(), np.int64, len(new))
        ends = np.array([cache.pool.of(seq).reserved for seq in seqs], np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)])
        n, n_seq = int(starts[-1]), len(new)
        owner = np.repeat(np.arange(n_seq), counts)
        positions = np.arange(n) + (ends - starts[1:])[owner]
        q_starts = self.own(inputs.q_starts)
        q_starts[: n_seq + 1], q_starts[n_seq + 1 :] = starts, n
        for kind, leaf in inputs.tables.items():
            tables, cells = cache.tables(kind, seqs), self.own(inputs.cells[kind])
            cells[:n], cells[n:] = cells_at(tables, owner, positions, cache.sizes.page), -1
            table = self.own(leaf).reshape(-1, leaf.ne[0])
            table[:] = GONE
            table[:n_seq, : tables.shape[1]] = tables
        owners = np.array(seqs, np.int32)[owner] if inputs.owners is not None else None
        given = self.fill({inputs.positions: positions, inputs.lengths: ends, inputs.owners: owners})
        return [*given, inputs.q_starts, *inputs.cells.values(), *inputs.tables.values()]
