"""A planned product in bands of tokens (ops/overlap.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.products import gemm_large
from graphrt.backends.triton.kernels.products.emit import Converted, product
from graphrt.backends.triton.kernels.products.half import Activations, Sums, finish_steps
from graphrt.backends.triton.kernels.products.plan import Planned
from graphrt.backends.triton.kernels.products.product import Product
from graphrt.ops.overlap import Band


def product_by_bands(planned: Planned, out: torch.Tensor, bands: Sequence[Band], ctx: Context) -> list[list[Step]]:
    """For each band the steps behind which its rows of out, [tokens, m], are there; those of the first make all that
    others need too. One product, without a residual. Where its kernel has no bands, the first ones make all."""
    (part,) = planned.parts
    (p,) = part.products
    if part.route.kernel.name != "gemm_large":
        return [product(planned, ctx), *([] for _ in bands[1:])]
    steps: list[Step] = []
    x = Converted(p, ctx).get(part.route.form, steps)
    multiply = _packed if p.is_packed else _plain
    made = multiply(p, x, out, bands, ctx)
    bias = None if p.bias is None else ctx.view(p.bias).data
    for (start, stop), of_band in zip(bands, made):
        factors, rows = None if x.factors is None else x.factors[start:stop], out[start:stop]
        of_band += finish_steps(Sums(rows[None], factors, factors is None and bias is None), rows, bias)
    return [steps + made[0], *made[1:]]


def _packed(p: Product, x: Activations, out: torch.Tensor, bands: Sequence[Band], ctx: Context) -> list[list[Step]]:
    packed, steps = ctx.packed(p.weight)
    made = gemm_large.packed_bands(packed, 0, p.weight.ne[1], x.values, out, bands, ctx)
    return [steps + made[0], *made[1:]]


def _plain(p: Product, x: Activations, out: torch.Tensor, bands: Sequence[Band], ctx: Context) -> list[list[Step]]:
    kind, matrix = x.values.dtype, ctx.view(p.weight).torch()[0, 0]
    return [[gemm_large.multiply_as_step(kind, x.values[a:b], matrix, out[a:b])] for a, b in bands]
