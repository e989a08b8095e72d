"""Which projections of q, k and v become one step with their rotation, and with the writing of k and v into a cache
unless their attention does that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.backends.triton.kernels.products.fusions import Products, Summed, is_packed, projections
from graphrt.backends.triton.kernels.products.gemv import FEW_TOKENS, config_for
from graphrt.backends.triton.kernels.rope_fusions import RopeCache, rotations
from graphrt.dtypes import FLOATS8
from graphrt.fusion import Nodes
from graphrt.op import made_by
from graphrt.tensor import Tensor

_NAME = "rotated_projections"
#: Types of caches that elements are written to one by one; of blocks a program has too few.
BY_ELEMENT = ("f32", "f16", "bf16", *FLOATS8)


class RotatedProjections(NamedTuple):
    """products: of q, k and v, in this order; cache: what is done with them. in_rows: k, rotated, and v are stored as
    they are, and others write them into the cache."""

    products: Products
    cache: RopeCache
    in_rows: bool = False

    @property
    def v_out(self) -> Tensor:
        """The product for v, with its bias."""
        return self.products.products[2].out


def rotated_projections(nodes: Nodes) -> Iterator[Group]:
    """MUL_MATs of one x that give q, k and v, with their biases, the ROPE of q and of k over whole heads, and SET_ROWS
    of k and v into a cache: of up to 4 tokens, where a lane has two rows of the weights."""
    for _, found in _rotated(nodes):
        cache = found.cache
        targets = (cache.k_set["target"], cache.v_set["target"])
        if all(t.dtype.name in BY_ELEMENT for t in targets):
            working = [*_products(found), cache.q, cache.k, cache.k_set, cache.v_set]
            yield Group(working, kernel=_NAME, results=[cache.q, cache.k_set, cache.v_set], captured=found)


def rotated_rows(nodes: Nodes) -> Iterator[tuple[Tensor, Group]]:
    """The same without the writing, and each one's attention."""
    for attention, found in _rotated(nodes):
        cache = found.cache
        yield attention, Group(
            [*_products(found), cache.q, cache.k], kernel=_NAME, results=[cache.q, cache.k, found.v_out],
            captured=found._replace(in_rows=True),
        )  # fmt: skip


def _products(found: RotatedProjections) -> list[Tensor]:
    return [n for s in found.products.products for n in dict.fromkeys([s.product, s.out])]


def _rotated(nodes: Nodes) -> Iterator[tuple[Tensor, RotatedProjections]]:
    """Projections that can be rotated in their launch, and the attention of them."""
    made = {s.out: group.captured for group in projections(nodes) for s in group.captured.products}
    for attention, cache in rotations(nodes):
        outs = [made_by(t) for t in (cache.q["a"], cache.k["a"], cache.v_set["rows"])]
        of_one_x = made.get(outs[0])
        if of_one_x is None or any(made.get(out) is not of_one_x for out in outs) or len(set(outs)) < 3:
            continue
        found = [next(s for s in of_one_x.products if s.out is out) for out in outs]
        readers = (cache.q, cache.k, cache.v_set)
        alone = all(nodes.readers(out) == [reader] and not nodes.kept(out) for out, reader in zip(outs, readers))
        if alone and _has_pairs(found) and _is_plain(cache, outs):
            yield attention, RotatedProjections(Products(tuple(found)), cache)


def _has_pairs(found: list[Summed]) -> bool:
    """A lane of gemv.py's kernel has two rows of these products, so that it can have what is rotated together."""
    weights = [s.product["weights"] for s in found]
    if not all(map(is_packed, weights)) or found[0].product.ne[1] > FEW_TOKENS:
        return False
    rows, n = sum(w.ne[1] for w in weights), found[0].product.ne[1]
    return config_for(weights[0].dtype.name, rows, weights[0].ne[0], n, single=True).r == 2


def _is_plain(cache: RopeCache, outs: list[Tensor]) -> bool:
    """Whole heads are rotated, in the order in which products have them."""
    whole = cache.q.params.n_dims == cache.q.ne[0] == cache.k.ne[0]
    as_made = all(t.is_contiguous for t in (cache.q["a"], cache.k["a"], cache.v_set["rows"], cache.q))
    all_of = cache.q.n_elements == outs[0].n_elements and cache.k.n_elements == outs[1].n_elements
    return whole and as_made and all_of
