"""FLASH_ATTN_VARLEN for few query rows: decode.py's loops over the device's list of tiles (tile_list.py).

A tile is 16 rows of all heads of a KV head, of one sequence; longer sequences have several. Which k-blocks it visits
and what its rows see follows from positions; pages are looked up where copies begin, so that the table's loads are as
far ahead as the copies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_wait
from graphrt.backends.triton.kernels.flash_attn.decode import column_sums, way_sums
from graphrt.backends.triton.kernels.flash_attn.decode_join import deliver, joined_ways
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import ROWS, column_mma_layout, join_layout
from graphrt.backends.triton.kernels.flash_attn.decode_operands import allocate
from graphrt.backends.triton.kernels.flash_attn.decode_pieces import copy_block
from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import (
    listed_range,
    part_of_tile,
    planned,
    quotient,
    tile_units,
)
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import visited_keys
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import RECORD


@accesses(
    reads="p_q p_k p_v p_sinks p_slopes p_tiles p_table p_unit_start",
    writes="p_out p_lse p_part",
    early_if={"PLAN_EARLY": "p_unit_start"},
    uncached="p_unit_start",
)
@gluon.jit(
    do_not_specialize=[
        "n_groups", "n_tiles", "n_seq", "n_pages", "max_blocks", "s_table", "window", "splits", "has_sinks", "has_lse",
    ],
)  # fmt: skip
def flash_attn_varlen_decode(
    p_q, p_k, p_v, p_sinks, p_slopes, p_out, p_lse, p_tiles, p_table, p_unit_start, p_part,
    sq_t, sq_h, sk_h, sk_p, sv_h, sv_p, s_table, n_head, n_groups, n_tiles, n_seq, n_pages, max_blocks, window,
    splits, sign, factor, softcap, has_sinks, has_lse,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, PACK: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SEES: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
    PLAN_EARLY: gl.constexpr,
):  # fmt: skip
    """Arguments are those of attend.py's flash_attn_varlen, and decode.py's. PACK: all heads of a KV head. SEES: what
    CAUSAL, WINDOW and ALiBi are to decode.py's logits. PLAN_EARLY: as decode.py's, of units. Not BIG nor WIDE.

    Parts are joined by fixup.py. Joined here by the last of a tile's programs, as decode.py has it, one user's step
    took 1.745 ms instead of 1.737 (H200), and 1 x 65536 keys 103.8 us instead of 101.9 (H100)."""
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    gl.static_assert(NW % (8 if COLUMNS else 16) == 0)
    pid = gl.program_id(0)
    if PDL and not PLAN_EARLY:
        gdc_wait()
    tile, _, unit, stop = listed_range(pid, splits, n_tiles, p_unit_start, False)
    if PDL and PLAN_EARLY:  # also without a unit: the launch behind this one waits for this one alone
        gdc_wait()
    while unit < stop:
        i_qt = quotient(tile, n_groups)
        i_group = tile - i_qt * n_groups
        p_record = p_tiles + RECORD * i_qt
        i_seq = planned(p_record)
        q_first = planned(p_record + 1)
        n = planned(p_record + 2)
        row0 = planned(p_record + 3)
        length = planned(p_record + 4)
        k_first = planned(p_record + 5).to(gl.int64)
        behind = planned(p_record + 6)
        skip = planned(p_record + 7)
        start, n_units = tile_units(tile, p_unit_start, 0, p_unit_start, False, False)
        low, high, finishes, whole = part_of_tile(start, n_units, unit, stop)
        unit = start + high
        first, end, first_key, end_key = visited_keys(
            row0, n, length, behind, skip, window, PACK, ROWS, BLOCK_N, CAUSAL, WINDOW
        )  # fmt: skip
        low += first
        high = gl.minimum(first + high, end)

        p_kh = p_k + k_first * sk_n + i_group.to(gl.int64) * sk_h
        p_vh = p_v + k_first * sv_n + i_group.to(gl.int64) * sv_h
        p_pages = p_table + gl.minimum(i_seq, n_seq - 1).to(gl.int64) * s_table
        ring_k = allocate(STAGES, NW, D, K_KIND, False, sk_n, i_group * sk_h)
        ring_v = allocate(STAGES, NW, D, V_KIND, True, sv_n, i_group * sv_h)
        caches = (ring_k, ring_v, p_kh, p_vh, (first_key, p_pages, max_blocks, n_pages, sk_p, sv_p), end_key)
        visits = (p_table, 0, 0, 0, high)
        queries = (p_q + q_first.to(gl.int64) * sq_t, sq_t, sq_h, row0, n, sign)
        sight = (behind, p_slopes, window, first_key)
        for i in range(STAGES):
            copy_block(
                caches, visits, low + i, i, sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, SEES, PAGE, PDL,
                "whole" if COLUMNS else "masked",
            )  # fmt: skip
        if COLUMNS:
            m, l, acc = column_sums(
                queries, sight, caches, visits, low, i_seq, i_group, factor, softcap, sk_n, sv_n, D, K_KIND, V_KIND,
                BLOCK_N, SOFTCAP, SEES, PAGE, PACK, False, PDL, STAGES,
            )  # fmt: skip
            LAYOUT: gl.constexpr = column_mma_layout(W)
        else:
            m, l, acc = way_sums(
                queries, sight, caches, visits, low, i_seq, i_group, factor, softcap, sk_n, sv_n, D, K_KIND, V_KIND,
                BLOCK_N, SOFTCAP, SEES, PAGE, PACK, False, PDL, STAGES, "whole", (), "", 0,
            )  # fmt: skip
            m, l, acc = joined_ways(m, l, acc, D, V_KIND)
            LAYOUT: gl.constexpr = gl.SliceLayout(0, join_layout(D, W, ROWS))
        # Queries of nobody (sequence n_seq) have no sink either.
        sinks = gl.where(i_seq < n_seq, has_sinks, 0)
        deliver(
            p_sinks, p_out, p_lse, p_part, m, l, acc, pid, splits, q_first, row0, i_group, whole, finishes, n, n_head,
            sinks, has_lse, p_part, p_unit_start, p_unit_start, tile, 0, n_tiles, 0,
            LAYOUT, PACK, D, V_KIND, False, False, 0, 0,
        )  # fmt: skip
        tile += 1
