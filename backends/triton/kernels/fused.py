"""Groups of fuse.py, and MUL_MAT by itself: nodes as few launches. They come without views, in fuse.py's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from graphrt.backends.triton.context import Context, Step, source_of
from graphrt.backends.triton.kernels import elementwise, norm, rope
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
from graphrt.backends.triton.kernels.mul_mat.lower import head_products, product, takes_head_gemv, takes_order
from graphrt.backends.triton.nodes import added_to, is_bias
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


def lower_head_products(nodes: Nodes, ctx: Context) -> list[Step]:
    """MUL_MAT of a matrix a head, and the CONT that puts the heads' results side by side for each token."""
    node, out = nodes
    m, n, heads, _ = node.ne
    by_token = ctx.view(out).data.view(n, heads, m)
    return head_products(source_of(node, 0), source_of(node, 1), by_token.transpose(0, 1), ctx)


def lower_gate_up_glu(nodes: Nodes, ctx: Context, rounded: bool = False) -> list[Step]:
    """Two MUL_MATs of one x and the GLU of both; rounded: which of many tokens lies in its memory in f16."""
    gate, up, out = nodes
    weights = [source_of(gate, 0), source_of(up, 0)]
    many = out.n_rows > MAX_TOKENS  # gemv.py rounds to 8 bits by itself
    return product(weights, source_of(gate, 1), [out], ctx, gate=Gate(out.params.kind), rounded=rounded and many)


def lower_norm_mul_rounded(nodes: Nodes, ctx: Context) -> list[Step]:
    """RMS_NORM and MUL whose result lies in its memory as products take it: in 8 bits, or f16 for many tokens."""
    made, scaled = nodes
    x, row = ctx.view(source_of(made, 0)), ctx.view(source_of(scaled, 1))
    if not (x.ne[2] == x.ne[3] == 1 or x.tensor.is_contiguous):
        return norm.lower_norm_mul(nodes, ctx)
    rounded = _rounded_norm(scaled, ctx)
    if rounded is None:
        return norm.lower_norm_mul(nodes, ctx)
    rows = Rows(x.data, scaled.n_rows, scaled.ne[0], x.strides[1], x.strides[0])
    out, ordered = rounded
    return [norm_quantize(ctx.target, rows, row.data, made.params.eps, out, ordered=ordered)]


def lower_add_norm(nodes: Nodes, ctx: Context) -> list[Step]:
    """ADD, and RMS_NORM and MUL of the sum, which lie rounded in MUL's memory; before them RMS_NORM and MUL of one of

    ADD's sources, if there are five nodes."""
    *first, total, made, scaled = nodes
    rounded = _rounded_norm(scaled, ctx)
    if rounded is None:
        add = norm.lower_norm_mul_add if first else elementwise.LOWERINGS["ADD"]
        return add([*first, total], ctx) + norm.lower_norm_mul([made, scaled], ctx)
    block = first[1] if first else source_of(total, 0)
    residual = source_of(total, 1 if total.src[0] is block else 0)
    before = _norm_weight(first[0], first[1], ctx) if first else None
    early = all(norm.is_constant(source_of(n, 1), ctx) for n in (*first[1:], scaled))
    x = source_of(first[0], 0) if first else block
    lines = [ctx.view(t).data.view(-1, t.ne[0]) for t in (x, residual, total)]
    second = _norm_weight(made, scaled, ctx)
    out, ordered = rounded
    return [add_norm_quantize(ctx.target, lines[0], before, lines[1], lines[2], second, out, early, ordered)]


def _norm_weight(made: Tensor, scaled: Tensor, ctx: Context) -> NormWeight:
    """RMS_NORM and MUL by a row."""
    return NormWeight(ctx.view(source_of(scaled, 1)).data, made.params.eps)


def _rounded_norm(scaled: Tensor, ctx: Context) -> tuple[Activations | torch.Tensor, bool] | None:
    """A norm's memory as what products take, which ctx.rounded then has: 8 bits, or f16 for many tokens, and whether

    that is ordered (half.Half). None where f16 might not hold it."""
    k, n = scaled.ne[0], scaled.n_rows
    out = ctx.view(scaled).data
    if n <= MAX_TOKENS:
        ctx.rounded[scaled] = found = Activations.inside(out, n, k)
        return found, False
    weights = source_of(scaled, 1)
    if not _stays_in_f16(ctx.view(weights).data, k, weights, ctx):
        return None
    half = out.view(torch.float16)[: n * k].view(n, k)
    ordered = half.data_ptr() % 16 == 0 and all(takes_order(w, n, ctx) for w in ctx.weights[scaled])
    ctx.rounded[scaled] = Half(half, None, ordered)
    return half, ordered


def _stays_in_f16(weights: torch.Tensor, k: int, leaf: Tensor, ctx: Context) -> bool:
    """No norm times these weights can be over f16's largest number: a norm's elements are at most sqrt(k)."""
    return norm.is_constant(leaf, ctx) and float(weights[:k].abs().max()) * math.sqrt(k) < MAX_F16


LOWERINGS: dict[str, Callable[[Nodes, Context], list[Step]]] = {
    "projections": lower_mul_mat, "gate_up_glu": lower_gate_up_glu,
    "gate_up_glu_rounded": partial(lower_gate_up_glu, rounded=True), "matmul_add": lower_mul_mat,
    **norm.FUSED, **elementwise.FUSED, "norm_mul_rounded": lower_norm_mul_rounded, "norm_mul_add_norm": lower_add_norm,
    "add_norm": lower_add_norm, "rope_cache": rope.lower_rope_cache, "norm_rope_cache": rope.lower_rope_cache,
    "head_products": lower_head_products,
    **experts.FUSED,
}  # fmt: skip
