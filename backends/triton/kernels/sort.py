"""ARGMAX, ARGSORT, TOP_K: indices in rows of f32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import Call, accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.tensor import Tensor

#: Less than the key of any value.
LEAST_KEY = -(2**63)
#: Most elements that one program looks at at a time.
_MOST = 2048


@triton.jit
def order_keys(x, i):
    """int64 that are ordered as the values are, NaN last, and among equal values the one of the lowest index last."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    ordered = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64)


@accesses(reads="p_a p_keys p_arrived", writes="p_keys p_arrived p_out")
@triton.jit
def argmax_rows(
    p_a, p_keys, p_arrived, p_out, n, s0, s1, LEAST: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (row, i) looks at every so many SIZE elements of a row of n. The last one of a row to finish writes out.

    keys: int64 [rows], LEAST between runs; arrived: int32 [rows], 0 between runs; out: int32 [rows].
    """
    take_turn(PDL)
    row = tl.program_id(0)
    p_row = p_a + row.to(tl.int64) * s1
    best = tl.full([SIZE], LEAST, tl.int64)
    for base in range(tl.program_id(1) * SIZE, n, tl.num_programs(1) * SIZE):
        i = base + tl.arange(0, SIZE)
        x = tl.load(p_row + i.to(tl.int64) * s0, mask=i < n, other=0.0)
        best = tl.maximum(best, tl.where(i < n, order_keys(x, i), LEAST))
    # The counting, which releases and acquires, orders the two exchanges of the key.
    tl.atomic_max(p_keys + row, tl.max(best, 0), sem="relaxed")
    if tl.atomic_add(p_arrived + row, 1) == tl.num_programs(1) - 1:
        key = tl.atomic_xchg(p_keys + row, tl.full([], LEAST, tl.int64), sem="relaxed")
        tl.store(p_out + row, 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32))
        tl.store(p_arrived + row, 0)


def lower_argmax(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """ARGMAX: the first of equal ones; a NaN is the largest."""
    node = nodes[0]
    a = ctx.view(node["a"])
    n, m = a.ne[:2]
    keys = ctx.scratch((m,), torch.int64).fill_(LEAST_KEY)
    arrived = ctx.scratch((m,), torch.int32).zero_()
    wanted = max(1, ctx.target.sm_count // m)
    size = max(256, min(_MOST, 1 << (-(-n // wanted) - 1).bit_length()))
    programs = min(-(-n // size), max(1, 2 * ctx.target.sm_count // m))
    args = {
        "p_a": a.data, "p_keys": keys, "p_arrived": arrived, "p_out": ctx.view(node).data, "n": n,
        "s0": a.strides[0], "s1": a.strides[1], "LEAST": LEAST_KEY, "SIZE": size, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return [Launch(argmax_rows, (m, programs), args, launch_options(ctx.target, 4))]


def lower_argsort(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """ARGSORT, by torch."""
    node = nodes[0]
    a, out, descending = ctx.view(node["a"]).torch(), ctx.view(node).torch(), node.params.descending

    def step() -> None:
        out.copy_(torch.sort(a, dim=-1, descending=descending, stable=True).indices)

    return [Call("sort", step, [a], [out])]


def lower_top_k(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """TOP_K, by torch: in no particular order."""
    node = nodes[0]
    a, out, k = ctx.view(node["a"]).torch(), ctx.view(node).torch(), node.params.k

    def step() -> None:
        out.copy_(torch.topk(a, k, dim=-1, sorted=False).indices)

    return [Call("topk", step, [a], [out])]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "ARGMAX": lower_argmax, "ARGSORT": lower_argsort, "TOP_K": lower_top_k,
}  # fmt: skip
