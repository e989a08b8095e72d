"""Routing in one launch: probabilities of experts, the best of them, and their weights, as fusions.py finds it."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.activation import clamped, exp_f32, sigmoid
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.experts.fusions import Routing, expert_routing
from graphrt.backends.triton.kernels.sort import LEAST_KEY, order_keys
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.fusion import Fusion


@triton.jit
def _shares(x, m):
    """Softmax of a block of f32 where m, 0 elsewhere; of nothing but -inf 0, as SOFT_MAX has it."""
    top = tl.max(tl.where(m, x, float("-inf")), 0)
    e = tl.where(m, exp_f32(x - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    total = tl.sum(e, 0)
    return tl.where(total == 0.0, 0.0, e / tl.where(total == 0.0, 1.0, total))


@accesses(reads="p_x p_bias", writes="p_ids p_weights")
@triton.jit(do_not_specialize=["n_expert", "x0", "x1", "bias0", "used", "ids1", "low", "high", "scale"])
def route_tokens(
    p_x, x0, x1, p_bias, bias0, p_ids, ids1, p_weights, n_expert, used, low, high, scale,
    GATE: tl.constexpr, SHARE: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program t: the `used` best experts of token t, best first and of equal ones the first, and their weights.

    x: logits, element (expert, token) at expert * x0 + token * x1. Probabilities: their softmax or sigmoid, or
    themselves, as GATE says; bias: is added for the choice alone. SHARE: weights are chosen probabilities, and then:
    "sum": divided by their sum, held in low..high; "softmax": their softmax. ids: int32, rows ids1 apart; weights: f32
    [tokens, used], times scale. SIZE, SLOTS: powers of two from n_expert and used on.
    """
    take_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    m_expert = i < n_expert
    p = tl.load(p_x + token * x1 + i * x0, mask=m_expert, other=0.0)
    if GATE == "softmax":
        p = _shares(p, m_expert)
    elif GATE == "sigmoid":
        p = sigmoid(p)
    choice = p
    if p_bias is not None:
        choice += tl.load(p_bias + i * bias0, mask=m_expert, other=0.0)
    keys = tl.where(m_expert, order_keys(choice, i), LEAST)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    weights = tl.zeros([SLOTS], tl.float32)
    for n in range(used):
        expert = 0x7FFFFFFF - (tl.max(keys, 0) & 0x7FFFFFFF).to(tl.int32)
        keys = tl.where(i == expert, LEAST, keys)
        chosen = tl.where(slot == n, expert, chosen)
        weights = tl.where(slot == n, tl.sum(tl.where(i == expert, p, 0.0), 0), weights)
    m_slot = slot < used
    if SHARE == "sum":
        weights = weights / clamped(tl.sum(weights, 0), low, high)
    elif SHARE == "softmax":
        weights = _shares(weights, m_slot)
    tl.store(p_ids + token * ids1 + slot, chosen, mask=m_slot)
    tl.store(p_weights + token * used + slot, weights * scale, mask=m_slot)


def lower_expert_routing(found: Routing, ctx: Context) -> list[Step]:
    """Logits or probabilities to experts and their weights."""
    (source, order, gate, biased), shares = found.choice, found.shares
    bias = ctx.view(biased["b"]) if biased is not None else None
    clamp = shares.clamp.params if shares.clamp is not None else None
    x, ids, (n_expert, tokens) = ctx.view(source), ctx.view(order), source.ne[:2]
    used = found.picked.ne[1]
    size = max(32, triton.next_power_of_2(n_expert))
    args: dict[str, Any] = {
        "p_x": x.data, "x0": x.strides[0], "x1": x.strides[1], "p_bias": bias and bias.data,
        "bias0": bias.strides[0] if bias else 0, "p_ids": ids.data, "ids1": ids.strides[1],
        "p_weights": ctx.view(found.last).data, "n_expert": n_expert, "used": used,
        "low": clamp.low if clamp else -math.inf, "high": clamp.high if clamp else math.inf,
        "scale": shares.scaled.params.scale if shares.scaled is not None else 1.0,
        "GATE": "" if gate is None else "softmax" if gate.op == "SOFT_MAX" else "sigmoid",
        "SHARE": "sum" if shares.total is not None else "softmax" if shares.share is not None else "", "SIZE": size,
        "SLOTS": triton.next_power_of_2(used), "LEAST": LEAST_KEY, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return [Launch(route_tokens, (tokens,), args, launch_options(ctx.target, max(1, min(8, size // 256))))]


EXPERT_ROUTING = Fusion("expert_routing", expert_routing, lower_expert_routing)
