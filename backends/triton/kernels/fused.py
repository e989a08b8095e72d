"""Groups of fuse.py, and MUL_MAT by itself: nodes as few launches. They come without views, in fuse.py's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels import norm, rope
from graphrt.backends.triton.kernels.mul_mat.activations import Activations, Rows, norm_quantize
from graphrt.backends.triton.kernels.mul_mat.half import Gate
from graphrt.backends.triton.kernels.mul_mat.lower import product
from graphrt.tensor import Tensor

Nodes = Sequence[Tensor]


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
    """RMS_NORM and MUL whose result lies in its memory as products take it: rounded to 8 bits."""
    made, scaled = nodes
    x, weight = ctx.view(_source(made, 0)), ctx.view(_source(scaled, 1))
    if not x.tensor.is_contiguous:
        return norm.lower_norm_mul(nodes, ctx)
    k, n = scaled.ne[0], scaled.n_rows
    out = ctx.rounded[scaled] = Activations.inside(ctx.view(scaled).data, n, k)
    return [norm_quantize(ctx.target, Rows(x.data, n, k, k), weight.data, made.params.eps, out)]


LOWERINGS: dict[str, Callable[[Nodes, Context], list[Step]]] = {
    "projections": lower_projections, "gate_up_glu": lower_gate_up_glu, "matmul_add": lower_mul_mat,
    "norm_mul": norm.lower_norm_mul, "norm_mul_add": norm.lower_norm_mul_add, "rope_cache": rope.lower_rope_cache,
    "norm_mul_rounded": lower_norm_mul_rounded,
}  # fmt: skip
