"""Fusion patterns of latent attention, which multiplies with a matrix a head before and after it attends."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.backend import Group
from graphrt.backends.triton.nodes import Nodes, Pattern, looked_at
from graphrt.tensor import Tensor


def head_products(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT of a matrix a head, then CONT of what it found with a token's heads side by side."""
    for out in nodes.of("CONT"):
        source = out.src[0]
        assert source is not None
        product = looked_at(source)
        if _is_head_product(product) and _is_by_token(source, product) and _reads_alone(nodes, out, product):
            yield Group([product, out], kernel="head_products")


def _is_head_product(node: Tensor) -> bool:
    """MUL_MAT of as many matrices of weights as the tokens have heads."""
    if node.op != "MUL_MAT":
        return False
    w, x = node.src[0], node.src[1]
    assert w is not None and x is not None
    of_heads = w.ne[2] > 1 and w.ne[3] == 1 and x.ne[2:] == w.ne[2:] and w.dtype.name != "f64"
    return of_heads and w.is_leaf and w.is_contiguous and x.dtype.name == "f32" and x.has_contiguous_rows


def _is_by_token(t: Tensor, product: Tensor) -> bool:
    """All of a product [m, n, heads] as [m, heads, n]."""
    m, n, heads, _ = product.ne
    in_turn = t.nb[:3] == (product.nb[0], product.nb[2], product.nb[1]) and t.view_offs == product.view_offs
    return t.ne == (m, heads, n, 1) and in_turn


def _reads_alone(nodes: Nodes, reader: Tensor, t: Tensor) -> bool:
    """Nobody else reads t or a view of it, and it is no output."""
    return nodes.readers(t) == [reader] and not nodes.kept(t)


LATENT_PATTERNS: dict[str, Pattern] = {"head_products": head_products}
