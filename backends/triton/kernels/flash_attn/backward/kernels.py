# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""The portable kernels of FLASH_ATTN_BACK; ops/flash_attn_back.py has the formula and its letters.

A program owns what it writes and adds it up in one order: attention_back_q the gradient of BLOCK_M queries, over all
keys; attention_back_kv that of BLOCK_N keys or values, over the query heads that share them and over all queries. Both
make scores and weights again. delta is made first, by a launch of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.activation import tanh
from graphrt.backends.triton.kernels.common.pdl import take_turn

NEG_INF = tl.constexpr(float("-inf"))


@accesses(reads="p_d_out p_out p_d_lse", writes="p_delta", helper=True)
@triton.jit(
    do_not_specialize=[
        "n_rows", "n_q", "n_head", "od_h", "od_t", "od_s", "oo_h", "oo_t", "oo_s", "ol_h", "ol_t", "ol_s",
    ]
)  # fmt: skip
def attention_back_delta(
    p_d_out, p_out, p_d_lse, p_delta, n_rows, n_q, n_head, od_h, od_t, od_s, oo_h, oo_t, oo_s, ol_h, ol_t, ol_s,
    D_V: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_D_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """delta [n_seq, n_head, n_q] of d_out and out [D_V, n_head, n_q, n_seq] and of d_lse [n_head, n_q, n_seq], whose
    strides are od, oo and ol of a head, a query (t) and a sequence; ROWS rows a program. BLOCK: D_V or more."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = row < n_rows
    i_q, i_h, i_s = row % n_q, row // n_q % n_head, row // n_q // n_head
    i_d = tl.arange(0, BLOCK)[None, :]
    m = m_row[:, None] & (i_d < D_V)
    d_out = tl.load(p_d_out + (i_h * od_h + i_q * od_t + i_s * od_s)[:, None] + i_d, mask=m, other=0.0)
    out = tl.load(p_out + (i_h * oo_h + i_q * oo_t + i_s * oo_s)[:, None] + i_d, mask=m, other=0.0)
    delta = tl.sum(d_out * out, 1)
    if HAS_D_LSE:
        delta -= tl.load(p_d_lse + i_h * ol_h + i_q * ol_t + i_s * ol_s, mask=m_row, other=0.0)
    tl.store(p_delta + row, delta, mask=m_row)


@triton.jit
def _rows_of(p, stride, i, n, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows i < n of D elements, f32 [rows, BLOCK_D], zeros elsewhere."""
    i_d = tl.arange(0, BLOCK_D)[None, :]
    m = (i < n)[:, None] & (i_d < D)
    return tl.load(p + i.to(tl.int64)[:, None] * stride + i_d, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _weights(
    q, k, lse, i_q, i_k, n_q, n_kv, p_mask, sm_t, slope, scale, softcap,
    HAS_MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(P, dt/ds) [queries, keys]. q, k: f32 rows, those that are not there zeros; lse: of the queries."""
    t = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    bend = tl.full([1, 1], 1.0, tl.float32)
    if SOFTCAP:
        bent = tanh(t / softcap)
        bend = 1.0 - bent * bent
        t = bent * softcap
    seen = (i_q < n_q)[:, None] & (i_k < n_kv)[None, :] & (lse > NEG_INF)[:, None]
    if HAS_MASK:
        at = i_q.to(tl.int64)[:, None] * sm_t + i_k[None, :]
        mask = tl.load(p_mask + at, mask=seen, other=NEG_INF).to(tl.float32)
        seen = seen & (mask > NEG_INF)
        t += slope * tl.where(seen, mask, 0.0)
    x = tl.where(seen, t - tl.where(lse > NEG_INF, lse, 0.0)[:, None], NEG_INF)
    return tl.exp(x), bend


@triton.jit
def _d_scores(w, bend, d_out, v, delta, PRECISION: tl.constexpr):
    """dS [queries, keys] without its scale. Where the weight is 0 it is 0, whatever v is: cells that nobody sees may
    hold NaN. A NaN that is seen makes the weight, or this, NaN."""
    d_w = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
    return tl.where(w == 0.0, 0.0, w * (d_w - delta[:, None]) * bend)


@accesses(reads="p_q p_k p_v p_d_out p_lse p_delta p_mask p_slopes", writes="p_result")
@triton.jit(
    do_not_specialize=[
        "n_q", "n_kv", "n_head", "gqa", "sq_h", "sq_s", "sk_h", "sk_s", "sv_h", "sv_s", "od_h", "od_s", "ol_h", "ol_t",
        "ol_s", "sm_t", "sm_h", "sm_s", "m2", "m3", "scale", "softcap",
    ]
)  # fmt: skip
def attention_back_q(
    p_q, p_k, p_v, p_d_out, p_lse, p_delta, p_mask, p_slopes, p_result, n_q, n_kv, n_head, gqa, sq_t, sq_h, sq_s,
    sk_n, sk_h, sk_s, sv_n, sv_h, sv_s, od_t, od_h, od_s, ol_t, ol_h, ol_s, sm_t, sm_h, sm_s, m2, m3, scale, softcap,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """result [D_K, n_q, n_head, n_seq] = scale * dS k. Program (i, h, s): BLOCK_M queries of a head of a sequence.

    Strides in elements: of q (t a query), k and v (n a key), d_out, lse and mask. BLOCK_K, BLOCK_V: D_K, D_V or more.
    """
    take_turn(PDL)
    i_h, i_s = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_q = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_q = i_q < n_q
    q = _rows_of(p_q + i_h * sq_h + i_s * sq_s, sq_t, i_q, n_q, D_K, BLOCK_K)
    d_out = _rows_of(p_d_out + i_h * od_h + i_s * od_s, od_t, i_q, n_q, D_V, BLOCK_V)
    lse = tl.load(p_lse + i_h * ol_h + i_q.to(tl.int64) * ol_t + i_s * ol_s, mask=m_q, other=NEG_INF)
    delta = tl.load(p_delta + (i_s * n_head + i_h) * n_q + i_q, mask=m_q, other=0.0)
    p_m = p_mask + (i_h % m2) * sm_h + (i_s % m3) * sm_s
    slope = tl.load(p_slopes + i_h)
    p_ks = p_k + i_h // gqa * sk_h + i_s * sk_s
    p_vs = p_v + i_h // gqa * sv_h + i_s * sv_s
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, n_kv, BLOCK_N):
        i_k = start + tl.arange(0, BLOCK_N)
        k = _rows_of(p_ks, sk_n, i_k, n_kv, D_K, BLOCK_K)
        v = _rows_of(p_vs, sv_n, i_k, n_kv, D_V, BLOCK_V)
        w, bend = _weights(
            q, k, lse, i_q, i_k, n_q, n_kv, p_m, sm_t, slope, scale, softcap, HAS_MASK, SOFTCAP, PRECISION
        )
        d_s = _d_scores(w, bend, d_out, v, delta, PRECISION)
        k = tl.where(tl.abs(k) < float("inf"), k, 0.0)  # of cells that nobody sees; of others d_s is NaN by now
        acc += tl.dot(d_s, k, input_precision=PRECISION)
    i_d = tl.arange(0, BLOCK_K)[None, :]
    at = ((i_s * n_head + i_h) * n_q + i_q)[:, None] * D_K + i_d
    tl.store(p_result + at, acc * scale, mask=m_q[:, None] & (i_d < D_K))


@accesses(reads="p_q p_k p_v p_d_out p_lse p_delta p_mask p_slopes", writes="p_result")
@triton.jit(
    do_not_specialize=[
        "n_q", "n_kv", "n_head", "gqa", "sq_h", "sq_s", "sk_h", "sk_s", "sv_h", "sv_s", "od_h", "od_s", "ol_h", "ol_t",
        "ol_s", "sm_t", "sm_h", "sm_s", "m2", "m3", "scale", "softcap",
    ]
)  # fmt: skip
def attention_back_kv(
    p_q, p_k, p_v, p_d_out, p_lse, p_delta, p_mask, p_slopes, p_result, n_q, n_kv, n_head, gqa, sq_t, sq_h, sq_s,
    sk_n, sk_h, sk_s, sv_n, sv_h, sv_s, od_t, od_h, od_s, ol_t, ol_h, ol_s, sm_t, sm_h, sm_s, m2, m3, scale, softcap,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_MASK: tl.constexpr, SOFTCAP: tl.constexpr, OF_V: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """result [D, n_kv, n_head_kv, n_seq]: scale * dS^T q, with OF_V P^T d_out. Program (i, g, s): BLOCK_N keys of a KV
    head of a sequence. The rest as in attention_back_q."""
    take_turn(PDL)
    i_g, i_s = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = _rows_of(p_k + i_g * sk_h + i_s * sk_s, sk_n, i_k, n_kv, D_K, BLOCK_K)
    v = _rows_of(p_v + i_g * sv_h + i_s * sv_s, sv_n, i_k, n_kv, D_V, BLOCK_V)
    BLOCK_D: tl.constexpr = BLOCK_V if OF_V else BLOCK_K
    D: tl.constexpr = D_V if OF_V else D_K
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for head in range(0, gqa):
        i_h = i_g * gqa + head
        p_m = p_mask + (i_h % m2) * sm_h + (i_s % m3) * sm_s
        slope = tl.load(p_slopes + i_h)
        for start in range(0, n_q, BLOCK_M):
            i_q = start + tl.arange(0, BLOCK_M)
            m_q = i_q < n_q
            q = _rows_of(p_q + i_h * sq_h + i_s * sq_s, sq_t, i_q, n_q, D_K, BLOCK_K)
            d_out = _rows_of(p_d_out + i_h * od_h + i_s * od_s, od_t, i_q, n_q, D_V, BLOCK_V)
            lse = tl.load(p_lse + i_h * ol_h + i_q.to(tl.int64) * ol_t + i_s * ol_s, mask=m_q, other=NEG_INF)
            w, bend = _weights(
                q, k, lse, i_q, i_k, n_q, n_kv, p_m, sm_t, slope, scale, softcap, HAS_MASK, SOFTCAP, PRECISION
            )
            if OF_V:
                acc += tl.dot(tl.trans(w), d_out, input_precision=PRECISION)
            else:
                delta = tl.load(p_delta + (i_s * n_head + i_h) * n_q + i_q, mask=m_q, other=0.0)
                d_s = _d_scores(w, bend, d_out, v, delta, PRECISION)
                acc += tl.dot(tl.trans(d_s), q, input_precision=PRECISION)
    i_d = tl.arange(0, BLOCK_D)[None, :]
    at = ((i_s * (n_head // gqa) + i_g) * n_kv + i_k)[:, None] * D + i_d
    tl.store(p_result + at, acc if OF_V else acc * scale, mask=(i_k < n_kv)[:, None] & (i_d < D))


@accesses(reads="p_lse p_delta p_sinks", writes="p_result")
@triton.jit(do_not_specialize=["n_q", "n_head", "n_seq", "ol_h", "ol_t", "ol_s", "s_sinks"])
def attention_back_sinks(
    p_lse, p_delta, p_sinks, p_result, n_q, n_head, n_seq, ol_t, ol_h, ol_s, s_sinks,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """result [n_head]: minus the sum over a head's rows of exp(sink - lse) * delta. A program a head."""
    take_turn(PDL)
    i_h = tl.program_id(0).to(tl.int64)
    sink = tl.load(p_sinks + i_h * s_sinks)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, n_q * n_seq, ROWS):
        row = start + tl.arange(0, ROWS)
        i_q, i_s = row % n_q, (row // n_q).to(tl.int64)
        m = row < n_q * n_seq
        lse = tl.load(p_lse + i_h * ol_h + i_q * ol_t + i_s * ol_s, mask=m, other=NEG_INF)
        delta = tl.load(p_delta + (i_s * n_head + i_h) * n_q + i_q, mask=m, other=0.0)
        share = tl.exp(tl.where(lse > NEG_INF, sink - tl.where(lse > NEG_INF, lse, 0.0), NEG_INF))
        total += tl.where(m, share * delta, 0.0)
    tl.store(p_result + i_h, -tl.sum(total, 0))
