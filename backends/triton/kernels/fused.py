"""Groups of fuse.py, and MUL_MAT by itself: nodes as few launches. They come without views, in fuse.py's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels import norm, rope
from graphrt.backends.triton.kernels.mul_mat.activations import Activations, norm_quantize
from graphrt.backends.triton.kernels.mul_mat.half import Gate
from graphrt.backends.triton.kernels.mul_mat.lower import product
from graphrt.backends.triton.kernels.mul_mat.rounded import can_round, rounded_product, rows_of
from graphrt.tensor import Tensor

Nodes = Sequence[Tensor]


def _source(node: Tensor, i: int) -> Tensor:
    found = node.src[i]
    assert found is not None
    return found


def _other(node: Tensor, source: Tensor) -> Tensor:
    """The source of a sum or product that is not `source`."""
    return _source(node, 1 if node.src[0] is source else 0)


def lower_mul_mat(nodes: Nodes, ctx: Context) -> list[Step]:
    """MUL_MAT, with the ADD of a residual if one follows."""
    node, out = nodes[0], nodes[-1]
    w, x = _source(node, 0), _source(node, 1)
    residual = _other(out, node) if out is not node else None
    if can_round([w], x, ctx):
        return rounded_product([w], x, [out], ctx, residual=residual)
    return product([w], x, [out], ctx, residual=residual)


def lower_projections(nodes: Nodes, ctx: Context) -> list[Step]:
    """MUL_MATs of one x, with the norm that makes x if it is in the group."""
    products = [n for n in nodes if n.op == "MUL_MAT"]
    weights, x = [_source(n, 0) for n in products], _source(products[0], 1)
    if can_round(weights, x, ctx):
        return rounded_product(weights, x, products, ctx, norm=_norm_in(nodes, ctx))
    return [step for n in products for step in lower_mul_mat([n], ctx)]


def lower_gate_up_glu(nodes: Nodes, ctx: Context) -> list[Step]:
    """Two MUL_MATs of one x and the GLU of both, with the norm that makes x if it is in the group."""
    *_, gate, up, out = nodes
    weights, x = [_source(gate, 0), _source(up, 0)], _source(gate, 1)
    if can_round(weights, x, ctx):
        return rounded_product(weights, x, [out], ctx, glu=out.params.kind, norm=_norm_in(nodes, ctx))
    return product(weights, x, [out], ctx, gate=Gate(out.params.kind))


def _norm_in(nodes: Nodes, ctx: Context):  # type: ignore[no-untyped-def]
    if nodes[0].op != "RMS_NORM":
        return None
    made, scaled = nodes[:2]
    return ctx.view(_source(made, 0)), ctx.view(_source(scaled, 1)), made.params.eps


def lower_norm_mul_rounded(nodes: Nodes, ctx: Context) -> list[Step]:
    """RMS_NORM and MUL whose result lies in its memory as products take it: rounded to 8 bits."""
    made, scaled = nodes
    if ctx.exact:
        return norm.lower_norm_mul(nodes, ctx)
    out = Activations.inside(ctx.view(scaled).data, scaled.n_rows, scaled.ne[0])
    ctx.rounded[scaled] = out
    weight = ctx.view(_source(scaled, 1)).data
    return [norm_quantize(ctx.target, rows_of(ctx.view(_source(made, 0))), weight, made.params.eps, out)]


LOWERINGS: dict[str, Callable[[Nodes, Context], list[Step]]] = {
    "projections": lower_projections, "gate_up_glu": lower_gate_up_glu, "matmul_add": lower_mul_mat,
    "norm_mul": norm.lower_norm_mul, "norm_mul_add": norm.lower_norm_mul_add, "rope_cache": rope.lower_rope_cache,
    "norm_mul_rounded": lower_norm_mul_rounded,
}  # fmt: skip
