# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""What gradients of attention need of each row of the softmax before they begin, and the gradient of the sinks.

Products in f16 have 30 bits of range for what a gradient of f32 may hold anywhere. So d_out and dS are multiplied with
powers of two, one each for the whole tensor, so large that nothing overflows: with N the largest length of a row of
d_out and of V, and P at most 1, |dS| is at most N(d_out) * N(V) + |delta|. What is not finite counts for nothing there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.activation import exp_f32
from graphrt.backends.triton.kernels.common.pdl import take_turn

NEG_INF = tl.constexpr(float("-inf"))
#: log2 of what the largest row of d_out is brought to, and of what dS stays below while P is at most 1. The rest up to
#: f16's 2^16 is for weights above 1, which an lse gives that is not the forward's own.
D_OUT_BITS, D_SCORE_BITS = tl.constexpr(10), tl.constexpr(12)


@triton.jit
def _finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _somebody(row, p_starts, n_q, n_seq, PACKED: tl.constexpr):
    """Which rows are of a sequence, if sequences are packed: others may hold anything."""
    if PACKED:
        return (row % n_q >= tl.load(p_starts)) & (row % n_q < tl.load(p_starts + n_seq))
    else:
        return row >= 0


@triton.jit
def _queries(n, ROWS: tl.constexpr):
    """(head, sequence, rows, which of them are there, number of the program) of program (h, i, s) of ROWS of n rows. A
    head's neighbour is next: rows of a graph's out lie head by head."""
    i_h, i_s = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    number = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    return i_h, i_s, row, row < n, number


@accesses(reads="p_d_out p_out p_d_lse p_starts", writes="p_delta p_sizes", helper=True)
@triton.jit(do_not_specialize=["n_q", "n_head", "n_seq"])
def attention_back_delta(
    p_d_out, p_out, p_d_lse, p_starts, p_delta, p_sizes, n_q, n_head, n_seq, od_t, od_h, od_s, oo_t, oo_h, oo_s,
    ol_h, ol_t, ol_s, D_V: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_D_LSE: tl.constexpr,
    PACKED: tl.constexpr, SIZES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """delta [n_seq, n_head, n_q] of d_out and out [D_V, n_head, n_q, n_seq] and of d_lse [n_head, n_q, n_seq], whose
    strides are od, oo and ol of a head, a query (t) and a sequence. Program (h, i, s): ROWS queries of a head of a
    sequence. BLOCK: D_V or more.

    SIZES: also sizes [programs, 2], the largest length of a row of d_out and the largest |delta| of a program's rows.
    """
    take_turn(PDL)
    i_h, i_s, i_q, m_row, i_program = _queries(n_q, ROWS)
    row = (i_s * n_head + i_h) * n_q + i_q
    i_d = tl.arange(0, BLOCK)[None, :]
    m = m_row[:, None] & (i_d < D_V)
    d_out = tl.load(p_d_out + (i_h * od_h + i_q * od_t + i_s * od_s)[:, None] + i_d, mask=m, other=0.0)
    out = tl.load(p_out + (i_h * oo_h + i_q * oo_t + i_s * oo_s)[:, None] + i_d, mask=m, other=0.0)
    delta = tl.sum(d_out * out, 1)
    if HAS_D_LSE:
        delta -= tl.load(p_d_lse + i_h * ol_h + i_q * ol_t + i_s * ol_s, mask=m_row, other=0.0)
    tl.store(p_delta + row, delta, mask=m_row)
    if SIZES:
        counts = _somebody(i_q, p_starts, n_q, n_seq, PACKED)
        length = tl.where(counts, _finite(tl.sum(_finite(d_out) * _finite(d_out), 1)), 0.0)
        p_own = p_sizes + 2 * i_program
        tl.store(p_own, tl.sqrt(tl.max(length, 0)))
        tl.store(p_own + 1, tl.max(tl.where(counts & m_row, _finite(tl.abs(delta)), 0.0), 0))


@accesses(reads="p_x", writes="p_norms", helper=True)
@triton.jit(do_not_specialize=["n"])
def attention_back_norms(
    p_x, p_norms, n, s_n, s_h, s_s, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """norms [programs]: the largest length of ROWS rows of a head of v [D, n, n_head, n_seq]."""
    take_turn(PDL)
    i_h, i_s, row, m_row, i_program = _queries(n, ROWS)
    i_d = tl.arange(0, BLOCK)[None, :]
    at = row * s_n + i_h * s_h + i_s * s_s
    x = tl.load(p_x + at[:, None] + i_d, mask=m_row[:, None] & (i_d < D), other=0.0).to(tl.float32)
    tl.store(p_norms + i_program, tl.sqrt(tl.max(tl.sum(_finite(x) * _finite(x), 1), 0)))


@triton.jit
def _power(x, bits):
    """The power of two that brings x >= 0 below 2^bits, 1 for 0; within f32's range."""
    exponent = bits - tl.ceil(tl.log2(tl.where(x > 0.0, x, 1.0)))
    return tl.exp2(tl.minimum(tl.maximum(tl.where(x > 0.0, exponent, 0.0), -100.0), 100.0))


@accesses(reads="p_sizes p_norms", writes="p_scales", helper=True)
@triton.jit(do_not_specialize=["n_sizes", "n_norms", "inverse"])
def attention_back_scales(
    p_sizes, p_norms, p_scales, n_sizes, n_norms, inverse, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """scales [2] of what the two kernels above found, by one program. inverse: what dropout gives kept weights."""
    take_turn(PDL)
    i = tl.arange(0, BLOCK)
    length, delta, norm = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_sizes, BLOCK):
        m = start + i < n_sizes
        length = tl.maximum(length, tl.load(p_sizes + 2 * (start + i), mask=m, other=0.0))
        delta = tl.maximum(delta, tl.load(p_sizes + 2 * (start + i) + 1, mask=m, other=0.0))
    for start in range(0, n_norms, BLOCK):
        norm = tl.maximum(norm, tl.load(p_norms + start + i, mask=start + i < n_norms, other=0.0))
    largest = tl.max(length, 0)
    tl.store(p_scales, _power(largest, D_OUT_BITS))
    tl.store(p_scales + 1, _power(largest * tl.max(norm, 0) * inverse + tl.max(delta, 0), D_SCORE_BITS))


@accesses(reads="p_x p_scales", writes="p_made", helper=True)
@triton.jit(do_not_specialize=["n_q", "n_head"])
def attention_back_halves(
    p_x, p_scales, p_made, n_q, n_head, s_t, s_h, s_s, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """made [n_seq, n_head, n_q, D]: f32 rows in made's type, times scales[0] if SCALED. Program (h, i, s): ROWS
    queries of a head of a sequence."""
    take_turn(PDL)
    i_h, i_s, i_q, m_row, _ = _queries(n_q, ROWS)
    row = (i_s * n_head + i_h) * n_q + i_q
    i_d = tl.arange(0, BLOCK)[None, :]
    m = m_row[:, None] & (i_d < D)
    at = i_q * s_t + i_h * s_h + i_s * s_s
    x = tl.load(p_x + at[:, None] + i_d, mask=m, other=0.0)
    if SCALED:
        x *= tl.load(p_scales)
    tl.store(p_made + row[:, None] * D + i_d, x.to(p_made.dtype.element_ty), mask=m)


@accesses(reads="p_lse p_delta p_sinks p_starts", writes="p_result")
@triton.jit(do_not_specialize=["n_q", "n_head", "n_batch", "n_seq", "ol_t", "ol_h", "ol_s", "s_sinks"])
def attention_back_sinks(
    p_lse, p_delta, p_sinks, p_starts, p_result, n_q, n_head, n_batch, n_seq, ol_h, ol_t, ol_s, s_sinks,
    ROWS: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """result [n_head]: minus the sum over a head's rows of exp(sink - lse) * delta. A program a head."""
    take_turn(PDL)
    i_h = tl.program_id(0).to(tl.int64)
    sink = tl.load(p_sinks + i_h * s_sinks)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, n_q * n_batch, ROWS):
        row = start + tl.arange(0, ROWS)
        i_q, i_s = row % n_q, (row // n_q).to(tl.int64)
        m = (row < n_q * n_batch) & _somebody(row, p_starts, n_q, n_seq, PACKED)
        lse = tl.load(p_lse + i_h * ol_h + i_q * ol_t + i_s * ol_s, mask=m, other=NEG_INF)
        delta = tl.load(p_delta + (i_s * n_head + i_h) * n_q + i_q, mask=m, other=0.0)
        share = exp_f32(tl.where(lse > NEG_INF, sink - tl.where(lse > NEG_INF, lse, 0.0), NEG_INF))
        total += tl.where(m, share * delta, 0.0)
    tl.store(p_result + i_h, -tl.sum(total, 0))
