"""What a mask hides, found once for all layers that share it: per tile of queries, which k-blocks there are to do.

A k-block is skipped (every query of the tile has -inf), full (every one 0: nothing to add) or partial. What is found
lies in device memory and is found anew each time the graph runs, so lengths may change between runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.flash_attn.visits import mask_tile

SKIP, FULL, PARTIAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.constexpr_function
def hidden_bits(PER):
    """PER f16 -inf side by side, as a signed number."""
    return -1024 if PER == 1 else -1024 * 65537 + 65536


@triton.jit
def _either(a, b):
    return a | b


@accesses(reads="p_mask", writes="p_class p_seen", helper=True)
@triton.jit(
    do_not_specialize=[
        "sm_t", "sm_h", "sm_s", "n_q", "n_kv", "m2", "heads_packed", "mask_groups", "n_qt", "n_blocks",
    ]
)  # fmt: skip
def classify_blocks(
    p_mask, p_class, p_seen, sm_t, sm_h, sm_s, n_q, n_kv, m2, heads_packed, mask_groups, n_qt, n_blocks,
    PER_HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Program (mask tile, i) classifies CHUNK k-blocks, ROWS mask rows at a time.

    class: int32 [mask tiles, n_blocks]; seen: int32 [mask tiles, n_blocks, BLOCK_N / 32], a bit for each key that some
    query of the tile sees. PER_HEAD: the heads of a tile have masks of their own, else one mask serves all.
    UNIT: strides and n_kv are whole numbers of so many values (8, 2 or 1), and the strides are given in them; mask:
    int32 pointers to pairs of f16 values, int16 ones to single values where UNIT is 1. DENSE: full blocks are those
    that hide nothing, whatever they add: for kernels that add the mask everywhere.
    """
    PER: tl.constexpr = 1 if UNIT == 1 else 2
    HIDDEN: tl.constexpr = hidden_bits(PER)
    ITEMS: tl.constexpr = UNIT // PER
    mask_tile = tl.program_id(0)
    i_qt = mask_tile % n_qt
    i_group = (mask_tile // n_qt) % mask_groups
    p_seq = p_mask + (mask_tile // (n_qt * mask_groups)).to(tl.int64) * sm_s * ITEMS
    i_kb = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    item = i_kb[:, None] * (BLOCK_N // PER) + tl.arange(0, BLOCK_N // PER)[None, :]
    m_item = item // ITEMS < n_kv // UNIT
    first = i_qt * BLOCK_M
    if PER_HEAD:
        n_rows = tl.minimum(BLOCK_M, n_q * heads_packed - first)
    else:
        n_rows = tl.minimum(n_q, (first + BLOCK_M - 1) // heads_packed + 1) - first // heads_packed
    # Bits tell all: hidden from everybody if no row's differ from those of -inf, full if no row has any but the sign.
    other = tl.zeros([CHUNK, BLOCK_N // PER], p_mask.dtype.element_ty)
    some = other
    hides = tl.zeros([CHUNK, BLOCK_N // PER], tl.int32)
    for base in range(0, n_rows, ROWS):
        i_row = tl.minimum(base + tl.arange(0, ROWS), n_rows - 1)  # past the end the last row once more
        if PER_HEAD:
            head = i_group * heads_packed + (first + i_row) % heads_packed
            row = (head % m2).to(tl.int64) * sm_h + ((first + i_row) // heads_packed).to(tl.int64) * sm_t
        else:
            row = (first // heads_packed + i_row).to(tl.int64) * sm_t
        p_x = p_seq + (row * ITEMS)[:, None, None] + item[None, :, :]
        x = tl.load(p_x, mask=m_item[None, :, :], other=HIDDEN)
        other |= tl.reduce(x ^ HIDDEN, 0, _either)
        some |= tl.reduce(x, 0, _either)
        if DENSE:
            shown = x ^ HIDDEN
            is_hidden = ((shown & 0xFFFF) == 0) | ((shown >> 16) == 0) if PER == 2 else shown == 0
            hides |= tl.reduce(is_hidden.to(tl.int32), 0, _either)
    some = tl.reduce(some.to(tl.int32), 1, _either)
    seen = ((other.to(tl.int32) & 0xFFFF) != 0).to(tl.int32)
    if PER == 2:
        seen |= ((other >> 16) != 0).to(tl.int32) << 1
        is_full = (some & 0x7FFF7FFF) == 0
    else:
        is_full = (some & 0x7FFF) == 0
    if DENSE:
        is_full = tl.reduce(hides, 1, _either) == 0
    bits = tl.reshape(seen, (CHUNK, BLOCK_N // 32, 32 // PER)) << (PER * tl.arange(0, 32 // PER))[None, None, :]
    words = tl.reduce(bits, 2, _either)
    kind = tl.where(tl.reduce(words, 1, _either) == 0, SKIP, tl.where(is_full, FULL, PARTIAL))
    at = mask_tile.to(tl.int64) * n_blocks + i_kb
    tl.store(p_class + at, kind, mask=i_kb < n_blocks)
    i_word = tl.arange(0, BLOCK_N // 32)
    tl.store(p_seen + at[:, None] * (BLOCK_N // 32) + i_word[None, :], words, mask=(i_kb < n_blocks)[:, None])


@accesses(reads="p_class", writes="p_counts p_blocks p_runs", helper=True)
@triton.jit(do_not_specialize=["n_blocks"])
def list_blocks(p_class, p_counts, p_blocks, p_runs, n_blocks, CHUNK: tl.constexpr):
    """Program i lists mask tile i's k-blocks: full ones in order, then partial ones.

    counts: int32 [mask tiles, 2], how many of each; blocks: int32 [mask tiles, n_blocks]; runs: int32 [mask tiles, 2],
    the list's first k-block and for how many entries from there on it counts up one by one (it may be longer by itself:
    either none, all full ones, or all there are).
    """
    mask_tile = tl.program_id(0)
    p_class += mask_tile.to(tl.int64) * n_blocks
    p_blocks += mask_tile.to(tl.int64) * n_blocks
    n_full = 0
    first_full, first_partial, last_full, last_partial = n_blocks, n_blocks, -1, -1
    for base in range(0, n_blocks, CHUNK):
        i = base + tl.arange(0, CHUNK)
        kind = tl.load(p_class + i, mask=i < n_blocks, other=SKIP)
        n_full += tl.sum((kind == FULL).to(tl.int32), 0)
        first_full = tl.minimum(first_full, tl.min(tl.where(kind == FULL, i, n_blocks), 0))
        first_partial = tl.minimum(first_partial, tl.min(tl.where(kind == PARTIAL, i, n_blocks), 0))
        last_full = tl.maximum(last_full, tl.max(tl.where(kind == FULL, i, -1), 0))
        last_partial = tl.maximum(last_partial, tl.max(tl.where(kind == PARTIAL, i, -1), 0))
    done_full = 0
    done_partial = n_full
    for base in range(0, n_blocks, CHUNK):
        i = base + tl.arange(0, CHUNK)
        kind = tl.load(p_class + i, mask=i < n_blocks, other=SKIP)
        is_full = (kind == FULL).to(tl.int32)
        is_partial = (kind == PARTIAL).to(tl.int32)
        tl.store(p_blocks + done_full + tl.cumsum(is_full, 0) - 1, i, mask=kind == FULL)
        tl.store(p_blocks + done_partial + tl.cumsum(is_partial, 0) - 1, i, mask=kind == PARTIAL)
        done_full += tl.sum(is_full, 0)
        done_partial += tl.sum(is_partial, 0)
    tl.store(p_counts + 2 * mask_tile, n_full)
    n_partial = done_partial - n_full
    tl.store(p_counts + 2 * mask_tile + 1, n_partial)
    run = tl.where(last_full - first_full + 1 == n_full, n_full, 0)
    follows = (last_partial - first_partial + 1 == n_partial) & (first_partial == last_full + 1)
    run = tl.where((run == n_full) & follows, n_full + n_partial, run)
    run_first = first_full
    if n_full == 0:
        run_first = first_partial
        run = tl.where(last_partial - first_partial + 1 == n_partial, n_partial, 0)
    tl.store(p_runs + 2 * mask_tile, run_first)
    tl.store(p_runs + 2 * mask_tile + 1, run)


@accesses(reads="p_counts", writes="p_unit_start", helper=True)
@triton.jit(do_not_specialize=["n_tiles", "n_qt", "n_groups", "mask_groups", "m3"])
def sum_units(p_counts, p_unit_start, n_tiles, n_qt, n_groups, mask_groups, m3, CHUNK: tl.constexpr):
    """unit_start: int32 [n_tiles + 1], the prefix sums of max(1, k-blocks) over all tiles. One program."""
    total = 0
    tl.store(p_unit_start, 0)
    for base in range(0, n_tiles, CHUNK):
        tile = base + tl.arange(0, CHUNK)
        i_group = (tile // n_qt) % n_groups
        i_seq = tile // (n_qt * n_groups)
        i_mask = mask_tile(i_seq, i_group, tile % n_qt, n_qt, mask_groups, m3)
        inside = tile < n_tiles
        n = tl.load(p_counts + 2 * i_mask, mask=inside, other=0)
        n += tl.load(p_counts + 2 * i_mask + 1, mask=inside, other=0)
        n = tl.where(inside, tl.maximum(n, 1), 0)
        tl.store(p_unit_start + 1 + tile, total + tl.cumsum(n, 0), mask=inside)
        total += tl.sum(n, 0)
