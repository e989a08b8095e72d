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


@gluon.jit
def visited_keys(
    row0, n, length, behind, skip, window, PACK: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """(first k-block, end, first key, end of keys) of a tile without a mask: visited_span's of visits.py."""
    low = behind + row0 // PACK
    high = behind + (gl.minimum(row0 + ROWS, gl.maximum(n * PACK, 1)) - 1) // PACK
    end_key = length
    if CAUSAL:
        end_key = gl.maximum(gl.minimum(length, high + 1), 0)
    first_key = end_key * 0
    if WINDOW:
        first_key = gl.maximum(low - window + 1, 0)
    first_key = gl.minimum(gl.maximum(first_key, skip), end_key)
    first = first_key // BLOCK_N
    return first, gl.maximum((end_key + BLOCK_N - 1) // BLOCK_N, first), first_key, end_key


@gluon.jit
def visited_span(
    row0, n, length, behind, skip, window, PACK: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, ALIBI: gl.constexpr,
):  # fmt: skip
    """(first k-block, first full one, end of the full ones, end, first key, end of keys): visits.py's."""
    first, end, first_key, end_key = visited_keys(
        row0, n, length, behind, skip, window, PACK, ROWS, BLOCK_N, CAUSAL, WINDOW
    )  # fmt: skip
    full_end = length // BLOCK_N
    if CAUSAL:
        full_end = gl.maximum(gl.minimum(length, behind + row0 // PACK + 1), 0) // BLOCK_N
    full_first = (skip + BLOCK_N - 1) // BLOCK_N
    if WINDOW:
        high = behind + (gl.minimum(row0 + ROWS, gl.maximum(n * PACK, 1)) - 1) // PACK
        full_first = gl.maximum(full_first, gl.maximum(high - window + BLOCK_N, 0) // BLOCK_N)
    if ALIBI:
        full_end = first
    full_first = gl.minimum(gl.maximum(full_first, first), end)
    return first, full_first, gl.minimum(gl.maximum(full_end, full_first), end), end, first_key, end_key


@gluon.jit
def spanned_block(i, first, full_first, full_end):
    """The i-th k-block that a tile visits of visited_span()'s: full ones, then those before and behind them."""
    n_full = full_end - full_first
    rest = first + i - n_full
    return gl.where(i < n_full, full_first + i, gl.where(rest < full_first, rest, rest + n_full))


@gluon.jit
def page_of(p_table, i_page, n_pages, max_blocks):
    """The i-th pages of a sequence, by its row of the block table. A page that is not there is some other one."""
    page = gl.load(p_table + gl.minimum(i_page, max_blocks - 1))
    return gl.minimum(gl.maximum(page, 0), n_pages - 1)


@gluon.jit
def key_offsets(key, pages, STRIDE: gl.constexpr, PAGE: gl.constexpr):
    """Where keys 0, 1, ... of a k-block begin in K or V, in units of the pointer.

    They are in the sequence's pages of PAGE keys from the first-th on: pages is (its row of the block table, first,
    entries of that row, pages there are, stride between pages).
    """
    p_table, first, max_blocks, n_pages, page_stride = pages
    page = page_of(p_table, first + key // PAGE, n_pages, max_blocks)
    return page.to(gl.int64) * page_stride + (key % PAGE) * STRIDE
