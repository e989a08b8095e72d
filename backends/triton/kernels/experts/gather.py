"""Rows of activations in the order of sorted pairs, in f16, as wgmma.py takes them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, View
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.experts.pairs import Pairs
from graphrt.backends.triton.kernels.products.activations import ordered_element
from graphrt.backends.triton.kernels.products.half import Activations
from graphrt.backends.triton.kernels.products.half_kernels import scaling_of
from graphrt.backends.triton.launch import Launch, launch_options

#: The longest rows that a program holds.
MAX_ROW = 16384
#: Elements of which the order is one (gemm_small/wgmma.py).
_STEP = 128


@accesses(reads="p_x p_sorted", writes="p_out p_factors")
@triton.jit(do_not_specialize=("used", "x_slots", "stride_0", "stride_1", "stride_2", "k", "row"))
def gather_rows(
    p_x, stride_0, stride_1, stride_2, p_sorted, used, x_slots, p_out, p_factors, k, row,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: x[token, slot] of pair sorted[i] to row i of out, f16 [pairs, row], ordered, and its factor.

    x: f32 or f16 of any strides (of elements, slots, tokens), one slot a token or `used`. What is past k becomes 0.
    """
    i_pair = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    take_turn(PDL)
    pair = tl.load(p_sorted + i_pair, cache_modifier=".cg").to(tl.int64)
    p_x += pair // used * stride_2 + tl.minimum(pair % used, x_slots - 1) * stride_1
    element = ordered_element(i)
    x = tl.load(p_x + element.to(tl.int64) * stride_0, mask=element < k, other=0.0).to(tl.float32)
    scale, factor = scaling_of(x)
    tl.store(p_out + i_pair.to(tl.int64) * row + i, (x * scale).to(tl.float16), mask=i < row)
    tl.store(p_factors + i_pair, factor)


def gathered(x: View, pairs: Pairs, ctx: Context) -> tuple[Activations, Launch]:
    """x [k, slots, tokens] as rows of pairs, ordered, and what makes them so. Rows are k rounded up to 128 elements."""
    k, slots = x.ne[0], x.ne[1]
    row = triton.cdiv(k, _STEP) * _STEP
    nbytes = pairs.count * row * 2
    out = ctx.shared_scratch("activations of pairs", nbytes)[:nbytes].view(torch.float16).view(pairs.count, row)
    factors = ctx.shared_scratch("factors of pairs", pairs.count * 4)[: pairs.count * 4].view(torch.float32)
    block = triton.next_power_of_2(row)
    args: dict[str, Any] = {
        "p_x": x.data, "stride_0": x.strides[0], "stride_1": x.strides[1], "stride_2": x.strides[2],
        "p_sorted": pairs.sorted, "used": pairs.used, "x_slots": slots, "p_out": out, "p_factors": factors, "k": k,
        "row": row, "BLOCK": block, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    options = launch_options(ctx.target, max(1, min(16, block // 512)))
    return Activations(out, factors, ordered=True), Launch(gather_rows, (pairs.count,), args, options)
