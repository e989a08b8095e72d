"""A varlen attention as several: sequences with few query rows apart from those with many, shared keys apart from own.

Each part has its list of tiles and the kernel that suits it. Those of few and of many rows write other rows of one
result; shared and own keys give two results of all rows, which prefix.py joins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.kernel import Scratch
from graphrt.backends.triton.kernels.flash_attn.varlen.plan import VarlenPlans
from graphrt.backends.triton.kernels.flash_attn.varlen.prefix import join_prefix
from graphrt.backends.triton.kernels.flash_attn.varlen.problem import OWN, SHARED, Part, VarlenProblem
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.tensor import Tensor

#: Elements of a result that a program of join_prefix has.
JOINED = 2048


@dataclass(frozen=True)
class Cascade:
    """Results of the two kinds of keys: own is what the nodes ask for, shared lies in scratch."""

    own: VarlenProblem
    shared: VarlenProblem

    def join(self, target: Target) -> Step:
        """The launch that makes one of them."""
        p, q = self.own, self.shared
        assert p.out is not None and p.lse is not None and q.out is not None and q.lse is not None
        width = 1 << (p.v.d - 1).bit_length()
        n_rows, rows = p.n_q * p.n_head, max(1, JOINED // width)
        args = {
            "p_out": p.memory(p.out, torch.float32), "p_lse": p.memory(p.lse, torch.float32),
            "p_shared": q.memory(q.out, torch.float32), "p_shared_lse": q.memory(q.lse, torch.float32),
            "n_rows": n_rows, "D": p.v.d, "WIDTH": width, "ROWS": rows, "PDL": target.has_pdl,
        }  # fmt: skip
        return Launch(join_prefix, (-(-n_rows // rows),), args, launch_options(target, 4))


def cascade(p: VarlenProblem, scratch: Scratch, plans: VarlenPlans) -> Cascade | None:
    """The two parts of a problem whose sequences share pages; None where it is done in one: without groups, where what
    a row sees of shared keys depends on its position (windows, ALiBi, score functions), and where there is no result to
    be joined."""
    if p.prefixes is None or p.out is None or p.params.window or p.params.max_bias or p.params.score:
        return None
    n_rows, size = p.n_q * p.n_head, p.n_q * p.n_head * p.v.d
    memory = scratch.results(size + n_rows)
    lse = p.lse or Tensor("f32", (p.n_head, p.n_q))
    given: dict[Tensor, torch.Tensor] = {} if p.lse is not None else {lse: memory[size : size + n_rows]}
    own = p.with_part(Part(OWN), p.out, lse, given)
    results: dict[str, Any] = {"out": Tensor("f32", p.out.ne), "lse": Tensor("f32", (p.n_head, p.n_q))}
    shared = p.with_part(Part(SHARED), **results, given={
        results["out"]: memory[:size], results["lse"]: plans.prefix_lse(p, n_rows),
    })  # fmt: skip
    return Cascade(own, shared)


def by_rows(p: VarlenProblem, least: int) -> list[VarlenProblem]:
    """The parts of sequences with fewer query rows of a KV head than `least`, and of the others."""
    few = Part(p.part.keys, most_rows=least - 1)
    many = Part(p.part.keys, least_rows=least)
    return [p.with_part(part, p.out, p.lse, p.given) for part in (few, many)]
