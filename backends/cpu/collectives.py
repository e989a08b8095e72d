"""ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER: over torch's process group, or of all ranks' parts where they are played."""

from __future__ import annotations

import torch

from graphrt.backends.cpu.reference import reference
from graphrt.ranks import current, in_order
from graphrt.tensor import Tensor


@reference("ALL_REDUCE")
def all_reduce(node: Tensor, a: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """Sums of f32 where the link carries a narrower type: decoded parts are as wide as the reference computes."""
    parts = [a, *(t for t in others if t is not None)]
    return in_order(parts) if len(parts) > 1 else current(node.params.ranks).summed(a)


@reference("ALL_GATHER")
def all_gather(node: Tensor, a: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    parts = [a, *(t for t in others if t is not None)]
    if len(parts) == 1:
        parts = current(node.params.ranks).gathered(a, node.params.sizes)
    return torch.cat(parts, dim=-1)


@reference("REDUCE_SCATTER")
def reduce_scatter(node: Tensor, a: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    p = node.params
    start = sum(p.sizes[: p.rank])
    return all_reduce(node, a, *others)[..., start : start + p.sizes[p.rank]]
