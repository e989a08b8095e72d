"""Who computes which part of an attention: the schedules of the kernel, as integer arithmetic.

A *tile* is one block of query rows of one head group and one sequence. Its k-loop has `n` k-blocks: those that the mask
does not hide, so 0 is possible. Work is counted in *units*: one k-block each, and one for a tile without any, so that
somebody writes its zeros. `unit_start` is the exclusive prefix sum of the tiles' units, W its last element:

    tile t's units are unit_start[t] .. unit_start[t + 1] - 1, the global ones;  unit i of a tile is unit_start[t] + i

P programs share them under one of three schedules:

    tile      P = tiles: program p has tile p
    split     P = tiles * S: program p has units part * u // S .. (part + 1) * u // S of the u units of tile p // S,
              where part = p % S; of a short tile some parts have none and deliver nothing
    stream_k  program p has the global units p * W // P .. (p + 1) * W // P, which may belong to several tiles

A program's range is cut at the tiles' borders into *segments*. One that is alone in its tile writes the result. In a
tile with several of them, the one with the last unit is the *finisher*, and the others are *open* parts. Each puts its
unnormalised partial result, row maxima and row sums into a slot of scratch; they are merged in ascending order of
programs, whoever is first to be done, so that results are repeatable. What must happen once a tile (attention sinks)
is the finisher's: there is exactly one.

The functions of the first part take and give plain integers and use + - * // and comparisons only: the kernel has the
same lines. No operand is negative, so // is the same there. Products need 64 bits: P * W passes 2^31 in real batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from graphrt.errors import BackendError

Schedule = Literal["tile", "split", "stream_k"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
#: Forms of a split whose parts meet otherwise, for those who compare: by which maximum a part weighs its keys, its own
#: (partial) or that of all parts (global), and where they learn it: waiting for each other in one launch, or in the
#: next of two. See decode_passes.py.
PASS_FORMS = ("partial-wait", "partial-two", "global-wait", "global-two")


# --- the arithmetic, as in the kernel ---


def units(n_blocks: int) -> int:
    """The units of a tile with n_blocks k-blocks: one for an empty tile too, whose zeros somebody must write."""
    return n_blocks if n_blocks > 1 else 1


def range_start(part: int, parts: int, total: int) -> int:
    """The first of `total` units that part `part` of `parts` has; it ends where part + 1 starts.

    Serves both cuts: a program's share of all units (stream_k) and a part's share of a tile's (split).
    """
    return part * total // parts


def program_of_unit(unit: int, programs: int, total: int) -> int:
    """The program that has global unit `unit` under stream_k: the inverse of range_start, exactly.

    p has the unit if range_start(p) <= unit < range_start(p + 1), so it is the smallest p with
    unit + 1 <= (p + 1) * total // programs. An integer is at most floor(x) if it is at most x, hence
    p + 1 >= (unit + 1) * programs / total, and the smallest such p is ceil of that, minus 1. Programs with empty ranges
    (there are some if programs > total) are never the answer, since range_start(p) < range_start(p + 1) for it.
    """
    return ((unit + 1) * programs - 1) // total


def finisher_slot(program: int) -> int:
    """stream_k's slot of a finisher that has not all of its tile: the first segment of its program."""
    return 2 * program


def open_slot(program: int) -> int:
    """stream_k's slot of an open part: the last segment of its program."""
    return 2 * program + 1


def tile_of_unit(unit: int, unit_start: Sequence[int]) -> int:
    """The tile of a global unit, 0 <= unit < W, by bisection: ceil(log2(tiles)) reads of unit_start [tiles + 1]."""
    low, high = 0, len(unit_start) - 1
    while low + 1 < high:
        middle = (low + high) // 2
        if unit_start[middle] <= unit:
            low = middle
        else:
            high = middle
    return low


# --- the schedules ---


@dataclass(frozen=True)
class Segment:
    """What a program does of one tile: units start..stop of it, counted from the tile's first.

    needs_fixup: it is the finisher of a tile that others have parts of. is_fixup: it is an open part. Neither: it has
    the whole tile and writes the result. slot: where its partial result goes, None if it writes the result.
    """

    tile: int
    start: int
    stop: int
    needs_fixup: bool
    is_fixup: bool
    slot: int | None

    def k_blocks(self, n_blocks: int) -> range:
        """The k-blocks to visit of a tile that has n_blocks: the units, less the one unit of an empty tile."""
        return range(min(self.start, n_blocks), min(self.stop, n_blocks))


def unit_starts(n_blocks: Sequence[int]) -> tuple[int, ...]:
    """unit_start [tiles + 1] of the tiles' numbers of k-blocks [tiles]."""
    return (0, *accumulate(units(n) for n in n_blocks))


def work_range(schedule: str, program: int, unit_start: Sequence[int], programs: int) -> tuple[int, int]:
    """The global units (start, stop) of a program; empty if both are equal.

    Raises BackendError for an unknown schedule, a number of programs that it can't have, or no such program.
    """
    parts = parts_per_tile(schedule, len(unit_start) - 1, programs)
    if not 0 <= program < programs:
        raise BackendError(f"a program must be one of 0 to {programs - 1}, got {program}")
    if schedule == "stream_k":
        total = unit_start[-1]
        return range_start(program, programs, total), range_start(program + 1, programs, total)
    tile, part = program // parts, program % parts
    first = unit_start[tile]
    tile_units = unit_start[tile + 1] - first
    return first + range_start(part, parts, tile_units), first + range_start(part + 1, parts, tile_units)


def segments(schedule: str, program: int, unit_start: Sequence[int], programs: int) -> tuple[Segment, ...]:
    """A program's segments in the order of its work; none for an empty range. Errors: work_range's."""
    start, stop = work_range(schedule, program, unit_start, programs)
    found = []
    tile = tile_of_unit(start, unit_start) if start < stop else 0
    while start < stop:
        first, end = unit_start[tile], unit_start[tile + 1]
        to = end if end < stop else stop
        is_fixup = to < end
        needs_fixup = start > first and not is_fixup
        slot = None
        if is_fixup or needs_fixup:
            slot = program if schedule == "split" else open_slot(program) if is_fixup else finisher_slot(program)
        found.append(Segment(tile, start - first, to - first, needs_fixup, is_fixup, slot))
        start = to
        tile += 1
    return tuple(found)


def contributors(tile: int, unit_start: Sequence[int], programs: int) -> tuple[int, int]:
    """The first and the last program (both included) that have units of a tile under stream_k.

    Between them may be programs with empty ranges, if programs > W: they deliver nothing and are to be skipped.
    """
    total = unit_start[-1]
    return (
        program_of_unit(unit_start[tile], programs, total),
        program_of_unit(unit_start[tile + 1] - 1, programs, total),
    )


def fixup_parts(schedule: str, tile: int, unit_start: Sequence[int], programs: int) -> list[int]:
    """The slots whose partial results make up a tile, in the order of merging; none if one program writes the tile.

    Raises BackendError as work_range does.
    """
    parts = parts_per_tile(schedule, len(unit_start) - 1, programs)
    if schedule == "stream_k":
        first, last = contributors(tile, unit_start, programs)
    else:
        first, last = tile * parts, (tile + 1) * parts - 1
    sharing = [p for p in range(first, last + 1) if _has_units(schedule, p, unit_start, programs)]
    if len(sharing) == 1:
        return []
    if schedule == "split":
        return sharing
    return [*(open_slot(p) for p in sharing[:-1]), finisher_slot(last)]


def _has_units(schedule: str, program: int, unit_start: Sequence[int], programs: int) -> bool:
    start, stop = work_range(schedule, program, unit_start, programs)
    return start < stop


def scratch_slots(schedule: str, tiles: int, programs: int) -> int:
    """How many slots of scratch a launch needs, whatever the tiles' lengths. Errors: parts_per_tile's."""
    if schedule == "stream_k":
        return 2 * programs
    return programs if parts_per_tile(schedule, tiles, programs) > 1 else 0


def parts_per_tile(schedule: str, tiles: int, programs: int) -> int:
    """S under "split"; 1 under "tile" and "stream_k", where it has no meaning.

    Raises BackendError for an unknown schedule, or a number of programs that it can't have.
    """
    check_schedule(schedule)
    if programs < 1 or tiles < 1:
        raise BackendError(f"a launch has at least one tile and one program, got {tiles} and {programs}")
    if schedule == "tile" and programs != tiles:
        raise BackendError(f'schedule "tile" has one program a tile, got {programs} programs for {tiles} tiles')
    if schedule == "split" and programs % tiles:
        raise BackendError(
            f'schedule "split" has equally many programs for every tile, got {programs} programs for {tiles} tiles; '
            f"take a multiple of {tiles}"
        )
    return programs // tiles if schedule == "split" else 1


def check_schedule(schedule: str) -> Schedule:
    """The schedule's name, typed. Raises BackendError for an unknown one."""
    for name in SCHEDULES:
        if schedule == name:
            return name
    raise BackendError(f"an attention schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
