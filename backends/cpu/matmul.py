"""MUL_MAT, MUL_MAT_ID, ADD_ID and ROPE."""

from __future__ import annotations

import math

import torch

from graphrt.backends.cpu.arithmetic import by_rows
from graphrt.backends.cpu.blocks import decode
from graphrt.backends.cpu.reference import reference
from graphrt.ops.rope import RopeParams, rope_frequencies
from graphrt.tensor import Tensor

#: A product's fewest rows and columns: the library multiplies fewer of them by other kernels, which add up otherwise.
LEAST = 16


def product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x times the transposed weights: [..., n, k] and [..., m, k] to [..., n, m]. A row's result does not depend on how
    many others there are, so that a sequence's tokens are the same bits whoever is read with it."""
    n, m = x.shape[-2], weights.shape[-2]
    x = torch.nn.functional.pad(x, (0, 0, 0, max(0, LEAST - n)))
    weights = torch.nn.functional.pad(weights, (0, 0, 0, max(0, LEAST - m)))
    found = torch.nn.functional.linear(x, weights) if weights.ndim == 2 else x @ weights.transpose(-1, -2)
    return found[..., :n, :m]


@reference("MUL_MAT")
def mul_mat(node: Tensor, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weights: [w3, w2, m, k], x: [x3, x2, n, k]; consecutive matrices of x share one of the weights."""
    for dim in (0, 1):
        if weights.shape[dim] not in (1, x.shape[dim]):
            weights = weights.repeat_interleave(x.shape[dim] // weights.shape[dim], dim)
    return product(x, weights[0, 0] if weights.shape[:2] == (1, 1) else weights)


@reference("MUL_MAT_ID", stored=("weights",))
def mul_mat_id(node: Tensor, weights: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """weights: [1, n_expert, m, k]; x: [1, n_tokens, 1 or n_used, k]; ids: [1, 1, n_tokens, n_used].

    Decodes only the experts that are used, one at a time: all of a model's together would fill memory many times over.
    """
    source = node["weights"]
    out = x.new_full(node.shape, math.nan)
    x = x.expand(-1, -1, node.ne[1], -1)
    for expert in sorted(set(ids.reshape(-1).tolist())):
        if 0 <= expert < source.ne[2]:
            chosen = ids[0] == expert
            out[chosen] = product(x[chosen], decode(weights[0, expert], source.dtype, x.dtype))
    return out


@reference("ADD_ID")
def add_id(node: Tensor, a: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """a: [1, n_tokens, n_used, n]; bias: [1, 1, n_expert, n]; ids: [1, 1, n_tokens, n_used]."""
    outside = (ids[0] < 0) | (ids[0] >= bias.shape[2])
    added = bias[0, 0, ids[0].masked_fill(outside, 0)].masked_fill(outside[..., None], math.nan)
    return a + added


@reference("ROPE")
def rope(node: Tensor, a: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """a: [n_seq, n_tokens, n_head, head_dim]."""
    return turn(node.params, a, positions, factors)


def turn(p: RopeParams, a: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Every pair of `a` turned by its position, which may be negative. Angles are taken in float64: positions run to
    many thousands."""
    divide_by = factors.reshape(-1).tolist() if factors is not None else None
    theta, magnitude = rope_frequencies(p, divide_by)
    angle = positions.reshape(-1, 1, 1).double() * torch.tensor(theta, dtype=torch.float64)
    cos, sin = ((by_rows(turn, angle) * magnitude).to(a.dtype) for turn in (torch.cos, torch.sin))
    out = a.clone()
    half = p.n_dims // 2
    first, second = (slice(0, p.n_dims, 2), slice(1, p.n_dims, 2)) if p.mode == "normal" else (
        slice(0, half), slice(half, p.n_dims)
    )  # fmt: skip
    x, y = a[..., first], a[..., second]
    out[..., first] = x * cos - y * sin
    out[..., second] = x * sin + y * cos
    return out
