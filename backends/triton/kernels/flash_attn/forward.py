"""FLASH_ATTN_EXT: the attention kernel. One source for prefill (many query rows a tile) and decode (few).

A tile is BLOCK_M query rows of one group of heads that share a KV head, of one sequence. Rows run over queries first
and over the group's heads within: row r is query r // PACK, head r % PACK of the group. A program works through a range
of (tile, k-block) units (see stream_k.py) and writes a tile's result, or its part of it for fixup.py.

Softmax runs online (Milakov and Gimelshein, arXiv 1805.02867), in units of log2: m is the largest logit so far, l the
sum of 2^(s - m), acc the same sum of the rows of V. Dot products take f16 or bf16 and sum in f32; of f32 caches they
are split into three tf32 products.

WAYS > 0 is the decode form: each warp takes its own keys of a k-block with sums of its own, which meet at the end; so
BLOCK_M can be 16 without all warps doing the same work, and no warp waits for another in the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.blocks import is_quantized
from graphrt.backends.triton.kernels.common.constants import LN2, LOG2E, NEG_INF
from graphrt.backends.triton.kernels.common.float8 import float8_values, is_float8
from graphrt.backends.triton.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.flash_attn.append import (
    cell_of_head,
    new_cell,
    new_rows,
    with_new_key,
    write_new_rows,
)
from graphrt.backends.triton.kernels.flash_attn.append_blocks import is_writer, write_cell
from graphrt.backends.triton.kernels.flash_attn.dropout import kept_weights
from graphrt.backends.triton.kernels.flash_attn.ranges import (
    longest_first,
    next_bad,
    part_of_tile,
    program_range,
    slot_of_part,
    tile_units,
)
from graphrt.backends.triton.kernels.flash_attn.score_math import scored
from graphrt.backends.triton.kernels.flash_attn.tiles import load_quantized, slot_elements
from graphrt.backends.triton.kernels.flash_attn.visits import first_row, load_index, mask_tile, visited_block


@triton.constexpr_function
def _rank(x):
    return len(x.shape)


@triton.jit
def _last(x, RANK: tl.constexpr):
    """A vector of keys or columns along the last axis of RANK."""
    return x[None, :] if RANK == 2 else x[None, None, :]


@triton.jit
def per_row(x, RANK: tl.constexpr):
    """A vector of query rows along the second last axis of RANK."""
    return x[:, None] if RANK == 2 else x[None, :, None]


@triton.jit
def keys_last(i_key, WAYS: tl.constexpr):
    """Keys [BN] or [WAYS, BN / WAYS] as columns of scores."""
    return i_key[None, :] if WAYS == 0 else i_key[:, None, :]


@triton.jit
def _keys_first(i_key, WAYS: tl.constexpr):
    """Keys [BN] or [WAYS, BN / WAYS] as rows of K and V."""
    return i_key[:, None] if WAYS == 0 else i_key[:, :, None]


@triton.jit
def key_index(BLOCK_N: tl.constexpr, WAYS: tl.constexpr):
    """Keys of a k-block: [BN], or [WAYS, BN / WAYS]."""
    if WAYS == 0:
        return tl.arange(0, BLOCK_N)
    else:
        PER_WAY: tl.constexpr = BLOCK_N // WAYS
        return tl.arange(0, WAYS)[:, None] * PER_WAY + tl.arange(0, PER_WAY)[None, :]


@triton.jit
def _tanh(x, ACCURATE: tl.constexpr):
    """tanh in f32: 1 - 2 / (1 + e^2x), near 0 its series where relative accuracy counts."""
    y = 1.0 - 2.0 / (1.0 + tl.exp2(2.0 * LOG2E * x))
    if ACCURATE:
        z = x * x
        series = x * (1.0 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835 - z * (1382 / 155925))))))
        y = tl.where(tl.abs(x) < 0.35, series, y)
    return y


@triton.jit
def load_kv(
    p_kv, at, m_key, D: tl.constexpr, FROM: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
    ALIGNED: tl.constexpr, DOT: tl.constexpr, WAYS: tl.constexpr, ALL: tl.constexpr, PTX: tl.constexpr,
    s_panel=0, PANEL: tl.constexpr = 0,
):  # fmt: skip
    """SIZE columns from column FROM of rows of K or V as DOT, [BN, SIZE] or [WAYS, BN / WAYS, SIZE].

    at: where the rows begin behind p_kv, in units of the pointer. Rows where m_key is false (ALL: there are none) and
    columns past D are 0 and not read. PANEL: of rows in panels (ops/key_panels.py) the columns that lie side by side,
    s_panel: between those and the next; 0: all do.
    """
    if is_quantized(KIND):
        BN: tl.constexpr = at.numel
        i_block = FROM // 32 + tl.arange(0, SIZE // 32)
        m_block = (i_block < D // 32)[None, :]
        m_block = tl.broadcast_to(m_block, (BN, SIZE // 32)) if ALL else tl.reshape(m_key, (BN,))[:, None] & m_block
        x = load_quantized(p_kv + tl.reshape(at, (BN,)), i_block, m_block, KIND, ALIGNED, PTX).to(DOT)
        return x if WAYS == 0 else tl.reshape(x, (WAYS, BN // WAYS, SIZE))
    else:
        i_d = FROM + tl.arange(0, SIZE)
        i_col = i_d if PANEL == 0 else (i_d // PANEL).to(at.dtype) * s_panel + i_d % PANEL
        p_tile = p_kv + _keys_first(at, WAYS) + _last(i_col, 2 if WAYS == 0 else 3)
        m_d = _last(i_d < D, 2 if WAYS == 0 else 3)
        if ALL and FROM + SIZE <= D:
            x = tl.load(p_tile)
        elif ALL:
            x = tl.load(p_tile, mask=m_d, other=0)
        elif FROM + SIZE <= D:
            x = tl.load(p_tile, mask=_keys_first(m_key, WAYS), other=0)
        else:
            x = tl.load(p_tile, mask=_keys_first(m_key, WAYS) & m_d, other=0)
        if is_float8(KIND):
            x = float8_values(x, KIND, PTX)
        return x.to(DOT)


@triton.jit
def _turned(x):
    """The last two axes exchanged."""
    return tl.trans(x) if _rank(x) == 2 else tl.permute(x, 0, 2, 1)


@triton.jit
def load_q(
    p_q, p_row, m_row, sign, D: tl.constexpr, FROM: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
    ALIGNED: tl.constexpr, DOT: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Columns of the query rows, f32 or codes of f8_e4m3, in the order of K's tiles. p_row: offsets of the rows; sign:
    of the scale."""
    i_d = slot_elements(FROM + tl.arange(0, SIZE), KIND, ALIGNED)
    q = tl.load(p_q + p_row[:, None] + i_d[None, :], mask=m_row[:, None] & (i_d < D)[None, :], other=0.0)
    if q.dtype == tl.uint8:
        q = float8_values(q, "f8_e4m3", 0).to(tl.float32)
    q = (q * sign).to(DOT)
    if WAYS > 0:
        q = tl.broadcast_to(q[None, :, :], (WAYS, q.shape[0], SIZE))
    return q


@triton.jit
def softmax_step(s, factor, m, l, GUARD: tl.constexpr):
    """Online softmax: weights of the logits s * factor, and m, l and the factor on earlier sums.

    m is in the units of s and subtracted first: as one multiply-add with a rounded m * factor, the largest logit's
    weight would not be exactly 1, and rounded to f16 it would part from its share of l, the more the larger the logits.
    GUARD: a row may be all -inf so far, and -inf - -inf would be NaN.
    """
    AXIS: tl.constexpr = _rank(s) - 1
    m_new = tl.maximum(m, tl.max(s, AXIS, keep_dims=True))
    top = tl.where(m_new == NEG_INF, 0.0, m_new) if GUARD else m_new
    p = tl.exp2((s - top) * factor)
    alpha = tl.exp2((m - top) * factor)
    return p, m_new, l * alpha + tl.sum(p, AXIS, keep_dims=True), alpha


@triton.jit
def scores(
    p_kb, at, m_key, q0, q1, factor, softcap, D_K: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr,
    K_KIND: tl.constexpr, K_ALIGNED: tl.constexpr, K_DOT: tl.constexpr, WAYS: tl.constexpr, SOFTCAP: tl.constexpr,
    ALL: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr, s_panel=0, PANEL: tl.constexpr = 0,
):  # fmt: skip
    """Of a k-block: q.k with the softcap, the first part of K's tile, what one of log2 is in the units of these scores,
    and the factor that brings them to log2. at, m_key, ALL: of its rows, see load_kv."""
    k0 = load_kv(p_kb, at, m_key, D_K, 0, DK0, K_KIND, K_ALIGNED, K_DOT, WAYS, ALL, PTX, s_panel, PANEL)
    s = tl.dot(q0, _turned(k0), input_precision=PRECISION)
    if DK1 > 0:
        k1 = load_kv(p_kb, at, m_key, D_K, DK0, DK1, K_KIND, K_ALIGNED, K_DOT, WAYS, ALL, PTX, s_panel, PANEL)
        s = tl.dot(q1, _turned(k1), s, input_precision=PRECISION)
    # What a mask adds is brought into the units of s: those stay exact where it adds 0, however large they are.
    unit = LOG2E / factor
    if SOFTCAP:
        s = (softcap * LOG2E) * _tanh(s * factor, K_DOT == tl.float32)
        unit = LOG2E
        factor = 1.0
    return s, k0, unit, factor


@triton.jit
def weigh(
    s, factor, k0, p_vb, at, m_key, m, l, acc0, acc1, kept, inverse,
    D_V: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    V_KIND: tl.constexpr, V_ALIGNED: tl.constexpr, V_DOT: tl.constexpr, WAYS: tl.constexpr, V_IN_K: tl.constexpr,
    HAS_V: tl.constexpr, ALL: tl.constexpr, GUARD: tl.constexpr, DROPOUT: tl.constexpr, PTX: tl.constexpr,
    PRECISION: tl.constexpr, PRE_LOAD_V: tl.constexpr,
):  # fmt: skip
    """m, l and acc with a k-block's scores. k0: K's tile, which holds V's if V_IN_K. ALL: every key is there; GUARD: a
    score may be -inf; DROPOUT, calls of Philox a word: of the weights those that are kept count, times inverse; l has
    all. PRE_LOAD_V: V is asked for before the softmax."""
    if HAS_V and PRE_LOAD_V and not V_IN_K:
        v0 = load_kv(p_vb, at, m_key, D_V, 0, DV0, V_KIND, V_ALIGNED, V_DOT, WAYS, ALL, PTX)
    p, m, l, alpha = softmax_step(s, factor, m, l, GUARD)
    if HAS_V:
        if DROPOUT:
            p = tl.where(kept, p * inverse, 0.0)
        p = p.to(V_DOT)
        if V_IN_K:
            v0 = k0
        elif not PRE_LOAD_V:
            v0 = load_kv(p_vb, at, m_key, D_V, 0, DV0, V_KIND, V_ALIGNED, V_DOT, WAYS, ALL, PTX)
        acc0 = tl.dot(p, v0, acc0 * alpha, input_precision=PRECISION)
        if DV1 > 0:
            v1 = load_kv(p_vb, at, m_key, D_V, DV0, DV1, V_KIND, V_ALIGNED, V_DOT, WAYS, ALL, PTX)
            acc1 = tl.dot(p, v1, acc1 * alpha, input_precision=PRECISION)
    return m, l, acc0, acc1


@triton.jit
def attend(
    p_k, p_v, sk_n, sv_n, p_mask_rows, p_bias_rows, m_rows, slope, p_seen, i_kb, n_kv, q0, q1, m, l, acc0, acc1, factor,
    softcap, token, head, i_seq, dropout, p_score, s_panel,
    D_K: tl.constexpr, D_V: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_ALIGNED: tl.constexpr, V_ALIGNED: tl.constexpr,
    K_DOT: tl.constexpr, V_DOT: tl.constexpr, BLOCK_N: tl.constexpr, WAYS: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, V_IN_K: tl.constexpr, HAS_V: tl.constexpr,
    PARTIAL: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr, SCORE: tl.constexpr,
    PANEL: tl.constexpr, PRE_LOAD_V: tl.constexpr, cell=None,
):  # fmt: skip
    """One k-block. factor: of q.k, positive; without a softcap it holds log2(e) too. PARTIAL: bounds and mask count.
    token, head: of each row, along rows of scores; dropout: (seed_low, seed_high, offset, least, inverse) as
    dropout_arguments() has them; SCORE: score_code.py's function or None, p_score: its numbers. cell: of a key that is
    left out and not read (append.py), None for none."""
    i_key = key_index(BLOCK_N, WAYS)
    col = i_kb * BLOCK_N + i_key
    m_key = col < n_kv
    if cell is not None:
        m_key &= col != cell
    ALL: tl.constexpr = not PARTIAL and cell is None
    if PARTIAL and HAS_MASK:  # cells that the mask hides from all rows are not read: they may hold NaN
        bits = load_index(p_seen + i_kb * (BLOCK_N // 32) + i_key // 32, PTX)
        m_key &= ((bits >> (i_key % 32)) & 1) != 0
    row = first_row(i_kb, BLOCK_N).to(tl.int64)
    i_row = i_key.to(tl.int64) if WIDE else i_key
    s, k0, unit, factor = scores(
        p_k + row * sk_n, i_row * sk_n, m_key, q0, q1, factor, softcap, D_K, DK0, DK1, K_KIND, K_ALIGNED, K_DOT, WAYS,
        SOFTCAP, ALL, PTX, PRECISION, s_panel, PANEL,
    )  # fmt: skip
    if SCORE is not None:
        s = scored(s, factor, i_seq, head, token, keys_last(col, WAYS), p_score, SCORE, K_DOT == tl.float32)
        unit = LOG2E
        factor = 1.0
    if HAS_BIAS:
        added = tl.load(p_bias_rows + keys_last(col, WAYS), mask=m_rows & keys_last(col < n_kv, WAYS), other=0.0)
        s += unit * added.to(tl.float32)
    if PARTIAL:
        if HAS_MASK:
            m_mask = m_rows & keys_last(col < n_kv, WAYS)
            bias = tl.load(p_mask_rows + keys_last(col, WAYS), mask=m_mask, other=NEG_INF).to(tl.float32)
            s = tl.where(bias == NEG_INF, NEG_INF, s + (slope * unit) * bias)
        else:
            s = tl.where(keys_last(col < n_kv, WAYS), s, NEG_INF)
    if cell is not None:
        s = tl.where(keys_last(col == cell, WAYS), NEG_INF, s)
    kept = m_rows
    seed_low, seed_high, offset, least, inverse = dropout
    if DROPOUT:
        eight = keys_last(key_index(BLOCK_N // 8, WAYS), WAYS)
        kept = kept_weights(
            token, i_kb * BLOCK_N, eight, head, i_seq, offset, seed_low, seed_high, least, DROPOUT
        )  # fmt: skip
    return weigh(
        s, factor, k0, p_v + row * sv_n, i_row * sv_n, m_key, m, l, acc0, acc1, kept, inverse, D_V, DV0, DV1, V_KIND,
        V_ALIGNED, V_DOT, WAYS, V_IN_K, HAS_V, ALL, PARTIAL or HAS_BIAS or SCORE is not None, DROPOUT,
        PTX, PRECISION, PRE_LOAD_V,
    )  # fmt: skip


@triton.jit
def no_sums(BLOCK_M: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, WAYS: tl.constexpr):
    """m, l and acc of no key."""
    if WAYS == 0:
        m = tl.full([BLOCK_M, 1], NEG_INF, tl.float32)
        l = tl.zeros([BLOCK_M, 1], tl.float32)
        acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
        acc1 = tl.zeros([BLOCK_M, DV1], tl.float32) if DV1 > 0 else l
    else:
        m = tl.full([WAYS, BLOCK_M, 1], NEG_INF, tl.float32)
        l = tl.zeros([WAYS, BLOCK_M, 1], tl.float32)
        acc0 = tl.zeros([WAYS, BLOCK_M, DV0], tl.float32)
        acc1 = tl.zeros([WAYS, BLOCK_M, DV1], tl.float32) if DV1 > 0 else l
    return m, l, acc0, acc1


@triton.jit
def join_ways(m, l, acc0, acc1, DV1: tl.constexpr):
    """The sums of the warps of the decode form as one: [WAYS, BM, .] to [BM, .]."""
    top = tl.max(m, 0)
    safe = tl.where(top == NEG_INF, 0.0, top)
    weight = tl.exp2(m - safe[None, :, :])
    l = tl.sum(l * weight, 0)
    acc0 = tl.sum(acc0 * weight, 0)
    if DV1 > 0:
        acc1 = tl.sum(acc1 * weight, 0)
    return top, l, acc0, acc1


@triton.jit
def normalized(m, l, sink):
    """(log2 of the denominator, the factor on acc) with the sink's weight added; a row without keys gives -inf and 0.

    sink: in units of log2, -inf for none.
    """
    top = tl.maximum(m, sink)
    safe = tl.where(top == NEG_INF, 0.0, top)
    shrink = tl.exp2(m - safe)
    total = l * shrink + tl.exp2(sink - safe)
    empty = total == 0.0
    lse = tl.where(empty, NEG_INF, safe + tl.log2(tl.where(empty, 1.0, total)))
    return lse, tl.where(empty, 0.0, shrink / tl.where(empty, 1.0, total))


@triton.jit
def _store_columns(
    p_rows, acc, m_rows, D: tl.constexpr, FROM: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    i_d = slot_elements(FROM + tl.arange(0, SIZE), KIND, ALIGNED)
    tl.store(p_rows[:, None] + i_d[None, :], acc, mask=m_rows[:, None] & (i_d < D)[None, :])


@triton.jit
def store_tile(
    p_out, p_lse, p_part, p_sink, out_row, m_row, m, l, acc0, acc1, whole, slot, has_sinks, has_lse,
    D_V: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, V_KIND: tl.constexpr, V_ALIGNED: tl.constexpr,
    HAS_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The result of a tile's rows where m_row; not whole: their sums, into the slot. m: in units of log2; p_sink,
    out_row: of each row, the latter counts rows of the result."""
    if whole:
        sink = tl.full([BLOCK_M, 1], NEG_INF, tl.float32)
        if has_sinks:
            sink = tl.load(p_sink, mask=m_row, other=NEG_INF)[:, None] * LOG2E
        lse, weight = normalized(m, l, sink)
        if HAS_V:
            p_out_rows = p_out + out_row * D_V
            _store_columns(p_out_rows, acc0 * weight, m_row, D_V, 0, DV0, V_KIND, V_ALIGNED)
            if DV1 > 0:
                _store_columns(p_out_rows, acc1 * weight, m_row, D_V, DV0, DV1, V_KIND, V_ALIGNED)
        if has_lse:
            tl.store(p_lse + out_row[:, None], lse * LN2, mask=m_row[:, None])
    else:
        i_row = tl.arange(0, BLOCK_M)
        p_slot = p_part + slot.to(tl.int64) * (BLOCK_M * (DV0 + DV1 + 2))
        if HAS_V:
            p_acc = p_slot + i_row * (DV0 + DV1)
            _store_columns(p_acc, acc0, m_row, DV0 + DV1, 0, DV0, "f32", True)
            if DV1 > 0:
                _store_columns(p_acc, acc1, m_row, DV0 + DV1, DV0, DV1, "f32", True)
        p_sums = p_slot + BLOCK_M * (DV0 + DV1) + i_row[:, None]
        tl.store(p_sums, m, mask=m_row[:, None])
        tl.store(p_sums + BLOCK_M, l, mask=m_row[:, None])


#: Numbers that compiled code does not depend on: neither a longer context nor another batch compiles anything.
GENERAL = [
    "n_q", "n_head", "gqa", "n_groups", "n_qt", "n_blocks", "n_tiles", "m2", "m3", "mask_groups", "programs", "splits",
    "section", "has_sinks", "has_lse", "b2", "b3", "seed_low", "seed_high", "offset", "least", "inverse",
]  # fmt: skip


@accesses(
    reads="p_q p_k p_v p_mask p_bias p_sinks p_slopes p_score p_counts p_blocks p_seen p_unit_start p_bad new",
    writes="p_out p_lse p_part p_bad caches",
)
@triton.jit(do_not_specialize=GENERAL)
def flash_attn(
    p_q, p_k, p_v, p_mask, p_bias, p_sinks, p_slopes, p_score, p_out, p_lse, p_counts, p_blocks, p_seen, p_unit_start,
    p_part, p_bad, sq_t, sq_h, sq_s, sk_h, sk_s, sv_h, sv_s, sm_t, sm_h, sm_s, sb_t, sb_h, sb_s,
    n_q, n_kv, n_head, gqa, n_groups, n_qt, n_blocks, n_tiles, m2, m3, mask_groups,
    programs, splits, section, sign, factor, softcap, has_sinks, has_lse, b2, b3, seed_low, seed_high, offset, least,
    inverse, s_panel, new, caches,
    sk_n: tl.constexpr, sv_n: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr,
    DV0: tl.constexpr, DV1: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    K_ALIGNED: tl.constexpr, V_ALIGNED: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WAYS: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    V_IN_K: tl.constexpr, HAS_V: tl.constexpr, SCORE: tl.constexpr, PANEL: tl.constexpr, PRE_LOAD_V: tl.constexpr,
    PACK: tl.constexpr, PER_HEAD: tl.constexpr, RANGES: tl.constexpr, UNIFORM: tl.constexpr, BIG: tl.constexpr,
    REPAIR: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See the module. Strides count elements (quantized K and V: words, or halves unless aligned); those between keys
    are a model's own and known when compiled, which saves the registers of all but one address a tile.

    q: f32; mask: f16; bias: f16, bf16 or f32; score: f32, numbers of SCORE; out: f32 [n_seq, n_q, n_head, D_V];
    lse: f32 [n_seq, n_q, n_head].
    PANEL, s_panel: see load_kv. new, caches: append.py's, of one query a sequence whose key and value this launch
    writes, into panels as append.py has it, into rows as append_blocks.py does; else None. counts, blocks, seen: what
    mask.py found; unit_start: prefix sums of the tiles' units. part: scratch of stream_k.py's slots, each acc [BLOCK_M,
    DV0 + DV1], m [BLOCK_M], l [BLOCK_M]. RANGES: split or stream-K; else whole tiles, every programs-th in the order of
    longest_first. REPAIR: only those whose `bad` [n_tiles + 1] is
    set; its last number counts them, run after run.
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_wait()
    if RANGES:
        tile, unit, stop = program_range(
            pid, programs, splits, n_tiles, n_blocks, p_counts, p_unit_start, HAS_MASK, UNIFORM, BIG
        )
    else:
        tile = 0
        unit = pid
        stop = n_tiles
        if REPAIR:
            unit = next_bad(pid, programs, n_tiles, n_qt, section, p_bad)
    while unit < stop:
        if not RANGES:
            tile = longest_first(unit, n_qt, section)
        if REPAIR:
            tl.atomic_add(p_bad + n_tiles, 1)
        i_qt = tile % n_qt
        i_group = (tile // n_qt) % n_groups
        i_seq = tile // (n_qt * n_groups)
        head0 = i_group * PACK
        i_kv_head = head0 // gqa
        row = i_qt * BLOCK_M + tl.arange(0, BLOCK_M)
        token = row // PACK
        head = head0 + row % PACK
        m_row = token < n_q
        i_mask = mask_tile(i_seq, i_group, i_qt, n_qt, mask_groups, m3)
        if HAS_MASK:
            n_full = tl.load(p_counts + 2 * i_mask)
            n_all = n_full + tl.load(p_counts + 2 * i_mask + 1)
        else:
            n_full = n_kv // BLOCK_N
            n_all = n_blocks
        if RANGES:
            start, n_units = tile_units(tile, p_counts, n_blocks, p_unit_start, HAS_MASK, UNIFORM, BIG)
            low, high, finishes, whole = part_of_tile(start, n_units, unit, stop)
            unit = start + high
            high = tl.minimum(high, n_all)
        else:
            low = 0
            high = n_all
            whole = True
            finishes = True
            unit += programs
            if REPAIR:
                unit = next_bad(unit, programs, n_tiles, n_qt, section, p_bad)

        p_row = i_seq.to(tl.int64) * sq_s + token.to(tl.int64) * sq_t + head.to(tl.int64) * sq_h
        q0 = load_q(p_q, p_row, m_row, sign, D_K, 0, DK0, K_KIND, K_ALIGNED, K_DOT, WAYS)
        q1 = q0
        if DK1 > 0:
            q1 = load_q(p_q, p_row, m_row, sign, D_K, DK0, DK1, K_KIND, K_ALIGNED, K_DOT, WAYS)
        p_kh = p_k + i_seq.to(tl.int64) * sk_s + i_kv_head.to(tl.int64) * sk_h
        p_vh = p_v + i_seq.to(tl.int64) * sv_s + i_kv_head.to(tl.int64) * sv_h
        RANK: tl.constexpr = 2 if WAYS == 0 else 3
        mask_row = (i_seq % m3).to(tl.int64) * sm_s + token.to(tl.int64) * sm_t
        if PER_HEAD:
            mask_row += (head % m2).to(tl.int64) * sm_h
        p_mask_rows = p_mask + per_row(mask_row, RANK)
        bias_row = (i_seq % b3).to(tl.int64) * sb_s + token.to(tl.int64) * sb_t + (head % b2).to(tl.int64) * sb_h
        p_bias_rows = p_bias + per_row(bias_row, RANK)
        slope = per_row(tl.load(p_slopes + head, mask=m_row, other=0.0), RANK)
        m_rows = per_row(m_row, RANK)
        p_list = p_blocks + i_mask.to(tl.int64) * n_blocks
        p_bits = p_seen + i_mask.to(tl.int64) * n_blocks * (BLOCK_N // 32)
        m, l, acc0, acc1 = no_sums(BLOCK_M, DV0, DV1, WAYS)
        cell = new_cell(new, i_seq) if new is not None else None
        if new is not None and PANEL == 0:
            if is_writer(cell, n_kv, p_list, low, high, n_all, BLOCK_N, HAS_MASK):
                write_cell(
                    new, caches, i_seq, i_kv_head, cell, sk_s, sk_h, sk_n, sv_s, sv_h, sv_n, D_K, D_V, K_KIND, V_KIND,
                    K_ALIGNED, V_ALIGNED,
                )  # fmt: skip
            cell = None

        for PARTIAL in tl.static_range(2):  # the list has full k-blocks first
            first = tl.maximum(low, n_full) if PARTIAL else low
            end = high if PARTIAL else tl.minimum(high, n_full)
            for i in tl.range(first, end, num_stages=STAGES):
                i_kb = visited_block(p_list, i, n_blocks, HAS_MASK, PTX)
                m, l, acc0, acc1 = attend(
                    p_kh, p_vh, sk_n, sv_n, p_mask_rows, p_bias_rows, m_rows, slope, p_bits, i_kb, n_kv, q0, q1, m, l,
                    acc0, acc1, factor, softcap, per_row(token, RANK), per_row(head, RANK), i_seq,
                    (seed_low, seed_high, offset, least, inverse), p_score, s_panel,
                    D_K, D_V, DK0, DK1, DV0, DV1, K_KIND,
                    V_KIND, K_ALIGNED, V_ALIGNED, K_DOT, V_DOT, BLOCK_N, WAYS, SOFTCAP, HAS_MASK, HAS_BIAS, DROPOUT,
                    V_IN_K, HAS_V, PARTIAL == 1, WIDE, PTX, PRECISION, SCORE, PANEL, PRE_LOAD_V, cell,
                )  # fmt: skip

        if not SOFTCAP and SCORE is None:
            m = m * factor
        if WAYS > 0:
            m, l, acc0, acc1 = join_ways(m, l, acc0, acc1, DV1)
        if new is not None and PANEL > 0:
            if low == 0:
                p_k_row, p_v_row = new_rows(new, i_seq, i_kv_head)
                row_q0 = load_q(p_q, p_row, m_row, sign, D_K, 0, DK0, K_KIND, K_ALIGNED, K_DOT, 0)
                row_q1 = row_q0
                if DK1 > 0:
                    row_q1 = load_q(p_q, p_row, m_row, sign, D_K, DK0, DK1, K_KIND, K_ALIGNED, K_DOT, 0)
                m, l, acc0, acc1 = with_new_key(
                    m, l, acc0, acc1, row_q0, row_q1, p_k_row, p_v_row, cell, n_kv, p_mask + mask_row, m_row,
                    p_slopes + head, factor, softcap, D_K, D_V, DK0, DK1, DV0, DV1, K_KIND, V_KIND, SOFTCAP, HAS_MASK,
                    K_DOT == tl.float32,
                )  # fmt: skip
                if (cell >= 0) & (head0 % gqa == 0):
                    p_k_cell = cell_of_head(caches.k, i_seq, i_kv_head, cell, sk_s, sk_h, sk_n)
                    p_v_cell = cell_of_head(caches.v, i_seq, i_kv_head, cell, sv_s, sv_h, sv_n)
                    write_new_rows(
                        p_k_row, p_v_row, p_k_cell, p_v_cell, s_panel, D_K, D_V, DK0, DK1, DV0, DV1, K_KIND, V_KIND,
                        PANEL,
                    )  # fmt: skip
        if PDL:
            gdc_launch_dependents()
        out_row = ((i_seq * n_q).to(tl.int64) + token) * n_head + head
        slot = slot_of_part(pid, splits, finishes)
        store_tile(
            p_out, p_lse, p_part, p_sinks + head, out_row, m_row, m, l, acc0, acc1, whole, slot, has_sinks, has_lse,
            D_V, DV0, DV1, V_KIND, V_ALIGNED, HAS_V, BLOCK_M,
        )  # fmt: skip
        tile += 1
