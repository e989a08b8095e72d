"""Groups and products planned and lowered by themselves, without a graph around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphrt.backend import Group
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels import fused
from graphrt.backends.triton.kernels.products.emit import product
from graphrt.backends.triton.kernels.products.plan import Plan, Planned, plan_group, planned, with_addresses
from graphrt.backends.triton.kernels.products.product import of_matrices, products_in
from graphrt.backends.triton.kernels.products.route import Route, Setting, route_of
from graphrt.backends.triton.lowering import OPS
from graphrt.tensor import Tensor


def lowered(nodes: Sequence[Tensor], ctx: Context, fusion: str = "") -> list[Any]:
    """The steps of a node, or of a group of fuse.py by its name."""
    ctx.plan = planned([Group(list(nodes), kernel=fusion or None)], ctx)
    return list((fused.LOWERINGS[fusion] if fusion else OPS[nodes[0].op])(nodes, ctx))


def planned_products(weights: Sequence[Tensor], x: Tensor, outs: Sequence[Tensor], ctx: Context, **how: Any) -> Planned:
    """As of_matrices() takes them, x as it is."""
    return plan_group(with_addresses(of_matrices(weights, x, outs, **how), ctx), ctx, Plan())


def multiplied(weights: Sequence[Tensor], x: Tensor, outs: Sequence[Tensor], ctx: Context, **how: Any) -> list[Step]:
    """Their steps."""
    return product(planned_products(weights, x, outs, ctx, **how), ctx)


def routed(node: Tensor, setting: Setting) -> Route:
    """How a MUL_MAT or MUL_MAT_ID by itself is made."""
    group = products_in([node])
    assert group is not None
    return route_of(group.products[0], setting)
