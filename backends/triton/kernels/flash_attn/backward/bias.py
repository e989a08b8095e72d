# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""The gradient of attention's bias: dT, summed over the heads and sequences that share an element, in one order."""

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
from graphrt.backends.triton.kernels.flash_attn.visits import mask_tile


@accesses(reads="x p_class", writes="p_result")
@triton.jit(do_not_specialize=[*GENERAL, "n_seq"])
def attention_back_bias(
    x, st, p_class, p_result, n_q, n_kv, n_head, n_seq, gqa, n_qt, n_blocks, m2, m3, mask_groups, b2, b3, window, scale,
    softcap, seed_low, seed_high, offset, least, inverse, spec: tl.constexpr,
):  # fmt: skip
    """result [n_kv, n_q, b2, b3]. Program (j, i, c): a tile of BLOCK_M queries and BLOCK_N keys of bias c = i3 b2 + i2.

    class: int32 [tiles whose masks differ, n_blocks], mask.py's: 0 where nobody sees anything of a tile. x, st: Given
    and Steps of pieces.py.
    """
    take_turn(spec.pdl)
    i_kb, i_qt, i_bias = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_m, i_n = tl.arange(0, spec.block_m), tl.arange(0, spec.block_n)
    row0, key0 = i_qt * spec.block_m, i_kb * spec.block_n
    i_q, i_k = row0 + i_m, key0 + i_n
    m_q, m_k = i_q < n_q, i_k < n_kv
    of_d_out, of_score = tl.load(x.scales), tl.load(x.scales + 1)
    acc = zeros(spec.block_m, spec.block_n)
    p_bias = x.bias + (i_bias % b2).to(tl.int64) * st.b_h + (i_bias // b2).to(tl.int64) * st.b_s
    per_seq = n_head // b2
    for i in tl.range(0, per_seq * (n_seq // b3), num_stages=1):  # more in flight would not fit at D128
        i_h = i_bias % b2 + (i % per_seq) * b2
        i_seq = i_bias // b2 + (i // per_seq) * b3
        i_s = i_seq.to(tl.int64)
        kind = 1
        if spec.has_mask:
            i_mask = mask_tile(i_seq, i_h, i_qt, n_qt, mask_groups, m3)
            kind = tl.load(p_class + i_mask.to(tl.int64) * n_blocks + i_kb)
        if kind != 0:
            i_g = i_h // gqa
            p_q = x.q + i_h.to(tl.int64) * st.q_h + i_s * st.q_s
            p_d = x.d_out + i_h.to(tl.int64) * st.d_h + i_s * st.d_s
            p_k = x.k + i_g.to(tl.int64) * st.k_h + i_s * st.k_s
            p_v = x.v + i_g.to(tl.int64) * st.v_h + i_s * st.v_s
            p_mask = x.mask + (i_h % m2).to(tl.int64) * st.m_h + (i_seq % m3).to(tl.int64) * st.m_s
            n = Numbers(
                scale, softcap, tl.load(x.slopes + i_h), i_h, i_seq, 0, window, n_q, n_kv,
                inverse * of_score * spec.unit / of_d_out, seed_low, seed_high, offset, least, x.score,
            )  # fmt: skip
            lse = load_lse(x.lse + i_h.to(tl.int64) * st.l_h + i_s * st.l_s, st.l_t, i_q, m_q, spec)
            row = (i_s * n_head + i_h) * n_q + i_q
            delta = tl.load(x.delta + row, mask=m_q, other=0.0) * (of_score * spec.unit)
            if spec.accurate:
                s = dot_chunks(p_q, row0, i_m, st.q_t, m_q, p_k, key0, i_n, st.k_n, m_k, spec.d_k, spec)
                d_w = dot_chunks(p_d, row0, i_m, st.d_t, m_q, p_v, key0, i_n, st.v_n, m_k, spec.d_v, spec)
            else:
                q0, q1 = load_two(p_q, row0, i_m, st.q_t, m_q, spec.d_k, spec.dk0, spec.dk1, spec)
                k0, k1 = load_two(p_k, key0, i_n, st.k_n, m_k, spec.d_k, spec.dk0, spec.dk1, spec)
                s = dot_two(q0, q1, k0, k1, spec.dk1, spec)
                d0, d1 = load_two(p_d, row0, i_m, st.d_t, m_q, spec.d_v, spec.dv0, spec.dv1, spec)
                v0, v1 = load_two(p_v, key0, i_n, st.v_n, m_k, spec.d_v, spec.dv0, spec.dv1, spec)
                d_w = dot_two(d0, d1, v0, v1, spec.dv1, spec)
            w, _ = weights(s, lse, i_q, i_k, p_mask, st.m_t, p_bias, st.b_t, n, spec, True, False)
            d_w = d_weights(d_w, kept_of(i_q, key0, n, spec, False), n, spec)
            acc += d_logits(w, d_w, delta, True, False)
    at = (i_bias.to(tl.int64) * n_q + i_q)[:, None] * n_kv + i_k[None, :]
    tl.store(p_result + at, acc / of_score, mask=m_q[:, None] & m_k[None, :])
