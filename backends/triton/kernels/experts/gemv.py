"""Few tokens times the matrices of their experts: each program reads the ids it needs and then that expert's weights.

The arithmetic is products/gemv.py's, with one vector a program. Program (i, pair) makes some rows of one pair of token
and expert; where a pair's results are only summed up, program (i, token) takes the token's experts one after the other
and adds them in their order. Weights can't be asked for before ids are there, so nothing is loaded early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import View
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.common.activation import glu
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.kinds import planes_from
from graphrt.backends.triton.kernels.products.activations import Q8Rows, Rows, uses_ptx
from graphrt.backends.triton.kernels.products.gemv import GemvConfig, config_for
from graphrt.backends.triton.kernels.products.gemv_packed import products
from graphrt.backends.triton.kernels.products.gemv_plain import dense_products
from graphrt.backends.triton.kernels.products.half import Gate
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.packing import NO_PLANES, Packed


@triton.jit
def _packed_rows(
    packed0, packed1, expert, m, row, x_row, x_rows, p_q, p_d, p_s, KIND0: tl.constexpr, KIND1: tl.constexpr,
    PARTS: tl.constexpr, NG: tl.constexpr, U: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rows `row` of an expert's matrices, of one if KIND1 is "", times row x_row of x_rows: f32 [W, R, 1] each."""
    first = expert.to(tl.int64) * m * NG
    planes = planes_from(packed0, first, KIND0)
    planes1 = None
    if KIND1 != "":
        planes1 = planes_from(packed1, first, KIND1)
    return products(
        planes, planes1, row, tl.arange(0, 1) + x_row, x_rows, p_q, p_d, p_s, None, 0, None, 0.0,
        KIND0, KIND1, "q8", PARTS, NG, U, G, PTX, False,
    )  # fmt: skip


@triton.jit
def _finished(y, y1, p_bias0, bias_row0, p_bias1, bias_row1, expert, inside, at, m_out, alpha, limit,
              GLU: tl.constexpr):  # fmt: skip
    """Sums [W, R, 1] with their biases, gated if GLU: [G, W, R, 1], whose first along G count. at: rows, of that shape.

    NaN where the id is no expert's.
    """
    y = tl.broadcast_to(y[None], at.shape)
    if p_bias0 is not None:
        y += tl.load(p_bias0 + expert.to(tl.int64) * bias_row0 + at, mask=m_out, other=0.0)
    if GLU != "":
        y1 = tl.broadcast_to(y1[None], at.shape)
        if p_bias1 is not None:
            y1 += tl.load(p_bias1 + expert.to(tl.int64) * bias_row1 + at, mask=m_out, other=0.0)
        y = glu(y, y1, alpha, limit, GLU, True)
    return tl.where(inside, y, float("nan"))


@triton.jit
def _expert_of(p_ids, n_expert):
    """(the expert, whether there is one of that number)."""
    expert = tl.load(p_ids)
    inside = (expert >= 0) & (expert < n_expert)
    return tl.where(inside, expert, 0), inside


@triton.jit
def _places(m, R: tl.constexpr, W: tl.constexpr, G: tl.constexpr):
    """A program's rows: [1, W, R, 1] to load weights by, [G, W, R, 1] to store results by, and which are stored."""
    first = tl.program_id(0) * (R * W)
    row = first + tl.arange(0, R)[None, None, :, None] * W + tl.arange(0, W)[None, :, None, None]
    at = tl.broadcast_to(tl.max_contiguous(row, (1, 1, 1, 1)), (G, W, R, 1))
    return tl.minimum(row, m - 1), at, (at < m) & (tl.arange(0, G)[:, None, None, None] == 0)


_GENERAL = [
    "bias_row0",
    "bias_row1",
    "ids0",
    "ids1",
    "factor0",
    "factor1",
    "m",
    "n_expert",
    "used",
    "x_slots",
    "x_rows",
]


@accesses(
    reads=("packed0 p_bias0 packed1 p_bias1 p_q p_d p_s p_ids p_factors"),
    writes="p_out",
)
@triton.jit(do_not_specialize=_GENERAL)
def packed_expert_gemv(
    packed0, p_bias0, bias_row0, packed1, p_bias1, bias_row1,
    p_q, p_d, p_s, p_ids, ids0, ids1, p_factors, factor0, factor1, p_out, m, n_expert, used, x_slots, x_rows, alpha,
    limit, KIND0: tl.constexpr, KIND1: tl.constexpr, GLU: tl.constexpr, PARTS: tl.constexpr, NG: tl.constexpr,
    U: tl.constexpr, R: tl.constexpr, W: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair, :] = an expert's matrix times a row of x, plus its bias; or, with GLU, activation(gate) * up of two.

    packed: of all experts, m rows of NG groups each, as packed_gemv has them; bias: f32, expert e's from e * bias_row
    on. q, d, s: x_rows of Q8Rows in PARTS, x_slots a token: one for all its experts or one for each. ids,
    factors: element (slot, token) at slot * .0 + token * .1. With factors the second program number is a token's, and
    out[token, :] is the sum of its pairs' results times their factors. out: f32, without gaps.
    """
    take_turn(PDL)
    row, at, m_out = _places(m, R, W, G)
    if p_factors is None:
        pair = tl.program_id(1)
        token, slot = pair // used, pair % used
        expert, inside = _expert_of(p_ids + token * ids1 + slot * ids0, n_expert)
        y, y1 = _packed_rows(
            packed0, packed1, expert, m, row,
            token * x_slots + tl.minimum(slot, x_slots - 1), x_rows, p_q, p_d, p_s, KIND0, KIND1, PARTS, NG, U, G, PTX,
        )  # fmt: skip
        y = _finished(y, y1, p_bias0, bias_row0, p_bias1, bias_row1, expert, inside, at, m_out, alpha, limit, GLU)
        tl.store(p_out + pair.to(tl.int64) * m + at, y, mask=m_out)
    else:
        token = tl.program_id(1)
        total = tl.zeros([G, W, R, 1], tl.float32)
        for slot in range(used):
            expert, inside = _expert_of(p_ids + token * ids1 + slot * ids0, n_expert)
            y, y1 = _packed_rows(
                packed0, None, expert, m, row,
                token * x_slots + tl.minimum(slot, x_slots - 1), x_rows, p_q, p_d, p_s, KIND0, "", PARTS, NG, U, G, PTX,
            )  # fmt: skip
            y = _finished(y, y1, p_bias0, bias_row0, None, 0, expert, inside, at, m_out, alpha, limit, "")
            total += y * tl.load(p_factors + token * factor1 + slot * factor0)
        tl.store(p_out + token.to(tl.int64) * m + at, total, mask=m_out)


@accesses(reads="p_w0 p_bias0 p_w1 p_bias1 p_x p_ids p_factors", writes="p_out")
@triton.jit(do_not_specialize=[n for n in _GENERAL if n != "x_rows"])
def plain_expert_gemv(
    p_w0, row_step0, expert_step0, p_bias0, bias_row0, p_w1, row_step1, expert_step1, p_bias1, bias_row1,
    p_x, x_row, p_ids, ids0, ids1, p_factors, factor0, factor1, p_out, m, n_expert, used, x_slots, alpha, limit,
    PAIR: tl.constexpr, GLU: tl.constexpr, K: tl.constexpr, U: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """packed_expert_gemv for f32, f16 or bf16 weights and f32 x, rows x_row apart: nothing is rounded.

    Element (i, row, expert) of weights is at i + row * row_step + expert * expert_step. PAIR: there are two matrices.
    """
    take_turn(PDL)
    row, at, m_out = _places(m, R, W, G)
    if p_factors is None:
        pair = tl.program_id(1)
        token, slot = pair // used, pair % used
        expert, inside = _expert_of(p_ids + token * ids1 + slot * ids0, n_expert)
        p_second = p_w1
        if PAIR:
            p_second = p_w1 + expert.to(tl.int64) * expert_step1
        y, y1 = dense_products(
            p_w0 + expert.to(tl.int64) * expert_step0, row_step0, p_second, row_step1, row,
            tl.arange(0, 1), p_x + (token * x_slots + tl.minimum(slot, x_slots - 1)) * x_row, 0, PAIR, K, U, G, V,
            False,
        )  # fmt: skip
        y = _finished(y, y1, p_bias0, bias_row0, p_bias1, bias_row1, expert, inside, at, m_out, alpha, limit, GLU)
        tl.store(p_out + pair.to(tl.int64) * m + at, y, mask=m_out)
    else:
        token = tl.program_id(1)
        total = tl.zeros([G, W, R, 1], tl.float32)
        for slot in range(used):
            expert, inside = _expert_of(p_ids + token * ids1 + slot * ids0, n_expert)
            y, y1 = dense_products(
                p_w0 + expert.to(tl.int64) * expert_step0, row_step0, None, 0, row,
                tl.arange(0, 1), p_x + (token * x_slots + tl.minimum(slot, x_slots - 1)) * x_row, 0, False, K, U, G, V,
                False,
            )  # fmt: skip
            y = _finished(y, y1, p_bias0, bias_row0, None, 0, expert, inside, at, m_out, alpha, limit, "")
            total += y * tl.load(p_factors + token * factor1 + slot * factor0)
        tl.store(p_out + token.to(tl.int64) * m + at, total, mask=m_out)


# --- launches ---


@dataclass(frozen=True, eq=False)
class Experts:
    """The matrices of all experts: packed, their rows one after the other, or plain [n_expert, m, k] with elements of a
    row side by side. bias: f32 [n_expert, m], its rows' elements side by side.
    """

    weight: Packed | torch.Tensor
    n_expert: int
    bias: torch.Tensor | None = None

    @property
    def m(self) -> int:
        return self.weight.rows // self.n_expert if isinstance(self.weight, Packed) else self.weight.shape[1]

    @property
    def k(self) -> int:
        return self.weight.k if isinstance(self.weight, Packed) else self.weight.shape[2]

    @property
    def kind(self) -> str:
        return self.weight.kind if isinstance(self.weight, Packed) else _PLAIN[self.weight.dtype]

    @property
    def bias_row(self) -> int:
        return 0 if self.bias is None else self.bias.stride(0)


_PLAIN = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def expert_gemv(
    target: Target, experts: Sequence[Experts], x: Q8Rows | Rows, ids: View, out: torch.Tensor,
    gate: Gate | None = None, factors: View | None = None, config: GemvConfig | None = None,
) -> Launch:  # fmt: skip
    """One launch: a pair's row of out for each id, or with factors a token's.

    experts: one, or with `gate` its two, both packed or both plain. x: Q8Rows for packed weights, else Rows of
    f32, as many rows as tokens or as ids. ids: i32 [used, tokens]; factors: f32 [1, used, tokens]. out: f32
    [pairs or tokens, m], without gaps.
    """
    used, tokens = ids.ne[:2]
    first = experts[0]
    assert len(experts) == (2 if gate else 1) and all((e.m, e.k) == (first.m, first.k) for e in experts)
    assert first.k == x.k and x.n in (tokens, tokens * used) and not (gate and factors)
    seconds = tokens if factors else tokens * used
    c = config or config_for(first.kind, first.m * seconds * len(experts), first.k, 1)
    args: dict[str, Any] = {
        "p_ids": ids.data, "ids0": ids.strides[0], "ids1": ids.strides[1],
        "p_factors": factors and factors.data, "factor0": factors.strides[1] if factors else 0,
        "factor1": factors.strides[2] if factors else 0, "p_out": out, "m": first.m, "n_expert": first.n_expert,
        "used": used, "x_slots": x.n // tokens, "alpha": gate.alpha if gate else 0.0,
        "limit": gate.limit if gate else 0.0, "GLU": gate.kind if gate else "", "U": c.u, "R": c.r, "W": c.w, "G": c.g,
        "PDL": target.has_pdl,
    }  # fmt: skip
    for i in range(2):
        e = experts[i] if i < len(experts) else None
        args |= {f"p_bias{i}": e and e.bias, f"bias_row{i}": e.bias_row if e else 0} | _weights(i, e, first)
    if isinstance(first.weight, Packed):
        assert isinstance(x, Q8Rows)
        args |= {"p_q": x.q.view(torch.int32), "p_d": x.d, "p_s": x.s, "x_rows": x.n, "PARTS": x.parts}
        args |= {"NG": x.k // 32, "PTX": uses_ptx(target)}
    else:
        assert isinstance(x, Rows) and x.stride == 1
        args |= {"p_x": x.data, "x_row": x.row_stride, "K": x.k, "PAIR": gate is not None}
        args["V"] = 4 if any(e.kind == "f32" for e in experts) else 8
    kernel = packed_expert_gemv if isinstance(first.weight, Packed) else plain_expert_gemv
    return Launch(kernel, (-(-first.m // c.rows), seconds), args, launch_options(target, c.warps))


def _weights(i: int, e: Experts | None, first: Experts) -> dict[str, Any]:
    if isinstance(first.weight, Packed):
        w = e.weight if e else None
        assert w is None or isinstance(w, Packed)
        return {f"packed{i}": w.planes() if w else NO_PLANES, f"KIND{i}": w.kind if w else ""}
    plain = e.weight if e else None
    assert plain is None or isinstance(plain, torch.Tensor)
    steps = (0, 0) if plain is None else (plain.stride(1), plain.stride(0))
    return {f"p_w{i}": plain, f"row_step{i}": steps[0], f"expert_step{i}": steps[1]}
