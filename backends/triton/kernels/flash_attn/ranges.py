"""The integer arithmetic of stream_k.py as the kernels do it.

Numbers are 32-bit as long as programs times units fit (BIG false): 64-bit divisions take a GPU a tenth of a microsecond
each, before the first key can be loaded.

What the mask's kernels wrote is read past the L1 cache, since fixup.py reads it before gdc_wait.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def planned(p):
    return tl.load(p, cache_modifier=".cg")


@triton.jit
def tile_units(
    tile, p_counts, n_blocks, p_unit_start, HAS_MASK: tl.constexpr, UNIFORM: tl.constexpr, BIG: tl.constexpr
):
    """(first unit, units) of a tile. UNIFORM: all tiles have as many."""
    if UNIFORM:
        n = n_blocks
        if HAS_MASK:
            n = tl.maximum(1, planned(p_counts) + planned(p_counts + 1))
        if BIG:
            n = n.to(tl.int64)
        start = tile * n
    else:
        start = planned(p_unit_start + tile)
        n = planned(p_unit_start + tile + 1) - start
        if BIG:
            start = start.to(tl.int64)
            n = n.to(tl.int64)
    return start, n


@triton.jit
def all_units(
    n_tiles, p_counts, n_blocks, p_unit_start, HAS_MASK: tl.constexpr, UNIFORM: tl.constexpr, BIG: tl.constexpr
):
    """Units of all tiles."""
    if UNIFORM:
        total, n = tile_units(n_tiles, p_counts, n_blocks, p_unit_start, HAS_MASK, True, BIG)
    else:
        total = planned(p_unit_start + n_tiles)
        if BIG:
            total = total.to(tl.int64)
    return total


@triton.jit
def find_tile(unit, p_unit_start, n_tiles):
    """The tile that holds a unit: how many tiles end at or before it. One load's wait, not a search's many."""
    tile = 0
    for first in range(0, n_tiles, 1024):
        i = first + tl.arange(0, 1024)
        ends = tl.load(p_unit_start + 1 + i, mask=i < n_tiles, other=2**31 - 1)
        tile += tl.sum((ends <= unit).to(tl.int32), 0)
    return tile


@triton.jit
def program_range(
    pid, programs, splits, n_tiles, n_blocks, p_counts, p_unit_start, HAS_MASK: tl.constexpr, UNIFORM: tl.constexpr,
    BIG: tl.constexpr,
):  # fmt: skip
    """(first tile, first unit, end) of a program, in global units. splits: parts a tile, 0 for stream-K."""
    if splits > 0:
        tile = pid // splits
        part = pid % splits
        start, n = tile_units(tile, p_counts, n_blocks, p_unit_start, HAS_MASK, UNIFORM, BIG)
        unit = start + part * n // splits
        stop = start + (part + 1) * n // splits
    else:
        total = all_units(n_tiles, p_counts, n_blocks, p_unit_start, HAS_MASK, UNIFORM, BIG)
        unit = pid * total // programs
        stop = (pid + 1) * total // programs
        if UNIFORM:
            start, n = tile_units(0, p_counts, n_blocks, p_unit_start, HAS_MASK, True, BIG)
            tile = (unit // n).to(tl.int32)
        else:
            tile = find_tile(unit, p_unit_start, n_tiles)
    return tile, unit, stop


@triton.jit
def listed_range(pid, splits, n_tiles, p_unit_start, BIG: tl.constexpr):
    """program_range of tiles that varlen/tile_list.py lists, whose units say how many programs share them: the others
    have none."""
    programs = planned(p_unit_start + n_tiles + 2)
    tile, unit, stop = program_range(pid, programs, splits, n_tiles, 0, p_unit_start, p_unit_start, False, False, BIG)
    return tile, unit, tl.where((splits == 0) & (pid >= programs), unit, stop)


@triton.jit
def part_of_tile(start, n_units, unit, stop):
    """(first unit, end, whether the tile's last unit is in it, whether all are) of what a program has of a tile.

    start, n_units: the tile's; unit: the program's first global unit in it; stop: the end of its range. The results
    count from the tile's first unit, int32.
    """
    low = (unit - start).to(tl.int32)
    high = (tl.minimum(stop, start + n_units) - start).to(tl.int32)
    begins = low == 0
    finishes = high == n_units
    return low, high, finishes, begins & finishes


@triton.jit
def slot_of_part(pid, splits, finishes):
    """stream_k.py's slot of a program's part of a tile."""
    return pid if splits > 0 else 2 * pid + tl.where(finishes, 0, 1)


@triton.jit
def fixup_range(
    tile, programs, splits, n_tiles, n_blocks, p_counts, p_unit_start, HAS_MASK: tl.constexpr, UNIFORM: tl.constexpr,
    BIG: tl.constexpr,
):  # fmt: skip
    """(first program, last program, units of the tile, units of all) of those that share a tile.

    first == last: one program did it whole, and there is nothing to join.
    """
    start, n = tile_units(tile, p_counts, n_blocks, p_unit_start, HAS_MASK, UNIFORM, BIG)
    total = n
    if splits > 0:
        first = tile * splits
        last = tl.where(n > 1, first + splits - 1, first)
    else:
        # (A varlen part without sequences has no units at all.)
        total = tl.maximum(all_units(n_tiles, p_counts, n_blocks, p_unit_start, HAS_MASK, UNIFORM, BIG), 1)
        first = (((start + 1) * programs - 1) // total).to(tl.int32)
        last = (((start + n) * programs - 1) // total).to(tl.int32)
    return first, last, n, total


@triton.jit
def part_slot(program, first, last, programs, splits, n_units, total):
    """(slot, whether it holds anything) of the part that a program has of a tile. program: a number or a vector.

    With stream-K the finisher's is 2p, an open part's 2p + 1; programs beyond the number of units have nothing."""
    used = program <= last
    if splits > 0:
        slot = program
        if n_units < splits:  # else a part has a unit at least; the divisions take longer than all else here
            i = program - first
            used = used & ((i * n_units // splits) < ((i + 1) * n_units // splits))
    else:
        slot = 2 * program + tl.where(program == last, 0, 1)
        if total < programs:
            used = used & ((program * total // programs) < ((program + 1) * total // programs))
    return slot, used


@triton.jit
def longest_first(rank, n_qt, section):
    """The tile of a rank in the order of launching.

    The last queries come first, whose rows a causal mask leaves longest, in sections of `section` head groups, whose K
    and V stay in the cache.
    """
    within = rank % (section * n_qt)
    i_group = (rank // (section * n_qt)) * section + within % section
    return i_group * n_qt + n_qt - 1 - within // section


@triton.jit
def next_bad(rank, programs, n_tiles, n_qt, section, p_bad):
    """The first rank from `rank` on, in steps of `programs`, whose tile's `bad` is set; n_tiles if there is none."""
    found = n_tiles
    for first in range(rank, n_tiles, programs * 128):
        i = first + programs * tl.arange(0, 128)
        tile = longest_first(i, n_qt, section)
        bad = tl.load(p_bad + tile, mask=i < n_tiles, other=0) != 0
        found = tl.minimum(found, tl.min(tl.where(bad, i, n_tiles), 0))
    return found
