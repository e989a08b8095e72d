"""Which rotations become one step with the writing of the cache that an attention reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.backends.triton.kernels.norm_fusions import ScaledNorm
from graphrt.fusion import Nodes, scaled_by_row
from graphrt.op import made_by
from graphrt.ops.flash_attn_ext import is_scaled
from graphrt.tensor import Tensor


class RopeCache(NamedTuple):
    """ROPE of q and of k, SET_ROWS of k and of v. q_norm, k_norm: of their heads before the rotation, both or none."""

    q: Tensor
    k: Tensor
    k_set: Tensor
    v_set: Tensor
    q_norm: ScaledNorm | None = None
    k_norm: ScaledNorm | None = None


def rope_cache(nodes: Nodes) -> Iterator[Group]:
    """The rotation of q and k, and the writing of k and v into the cache that an attention reads."""
    for _, found in rotations(nodes):
        if all(_is_rotated_plain(rotated["a"]) for rotated in (found.q, found.k)):
            yield _group("rope_cache", [], found)


class RopeCacheAttention(NamedTuple):
    """A RopeCache and the attention of it, one token a sequence."""

    cache: RopeCache
    attention: Tensor


def rope_cache_attention(nodes: Nodes) -> Iterator[Group]:
    """The rotation of q and k of one token a sequence, the writing of k and v into caches of f16 or bf16, and the
    attention that reads them, of heads of 64 or 128: where the decode kernel serves it, one launch."""
    for attention, found in rotations(nodes):
        if nodes.readers(found.q) != [attention] or nodes.kept(found.q) or why_apart(attention) is not None:
            continue
        plain = all(_is_rotated_plain(rotated["a"]) for rotated in (found.q, found.k))
        if plain and _is_one_token(attention, found):
            working = [found.q, found.k, found.k_set, found.v_set, attention]
            yield Group(
                working, kernel="rope_cache_attention", results=working[:1] + working[2:],
                captured=RopeCacheAttention(found, attention),
            )  # fmt: skip


#: Types of caches whose row of a step the decode kernel writes itself.
_APPENDED = ("f16", "bf16")


def why_apart(attention: Tensor) -> str | None:
    """Why an attention of a cache can't have its step's rotation and append in its launch, as far as it tells by
    itself: a sentence, or None."""
    if attention.op != "FLASH_ATTN_EXT":
        return "it appends to caches of one stretch a sequence, this one lies in pages or is packed"
    if is_scaled(attention):
        return "it has no scales of k, v or the result"
    for side in ("k", "v"):
        if (name := attention[side].dtype.name) not in _APPENDED:
            return f"it writes rows of f16 and bf16, what goes into a cache of {name} is rounded by a launch before it"
    if attention["k"].ne[0] not in (64, 128) or attention["v"].ne[0] != attention["k"].ne[0]:
        return f"it is for heads of 64 and 128, these have {attention['k'].ne[0]}"
    if attention["q"].ne[1] != 1:
        return f"it is for one token a sequence, this step has {attention['q'].ne[1]}"
    return None


def _is_one_token(attention: Tensor, found: RopeCache) -> bool:
    """q is the rotated one, turned; k and v are the caches from their first cells on."""
    q, d, n_seq = attention["q"], found.q.ne[0], found.q.ne[2]
    turned = q.ne == (d, 1, found.q.ne[1], n_seq) and q.view_offs == found.q.view_offs
    turned = turned and q.nb[2] == found.q.nb[1] and (n_seq == 1 or q.nb[3] == found.q.nb[2])
    if not turned or found.v_set["rows"].ne[0] % d:
        return False
    for side, written in (("k", found.k_set), ("v", found.v_set)):
        x, size = attention[side], written.dtype.type_size
        at_start = x.view_offs == written.view_offs
        same = x.nb[1] == written.nb[1] and x.nb[2] == d * size and (n_seq == 1 or x.nb[3] == written.nb[2])
        if not (at_start and same and x.ne[0] == d and x.ne[2] * d == written.ne[0] and x.ne[3] == n_seq):
            return False
    return found.k_set["rows"].ne[1:3] == (1, n_seq)


def norm_rope_cache(nodes: Nodes) -> Iterator[Group]:
    """The same after RMS_NORM and MUL by a row of the heads of q and of k."""
    for _, found in rotations(nodes):
        q_norm, k_norm = _head_norm(nodes, found.q), _head_norm(nodes, found.k)
        if q_norm is None or k_norm is None or q_norm.norm.params != k_norm.norm.params:
            continue
        d = found.q.ne[0]
        # A program that rounds to blocks has whole heads only if they are powers of two.
        if not found.k_set.dtype.is_quantized or (d >= 32 and d & (d - 1) == 0):
            before = [q_norm.norm, q_norm.scaled, k_norm.norm, k_norm.scaled]
            yield _group("norm_rope_cache", before, found._replace(q_norm=q_norm, k_norm=k_norm))


def _group(kernel: str, before: list[Tensor], found: RopeCache) -> Group:
    q, k, k_set, v_set = found[:4]
    return Group([*before, q, k, k_set, v_set], kernel=kernel, results=[q, k_set, v_set], captured=found)


def _head_norm(nodes: Nodes, rotated: Tensor) -> ScaledNorm | None:
    """RMS_NORM and MUL of what is rotated and read by nobody else; None, if they are not there."""
    scaled = rotated["a"]
    norm = scaled["a"] if scaled.op == "MUL" else None
    if norm is None or norm.op != "RMS_NORM":
        return None
    alone = scaled_by_row(nodes, norm) is scaled and nodes.only_reader(scaled) is rotated
    return ScaledNorm(norm, scaled) if alone and _is_rotated_plain(norm["a"]) else None


def _is_rotated_plain(t: Tensor) -> bool:
    return t.dtype.name == "f32" and t.has_contiguous_rows


def rotations(nodes: Nodes) -> Iterator[tuple[Tensor, RopeCache]]:
    """ROPE of q and of k, SET_ROWS of k and of v, that can be one launch; and the attention that reads them."""
    for attention in nodes.of("FLASH_ATTN_EXT", "FLASH_ATTN_VARLEN"):
        q, k_set, v_set = (made_by(attention[name]) for name in ("q", "k", "v"))
        if q.op != "ROPE" or k_set.op != "SET_ROWS" or v_set.op != "SET_ROWS" or k_set is v_set:
            continue
        k = made_by(k_set["rows"])
        if k.op != "ROPE" or nodes.readers(k) != [k_set] or nodes.kept(k) or k.params != q.params:
            continue
        turned = k["positions"] is q["positions"] and k["factors"] is q["factors"]
        alike = turned and k_set["ids"] is v_set["ids"] and k.ne[2:] == q.ne[2:] and k.ne[3] == 1
        if alike and k_set.root is not v_set.root and _is_rope_cache_plain(k, k_set, v_set):
            yield attention, RopeCache(q, k, k_set, v_set)


def _is_rope_cache_plain(k: Tensor, k_set: Tensor, v_set: Tensor) -> bool:
    """One token a row of the caches, of one sequence after the other; what is written is f32 with contiguous rows."""
    k_rows, v_rows, ids = k_set["rows"], v_set["rows"], k_set["ids"]
    n, n_seq = k_rows.ne[1:3]
    tokens = k_rows.ne[1:] == v_rows.ne[1:] == (n, n_seq, 1) and ids.ne == (n, n_seq, 1, 1)
    whole = k_rows.is_contiguous and k_rows.ne[0] == k.ne[0] * k.ne[1] and n * n_seq == k.ne[2]
    return tokens and whole and _is_rotated_plain(v_rows)
