"""The list of tiles of a varlen attention, made on the device once a run for all layers that share lengths.

Query tile i of the list is BLOCK_M rows of one sequence; row r of a sequence is its query r // PACK, head r % PACK of a
group. Behind those of all sequences come the tiles of the queries that belong to nobody, as of a sequence without keys,
whose result is 0. Tile t of an attention is query tile t // n_groups of group t % n_groups; the list is as long as
it may have to be, and tiles at its end have no units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.flash_attn.ranges import planned
from graphrt.backends.triton.kernels.flash_attn.visits import visited_span

#: Numbers of a query tile: its sequence, the sequence's first query, how many it has, the tile's first row, the
#: sequence's keys and, of packed ones, the first.
RECORD = tl.constexpr(8)


@triton.jit
def tile_record(p_tiles, i_qt):
    """(sequence, its first query, its queries, the tile's first row, its keys, the first of packed ones)."""
    p = p_tiles + RECORD * i_qt
    return planned(p), planned(p + 1), planned(p + 2), planned(p + 3), planned(p + 4), planned(p + 5)


@triton.jit
def _start(p_starts, i, n_seq, most):
    """The i-th of n_seq + 1 starts, within 0 .. most; `most` for later ones."""
    found = tl.load(p_starts + i, mask=i <= n_seq, other=most)
    return tl.minimum(tl.maximum(found, 0), most)


@accesses(reads="p_q_starts p_kv", writes="p_tiles p_units", helper=True)
@triton.jit(do_not_specialize=["n_seq", "n_tokens", "most_keys", "n_qt", "window"])
def list_varlen_tiles(
    p_q_starts, p_kv, p_tiles, p_units, n_seq, n_tokens, most_keys, n_qt, window, PAGED: tl.constexpr,
    PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    ALIBI: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program i lists TILES query tiles: tiles int32 [n_qt, RECORD], units int32 [n_qt] (0: there is no such tile).

    q_starts: int32 [n_seq + 1]; kv: lengths int32 [n_seq] if PAGED, else k_starts int32 [n_seq + 1]; most_keys: what a
    sequence may have of pages, or all packed keys. CHUNK sequences are looked at at a time.
    """
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    seq = tile * 0
    first_tile = tile * 0
    total = 0
    for base in range(0, n_seq + 1, CHUNK):
        i = base + tl.arange(0, CHUNK)
        n = _start(p_q_starts, i + 1, n_seq, n_tokens) - _start(p_q_starts, i, n_seq, n_tokens)
        ends = total + tl.cumsum((tl.maximum(n, 0) * PACK + BLOCK_M - 1) // BLOCK_M, 0)
        before = (ends[None, :] <= tile[:, None]) & (i <= n_seq)[None, :]
        seq += tl.sum(before.to(tl.int32), 1)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(before, ends[None, :], 0), 1))
        total = tl.max(ends, 0)
    q_first = _start(p_q_starts, seq, n_seq, n_tokens)
    n = tl.maximum(_start(p_q_starts, seq + 1, n_seq, n_tokens) - q_first, 0)
    row0 = (tile - first_tile) * BLOCK_M
    somebody = seq < n_seq
    if PAGED:
        k_first = tile * 0
        length = tl.minimum(tl.load(p_kv + seq, mask=somebody, other=0), most_keys)
    else:
        k_first = _start(p_kv, seq, n_seq, most_keys)
        length = tl.where(somebody, _start(p_kv, seq + 1, n_seq, most_keys) - k_first, 0)
    length = tl.maximum(length, 0)
    first, _, _, end, _, _ = visited_span(row0, n, length, window, PACK, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, ALIBI)
    listed = tile < n_qt
    p = p_tiles + RECORD * tile
    tl.store(p, seq, mask=listed)
    tl.store(p + 1, q_first, mask=listed)
    tl.store(p + 2, n, mask=listed)
    tl.store(p + 3, row0, mask=listed)
    tl.store(p + 4, length, mask=listed)
    tl.store(p + 5, k_first, mask=listed)
    tl.store(p_units + tile, tl.where(seq <= n_seq, tl.maximum(end - first, 1), 0), mask=listed)


@accesses(reads="p_units", writes="p_unit_start", helper=True)
@triton.jit(do_not_specialize=["n_tiles", "n_groups", "rounds_of"])
def sum_varlen_units(p_units, p_unit_start, n_tiles, n_groups, rounds_of, CHUNK: tl.constexpr):
    """unit_start: int32 [n_tiles + 2], the prefix sums of the units of all tiles that are shared out, and the number of
    whole ones before them, which count as none. units: of query tiles.

    rounds_of programs take whole tiles in as many rounds as leave one to two rounds of them to share out; 0: none.
    """
    whole = 0
    if rounds_of > 0:
        used = 0
        for base in range(0, n_tiles, CHUNK):
            tile = base + tl.arange(0, CHUNK)
            n = tl.load(p_units + tile // n_groups, mask=tile < n_tiles, other=0)
            used += tl.sum((n > 0).to(tl.int32), 0)
        whole = tl.maximum(used // rounds_of - 1, 0) * rounds_of
    total = 0
    tl.store(p_unit_start, 0)
    tl.store(p_unit_start + n_tiles + 1, whole)
    for base in range(0, n_tiles, CHUNK):
        tile = base + tl.arange(0, CHUNK)
        n = tl.load(p_units + tile // n_groups, mask=(tile >= whole) & (tile < n_tiles), other=0)
        tl.store(p_unit_start + 1 + tile, total + tl.cumsum(n, 0), mask=tile < n_tiles)
        total += tl.sum(n, 0)
