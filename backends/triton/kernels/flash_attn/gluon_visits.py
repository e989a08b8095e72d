"""Which k-blocks a tile visits and where they lie, for Gluon kernels: visits.py is the same for plain Triton.

With a mask a tile has a list of blocks (mask.py). All Gluon kernels read it here, and here alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def mask_tile(i_seq, i_group, i_qt, n_qt, mask_groups, mask_seqs):
    """The mask tile of a tile: sequence, group of heads and query tile, as far as masks differ among them."""
    return ((i_seq % mask_seqs) * mask_groups + i_group % mask_groups) * n_qt + i_qt


@gluon.jit
def listed_block(p_list, i):
    """The i-th k-block of a list."""
    return gl.load(p_list + i)


@gluon.jit
def block_of_run(p_list, i, run_first, run):
    """The same without a load for the list's first `run` blocks, which count up from run_first."""
    return gl.load(p_list + i, mask=i >= run, other=run_first + i)


@gluon.jit
def block_in_range(block, n_blocks):
    """What was read past the end of a list, where anything can stand, made the number of a block."""
    return gl.minimum(gl.maximum(block, 0), n_blocks - 1)


@gluon.jit
def first_row(block, BLOCK_N: gl.constexpr):
    """The row of K and V in memory at which a k-block begins."""
    return block * BLOCK_N
