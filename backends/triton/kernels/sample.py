"""SAMPLE and SAMPLE_EACH: the k highest logits in order, then the truncations and the draw, in five launches without
the host.

A key has a logit's order above its place in the row (sort.order_keys): no two of a row are equal, so that "the k
highest" is one set and its order is one order, whichever program comes first.

1. The largest key of each block of a row. The k-th largest of these is no larger than the k-th largest of the row.
2. The blocks' largest keys in order: that bound.
3. What is not below the bound, in any order. Few keys beyond k, and never more than k blocks of them. Where a mask
   leaves fewer than k logits above -inf the bound is a key of -inf, and thousands of equal logits are not below it: of
   these only the first 2 k places can be among the k highest keys, k - 1 places of which others can have.
4. These in order, by how many are larger than each.
5. The truncations and the draw, one program a row (draw.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.draw import draw
from graphrt.backends.triton.kernels.sort import LEAST_KEY, order_keys
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.ops.sample_each import N_SETTINGS, RowSettings
from graphrt.tensor import Tensor

#: Most elements of a block, and of what one program reads of a row.
_BLOCK, _MOST = 512, 2048
#: Blocks there are at least for each key that is wanted: the more, the fewer keys are kept that are not.
_BLOCKS_A_KEY = 4
#: Keys that a program puts in order, and how many others it compares them with at a time.
_MINE, _OTHERS = 16, 128


@accesses(reads="p_a", writes="p_maxima p_kept")
@triton.jit
def block_maxima(
    p_a, p_maxima, p_kept, n, n_blocks, s0, s1,
    LEAST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, i) finds the largest key of each of BLOCKS blocks of a row of n logits. maxima: [rows, n_blocks].

    kept: int32 [rows], set to 0.
    """
    take_turn(PDL)
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(p_a + row.to(tl.int64) * s1 + i.to(tl.int64) * s0, mask=i < n, other=0.0)
    keys = tl.where(i < n, order_keys(x, i), LEAST)
    tl.store(p_maxima + row.to(tl.int64) * n_blocks + block, tl.max(keys, 1), mask=block < n_blocks)
    if tl.program_id(1) == 0:
        tl.store(p_kept + row, 0)


@accesses(reads="p_a p_tops p_kept", writes="p_kept p_keys")
@triton.jit
def keep_keys(p_a, p_tops, p_kept, p_keys, n, capacity, k, s0, s1, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Program (row, i) keeps those of SIZE keys of a row that are not below tops[row, k - 1], and of -inf only those
    that can be among the k highest. keys: [rows, capacity]; kept: int32 [rows], how many there are."""
    take_turn(PDL)
    row = tl.program_id(0)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    x = tl.load(p_a + row.to(tl.int64) * s1 + i.to(tl.int64) * s0, mask=i < n, other=0.0)
    keys = order_keys(x, i)
    keep = (i < n) & (keys >= tl.load(p_tops + row * k + k - 1)) & ((x != float("-inf")) | (i < 2 * k))
    count = tl.sum(keep.to(tl.int32), 0)
    if count > 0:
        start = tl.atomic_add(p_kept + row, count, sem="relaxed")
        place = start + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(p_keys + row.to(tl.int64) * capacity + place, keys, mask=keep)


@accesses(reads="p_keys p_n", writes="p_sorted")
@triton.jit
def sort_keys(
    p_keys, p_n, p_sorted, capacity, k, LEAST: tl.constexpr, MINE: tl.constexpr, OTHERS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (row, i) puts every so many MINE keys of a row in their places, if these are below k: as many as there
    are larger keys. keys: [rows, capacity], of which n[row] count; sorted: [rows, k]."""
    take_turn(PDL)
    row = tl.program_id(0)
    n = tl.load(p_n + row)
    p_row = p_keys + row.to(tl.int64) * capacity
    for base in range(tl.program_id(1) * MINE, n, tl.num_programs(1) * MINE):
        i = base + tl.arange(0, MINE)
        mine = tl.load(p_row + i, mask=i < n, other=LEAST)
        larger = tl.zeros([MINE, OTHERS], tl.int32)
        for start in range(0, n, OTHERS):
            j = start + tl.arange(0, OTHERS)
            other = tl.load(p_row + j, mask=j < n, other=LEAST)
            larger += (other[None, :] > mine[:, None]).to(tl.int32)
        place = tl.sum(larger, 1)
        tl.store(p_sorted + row * k + place, mine, mask=(i < n) & (place < k))


def lower_sample(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """SAMPLE: all rows by one column of settings."""
    node = nodes[0]
    settings = ctx.scratch((N_SETTINGS,), torch.float64)
    settings.copy_(torch.tensor(RowSettings.of(node.params).column, dtype=torch.float64))
    return _drawn(node, node.params.top_k, settings, None, ctx.view(node["uniforms"]).strides[0], ctx)


def lower_sample_each(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """SAMPLE_EACH."""
    node = nodes[0]
    settings, slots = (ctx.view(node[name]).data for name in ("settings", "slots"))
    return _drawn(node, node.params.most, settings, slots, 2, ctx)


def _drawn(
    node: Tensor, most: int, settings: torch.Tensor, slots: torch.Tensor | None, su: int, ctx: Context
) -> list[Step]:
    """The five launches. most: candidates of a row; su: the stride of rows' uniform numbers."""
    a, options = ctx.view(node["logits"]), launch_options(ctx.target, 4)
    n, m = a.ne[:2]
    k = min(most, n)
    width = triton.next_power_of_2(k)
    steps, best = _highest(a, k, ctx)
    last = {
        "p_sorted": best, "p_uniforms": ctx.view(node["uniforms"]).data, "p_slots": slots, "p_settings": settings,
        "p_shares": ctx.scratch((m, 2, width), torch.float64), "p_out": ctx.view(node).data, "k": k, "su": su,
        "SIZE": width, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    exact = {**options, "num_warps": max(1, min(8, width // 128)), "enable_fp_fusion": False}
    return [*steps, Launch(draw, (m,), last, exact)]


def _highest(a: View, k: int, ctx: Context) -> tuple[list[Step], torch.Tensor]:
    """What finds the k highest of each row, and where their keys are then, in order: [rows, k]."""
    n, m = a.ne[:2]
    block = min(_BLOCK, 1 << (max(1, n // (_BLOCKS_A_KEY * k)).bit_length() - 1))
    n_blocks, capacity = -(-n // block), min(n, k * block)
    wanted = max(1, ctx.target.sm_count // m)
    size = max(_BLOCK, min(_MOST, triton.next_power_of_2(-(-n // wanted))))
    maxima, keys = (ctx.scratch((m, width), torch.int64) for width in (n_blocks, capacity))
    tops, best = (ctx.scratch((m, k), torch.int64) for _ in "ab")
    all_blocks, kept = (ctx.scratch((m,), torch.int32).fill_(n_blocks) for _ in "ab")
    pdl, sizes = {"PDL": ctx.target.has_pdl}, {"n": n, "s0": a.strides[0], "s1": a.strides[1]}

    def in_order(source: torch.Tensor, count: torch.Tensor, target: torch.Tensor) -> Launch:
        args = {
            "p_keys": source, "p_n": count, "p_sorted": target, "capacity": source.shape[1], "k": k,
            "LEAST": LEAST_KEY, "MINE": _MINE, "OTHERS": _OTHERS, **pdl,
        }  # fmt: skip
        programs = min(-(-source.shape[1] // _MINE), max(1, 2 * ctx.target.sm_count // m))
        return Launch(sort_keys, (m, programs), args, options)

    options, parts = launch_options(ctx.target, 4), -(-n // size)
    first = {
        "p_a": a.data, "p_maxima": maxima, "p_kept": kept, "n_blocks": n_blocks, **sizes, "LEAST": LEAST_KEY,
        "BLOCK": block, "BLOCKS": size // block, **pdl,
    }  # fmt: skip
    third = {
        "p_a": a.data, "p_tops": tops, "p_kept": kept, "p_keys": keys, "capacity": capacity, "k": k, **sizes,
        "SIZE": size, **pdl,
    }  # fmt: skip
    found: list[Step] = [
        Launch(block_maxima, (m, parts), first, options),
        in_order(maxima, all_blocks, tops),
        Launch(keep_keys, (m, parts), third, options),
        in_order(keys, kept, best),
    ]
    return found, best


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "SAMPLE": lower_sample, "SAMPLE_EACH": lower_sample_each,
}  # fmt: skip
