"""From the nodes of a MUL_MAT, or of a group of them, to the launches that the plan wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.products.emit import product
from graphrt.backends.triton.kernels.products.fusions import (
    Products,
    gate_up_glu,
    matmul_add,
    out_prod_add,
    projections,
)
from graphrt.backends.triton.kernels.products.plan import plan_of
from graphrt.backends.triton.kernels.products.transposed import transposed_product
from graphrt.fusion import Fusion
from graphrt.tensor import Tensor


def lower_products(found: Products, ctx: Context) -> list[Step]:
    """MUL_MATs of one x and what is added to them, or two and the GLU that joins them."""
    return product(plan_of(ctx).of(found.products[0].product), ctx)


def lower_out_prod_add(found: Products, ctx: Context) -> list[Step]:
    """OUT_PROD and the ADD of another gradient."""
    return transposed_product(plan_of(ctx).of(found.products[0].product), ctx)


def lower_mul_mat(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """MUL_MAT."""
    return product(plan_of(ctx).of(nodes[0]), ctx)


def lower_out_prod(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """OUT_PROD."""
    return transposed_product(plan_of(ctx).of(nodes[0]), ctx)


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "MUL_MAT": lower_mul_mat, "OUT_PROD": lower_out_prod,
}  # fmt: skip
GATE_UP_GLU = Fusion("gate_up_glu", gate_up_glu, lower_products)
PROJECTIONS = Fusion("projections", projections, lower_products)
OUT_PROD_ADD = Fusion("out_prod_add", out_prod_add, lower_out_prod_add)
MATMUL_ADD = Fusion("matmul_add", matmul_add, lower_products)
