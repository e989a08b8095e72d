"""The second phase of split and stream-K: joins the parts of a tile in the order of their programs."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.constants import LN2, LOG2E, NEG_INF
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.flash_attn.forward import normalized
from graphrt.backends.triton.kernels.flash_attn.ranges import fixup_range, part_slot, planned
from graphrt.backends.triton.kernels.flash_attn.tiles import slot_elements
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import tile_record


@accesses(
    reads="p_part p_sinks p_counts p_unit_start p_tiles",
    writes="p_out p_lse",
    early_if={"HAS_MASK": "p_counts p_unit_start", "VARLEN": "p_tiles"},
    uncached="p_counts p_unit_start p_tiles",
    helper=True,
)
@triton.jit(
    do_not_specialize=[
        "n_q", "n_head", "n_groups", "n_qt", "n_blocks", "n_tiles", "n_seq", "programs", "splits", "has_sinks",
        "has_lse",
    ]
)  # fmt: skip
def flash_attn_fixup(
    p_part, p_sinks, p_out, p_lse, p_counts, p_unit_start, p_tiles, n_q, n_head, n_groups, n_qt, n_blocks, n_tiles,
    n_seq, programs, splits, has_sinks, has_lse,
    D_V: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, V_KIND: tl.constexpr, V_ALIGNED: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_V: tl.constexpr, UNIFORM: tl.constexpr, BIG: tl.constexpr, PACK: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr, VARLEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, i, j) joins ROWS rows, COLS columns of a tile, PARTS parts at a time. Arguments: flash_attn's; if
    VARLEN flash_attn_varlen's, whose lengths are a plan as a mask's are (HAS_MASK)."""
    tile = tl.program_id(0)
    if VARLEN:  # how many share tiles is known on the device
        programs = planned(p_unit_start + n_tiles + 2)
    # Of the mask's plan, which is older than the launch that wrote the parts. That one let this one start after a
    # gdc_wait of its own only, when all launches before it were complete.
    first, last, n_units, total = fixup_range(
        tile, programs, splits, n_tiles, n_blocks, p_counts, p_unit_start, HAS_MASK, UNIFORM, BIG
    )
    if VARLEN:
        i_seq, first_token, n, row0, _, _, _, _ = tile_record(p_tiles, tile // n_groups)
        i_group = tile % n_groups
        has_sinks &= i_seq < n_seq
    else:
        first_token = (tile // (n_qt * n_groups)) * n_q
        n = n_q
        row0 = (tile % n_qt) * BLOCK_M
        i_group = (tile // n_qt) % n_groups
    take_turn(PDL)
    if (first != last) & (n_units > 0):  # a varlen attention's list of tiles ends with some that have no units
        i_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row = row0 + i_row
        token = row // PACK
        head = i_group * PACK + row % PACK
        m_row = (token < n) & (i_row < BLOCK_M)
        W: tl.constexpr = DV0 + DV1
        i_d = tl.program_id(2) * COLS + tl.arange(0, COLS)
        m = tl.full([ROWS], NEG_INF, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for base in range(first, last + 1, PARTS):
            part = base + tl.arange(0, PARTS)
            slot, used = part_slot(part, first, last, programs, splits, n_units, total)
            m_part = used[None, :] & m_row[:, None]
            p_slot = p_part + slot.to(tl.int64) * (BLOCK_M * (W + 2))
            p_sums = p_slot[None, :] + BLOCK_M * W + i_row[:, None]
            m_i = tl.load(p_sums, mask=m_part, other=NEG_INF)
            l_i = tl.load(p_sums + BLOCK_M, mask=m_part, other=0.0)
            if HAS_V:  # asked for before the sums are there, so that there is one wait for memory and not two
                p_acc = p_slot[None, :, None] + (i_row * W)[:, None, None] + i_d[None, None, :]
                a = tl.load(p_acc, mask=m_part[:, :, None] & (i_d < W)[None, None, :], other=0.0)
            m_new = tl.maximum(m, tl.max(m_i, 1))
            safe = tl.where(m_new == NEG_INF, 0.0, m_new)
            weight = tl.exp2(m_i - safe[:, None])
            alpha = tl.exp2(m - safe)
            l = l * alpha + tl.sum(l_i * weight, 1)
            if HAS_V:
                acc = acc * alpha[:, None] + tl.sum(a * weight[:, :, None], 1)
            m = m_new
        sink = tl.full([ROWS], NEG_INF, tl.float32)
        if has_sinks:
            sink = tl.load(p_sinks + head, mask=m_row, other=NEG_INF) * LOG2E
        lse, weight = normalized(m, l, sink)
        out_row = (first_token.to(tl.int64) + token) * n_head + head
        if HAS_V:
            i_element = slot_elements(i_d, V_KIND, V_ALIGNED)
            m_store = m_row[:, None] & ((i_element < D_V) & (i_d < W))[None, :]
            tl.store(p_out + out_row[:, None] * D_V + i_element[None, :], acc * weight[:, None], mask=m_store)
        if has_lse:
            tl.store(p_lse + out_row, lse * LN2, mask=m_row)
