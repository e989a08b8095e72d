"""The launches of FLASH_ATTN_BACK: delta once for all nodes of an attention, then a kernel for each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.backward.kernels import (
    attention_back_delta,
    attention_back_kv,
    attention_back_q,
    attention_back_sinks,
)
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

#: Rows that a program of attention_back_delta, and a step of attention_back_sinks, takes.
DELTA_ROWS, SINK_ROWS = 16, 1024
#: Of products, all operands being f32, since gradients need its range. (On an H100, f32 in three tf32 products was off
#: by up to 4 times what a case allows, f16 in one too, whose operands the hardware cuts off at 10 bits; three spill.)
PRECISION = "ieee"
#: Bytes of shared memory from which the larger tiles fit.
ROOMY = 140_000


def tiling(d: int, target: Target) -> tuple[int, int, int]:
    """Queries and keys of a tile, and warps, for heads of so many elements: what neither spills in its loops nor takes
    more shared memory than there is."""
    if target.shared_memory < ROOMY:
        return (32, 32, 4) if d <= 64 else (16, 16, 4)
    return (32, 32, 8) if d <= 64 else (16, 32, 8) if d <= 128 else (16, 16, 8)


def _delta(node: Tensor, ctx: Context) -> tuple[torch.Tensor, list[Step]]:
    """delta [n_seq, n_head, n_q], and the launch that makes it if none before does."""
    d_lse = node["d_lse"]
    key = ("attention_back_delta", node["d_out"], node["out"], d_lse)
    if key in ctx.shared:
        return ctx.shared[key], []
    d_out, out = ctx.view(node["d_out"]), ctx.view(node["out"])
    of_lse = ctx.view(d_lse) if d_lse is not None else None
    d_v, n_head, n_q, n_seq = node["out"].ne
    rows = n_seq * n_head * n_q
    made = ctx.shared[key] = ctx.scratch((rows,), torch.float32)
    strides = of_lse.strides if of_lse is not None else (0, 0, 0, 0)
    args = {
        "p_d_out": d_out.data, "p_out": out.data, "p_d_lse": of_lse.data if of_lse is not None else out.data,
        "p_delta": made, "n_rows": rows, "n_q": n_q, "n_head": n_head,
        **dict(zip(("od_h", "od_t", "od_s"), d_out.strides[1:])),
        **dict(zip(("oo_h", "oo_t", "oo_s"), out.strides[1:])), **dict(zip(("ol_h", "ol_t", "ol_s"), strides)),
        "D_V": d_v, "BLOCK": triton.next_power_of_2(d_v),
        "ROWS": DELTA_ROWS, "HAS_D_LSE": d_lse is not None, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    grid = (-(-rows // DELTA_ROWS),)
    return made, [Launch(attention_back_delta, grid, args, launch_options(ctx.target, 4))]


def _arguments(node: Tensor, delta: torch.Tensor, ctx: Context) -> dict[str, Any]:
    """What the kernels of q and of k and v have in common."""
    q, k, v, d_out, lse = (ctx.view(node[name]) for name in ("q", "k", "v", "d_out", "lse"))
    mask = ctx.view(node["mask"]) if node["mask"] is not None else None
    p, d_k, d_v = node.params, node["q"].ne[0], node["v"].ne[0]
    m_strides = mask.strides[1:] if mask is not None else (0, 0, 0)
    block_m, block_n, _ = _tiling(node, ctx)
    return {
        "p_q": q.data, "p_k": k.data, "p_v": v.data, "p_d_out": d_out.data, "p_lse": lse.data, "p_delta": delta,
        "p_mask": mask.data if mask is not None else q.data,
        "p_slopes": torch.tensor(alibi_slopes(q.ne[2], p.max_bias), device=ctx.target.device),
        "p_result": ctx.view(node).data, "n_q": q.ne[1], "n_kv": k.ne[1], "n_head": q.ne[2], "gqa": q.ne[2] // k.ne[2],
        **dict(zip(("sq_t", "sq_h", "sq_s"), q.strides[1:])), **dict(zip(("sk_n", "sk_h", "sk_s"), k.strides[1:])),
        **dict(zip(("sv_n", "sv_h", "sv_s"), v.strides[1:])), **dict(zip(("od_h", "od_t", "od_s"), d_out.strides[1:])),
        **dict(zip(("ol_h", "ol_t", "ol_s"), lse.strides)), **dict(zip(("sm_t", "sm_h", "sm_s"), m_strides)),
        "m2": mask.ne[2] if mask is not None else 1, "m3": mask.ne[3] if mask is not None else 1,
        "scale": p.scale, "softcap": p.softcap, "D_K": d_k, "D_V": d_v,
        "BLOCK_K": max(16, triton.next_power_of_2(d_k)), "BLOCK_V": max(16, triton.next_power_of_2(d_v)),
        "BLOCK_M": block_m, "BLOCK_N": block_n, "HAS_MASK": mask is not None, "SOFTCAP": p.softcap > 0,
        "PRECISION": PRECISION, "PDL": ctx.target.has_pdl,
    }  # fmt: skip


def _tiling(node: Tensor, ctx: Context) -> tuple[int, int, int]:
    d = max(node["k"].ne[0], node["v"].ne[0])
    return tiling(d, ctx.target)


def lower_flash_attn_back(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """FLASH_ATTN_BACK."""
    node = nodes[0]
    delta, steps = _delta(node, ctx)
    of, q, k = node.params.of, node["q"], node["k"]
    if of == "sinks":
        return [*steps, _of_sinks(node, delta, ctx)]
    args = _arguments(node, delta, ctx)
    options = launch_options(ctx.target, _tiling(node, ctx)[2])
    if of == "q":
        grid = (-(-q.ne[1] // args["BLOCK_M"]), q.ne[2], q.ne[3])
        return [*steps, Launch(attention_back_q, grid, args, options)]
    grid = (-(-k.ne[1] // args["BLOCK_N"]), k.ne[2], k.ne[3])
    return [*steps, Launch(attention_back_kv, grid, args | {"OF_V": of == "v"}, options)]


def _of_sinks(node: Tensor, delta: torch.Tensor, ctx: Context) -> Step:
    lse, sinks = ctx.view(node["lse"]), node["sinks"]
    assert sinks is not None
    _, n_q, n_head, n_seq = node["q"].ne
    # f32 [n_head] in one dimension or another, whose stride is the smallest of those over one element
    held = ctx.view(sinks)
    stride = next((step for step, n in zip(held.strides, held.ne) if n > 1), 1)
    args = {
        "p_lse": lse.data, "p_delta": delta, "p_sinks": held.data, "p_result": ctx.view(node).data, "n_q": n_q,
        "n_head": n_head, "n_seq": n_seq, **dict(zip(("ol_h", "ol_t", "ol_s"), lse.strides)), "s_sinks": stride,
        "ROWS": SINK_ROWS, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return Launch(attention_back_sinks, (n_head,), args, launch_options(ctx.target, 4))


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {"FLASH_ATTN_BACK": lower_flash_attn_back}
