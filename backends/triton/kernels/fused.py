"""Groups of fuse.py, and MUL_MAT by itself: nodes as few launches. They come without views, in fuse.py's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels import elementwise, latent, norm, rope
from graphrt.backends.triton.kernels.experts import lower as experts
from graphrt.backends.triton.kernels.products.activations import (
    NormWeight,
    Q8Rows,
    Rows,
    add_norm_quantize,
    norm_quantize,
)
from graphrt.backends.triton.kernels.products.emit import product
from graphrt.backends.triton.kernels.products.forms import Form, Stored, f16_in_place, q8_copy, q8_in_place
from graphrt.backends.triton.kernels.products.plan import plan_of
from graphrt.fusion import added_to
from graphrt.tensor import Tensor

Nodes = Sequence[Tensor]


def lower_mul_mat(nodes: Nodes, ctx: Context) -> list[Step]:
    """MUL_MATs of one x and what is added to them, or two and the GLU that joins them."""
    return product(plan_of(ctx).of(nodes), ctx)


def lower_norm_mul(nodes: Nodes, ctx: Context) -> list[Step]:
    """RMS_NORM and MUL, stored as planned."""
    made, scaled = nodes
    stored = plan_of(ctx).stored_as(scaled)
    if stored == Stored():
        return norm.lower_norm_mul(nodes, ctx)
    x, row = ctx.view(made["a"]), ctx.view(scaled["b"])
    n, k = scaled.n_rows, scaled.ne[0]
    rows = Rows(x.data, n, k, x.strides[1], x.strides[0])
    whole = Rows(ctx.view(scaled).data, n, k, k) if stored.form is Form.AS_IS else None
    ordered = stored.form is Form.F16_ORDERED
    return [norm_quantize(ctx.target, rows, row.data, made.params.eps, _rounded(scaled, ctx), whole, ordered)]


def lower_add_norm(nodes: Nodes, ctx: Context) -> list[Step]:
    """ADD, and RMS_NORM and MUL of the sum, stored as planned. If there are five nodes, RMS_NORM and MUL of one of
    ADD's sources come before."""
    *first, total, made, scaled = nodes
    block = first[1] if first else total["a"]
    before = _norm_weight(first[0], first[1], ctx) if first else None
    early = all(ctx.is_constant(n["b"]) for n in (*first[1:], scaled))
    x = first[0]["a"] if first else block
    lines = [ctx.view(t).data.view(-1, t.ne[0]) for t in (x, added_to(block, total), total)]
    form = plan_of(ctx).stored_as(scaled).form
    whole = ctx.view(scaled).data if form is Form.AS_IS else None
    return [add_norm_quantize(
        ctx.target, lines[0], before, lines[1], lines[2], _norm_weight(made, scaled, ctx), _rounded(scaled, ctx), early,
        form is Form.F16_ORDERED, whole,
    )]  # fmt: skip


def _norm_weight(made: Tensor, scaled: Tensor, ctx: Context) -> NormWeight:
    """RMS_NORM and MUL by a row."""
    return NormWeight(ctx.view(scaled["b"]).data, made.params.eps)


def _rounded(scaled: Tensor, ctx: Context) -> Q8Rows | torch.Tensor | None:
    """Where a norm's launch stores what it rounds: in the norm's own place, or a copy; None where it does not."""
    stored = plan_of(ctx).stored_as(scaled)
    if stored.form is Form.Q8:
        return q8_in_place(scaled, ctx)
    if stored.form is not Form.AS_IS:
        return f16_in_place(scaled, stored.form, ctx).values
    return q8_copy(scaled, ctx) if stored.q8_copy else None


LOWERINGS: dict[str, Callable[[Nodes, Context], list[Step]]] = {
    "projections": lower_mul_mat, "gate_up_glu": lower_mul_mat, "matmul_add": lower_mul_mat, **norm.FUSED,
    **elementwise.FUSED, "norm_mul": lower_norm_mul, "add_norm": lower_add_norm, "norm_mul_add_norm": lower_add_norm,
    "rope_cache": rope.lower_rope_cache, "norm_rope_cache": rope.lower_rope_cache, **experts.FUSED, **latent.FUSED,
}  # fmt: skip
