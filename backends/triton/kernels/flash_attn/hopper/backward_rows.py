"""The rows of lse and delta that Hopper's kernels for attention's gradients read, by a launch of plain Triton.

f16 has few bits for small weights: there all weights are multiplied by a power of two, so that one of 1e-6 still has as
many as a large one, and what is added up is divided by it at the end.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.constants import LOG2E, NEG_INF
from graphrt.backends.triton.kernels.common.pdl import take_turn

#: Of f16: log2 of the factor of weights.
WEIGHT_BITS = 4


@accesses(reads="p_lse p_delta p_scales", writes="p_rows", helper=True)
@triton.jit(do_not_specialize=["n_q", "n_head", "ol_h", "ol_t", "ol_s"])
def attention_back_lse(
    p_lse, p_delta, p_scales, p_rows, n_q, n_head, ol_h, ol_t, ol_s,
    BITS: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rows f32 [n_seq, n_head, 2, n_q up to a multiple of PADDED]: lse in log2 units less BITS, infinite where no key
    is seen and past n_q; and delta times scales[1] / 2 ** BITS. Program (i, h, s): ROWS queries of a head of a
    sequence. lse: f32 of strides ol of a head, a query (t) and a sequence; delta: f32 [n_seq, n_head, n_q]."""
    take_turn(PDL)
    i_h, i_s = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_q = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_q = i_q < n_q
    i_head = i_s * n_head + i_h
    lse = tl.load(p_lse + i_h * ol_h + i_s * ol_s + i_q.to(tl.int64) * ol_t, mask=m_q, other=NEG_INF) * LOG2E - BITS
    delta = tl.load(p_delta + i_head * n_q + i_q, mask=m_q, other=0.0) * (tl.load(p_scales + 1) / (1 << BITS))
    padded = (n_q + PADDED - 1) // PADDED * PADDED
    p_rows += i_head * 2 * padded + i_q
    tl.store(p_rows, tl.where(lse == NEG_INF, float("inf"), lse), mask=i_q < padded)
    tl.store(p_rows + padded, delta, mask=i_q < padded)
