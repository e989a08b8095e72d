"""FLASH_ATTN_BACK and FLASH_ATTN_VARLEN_BACK: the definition, as the module of the ops has its formula."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.backends.cpu.attention import NEG_INF, bent_logits, dropped, last_seen, scored, up_to, with_mask
from graphrt.backends.cpu.attention_varlen import sequences
from graphrt.backends.cpu.reference import reference
from graphrt.backends.cpu.score import score_of, value
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams
from graphrt.ops.score_calculus import derivative
from graphrt.tensor import Tensor

Numbers = torch.Tensor | None


@dataclass(frozen=True)
class Rows:
    """What the rows of an attention have: out, d_out [n_seq, n_head, n_q, D_v], lse, d_lse [n_seq, n_head, n_q, 1]."""

    out: torch.Tensor
    d_out: torch.Tensor
    lse: torch.Tensor
    d_lse: Numbers

    @property
    def delta(self) -> torch.Tensor:
        delta = (self.d_out * self.out).sum(-1, keepdim=True)
        return delta if self.d_lse is None else delta - self.d_lse


def _shared(each: torch.Tensor, n_head_kv: int) -> torch.Tensor:
    """The sum over consecutive heads that share a head of k and v."""
    n_seq, n_head = each.shape[:2]
    return each.reshape(n_seq, n_head_kv, n_head // n_head_kv, *each.shape[2:]).sum(2)


def _to_bias(each: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The sum over heads and sequences that share a bias: head h reads h mod b2."""
    n_seq, n_head, n_q, n_kv = each.shape
    b3, b2 = like.shape[:2]
    return each.reshape(n_seq // b3, b3, n_head // b2, b2, n_q, n_kv).sum((0, 2))


def gradient(
    of: str, p: FlashAttnParams | FlashAttnVarlenParams, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows,
    mask: Numbers, sinks: Numbers, attn_bias: Numbers,
) -> torch.Tensor:  # fmt: skip
    """The gradient of one source, in its shape."""
    if of == "sinks":
        assert sinks is not None
        share = torch.where(rows.lse == NEG_INF, 0.0, torch.exp(sinks.reshape(1, -1, 1, 1) - rows.lse))
        return -(share * rows.delta).sum((0, 2, 3))
    n_head, n_head_kv = q.shape[1], k.shape[1]
    if mask is not None:  # what no query sees may be anything
        seen_at_all = (mask != NEG_INF).flatten(0, 2).any(0)[:, None]
        k, v = torch.where(seen_at_all, k, 0.0), torch.where(seen_at_all, v, 0.0)
    bent = bent_logits(p, q, k)
    logits, seen = with_mask(p, scored(p, bent), mask, attn_bias)
    weights = torch.where(seen & (rows.lse != NEG_INF), torch.exp(logits - rows.lse), 0.0)
    if of == "v":
        return _shared(dropped(p, weights).transpose(-1, -2) @ rows.d_out, n_head_kv)
    d_weights = rows.d_out @ v.repeat_interleave(n_head // n_head_kv, dim=1).transpose(-1, -2)
    d_logits = weights * (dropped(p, d_weights) - rows.delta)
    if of == "attn_bias":
        assert attn_bias is not None
        return _to_bias(d_logits, attn_bias)
    function = score_of(p)
    if function is not None:  # where a weight is 0, the function may be flat, steep or no number: it does not matter
        d_logits = d_logits * torch.where(weights == 0.0, 0.0, value(derivative(function), bent))
    if p.softcap:
        d_logits = d_logits * (1.0 - (bent / p.softcap) ** 2)
    d_logits = d_logits * p.scale
    if of == "q":
        return d_logits @ k.repeat_interleave(n_head // n_head_kv, dim=1)
    return _shared(d_logits.transpose(-1, -2) @ q, n_head_kv)


@reference("FLASH_ATTN_BACK")
def flash_attn_back(
    node: Tensor, d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, mask: Numbers = None, sinks: Numbers = None, attn_bias: Numbers = None, d_lse: Numbers = None,
) -> torch.Tensor:  # fmt: skip
    """out, d_out: [n_seq, n_q, n_head, D_v]; lse, d_lse: [1, n_seq, n_q, n_head]."""
    n, of = last_seen(mask, k.shape[2]), node.params.of
    heads = [t if t is None else t[0].transpose(1, 2)[..., None] for t in (lse, d_lse)]
    assert heads[0] is not None
    rows = Rows(out.transpose(1, 2), d_out.transpose(1, 2), heads[0], heads[1])
    found = gradient(
        of, node.params.attn, q, k[:, :, :n], v[:, :, :n], rows, up_to(n, mask), sinks, up_to(n, attn_bias)
    )
    if found.numel() == node.n_elements:
        return found.reshape(node.shape)
    whole = torch.zeros(node.shape, dtype=found.dtype)  # of keys, beyond the last that is seen
    (whole if of == "attn_bias" else whole.transpose(-1, -2))[..., :n] = (
        found if of == "attn_bias" else found.transpose(-1, -2)
    )
    return whole


@reference("FLASH_ATTN_VARLEN_BACK")
def flash_attn_varlen_back(
    node: Tensor, d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, q_starts: torch.Tensor, k_starts: Numbers = None, sinks: Numbers = None, d_lse: Numbers = None,
) -> torch.Tensor:  # fmt: skip
    """q: [1, n_head, n_tokens, D_k]; out, d_out: [1, n_tokens, n_head, D_v]; lse, d_lse: [1, 1, n_tokens, n_head]."""
    of, p = node.params.of, node.params.attn
    whole = torch.zeros(node.shape, dtype=q.dtype)
    for queries, start, length, mask in sequences(p, q, q_starts, k_starts, k.shape[2]):
        heads = [t if t is None else t[0, :, queries].transpose(1, 2)[..., None] for t in (lse, d_lse)]
        assert heads[0] is not None
        rows = Rows(out[:, queries].transpose(1, 2), d_out[:, queries].transpose(1, 2), heads[0], heads[1])
        keys = slice(start, start + max(length, 1))
        if length == 0:  # no key is there: any will do, none is seen
            keys = slice(0, 1)
        found = gradient(of, p, q[:, :, queries], k[:, :, keys], v[:, :, keys], rows, mask, sinks, None)
        if of == "sinks":
            whole += found.reshape(node.shape)
        elif of == "q":
            whole[:, :, queries] = found
        elif length:
            whole[:, :, keys] += found
    return whole
