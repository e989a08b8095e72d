"""The launches of planned MUL_MAT_IDs (products/plan.py), alone and with what fusions.py joins to them.

gemv.py: few pairs of token and expert. wgmma.py and gemm.py: more of them, sorted by expert (pairs.py). Nothing here
depends on what ids hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.elementwise import Operand, elementwise_launch
from graphrt.backends.triton.kernels.experts import hopper
from graphrt.backends.triton.kernels.experts.fusions import ExpertSum, expert_gate_up, expert_sum
from graphrt.backends.triton.kernels.experts.gather import gathered
from graphrt.backends.triton.kernels.experts.gemm import expert_gemm
from graphrt.backends.triton.kernels.experts.gemv import Experts, expert_gemv
from graphrt.backends.triton.kernels.experts.hopper import Matrices
from graphrt.backends.triton.kernels.experts.pairs import listed_tiles, sorted_pairs
from graphrt.backends.triton.kernels.experts.sums import lower_add_id, weighted_sum_launch
from graphrt.backends.triton.kernels.products.activations import Q8Rows, Rows, quantize_rows
from graphrt.backends.triton.kernels.products.emit import q8_scratch, with_whole_rows
from graphrt.backends.triton.kernels.products.forms import Form, q8_copy
from graphrt.backends.triton.kernels.products.fusions import Products
from graphrt.backends.triton.kernels.products.half import Activations, Gate, in_type
from graphrt.backends.triton.kernels.products.plan import Made, Part, plan_of
from graphrt.backends.triton.kernels.products.product import Product
from graphrt.backends.triton.packing import Packed, packing_of
from graphrt.fusion import Fusion
from graphrt.op import made_by
from graphrt.tensor import Tensor


def lower_mul_mat_id(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """MUL_MAT_ID."""
    (node,) = nodes
    (part,) = plan_of(ctx).of(node).parts
    return _part(part, node, ctx.view(node).data, ctx)


def lower_expert_gate_up(found: Products, ctx: Context) -> list[Step]:
    """The MUL_MAT_IDs of a gate and an up of one x, with their biases, and the GLU of both."""
    glu, parts = found.glu, plan_of(ctx).of(found.products[0].product).parts
    assert glu is not None
    p, out = glu.params, ctx.view(glu).data
    if len(parts) == 1:
        return _part(parts[0], glu, out, ctx, Gate(p.kind, p.alpha, p.limit))
    steps: list[Step] = []
    sums = [_scratch(f"{name} of experts", glu, ctx) for name in ("gate", "up")]
    converted: dict[Form, Activations] = {}
    for part, memory in zip(parts, sums):
        steps += _part(part, glu, memory, ctx, converted=converted)
    both = [Operand(memory, glu.ne, _strides(glu)) for memory in sums]
    return [*steps, elementwise_launch(p.kind, glu.ne, both[0], both[1], out, ctx.target, p.alpha, p.limit)]


def lower_expert_sum(found: ExpertSum, ctx: Context) -> list[Step]:
    """The sum of a token's experts' results times their weights, after the product that makes these if it is here."""
    weighted, total, summed = found
    factors, out = ctx.view(weighted["b"]), ctx.view(total).data
    if summed is None:
        x = ctx.view(weighted["a"])
        return [weighted_sum_launch(x.data, x.strides[1:3], factors, _lines(out, total), ctx)]
    product = summed.product
    (part,) = plan_of(ctx).of(product).parts
    if part.route.kernel.name == "expert_gemv":
        return _gemv(part, out, ctx, factors=factors)
    results = _scratch("results of experts", product, ctx)
    steps = _part(part, product, results, ctx)
    return [*steps, weighted_sum_launch(results, _strides(product)[1:3], factors, _lines(out, total), ctx)]


def _part(
    part: Part, like: Tensor, out: torch.Tensor, ctx: Context, gate: Gate | None = None,
    converted: dict[Form, Activations] | None = None,
) -> list[Step]:  # fmt: skip
    """A product, or both of a gate, to out, flat f32 as many as `like` has. converted: the activations as earlier
    products of them had them."""
    if part.route.kernel.name == "expert_gemv":
        return _gemv(part, out, ctx, gate)
    if part.route.kernel.name == "expert_wgmma":
        return _wgmma(part, _lines(out, like), ctx, gate)
    return _gemm(part, _lines(out, like), ctx, {} if converted is None else converted)


def _scratch(name: str, like: Tensor, ctx: Context) -> torch.Tensor:
    """Flat f32, as many elements as a tensor has."""
    return ctx.shared_scratch(name, 4 * like.n_elements)[: 4 * like.n_elements].view(torch.float32)


def _lines(data: torch.Tensor, like: Tensor) -> torch.Tensor:
    """Flat memory as rows of a tensor without gaps."""
    return data.view(-1, like.ne[0])


def _strides(t: Tensor) -> tuple[int, int, int, int]:
    """Strides in elements of a tensor of that shape without gaps."""
    n0, n1, n2, _ = t.ne
    return 1, n0, n0 * n1, n0 * n1 * n2


def _bias(product: Product, ctx: Context) -> torch.Tensor | None:
    """f32 [n_expert, m] with elements of a row side by side."""
    return None if product.bias is None else ctx.view(product.bias).torch()[0, 0]


def _ids(product: Product) -> Tensor:
    assert product.ids is not None
    return product.ids


def _gemv(
    part: Part, out: torch.Tensor, ctx: Context, gate: Gate | None = None, factors: View | None = None
) -> list[Step]:
    """One launch for a product, or for both of a gate, after the rounding of activations if that is a launch too."""
    steps: list[Step] = []
    experts: list[Experts] = []
    for product in part.products:
        weight: Packed | torch.Tensor
        if product.is_packed:
            weight, made = ctx.packed(product.weight)
            steps += made
        else:
            weight = ctx.view(product.weight).torch()[0]
        experts.append(Experts(weight, product.weight.ne[2], _bias(product, ctx)))
    x = part.products[0].x
    view = ctx.view(x)
    rows = Rows(view.data, x.n_rows, x.ne[0], view.strides[2] if x.ne[1] == 1 else x.ne[0])
    given: Rows | Q8Rows = rows
    if part.made is Made.IN_COPY:
        given = q8_copy(made_by(x), ctx)
    elif part.made is Made.BEFORE:
        given = q8_scratch(x, ctx)
        steps.append(quantize_rows(ctx.target, rows, given))
    ids = ctx.view(_ids(part.products[0]))
    return [*steps, expert_gemv(ctx.target, experts, given, ids, out, gate, factors)]


def _wgmma(part: Part, out: torch.Tensor, ctx: Context, gate: Gate | None = None) -> list[Step]:
    """One launch for a product, or for both of a gate: out, f32 [pairs, m]."""
    first = part.products[0]
    w, x = first.weight, first.x
    pairs, steps = sorted_pairs(_ids(first), w.ne[2], ctx)
    rows, gathering = gathered(ctx.view(x), pairs, ctx)
    matrices: list[Matrices] = []
    for product in part.products:
        packed, made = ctx.packed(product.weight)
        steps = [*steps, *made]
        matrices.append(Matrices(packed, _bias(product, ctx)))
    config = hopper.config_for(ctx.target, w.dtype.name, pairs)
    tiles, listing = listed_tiles(pairs, config.tokens, ctx)
    launch = hopper.launch(ctx.target, matrices, rows, pairs, tiles, x.ne[0], out, config, gate)
    return [*steps, *listing, gathering, launch]


def _gemm(part: Part, out: torch.Tensor, ctx: Context, converted: dict[Form, Activations]) -> list[Step]:
    """out, f32 [pairs, m], in 16 bits."""
    (product,), form, steps = part.products, part.route.form, list[Step]()
    w = product.weight
    if form not in converted:
        converted[form], steps = in_type(ctx.view(product.x).torch(), form.dtype, ctx)
    x = converted[form]
    pairs, sorting = sorted_pairs(_ids(product), w.ne[2], ctx)
    bias = _bias(product, ctx)
    steps = [*steps, *sorting]
    weight: Packed | View
    if packing_of(w.dtype.name) is not None:
        weight, more = ctx.packed(w)
    else:
        weight, more = with_whole_rows(w, ctx)
    return [*steps, *more, expert_gemm(ctx.target, weight, w.ne[2], x, pairs, out, bias)]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "MUL_MAT_ID": lower_mul_mat_id, "ADD_ID": lower_add_id,
}  # fmt: skip

EXPERT_GATE_UP = Fusion("expert_gate_up", expert_gate_up, lower_expert_gate_up)
EXPERT_SUM = Fusion("expert_sum", expert_sum, lower_expert_sum)
