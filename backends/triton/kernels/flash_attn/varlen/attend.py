"""FLASH_ATTN_VARLEN: the portable kernel over the device's list of tiles (tile_list.py).

It is forward.py's with three things of its own: where a tile's rows and keys are comes from the list and the block
table, what a row sees from positions, and tiles are always shared out as ranges of units ("tile": one part each).

An explicit mask (MASK "keys", "new": what its columns are, "" for none) leaves the list as it is: k-blocks that it may
touch are read as partial ones. Values of keys which it hides from all of a tile's rows are not read, also where V lies
in K. It is loaded for all keys with a column, seen or not: fewer conditions let it come several elements at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.constants import LOG2E, NEG_INF
from graphrt.backends.triton.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.flash_attn.forward import (
    join_ways,
    key_index,
    keys_last,
    load_q,
    no_sums,
    per_row,
    scores,
    store_tile,
    weigh,
)
from graphrt.backends.triton.kernels.flash_attn.ranges import listed_range, part_of_tile, slot_of_part, tile_units
from graphrt.backends.triton.kernels.flash_attn.score_math import scored
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import tile_record
from graphrt.backends.triton.kernels.flash_attn.visits import page_of, paged_rows, spanned_block, visited_span


@triton.jit
def _masked(s, slope, p_mask_rows, m_rows, col, column0, n_columns, MASK: tl.constexpr, WAYS: tl.constexpr):
    """Scores with what the mask adds. slope: in their units; p_mask_rows, m_rows: of each row, see per_row; column0:
    the key of the mask's first column."""
    column = keys_last(col - column0, WAYS)
    there = m_rows & (column < n_columns)
    if MASK == "new":
        there = there & (column >= 0)
    added = tl.load(p_mask_rows + column, mask=there, other=0.0).to(tl.float32)
    return tl.where(added == NEG_INF, NEG_INF, s + slope * added)


@triton.jit
def _attend(
    p_k, p_v, p_table, p_mask_rows, m_rows, column0, n_columns,
    position, slope, block, first_key, end_key, n_pages, max_blocks, window, sk_n, sk_p, sv_n, sv_p,
    q0, q1, m, l, acc0, acc1, factor, softcap, head, i_seq, p_score,
    D_K: tl.constexpr, D_V: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_ALIGNED: tl.constexpr, V_ALIGNED: tl.constexpr,
    K_DOT: tl.constexpr, V_DOT: tl.constexpr, BLOCK_N: tl.constexpr, WAYS: tl.constexpr, SOFTCAP: tl.constexpr,
    V_IN_K: tl.constexpr, HAS_V: tl.constexpr, PARTIAL: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
    PRECISION: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr,
    SCORE: tl.constexpr, PRE_LOAD_V: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One k-block. position: of each row's query; PARTIAL: what a row sees counts; keys first_key .. end_key - 1 are
    seen by some row, others are not read. PAGE: 0 for packed keys, which begin at p_k and p_v. head: of each row;
    SCORE, p_score: as forward.py's attend(). p_mask_rows, m_rows, column0, n_columns: see _masked()."""
    i_key = key_index(BLOCK_N, WAYS)
    col = block * BLOCK_N + i_key
    m_key = (col >= first_key) & (col < end_key)
    if PAGE > 0:
        page = page_of(p_table, block, i_key, n_pages, max_blocks, PAGE, BLOCK_N, PTX)
        k_base, k_at = paged_rows(page, block, i_key, sk_n, sk_p, PAGE, BLOCK_N, WIDE)
        v_base, v_at = paged_rows(page, block, i_key, sv_n, sv_p, PAGE, BLOCK_N, WIDE)
    else:  # one page as long as all keys
        row = (block * BLOCK_N).to(tl.int64)
        i_row = i_key.to(tl.int64) if WIDE else i_key
        k_base, k_at = row * sk_n, i_row * sk_n
        v_base, v_at = row * sv_n, i_row * sv_n
    s, k0, unit, factor = scores(
        p_k + k_base, k_at, m_key, q0, q1, factor, softcap, D_K, DK0, DK1, K_KIND, K_ALIGNED, K_DOT, WAYS, SOFTCAP,
        not PARTIAL, PTX, PRECISION,
    )  # fmt: skip
    if SCORE is not None:
        key = keys_last(col, WAYS)
        s = scored(s, factor, i_seq, head, position, key, p_score, SCORE, K_DOT == tl.float32)
        unit = LOG2E
        factor = 1.0
    if PARTIAL:
        key = keys_last(col, WAYS)
        seen = keys_last(m_key, WAYS)
        if CAUSAL:
            seen = seen & (key <= position)
        if WINDOW:
            seen = seen & (key > position - window)
        if MASK != "":
            seen = seen & m_rows
            s = _masked(s, slope * unit, p_mask_rows, m_rows, col, column0, n_columns, MASK, WAYS)
        if ALIBI:
            s -= (slope * unit) * tl.abs(key - position).to(tl.float32)
        s = tl.where(seen, s, NEG_INF)
        if MASK != "":  # what is hidden from all rows may hold NaN
            m_key = tl.max((s != NEG_INF).to(tl.int32), 0 if WAYS == 0 else 1) > 0
    return weigh(
        s, factor, k0, p_v + v_base, v_at, m_key, m, l, acc0, acc1, False, 1.0, D_V, DV0, DV1, V_KIND, V_ALIGNED,
        V_DOT, WAYS, V_IN_K and (MASK == "" or not PARTIAL), HAS_V, not PARTIAL,
        PARTIAL or SCORE is not None, False, PTX, PRECISION, PRE_LOAD_V,
    )  # fmt: skip


#: Numbers that compiled code does not depend on: neither more sequences nor longer tables compile anything.
GENERAL = [
    "n_head", "gqa", "n_groups", "n_tiles", "n_seq", "n_pages", "max_blocks", "s_table", "window", "splits",
    "has_sinks", "has_lse", "m2", "n_columns",
]  # fmt: skip


@accesses(
    reads="p_q p_k p_v p_mask p_sinks p_slopes p_score p_tiles p_table p_unit_start",
    writes="p_out p_lse p_part",
)
@triton.jit(do_not_specialize=GENERAL)
def flash_attn_varlen(
    p_q, p_k, p_v, p_mask, p_sinks, p_slopes, p_score, p_out, p_lse, p_tiles, p_table, p_unit_start, p_part,
    sq_t, sq_h, sk_h, sk_p, sv_h, sv_p, sm_t, sm_h, s_table, n_head, gqa, n_groups, n_tiles, n_seq, n_pages, max_blocks,
    m2, n_columns, window, splits, sign, factor, softcap, has_sinks, has_lse,
    sk_n: tl.constexpr, sv_n: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr,
    DV0: tl.constexpr, DV1: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    K_ALIGNED: tl.constexpr, V_ALIGNED: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WAYS: tl.constexpr, SOFTCAP: tl.constexpr, V_IN_K: tl.constexpr,
    HAS_V: tl.constexpr, PACK: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SCORE: tl.constexpr, ALIBI: tl.constexpr, BIG: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr, PRECISION: tl.constexpr, PRE_LOAD_V: tl.constexpr, STAGES: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """See the module, and forward.py's flash_attn for what is not here. q: f32; out: f32 [n_tokens, n_head, D_V]; lse:
    f32 [n_tokens, n_head]. table: int32 rows of max_blocks pages, s_table apart; sk_p, sv_p: strides between pages.
    mask: f16, m2 matrices of n_columns columns, sm_t between tokens, sm_h between matrices."""
    pid = tl.program_id(0)
    if PDL:
        gdc_wait()
    tile, unit, stop = listed_range(pid, splits, n_tiles, p_unit_start, BIG)
    while unit < stop:
        start, n_units = tile_units(tile, p_unit_start, 0, p_unit_start, False, False, BIG)
        low, high, finishes, whole = part_of_tile(start, n_units, unit, stop)
        unit = start + high
        i_seq, q_first, n, row0, length, k_first, behind, skip = tile_record(p_tiles, tile // n_groups)
        first, full_first, full_end, end, first_key, end_key = visited_span(
            row0, n, length, behind, skip, window, PACK, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, ALIBI
        )
        column0 = behind if MASK == "new" else 0
        if MASK == "keys":
            full_end = full_first
        elif MASK == "new":  # what lies before all columns
            full_end = tl.minimum(full_end, tl.maximum(tl.maximum(behind, 0) // BLOCK_N, full_first))
        n_full = full_end - full_first
        high = tl.minimum(high, end - first)
        head0 = (tile % n_groups) * PACK
        i_kv_head = head0 // gqa
        row = row0 + tl.arange(0, BLOCK_M)
        token = row // PACK
        head = head0 + row % PACK
        m_row = token < n
        p_row = (q_first + token).to(tl.int64) * sq_t + head.to(tl.int64) * sq_h
        q0 = load_q(p_q, p_row, m_row, sign, D_K, 0, DK0, K_KIND, K_ALIGNED, K_DOT, WAYS)
        q1 = q0
        if DK1 > 0:
            q1 = load_q(p_q, p_row, m_row, sign, D_K, DK0, DK1, K_KIND, K_ALIGNED, K_DOT, WAYS)
        p_kh = p_k + k_first.to(tl.int64) * sk_n + i_kv_head.to(tl.int64) * sk_h
        p_vh = p_v + k_first.to(tl.int64) * sv_n + i_kv_head.to(tl.int64) * sv_h
        p_pages = p_table + tl.minimum(i_seq, n_seq - 1).to(tl.int64) * s_table
        RANK: tl.constexpr = 2 if WAYS == 0 else 3
        slope = per_row(tl.load(p_slopes + head, mask=m_row, other=0.0), RANK)
        heads = per_row(head, RANK)
        position = per_row(behind + token, RANK)
        m_rows = per_row(m_row, RANK)
        p_mask_rows = p_mask
        if MASK != "":
            p_mask_rows = per_row(
                p_mask + (q_first + token).to(tl.int64) * sm_t + (head % m2).to(tl.int64) * sm_h, RANK
            )
        m, l, acc0, acc1 = no_sums(BLOCK_M, DV0, DV1, WAYS)

        for PARTIAL in tl.static_range(2):  # full k-blocks first
            begin = tl.maximum(low, n_full) if PARTIAL else low
            until = high if PARTIAL else tl.minimum(high, n_full)
            # Which values are loaded under a mask depends on scores: nothing of that can be ahead.
            for i in tl.range(begin, until, num_stages=1 if PARTIAL and MASK != "" else STAGES):
                block = spanned_block(i, first, full_first, full_end, PARTIAL == 1)
                m, l, acc0, acc1 = _attend(
                    p_kh, p_vh, p_pages, p_mask_rows, m_rows, column0, n_columns,
                    position, slope, block, first_key, end_key, n_pages, max_blocks, window, sk_n, sk_p, sv_n, sv_p, q0,
                    q1, m, l, acc0, acc1, factor, softcap, heads, i_seq, p_score, D_K, D_V, DK0, DK1, DV0, DV1, K_KIND,
                    V_KIND, K_ALIGNED, V_ALIGNED, K_DOT, V_DOT, BLOCK_N, WAYS, SOFTCAP, V_IN_K, HAS_V, PARTIAL == 1,
                    WIDE, PTX, PRECISION, PAGE, CAUSAL, WINDOW, ALIBI, SCORE, PRE_LOAD_V, MASK,
                )  # fmt: skip

        if not SOFTCAP and SCORE is None:
            m = m * factor
        if WAYS > 0:
            m, l, acc0, acc1 = join_ways(m, l, acc0, acc1, DV1)
        if PDL:
            gdc_launch_dependents()
        out_row = (q_first + token).to(tl.int64) * n_head + head
        # Queries of nobody (sequence n_seq) have no sink either.
        store_tile(
            p_out, p_lse, p_part, p_sinks + head, out_row, m_row, m, l, acc0, acc1, whole,
            slot_of_part(pid, splits, finishes), has_sinks & (i_seq < n_seq), has_lse, D_V, DV0, DV1, V_KIND, V_ALIGNED,
            HAS_V, BLOCK_M,
        )  # fmt: skip
        tile += 1
