"""Which nodes are products with packed weights and trained adapters, and the gradients of those: for trained.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.backends.triton.kernels.products.fusions import MAX_ADAPTED, are_whole_rows, is_product
from graphrt.backends.triton.packing import packing_of
from graphrt.fusion import Nodes, added_to, sum_of
from graphrt.tensor import Tensor

#: More tokens than any kernel takes that multiplies packed weights as they lie.
MORE_THAN_TOKENS = 256
#: Ranks of adapters, and the longest rows of activations or gradients.
RANKS, MAX_ROW = (16, 32, 64), 16384
#: Bytes of the weights that a gradient is made with, in f16, at most.
MOST_WEIGHTS = 256 << 20


class Trained(NamedTuple):
    """y, MUL_MAT of packed weights by x, and what an adapter adds: out = y + b scaled, scaled = SCALE of down = a x."""

    y: Tensor
    down: Tensor
    scaled: Tensor
    up: Tensor
    out: Tensor


class TrainedOfOne(NamedTuple):
    """Those of one x, of one rank and scale."""

    parts: tuple[Trained, ...]


class GradientOfOne(NamedTuple):
    """The gradient of one x: `out` is the sum of OUT_PRODs of packed weights, and of those of adapters' f32."""

    packed: tuple[Tensor, ...]
    plain: tuple[Tensor, ...]
    out: Tensor


def _trained(nodes: Nodes) -> Iterator[Trained]:
    for scaled in nodes.of("SCALE"):
        down = scaled["a"]
        if down.op != "MUL_MAT" or nodes.only_reader(down) is not scaled or scaled.params.bias:
            continue
        for up in nodes.readers(scaled):
            out = sum_of(nodes, up) if up.op == "MUL_MAT" and up["x"] is scaled else None
            if out is None or not all(is_product(n) and n["weights"].dtype.name == "f32" for n in (down, up)):
                continue
            y = added_to(up, out)
            fits = y.op == "MUL_MAT" and is_product(y) and y["x"] is down["x"] and nodes.only_reader(y) is out
            if fits and _is_large(y["weights"], y["x"].ne[1]) and down.ne[0] in RANKS:
                yield Trained(y, down, scaled, up, out)
                break


def _is_large(w: Tensor, tokens: int) -> bool:
    packed = packing_of(w.dtype.name) is not None and w.ne[2] == w.ne[3] == 1
    return packed and tokens > MORE_THAN_TOKENS and max(w.ne[:2]) <= MAX_ROW


def trained_products(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT of packed weights, and MUL_MAT, SCALE, MUL_MAT and ADD of an adapter beside it: of one x, rank and scale
    up to three together, for many tokens."""
    found: dict[tuple[Tensor, int, float], list[Trained]] = {}
    for part in _trained(nodes):
        found.setdefault((part.down["x"], part.down.ne[0], part.scaled.params.scale), []).append(part)
    for parts in found.values():
        for i in range(0, len(parts), MAX_ADAPTED):
            some = tuple(parts[i : i + MAX_ADAPTED])
            members = [n for part in some for n in part]
            results = [*(part.scaled for part in some), *(part.out for part in some)]
            yield Group(members, kernel="trained_products", results=results, captured=TrainedOfOne(some))


def _terms(nodes: Nodes, total: Tensor) -> Iterator[Tensor]:
    """What an ADD adds up, through ADDs that nobody else reads; ADDs themselves come too."""
    for term in (total["a"], total["b"]):
        yield term
        if term.op == "ADD" and term.ne == total.ne and nodes.only_reader(term) is total:
            yield from _terms(nodes, term)


def _is_of_weights(node: Tensor, packed: bool) -> bool:
    """OUT_PROD of one matrix of weights and a gradient whose rows lie without gaps."""
    if node.op != "OUT_PROD":
        return False
    a, b = node["a"], node["b"]
    even = b.dtype.name == "f32" and b.nb[1] == 4 and b.nb[0] % 4 == 0 and b.ne[2] == b.ne[3] == a.ne[2] == a.ne[3] == 1
    if not (even and a.is_leaf and a.is_contiguous):
        return False
    if packed:
        return _is_large(a, b.ne[0])
    return a.dtype.name == "f32" and a.ne[1] in RANKS and b.nb[0] == 4 * a.ne[1]


def gradient_of_x(nodes: Nodes) -> Iterator[Group]:
    """ADDs of OUT_PRODs of up to three packed weights, and of adapters, all gradients of one x, for many tokens."""
    for total in nodes.of("ADD"):
        reader = nodes.only_reader(total)
        if reader is not None and reader.op == "ADD" and reader.ne == total.ne:
            continue  # a part of a longer sum
        terms = list(_terms(nodes, total))
        sums = [t for t in terms if t.op == "ADD" and nodes.only_reader(t) is not None]
        products = [t for t in terms if t not in sums]
        packed = tuple(t for t in products if _is_of_weights(t, True))
        plain = tuple(t for t in products if _is_of_weights(t, False))
        whole = len(set(products)) == len(products) == len(packed) + len(plain) and are_whole_rows(total)
        alone = all(nodes.only_reader(t) in (total, *sums) for t in products)
        few = 1 <= len(packed) <= MAX_ADAPTED and 1 <= len(plain) <= MAX_ADAPTED
        if not (whole and alone and few) or len({t["a"].ne[1] for t in plain}) > 1:
            continue
        rows = sum(t["a"].ne[1] for t in products)
        if 2 * rows * total.ne[0] <= MOST_WEIGHTS and sum(t["a"].ne[1] for t in packed) <= 2 * MAX_ROW:
            members = [*products, *sums, total]
            yield Group(members, kernel="gradient_of_x", results=[total], captured=GradientOfOne(packed, plain, total))
