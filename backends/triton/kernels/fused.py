"""Groups of fuse.py, and MUL_MAT by itself: nodes as few launches. They come without views, in fuse.py's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels import norm, rope
from graphrt.backends.triton.kernels.mul_mat.activations import Activations, Rows, norm_quantize
from graphrt.backends.triton.kernels.mul_mat.gemv import MAX_TOKENS
from graphrt.backends.triton.kernels.mul_mat.half import Gate, Half
from graphrt.backends.triton.kernels.mul_mat.lower import product
from graphrt.tensor import Tensor

Nodes = Sequence[Tensor]

MAX_F16 = 65504.0


def _source(node: Tensor, i: int) -> Tensor:
    found = node.src[i]
    assert found is not None
    return found


def lower_mul_mat(nodes: Nodes, ctx: Context) -> list[Step]:
    """MUL_MAT, with the ADD of a residual if one follows."""
    node, out = nodes[0], nodes[-1]
    residual = _source(out, 1 if out.src[0] is node else 0) if out is not node else None
    return product([_source(node, 0)], _source(node, 1), [out], ctx, residual=residual)


def lower_projections(nodes: Nodes, ctx: Context) -> list[Step]:
    """MUL_MATs of one x."""
    return product([_source(n, 0) for n in nodes], _source(nodes[0], 1), nodes, ctx)


def lower_gate_up_glu(nodes: Nodes, ctx: Context) -> list[Step]:
    """Two MUL_MATs of one x and the GLU of both."""
    gate, up, out = nodes
    weights = [_source(gate, 0), _source(up, 0)]
    return product(weights, _source(gate, 1), [out], ctx, gate=Gate(out.params.kind))


def lower_norm_mul_rounded(nodes: Nodes, ctx: Context) -> list[Step]:
    """RMS_NORM and MUL whose result lies in its memory as products take it: in 8 bits, or f16 for many tokens."""
    made, scaled = nodes
    x, row = ctx.view(_source(made, 0)), ctx.view(_source(scaled, 1))
    if not (x.ne[2] == x.ne[3] == 1 or x.tensor.is_contiguous):
        return norm.lower_norm_mul(nodes, ctx)
    k, n = scaled.ne[0], scaled.n_rows
    out = ctx.view(scaled).data
    rounded: Activations | torch.Tensor
    if n <= MAX_TOKENS:
        ctx.rounded[scaled] = rounded = Activations.inside(out, n, k)
    elif _stays_in_f16(row.data, k, _source(scaled, 1), ctx):
        rounded = out.view(torch.float16)[: n * k].view(n, k)
        ctx.rounded[scaled] = Half(rounded)
    else:
        return norm.lower_norm_mul(nodes, ctx)
    rows = Rows(x.data, n, k, x.strides[1], x.strides[0])
    return [norm_quantize(ctx.target, rows, row.data, made.params.eps, rounded)]


def _stays_in_f16(weights: torch.Tensor, k: int, leaf: Tensor, ctx: Context) -> bool:
    """No norm times these weights can be over f16's largest number: a norm's elements are at most sqrt(k)."""
    return norm.is_constant(leaf, ctx) and float(weights[:k].abs().max()) * math.sqrt(k) < MAX_F16


LOWERINGS: dict[str, Callable[[Nodes, Context], list[Step]]] = {
    "projections": lower_projections, "gate_up_glu": lower_gate_up_glu, "matmul_add": lower_mul_mat,
    **norm.FUSED, "norm_mul_rounded": lower_norm_mul_rounded, "rope_cache": rope.lower_rope_cache,
}  # fmt: skip
