"""Lowering for the CPU backend's fast form: a group of nodes to native steps, or to a few torch calls.

What rows become by themselves is in `lower_rows.py` and `lower_maps.py`, products in `products.py` and `experts.py`.
Small batches are bound by memory, so their matrices are read as the file's blocks by the kernels of `fast`, and a whole
decode step becomes one native program. Large ones are bound by arithmetic: blocks are decoded a slice at a time and go
through oneDNN. Both compute in f32 from the same weights as the reference; nothing is rounded that it does not round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphrt.backends.cpu import fast, lower_maps, lower_rows
from graphrt.backends.cpu.experts import mul_mat_id
from graphrt.backends.cpu.lowering import Lowering
from graphrt.backends.cpu.products import matmul
from graphrt.ops.flash_attn_ext import is_scaled
from graphrt.ops.flash_attn_varlen import longest
from graphrt.ops.key_panels import ROWS
from graphrt.ops.rope import rope_frequencies
from graphrt.ops.score import built_in
from graphrt.ops.soft_max import alibi_slopes
from graphrt.program import Group
from graphrt.tensor import Tensor


def lower(low: Lowering, group: Group) -> Any | None:
    """Native steps that a program may join, a function, or None when the group is for the reference."""
    if group.fusion is not None:
        return group.fusion.lower(low, group.captured)
    method = _METHODS.get(group.nodes[-1].op)
    return method(low, group.nodes[-1]) if method is not None else None


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


def kq_mask(low: Lowering, out: Tensor) -> Any | None:
    cells, pos = out["cells"], out["pos"]
    return [
        fast.kq_mask(
            dst=low.at(out), cells=low.at(cells), pos=low.at(pos), n_cells=out.ne[0], n_tokens=out.ne[1],
            n_seq=out.ne[3], cells_nb=cells.nb[1], pos_nb=pos.nb[1], window=out.params.window,
            alibi=out.params.alibi,
        )
    ]  # fmt: skip


def why_reference(node: Tensor) -> str:
    """Why a node has no fast form that others of its op have, "" where there is nothing to say."""
    if getattr(node.params, "k_layout", ROWS) != ROWS:
        return "native attention reads keys in rows"
    return "native attention has no score function" if getattr(built_in(node.params), "score", "") else ""


def flash_attn(low: Lowering, out: Tensor) -> Any | None:
    q, k, v, mask = out["q"], out["k"], out["v"], out["mask"]
    known = k.dtype.name in fast.KV_TYPES and v.dtype.name in fast.KV_TYPES
    p = built_in(out.params)
    plain = out["attn_bias"] is None and p.dropout_p == 0.0 and not p.score and p.k_layout == ROWS
    plain = plain and not is_scaled(out)
    if q.dtype.name != "f32" or not plain or not known or not all(t.has_contiguous_rows for t in (q, k, v)):
        return None
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
    q, k, v, table, mask = out["q"], out["k"], out["v"], out["block_table"], out["mask"]
    known = k.dtype.name in fast.KV_TYPES and v.dtype.name in fast.KV_TYPES
    p, kv = built_in(out.params), out["lengths"] if table is not None else out["k_starts"]
    if p.score or not known or not all(t.has_contiguous_rows for t in (q, k, v)):
        return None
    slopes = low.array(alibi_slopes(q.ne[2], p.max_bias), np.float32) if p.max_bias else 0
    return [
        fast.flash_attn_varlen(
            k.dtype.name, v.dtype.name, d_k=k.ne[0], d_v=v.ne[0], n_tokens=q.ne[1], most_keys=longest(out),
            n_head=q.ne[2], n_head_kv=k.ne[2], n_seq=out["q_starts"].ne[0] - 1, q=low.at(q), q_nb=q.nb[1:3],
            k=low.at(k), k_nb=k.nb[1:], v=low.at(v), v_nb=v.nb[1:], out=low.at(out), out_nb=out.nb[1:3],
            q_starts=low.at(out["q_starts"]), kv=low.at(kv), scale=p.scale, page=k.ne[1] if table is not None else 0,
            n_pages=k.ne[3], table=low.at(table), table_nb=table.nb[1] if table is not None else 0, causal=p.causal,
            window=p.window, softcap=p.softcap, sinks=low.at(out["sinks"]), slopes=slopes, mask=low.at(mask),
            mask_nb=mask.nb[1:3] if mask is not None else (0, 0), mask_ne=(mask.ne[0], mask.ne[2]) if mask is not None
            else (0, 1), mask_new=p.mask_new,
        )
    ]  # fmt: skip


#: By op, for nodes that run by themselves.
_METHODS: dict[str, Callable[[Lowering, Tensor], Any | None]] = {
    "MUL_MAT": matmul, "MUL_MAT_ID": mul_mat_id, "ROPE": rope, "KQ_MASK": kq_mask, "FLASH_ATTN_EXT": flash_attn,
    "FLASH_ATTN_VARLEN": flash_attn_varlen, **lower_maps.METHODS, **lower_rows.METHODS,
}  # fmt: skip
