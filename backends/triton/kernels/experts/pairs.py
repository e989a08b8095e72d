"""Pairs of a token and one of its experts, in order of experts, so that products can take an expert's tokens together.

Pair p is slot p % used of token p // used. Group e < n_expert has the pairs of expert e in order, group n_expert those
whose id is no expert's. One program a group counts what comes before its own pairs and then places these: no atomics,
no second launch, and the order is the same in each run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.tensor import Tensor

#: Most pairs that a program looks at at a time.
_MOST = 4096


@triton.jit
def _groups_of(p_ids, ids0, ids1, used, pair, n_pairs, n_expert):
    """The groups of some pairs; past the last pair n_expert + 1."""
    at = (pair // used).to(tl.int64) * ids1 + (pair % used) * ids0
    expert = tl.load(p_ids + at, mask=pair < n_pairs, other=-1)
    group = tl.where((expert >= 0) & (expert < n_expert), expert, n_expert)
    return tl.where(pair < n_pairs, group, n_expert + 1)


@accesses(reads="p_ids", writes="p_first p_sorted")
@triton.jit(do_not_specialize=["ids0", "ids1", "used", "n_pairs", "n_expert"])
def sort_pairs(p_ids, ids0, ids1, used, n_pairs, n_expert, p_first, p_sorted, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Program g: first[g], how many pairs are in groups before g, and those of group g at sorted[first[g]] on.

    ids: strides ids0 of slots, ids1 of tokens; first: int32 [n_expert + 2], the last element is n_pairs.
    """
    own = tl.program_id(0)
    take_turn(PDL)
    before = tl.zeros([SIZE], tl.int32)
    for start in range(0, n_pairs, SIZE):
        group = _groups_of(p_ids, ids0, ids1, used, start + tl.arange(0, SIZE), n_pairs, n_expert)
        before += (group < own).to(tl.int32)
    at = tl.sum(before, 0)
    tl.store(p_first + own, at)
    if own == n_expert:
        tl.store(p_first + own + 1, n_pairs)
    for start in range(0, n_pairs, SIZE):
        pair = start + tl.arange(0, SIZE)
        mine = (_groups_of(p_ids, ids0, ids1, used, pair, n_pairs, n_expert) == own).to(tl.int32)
        tl.store(p_sorted + at + tl.cumsum(mine, 0) - mine, pair, mask=mine > 0)
        at += tl.sum(mine, 0)


@triton.jit
def tile_of(p_first, i_tile, n_expert, TOKENS: tl.constexpr, GROUPS: tl.constexpr):
    """(group, start, stop) of a tile: it has the places start to stop - 1 of `sorted`, TOKENS of them at most.

    Each group has tiles of its own; past the last one the group is over n_expert. GROUPS: a power of two over n_expert.
    """
    i = tl.arange(0, GROUPS)
    first = tl.load(p_first + i, mask=i <= n_expert, other=0, cache_modifier=".cg")
    last = tl.load(p_first + i + 1, mask=i <= n_expert, other=0, cache_modifier=".cg")
    tiles = (last - first + TOKENS - 1) // TOKENS
    ends = tl.cumsum(tiles, 0)
    group = tl.sum(((ends <= i_tile) & (i <= n_expert)).to(tl.int32), 0)
    start = tl.sum(tl.where(i == group, first + (i_tile - ends + tiles) * TOKENS, 0), 0)
    return group, start, tl.minimum(start + TOKENS, tl.sum(tl.where(i == group, last, 0), 0))


@accesses(reads="p_first", writes="p_tiles")
@triton.jit(do_not_specialize=["n_expert"])
def list_tiles(p_first, n_expert, p_tiles, TOKENS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr):
    """Program i: tile_of(i) to tiles[i], int32 [tiles, 4], whose last element is 0."""
    take_turn(PDL)
    i = tl.program_id(0)
    group, start, stop = tile_of(p_first, i, n_expert, TOKENS, GROUPS)
    tl.store(p_tiles + 4 * i, group)
    tl.store(p_tiles + 4 * i + 1, start)
    tl.store(p_tiles + 4 * i + 2, stop)
    tl.store(p_tiles + 4 * i + 3, 0)


@dataclass(frozen=True, eq=False)
class Pairs:
    """first: int32 [n_expert + 2]; sorted: int32 [n_pairs]; see sort_pairs()."""

    n_expert: int
    used: int
    first: torch.Tensor
    sorted: torch.Tensor

    @property
    def count(self) -> int:
        return self.sorted.numel()

    @property
    def groups(self) -> int:
        """A power of two over n_expert."""
        return 1 << self.n_expert.bit_length()

    def tiles(self, tokens: int) -> int:
        """Tiles of so many tokens that there can be at most, however the experts are chosen."""
        return min(self.count, self.count // tokens + min(self.n_expert + 1, self.count))


def sorted_pairs(ids: Tensor, n_expert: int, ctx: Context) -> tuple[Pairs, list[Step]]:
    """The pairs of ids [used, tokens], and the steps that sort them: none where an earlier product did it."""
    key = ("sorted pairs", ids, n_expert)
    if key in ctx.shared:
        return ctx.shared[key], []
    n = ids.n_elements
    pairs = Pairs(n_expert, ids.ne[0], ctx.scratch((n_expert + 2,), torch.int32), ctx.scratch((n,), torch.int32))
    ctx.shared[key] = pairs
    view = ctx.view(ids)
    size = max(128, min(_MOST, 1 << (n - 1).bit_length()))
    args = {
        "p_ids": view.data, "ids0": view.strides[0], "ids1": view.strides[1], "used": ids.ne[0], "n_pairs": n,
        "n_expert": n_expert, "p_first": pairs.first, "p_sorted": pairs.sorted, "SIZE": size,
        "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return pairs, [Launch(sort_pairs, (n_expert + 1,), args, launch_options(ctx.target, max(1, min(8, size // 256))))]


def listed_tiles(pairs: Pairs, tokens: int, ctx: Context) -> tuple[torch.Tensor, list[Step]]:
    """Tiles of so many tokens, int32 [tiles, 4]: (group, start, stop, 0), and the steps that list them, if any.

    There are as many as there can be; past the last one the group is over n_expert.
    """
    key = ("tiles of pairs", pairs, tokens)
    if key in ctx.shared:
        return ctx.shared[key], []
    tiles = ctx.shared[key] = ctx.scratch((pairs.tiles(tokens), 4), torch.int32)
    args = {
        "p_first": pairs.first, "n_expert": pairs.n_expert, "p_tiles": tiles, "TOKENS": tokens,
        "GROUPS": pairs.groups, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return tiles, [Launch(list_tiles, (tiles.shape[0],), args, launch_options(ctx.target, 1))]
