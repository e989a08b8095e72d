"""What there is to multiply: the products of a group of nodes, as plain data that no launch has been made of yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphrt.backend import Group
from graphrt.backends.triton.kernels.experts.fusions import ExpertSum
from graphrt.backends.triton.kernels.latent_fusions import HeadProducts, LatentRopeCache
from graphrt.backends.triton.kernels.products.broadcast import Broadcast, broadcast_of
from graphrt.backends.triton.kernels.products.forms import Form
from graphrt.backends.triton.kernels.products.fusions import Products, Summed
from graphrt.backends.triton.kernels.products.half import Gate
from graphrt.backends.triton.kernels.products.rotated_fusions import RotatedProjections
from graphrt.backends.triton.packing import packing_of
from graphrt.tensor import Tensor

#: Types of weights that are multiplied as they are, without a form of this backend's own.
PLAIN = ("f32", "f16", "bf16")
#: Products that are gradients of others.
TRANSPOSED = ("OUT_PROD", "MUL_MAT_ID_BACK")
#: All products.
PRODUCTS = ("MUL_MAT", "MUL_MAT_ID", *TRANSPOSED)


@dataclass(frozen=True, eq=False)
class Product:
    """One product, as kernels are asked about it.

    weight: [k, m], a matrix a head [k, m, heads], or with ids a matrix an expert [k, m, n_expert]; x: activations; ids:
    of a MUL_MAT_ID, else None; bias: what is added to its rows, or None. partner, gate: the other weight and the GLU
    that joins both products, if there is one. by_token: of a matrix a head, a token's results for all heads are to lie
    side by side. x_form: how x lies. x_aligned, aligned: x, and the planes of the weight and its partner, begin where
    copies of 16 bytes can.
    """

    weight: Tensor
    x: Tensor
    ids: Tensor | None = None
    bias: Tensor | None = None
    partner: Tensor | None = None
    gate: Gate | None = None
    by_token: bool = False
    transposed: bool = False
    x_form: Form = Form.AS_IS
    x_aligned: bool = True
    aligned: bool = True

    @property
    def type(self) -> str:
        """The weight's type."""
        return self.weight.dtype.name

    @property
    def is_packed(self) -> bool:
        return packing_of(self.type) is not None

    @property
    def is_plain(self) -> bool:
        return self.type in PLAIN

    @property
    def broadcast(self) -> Broadcast:
        """Which of a MUL_MAT's or OUT_PROD's matrices serves which tokens."""
        ne = self.x.ne
        return broadcast_of(self.weight, (ne[1], ne[0], *ne[2:]) if self.transposed else ne)

    @property
    def halves(self) -> tuple[Tensor, ...]:
        """The weight, and its partner if there is one."""
        return (self.weight,) if self.partner is None else (self.weight, self.partner)


@dataclass(frozen=True, eq=False)
class ProductGroup:
    """The products of one x in a group of nodes.

    outs: MUL_MATs' results, with biases and residual if there are any; with a gate both products have one. residual: is
    added to the only result, of its shape, f32 without gaps; its memory may be the result's.
    """

    products: tuple[Product, ...]
    outs: tuple[Tensor, ...] = ()
    residual: Tensor | None = None

    @property
    def x(self) -> Tensor:
        return self.products[0].x

    @property
    def gate(self) -> Gate | None:
        return self.products[0].gate


def of_matrices(
    weights: Sequence[Tensor], x: Tensor, outs: Sequence[Tensor], *, biases: Sequence[Tensor | None] = (),
    residual: Tensor | None = None, gate: Gate | None = None,
) -> ProductGroup:  # fmt: skip
    """MUL_MATs of one x. outs: for each weight f32 [m, tokens...], without gaps; with a gate there are two weights and
    one out, activation(weights[0] x) * (weights[1] x). biases: without a gate, for each weight f32 [m] that no kernel
    writes, or None."""
    assert not biases or (gate is None and len(biases) == len(weights))
    partners = weights[::-1] if gate is not None else [None] * len(weights)
    given = biases or [None] * len(weights)
    products = [Product(w, x, None, b, partner, gate) for w, b, partner in zip(weights, given, partners, strict=True)]
    return ProductGroup(tuple(products), tuple(outs), residual)


def products_of(group: Group) -> ProductGroup | None:
    """The products of a group of fuse.py, or of a node by itself; None if there are none."""
    found, nodes = group.captured, group.working
    if len(nodes) == 1 and nodes[0].op in TRANSPOSED:
        return _of_transposed(nodes[0])
    if len(nodes) == 1 and nodes[0].op in ("MUL_MAT", "MUL_MAT_ID"):
        found = Products((Summed(nodes[0], nodes[0]),))
    if isinstance(found, RotatedProjections):
        found = found.products
    if isinstance(found, Products):
        return _of_products(found)
    if isinstance(found, ExpertSum):
        return _of_products(Products((found.product,))) if found.product is not None else None
    if isinstance(found, HeadProducts | LatentRopeCache):
        product = found.product if isinstance(found, HeadProducts) else found.query.product
        return ProductGroup((Product(product["weights"], product["x"], by_token=True),))
    return None


def _of_transposed(node: Tensor) -> ProductGroup:
    """OUT_PROD or MUL_MAT_ID_BACK."""
    if node.op == "OUT_PROD":
        return ProductGroup((Product(node["a"], node["b"], transposed=True),), (node,))
    return ProductGroup((Product(node["weights"], node["d"], node["ids"], transposed=True),), (node,))


def _of_products(found: Products) -> ProductGroup:
    """Products of one x, with what is added to each, or the GLU that joins two."""
    made, glu, gate = found.products, found.glu, None
    if glu is not None:
        p = glu.params
        gate = Gate(p.kind, p.alpha, p.limit) if p.kind == "swiglu_oai" else Gate(p.kind)
    if made[0].product.op == "OUT_PROD":
        (one,) = made
        return replace(_of_transposed(one.product), outs=(one.out,), residual=one.residual)
    weights, x = [s.product["weights"] for s in made], made[0].product["x"]
    if made[0].product.op == "MUL_MAT_ID":
        partners = weights[::-1] if gate is not None else [None]
        parts = zip(made, weights, partners, strict=True)
        return ProductGroup(tuple(Product(w, x, s.product["ids"], s.bias, p, gate) for s, w, p in parts))
    if glu is not None:
        return of_matrices(weights, x, [glu], gate=gate)
    residual = next((s.residual for s in made if s.residual is not None), None)
    return of_matrices(weights, x, [s.out for s in made], biases=[s.bias for s in made], residual=residual)
