"""MUL_MAT_ID, alone and with what fuse.py joins to it: which way it takes, and its steps.

gemv.py: few pairs of token and expert; packed weights times activations rounded to 8 bits (never if results are to be
exact), plain ones unrounded. wgmma.py: more of them times most packed types, in 16 bits, on Hopper; gemm.py: all else,
in 16 bits; both take the pairs sorted by expert (pairs.py). Types that are not packed are dequantized before, some
experts at a time. Nothing here depends on what ids hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from graphrt.backends.triton.accesses import Call
from graphrt.backends.triton.context import Context, Step, View, source_of
from graphrt.backends.triton.kernels.dequantize_rare import RARE_TYPES, dequantize_rare
from graphrt.backends.triton.kernels.elementwise import Operand, elementwise_launch
from graphrt.backends.triton.kernels.experts import hopper
from graphrt.backends.triton.kernels.experts.gather import gathered
from graphrt.backends.triton.kernels.experts.gemm import expert_gemm
from graphrt.backends.triton.kernels.experts.gemv import Experts, expert_gemv
from graphrt.backends.triton.kernels.experts.hopper import Matrices
from graphrt.backends.triton.kernels.experts.pairs import listed_tiles, sorted_pairs
from graphrt.backends.triton.kernels.experts.route import lower_expert_routing
from graphrt.backends.triton.kernels.experts.sums import lower_add_id, weighted_sum_launch
from graphrt.backends.triton.kernels.mul_mat import dense
from graphrt.backends.triton.kernels.mul_mat.activations import Activations, Rows, quantize_rows
from graphrt.backends.triton.kernels.mul_mat.half import Gate, Half, as_half
from graphrt.backends.triton.kernels.mul_mat.lower import PLAIN, Exactness, half_type, rounded_before, with_whole_rows
from graphrt.backends.triton.kernels.rows import block_rows
from graphrt.backends.triton.packing import Packed, packing_of
from graphrt.tensor import Tensor

#: gemv.py reads an expert's weights once for each pair, gemm.py once for all: up to so many pairs the former is taken.
#: Measured on an H100: at 64 to 96 pairs it takes a third of the other's time, at 256 it would take twice as long.
MAX_PAIRS = 128


@dataclass(frozen=True, eq=False)
class Product:
    """A MUL_MAT_ID, and the ADD_ID of the same ids after it, if one belongs to it."""

    node: Tensor
    bias: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        return source_of(self.node, 0)

    @property
    def x(self) -> Tensor:
        return source_of(self.node, 1)

    @property
    def ids(self) -> Tensor:
        return source_of(self.node, 2)


def _products(nodes: Sequence[Tensor]) -> list[Product]:
    """The products among some nodes, with their biases."""
    biases = {node.src[0]: node.src[1] for node in nodes if node.op == "ADD_ID"}
    return [Product(node, biases.get(node)) for node in nodes if node.op == "MUL_MAT_ID"]


def takes_gemv(node: Tensor, ctx: Exactness) -> bool:
    """Whether a MUL_MAT_ID takes gemv.py: few pairs; plain weights, or packed ones unless exact."""
    w, x, ids = node.sources()
    evenly = x.has_contiguous_rows and (x.is_contiguous or x.ne[1] == 1)
    if ids.n_elements > MAX_PAIRS or not evenly:
        return False
    if w.dtype.name in PLAIN:
        return w.has_contiguous_rows
    return packing_of(w.dtype.name) is not None and not ctx.exact


def lower_mul_mat_id(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """MUL_MAT_ID, with the ADD_ID after it if there is one."""
    (product,), out = _products(nodes), nodes[-1]
    if takes_gemv(product.node, ctx):
        return _gemv([product], ctx.view(out).data, ctx)
    return _gemm(product, _lines(ctx.view(out).data, out), ctx)


def lower_expert_gate_up(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """The MUL_MAT_IDs of a gate and an up of one x, with their biases, and last the GLU of both."""
    glu, products = nodes[-1], _products(nodes)
    p, out = glu.params, ctx.view(glu).data
    gate = Gate(p.kind, p.alpha, p.limit)
    few = all(takes_gemv(product.node, ctx) for product in products)
    kinds = {product.weight.dtype.name for product in products}
    if few and len({packing_of(kind) is None for kind in kinds}) == 1:
        return _gemv(products, out, ctx, gate)
    if not few and len(kinds) == 1 and p.kind in hopper.GATES and takes_wgmma(products[0], ctx):
        return _wgmma(products, _lines(out, glu), ctx, gate)
    steps: list[Step] = []
    sums = [_scratch(f"{name} of experts", glu, ctx) for name in ("gate", "up")]
    halves: dict[torch.dtype, Half] = {}
    for product, found in zip(products, sums):
        steps += _gemv([product], found, ctx) if few else _gemm(product, _lines(found, glu), ctx, halves)
    both = [Operand(found, glu.ne, _strides(glu)) for found in sums]
    return [*steps, elementwise_launch(p.kind, glu.ne, both[0], both[1], out, ctx.target, p.alpha, p.limit)]


def lower_expert_sum(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """The sum of a token's experts' results times their weights: MUL and ADDs, after MUL_MAT_ID and ADD_ID, if there

    are any in the group. The last node is the last ADD."""
    total, weighted = nodes[-1], next(n for n in nodes if n.op == "MUL")
    factors, out = ctx.view(source_of(weighted, 1)), ctx.view(total).data
    products = _products(nodes)
    if not products:
        x = ctx.view(source_of(weighted, 0))
        return [weighted_sum_launch(x.data, x.strides[1:3], factors, _lines(out, total), ctx)]
    (product,) = products
    if takes_gemv(product.node, ctx):
        return _gemv([product], out, ctx, factors=factors)
    results = _scratch("results of experts", product.node, ctx)
    steps = _gemm(product, _lines(results, product.node), ctx)
    return [*steps, weighted_sum_launch(results, _strides(product.node)[1:3], factors, _lines(out, total), ctx)]


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


def _gemv(
    products: Sequence[Product], out: torch.Tensor, ctx: Context, gate: Gate | None = None, factors: View | None = None
) -> list[Step]:
    """One launch for a product, or for both of a gate, after the rounding of activations to 8 bits if they need it and

    what made them has not done it."""
    steps: list[Step] = []
    experts: list[Experts] = []
    packed = packing_of(products[0].weight.dtype.name) is not None
    for product in products:
        weight: Packed | torch.Tensor
        if packed:
            weight, made = ctx.packed(product.weight)
            steps += made
        else:
            weight = ctx.view(product.weight).torch()[0]
        experts.append(Experts(weight, product.weight.ne[2], _bias(product, ctx)))
    x = products[0].x
    view = ctx.view(x)
    rows = Rows(view.data, x.n_rows, x.ne[0], view.strides[2] if x.ne[1] == 1 else x.ne[0])
    given: Rows | Activations = rows
    before = rounded_before(x, ctx) if packed else None
    if before is not None:
        given = before
    elif packed:
        memory = ctx.shared_scratch("activations in 8 bits", Activations.nbytes(rows.n, rows.k))
        given = Activations.inside(memory, rows.n, rows.k)
        steps.append(quantize_rows(ctx.target, rows, given))
    return [*steps, expert_gemv(ctx.target, experts, given, ctx.view(products[0].ids), out, gate, factors)]


def takes_wgmma(product: Product, ctx: Context) -> bool:
    """Whether a product of many pairs takes wgmma.py."""
    w = product.weight
    return hopper.takes(ctx.target, w.dtype.name, w.ne[0]) and product.x.dtype.name in ("f32", "f16")


def _wgmma(products: Sequence[Product], out: torch.Tensor, ctx: Context, gate: Gate | None = None) -> list[Step]:
    """One launch for a product, or for both of a gate: out, f32 [pairs, m]."""
    w, x = products[0].weight, products[0].x
    pairs, steps = sorted_pairs(products[0].ids, w.ne[2], ctx)
    rows, gathering = gathered(ctx.view(x), pairs, ctx)
    matrices: list[Matrices] = []
    for product in products:
        packed, made = ctx.packed(product.weight)
        steps = [*steps, *made]
        matrices.append(Matrices(packed, _bias(product, ctx)))
    config = hopper.config_for(ctx.target, w.dtype.name, pairs)
    tiles, listing = listed_tiles(pairs, config.tokens, ctx)
    launch = hopper.launch(ctx.target, matrices, rows, pairs, tiles, x.ne[0], out, config, gate)
    return [*steps, *listing, gathering, launch]


def _gemm(
    product: Product, out: torch.Tensor, ctx: Context, halves: dict[torch.dtype, Half] | None = None
) -> list[Step]:
    """out, f32 [pairs, m], in 16 bits. halves: the activations as earlier products of them had them, by type."""
    w = product.weight
    if takes_wgmma(product, ctx):
        return _wgmma([product], out, ctx)
    steps: list[Step] = []
    kind, halves = half_type(w), {} if halves is None else halves
    if kind not in halves:
        halves[kind], steps = as_half(ctx.view(product.x).torch(), kind, ctx)
    x = halves[kind]
    pairs, sorting = sorted_pairs(product.ids, w.ne[2], ctx)
    bias = _bias(product, ctx)
    steps = [*steps, *sorting]
    if w.dtype.name in RARE_TYPES:
        return steps + _rare(product, x, out, ctx, bias)
    weight: Packed | View
    if packing_of(w.dtype.name) is not None:
        weight, more = ctx.packed(w)
    else:
        weight, more = with_whole_rows(w, ctx)
    return [*steps, *more, expert_gemm(ctx.target, weight, w.ne[2], x, pairs, out, bias)]


def _rare(product: Product, x: Half, out: torch.Tensor, ctx: Context, bias: torch.Tensor | None) -> list[Step]:
    """Types that aren't packed: some experts at a time as f16 in scratch, all of them, whichever ids ask for."""
    w = product.weight
    k, m, n_expert, _ = w.ne
    blocks, kind = block_rows(ctx.view(w))[0], w.dtype.name
    step = max(1, dense.SCRATCH // (2 * k * m))
    pairs, _ = sorted_pairs(product.ids, n_expert, ctx)
    steps: list[Step] = []

    def values(part: torch.Tensor, memory: torch.Tensor) -> Step:
        decode = partial(dequantize_rare, part.flatten(0, 1), kind, memory)
        return Call("dequantize_rare", decode, [part], [memory])

    for first in range(0, n_expert, step):
        held = range(first, min(first + step, n_expert))
        nbytes = 2 * k * m * len(held)
        memory = ctx.shared_scratch("weights in f16", nbytes)[:nbytes].view(torch.float16)
        like = Tensor("f16", (k, m, len(held)))
        weight = View(like, memory, _strides(like))
        steps += [values(blocks[held.start : held.stop], memory.view(-1, k))]
        steps += [expert_gemm(ctx.target, weight, n_expert, x, pairs, out, bias, held)]
    return steps


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "MUL_MAT_ID": lower_mul_mat_id, "ADD_ID": lower_add_id,
}  # fmt: skip
#: Groups of fuse.py by their names.
FUSED: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "expert_routing": lower_expert_routing, "expert_gate_up": lower_expert_gate_up,
    "expert_down": lower_expert_sum, "expert_sum": lower_expert_sum,
}  # fmt: skip
