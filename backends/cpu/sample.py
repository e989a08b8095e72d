"""SAMPLE."""

from __future__ import annotations

import math

import torch

from graphrt.backends.cpu.reference import reference
from graphrt.ops.sample import SampleParams
from graphrt.tensor import Tensor


@reference("SAMPLE", stored=("logits", "uniforms"))
def sample(node: Tensor, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Its sources as they are: a uniform number has 53 bits."""
    rows, numbers = logits.reshape(-1, logits.shape[-1]), uniforms.reshape(-1).tolist()
    chosen = [_drawn(row, u, node.params) for row, u in zip(rows, numbers)]
    return torch.tensor(chosen).reshape(node.shape)


def _drawn(logits: torch.Tensor, uniform: float, p: SampleParams) -> int:
    highest, ids = (x[: p.top_k] for x in torch.sort(logits, descending=True, stable=True))
    if not highest[0] > -math.inf:
        return int(ids[0])
    n = len(ids)
    if p.top_p < 1:
        below = torch.cumsum(_shares(highest), 0) < p.top_p
        n = min(max(int(below.sum()) + 1, p.min_keep), n)
    if p.min_p > 0:
        limit = highest[0] + torch.tensor(math.log(p.min_p), dtype=torch.float32)
        n = min(max(int((highest[:n] >= limit).sum()), p.min_keep, 1), n)
    # The highest is moved to 0 first, so that a tiny temp leaves it finite; infinity can't be moved.
    moved = highest[:n] if torch.isinf(highest[0]) else highest[:n] - highest[0]
    sums = torch.cumsum(_shares((moved.double() / p.temp).float()), 0)
    place = int((sums <= uniform * sums[-1]).sum())
    return int(ids[min(place, n - 1)])


def _shares(logits: torch.Tensor) -> torch.Tensor:
    """softmax in float64; +inf logits share everything. The first is the highest."""
    weights = (logits == logits[0]).double() if torch.isinf(logits[0]) else torch.exp(logits.double() - logits[0])
    return weights / weights.sum()
