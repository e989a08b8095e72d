"""ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER: over torch's process group, or of all ranks' parts where they are played."""

from __future__ import annotations

import torch

from graphrt.backends.cpu.reference import reference
from graphrt.ranks import current, in_order
from graphrt.tensor import Tensor

T = torch.Tensor
Other = torch.Tensor | None


@reference("ALL_REDUCE")
def all_reduce(
    node: Tensor, a: T, a1: Other = None, a2: Other = None, a3: Other = None, a4: Other = None, a5: Other = None,
    a6: Other = None, a7: Other = None,
) -> T:  # fmt: skip
    """Sums of f32 where the link carries a narrower type: decoded parts are as wide as the reference computes."""
    parts = [t for t in (a, a1, a2, a3, a4, a5, a6, a7) if t is not None]
    return in_order(parts) if len(parts) > 1 else current(node.params.ranks).summed(a)


@reference("ALL_GATHER")
def all_gather(
    node: Tensor, a: T, a1: Other = None, a2: Other = None, a3: Other = None, a4: Other = None, a5: Other = None,
    a6: Other = None, a7: Other = None,
) -> T:  # fmt: skip
    parts = [t for t in (a, a1, a2, a3, a4, a5, a6, a7) if t is not None]
    if len(parts) == 1:
        parts = current(node.params.ranks).gathered(a, node.params.sizes)
    return torch.cat(parts, dim=-1)


@reference("REDUCE_SCATTER")
def reduce_scatter(
    node: Tensor, a: T, a1: Other = None, a2: Other = None, a3: Other = None, a4: Other = None, a5: Other = None,
    a6: Other = None, a7: Other = None,
) -> T:  # fmt: skip
    p = node.params
    start = sum(p.sizes[: p.rank])
    return all_reduce(node, a, a1, a2, a3, a4, a5, a6, a7)[..., start : start + p.sizes[p.rank]]
