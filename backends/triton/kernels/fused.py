"""Groups of fuse.py, and MUL_MAT by itself: nodes as few launches. They come without views, in fuse.py's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from graphrt.backends.triton.context import Context, Step, source_of
from graphrt.backends.triton.kernels import elementwise, latent, norm, rope
from graphrt.backends.triton.kernels.experts import lower as experts
from graphrt.backends.triton.kernels.mul_mat.activations import (
    Activations,
    NormWeight,
    Rows,
    add_norm_quantize,
    norm_quantize,
)
from graphrt.backends.triton.kernels.mul_mat.gemv import MAX_TOKENS
from graphrt.backends.triton.kernels.mul_mat.half import Gate, Half
from graphrt.backends.triton.kernels.mul_mat.lower import (
    has_rows_of,
    head_products,
    product,
    takes_gemv,
    takes_head_gemv,
    takes_order,
)
from graphrt.backends.triton.nodes import added_to, is_bias
from graphrt.backends.triton.packing import packing_of
from graphrt.tensor import Tensor

Nodes = Sequence[Tensor]

MAX_F16 = 65504.0


def lower_mul_mat(nodes: Nodes, ctx: Context) -> list[Step]:
    """MUL_MATs of one x, after each the ADD of its bias if there is one; after a single one that of a residual too."""
    made = [n for n in nodes if n.op == "MUL_MAT"]
    w, x = made[0].sources()
    if len(nodes) == 1 and takes_head_gemv(w, x, ctx):
        return head_products(w, x, ctx.view(nodes[0]).torch()[0], ctx)
    outs, residual = list(made), None
    biases: list[Tensor | None] = [None] * len(made)
    for total in (n for n in nodes if n.op == "ADD"):
        i = next(i for i, out in enumerate(outs) if out in total.src)
        other = added_to(outs[i], total)
        if is_bias(other, total) and biases[i] is None:
            biases[i] = other
        else:
            residual = other
        outs[i] = total
    return product([source_of(n, 0) for n in made], x, outs, ctx, biases=biases, residual=residual)


def lower_gate_up_glu(nodes: Nodes, ctx: Context, rounded: bool = False) -> list[Step]:
    """Two MUL_MATs of one x and the GLU of both; rounded: which of many tokens lies in its memory in f16."""
    gate, up, out = nodes
    weights = [source_of(gate, 0), source_of(up, 0)]
    many = out.n_rows > MAX_TOKENS  # gemv.py rounds to 8 bits by itself
    return product(weights, source_of(gate, 1), [out], ctx, gate=Gate(out.params.kind), rounded=rounded and many)


def lower_norm_mul(nodes: Nodes, ctx: Context, rounded: bool = False) -> list[Step]:
    """RMS_NORM and MUL; rounded: the result lies in its memory as products take it."""
    made, scaled = nodes
    x, row = ctx.view(source_of(made, 0)), ctx.view(source_of(scaled, 1))
    if not (x.ne[2] == x.ne[3] == 1 or x.tensor.is_contiguous):
        return norm.lower_norm_mul(nodes, ctx)
    out = _outputs(scaled, ctx, rounded)
    if out.rounded is None:
        return norm.lower_norm_mul(nodes, ctx)
    n, k = scaled.n_rows, scaled.ne[0]
    rows = Rows(x.data, n, k, x.strides[1], x.strides[0])
    whole = None if out.whole is None else Rows(out.whole, n, k, k)
    return [norm_quantize(ctx.target, rows, row.data, made.params.eps, out.rounded, whole, out.ordered)]


def lower_add_norm(nodes: Nodes, ctx: Context, rounded: bool = False) -> list[Step]:
    """ADD, and RMS_NORM and MUL of the sum; before them RMS_NORM and MUL of one of ADD's sources, if there are five

    nodes. rounded: as lower_norm_mul."""
    *first, total, made, scaled = nodes
    block = first[1] if first else source_of(total, 0)
    before = _norm_weight(first[0], first[1], ctx) if first else None
    early = all(ctx.is_constant(source_of(n, 1)) for n in (*first[1:], scaled))
    x = source_of(first[0], 0) if first else block
    lines = [ctx.view(t).data.view(-1, t.ne[0]) for t in (x, added_to(block, total), total)]
    second, out = _norm_weight(made, scaled, ctx), _outputs(scaled, ctx, rounded)
    return [add_norm_quantize(
        ctx.target, lines[0], before, lines[1], lines[2], second, out.rounded, early, out.ordered, out.whole
    )]  # fmt: skip


def _norm_weight(made: Tensor, scaled: Tensor, ctx: Context) -> NormWeight:
    """RMS_NORM and MUL by a row."""
    return NormWeight(ctx.view(source_of(scaled, 1)).data, made.params.eps)


@dataclass(frozen=True, eq=False)
class _Outputs:
    """What a norm's launch writes: one of them or both. rounded: 8 bits, or f16, ordered (half.Half) or not; whole:

    flat f32."""

    rounded: Activations | torch.Tensor | None
    whole: torch.Tensor | None
    ordered: bool = False


def _outputs(scaled: Tensor, ctx: Context, rounded: bool) -> _Outputs:
    """A norm in its memory as products take it, which ctx.rounded then has, if nobody needs it otherwise; else in f32,

    and beside it in 8 bits if a product takes these, which ctx.beside then has."""
    k, n = scaled.ne[0], scaled.n_rows
    out = ctx.view(scaled).data
    if not rounded:
        if not any(_takes_8_bits(node, scaled, ctx) for node in ctx.products.get(scaled, ())):
            return _Outputs(None, out)
        ctx.beside[scaled] = found = Activations.empty(n, k, ctx.target.device)
        return _Outputs(found, out)
    if n <= MAX_TOKENS:
        ctx.rounded[scaled] = found = Activations.inside(out, n, k)
        return _Outputs(found, None)
    weights = source_of(scaled, 1)
    if not _stays_in_f16(ctx.view(weights).data, k, weights, ctx):
        return _Outputs(None, out)
    half = out.view(torch.float16)[: n * k].view(n, k)
    matrices = [source_of(node, 0) for node in ctx.products[scaled]]
    ordered = half.data_ptr() % 16 == 0 and all(takes_order(w, n, ctx) for w in matrices)
    ctx.rounded[scaled] = Half(half, None, ordered)
    return _Outputs(half, None, ordered)


def _takes_8_bits(node: Tensor, x: Tensor, ctx: Context) -> bool:
    """A product of x, or of a view with the same rows, that wants it rounded to 8 bits."""
    w, seen = source_of(node, 0), source_of(node, 1)
    if packing_of(w.dtype.name) is None or not has_rows_of(seen, x):
        return False
    return takes_gemv(w, seen, ctx) if node.op == "MUL_MAT" else experts.takes_gemv(node, ctx)


def _stays_in_f16(weights: torch.Tensor, k: int, leaf: Tensor, ctx: Context) -> bool:
    """No norm times these weights can be over f16's largest number: a norm's elements are at most sqrt(k)."""
    return ctx.is_constant(leaf) and float(weights[:k].abs().max()) * math.sqrt(k) < MAX_F16


LOWERINGS: dict[str, Callable[[Nodes, Context], list[Step]]] = {
    "projections": lower_mul_mat, "gate_up_glu": lower_gate_up_glu,
    "gate_up_glu_rounded": partial(lower_gate_up_glu, rounded=True), "matmul_add": lower_mul_mat,
    **norm.FUSED, **elementwise.FUSED, "norm_mul": lower_norm_mul,
    "norm_mul_rounded": partial(lower_norm_mul, rounded=True), "add_norm": lower_add_norm,
    "add_norm_rounded": partial(lower_add_norm, rounded=True), "norm_mul_add_norm": lower_add_norm,
    "norm_mul_add_norm_rounded": partial(lower_add_norm, rounded=True), "rope_cache": rope.lower_rope_cache,
    "norm_rope_cache": rope.lower_rope_cache, **experts.FUSED, **latent.FUSED,
}  # fmt: skip
