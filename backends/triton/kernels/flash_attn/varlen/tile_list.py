"""The list of tiles of a varlen attention, made on the device once a run for all layers that share lengths.

Query tile i of the list is BLOCK_M rows of one sequence; row r of a sequence is its query r // PACK, head r % PACK of a
group. Behind those of all sequences come the tiles of the queries that belong to nobody, as of a sequence without keys,
whose result is 0. Tile t of an attention is query tile t // n_groups of group t % n_groups; the list is as long as
it may have to be, and tiles at its end have no units.

An attention may be done in parts, each with a list of its own (problem.py's Part): of the sequences with few or with
many query rows; of the keys behind those that sequences share (SKIPS); of the shared ones (PREFIX), where a group of
sequences is one whose keys all its queries see.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.flash_attn.ranges import planned
from graphrt.backends.triton.kernels.flash_attn.visits import visited_span

#: Numbers of a query tile, see tile_record.
RECORD = tl.constexpr(8)


@triton.jit
def tile_record(p_tiles, i_qt):
    """(sequence, its first query, its queries, the tile's first row, its keys, the first of packed ones, the position
    of its first query, how many keys at its beginning count for nothing). A group's sequence is its first."""
    p = p_tiles + RECORD * i_qt
    return (
        planned(p), planned(p + 1), planned(p + 2), planned(p + 3), planned(p + 4), planned(p + 5), planned(p + 6),
        planned(p + 7),
    )  # fmt: skip


@triton.jit
def _start(p_starts, i, n_seq, most):
    """The i-th of n_seq + 1 starts, within 0 .. most; `most` for later ones."""
    found = tl.load(p_starts + i, mask=i <= n_seq, other=most)
    return tl.minimum(tl.maximum(found, 0), most)


@triton.jit
def _group(p_prefixes, i, n_prefixes, n_seq):
    """(first sequence, sequences, pages) of groups; no sequences where one says nothing. i: of any numbers."""
    inside = i < n_prefixes
    first = tl.minimum(tl.maximum(tl.load(p_prefixes + 3 * i, mask=inside, other=0), 0), n_seq)
    count = tl.load(p_prefixes + 3 * i + 1, mask=inside, other=0)
    pages = tl.load(p_prefixes + 3 * i + 2, mask=inside, other=0)
    count = tl.where(pages > 0, tl.minimum(tl.maximum(count, 0), n_seq - first), 0)
    return first, count, pages


@triton.jit
def _queries(
    p_q_starts, p_prefixes, i, n_seq, n_prefixes, n_tokens, gqa, least_rows, most_rows, PREFIX: tl.constexpr
):  # fmt: skip
    """(first query, queries) of sequences or groups; none of those that are left out. n_seq: of nobody's queries."""
    if PREFIX:
        first, count, _ = _group(p_prefixes, i, n_prefixes, n_seq)
        q_first = _start(p_q_starts, first, n_seq, n_tokens)
        return q_first, tl.maximum(_start(p_q_starts, first + count, n_seq, n_tokens) - q_first, 0)
    else:
        q_first = _start(p_q_starts, i, n_seq, n_tokens)
        n = tl.maximum(_start(p_q_starts, i + 1, n_seq, n_tokens) - q_first, 0)
        rows = tl.where(i < n_seq, n * gqa, 2**31 - 1)  # nobody's go with the many
        return q_first, tl.where((rows >= least_rows) & (rows <= most_rows), n, 0)


@accesses(reads="p_q_starts p_kv p_prefixes", writes="p_tiles p_units", helper=True)
@triton.jit(
    do_not_specialize=[
        "n_seq", "n_prefixes", "n_tokens", "most_keys", "n_qt", "window", "gqa", "more", "least_rows",
        "most_rows",
    ]
)  # fmt: skip
def list_varlen_tiles(
    p_q_starts, p_kv, p_prefixes, p_tiles, p_units, n_seq, n_prefixes, n_tokens, most_keys, n_qt, window, gqa, more,
    least_rows, most_rows, PAGE: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr, PREFIX: tl.constexpr, SKIPS: tl.constexpr,
    CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program i lists TILES query tiles: tiles int32 [n_qt, RECORD], units int32 [n_qt] (0: there is no such tile).

    q_starts: int32 [n_seq + 1]; kv: lengths int32 [n_seq] of pages, k_starts int32 [n_seq + 1] if PAGE is 0;
    prefixes: int32 [n_prefixes, 3]; most_keys: what a sequence may have of pages, or all packed keys; least_rows,
    most_rows: query rows of a KV head of a sequence that is not left out; more: units of a tile behind those of its
    k-blocks, which stand for the time that a program takes to go on from one tile to the next: nothing is done in them.
    CHUNK sequences are looked at at a time.
    """
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    seq = tile * 0
    first_tile = tile * 0
    total = 0
    last = n_prefixes - 1 if PREFIX else n_seq
    for base in range(0, last + 1, CHUNK):
        i = base + tl.arange(0, CHUNK)
        _, n = _queries(
            p_q_starts, p_prefixes, i, n_seq, n_prefixes, n_tokens, gqa, least_rows, most_rows, PREFIX
        )  # fmt: skip
        ends = total + tl.cumsum((n * PACK + BLOCK_M - 1) // BLOCK_M, 0)
        before = (ends[None, :] <= tile[:, None]) & (i <= last)[None, :]
        seq += tl.sum(before.to(tl.int32), 1)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(before, ends[None, :], 0), 1))
        total = tl.max(ends, 0)
    there = seq <= last
    q_first, n = _queries(
        p_q_starts, p_prefixes, seq, n_seq, n_prefixes, n_tokens, gqa, least_rows, most_rows, PREFIX
    )  # fmt: skip
    row0 = (tile - first_tile) * BLOCK_M
    somebody = seq < n_seq
    k_first = tile * 0
    skip = tile * 0
    if PREFIX:
        seq, _, pages = _group(p_prefixes, seq, n_prefixes, n_seq)
        length = tl.minimum(pages, most_keys // PAGE) * PAGE
        behind = length
    else:
        if PAGE > 0:
            length = tl.minimum(tl.load(p_kv + seq, mask=somebody, other=0), most_keys)
        else:
            k_first = _start(p_kv, seq, n_seq, most_keys)
            length = tl.where(somebody, _start(p_kv, seq + 1, n_seq, most_keys) - k_first, 0)
        length = tl.maximum(length, 0)
        behind = length - n
    if SKIPS:
        for g in range(0, n_prefixes):
            first, count, pages = _group(p_prefixes, g, n_prefixes, n_seq)
            member = (seq >= first) & (seq < first + count)
            skip = tl.where(member, tl.minimum(pages, most_keys // PAGE) * PAGE, skip)
    first, _, _, end, _, _ = visited_span(
        row0, n, length, behind, skip, window, PACK, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, ALIBI
    )
    listed = tile < n_qt
    p = p_tiles + RECORD * tile
    tl.store(p, seq, mask=listed)
    tl.store(p + 1, q_first, mask=listed)
    tl.store(p + 2, n, mask=listed)
    tl.store(p + 3, row0, mask=listed)
    tl.store(p + 4, length, mask=listed)
    tl.store(p + 5, k_first, mask=listed)
    tl.store(p + 6, behind, mask=listed)
    tl.store(p + 7, skip, mask=listed)
    tl.store(p_units + tile, tl.where(there, tl.maximum(end - first, 1) + more, 0), mask=listed)


@triton.jit
def _units(p_units, base, n_tiles, n_groups, CHUNK: tl.constexpr):
    """(numbers, units) of CHUNK tiles from `base` on; no units behind the last."""
    tile = base + tl.arange(0, CHUNK)
    return tile, tl.load(p_units + tile // n_groups, mask=tile < n_tiles, other=0)


@triton.jit
def _division(p_units, n_tiles, n_groups, programs, turn, more, ROUNDS: tl.constexpr, CHUNK: tl.constexpr):
    """(whole tiles, units that each of the others counts as, 0: as it has; programs that share these): see
    sum_varlen_units."""
    used = 0
    for base in range(0, n_tiles, CHUNK):
        _, n = _units(p_units, base, n_tiles, n_groups, CHUNK)
        used += tl.sum((n > 0).to(tl.int32), 0)
    rounds = used // programs if ROUNDS else 0
    some = tl.maximum(rounds - 1, 0) * programs
    most = rounds * programs
    shared = 0
    last_round = 0
    longest = 0
    shortest = 2**31 - 1
    for base in range(some // CHUNK * CHUNK, n_tiles, CHUNK):
        tile, n = _units(p_units, base, n_tiles, n_groups, CHUNK)
        shared += tl.sum(tl.where(tile >= some, n, 0), 0)
        last_round = tl.maximum(last_round, tl.max(tl.where((tile >= some) & (tile < most), n, 0), 0))
        longest = tl.maximum(longest, tl.max(tl.where(tile >= most, n, 0), 0))
        shortest = tl.minimum(shortest, tl.min(tl.where((tile >= most) & (n > 0), n, 2**31 - 1), 0))
    left = used - most
    spread = longest - shortest
    longest = tl.maximum(longest - more, 0)
    parts = tl.minimum(programs // tl.maximum(left, 1), longest)
    even = (left <= programs) & ((left == 0) | (longest // tl.maximum(parts, 1) > spread))
    alike = last_round + (longest + parts - 1) // tl.maximum(parts, 1)
    if even & (alike <= (shared + programs - 1) // programs + turn):
        some = most
        programs = tl.where(left > 0, left * parts, programs)
    else:
        longest = 0
    return some, longest, programs


@accesses(reads="p_units", writes="p_unit_start", helper=True)
@triton.jit(do_not_specialize=["n_tiles", "n_groups", "programs", "turn", "more"])
def sum_varlen_units(
    p_units, p_unit_start, n_tiles, n_groups, programs, turn, more, ROUNDS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """unit_start: int32 [n_tiles + 3], the prefix sums of the units of all tiles that are shared out, the number of
    whole ones before them, which count as none, and how many programs share. units: of query tiles.

    programs: that share tiles, 0: each tile has its own, and only sums are asked for. ROUNDS: they take the first tiles
    whole, in rounds of one each. What the rounds leave is shared out in one of two ways, whichever takes less time:

    - the last round's tiles and the rest, one to two rounds: equal shares of all units. Most programs then have parts
      of two tiles, and to go on from one to the other takes as long as `turn` units do;
    - the rest alone, tiles of about one length: each cut into as many parts as there are programs for it, one for each.
      All count as the longest without what it has for its turn, so that the programs' equal shares end where tiles do.
      The units that a tile lacks are nobody's, fewer than a part has.
    """
    whole = 0
    as_long = 0
    if programs > 0:
        whole, as_long, programs = _division(p_units, n_tiles, n_groups, programs, turn, more, ROUNDS, CHUNK)
    total = 0
    tl.store(p_unit_start, 0)
    tl.store(p_unit_start + n_tiles + 1, whole)
    tl.store(p_unit_start + n_tiles + 2, programs)
    for base in range(0, n_tiles, CHUNK):
        tile, n = _units(p_units, base, n_tiles, n_groups, CHUNK)
        n = tl.where((tile >= whole) & (n > 0), tl.where(as_long > 0, as_long, n), 0)
        tl.store(p_unit_start + 1 + tile, total + tl.cumsum(n, 0), mask=tile < n_tiles)
        total += tl.sum(n, 0)
