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


@triton.jit
def visited_span(
    row0, n, length, behind, skip, window, PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """(first k-block, first full one, end of the full ones, end, first key, end of keys) of a tile without a mask.

    The tile's rows row0 .. row0 + BLOCK_M - 1 are of n queries, PACK heads each, the first of which stands at position
    `behind`; of `length` keys the first `skip` count for nothing. Its keys are those that some row sees; a full block
    is seen whole by every row, with nothing to add. int32, numbers or vectors.
    """
    low = behind + row0 // PACK
    high = behind + (tl.minimum(row0 + BLOCK_M, tl.maximum(n * PACK, 1)) - 1) // PACK
    end_key = tl.maximum(tl.minimum(length, high + 1), 0) if CAUSAL else length
    first_key = end_key * 0
    if WINDOW:
        first_key = tl.maximum(low - window + 1, 0)
    first_key = tl.minimum(tl.maximum(first_key, skip), end_key)
    first = first_key // BLOCK_N
    end = tl.maximum((end_key + BLOCK_N - 1) // BLOCK_N, first)
    full_end = (tl.maximum(tl.minimum(length, low + 1), 0) if CAUSAL else length) // BLOCK_N
    full_first = (skip + BLOCK_N - 1) // BLOCK_N
    if WINDOW:
        full_first = tl.maximum(full_first, tl.maximum(high - window + BLOCK_N, 0) // BLOCK_N)
    if ALIBI:
        full_end = first
    full_first = tl.minimum(tl.maximum(full_first, first), end)
    full_end = tl.minimum(tl.maximum(full_end, full_first), end)
    return first, full_first, full_end, end, first_key, end_key


@triton.jit
def spanned_block(i, first, full_first, full_end, PARTIAL: tl.constexpr):
    """The i-th k-block that a tile visits of visited_span()'s: full ones, then those before and behind them."""
    if PARTIAL:
        block = first + i - (full_end - full_first)
        return tl.where(block < full_first, block, block + full_end - full_first)
    else:
        return full_first + i


@triton.jit
def page_of(p_table, block, i_key, n_pages, max_blocks, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PTX: tl.constexpr):
    """The page of a k-block, or of each of its keys where a page is smaller.

    p_table: the sequence's row of the block table; i_key: 0 .. BLOCK_N - 1. A page that is not there is some other one.
    """
    if PAGE >= BLOCK_N:
        i_page = block * BLOCK_N // PAGE
    else:
        i_page = block * (BLOCK_N // PAGE) + i_key // PAGE
    page = load_index(p_table + tl.minimum(i_page, max_blocks - 1), PTX)
    return tl.minimum(tl.maximum(page, 0), n_pages - 1)


@triton.jit
def paged_rows(page, block, i_key, stride, page_stride, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr):
    """(offset of a k-block, offsets of its keys behind that) in K or V. stride: between keys; page: page_of's."""
    if PAGE >= BLOCK_N:
        i_row = i_key.to(tl.int64) if WIDE else i_key
        return page.to(tl.int64) * page_stride + (block * BLOCK_N % PAGE).to(tl.int64) * stride, i_row * stride
    else:
        return tl.full([], 0, tl.int64), page.to(tl.int64) * page_stride + (i_key % PAGE) * stride
