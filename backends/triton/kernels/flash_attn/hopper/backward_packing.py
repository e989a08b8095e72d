"""What Hopper's kernels for gradients of packed sequences are given, by launches of plain Triton: tiles, those with the
most work first, and queries in slots.

A slot is the place of 128 queries of one sequence, the s-th sequence's first one number `first query // 128 + s`: so no
two sequences share one, and nobody has to count. What is behind a sequence's last query in its last slot is zeros, and
an lse that makes weights 0. So the kernels read queries of one sequence alone, as they do where sequences lie apart.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.constants import LOG2E, NEG_INF
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_specs import PLAN_QUERIES
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import RECORD, tile_record

SLOT = tl.constexpr(PLAN_QUERIES)


@triton.jit
def _seen_rows(row0, n, others, behind, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
               OF_KEYS: tl.constexpr):  # fmt: skip
    """How many queries see a key of a tile of keys, or how many keys a tile of queries sees; -1 where there is no such
    tile. row0, n: its first row, and those of its sequence; others: the sequence's queries, or keys; behind: the
    position of its first query."""
    last = tl.minimum(row0 + BLOCK, n) - 1
    reach = tl.minimum(window, 1 << 29)
    first, end = row0 * 0, others
    if OF_KEYS:
        if CAUSAL:
            first = tl.maximum(row0 - behind, 0)
        if WINDOW:
            end = tl.minimum(others, last + reach - behind)
    else:
        if CAUSAL:
            end = tl.minimum(others, behind + last + 1)
        if WINDOW:
            first = tl.maximum(behind + row0 - reach + 1, 0)
    return tl.where(row0 < n, tl.maximum(end - first, 0), -1)


@triton.jit
def _fields(p_tiles, i, n_tiles):
    """(first row of all, rows, first row of the tile, rows of the other side, position of the first query as
    tile_list.py wrote it) of listed tiles; past the list, of none."""
    p, m = p_tiles + RECORD * i, i < n_tiles
    return (
        tl.load(p + 2, mask=m, other=0), tl.load(p + 3, mask=m, other=0), tl.load(p + 4, mask=m, other=0),
        tl.load(p + 6, mask=m, other=0),
    )  # fmt: skip


@accesses(reads="p_tiles", writes="p_ordered", helper=True)
@triton.jit(do_not_specialize=["n_tiles", "window"])
def order_packed_tiles(
    p_tiles, p_ordered, n_tiles, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    OF_KEYS: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ordered int32 [n_tiles, RECORD]: the records of tiles, see tile_list.py, those first that see or are seen by
    most; equal ones in their own order, those that are not there last. Program i places TILES of them. Of tiles of keys
    the list has queries and keys exchanged (backward/plans.py). Two fields differ: the position is that of the first
    query in both lists, and the last one is the sequence's first slot."""
    take_turn(PDL)
    i = tl.program_id(0) * TILES + tl.arange(0, TILES)
    n, row0, others, behind = _fields(p_tiles, i, n_tiles)
    if OF_KEYS:
        behind = -behind
    work = _seen_rows(row0, n, others, behind, window, BLOCK, CAUSAL, WINDOW, OF_KEYS)
    rank = i * 0
    for base in range(0, n_tiles, CHUNK):
        j = base + tl.arange(0, CHUNK)
        n_j, row0_j, others_j, behind_j = _fields(p_tiles, j, n_tiles)
        if OF_KEYS:
            behind_j = -behind_j
        work_j = _seen_rows(row0_j, n_j, others_j, behind_j, window, BLOCK, CAUSAL, WINDOW, OF_KEYS)
        before = (work_j[None, :] > work[:, None]) | ((work_j[None, :] == work[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum((before & (j < n_tiles)[None, :]).to(tl.int32), 1)
    there = i < n_tiles
    p, p_made = p_tiles + RECORD * i, p_ordered + RECORD * rank
    seq, first = tl.load(p, mask=there, other=0), tl.load(p + 1, mask=there, other=0)
    others_first = tl.load(p + 5, mask=there, other=0)
    tl.store(p_made, seq, mask=there)
    tl.store(p_made + 1, first, mask=there)
    tl.store(p_made + 2, n, mask=there)
    tl.store(p_made + 3, row0, mask=there)
    tl.store(p_made + 4, others, mask=there)
    tl.store(p_made + 5, others_first, mask=there)
    tl.store(p_made + 6, behind, mask=there)
    tl.store(p_made + 7, (others_first if OF_KEYS else first) // SLOT + seq, mask=there)


@accesses(reads="p_tiles p_q p_d_out p_lse p_delta p_scales", writes="p_made_q p_made_d p_rows", helper=True)
@triton.jit(do_not_specialize=["n_q", "padded"])
def attention_back_slots(
    p_tiles, p_q, p_d_out, p_lse, p_delta, p_scales, p_made_q, p_made_d, p_rows, n_q, padded, q_t, q_h, d_t, d_h, l_t,
    l_h, D: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Queries into their slots: made_q, made_d [n_head, padded, D], q and d_out (times scales[0] if SCALED) in the type
    of products; rows f32 [n_head, 2, padded], what backward_rows.py's attention_back_lse writes. Program (h, i):
    ROWS queries of a tile of order_packed_tiles's list of queries.

    q, d_out, lse: f32 of strides of a query (t) and a head; delta: f32 [n_head, n_q].
    """
    take_turn(PDL)
    i_h = tl.program_id(0).to(tl.int64)
    PARTS: tl.constexpr = SLOT // ROWS
    i = tl.program_id(1)
    _seq, q_first, n, row0, _others, _k_first, _behind, slot = tile_record(p_tiles, i // PARTS)
    if row0 < n:
        row = i % PARTS * ROWS + tl.arange(0, ROWS)
        there = row0 + row < n
        at = (q_first + row0 + row).to(tl.int64)
        made = i_h * padded + slot * SLOT + row0 + row
        i_d = tl.arange(0, D)[None, :]
        q = tl.load(p_q + i_h * q_h + (at * q_t)[:, None] + i_d, mask=there[:, None], other=0.0)
        d_out = tl.load(p_d_out + i_h * d_h + (at * d_t)[:, None] + i_d, mask=there[:, None], other=0.0)
        if SCALED:
            d_out *= tl.load(p_scales)
        tl.store(p_made_q + made[:, None] * D + i_d, q.to(p_made_q.dtype.element_ty))
        tl.store(p_made_d + made[:, None] * D + i_d, d_out.to(p_made_d.dtype.element_ty))
        lse = tl.load(p_lse + i_h * l_h + at * l_t, mask=there, other=NEG_INF) * LOG2E - BITS
        delta = tl.load(p_delta + i_h * n_q + at, mask=there, other=0.0) * (tl.load(p_scales + 1) / (1 << BITS))
        p_row = p_rows + made + i_h * padded
        tl.store(p_row, tl.where(lse == NEG_INF, float("inf"), lse))
        tl.store(p_row + padded, delta)
