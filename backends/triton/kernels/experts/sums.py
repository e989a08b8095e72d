"""ADD_ID: biases of experts; and the sum of a token's experts' results times its weights for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.tensor import Tensor

#: Most elements of a row that a program takes, and slots whose elements it asks for at once.
_MOST = 1024
_AT_ONCE = tl.constexpr(8)


@accesses(reads="p_a p_b p_ids", writes="p_out")
@triton.jit(do_not_specialize=["n", "used", "a0", "a1", "a2", "b0", "b1", "ids0", "ids1", "n_expert"])
def add_id(
    p_a, a0, a1, a2, p_b, b0, b1, p_ids, ids0, ids1, p_out, n, used, n_expert, SIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (pair, i): SIZE elements of out[pair, :] = a[:, slot, token] + b[:, id]; out: without gaps.

    NaN where the id is no expert's.
    """
    take_turn(PDL)
    pair = tl.program_id(0)
    token, slot = (pair // used).to(tl.int64), pair % used
    expert = tl.load(p_ids + token * ids1 + slot * ids0)
    inside = (expert >= 0) & (expert < n_expert)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    m_load = i < n
    a = tl.load(p_a + token * a2 + slot.to(tl.int64) * a1 + i.to(tl.int64) * a0, mask=m_load, other=0.0)
    b = tl.load(p_b + expert.to(tl.int64) * b1 + i.to(tl.int64) * b0, mask=m_load & inside, other=float("nan"))
    tl.store(p_out + pair.to(tl.int64) * n + i, a + b, mask=m_load)


@accesses(reads="p_x p_factors", writes="p_out")
@triton.jit(do_not_specialize=["n", "used", "x1", "x2", "factor0", "factor1"])
def weighted_sum(
    p_x, x1, x2, p_factors, factor0, factor1, p_out, n, used, SIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (token, i): SIZE elements of out[token, :] = sum over slots, in order, of x[:, slot, token] * factor."""
    take_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for first in range(0, used, _AT_ONCE):
        for j in tl.static_range(_AT_ONCE):  # all are asked for before the first is needed
            slot = first + j
            factor = tl.load(p_factors + token * factor1 + slot * factor0, mask=slot < used, other=0.0)
            x = tl.load(p_x + token * x2 + slot * x1 + i, mask=(i < n) & (slot < used), other=0.0)
            total += x * factor
    tl.store(p_out + token * n + i, total, mask=i < n)


def _size(n: int) -> int:
    return max(32, min(_MOST, 1 << (n - 1).bit_length()))


def lower_add_id(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """ADD_ID."""
    node = nodes[0]
    a, b, ids = (ctx.view(node[name]) for name in ("a", "bias", "ids"))
    size = _size(node.ne[0])
    args: dict[str, Any] = {
        "p_a": a.data, "a0": a.strides[0], "a1": a.strides[1], "a2": a.strides[2], "p_b": b.data, "b0": b.strides[0],
        "b1": b.strides[1], "p_ids": ids.data, "ids0": ids.strides[0], "ids1": ids.strides[1],
        "p_out": ctx.view(node).data, "n": node.ne[0], "used": node.ne[1], "n_expert": b.ne[1], "SIZE": size,
        "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    grid = (node.ne[1] * node.ne[2], -(-node.ne[0] // size))
    return [Launch(add_id, grid, args, launch_options(ctx.target, max(1, min(4, size // 256))))]


def weighted_sum_launch(
    x: torch.Tensor, x_strides: tuple[int, int], factors: View, out: torch.Tensor, ctx: Context
) -> Launch:
    """out, f32 [tokens, n] without gaps, of x, flat f32 (strides of slots, of tokens). factors: [1, used, tokens]."""
    tokens, n = out.shape
    size = _size(n)
    args = {
        "p_x": x, "x1": x_strides[0], "x2": x_strides[1], "p_factors": factors.data, "factor0": factors.strides[1],
        "factor1": factors.strides[2], "p_out": out, "n": n, "used": factors.ne[1], "SIZE": size,
        "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    grid = (tokens, -(-n // size))
    return Launch(weighted_sum, grid, args, launch_options(ctx.target, max(1, min(4, size // 256))))
