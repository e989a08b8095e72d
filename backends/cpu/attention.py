"""SOFT_MAX, FLASH_ATTN_EXT and FLASH_ATTN_LSE: the definition, written to be read."""

from __future__ import annotations

import torch

from graphrt.backends.cpu.arithmetic import VECTOR, by_rows
from graphrt.backends.cpu.matmul import product
from graphrt.backends.cpu.philox import keep
from graphrt.backends.cpu.reference import reference
from graphrt.backends.cpu.score import score_of, value
from graphrt.ops.dropout import left_out
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams
from graphrt.ops.key_panels import ROWS
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

NEG_INF = float("-inf")
#: Keys whose values are added up at once.
BLOCK = 128


def _over_heads(mask: torch.Tensor, n_head: int, n_seq: int) -> torch.Tensor:
    """A mask [m3, m2, ...] repeated to [n_seq, n_head, ...]: head h reads h mod m2, sequence s reads s mod m3."""
    return mask.repeat(n_seq // mask.shape[0], n_head // mask.shape[1], 1, 1)


def _slopes(n_head: int, max_bias: float, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(alibi_slopes(n_head, max_bias), dtype=like.dtype).reshape(1, n_head, 1, 1)


def _softmax(logits: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights over the last dimension, and the log of their denominator; a row of -inf gives weights of 0.

    logits: [n_seq, n_head, n_q, n]; sinks: n_head values or None. Whole vectors are summed, so that a row's result
    depends on nothing but the row.
    """
    n = logits.shape[-1]
    logits = torch.nn.functional.pad(logits, (0, -n % VECTOR), value=NEG_INF)
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1)
        top = torch.maximum(top, sink)
    top = torch.where(top == NEG_INF, 0.0, top)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    lse = (top + torch.log(total)).squeeze(-1)
    return torch.where(total == 0, 0.0, weights / total)[..., :n], lse


@reference("SOFT_MAX")
def soft_max(
    node: Tensor, a: torch.Tensor, mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    n_seq, n_head, n_q, _ = a.shape
    logits = a * node.params.scale
    if mask is not None:
        logits = logits + _slopes(n_head, node.params.max_bias, a) * _over_heads(mask[:, :, :n_q], n_head, n_seq)
    return _softmax(logits, sinks)[0]


def last_seen(mask: torch.Tensor | None, n_kv: int) -> int:
    """How many leading keys matter: one past the last that any query sees, at least 1."""
    if mask is None:
        return n_kv
    seen = (mask != NEG_INF).flatten(0, 2).any(0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else 1


def _of_heads(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """rows [n_seq, n_head, n, k] times matrices [n_seq, n_kv_head, m, k], transposed: [n_seq, n_head, n, m]. The heads
    that share a matrix are rows of one product."""
    n_seq, n_head, n, k = rows.shape
    shared = rows.reshape(n_seq, matrices.shape[1], n_head // matrices.shape[1] * n, k)
    return product(shared, matrices).reshape(n_seq, n_head, n, matrices.shape[-2])


def bent_logits(p: FlashAttnParams | FlashAttnVarlenParams, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The logits before anything is added, scaled and softly capped: [n_seq, n_head, n_q, n_kv]."""
    s = _of_heads(q, k) * p.scale
    return p.softcap * by_rows(torch.tanh, s / p.softcap) if p.softcap else s


#: The number of the first sequence, and the position of its first query.
FIRST = (0, 0)


def scored(p: FlashAttnParams | FlashAttnVarlenParams, s: torch.Tensor, first: tuple[int, int] = FIRST) -> torch.Tensor:
    """Logits after the score function, where there is one. s: [n_seq, n_head, n_q, n_kv]."""
    function = score_of(p)
    return s if function is None else value(function, s, *first)


def with_mask(
    p: FlashAttnParams | FlashAttnVarlenParams, s: torch.Tensor, mask: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Logits with bias and mask, -inf where a query does not see a key, and where it sees one."""
    n_seq, n_head, _, _ = s.shape
    if attn_bias is not None:
        s = s + _over_heads(attn_bias, n_head, n_seq)
    if mask is None:
        return s, torch.ones((), dtype=torch.bool).expand(s.shape)
    full = _over_heads(mask, n_head, n_seq)
    seen = full != NEG_INF
    return torch.where(seen, s + _slopes(n_head, p.max_bias, s) * full, NEG_INF), seen


def _weighted(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """weights [n_seq, n_head, n_q, n_kv] times v [n_seq, n_kv_head, n_kv, D_v], a block of keys after the other: those
    behind the last that a query sees, whose weights are 0, change no bit of its result."""
    out = torch.zeros((), dtype=v.dtype)
    for start in range(0, v.shape[-2], BLOCK):
        of_block, rows = weights[..., start : start + BLOCK], v[..., start : start + BLOCK, :]
        missing = BLOCK - rows.shape[-2]
        of_block = torch.nn.functional.pad(of_block, (0, missing))
        out = out + _of_heads(of_block, torch.nn.functional.pad(rows, (0, 0, 0, missing)).transpose(-1, -2))
    return out


def dropped(p: FlashAttnParams | FlashAttnVarlenParams, weights: torch.Tensor) -> torch.Tensor:
    """Weights as dropout leaves them."""
    if isinstance(p, FlashAttnVarlenParams) or p.dropout_p == 0.0:
        return weights
    kept = keep(p.dropout_p, p.seed, p.offset, weights.shape)
    return torch.where(kept, weights / (1.0 - left_out(p.dropout_p)), 0.0)


def attend(
    node: Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    sinks: torch.Tensor | None, attn_bias: torch.Tensor | None = None, first: tuple[int, int] = FIRST,
) -> torch.Tensor:  # fmt: skip
    """Attention [n_seq, n_q, n_head, D_v] with the parameters of a node. mask, attn_bias: in q's type, [m3, m2, n_q,
    n_kv]."""
    logits, seen = with_mask(node.params, scored(node.params, bent_logits(node.params, q, k), first), mask, attn_bias)
    weights = dropped(node.params, _softmax(logits, sinks)[0])
    out = _weighted(weights, torch.nan_to_num(v, 0.0, 0.0, 0.0))
    if not v.isfinite().all():  # a weight of 0 must not meet NaN, but a NaN that is seen must come through
        meets_bad = _of_heads(seen.to(v.dtype), (~v.isfinite()).to(v.dtype).transpose(-1, -2)) > 0
        out = torch.where(meets_bad, float("nan"), out)
    return out.transpose(1, 2)


def log_sum_exp(
    node: Tensor, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None,
    attn_bias: torch.Tensor | None = None, first: tuple[int, int] = FIRST,
) -> torch.Tensor:  # fmt: skip
    """The log of the denominators of attend(), [n_seq, n_head, n_q]."""
    logits = scored(node.params, bent_logits(node.params, q, k), first)
    return _softmax(with_mask(node.params, logits, mask, attn_bias)[0], sinks)[1]


def up_to(n: int, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The first n keys of a mask or bias."""
    return mask[..., :n] if mask is not None else None


def key_rows(p: FlashAttnParams, k: torch.Tensor, d: int) -> torch.Tensor:
    """k as [n_seq, n_head_kv, n_kv, d], whatever its layout."""
    if p.k_layout == ROWS:
        return k
    n_seq, panels, n_kv, x = k.shape
    return k.reshape(n_seq, panels * x // d, d // x, n_kv, x).transpose(2, 3).reshape(n_seq, -1, n_kv, d)


def times(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """k or v [n_seq, n_head_kv, n_kv, D] times one value, or one a head."""
    return x if scale is None else x * scale.reshape(1, -1, 1, 1)


@reference("FLASH_ATTN_EXT")
def flash_attn_ext(
    node: Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, attn_bias: torch.Tensor | None = None, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    k, n = key_rows(node.params, k, q.shape[3]), last_seen(mask, k.shape[2])
    k, v = times(k, k_scale), times(v, v_scale)
    out = attend(node, q, k[:, :, :n], v[:, :, :n], up_to(n, mask), sinks, up_to(n, attn_bias))
    return torch.div(out, node.params.out_scale)


@reference("FLASH_ATTN_LSE")
def flash_attn_lse(
    node: Tensor, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, attn_bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    k, n = key_rows(node.params, k, q.shape[3]), last_seen(mask, k.shape[2])
    lse = log_sum_exp(node, q, k[:, :, :n], up_to(n, mask), sinks, up_to(n, attn_bias))
    return lse.transpose(1, 2).reshape(node.shape)
