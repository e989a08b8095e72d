"""The launches of planned OUT_PRODs: activations times a matrix that is not transposed, as gradients of MUL_MAT are.

result[k, token] = the sum over rows r of a[k, r] * b[token, r]. For the gradient of activations a is the weight: it is
dequantized to scratch in each run, as gemm_large.py has it, slice by slice of its rows, whose products are added up in
order. For that of plain weights a is the activations: both are f32, and multiplied as such, by skinny.py where one
side is short.
"""

from __future__ import annotations

from functools import partial

import torch

from graphrt.backends.triton.accesses import Call
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.dequantize import dequantize
from graphrt.backends.triton.kernels.products import gemm_large
from graphrt.backends.triton.kernels.products.forms import Form
from graphrt.backends.triton.kernels.products.half import Sums, finish_steps, in_type
from graphrt.backends.triton.kernels.products.plan import Planned
from graphrt.backends.triton.kernels.products.product import Product
from graphrt.backends.triton.kernels.products.skinny import skinny_steps
from graphrt.backends.triton.packing import Packed


def transposed_product(planned: Planned, ctx: Context) -> list[Step]:
    """The steps of an OUT_PROD."""
    (part,) = planned.parts
    (p,) = part.products
    out = ctx.view(planned.group.outs[0])
    x = ctx.view(p.x).torch().transpose(2, 3)  # [b3, b2, tokens, rows]
    residual = planned.group.residual
    if part.route.kernel.name == "gemm_skinny_back":
        y = None if residual is None else ctx.view(residual).torch()[0, 0]
        return skinny_steps(x[0, 0], ctx.view(p.weight).torch()[0, 0], out.torch()[0, 0], ctx, y)
    assert residual is None, "out_prod_add() finds those of skinny.py"
    if part.route.form is Form.F32:
        return _in_f32(p, x, out.torch(), ctx)
    given, steps = in_type(x, part.route.form.dtype, ctx)
    b, lines = p.broadcast, out.data.view(-1, out.ne[0])
    values, sums = given.values.view(b.count, b.tokens, -1), lines.view(b.count, b.tokens, -1)
    packed, packing = ctx.packed(p.weight) if p.is_packed else (None, [])
    steps = [*steps, *packing]
    for i in range(b.count):
        matrix = i // b.matrices2 // b.ratio3 * b.matrices2 + i % b.matrices2
        if packed is not None:
            m = p.weight.ne[1]
            steps += _packed_steps(packed.part(matrix * m, (matrix + 1) * m), values[i], sums[i], ctx)
        else:
            w = ctx.view(p.weight).torch()[divmod(matrix, p.weight.ne[2])]
            steps.append(gemm_large.multiply_as_step(given.values.dtype, values[i], w.t(), sums[i]))
    return steps + finish_steps(Sums(lines[None], given.factors), lines)


def _packed_steps(packed: Packed, x: torch.Tensor, out: torch.Tensor, ctx: Context) -> list[Step]:
    """x, f16 [n, m], times a packed matrix of m rows, to out, f32 [n, k]."""
    steps: list[Step] = []
    for a, b in gemm_large.slices(packed.rows, packed.k):
        w = gemm_large.scratch(b - a, packed.k, ctx)
        steps.append(dequantize(packed.part(a, b), w))
        if a == 0:
            steps.append(gemm_large.multiply_step(x[:, a:b], w.t(), out))
            continue
        more = ctx.shared_scratch("sums of a slice", 4 * out.numel())[: 4 * out.numel()].view(torch.float32)
        more = more.view(out.shape)
        steps += [gemm_large.multiply_step(x[:, a:b], w.t(), more), Call("add", partial(out.add_, more), [more], [out])]
    return steps


def _in_f32(p: Product, x: torch.Tensor, out: torch.Tensor, ctx: Context) -> list[Step]:
    """x, f32 [b3, b2, tokens, m] of any strides, times a, [a3, a2, m, k] of any strides, to out, [b3, b2, tokens, k]:
    consecutive matrices of x share one of a."""
    a = ctx.view(p.weight).torch()
    return [Call("multiply_transposed", partial(_multiply, x, a, out), [x, a], [out])]


def _multiply(x: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
    ratio3, ratio2 = x.shape[0] // a.shape[0], x.shape[1] // a.shape[1]
    for i3 in range(x.shape[0]):
        of_a = a[i3 // ratio3].to(x.dtype)
        if x.shape[1] == 1:
            torch.mm(x[i3, 0], of_a[0], out=out[i3, 0])
        elif ratio2 == 1:
            torch.bmm(x[i3], of_a, out=out[i3])
        else:
            for i2 in range(a.shape[1]):
                sharing = slice(i2 * ratio2, (i2 + 1) * ratio2)
                torch.bmm(x[i3, sharing], of_a[i2].expand(ratio2, -1, -1), out=out[i3, sharing])
