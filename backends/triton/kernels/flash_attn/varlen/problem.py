"""What one varlen attention is given, read off its nodes, and the most tiles that it can have."""

from __future__ import annotations

from collections.abc import Callable

from graphrt.backend import Place
from graphrt.backends.triton.kernels.flash_attn.fusions import Attention
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling, operand
from graphrt.ops.flash_attn_varlen import longest
from graphrt.tensor import Tensor


class VarlenProblem(Problem):
    """FLASH_ATTN_VARLEN, FLASH_ATTN_VARLEN_LSE, or both of the same sources, as a Problem without a mask.

    n_q: tokens of all sequences; n_kv: the most keys of one; page: tokens of a page, 0 for packed keys; kv: lengths, or
    starts of packed keys. Strides of k and v: between keys, heads and pages.
    """

    def __init__(self, attention: Attention, place: Callable[[Tensor], Place]) -> None:
        self.nodes, self.out, self.lse = attention.nodes, attention.out, attention.lse
        node = self.nodes[0]
        q, k = node["q"], node["k"]
        v = self.out["v"] if self.out is not None else None
        self.q_t, self.k_t, self.v_t, self.mask_t, self.sinks_t = q, k, v, None, node["sinks"]
        self.params = node.params
        self.place = place
        self.k = operand(k, place(k))
        self.v = operand(v, place(v)) if v is not None else self.k
        self.n_kv, self.n_q, self.n_head, self.n_seq = longest(node), q.ne[1], q.ne[2], node["q_starts"].ne[0] - 1
        self.gqa = q.ne[2] // k.ne[2]
        self.m2 = self.m3 = 1
        self.q_starts, self.table_t = node["q_starts"], node["block_table"]
        lengths, k_starts = node["lengths"], node["k_starts"]
        kv = lengths if lengths is not None else k_starts
        assert kv is not None
        self.kv, self.page = kv, k.ne[1] if lengths is not None else 0

    @property
    def mean_queries(self) -> int:
        """Queries of a sequence if all have equally many: what configurations are chosen by."""
        return -(-self.n_q // self.n_seq)

    def tiling(self, block_m: int, block_n: int, pack: int | None = None) -> Tiling:
        """The most tiles there can be: n_qt of all sequences together, and one more sequence, of nobody's queries.
        pack: heads a tile, by default as many of those that share a KV head as fit."""
        pack = pack or max(n for n in range(1, min(self.gqa, block_m) + 1) if self.gqa % n == 0)
        n_groups = self.n_head // pack
        n_qt = min(self.n_q, self.n_q * pack // block_m + self.n_seq + 1)
        return Tiling(block_m, block_n, pack, n_groups, n_qt, n_qt * n_groups, -(-self.n_kv // block_n), 1, n_qt)
