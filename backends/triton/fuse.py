"""The fusions of this backend: small, named, and they can be switched off.

GRAPHRT_FUSE=0 switches all off; a list of names with commas (GRAPHRT_FUSE=norm_mul,matmul_add) leaves only those on.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.backend import Group
from graphrt.backends.triton.fuse_experts import EXPERT_FUSIONS
from graphrt.backends.triton.fuse_latent import LATENT_FUSIONS
from graphrt.backends.triton.packing import packing_of
from graphrt.env import FUSE
from graphrt.errors import BackendError
from graphrt.fusion import Fusion, Nodes, added_to, is_bias, scaled_by_row
from graphrt.op import made_by
from graphrt.tensor import Tensor

#: The longest rows of a sum whose norm is taken in the same launch (products/activations.py).
MAX_SUM = 8192


def _is_product(node: Tensor) -> bool:
    """MUL_MAT of one matrix of weights with contiguous f32 rows."""
    if node.op != "MUL_MAT":
        return False
    w, x = node["weights"], node["x"]
    plain = w.ne[2] == w.ne[3] == 1 and x.ne[2] == x.ne[3] == 1 and x.dtype.name == "f32" and x.is_contiguous
    return plain and w.is_leaf and w.is_contiguous


def norm_mul(nodes: Nodes) -> Iterator[Group]:
    """RMS_NORM, MUL by a row of weights, and ADD of a residual if one follows."""
    for norm in nodes.of("RMS_NORM"):
        scaled = scaled_by_row(nodes, norm)
        if scaled is None:
            continue
        total = nodes.only_reader(scaled)
        if total is not None and total.op == "ADD" and total.ne == scaled.ne and total["a"] is not total["b"]:
            yield Group([norm, scaled, total], kernel="norm_mul_add")
        else:
            yield Group([norm, scaled], kernel="norm_mul", private=_private(nodes, scaled))


def norm_mul_add_norm(nodes: Nodes) -> Iterator[Group]:
    """RMS_NORM, MUL by a row and ADD of a residual (a norm after a block), then the norm before the next block."""
    for norm in nodes.of("RMS_NORM"):
        scaled = scaled_by_row(nodes, norm)
        total = nodes.only_reader(scaled) if scaled is not None else None
        if scaled is None or total is None or not _are_whole_rows(norm["a"]):
            continue
        following = _norm_of_sum(nodes, total)
        if following is not None:
            members, results = [norm, scaled, total, *following], [total, following[1]]
            private = _private(nodes, following[1])
            yield Group(members, kernel="norm_mul_add_norm", results=results, private=private)


def add_norm(nodes: Nodes) -> Iterator[Group]:
    """ADD of two tensors that are no products, which would take it, then the norm before the next block."""
    for total in nodes.of("ADD"):
        sources = list(total.sources())
        following = _norm_of_sum(nodes, total) if all(_are_whole_rows(s) for s in sources) else None
        if following is not None and not any(_is_product(s) and nodes.only_reader(s) is total for s in sources):
            private = _private(nodes, following[1])
            yield Group([total, *following], kernel="add_norm", results=[total, following[1]], private=private)


def _norm_of_sum(nodes: Nodes, total: Tensor) -> tuple[Tensor, Tensor] | None:
    """RMS_NORM and MUL of an ADD of f32 rows without gaps."""
    if total.op != "ADD" or total["a"] is total["b"] or total.ne[0] > MAX_SUM:
        return None
    if not all(_are_whole_rows(s) and s.ne == total.ne for s in total.sources()):
        return None
    for norm in nodes.readers(total):
        scaled = scaled_by_row(nodes, norm) if norm.op == "RMS_NORM" and norm["a"] is total else None
        if scaled is not None:
            return norm, scaled
    return None


def _are_whole_rows(t: Tensor) -> bool:
    return t.dtype.name == "f32" and t.is_contiguous


def _private(nodes: Nodes, x: Tensor) -> list[Tensor]:
    """x, if nobody needs it but products of packed weights, which may have it in the form that they read; else nothing.

    Plain weights are multiplied with x as it is, or rounded without a scale.
    """
    readers = nodes.readers(x)
    alone = bool(readers) and nodes.only_as_it_is(x) and x.ne[0] % 32 == 0
    private = alone and all(_is_product(n) and n["x"] is x and _is_packed(n["weights"]) for n in readers)
    return [x] if private else []


def _is_packed(w: Tensor) -> bool:
    return packing_of(w.dtype.name) is not None and w.ne[1] > 1


def gate_up_glu(nodes: Nodes) -> Iterator[Group]:
    """Two MUL_MAT of one x, then GLU of both."""
    for out in nodes.of("GLU"):
        gate, up = out["gate"], out["value"]
        if up is None or gate is up or not (_is_product(gate) and _is_product(up)):
            continue
        same = gate["x"] is up["x"] and gate.ne == up.ne
        alone = nodes.only_reader(gate) is out and nodes.only_reader(up) is out
        if same and alone and out.params.kind in ("swiglu", "geglu", "reglu"):
            yield Group([gate, up, out], kernel="gate_up_glu", private=_private(nodes, out))


def projections(nodes: Nodes) -> Iterator[Group]:
    """Two or three MUL_MATs of one x, each with the ADD of its bias if there is one: q, k and v."""
    for x in dict.fromkeys(n["x"] for n in nodes.of("MUL_MAT")):
        found = [n for n in nodes.readers(x) if _is_product(n) and n["x"] is x]
        if 2 <= len(found) <= 3:
            biased = [_with_bias(nodes, n) for n in found]
            both = [n for pair in zip(found, biased) for n in dict.fromkeys(pair)]
            yield Group(both, kernel="projections", results=biased)


def matmul_add(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT, then ADD of a bias, of a residual of the same shape, or of one after the other."""
    for product in filter(_is_product, nodes.of("MUL_MAT")):
        biased = _with_bias(nodes, product)
        total = _sum_of(nodes, biased)
        if total is not None and _are_whole_rows(residual := added_to(biased, total)) and residual.ne == total.ne:
            yield Group(list(dict.fromkeys([product, biased, total])), kernel="matmul_add")
        if biased is not product:  # also where another group has taken the residual
            yield Group([product, biased], kernel="matmul_add")


def _with_bias(nodes: Nodes, product: Tensor) -> Tensor:
    """The ADD of a bias that alone reads a product; the product, if there is none."""
    total = _sum_of(nodes, product)
    return total if total is not None and is_bias(added_to(product, total), product) else product


def _sum_of(nodes: Nodes, t: Tensor) -> Tensor | None:
    """The ADD, of t's shape, of t and another tensor, if nobody else reads t."""
    total = nodes.only_reader(t)
    same = total is not None and total.op == "ADD" and total.ne == t.ne and total["a"] is not total["b"]
    return total if same else None


def softcap(nodes: Nodes) -> Iterator[Group]:
    """SCALE, tanh and SCALE, as logits are capped."""
    for inner in nodes.of("SCALE"):
        bent = nodes.only_reader(inner)
        if bent is None or bent.op != "UNARY" or bent.params.kind != "tanh":
            continue
        out = nodes.only_reader(bent)
        if out is None or out.op != "SCALE" or inner.params.bias or out.params.bias:
            continue
        if all(t.dtype.name == "f32" for t in (inner["a"], inner, bent, out)):
            yield Group([inner, bent, out], kernel="softcap")


def rope_cache(nodes: Nodes) -> Iterator[Group]:
    """The rotation of q and k, and the writing of k and v into the cache that an attention reads."""
    for q, k, k_set, v_set in _rotations(nodes):
        if all(_is_rotated_plain(s) for s in (q["a"], k["a"])):
            yield Group([q, k, k_set, v_set], kernel="rope_cache", results=[q, k_set, v_set])


def norm_rope_cache(nodes: Nodes) -> Iterator[Group]:
    """The same after RMS_NORM and MUL by a row of the heads of q and of k."""
    for q, k, k_set, v_set in _rotations(nodes):
        before = [*_head_norm(nodes, q), *_head_norm(nodes, k)]
        if len(before) != 4 or before[0].params != before[2].params:
            continue
        d = q.ne[0]
        # A program that rounds to blocks has whole heads only if they are powers of two.
        if not k_set.dtype.is_quantized or (d >= 32 and d & (d - 1) == 0):
            yield Group([*before, q, k, k_set, v_set], kernel="norm_rope_cache", results=[q, k_set, v_set])


def _head_norm(nodes: Nodes, rotated: Tensor) -> tuple[Tensor, ...]:
    """RMS_NORM and MUL of what is rotated and read by nobody else; nothing, if they are not there."""
    scaled = rotated["a"]
    norm = scaled["a"] if scaled.op == "MUL" else None
    if norm is None or norm.op != "RMS_NORM":
        return ()
    alone = scaled_by_row(nodes, norm) is scaled and nodes.only_reader(scaled) is rotated
    return (norm, scaled) if alone and _is_rotated_plain(norm["a"]) else ()


def _is_rotated_plain(t: Tensor) -> bool:
    return t.dtype.name == "f32" and t.has_contiguous_rows


def _rotations(nodes: Nodes) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """ROPE of q and of k, SET_ROWS of k and of v, that can be one launch."""
    for attention in nodes.of("FLASH_ATTN_EXT"):
        q, k_set, v_set = (made_by(attention[name]) for name in ("q", "k", "v"))
        if q.op != "ROPE" or k_set.op != "SET_ROWS" or v_set.op != "SET_ROWS" or k_set is v_set:
            continue
        k = made_by(k_set["rows"])
        if k.op != "ROPE" or nodes.readers(k) != [k_set] or nodes.kept(k) or k.params != q.params:
            continue
        alike = k.src[1:] == q.src[1:] and k_set["ids"] is v_set["ids"] and k.ne[2:] == q.ne[2:] and k.ne[3] == 1
        if alike and k_set.root is not v_set.root and _is_rope_cache_plain(k, k_set, v_set):
            yield q, k, k_set, v_set


def _is_rope_cache_plain(k: Tensor, k_set: Tensor, v_set: Tensor) -> bool:
    """One token a row of the caches, of one sequence after the other; what is written is f32 with contiguous rows."""
    k_rows, v_rows, ids = k_set["rows"], v_set["rows"], k_set["ids"]
    n, n_seq = k_rows.ne[1:3]
    tokens = k_rows.ne[1:] == v_rows.ne[1:] == (n, n_seq, 1) and ids.ne == (n, n_seq, 1, 1)
    whole = k_rows.is_contiguous and k_rows.ne[0] == k.ne[0] * k.ne[1] and n * n_seq == k.ne[2]
    return tokens and whole and _is_rotated_plain(v_rows)


def attention_lse(nodes: Nodes) -> Iterator[Group]:
    """FLASH_ATTN_EXT and the FLASH_ATTN_LSE of the same sources."""
    for attention in nodes.of("FLASH_ATTN_EXT"):
        lse = next((n for n in nodes.of("FLASH_ATTN_LSE") if _same_scores(attention, n)), None)
        if lse is not None:
            yield Group([attention, lse], kernel="attention_lse", results=[attention, lse])


def _same_scores(attention: Tensor, lse: Tensor) -> bool:
    same = all(attention[name] is lse[name] for name in ("q", "k", "mask", "sinks"))
    return same and attention.params == lse.params


#: In the order in which they are tried: a node belongs to the first group that takes it.
FUSIONS: tuple[Fusion, ...] = (
    *EXPERT_FUSIONS,
    *LATENT_FUSIONS,
    Fusion("gate_up_glu", gate_up_glu),
    Fusion("projections", projections),
    Fusion("norm_rope_cache", norm_rope_cache),
    Fusion("norm_mul_add_norm", norm_mul_add_norm),
    Fusion("add_norm", add_norm),
    Fusion("norm_mul", norm_mul),
    Fusion("matmul_add", matmul_add),
    Fusion("rope_cache", rope_cache),
    Fusion("softcap", softcap),
    Fusion("attention_lse", attention_lse, exact=True),
)


def wanted_fusions(exact: bool) -> list[Fusion]:
    """FUSIONS less what GRAPHRT_FUSE switches off; if exact, those that change no bit, all of them. Raises BackendError
    for a name that is none of theirs."""
    if exact:
        return [fusion for fusion in FUSIONS if fusion.exact]
    text = (FUSE.get() or "1").strip()
    if text in ("", "1", "all"):
        return list(FUSIONS)
    known = [fusion.name for fusion in FUSIONS]
    names = [] if text == "0" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BackendError(f"GRAPHRT_FUSE must be 0, 1 or names of {', '.join(known)}, got {unknown[0]!r}")
    return [fusion for fusion in FUSIONS if fusion.name in names]
