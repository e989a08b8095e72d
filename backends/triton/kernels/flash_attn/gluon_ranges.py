"""ranges.py for Gluon kernels, as far as they need it."""

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
def tile_units(tile, p_counts, n_blocks, HAS_MASK: gl.constexpr, p_unit_start, UNIFORM: gl.constexpr):
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
