"""Which norms become one step with the row of weights that scales them, and with the sums before and after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.backends.triton.kernels.products.fusions import are_whole_rows, is_product, private_to_products
from graphrt.fusion import Nodes, scaled_by_row, sum_of
from graphrt.tensor import Tensor

#: The longest rows of a sum whose norm is taken in the same launch (products/activations.py).
MAX_SUM = 8192


class ScaledNorm(NamedTuple):
    """A norm and the MUL by a row of weights. total: the ADD of a residual after them, if there is one."""

    norm: Tensor
    scaled: Tensor
    total: Tensor | None = None


class NormOfSum(NamedTuple):
    """An ADD and the norm of its sum, with its row of weights. before: of a norm after a block, whose result is one of
    the summands."""

    total: Tensor
    after: ScaledNorm
    before: ScaledNorm | None = None


def norm_mul(nodes: Nodes) -> Iterator[Group]:
    """RMS_NORM, MUL by a row of weights, and ADD of a residual if one follows."""
    for norm in nodes.of("RMS_NORM"):
        scaled = scaled_by_row(nodes, norm)
        if scaled is None:
            continue
        total = sum_of(nodes, scaled)
        if total is not None:
            yield Group([norm, scaled, total], kernel="norm_mul_add", captured=ScaledNorm(norm, scaled, total))
        else:
            private = private_to_products(nodes, scaled)
            yield Group([norm, scaled], kernel="norm_mul", private=private, captured=ScaledNorm(norm, scaled))


def norm_mul_add_norm(nodes: Nodes) -> Iterator[Group]:
    """RMS_NORM, MUL by a row and ADD of a residual (a norm after a block), then the norm before the next block."""
    for norm in nodes.of("RMS_NORM"):
        scaled = scaled_by_row(nodes, norm)
        total = nodes.only_reader(scaled) if scaled is not None else None
        if scaled is None or total is None or not are_whole_rows(norm["a"]):
            continue
        after = norm_of_sum(nodes, total)
        if after is not None:
            yield _group("norm_mul_add_norm", nodes, NormOfSum(total, after, ScaledNorm(norm, scaled)))


def add_norm(nodes: Nodes) -> Iterator[Group]:
    """ADD of two tensors that are no products, which would take it, then the norm before the next block."""
    for total in nodes.of("ADD"):
        sources = list(total.sources())
        after = norm_of_sum(nodes, total) if all(are_whole_rows(s) for s in sources) else None
        if after is not None and not any(is_product(s) and nodes.only_reader(s) is total for s in sources):
            yield _group("add_norm", nodes, NormOfSum(total, after))


def _group(kernel: str, nodes: Nodes, found: NormOfSum) -> Group:
    before = [found.before.norm, found.before.scaled] if found.before is not None else []
    members, scaled = [*before, found.total, found.after.norm, found.after.scaled], found.after.scaled
    private = private_to_products(nodes, scaled)
    return Group(members, kernel=kernel, results=[found.total, scaled], private=private, captured=found)


def norm_of_sum(nodes: Nodes, total: Tensor) -> ScaledNorm | None:
    """RMS_NORM and MUL of an ADD of f32 rows without gaps."""
    if total.op != "ADD" or total["a"] is total["b"] or total.ne[0] > MAX_SUM:
        return None
    if not all(are_whole_rows(s) and s.ne == total.ne for s in total.sources()):
        return None
    for norm in nodes.readers(total):
        scaled = scaled_by_row(nodes, norm) if norm.op == "RMS_NORM" and norm["a"] is total else None
        if scaled is not None:
            return ScaledNorm(norm, scaled)
    return None
