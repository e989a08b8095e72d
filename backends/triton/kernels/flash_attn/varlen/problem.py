"""What one varlen attention is given, read off its nodes, and the most tiles that it can have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from graphrt.backend import Place
from graphrt.backends.triton.kernels.flash_attn.fusions import Attention
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling, operand
from graphrt.ops.flash_attn_varlen import longest
from graphrt.ops.score import built_in
from graphrt.tensor import Tensor

#: Which keys: all; those that a group shares, for all of its queries; those behind them.
ALL, SHARED, OWN = "all", "shared", "own"
MOST = 2**31 - 1


@dataclass(frozen=True)
class Part:
    """What of an attention is meant: keys, and sequences by their query rows of a KV head, least_rows to most_rows."""

    keys: str = ALL
    least_rows: int = 0
    most_rows: int = MOST

    @property
    def text(self) -> str:
        """In words."""
        keys = {ALL: "all keys", SHARED: "keys that sequences share", OWN: "own keys"}[self.keys]
        few = f", of sequences of up to {self.most_rows} query rows of a KV head" if self.most_rows < MOST else ""
        many = f", of sequences of {self.least_rows} or more query rows of a KV head" if self.least_rows else ""
        return keys + few + many


class VarlenProblem(Problem):
    """FLASH_ATTN_VARLEN, FLASH_ATTN_VARLEN_LSE, or both of the same sources, as a Problem without a mask: an explicit
    one (explicit_t, None without) lies otherwise, and decides about no tile.

    n_q: tokens of all sequences; n_kv: the most keys of one; page: tokens of a page, 0 for packed keys; kv: lengths, or
    starts of packed keys; prefixes: groups that share pages. Strides of k and v: between keys, heads and pages. part:
    what of it is meant; given: memory of results that are not in the graph.
    """

    def __init__(self, attention: Attention, place: Callable[[Tensor], Place]) -> None:
        self.nodes, self.out, self.lse = attention.nodes, attention.out, attention.lse
        node = self.nodes[0]
        q, k = node["q"], node["k"]
        v = self.out["v"] if self.out is not None else None
        self.q_t, self.k_t, self.v_t, self.mask_t, self.sinks_t = q, k, v, None, node["sinks"]
        self.params = built_in(node.params)
        self.place = place
        self.k = operand(k, place(k))
        self.v = operand(v, place(v)) if v is not None else self.k
        self.n_kv, self.n_q, self.n_head, self.n_seq = longest(node), q.ne[1], q.ne[2], node["q_starts"].ne[0] - 1
        self.gqa = q.ne[2] // k.ne[2]
        self.m2 = self.m3 = self.b2 = self.b3 = 1
        self.bias_t = None
        self.q_starts, self.table_t, self.prefixes = node["q_starts"], node["block_table"], node["prefixes"]
        self.explicit_t = node["mask"]
        lengths, k_starts = node["lengths"], node["k_starts"]
        kv = lengths if lengths is not None else k_starts
        assert kv is not None
        self.kv, self.page = kv, k.ne[1] if lengths is not None else 0
        self.part = Part()
        self.given: Mapping[Tensor, torch.Tensor] = {}

    def with_part(
        self, part: Part, out: Tensor | None, lse: Tensor | None, given: Mapping[Tensor, torch.Tensor]
    ) -> VarlenProblem:
        """The same for a part of it, with results there."""
        other = copy.copy(self)
        other.part, other.out, other.lse, other.given = part, out, lse, given
        if part.keys == SHARED:
            other.sinks_t = None  # they are with the own keys
        return other

    def memory(self, t: Tensor, kind: torch.dtype) -> torch.Tensor:
        return self.given[t] if t in self.given else super().memory(t, kind)

    @property
    def why_portable(self) -> str | None:
        """Why it is the portable kernel's, None where others may have it."""
        if self.explicit_t is None:
            return None
        return "what a row sees follows from positions there, explicit masks are the portable kernel's"

    @property
    def n_lists(self) -> int:
        """Sequences, or groups, that have queries."""
        return self.prefixes.ne[1] if self.part.keys == SHARED and self.prefixes is not None else self.n_seq

    @property
    def mean_queries(self) -> int:
        """Queries of a sequence if all have equally many: what configurations are chosen by."""
        mean = -(-self.n_q // self.n_lists)
        return min(mean, max(1, self.part.most_rows // self.gqa))

    def tiling(self, block_m: int, block_n: int, pack: int | None = None) -> Tiling:
        """The most tiles there can be: n_qt of all sequences together, and one more sequence, of nobody's queries.
        pack: heads a tile, by default as many of those that share a KV head as fit."""
        pack = pack or max(n for n in range(1, min(self.gqa, block_m) + 1) if self.gqa % n == 0)
        n_groups = self.n_head // pack
        n_qt = min(self.n_q, self.n_q * pack // block_m + self.n_lists + 1)
        if self.part.most_rows <= block_m:  # a sequence has one
            n_qt = min(n_qt, self.n_lists)
        return Tiling(block_m, block_n, pack, n_groups, n_qt, n_qt * n_groups, -(-self.n_kv // block_n), 1, n_qt)
