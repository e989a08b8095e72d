"""Fusion patterns of latent attention, which multiplies with a matrix a head before and after it attends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.backends.triton.kernels.norm_fusions import ScaledNorm
from graphrt.fusion import Nodes, scaled_by_row
from graphrt.op import made_by
from graphrt.tensor import Tensor

#: The longest row that one program normalizes, and elements of a block of a quantized cache.
MAX_ROW, BLOCK = 8192, 32


class HeadProducts(NamedTuple):
    """product: MUL_MAT of a matrix a head; out: CONT, a token's heads side by side."""

    product: Tensor
    out: Tensor


class LatentQuery(NamedTuple):
    """product: MUL_MAT of a matrix a head; rotated: ROPE; out: CONCAT of both."""

    product: Tensor
    rotated: Tensor
    out: Tensor


class LatentRow(NamedTuple):
    """kv: norm; rotated: ROPE; both: CONCAT of the two; k_set: SET_ROWS of that into the cache."""

    kv: ScaledNorm
    rotated: Tensor
    both: Tensor
    k_set: Tensor


class LatentRopeCache(NamedTuple):
    """The query of a latent attention and its row of the cache."""

    query: LatentQuery
    row: LatentRow


def head_products(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT of a matrix a head, then CONT of what it found with a token's heads side by side."""
    for out in nodes.of("CONT"):
        source = out["a"]
        product = made_by(source)
        if _is_head_product(product) and _is_by_token(source, product) and _reads_alone(nodes, out, product):
            yield Group([product, out], kernel="head_products", captured=HeadProducts(product, out))


def _is_head_product(node: Tensor) -> bool:
    """MUL_MAT of as many matrices of weights as the tokens have heads."""
    if node.op != "MUL_MAT":
        return False
    w, x = node["weights"], node["x"]
    of_heads = w.ne[2] > 1 and w.ne[3] == 1 and x.ne[2:] == w.ne[2:] and w.dtype.name != "f64"
    return of_heads and w.is_leaf and w.is_contiguous and x.dtype.name == "f32" and x.has_contiguous_rows


def _is_by_token(t: Tensor, product: Tensor) -> bool:
    """All of a product [m, n, heads] as [m, heads, n]."""
    m, n, heads, _ = product.ne
    swapped = t.nb[:3] == (product.nb[0], product.nb[2], product.nb[1]) and t.view_offs == product.view_offs
    return t.ne == (m, heads, n, 1) and swapped


def _reads_alone(nodes: Nodes, reader: Tensor, t: Tensor) -> bool:
    """Nobody else reads t or a view of it, and it is no output."""
    return nodes.readers(t) == [reader] and not nodes.kept(t)


def latent_rope_cache(nodes: Nodes) -> Iterator[Group]:
    """The query of a latent attention, its parts' product and rotation, and its row of the cache: norm and rotation."""
    for attention in nodes.of("FLASH_ATTN_EXT", "FLASH_ATTN_VARLEN"):
        q, k_set = made_by(attention["q"]), made_by(attention["k"])
        query, row = _query(nodes, q), _row(nodes, k_set)
        if query is not None and row is not None and _rotate_alike(query.rotated, row.rotated):
            members = [*query, row.kv.norm, row.kv.scaled, row.rotated, row.both, k_set]
            found = LatentRopeCache(query, row)
            yield Group(members, kernel="latent_rope_cache", results=[q, k_set], captured=found)


def _query(nodes: Nodes, q: Tensor) -> LatentQuery | None:
    """The query that ends in the CONCAT q; None, if it isn't one, or others read what is inside."""
    absorbed, rotated = _concat(q)
    if absorbed is None or rotated is None:
        return None
    product = made_by(absorbed)
    whole = _is_head_product(product) and _is_by_token(absorbed, product) and _reads_alone(nodes, q, product)
    return LatentQuery(product, rotated, q) if whole and _is_rotated(nodes, rotated, q) else None


def _row(nodes: Nodes, k_set: Tensor) -> LatentRow | None:
    """The row that SET_ROWS k_set writes; None, if it isn't one, or others read what is inside."""
    if k_set.op != "SET_ROWS":
        return None
    both = made_by(k_set["rows"])
    kv, rotated = _concat(both)
    scaled = made_by(kv) if kv is not None else None
    norm = scaled["a"] if scaled is not None and scaled.op == "MUL" else None
    if kv is None or rotated is None or scaled is None or norm is None:
        return None
    alone = _reads_alone(nodes, k_set, both) and _reads_alone(nodes, both, scaled)
    normed = norm.op == "RMS_NORM" and scaled_by_row(nodes, norm) is scaled and _are_f32_rows(norm["a"])
    fits = kv.n_elements == scaled.n_elements and kv.is_contiguous and scaled.ne[0] <= MAX_ROW
    if alone and normed and fits and _is_rotated(nodes, rotated, both) and _is_row_a_token(k_set, both):
        return LatentRow(ScaledNorm(norm, scaled), rotated, both, k_set)
    return None


def _concat(node: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """What stands side by side in a row of a CONCAT."""
    if node.op != "CONCAT" or node.params.dim != 0:
        return None, None
    return node["a"], node["b"]


def _is_rotated(nodes: Nodes, node: Tensor, reader: Tensor) -> bool:
    """ROPE of f32 rows of [d, heads, n_tokens], read by nobody else."""
    return node.op == "ROPE" and nodes.only_reader(node) is reader and _are_f32_rows(node["a"]) and node.ne[3] == 1


def _rotate_alike(a: Tensor, b: Tensor) -> bool:
    same = all(a[name] is b[name] for name in ("positions", "factors"))
    return same and a.params == b.params and (a.ne[0], a.ne[2]) == (b.ne[0], b.ne[2])


def _are_f32_rows(t: Tensor) -> bool:
    return t.dtype.name == "f32" and t.has_contiguous_rows


def _is_row_a_token(k_set: Tensor, both: Tensor) -> bool:
    """A row for each token, of one sequence after the other; of a quantized cache blocks of one of its parts each."""
    rows, ids, cache = (k_set[name] for name in ("rows", "ids", "target"))
    width, n, n_seq, _ = rows.ne
    tokens = both.ne == (width, 1, n * n_seq, 1) and rows.is_contiguous and ids.ne == (n, n_seq, 1, 1)
    return tokens and (not cache.dtype.is_quantized or all(s.ne[0] % BLOCK == 0 for s in both.sources()))
