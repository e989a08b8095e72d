"""Groups and products planned and lowered by themselves, without a graph around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphrt.backend import Group, Region
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.products.emit import product
from graphrt.backends.triton.kernels.products.plan import Plan, Planned, plan_group, planned, with_addresses
from graphrt.backends.triton.kernels.products.product import of_matrices, products_of
from graphrt.backends.triton.kernels.products.route import Route, Setting, route_of
from graphrt.backends.triton.lowering import OPS
from graphrt.fusion import Fusion, fuse
from graphrt.graph import Graph
from graphrt.tensor import Tensor


def lowered(node: Tensor, ctx: Context) -> list[Any]:
    """The steps of a node by itself."""
    ctx.plan = planned([Group([node])], ctx)
    return list(OPS[node.op]([node], ctx))


def lowered_group(group: Group, ctx: Context) -> list[Any]:
    """The steps of a fused group."""
    ctx.plan = planned([group], ctx)
    return list(group.fusion.lower(group.captured, ctx))


def groups_in(graph: Graph, *fusions: Fusion) -> dict[str, Group]:
    """The groups that fusions find in a graph, by their kernels' names."""
    outputs = set(graph.outputs)
    found = fuse(Region(graph.nodes, lambda t: t in outputs), fusions)
    return {group.kernel: group for group in found if group.kernel}


def planned_products(weights: Sequence[Tensor], x: Tensor, outs: Sequence[Tensor], ctx: Context, **how: Any) -> Planned:
    """As of_matrices() takes them, x as it is."""
    return plan_group(with_addresses(of_matrices(weights, x, outs, **how), ctx), ctx, Plan())


def multiplied(weights: Sequence[Tensor], x: Tensor, outs: Sequence[Tensor], ctx: Context, **how: Any) -> list[Step]:
    """Their steps."""
    return product(planned_products(weights, x, outs, ctx, **how), ctx)


def routed(node: Tensor, setting: Setting) -> Route:
    """How a MUL_MAT or MUL_MAT_ID by itself is made."""
    group = products_of(Group([node]))
    assert group is not None
    return route_of(group.products[0], setting)
