"""gemv_packed.py's products for f32, f16 or bf16 weights and f32 activations: nothing is rounded."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.activation import glu
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.products.gemv_packed import GENERAL, finish, first_sums


@triton.jit
def _load_dense(p, stride, row, i_tile, K: tl.constexpr, U: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """A tile's weights [G, W, R, U, V]: V side by side, 0 past a row's end. row: int32 [1, W, R, 1]."""
    at = tl.arange(0, G)[:, None, None, None, None] * V + tl.arange(0, V)[None, None, None, None, :]
    step = tl.arange(0, U)[None, None, None, :, None] * (G * V)
    first = i_tile * (U * G * V)
    p = (p + first) + (row.to(tl.int64) * stride)[:, :, :, :, None] + at + step
    if K % (U * G * V) != 0:
        return tl.load(p, mask=first + step + at < K, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(p, eviction_policy="evict_first")


@triton.jit
def _load_dense_x(p, x_row, token, i_tile, FROM: tl.constexpr, K: tl.constexpr, W: tl.constexpr, U: tl.constexpr,
                  G: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """Four of each V activations, from number FROM on: f32 [G, W, 1, U, N, 4]."""
    at = tl.arange(0, G)[:, None, None, None, None, None] * V + tl.arange(0, 4)[None, None, None, None, None, :] + FROM
    at = tl.broadcast_to(at, (G, W, 1, 1, 1, 4))
    step = tl.arange(0, U)[None, None, None, :, None, None] * (G * V)
    first = i_tile * (U * G * V)
    p = (p + first) + token[None, None, None, None, :, None] * x_row + at + step
    if K % (U * G * V) != 0:
        return tl.load(p, mask=first + step + at < K, other=0.0, eviction_policy="evict_last")
    else:
        return tl.load(p, eviction_policy="evict_last")


@triton.jit
def _dense_tile(acc, w, x, x1):
    """acc [G, W, R, N] and a tile's products. x, x1: the first and the second four of each eight weights."""
    G: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[1]
    R: tl.constexpr = w.shape[2]
    U: tl.constexpr = w.shape[3]
    V: tl.constexpr = w.shape[4]
    w = w.to(tl.float32)
    if V == 8:
        w, w1 = tl.split(tl.permute(tl.reshape(w, (G, W, R, U, 2, 4)), (0, 1, 2, 3, 5, 4)))
        products = w[:, :, :, :, None, :] * x + w1[:, :, :, :, None, :] * x1
    else:
        products = w[:, :, :, :, None, :] * x
    return acc + tl.sum(tl.sum(products, 5), 3)


@triton.jit
def dense_products(
    p_w, stride, p_w1, stride1, row, token, p_x, x_row,
    PAIR: tl.constexpr, K: tl.constexpr, U: tl.constexpr, G: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr,
    p_bias=None,
):  # fmt: skip
    """Rows `row` ([1, W, R, 1]) of one matrix, or of two if PAIR, times x: f32 [W, R, N] each. bias: as products."""
    W: tl.constexpr = row.shape[1]
    TILES: tl.constexpr = (K + U * G * V - 1) // (U * G * V)
    w = _load_dense(p_w, stride, row, 0, K, U, G, V)
    if PAIR:
        w1 = _load_dense(p_w1, stride1, row, 0, K, U, G, V)
    acc = first_sums(p_bias, row, token.shape[0], G)
    acc1 = tl.zeros(acc.shape, tl.float32)
    take_turn(PDL)
    for i_tile in range(1, TILES):
        next_w = _load_dense(p_w, stride, row, i_tile, K, U, G, V)
        if PAIR:
            next_w1 = _load_dense(p_w1, stride1, row, i_tile, K, U, G, V)
        x = _load_dense_x(p_x, x_row, token, i_tile - 1, 0, K, W, U, G, V)
        x1 = _load_dense_x(p_x, x_row, token, i_tile - 1, V - 4, K, W, U, G, V)
        acc = _dense_tile(acc, w, x, x1)
        w = next_w
        if PAIR:
            acc1 = _dense_tile(acc1, w1, x, x1)
            w1 = next_w1
    x = _load_dense_x(p_x, x_row, token, TILES - 1, 0, K, W, U, G, V)
    x1 = _load_dense_x(p_x, x_row, token, TILES - 1, V - 4, K, W, U, G, V)
    y = tl.sum(_dense_tile(acc, w, x, x1), 0)
    y1 = y
    if PAIR:
        y1 = tl.sum(_dense_tile(acc1, w1, x, x1), 0)
    return y, y1


@accesses(
    reads="p_w0 p_w1 p_w2 p_x p_bias0 p_bias1 p_bias2 p_residual",
    writes="p_out0 p_out1 p_out2",
    early="p_w0 p_w1 p_w2 p_bias0 p_bias1 p_bias2",
)
@triton.jit(do_not_specialize=GENERAL)
def dense_gemv(
    p_w0, stride0, p_out0, out_stride0, m0, p_w1, stride1, p_out1, out_stride1, m1,
    p_w2, stride2, p_out2, out_stride2, m2, p_x, x_row, p_bias0, p_bias1, p_bias2, p_residual, residual_stride, n,
    MATRICES: tl.constexpr, GLU: tl.constexpr, K: tl.constexpr, N: tl.constexpr, U: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """packed_gemv for f32, f16 or bf16 weights, element (row, i) at row * stride + i, and f32 x: nothing is rounded."""
    i_program = tl.program_id(0)
    token = tl.minimum(tl.arange(0, N), n - 1)
    i_row = tl.arange(0, R)[None, None, :, None] * W + tl.arange(0, W)[None, :, None, None]
    programs0 = (m0 + (R * W - 1)) // (R * W)
    programs1 = 0
    if MATRICES > 1 and GLU == "":
        programs1 = (m1 + (R * W - 1)) // (R * W)
    if i_program < programs0 or (MATRICES == 1 or GLU != ""):
        first = i_program * (R * W)
        row = tl.minimum(first + i_row, m0 - 1)
        y, y1 = dense_products(
            p_w0, stride0, p_w1, stride1, row, token, p_x, x_row, GLU != "", K, U, G, V, PDL, p_bias0
        )
        if GLU != "":
            y = glu(y, y1, 0.0, 0.0, GLU, True)
        finish(y, p_out0, out_stride0, p_residual, residual_stride, first, m0, n, G)
    elif i_program < programs0 + programs1 or MATRICES == 2:
        first = (i_program - programs0) * (R * W)
        row = tl.minimum(first + i_row, m1 - 1)
        y, y1 = dense_products(p_w1, stride1, None, 0, row, token, p_x, x_row, False, K, U, G, V, PDL, p_bias1)
        finish(y, p_out1, out_stride1, None, 0, first, m1, n, G)
    else:
        first = (i_program - programs0 - programs1) * (R * W)
        row = tl.minimum(first + i_row, m2 - 1)
        y, y1 = dense_products(p_w2, stride2, None, 0, row, token, p_x, x_row, False, K, U, G, V, PDL, p_bias2)
        finish(y, p_out2, out_stride2, None, 0, first, m2, n, G)
