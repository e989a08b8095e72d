"""stream_k.py's integer arithmetic for Gluon kernels: ranges.py in 32 bits, and tested equal to both.

Programs times units must fit 32 bits; no number is negative.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def quotient(a, b):
    """a // b of int32 that are not negative: fewer instructions than with signs."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@gluon.jit
def planned(p):
    """A number of the mask's plan. Past the L1 cache, which may hold an older one before gdc_wait."""
    return gl.load(p, cache_modifier=".cg")


@gluon.jit
def tile_units(tile, p_counts, n_blocks, p_unit_start, HAS_MASK: gl.constexpr, UNIFORM: gl.constexpr):
    """(first unit, units) of a tile, int32. UNIFORM: all tiles have as many."""
    if UNIFORM:
        if HAS_MASK:
            n = gl.maximum(1, planned(p_counts) + planned(p_counts + 1))
        else:
            n = n_blocks
        return tile * n, n
    else:
        start = planned(p_unit_start + tile)
        return start, planned(p_unit_start + tile + 1) - start


@gluon.jit
def find_tile(unit, p_unit_start, n_tiles):
    """The tile that holds a unit: how many tiles end at or before it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile = 0
    for first in range(0, n_tiles, 1024):
        i = first + gl.arange(0, 1024, layout=LAYOUT)
        ends = gl.load(p_unit_start + 1 + i, mask=i < n_tiles, other=2**31 - 1, cache_modifier=".cg")
        tile += gl.sum((ends <= unit).to(gl.int32), 0)
    return tile


@gluon.jit
def program_range(
    pid, programs, splits, n_tiles, n_blocks, p_counts, p_unit_start, HAS_MASK: gl.constexpr, UNIFORM: gl.constexpr,
    LAST: gl.constexpr,
):  # fmt: skip
    """(first tile, last tile, first unit, end) of a program, in global units; the last tile only if LAST.

    splits: parts a tile, 0 for stream-K.
    """
    if splits > 0:
        tile = quotient(pid, splits)
        part = pid - tile * splits
        start, n = tile_units(tile, p_counts, n_blocks, p_unit_start, HAS_MASK, UNIFORM)
        unit = start + quotient(part * n, splits)
        stop = start + quotient((part + 1) * n, splits)
        last = tile
    else:
        if UNIFORM:
            total, n = tile_units(n_tiles, p_counts, n_blocks, p_unit_start, HAS_MASK, True)
        else:
            total = planned(p_unit_start + n_tiles)
            n = 1
        unit = quotient(pid * total, programs)
        stop = quotient((pid + 1) * total, programs)
        if UNIFORM:
            tile = quotient(unit, n)
        else:
            tile = find_tile(unit, p_unit_start, n_tiles)
        last = tile
        if LAST:
            if UNIFORM:
                last = quotient(gl.maximum(stop, 1) - 1, n)
            else:
                last = find_tile(gl.maximum(stop, 1) - 1, p_unit_start, n_tiles)
    return tile, last, unit, stop


@gluon.jit
def listed_range(pid, splits, n_tiles, p_unit_start, LAST: gl.constexpr):
    """program_range of tiles that varlen/tile_list.py lists, whose units say how many programs share them: the others
    have none."""
    programs = planned(p_unit_start + n_tiles + 2)
    tile, last, unit, stop = program_range(
        pid, programs, splits, n_tiles, 0, p_unit_start, p_unit_start, False, False, LAST
    )
    return tile, last, unit, gl.where((splits == 0) & (pid >= programs), unit, stop)


@gluon.jit
def part_of_tile(start, n_units, unit, stop):
    """(first unit, end, whether the tile's last unit is in it, whether all are) of what a program has of a tile.

    start, n_units: the tile's; unit: the program's first global unit in it; stop: the end of its range. The results
    count from the tile's first unit.
    """
    low = unit - start
    high = gl.minimum(stop, start + n_units) - start
    finishes = high == n_units
    return low, high, finishes, (low == 0) & finishes


@gluon.jit
def slot_of_part(pid, splits, finishes):
    """stream_k.py's slot of a program's part of a tile."""
    slot = pid
    if splits == 0:
        slot = 2 * pid + gl.where(finishes, 0, 1)
    return slot


@gluon.jit
def fixup_range(
    tile, programs, splits, n_tiles, n_blocks, p_counts, p_unit_start, HAS_MASK: gl.constexpr, UNIFORM: gl.constexpr
):
    """(first program, last program, programs between them that have units, shares, units) of those that share a tile.

    Of `shares` shares of `units` units the programs have their own: of the tile's units if it is split, else of all
    tiles'.
    """
    start, n = tile_units(tile, p_counts, n_blocks, p_unit_start, HAS_MASK, UNIFORM)
    if splits > 0:
        first = tile * splits
        last = first + splits - 1
        shares = splits
        units = n
    else:
        if UNIFORM:
            units = n_tiles * n
        else:
            units = planned(p_unit_start + n_tiles)
        first = quotient((start + 1) * programs - 1, units)
        last = quotient((start + n) * programs - 1, units)
        shares = programs
    return first, last, gl.minimum(last - first + 1, n), shares, units
