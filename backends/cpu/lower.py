"""Lowering for the CPU backend's fast form: a group of nodes to native steps, or to a few torch calls.

Small batches are bound by memory, so their matrices are read as the file's blocks by the kernels of `fast`, and a whole
decode step becomes one native program. Large ones are bound by arithmetic: blocks are decoded a slice at a time and go
through oneDNN. Both compute in f32 from the same weights as the reference; nothing is rounded that it does not round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from graphrt.backends.cpu import fast
from graphrt.backends.cpu.experts import mul_mat_id
from graphrt.backends.cpu.lowering import Lowering, rows_of
from graphrt.backends.cpu.products import ACTIVATIONS, matmul
from graphrt.fusion import Fusion, Nodes, Softcap, scaled_by_row, softcaps
from graphrt.ops.flash_attn_varlen import longest
from graphrt.ops.rope import rope_frequencies
from graphrt.ops.soft_max import alibi_slopes
from graphrt.program import Group
from graphrt.tensor import Tensor

#: The most steps that SET_ROWS becomes, one for each of dimension 3.
MAX_SETS = 8


class ScaledNorm(NamedTuple):
    """RMS_NORM, and the MUL of it with one row of weights."""

    norm: Tensor
    scaled: Tensor


def norm_mul(nodes: Nodes) -> Iterator[Group]:
    """RMS_NORM, then MUL with one row of weights."""
    for norm in nodes.of("RMS_NORM"):
        scaled = scaled_by_row(nodes, norm)
        if scaled is not None:
            yield Group([norm, scaled], kernel="norm_mul", captured=ScaledNorm(norm, scaled))


def softcap(nodes: Nodes) -> Iterator[Group]:
    """SCALE by 1/c, tanh, SCALE by c."""
    for found in softcaps(nodes):
        if abs(found.inner.params.scale * found.out.params.scale - 1.0) < 1e-6:
            yield Group(list(found), kernel="softcap", captured=found)


def lower(low: Lowering, group: Group) -> Any | None:
    """Native steps that a program may join, a function, or None when the group is for the reference."""
    if group.fusion is not None:
        return group.fusion.lower(low, group.captured)
    method = _METHODS.get(group.nodes[-1].op)
    return method(low, group.nodes[-1]) if method is not None else None


def rms_norm(low: Lowering, out: Tensor) -> Any | None:
    return _norm(low, out, out, None)


def lower_norm_mul(low: Lowering, found: ScaledNorm) -> Any | None:
    return _norm(low, found.norm, found.scaled, found.scaled["b"])


def _norm(low: Lowering, norm: Tensor, out: Tensor, weight: Tensor | None) -> Any | None:
    x = norm["a"]
    source, target = rows_of(x), rows_of(out)
    if source is None or target is None:
        return None
    return [
        fast.rms_norm(
            y=low.at(out), x=low.at(x), w=low.at(weight), n_rows=source[0], n=x.ne[0], x_nb=source[1],
            y_nb=target[1], eps=norm.params.eps,
        )
    ]  # fmt: skip


def _elementwise(
    low: Lowering, op: str, out: Tensor, a: Tensor, b: Tensor | None = None, s0: float = 0.0, s1: float = 0.0
) -> Any | None:
    """op over rows; b has a's shape or is one row for all."""
    left, target = rows_of(a), rows_of(out)
    right = rows_of(b) if b is not None else (0, 0)
    if left is None or right is None or target is None or out.ne != a.ne:
        return None
    if b is not None and b.ne != a.ne and b.ne != (a.ne[0], 1, 1, 1):
        return None
    b_nb = right[1] if b is not None and b.ne == a.ne else 0
    return [
        fast.elementwise(
            op, y=low.at(out), a=low.at(a), b=low.at(b), n_rows=left[0], n=a.ne[0], y_nb=target[1], a_nb=left[1],
            b_nb=b_nb, s0=s0, s1=s1,
        )
    ]  # fmt: skip


def add_or_mul(low: Lowering, out: Tensor) -> Any | None:
    return _elementwise(low, out.op.lower(), out, out["a"], out["b"])


def scale(low: Lowering, out: Tensor) -> Any | None:
    return _elementwise(low, "scale", out, out["a"], s0=out.params.scale, s1=out.params.bias)


def lower_softcap(low: Lowering, found: Softcap) -> Any | None:
    return _elementwise(low, "softcap", found.out, found.inner["a"], s0=found.out.params.scale)


def unary(low: Lowering, out: Tensor) -> Any | None:
    known = out.params.kind in ("silu", "gelu", "relu")
    return _elementwise(low, out.params.kind, out, out["a"]) if known else None


def glu(low: Lowering, out: Tensor) -> Any | None:
    gate, value = out["gate"], out["value"]
    if value is None:
        return None
    if out.params.kind == "swiglu_oai":
        p = out.params
        return _elementwise(low, "swiglu_oai", out, gate, value, s0=p.alpha, s1=p.limit)
    return _elementwise(low, f"{ACTIVATIONS[out.params.kind]}_glu", out, gate, value)


def rope(low: Lowering, out: Tensor) -> Any | None:
    x, factors = out["a"], out["factors"]
    constant = factors is None or (factors.buffer is not None and factors.is_contiguous)
    if x.dtype.name != "f32" or x.ne[3] != 1 or not x.has_contiguous_rows or not constant:
        return None
    divide_by = low.look(factors).reshape(-1).tolist() if factors is not None else None
    theta, magnitude = rope_frequencies(out.params, divide_by)
    return [
        fast.rope(
            y=low.at(out), x=low.at(x), pos=low.at(out["positions"]), freq=low.array(theta, np.float64),
            head_dim=x.ne[0], n_dims=out.params.n_dims, neox=out.params.mode == "neox", n_head=x.ne[1], n_tok=x.ne[2],
            x_nb1=x.nb[1], x_nb2=x.nb[2], y_nb1=out.nb[1], y_nb2=out.nb[2], mscale=magnitude,
        )
    ]  # fmt: skip


def get_rows(low: Lowering, out: Tensor) -> Any | None:
    table, ids = out["table"], out["ids"]
    flat = table.ne[2] == table.ne[3] == 1 and ids.is_contiguous and table.has_contiguous_rows
    if not flat or table.dtype.name not in fast.TYPES:
        return None
    return [
        fast.get_rows(
            table.dtype.name, "i32", dst=low.at(out), w=low.at(table), idx=low.at(ids), n_rows=ids.ne[0],
            n=table.ne[0], w_nb=table.nb[1], dst_nb=out.nb[1], n_src=table.ne[1],
        )
    ]  # fmt: skip


def set_rows(low: Lowering, out: Tensor) -> Any | None:
    rows, ids, target = out["rows"], out["ids"], out["target"]
    lies = rows_of(rows)
    n_sets, n_rows, n_idx = rows.ne[3], rows.ne[1] * rows.ne[2], ids.ne[0] * ids.ne[1]
    known = target.dtype.name in fast.SET_ROWS_TYPES and ids.is_contiguous and n_sets <= MAX_SETS
    if lies is None or not known:
        return None
    return [
        fast.set_rows(
            target.dtype.name, ids.dtype.name, src=low.at(rows) + i * n_rows * lies[1],
            idx=low.at(ids) + i % ids.ne[2] * n_idx * ids.dtype.type_size, dst=low.at(target) + i * target.nb[3],
            n_rows=n_rows, n=rows.ne[0], src_nb=lies[1], dst_nb=target.nb[1], n_dst=target.ne[1], n_idx=n_idx,
            per_matrix=rows.ne[1], matrix_nb=target.nb[2],
        )
        for i in range(n_sets)
    ]  # fmt: skip


def kq_mask(low: Lowering, out: Tensor) -> Any | None:
    cells, pos = out["cells"], out["pos"]
    return [
        fast.kq_mask(
            dst=low.at(out), cells=low.at(cells), pos=low.at(pos), n_cells=out.ne[0], n_tokens=out.ne[1],
            n_seq=out.ne[3], cells_nb=cells.nb[1], pos_nb=pos.nb[1], window=out.params.window,
            alibi=out.params.alibi,
        )
    ]  # fmt: skip


def flash_attn(low: Lowering, out: Tensor) -> Any | None:
    q, k, v, mask = out["q"], out["k"], out["v"], out["mask"]
    known = k.dtype.name in fast.KV_TYPES and v.dtype.name in fast.KV_TYPES
    if not known or not all(t.has_contiguous_rows for t in (q, k, v)):
        return None
    p = out.params
    slopes = low.array(alibi_slopes(q.ne[2], p.max_bias), np.float32) if p.max_bias else 0
    return [
        fast.flash_attn(
            k.dtype.name, v.dtype.name, d_k=k.ne[0], d_v=v.ne[0], n_q=q.ne[1], n_kv=k.ne[1], n_head=q.ne[2],
            n_head_kv=k.ne[2], n_seq=q.ne[3], q=low.at(q), q_nb=q.nb[1:], k=low.at(k), k_nb=k.nb[1:], v=low.at(v),
            v_nb=v.nb[1:], out=low.at(out), out_nb=out.nb[1:], scale=p.scale, mask=low.at(mask),
            mask_nb=mask.nb[1:] if mask is not None else (0, 0, 0), mask_ne=mask.ne[2:] if mask is not None else (1, 1),
            softcap=p.softcap, sinks=low.at(out["sinks"]), slopes=slopes,
        )
    ]  # fmt: skip


def flash_attn_varlen(low: Lowering, out: Tensor) -> Any | None:
    q, k, v, table = out["q"], out["k"], out["v"], out["block_table"]
    known = k.dtype.name in fast.KV_TYPES and v.dtype.name in fast.KV_TYPES
    if not known or not all(t.has_contiguous_rows for t in (q, k, v)):
        return None
    p, kv = out.params, out["lengths"] if table is not None else out["k_starts"]
    slopes = low.array(alibi_slopes(q.ne[2], p.max_bias), np.float32) if p.max_bias else 0
    return [
        fast.flash_attn_varlen(
            k.dtype.name, v.dtype.name, d_k=k.ne[0], d_v=v.ne[0], n_tokens=q.ne[1], most_keys=longest(out),
            n_head=q.ne[2], n_head_kv=k.ne[2], n_seq=out["q_starts"].ne[0] - 1, q=low.at(q), q_nb=q.nb[1:3],
            k=low.at(k), k_nb=k.nb[1:], v=low.at(v), v_nb=v.nb[1:], out=low.at(out), out_nb=out.nb[1:3],
            q_starts=low.at(out["q_starts"]), kv=low.at(kv), scale=p.scale, page=k.ne[1] if table is not None else 0,
            n_pages=k.ne[3], table=low.at(table), table_nb=table.nb[1] if table is not None else 0, causal=p.causal,
            window=p.window, softcap=p.softcap, sinks=low.at(out["sinks"]), slopes=slopes,
        )
    ]  # fmt: skip


#: By op, for nodes that run by themselves.
_METHODS: dict[str, Callable[[Lowering, Tensor], Any | None]] = {
    "RMS_NORM": rms_norm, "MUL_MAT": matmul, "MUL_MAT_ID": mul_mat_id, "ADD": add_or_mul, "MUL": add_or_mul,
    "SCALE": scale, "UNARY": unary, "GLU": glu, "ROPE": rope, "GET_ROWS": get_rows, "SET_ROWS": set_rows,
    "KQ_MASK": kq_mask, "FLASH_ATTN_EXT": flash_attn,
    "FLASH_ATTN_VARLEN": flash_attn_varlen,
}  # fmt: skip


NORM_MUL = Fusion("norm_mul", norm_mul, lower_norm_mul)
SOFTCAP = Fusion("softcap", softcap, lower_softcap)
