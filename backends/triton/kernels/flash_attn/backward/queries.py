# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""Gradients of attention by programs that own queries: that of q, and in form fused-q those of k and v with it.

A program adds up the gradient of BLOCK_M queries over all keys that they see, in one order. What it has for k and v it
adds to memory by atomics, where it meets other programs in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.flash_attn.backward.pieces import (
    Numbers,
    d_logits,
    d_weights,
    dot_chunks,
    dot_two,
    kept_of,
    load_lse,
    load_two,
    weights,
    zeros,
)
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import tile_record
from graphrt.backends.triton.kernels.flash_attn.visits import (
    load_index,
    mask_tile,
    spanned_block,
    visited_block,
    visited_span,
)

#: Numbers that compiled code does not depend on.
GENERAL = [
    "n_q", "n_kv", "n_head", "gqa", "n_qt", "n_blocks", "m2", "m3", "mask_groups", "b2", "b3", "window", "scale",
    "softcap", "seed_low", "seed_high", "offset", "least", "inverse",
]  # fmt: skip


@triton.jit
def _add_rows(p_rows, x, i, m_row, D: tl.constexpr, FROM: tl.constexpr, SIZE: tl.constexpr):
    i_d = FROM + tl.arange(0, SIZE)
    at = i.to(tl.int64)[:, None] * D + i_d[None, :]
    tl.atomic_add(p_rows + at, x, mask=m_row[:, None] & (i_d < D)[None, :], sem="relaxed")


@triton.jit
def _add_two(p_rows, a, b0, b1, factor, i, m_row, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
             spec: tl.constexpr):  # fmt: skip
    """Adds a transposed times b, times factor, to rows i in memory."""
    turned = tl.trans(a.to(spec.dot))
    _add_rows(p_rows, tl.dot(turned, b0, input_precision=spec.precision) * factor, i, m_row, D, 0, D0)
    if D1 > 0:
        _add_rows(p_rows, tl.dot(turned, b1, input_precision=spec.precision) * factor, i, m_row, D, D0, D1)


@accesses(reads="x p_dk p_dv", writes="p_dq p_dk p_dv")
@triton.jit(do_not_specialize=GENERAL)
def attention_back_queries(
    x, st, p_dq, p_dk, p_dv, n_q, n_kv, n_head, gqa, n_qt, n_blocks, m2, m3, mask_groups, b2, b3, window, scale,
    softcap, seed_low, seed_high, offset, least, inverse, spec: tl.constexpr,
):  # fmt: skip
    """dq [D_k, n_q, n_head, n_seq] = scale * dS k. Program (i, h, s): BLOCK_M queries of a head of a sequence; of
    packed ones the i-th tile of the list.

    With "k" and spec.makes_v: adds to dk [D_k, n_kv, n_head_kv, n_seq] and dv, which hold zeros. x, st: Given and
    Steps of pieces.py.
    """
    take_turn(spec.pdl)
    i_h, i_s = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_qt = tl.program_id(0)
    q_first, k_first, behind = i_qt * 0, i_qt * 0, i_qt * 0
    row0, q_end, k_end = i_qt * spec.block_m, n_q, n_kv
    first_key, end_key = i_qt * 0, n_kv
    first, full_first, full_end, n_all = i_qt * 0, i_qt * 0, n_kv // spec.block_n, n_blocks
    i_mask = i_qt * 0
    if spec.packed:
        _, q_first, q_end, row0, k_end, k_first, behind, _ = tile_record(x.tiles, i_qt)
        first, full_first, full_end, end, first_key, end_key = visited_span(
            row0, q_end, k_end, behind, 0, window, 1, spec.block_m, spec.block_n, spec.causal, spec.window, spec.alibi
        )
        n_all = end - first
    elif spec.has_mask:
        i_qt = n_qt - 1 - i_qt  # the last queries first, whose rows a causal mask leaves longest
        row0 = i_qt * spec.block_m
        i_mask = mask_tile(tl.program_id(2), i_h, i_qt, n_qt, mask_groups, m3)
        full_end = tl.load(x.counts + 2 * i_mask)
        n_all = full_end + tl.load(x.counts + 2 * i_mask + 1)
    n_full = full_end - full_first

    i_m = tl.arange(0, spec.block_m)
    i_n = tl.arange(0, spec.block_n)
    i_q = row0 + i_m
    m_q = i_q < q_end
    start = q_first + row0
    i_g = i_h // gqa
    p_q = x.q + i_h.to(tl.int64) * st.q_h + i_s * st.q_s
    p_d = x.d_out + i_h.to(tl.int64) * st.d_h + i_s * st.d_s
    p_k = x.k + i_g.to(tl.int64) * st.k_h + i_s * st.k_s
    p_v = x.v + i_g.to(tl.int64) * st.v_h + i_s * st.v_s
    lse = load_lse(x.lse + i_h.to(tl.int64) * st.l_h + i_s * st.l_s, st.l_t, start + i_m, m_q, spec)
    row = (i_s * n_head + i_h) * n_q + start
    of_d_out, of_score = tl.load(x.scales), tl.load(x.scales + 1)
    delta = tl.load(x.delta + row + i_m, mask=m_q, other=0.0) * (of_score * spec.unit)
    p_mask = x.mask + (i_h % m2).to(tl.int64) * st.m_h + (i_s % m3) * st.m_s
    p_bias = x.bias + (i_h % b2).to(tl.int64) * st.b_h + (i_s % b3) * st.b_s
    n = Numbers(
        scale, softcap, tl.load(x.slopes + i_h), i_h, tl.program_id(2), behind, window, q_end, k_end,
        inverse * of_score * spec.unit / of_d_out, seed_low, seed_high, offset, least, x.score,
    )  # fmt: skip
    p_list = x.blocks + i_mask.to(tl.int64) * n_blocks
    p_bits = x.seen + i_mask.to(tl.int64) * n_blocks * (spec.block_n // 32)
    n_kv_head = n_head // gqa
    dk_rows = p_dk + ((i_s * n_kv_head + i_g) * n_kv + k_first) * spec.d_k
    dv_rows = p_dv + ((i_s * n_kv_head + i_g) * n_kv + k_first) * spec.d_v

    acc0 = zeros(spec.block_m, spec.dk0)
    acc1 = zeros(spec.block_m, spec.dk1) if spec.dk1 > 0 else delta
    if spec.keep and not spec.accurate:
        own_q0, own_q1 = load_two(p_q, start, i_m, st.q_t, m_q, spec.d_k, spec.dk0, spec.dk1, spec)
        own_d0, own_d1 = load_two(p_d, start, i_m, st.d_t, m_q, spec.d_v, spec.dv0, spec.dv1, spec)
    for PARTIAL in tl.static_range(2):  # full k-blocks first
        begin = n_full if PARTIAL else 0
        until = n_all if PARTIAL else n_full
        for i in tl.range(begin, until, num_stages=spec.stages):
            if spec.packed:
                i_kb = spanned_block(i, first, full_first, full_end, PARTIAL == 1)
            else:
                i_kb = visited_block(p_list, i, n_blocks, spec.has_mask, spec.ptx)
            i_k = i_kb * spec.block_n + i_n
            m_k = (i_k >= first_key) & (i_k < end_key)
            if PARTIAL and spec.has_mask:  # cells that the mask hides from all rows are not read: they may hold NaN
                bits = load_index(p_bits + i_kb * (spec.block_n // 32) + i_n // 32, spec.ptx)
                m_k &= ((bits >> (i_n % 32)) & 1) != 0
            at = k_first + i_kb * spec.block_n
            # tl.minimum(i, 0) is 0, but the compiler must not take the loads out of the loop.
            again = start + tl.minimum(i, 0)
            if spec.accurate:
                s = dot_chunks(p_q, again, i_m, st.q_t, m_q, p_k, at, i_n, st.k_n, m_k, spec.d_k, spec)
            else:
                if spec.keep:
                    q0, q1, d0, d1 = own_q0, own_q1, own_d0, own_d1
                else:
                    q0, q1 = load_two(p_q, again, i_m, st.q_t, m_q, spec.d_k, spec.dk0, spec.dk1, spec)
                    d0, d1 = load_two(p_d, again, i_m, st.d_t, m_q, spec.d_v, spec.dv0, spec.dv1, spec)
                k0, k1 = load_two(p_k, at, i_n, st.k_n, m_k, spec.d_k, spec.dk0, spec.dk1, spec, PARTIAL == 0)
                s = dot_two(q0, q1, k0, k1, spec.dk1, spec)
            w, bend = weights(s, lse, i_q, i_k, p_mask, st.m_t, p_bias, st.b_t, n, spec, PARTIAL == 1, False)
            kept = kept_of(i_q, i_kb * spec.block_n, n, spec, False)
            if spec.makes_v:
                used = tl.where(kept, w, 0.0) if spec.dropout else w
                if spec.accurate:
                    d0, d1 = load_two(p_d, again, i_m, st.d_t, m_q, spec.d_v, spec.dv0, spec.dv1, spec)
                _add_two(
                    dv_rows, used, d0, d1, inverse * spec.unit / of_d_out, i_k, m_k, spec.d_v, spec.dv0, spec.dv1, spec
                )
            if spec.makes_q or spec.makes_k:
                if spec.accurate:
                    d_w = dot_chunks(p_d, again, i_m, st.d_t, m_q, p_v, at, i_n, st.v_n, m_k, spec.d_v, spec)
                else:
                    v0, v1 = load_two(p_v, at, i_n, st.v_n, m_k, spec.d_v, spec.dv0, spec.dv1, spec, PARTIAL == 0)
                    d_w = dot_two(d0, d1, v0, v1, spec.dv1, spec)
                d_s = d_logits(w, d_weights(d_w, kept, n, spec), delta, PARTIAL == 1, False) * bend
                if spec.makes_k:
                    if spec.accurate:
                        q0, q1 = load_two(p_q, again, i_m, st.q_t, m_q, spec.d_k, spec.dk0, spec.dk1, spec)
                    _add_two(dk_rows, d_s, q0, q1, scale / of_score, i_k, m_k, spec.d_k, spec.dk0, spec.dk1, spec)
                if spec.makes_q:
                    if spec.accurate:
                        k0, k1 = load_two(p_k, at, i_n, st.k_n, m_k, spec.d_k, spec.dk0, spec.dk1, spec)
                    d_s = d_s.to(spec.dot)
                    acc0 = tl.dot(d_s, k0, acc0, input_precision=spec.precision)
                    if spec.dk1 > 0:
                        acc1 = tl.dot(d_s, k1, acc1, input_precision=spec.precision)
    if spec.makes_q:
        p_rows = p_dq + (row + i_m)[:, None] * spec.d_k
        i_d = tl.arange(0, spec.dk0)[None, :]
        tl.store(p_rows + i_d, acc0 * (scale / of_score), mask=m_q[:, None] & (i_d < spec.d_k))
        if spec.dk1 > 0:
            i_d = spec.dk0 + tl.arange(0, spec.dk1)[None, :]
            tl.store(p_rows + i_d, acc1 * (scale / of_score), mask=m_q[:, None] & (i_d < spec.d_k))
