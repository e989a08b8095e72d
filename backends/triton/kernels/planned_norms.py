"""Norms whose readers are products: each is stored in the form that the plan says, in the launch that makes it."""

from __future__ import annotations

import torch

from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.collectives import joined_choice, parts_side_by_side
from graphrt.backends.triton.kernels.joined import join_launch
from graphrt.backends.triton.kernels.joined_fusions import JoinedSum, joined_add_norm, why_not_by_peers
from graphrt.backends.triton.kernels.norm import lower_scaled_norm
from graphrt.backends.triton.kernels.norm_fusions import NormOfSum, ScaledNorm, add_norm, norm_mul, norm_mul_add_norm
from graphrt.backends.triton.kernels.products.activations import (
    NormWeight,
    Q8Rows,
    Rows,
    add_norm_quantize,
    norm_quantize,
)
from graphrt.backends.triton.kernels.products.forms import Form, Stored, f16_in_place, q8_copy, q8_in_place
from graphrt.backends.triton.kernels.products.plan import plan_of
from graphrt.fusion import Fusion, added_to
from graphrt.peers import Peers
from graphrt.ranks import peers
from graphrt.tensor import Tensor


def lower_norm_mul(found: ScaledNorm, ctx: Context) -> list[Step]:
    """RMS_NORM and MUL, stored as planned; or these and ADD, which has no other forms."""
    norm, scaled, _ = found
    stored = plan_of(ctx).stored_as(scaled)
    if stored == Stored():
        return lower_scaled_norm(found, ctx)
    x, weight = ctx.view(norm["a"]), _norm_weight(found, ctx)
    n, k = scaled.n_rows, scaled.ne[0]
    rows = Rows(x.data, n, k, x.strides[1], x.strides[0])
    whole = Rows(ctx.view(scaled).data, n, k, k) if stored.form is Form.AS_IS else None
    ordered, early = stored.form is Form.F16_ORDERED, ctx.is_constant(scaled["b"])
    return [norm_quantize(ctx.target, rows, weight.row, weight.eps, _rounded(scaled, ctx), whole, ordered, early)]


def lower_add_norm(found: NormOfSum, ctx: Context) -> list[Step]:
    """ADD, and RMS_NORM and MUL of the sum, stored as planned; before these, of a norm after a block, RMS_NORM and MUL
    whose result is added."""
    total, after, before = found
    block = before.scaled if before is not None else total["a"]
    x = before.norm["a"] if before is not None else block
    scales = [norm.scaled["b"] for norm in (before, after) if norm is not None]
    early = all(ctx.is_constant(row) for row in scales)
    lines = [ctx.view(t).data.view(-1, t.ne[0]) for t in (x, added_to(block, total), total)]
    form = plan_of(ctx).stored_as(after.scaled).form
    whole = ctx.view(after.scaled).data if form is Form.AS_IS else None
    first = _norm_weight(before, ctx) if before is not None else None
    return [add_norm_quantize(
        ctx.target, lines[0], first, lines[1], lines[2], _norm_weight(after, ctx), _rounded(after.scaled, ctx), early,
        form is Form.F16_ORDERED, whole,
    )]  # fmt: skip


def lower_joined(found: JoinedSum, ctx: Context) -> list[Step]:
    """ALL_REDUCE, a norm of it if there is one, ADD, and RMS_NORM and MUL of that sum, stored as planned, if they
    follow: one launch where ranks share memory, or all parts are brought side by side before it."""
    node, total, after, before = found
    ranks = int(node.params.ranks)
    ctx.choices[node] = joined_choice(node)
    found_peers = peers(ranks) if why_not_by_peers(node) is None else None
    shared = found_peers if isinstance(found_peers, Peers) else None
    steps: list[Step] = []
    if shared is not None:
        x = ctx.view(node["a"]).data.view(-1, node.ne[0])
    else:
        x, steps = parts_side_by_side([ctx.view(t).torch() for t in node.sources()], ranks, ctx)
    block = before.scaled if before is not None else node
    summed, residual = (ctx.view(t).data.view(-1, t.ne[0]) for t in (total, added_to(block, total)))
    norms = [norm for norm in (before, after) if norm is not None]
    early = bool(norms) and all(ctx.is_constant(norm.scaled["b"]) for norm in norms)
    first, second = (_norm_weight(norm, ctx) if norm is not None else None for norm in (before, after))
    if after is None:
        return [*steps, join_launch(ctx.target, x, ranks, shared, summed, residual, first, early=early)]
    form = plan_of(ctx).stored_as(after.scaled).form
    whole = ctx.view(after.scaled).data if form is Form.AS_IS else None
    return [*steps, join_launch(
        ctx.target, x, ranks, shared, summed, residual, first, second, _rounded(after.scaled, ctx), early,
        form is Form.F16_ORDERED, whole,
    )]  # fmt: skip


def _norm_weight(found: ScaledNorm, ctx: Context) -> NormWeight:
    return NormWeight(ctx.view(found.scaled["b"]).data, found.norm.params.eps)


def _rounded(scaled: Tensor, ctx: Context) -> Q8Rows | torch.Tensor | None:
    """Where a norm's launch stores what it rounds: in the norm's own place, or a copy; None where it does not."""
    stored = plan_of(ctx).stored_as(scaled)
    if stored.form is Form.Q8:
        return q8_in_place(scaled, ctx)
    if stored.form is not Form.AS_IS:
        return f16_in_place(scaled, stored.form, ctx).values
    return q8_copy(scaled, ctx) if stored.q8_copy else None


JOINED = Fusion("joined_add_norm", joined_add_norm, lower_joined)
NORM_MUL = Fusion("norm_mul", norm_mul, lower_norm_mul)
ADD_NORM = Fusion("add_norm", add_norm, lower_add_norm)
NORM_MUL_ADD_NORM = Fusion("norm_mul_add_norm", norm_mul_add_norm, lower_add_norm)
