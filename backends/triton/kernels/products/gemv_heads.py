"""A few tokens times a matrix for each of their heads, in one launch: the products of latent attention.

The arithmetic is gemv.py's, weights that are not packed unrounded as there. A program makes some rows of one head's
results for all tokens. Activations are rounded where they are multiplied: a head's are few.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.kinds import planes_from
from graphrt.backends.triton.kernels.products.activations import parts_of, uses_ptx
from graphrt.backends.triton.kernels.products.gemv import MAX_ALONE, MAX_INLINE, MAX_TOKENS, GemvConfig, config_for
from graphrt.backends.triton.kernels.products.gemv_packed import products
from graphrt.backends.triton.kernels.products.gemv_plain import dense_products
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.packing import Packed

#: Tokens whose rounded activations fit into registers at once; a program takes more of them in turns.
AT_ONCE = 2

_PLAIN = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@triton.jit
def _first_rows(R: tl.constexpr, W: tl.constexpr):
    """(a program's first row, what of its rows follows that: int32 [1, W, R, 1])."""
    i_row = tl.arange(0, R)[None, None, :, None] * W + tl.arange(0, W)[None, :, None, None]
    return tl.program_id(0) * (R * W), i_row


@triton.jit
def _store(y, p_out, out_row, first, i_row, m, first_token, n, G: tl.constexpr):
    """y [W, R, N] to out[token * out_row + row], by the first of a row's lanes, which have the sum."""
    W: tl.constexpr = y.shape[0]
    R: tl.constexpr = y.shape[1]
    N: tl.constexpr = y.shape[2]
    row = tl.broadcast_to(tl.max_contiguous(first + i_row, (1, 1, 1, 1)), (G, W, R, N))
    token = first_token + tl.arange(0, N)[None, None, None, :]
    mine = (row < m) & (token < n) & (tl.arange(0, G)[:, None, None, None] == 0)
    tl.store(p_out + token.to(tl.int64) * out_row + row, tl.broadcast_to(y[None], (G, W, R, N)), mask=mine)


@accesses(
    reads="packed p_x",
    writes="p_out",
    early="packed",
)
@triton.jit(do_not_specialize=["out_row", "out_head", "m", "n"])
def packed_head_gemv(
    packed, p_x, x_row, x_head, p_out, out_row, out_head, m, n,
    KIND: tl.constexpr, X_FORM: tl.constexpr, PARTS: tl.constexpr, NG: tl.constexpr, N: tl.constexpr,
    TURNS: tl.constexpr, U: tl.constexpr, R: tl.constexpr, W: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head): R * W rows of out[head, token, :] = the head's matrix times x[head, token, :].

    packed: of all heads, m rows of NG groups each, as packed_gemv has them. x, out: f32, rows x_row or out_row apart.
    X_FORM: "f32" or "together", as packed_gemv's. n tokens, N at a time in so many TURNS.
    """
    head = tl.program_id(1).to(tl.int64)
    packed = planes_from(packed, head * m * NG, KIND)
    first, i_row = _first_rows(R, W)
    for turn in tl.static_range(TURNS):
        y, _ = products(
            packed, None, tl.minimum(first + i_row, m - 1), tl.minimum(turn * N + tl.arange(0, N), n - 1), n,
            None, None, None, p_x + head * x_head, x_row, None, 0.0, KIND, "", X_FORM, PARTS, NG, U, G, PTX,
            PDL and turn == 0,
        )  # fmt: skip
        _store(y, p_out + head * out_head, out_row, first, i_row, m, turn * N, n, G)


@accesses(reads="p_w p_x", writes="p_out", early="p_w")
@triton.jit(do_not_specialize=["out_row", "out_head", "m", "n"])
def plain_head_gemv(
    p_w, w_row, w_head, p_x, x_row, x_head, p_out, out_row, out_head, m, n,
    K: tl.constexpr, N: tl.constexpr, U: tl.constexpr, R: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
    V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """packed_head_gemv for f32, f16 or bf16 weights, element (head, row, i) at head * w_head + row * w_row + i."""
    head = tl.program_id(1).to(tl.int64)
    first, i_row = _first_rows(R, W)
    y, _ = dense_products(
        p_w + head * w_head, w_row, None, 0, tl.minimum(first + i_row, m - 1), tl.minimum(tl.arange(0, N), n - 1),
        p_x + head * x_head, x_row, False, K, U, G, V, PDL,
    )  # fmt: skip
    _store(y, p_out + head * out_head, out_row, first, i_row, m, 0, n, G)


def head_gemv(
    target: Target, weight: Packed | torch.Tensor, x: torch.Tensor, out: torch.Tensor, config: GemvConfig | None = None
) -> Launch:
    """out[head, token, :] = weight[head] x[head, token, :], up to MAX_TOKENS tokens.

    weight: packed, the heads' rows one after the other, of up to MAX_INLINE elements; or plain [heads, m, k]. x: f32
    [heads, n, k], out: f32 [heads, n, m], both of any strides but a row's, as plain weights'. config: instead of
    config_for's.
    """
    (heads, n, k), m = x.shape, out.shape[2]
    assert 1 <= n <= MAX_TOKENS and out.shape[:2] == (heads, n) and x.dtype == out.dtype == torch.float32
    kind = weight.kind if isinstance(weight, Packed) else _PLAIN[weight.dtype]
    at_once = min(n, AT_ONCE if isinstance(weight, Packed) else MAX_TOKENS)
    c = config or config_for(kind, heads * m, k, at_once)
    args: dict[str, Any] = {
        "p_x": x, "x_row": x.stride(1), "x_head": x.stride(0), "p_out": out, "out_row": out.stride(1),
        "out_head": out.stride(0), "m": m, "n": n, "N": 1 << (at_once - 1).bit_length(), "R": c.r, "W": c.w, "G": c.g,
        "PDL": target.has_pdl,
    }  # fmt: skip
    grid, options = (-(-m // c.rows), heads), launch_options(target, c.warps)
    if not isinstance(weight, Packed):
        args |= {"p_w": weight, "w_row": weight.stride(1), "w_head": weight.stride(0), "K": k, "U": c.u}
        return Launch(plain_head_gemv, grid, args | {"V": 4 if kind == "f32" else 8}, options)
    assert weight.rows == heads * m and k <= MAX_INLINE
    args |= {
        "packed": weight.planes(), "KIND": kind, "PARTS": parts_of(k), "NG": k // 32,
        "X_FORM": "together" if k > MAX_ALONE else "f32", "TURNS": -(-n // at_once), "PTX": uses_ptx(target),
        "U": max(c.u, 1 << (-(-k // (32 * c.g)) - 1).bit_length()),  # one tile is the row
    }  # fmt: skip
    return Launch(packed_head_gemv, grid, args, options)
