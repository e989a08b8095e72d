"""A layer's attention as three ops whose scores and weights lie in memory: what FLASH_ATTN_EXT is held against."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt import ops
from graphrt.tensor import Tensor


@dataclass(frozen=True)
class AttentionParams:
    """What a layer's attention is computed with: the op's own arguments."""

    scale: float
    max_bias: float
    softcap: float
    sinks: Tensor | None


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams, name: str
) -> Tensor:
    """MUL_MAT, SOFT_MAX, MUL_MAT. q, k, v, mask: as FLASH_ATTN_EXT has them; the result too, under its name.

    Scores and weights are f32 [n_kv, n_q, n_head, n_seq] each. v is turned first, since MUL_MAT adds up along rows: a
    cell that nobody has written yet must hold finite values. Source: llama.cpp's build_attn_mha without -fa.
    """
    scores = ops.mul_mat(k, q, name=f"{name} (kq)")
    scale = params.scale
    if params.softcap:
        bent = ops.unary(ops.scale(scores, scale / params.softcap), "tanh")
        scores, scale = ops.scale(bent, params.softcap), 1.0
    weights = ops.soft_max(scores, mask, params.sinks, scale, params.max_bias, name=f"{name} (kq_soft_max)")
    turned = ops.cont(ops.permute(v, 1, 0, 2, 3), name=f"{name} (v_turned)")
    found = ops.mul_mat(turned, weights, name=f"{name} (kqv)")
    return ops.cont(ops.permute(found, 0, 2, 1, 3), name=name)
