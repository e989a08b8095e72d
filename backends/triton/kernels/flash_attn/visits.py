"""Which k-blocks a tile visits and where they lie: of what mask.py found, and without a mask. gluon_visits.py is the
same for Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mask_tile(i_seq, i_group, i_qt, n_qt, mask_groups, m3):
    """The mask tile of a tile: sequence, group of heads and query tile, as far as masks differ among them."""
    return ((i_seq % m3) * mask_groups + i_group % mask_groups) * n_qt + i_qt


@triton.jit
def load_index(p, PTX: tl.constexpr):
    """int32 that decide which rows of K and V are loaded.

    As PTX because Triton's pipeliner takes a tl.load before another for a stage of its own, and would keep that many
    fewer k-blocks in flight. The pipeliner does not guard it in rounds past the loop's end: `p` must be readable there
    too. It reads what an earlier kernel wrote, and all but the first of a line's bytes come from L1.
    """
    if PTX:
        return tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [p], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.load(p)


@triton.jit
def visited_block(p_list, i, n_blocks, HAS_MASK: tl.constexpr, PTX: tl.constexpr):
    """The i-th k-block that a tile visits, of its list if there is a mask; of i past the list's end any."""
    return load_index(p_list + tl.minimum(i, n_blocks - 1), PTX) if HAS_MASK else i


@triton.jit
def first_row(block, BLOCK_N: tl.constexpr):
    """The row of K and V in memory at which a k-block begins."""
    return block * BLOCK_N
