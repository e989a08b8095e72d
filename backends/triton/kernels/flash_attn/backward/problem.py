"""What the gradients of one attention are given, read off their nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphrt.backend import Place
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, operand
from graphrt.judge import precision
from graphrt.ops.flash_attn_back import PARTS
from graphrt.ops.score import built_in
from graphrt.tensor import Tensor

#: torch's types of what is multiplied, by what a node may compute in.
KINDS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


class BackProblem(Problem):
    """FLASH_ATTN_BACK, or FLASH_ATTN_VARLEN_BACK, of one or several sources of one attention.

    of: the nodes by their source, in the order of PARTS. q_t, k_t, v_t, mask_t, sinks_t, bias_t, out_t, d_out_t, lse_t,
    d_lse_t: what they read, None for what is absent. q_starts, k_starts: of packed sequences, else None; then n_q and
    n_kv are the queries and keys of all, n_seq counts sequences, and strides of a sequence are 0. kind: "f16", "bf16"
    or "f32", what products may be computed in, which the types of k and v decide.
    """

    v_t: Tensor  # there is no gradient without it

    def __init__(self, nodes: Sequence[Tensor], place: Callable[[Tensor], Place]) -> None:
        by_source = {node.params.of: node for node in nodes}
        self.of: Mapping[str, Tensor] = {name: by_source[name] for name in PARTS if name in by_source}
        self.nodes = list(self.of.values())
        self.out = self.lse = None
        node = self.nodes[0]
        named: Mapping[str, Any] = node.sources_by_name()
        self.q_t, self.k_t, self.v_t = node["q"], node["k"], node["v"]
        self.mask_t, self.bias_t, self.sinks_t = named.get("mask"), named.get("attn_bias"), named.get("sinks")
        self.out_t, self.d_out_t, self.lse_t, self.d_lse_t = node["out"], node["d_out"], node["lse"], named.get("d_lse")
        self.q_starts, self.k_starts = named.get("q_starts"), named.get("k_starts")
        self.params = built_in(node.params.attn)
        self.place = place
        self.k, self.v = operand(self.k_t, place(self.k_t)), operand(self.v_t, place(self.v_t))
        self.kind = precision(node)
        self.n_q, self.n_kv, self.n_head = self.q_t.ne[1], self.k_t.ne[1], self.q_t.ne[2]
        self.n_seq = self.q_starts.ne[0] - 1 if self.q_starts is not None else self.q_t.ne[3]
        self.gqa = self.n_head // self.k_t.ne[2]
        self.m2, self.m3 = self.mask_t.ne[2:] if self.mask_t is not None else (1, 1)
        self.b2, self.b3 = self.bias_t.ne[2:] if self.bias_t is not None else (1, 1)

    @property
    def is_packed(self) -> bool:
        return self.q_starts is not None

    @property
    def n_batch(self) -> int:
        """Sequences that lie apart: 1 of packed ones."""
        return self.q_t.ne[3]

    @property
    def n_rows(self) -> int:
        """Of the softmax: heads times queries of all sequences."""
        return self.n_head * self.n_q * self.n_batch

    @property
    def d(self) -> tuple[int, int]:
        """D_k and D_v."""
        return self.k_t.ne[0], self.v_t.ne[0]

    @property
    def dropout_p(self) -> float:
        return float(getattr(self.params, "dropout_p", 0.0))  # packed sequences have none

    def strides(self, t: Tensor) -> tuple[int, int, int, int]:
        """In elements."""
        nb0, nb1, nb2, nb3 = (n // t.dtype.type_size for n in t.nb)
        return nb0, nb1, nb2, nb3

    def f32(self, t: Tensor) -> torch.Tensor:
        return self.memory(t, torch.float32)
