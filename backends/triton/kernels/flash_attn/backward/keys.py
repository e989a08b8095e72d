# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""Gradients of attention by programs that own keys: those of k and v, and in form fused-k that of q with them.

A program adds up the gradients of BLOCK_N keys over the query heads that share them and over all queries that see them,
in one order. What it has for q it adds to memory when its turn comes: tiles of queries count who was there, and the
programs of a tile come in the order of their keys. Nobody waits for a program that starts later, so all end.
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
from graphrt.backends.triton.kernels.flash_attn.backward.queries import GENERAL
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import tile_record
from graphrt.backends.triton.kernels.flash_attn.visits import mask_tile, spanned_block, visited_block, visited_span


@triton.jit
def _seeing_span(key0, n_keys, n_queries, behind, window, spec: tl.constexpr):
    """(first tile of queries, first full one, end of the full ones, end) of those that see keys from key0 on: what
    visited_span() of visits.py says of a tile of queries, the other way round. A full one sees all of the keys, with
    nothing to add."""
    M: tl.constexpr = spec.block_m
    N: tl.constexpr = spec.block_n
    n_qt = (n_queries + M - 1) // M
    first, end = key0 * 0, n_qt
    full_first, full_end = first, end
    # Floors, also of what is below 0: tiles are counted from one that is far enough below.
    FAR: tl.constexpr = 1 << 20
    low = behind - FAR * M
    if spec.causal:
        first = tl.minimum(tl.maximum((key0 - low) // M - FAR, 0), n_qt)
        full_first = (key0 + N - 1 - low + M - 1) // M - FAR
    if spec.window:
        end = tl.minimum(tl.maximum((key0 + N + tl.minimum(window, 1 << 29) - 2 - low) // M - FAR + 1, first), n_qt)
        full_end = (key0 + tl.minimum(window, 1 << 29) - low) // M - FAR
    if spec.alibi:
        full_end = first
    full_end = tl.where(key0 + N > n_keys, first, full_end)
    full_first = tl.minimum(tl.maximum(full_first, first), end)
    full_end = tl.minimum(tl.maximum(full_end, full_first), end)
    return first, full_first, full_end, end


@triton.jit
def _clean(x):
    """Zeros for what is not finite: a cell that nobody sees. Where it is seen, dS is NaN by now."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _add_in_turn(p_turn, turn, p_rows, made0, made1, m_q, spec: tl.constexpr):
    """Adds to rows in memory as the turn-th to come. p_rows: [BLOCK_M]."""
    while tl.atomic_add(p_turn, 0, sem="acquire") != turn:
        pass
    i_d = tl.arange(0, spec.dk0)[None, :]
    m = m_q[:, None] & (i_d < spec.d_k)
    before = tl.load(p_rows[:, None] + i_d, mask=m, other=0.0, cache_modifier=".cg")
    tl.store(p_rows[:, None] + i_d, before + made0, mask=m)
    if spec.dk1 > 0:
        i_d = spec.dk0 + tl.arange(0, spec.dk1)[None, :]
        m = m_q[:, None] & (i_d < spec.d_k)
        before = tl.load(p_rows[:, None] + i_d, mask=m, other=0.0, cache_modifier=".cg")
        tl.store(p_rows[:, None] + i_d, before + made1, mask=m)
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(p_turn, 1, sem="release")


@triton.jit
def _store_rows(p_rows, x, m_row, D: tl.constexpr, FROM: tl.constexpr, SIZE: tl.constexpr):
    i_d = FROM + tl.arange(0, SIZE)[None, :]
    tl.store(p_rows[:, None] + i_d, x, mask=m_row[:, None] & (i_d < D))


@accesses(reads="x p_dq p_turns", writes="p_dq p_dk p_dv p_turns")
@triton.jit(do_not_specialize=GENERAL)
def attention_back_keys(
    x, st, p_dq, p_dk, p_dv, p_turns, n_q, n_kv, n_head, gqa, n_qt, n_blocks, m2, m3, mask_groups, b2, b3, window,
    scale, softcap, seed_low, seed_high, offset, least, inverse, spec: tl.constexpr,
):  # fmt: skip
    """dk [D_k, n_kv, n_head_kv, n_seq] = scale * dS^T q and dv = (P M)^T d_out. Program (j, g, s): BLOCK_N keys of a KV
    head of a sequence; of packed ones the j-th tile of the list, which is of keys.

    If spec.makes_q: adds to dq [D_k, n_q, n_head, n_seq], which holds zeros as turns int32 [tiles of queries,
    heads, sequences] do. x, st: Given and Steps of pieces.py.
    """
    take_turn(spec.pdl)
    i_g, i_s = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_kb = tl.program_id(0)
    q_first, k_first, behind, i_tile0 = i_kb * 0, i_kb * 0, i_kb * 0, i_kb * 0
    key0, q_end, k_end, tiles = i_kb * spec.block_n, n_q, n_kv, n_qt
    first, full_first, full_end, n_all = i_kb * 0, i_kb * 0, n_qt, n_qt
    if spec.packed:
        i_of, k_first, k_end, key0, q_end, q_first, behind, _ = tile_record(x.tiles, i_kb)
        behind = -behind
        i_tile0 = q_first // spec.block_m + i_of
        i_kb = key0 // spec.block_n
        tiles = n_q // spec.block_m + n_qt  # n_qt: sequences and one
        first, full_first, full_end, end = _seeing_span(key0, k_end, q_end, behind, window, spec)
        n_all = end - first
    elif spec.makes_q and key0 + spec.block_n > n_kv:
        full_end = full_first  # keys that are not there must give nothing to q
    i_m = tl.arange(0, spec.block_m)
    i_n = tl.arange(0, spec.block_n)
    i_k = key0 + i_n
    m_k = i_k < k_end
    start = k_first + key0
    p_k = x.k + i_g.to(tl.int64) * st.k_h + i_s * st.k_s
    p_v = x.v + i_g.to(tl.int64) * st.v_h + i_s * st.v_s
    of_d_out, of_score = tl.load(x.scales), tl.load(x.scales + 1)
    of_d_w = inverse * of_score * spec.unit / of_d_out

    dk0 = zeros(spec.block_n, spec.dk0) if spec.makes_k else i_n
    dk1 = zeros(spec.block_n, spec.dk1) if spec.makes_k and spec.dk1 > 0 else i_n
    dv0 = zeros(spec.block_n, spec.dv0) if spec.makes_v else i_n
    dv1 = zeros(spec.block_n, spec.dv1) if spec.makes_v and spec.dv1 > 0 else i_n
    if spec.keep and not spec.accurate:
        own_k0, own_k1 = load_two(p_k, start, i_n, st.k_n, m_k, spec.d_k, spec.dk0, spec.dk1, spec)
        own_v0, own_v1 = load_two(p_v, start, i_n, st.v_n, m_k, spec.d_v, spec.dv0, spec.dv1, spec)
    for head in range(0, gqa):
        i_h = i_g * gqa + head
        i_list = i_kb * 0
        if spec.has_mask:
            i_list = mask_tile(tl.program_id(2), i_h, i_kb, n_blocks, mask_groups, m3)
            full_end = tl.load(x.column_counts + 2 * i_list)
            n_all = full_end + tl.load(x.column_counts + 2 * i_list + 1)
        n_full = full_end - full_first
        p_list = x.columns + i_list.to(tl.int64) * n_qt
        p_q = x.q + i_h.to(tl.int64) * st.q_h + i_s * st.q_s
        p_d = x.d_out + i_h.to(tl.int64) * st.d_h + i_s * st.d_s
        p_lse = x.lse + i_h.to(tl.int64) * st.l_h + i_s * st.l_s
        p_mask = x.mask + (i_h % m2).to(tl.int64) * st.m_h + (i_s % m3) * st.m_s
        p_bias = x.bias + (i_h % b2).to(tl.int64) * st.b_h + (i_s % b3) * st.b_s
        n = Numbers(
            scale, softcap, tl.load(x.slopes + i_h), i_h, tl.program_id(2), behind, window, q_end, k_end, of_d_w,
            seed_low, seed_high, offset, least, x.score,
        )  # fmt: skip
        for PARTIAL in tl.static_range(2):  # full tiles of queries first
            begin = n_full if PARTIAL else 0
            until = n_all if PARTIAL else n_full
            for i in tl.range(begin, until, num_stages=spec.stages):
                if spec.packed:
                    i_qt = spanned_block(i, first, full_first, full_end, PARTIAL == 1)
                else:
                    i_qt = visited_block(p_list, i, n_qt, spec.has_mask, spec.ptx)
                i_q = i_qt * spec.block_m + i_m
                m_q = i_q < q_end
                at = q_first + i_qt * spec.block_m
                # tl.minimum(i, 0) is 0, but the compiler must not take the loads out of the loop.
                again = start + tl.minimum(i, 0)
                lse = load_lse(p_lse, st.l_t, at + i_m, m_q, spec)
                if spec.accurate:
                    s = dot_chunks(p_k, again, i_n, st.k_n, m_k, p_q, at, i_m, st.q_t, m_q, spec.d_k, spec)
                else:
                    if spec.keep:
                        k0, k1, v0, v1 = own_k0, own_k1, own_v0, own_v1
                    else:
                        k0, k1 = load_two(p_k, again, i_n, st.k_n, m_k, spec.d_k, spec.dk0, spec.dk1, spec)
                        v0, v1 = load_two(p_v, again, i_n, st.v_n, m_k, spec.d_v, spec.dv0, spec.dv1, spec)
                    q0, q1 = load_two(p_q, at, i_m, st.q_t, m_q, spec.d_k, spec.dk0, spec.dk1, spec)
                    s = dot_two(k0, k1, q0, q1, spec.dk1, spec)
                w, bend = weights(s, lse, i_q, i_k, p_mask, st.m_t, p_bias, st.b_t, n, spec, PARTIAL == 1, True)
                kept = kept_of(i_q, key0, n, spec, True)
                if spec.makes_v or not spec.accurate:
                    d0, d1 = load_two(p_d, at, i_m, st.d_t, m_q, spec.d_v, spec.dv0, spec.dv1, spec)
                if spec.makes_v:
                    used = (tl.where(kept, w, 0.0) if spec.dropout else w).to(spec.dot)
                    dv0 = tl.dot(used, d0, dv0, input_precision=spec.precision)
                    if spec.dv1 > 0:
                        dv1 = tl.dot(used, d1, dv1, input_precision=spec.precision)
                if spec.makes_q or spec.makes_k:
                    row = (i_s * n_head + i_h) * n_q + at
                    delta = tl.load(x.delta + row + i_m, mask=m_q, other=0.0) * (of_score * spec.unit)
                    if spec.accurate:
                        d_w = dot_chunks(p_v, again, i_n, st.v_n, m_k, p_d, at, i_m, st.d_t, m_q, spec.d_v, spec)
                        if spec.makes_k:
                            q0, q1 = load_two(p_q, at, i_m, st.q_t, m_q, spec.d_k, spec.dk0, spec.dk1, spec)
                        if spec.makes_q:
                            k0, k1 = load_two(p_k, again, i_n, st.k_n, m_k, spec.d_k, spec.dk0, spec.dk1, spec)
                    else:
                        d_w = dot_two(v0, v1, d0, d1, spec.dv1, spec)
                    d_w = d_weights(d_w, kept, n, spec)
                    d_s = (d_logits(w, d_w, delta, PARTIAL == 1, True) * bend).to(spec.dot)
                    if spec.makes_k:
                        dk0 = tl.dot(d_s, q0, dk0, input_precision=spec.precision)
                        if spec.dk1 > 0:
                            dk1 = tl.dot(d_s, q1, dk1, input_precision=spec.precision)
                    if spec.makes_q:
                        turned = tl.trans(d_s)
                        of_k0 = _clean(k0) if PARTIAL else k0
                        made0 = tl.dot(turned, of_k0, input_precision=spec.precision) * (scale / of_score)
                        made1 = made0
                        if spec.dk1 > 0:
                            of_k1 = _clean(k1) if PARTIAL else k1
                            made1 = tl.dot(turned, of_k1, input_precision=spec.precision) * (scale / of_score)
                        turn = i_kb
                        if spec.has_mask:
                            i_mask = mask_tile(tl.program_id(2), i_h, i_qt, n_qt, mask_groups, m3)
                            turn = tl.load(x.ranks + i_mask.to(tl.int64) * n_blocks + i_kb)
                        if spec.packed:
                            before, _, _, _, _, _ = visited_span(
                                i_qt * spec.block_m, q_end, k_end, behind, 0, window, 1, spec.block_m, spec.block_n,
                                spec.causal, spec.window, spec.alibi,
                            )  # fmt: skip
                            turn = i_kb - before
                        p_turn = p_turns + (i_s * n_head + i_h) * tiles + i_tile0 + i_qt
                        _add_in_turn(p_turn, turn, p_dq + (row + i_m) * spec.d_k, made0, made1, m_q, spec)
    out = ((i_s * (n_head // gqa) + i_g) * n_kv + start) + i_n
    if spec.makes_k:
        _store_rows(p_dk + out * spec.d_k, dk0 * (scale / of_score), m_k, spec.d_k, 0, spec.dk0)
        if spec.dk1 > 0:
            _store_rows(p_dk + out * spec.d_k, dk1 * (scale / of_score), m_k, spec.d_k, spec.dk0, spec.dk1)
    if spec.makes_v:
        of_w = inverse * spec.unit / of_d_out
        _store_rows(p_dv + out * spec.d_v, dv0 * of_w, m_k, spec.d_v, 0, spec.dv0)
        if spec.dv1 > 0:
            _store_rows(p_dv + out * spec.d_v, dv1 * of_w, m_k, spec.d_v, spec.dv0, spec.dv1)
