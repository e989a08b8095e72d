"""The decode kernel's loop for up to 8 query rows over blocks and floats of 8 bits: decode.py's way_sums, turned.

Keys and columns of V are the rows of its products (16 of mma.sync's M), query rows the columns (8 of its N):
S^T = K Q^T and O^T = V^T P^T. So no half of a product is of rows that are not there, sums take half the registers, and
more warps fit a multiprocessor, which these caches need to hide what unpacking waits for. Words are read as in the
other form: a lane's keys and columns are the same. Only the weights change lanes, 16 bits each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphrt.backends.triton.kernels.common.constants import NEG_INF
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.flash_attn.decode_codes import code_queries, code_scores
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import THIN_ROWS, dot_dtype, mma_layout, query_layout
from graphrt.backends.triton.kernels.flash_attn.decode_operands import load_k, load_q, load_v, slot_order
from graphrt.backends.triton.kernels.flash_attn.decode_pieces import (
    copy_block,
    load_bias,
    logits,
    mask_rows,
    query_rows,
    softmax_step,
)


@gluon.jit
def thin_sums(
    queries, mask, caches, visits, low, i_seq, i_group, factor, softcap,
    sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, SEES: gl.constexpr, PAGE: gl.constexpr, PACK: gl.constexpr,
    PER_HEAD: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr, FULL: gl.constexpr,
    CODES: gl.constexpr,
):  # fmt: skip
    """(m, l, acc) of a segment as way_sums has them, of 8 rows: f32 [W, 8], [W, 8], [W, 8, D] in the order of slots.

    CODES: K is of blocks, and its scores are decode_codes.py's.
    """
    W: gl.constexpr = gl.num_warps()
    NW: gl.constexpr = BLOCK_N // W
    MMA: gl.constexpr = mma_layout(W)
    # K and V of runs are waited for at once, as they are copied: the warps meet once less.
    TOGETHER: gl.constexpr = FULL == "run"
    ring_k, ring_v, _, _, _, n_kv = caches
    p_q, _, _, row0, n_q, sign = queries
    _, _, _, _, high = visits
    if CODES:
        q, starts = code_queries(queries, i_group, NW, D, K_KIND, PACK)
    else:
        i_row_q = axis_index(query_layout(D, W, K_KIND, THIN_ROWS), 3, 1, THIN_ROWS)
        token_q, p_row = query_rows(queries, i_row_q, i_group, PACK)
        q = load_q(p_q, p_row, token_q < n_q, sign, D, K_KIND, dot_dtype(K_KIND), True)

    i_row = row0 + axis_index(MMA, 3, 2, THIN_ROWS)
    token, slope, p_mask_rows = mask_rows(
        mask, i_row, i_seq, i_group, n_q, factor, SOFTCAP, SEES, PACK, PER_HEAD
    )  # fmt: skip
    i_key = axis_index(MMA, 3, 0, W) * NW + axis_index(MMA, 3, 1, NW)
    m = gl.full([W, THIN_ROWS], NEG_INF, gl.float32, layout=gl.SliceLayout(1, MMA))
    l = lane_sums(gl.full([W, NW, THIN_ROWS], 0.0, gl.float32, layout=MMA))
    acc = gl.full([W, D, THIN_ROWS], 0.0, gl.float32, layout=MMA)
    buffer = 0
    for i in range(low, high):
        zero = gl.full([W, NW, THIN_ROWS], 0.0, gl.float32, layout=MMA)
        # Loaded before the wait for K, so that it takes no time of its own.
        bias = load_bias(zero, p_mask_rows, token < n_q, visits, i, i_key, n_kv, BLOCK_N, SEES)
        async_copy.wait_group(2 * STAGES - (2 if TOGETHER else 1))
        if CODES:
            s = code_scores(ring_k, buffer, q, starts, NW, D, K_KIND, sk_n)
        else:
            s = mma_v2(load_k(ring_k, buffer, NW, D, K_KIND, sk_n, True), q, zero)
        s = logits(
            s, bias, mask, p_mask_rows, slope, i, i_key, n_kv, factor, softcap, BLOCK_N, SOFTCAP, SEES
        )  # fmt: skip
        p, m, alpha = softmax_step(s, m, factor, 1, SOFTCAP)
        shrink = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)
        l = l * gl.expand_dims(shrink, 1) + lane_sums(p)
        acc = acc * gl.expand_dims(alpha, 1)
        p = gl.convert_layout(p.to(dot_dtype(V_KIND)), gl.DotOperandLayout(1, MMA, 2))
        if not TOGETHER:
            async_copy.wait_group(2 * STAGES - 2)
        acc = mma_v2(load_v(ring_v, buffer, NW, D, V_KIND, sv_n, True), p, acc)
        copy_block(
            caches, visits, i + STAGES, buffer, sk_n, sv_n, NW, D, K_KIND, V_KIND, BLOCK_N, SEES, PAGE, PDL, FULL
        )  # fmt: skip
        buffer = gl.where(buffer == STAGES - 1, 0, buffer + 1)

    if not SOFTCAP:
        m = m * factor
    l = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, MMA), assert_trivial=True)
    return m, l, slot_order(gl.permute(acc, (0, 2, 1)), D, V_KIND)


@gluon.jit
def lane_sums(p):
    """Sums over keys of [W, n, 8] in mma_layout as far as a thread has them, so that none waits: [W, 8, 8]."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8, THIN_ROWS]), 1)
