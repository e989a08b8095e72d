"""An attention's plan in numbers: tiles, k-blocks, programs, who has which part of a tile and who merges the parts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphrt.backends.triton.kernels.flash_attn import stream_k
from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen
from graphrt.backends.triton.kernels.flash_attn.mask_blocks import FULL, PARTIAL, SKIP, block_kinds, mask_tile
from graphrt.backends.triton.kernels.flash_attn.stream_k import Segment
from graphrt.program import Bar, MaskValues, TilePlan


@dataclass(frozen=True, eq=False)
class AttentionPlan(TilePlan):
    """A TilePlan of the launcher's decision, chosen."""

    chosen: Chosen

    @property
    def unit_start(self) -> tuple[int, ...]:
        return stream_k.unit_starts(self.k_blocks)


def attention_plan(chosen: Chosen, sm_count: int, mask: MaskValues) -> AttentionPlan:
    """The plan of what the launcher chose. mask: f16 [m3, m2, n_q, n_kv], None where there is none or it is not known:
    then every k-block counts."""
    t, p = chosen.tiling, chosen.problem
    k_blocks, kinds = (t.n_blocks,) * t.n_tiles, None
    if mask is not None:
        found = block_kinds(mask, t)
        visited = (found != SKIP).sum(1)
        k_blocks = tuple(int(visited[mask_tile(i, t, p.m3)]) for i in range(t.n_tiles))
        names = (("skipped", SKIP), ("full", FULL), ("partial", PARTIAL))
        kinds = {name: int((found == kind).sum()) for name, kind in names}
    at_once = sm_count * chosen.choice.occupancy
    return AttentionPlan(
        chosen.kernel, chosen.choice.schedule, t.block_m, t.block_n, chosen.programs, at_once, chosen.join,
        p.mask_t is not None, k_blocks, kinds, _slots(chosen, k_blocks, at_once), chosen,
    )  # fmt: skip


def _slots(chosen: Chosen, k_blocks: Sequence[int], at_once: int) -> tuple[tuple[Bar, ...], ...]:
    """Programs that fit at once have a place each; more go in order to whichever is free first."""
    found = program_segments(chosen, k_blocks)
    if len(found) <= at_once:
        return tuple(tuple(_bars(i, segments, 0)) for i, segments in enumerate(found))
    free = [(0, slot) for slot in range(at_once)]
    slots: list[list[Bar]] = [[] for _ in free]
    for program, segments in enumerate(found):
        at, slot = heapq.heappop(free)
        slots[slot] += _bars(program, segments, at)
        heapq.heappush(free, (slots[slot][-1].stop if slots[slot] else 0, slot))
    return tuple(tuple(slot) for slot in slots)


def _bars(program: int, segments: Sequence[Segment], start: int) -> Iterator[Bar]:
    """Segments one after the other."""
    for segment in segments:
        yield Bar(program, segment, start)
        start += segment.stop - segment.start


def program_segments(chosen: Chosen, k_blocks: Sequence[int]) -> list[tuple[Segment, ...]]:
    """What each program of a launch does, by stream_k.py; k_blocks: of each tile."""
    schedule, starts, programs = chosen.choice.schedule, stream_k.unit_starts(k_blocks), chosen.programs
    if schedule != "tile":
        return [stream_k.segments(schedule, i, starts, programs) for i in range(programs)]
    whole = [Segment(tile, 0, stream_k.units(k_blocks[tile]), False, False, None) for tile in _launch_order(chosen)]
    # Persistent programs take a tile a turn, to and fro: who gets the longest of one gets the shortest of the next.
    turns = range(-(-len(whole) // programs))
    ranks = [[turn * programs + (programs - 1 - i if turn % 2 else i) for turn in turns] for i in range(programs)]
    return [tuple(whole[rank] for rank in mine if rank < len(whole)) for mine in ranks]


def _launch_order(chosen: Chosen) -> list[int]:
    """Tiles as they are taken where each is one program's: see AttentionKernel.tile_order. (forward.py's longest_first
    and the tile() of hopper/work.py.)"""
    t, groups = chosen.tiling, chosen.tiling.n_groups * chosen.problem.n_seq
    along = range(t.n_qt)[:: -1 if chosen.last_first else 1]
    return [
        group * t.n_qt + i_qt
        for first in range(0, groups, chosen.section)
        for i_qt in along
        for group in range(first, min(first + chosen.section, groups))
    ]
