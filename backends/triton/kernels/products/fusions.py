"""Which MUL_MATs become one step, with what is added to them or the GLU that joins two, and which are adapters'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.backends.triton.packing import packing_of
from graphrt.fusion import Nodes, added_to, gated_products, is_bias, sum_of
from graphrt.tensor import Tensor

#: The longest short side of a product for skinny.py, and the shortest of the others.
MAX_SHORT, MIN_LONG = 64, 256
#: Adapters' matrices that one step multiplies with x, and what their rank is a multiple of.
MAX_ADAPTED, RANK_STEP = 3, 16


class Summed(NamedTuple):
    """A MUL_MAT or MUL_MAT_ID, and what is added to it. out: the last of these nodes."""

    product: Tensor
    out: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None


class Products(NamedTuple):
    """Products of one x. glu: joins both, if it is there."""

    products: tuple[Summed, ...]
    glu: Tensor | None = None


class Adapted(NamedTuple):
    """What adapters add to the result y of a product by x: out = y + b (gates * (a x)). down: a x; scaled: that times
    the gates; up: b of it."""

    down: Tensor
    scaled: Tensor
    up: Tensor
    out: Tensor

    @property
    def y(self) -> Tensor:
        return added_to(self.up, self.out)


class AdaptedOfOne(NamedTuple):
    """Those of one x with the same gates."""

    parts: tuple[Adapted, ...]


def is_skinny(*sides: int) -> bool:
    """Whether a product of these three sides, rows, columns and what sums are over, is for skinny.py."""
    short, *long = sorted(sides)
    return short <= MAX_SHORT and min(long) >= MIN_LONG


def is_product(node: Tensor) -> bool:
    """MUL_MAT of one matrix of weights with contiguous f32 rows."""
    if node.op != "MUL_MAT":
        return False
    w, x = node["weights"], node["x"]
    plain = w.ne[2] == w.ne[3] == 1 and x.ne[2] == x.ne[3] == 1 and x.dtype.name == "f32" and x.is_contiguous
    return plain and w.is_leaf and w.is_contiguous


def are_whole_rows(t: Tensor) -> bool:
    return t.dtype.name == "f32" and t.is_contiguous


def private_to_products(nodes: Nodes, x: Tensor) -> list[Tensor]:
    """x, if nobody needs it but products of packed weights, which may have it in the form that they read; else nothing.

    Plain weights are multiplied with x as it is, or rounded without a scale.
    """
    readers = nodes.readers(x)
    alone = bool(readers) and nodes.only_as_it_is(x) and x.ne[0] % 32 == 0
    private = alone and all(is_product(n) and n["x"] is x and is_packed(n["weights"]) for n in readers)
    return [x] if private else []


def is_packed(w: Tensor) -> bool:
    """A matrix of weights that kernels have in a form of their own."""
    return packing_of(w.dtype.name) is not None and w.ne[1] > 1


def _adapted(nodes: Nodes) -> Iterator[Adapted]:
    """MUL_MAT of f32, MUL by gates, f32 for each token or for all alike, MUL_MAT of f32, and ADD of both."""
    for down in nodes.of("MUL_MAT"):
        scaled = nodes.only_reader(down)
        up = nodes.only_reader(scaled) if scaled is not None and scaled.op == "MUL" else None
        if scaled is None or up is None or scaled["a"] is not down or up.op != "MUL_MAT" or up["x"] is not scaled:
            continue
        gates, out = scaled["b"], sum_of(nodes, up)
        plain = all(is_product(n) and n["weights"].dtype.name == "f32" for n in (down, up))
        if plain and out is not None and down.ne[0] % RANK_STEP == 0:
            alike = gates.ne in (down.ne, (down.ne[0], 1, 1, 1)) and added_to(up, out).ne == out.ne
            if alike and are_whole_rows(gates) and are_whole_rows(added_to(up, out)):
                yield Adapted(down, scaled, up, out)


def adapters(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT, MUL by gates, MUL_MAT and ADD to another product's result, as adapters have them: of one x and the same
    gates up to three together."""
    found: dict[tuple[Tensor, Tensor, int], list[Adapted]] = {}
    for part in _adapted(nodes):
        found.setdefault((part.down["x"], part.scaled["b"], part.down.ne[0]), []).append(part)
    for parts in found.values():
        for i in range(0, len(parts), MAX_ADAPTED):
            some = tuple(parts[i : i + MAX_ADAPTED])
            members = [n for part in some for n in part]
            yield Group(members, kernel="adapters", results=[part.out for part in some], captured=AdaptedOfOne(some))


def gate_up_glu(nodes: Nodes) -> Iterator[Group]:
    """Two MUL_MAT of one x, then GLU of both."""
    for gate, up, out in gated_products(nodes):
        if is_product(gate) and is_product(up):
            found = Products((Summed(gate, gate), Summed(up, up)), out)
            yield Group([gate, up, out], kernel="gate_up_glu", private=private_to_products(nodes, out), captured=found)


def projections(nodes: Nodes) -> Iterator[Group]:
    """Two or three MUL_MATs of one x, each with the ADD of its bias if there is one: q, k and v."""
    of_adapters = {part.down for part in _adapted(nodes)}
    for x in dict.fromkeys(n["x"] for n in nodes.of("MUL_MAT")):
        found = [n for n in nodes.readers(x) if is_product(n) and n["x"] is x and n not in of_adapters]
        if 2 <= len(found) <= 3:
            summed = tuple(_with_bias(nodes, n) for n in found)
            both = [n for s in summed for n in dict.fromkeys([s.product, s.out])]
            yield Group(both, kernel="projections", results=[s.out for s in summed], captured=Products(summed))


def matmul_add(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT, then ADD of a bias, of a residual of the same shape, or of one after the other."""
    for product in filter(is_product, nodes.of("MUL_MAT")):
        biased = _with_bias(nodes, product)
        total = sum_of(nodes, biased.out)
        if total is not None and are_whole_rows(residual := added_to(biased.out, total)) and residual.ne == total.ne:
            found = biased._replace(out=total, residual=residual)
            members = list(dict.fromkeys([product, biased.out, total]))
            yield Group(members, kernel="matmul_add", captured=Products((found,)))
        if biased.out is not product:  # also where another group has taken the residual
            yield Group([product, biased.out], kernel="matmul_add", captured=Products((biased,)))


def out_prod_add(nodes: Nodes) -> Iterator[Group]:
    """OUT_PROD of f32 with a short side, and the ADD of another gradient of its shape."""
    for product in nodes.of("OUT_PROD"):
        total = sum_of(nodes, product)
        a, b = product["a"], product["b"]
        plain = a.dtype.name == "f32" and all(t.ne[2] == t.ne[3] == 1 for t in (a, b))
        if total is None or not plain or not is_skinny(*a.ne[:2], b.ne[0]):
            continue
        residual = added_to(product, total)
        if are_whole_rows(residual) and residual.ne == total.ne:
            found = Products((Summed(product, total, None, residual),))
            yield Group([product, total], kernel="out_prod_add", captured=found)


def _with_bias(nodes: Nodes, product: Tensor) -> Summed:
    """A product with the ADD of a bias that alone reads it; by itself, if there is none."""
    total = sum_of(nodes, product)
    if total is not None and is_bias(bias := added_to(product, total), product):
        return Summed(product, total, bias)
    return Summed(product, product)
