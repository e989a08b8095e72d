"""The part of lowprec.py for gradients: torch's own derivatives in float32, where it has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.nn.functional as F

from graphrt.backends.cpu.score import score_of, value
from graphrt.ops.dropout import kept, left_out
from graphrt.ops.rope import rope_frequencies
from graphrt.ops.score_calculus import derivative
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

T = torch.Tensor
Round = Callable[[T], T]
#: The order in which so many terms are added up, one by one.
Order = Callable[[int], Sequence[int]]


def of_forward(function: Callable[[T], T], a: T, d: T) -> T:
    """The derivative of a function that torch knows, times d."""
    with torch.enable_grad():
        a = a.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(function(a), a, d.expand_as(a))
    return found


def repeat_back(node: Tensor, d: T) -> T:
    for dim, (small, big) in enumerate(zip(node.shape, d.shape)):
        if small != big:
            d = torch.stack(torch.split(d, small, dim)).sum(0)
    return d


def get_rows_back(node: Tensor, d: T, ids: T) -> T:
    n_rows, spare = node.ne[1], torch.where((ids < 0) | (ids >= node.ne[1]), node.ne[1], ids)
    out = torch.zeros(*d.shape[:2], n_rows + 1, d.shape[3])
    at = spare.reshape(*d.shape[:3], 1).expand_as(d)
    return out.scatter_add(2, at, d)[:, :, :n_rows]


def set_rows_back(node: Tensor, d: T, ids: T) -> T:
    reps = (d.shape[0] // ids.shape[1], d.shape[1] // ids.shape[2], 1)
    at = torch.tile(ids[0], reps)
    padded = F.pad(d, (0, 0, 0, 1))
    at = torch.where((at < 0) | (at >= d.shape[2]), d.shape[2], at)
    return torch.gather(padded, 2, at[..., None].expand(*at.shape, d.shape[3]))


def view_back(node: Tensor, d: T) -> T:
    p = node.params
    zeros = torch.zeros(1 + sum((n - 1) * (step // 4) for n, step in zip(p.ne, p.nb)))
    strides = [n // 4 for n in (*p.view_nb[::-1], p.nb[0])]
    grid = [torch.arange(n) * step for n, step in zip(d.shape, strides)]
    at = p.offs // 4 + sum(g.reshape([-1 if k == i else 1 for k in range(4)]) for i, g in enumerate(grid))
    zeros.put_(at, d.contiguous(), accumulate=True)
    return torch.as_strided(zeros, node.shape, [n // 4 for n in p.nb[::-1]])


def rope_back(node: Tensor, d: T, positions: T, factors: T | None = None) -> T:
    p = node.params
    theta, magnitude = rope_frequencies(p, None if factors is None else factors.flatten().tolist())
    angle = torch.outer(positions.flatten().double(), torch.tensor(theta, dtype=torch.float64))[None, :, None]
    cos, sin = (f(angle).float() * magnitude for f in (torch.cos, torch.sin))
    head = d[..., : p.n_dims]
    x, y = (head[..., ::2], head[..., 1::2]) if p.mode == "normal" else head.chunk(2, -1)
    turned = (x * cos + y * sin, y * cos - x * sin)
    joined = torch.stack(turned, -1).flatten(-2) if p.mode == "normal" else torch.cat(turned, -1)
    return torch.cat((joined, d[..., p.n_dims :]), -1)


def out_prod(node: Tensor, a: T, b: T, rounded: Round) -> T:
    grouped = rounded(b).reshape(a.shape[0], b.shape[0] // a.shape[0], a.shape[1], -1, *b.shape[2:])
    found: T = torch.einsum("xyrm,xiyjrp->xiyjpm", rounded(a), grouped)
    return found.reshape(node.shape)


def mul_mat_id_back(node: Tensor, weights: T, d: T, ids: T, rounded: Round) -> T:
    at = ids.reshape(node.shape[1:3])
    outside = (at < 0) | (at >= weights.shape[1])
    chosen = rounded(weights)[0, at.masked_fill(outside, 0)]  # [tokens, slots, m, k]
    found = (rounded(d)[0, :, :, None] @ chosen)[:, :, 0]
    return found.masked_fill(outside[..., None], math.nan)[None]


def out_prod_id(node: Tensor, x: T, d: T, ids: T) -> T:
    picked = (ids.reshape(d.shape[1:3])[..., None] == torch.arange(node.ne[2])).float()
    found: T = torch.einsum("tse,tsm,tsk->emk", picked, d[0], x[0].expand(d.shape[1], d.shape[2], -1))
    return found[None]


def cross_entropy_loss(node: Tensor, logits: T, labels: T) -> T:
    rows = logits.numel() // logits.shape[-1]
    shares = logits - torch.logsumexp(logits, -1, keepdim=True)
    return (-(labels * shares).sum(-1).sum() / rows).reshape(node.shape)


def cross_entropy_loss_back(node: Tensor, d: T, logits: T, labels: T) -> T:
    shares = torch.exp(logits - torch.logsumexp(logits, -1, keepdim=True))
    return (shares * labels.sum(-1, keepdim=True) - labels) * (d / (logits.numel() // logits.shape[-1]))


def opt_step_sgd(node: Tensor, a: T, grad: T, hyper: T) -> T:
    alpha, wd = hyper.flatten()
    found: T = a - alpha * grad - alpha * wd * a
    return found


def opt_step_adamw(node: Tensor, a: T, m: T, v: T, hyper: T) -> T:
    alpha, eps, wd, m_h, v_h = hyper.flatten()
    found: T = a - alpha * (m * m_h / ((v * v_h) ** 0.5 + eps)) - alpha * wd * a
    return found


def drawn_order(draw: int) -> Order:
    """A random one, of the number of the draw: the same on every machine."""
    return lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(1_000_003 * draw + n)).tolist()


def in_order(rows: T, others: T, order: Order | None = None) -> T:
    """Products [s, h, i, j] of all rows [s, h, i, D] with all others [s, h, j, D], added up in one order on every
    processor, as a kernel's loop does: a library's order, and with it the error that is allowed, is the processor's.
    order: None for eights as they lie."""
    if order is not None:
        each = (rows[..., d, None] * others[..., None, :, d] for d in order(rows.shape[-1]))
        return reduce(torch.add, each)
    total = torch.zeros((*rows.shape[:3], others.shape[2]))
    for a, b in zip(torch.split(rows, 8, -1), torch.split(others, 8, -1)):
        total = total + torch.einsum("shid,shjd->shij", a, b)
    return total


def _times(weights: T, rows: T, order: Order | None) -> T:
    """Weights [s, h, i, j] times rows [s, h, j, D]."""
    if order is not None:
        return in_order(weights, rows.transpose(-1, -2), order)
    return torch.einsum("shij,shjd->shid", weights, rows)


def _delta(d_out: T, out: T, order: Order | None) -> T:
    terms = d_out * out
    return terms.sum(-1) if order is None else reduce(torch.add, terms[..., order(terms.shape[-1])].unbind(-1))


def attention_back(
    of: str, p: object, d_out: T, q: T, k: T, v: T, out: T, lse: T, d_lse: T | None, added: T, sinks: T | None,
    rounded: Round, bias: T | None = None, order: Order | None = None,
) -> T:  # fmt: skip
    """q [s, h, n_q, D]; k, v [s, g, n_kv, D]; out, d_out [s, h, n_q, D_v]; lse, d_lse [s, h, n_q]; added: slope * mask,
    -inf where nothing is seen. Products in the type that the operands suggest, as kernels have them. order: of all sums
    but those over heads; None as in_order() has it, or the library."""
    per = q.shape[1] // k.shape[1]
    hidden, delta = torch.isneginf(added), _delta(d_out, out, order)
    delta = delta if d_lse is None else delta - d_lse
    dead = torch.isneginf(lse)
    lse = torch.where(dead, 0.0, lse)
    if of == "sinks":
        assert sinks is not None
        share = torch.exp(sinks.reshape(1, -1, 1) - lse).masked_fill(dead, 0.0)
        return -(share * delta).sum((0, 2))
    seen = ~hidden.all(2).all(1)
    k, v = (torch.where(seen[:, None, :, None], rounded(t), 0.0).repeat_interleave(per, 1) for t in (k, v))
    s = in_order(rounded(q), k, order) * p.scale  # type: ignore[attr-defined]
    cap = p.softcap  # type: ignore[attr-defined]
    bend = torch.tanh(s / cap) if cap else torch.zeros(())
    s = bend * cap if cap else s
    slope: T | float = 1.0
    function = score_of(p)  # type: ignore[arg-type]
    if function is not None:
        slope, s = value(derivative(function), s), value(function, s)
    w = torch.exp(torch.where(hidden, 0.0, s + added) + (0.0 if bias is None else bias) - lse[..., None])
    w = w.masked_fill(hidden | dead[..., None], 0.0)
    rate = getattr(p, "dropout_p", 0.0)
    factor: T | float = 1.0
    if rate:
        keep = torch.from_numpy(kept(rate, p.seed, p.offset, w.shape))  # type: ignore[attr-defined]
        factor = keep.float() / (1.0 - left_out(rate))
    if of == "v":
        return _shared(_times(rounded(w * factor).transpose(-1, -2), rounded(d_out), order), per)
    d_w = in_order(rounded(d_out), v, order) * factor
    d_s = w * (d_w - delta[..., None])
    if of == "attn_bias":
        return d_s
    slope = torch.where(w == 0.0, 0.0, slope) if function is not None else 1.0
    d_s = rounded(d_s * (1.0 - bend * bend) * slope * p.scale)  # type: ignore[attr-defined]
    if of == "q":
        return _times(d_s, k, order)
    return _shared(_times(d_s.transpose(-1, -2), rounded(q), order), per)


def _shared(each: T, per: int) -> T:
    return each.reshape(each.shape[0], -1, per, *each.shape[2:]).sum(2)


def flash_attn_back(
    rounded: Round, node: Tensor, d_out: T, q: T, k: T, v: T, out: T, lse: T, mask: T | None = None,
    sinks: T | None = None, attn_bias: T | None = None, d_lse: T | None = None, *, order: Order | None = None,
) -> T:  # fmt: skip
    n_seq, n_head, n_q, _ = q.shape
    p, n_kv = node.params.attn, k.shape[2]
    added = torch.zeros(n_seq, n_head, n_q, n_kv)
    if mask is not None:
        slopes = torch.tensor(alibi_slopes(n_head, p.max_bias))[None, :, None, None]
        added = _tile(mask, n_seq, n_head) * slopes
    bias = None if attn_bias is None else _tile(attn_bias, n_seq, n_head)
    rows = [None if t is None else t[0].transpose(1, 2) for t in (lse, d_lse)]
    assert rows[0] is not None
    found = attention_back(
        node.params.of, p, d_out.transpose(1, 2), q, k, v, out.transpose(1, 2), rows[0], rows[1], added, sinks,
        rounded, bias, order,
    )  # fmt: skip
    if node.params.of == "attn_bias":
        b3, b2 = node.shape[:2]
        found = found.reshape(n_seq // b3, b3, n_head // b2, b2, n_q, n_kv).sum(0).sum(1)
    return found.reshape(node.shape)


def _tile(mask: T, n_seq: int, n_head: int) -> T:
    return torch.tile(mask, (n_seq // mask.shape[0], n_head // mask.shape[1], 1, 1))


def flash_attn_varlen_back(
    rounded: Round, node: Tensor, d_out: T, q: T, k: T, v: T, out: T, lse: T, q_starts: T, k_starts: T,
    sinks: T | None = None, d_lse: T | None = None, *, order: Order | None = None,
) -> T:  # fmt: skip
    """All sequences at once: a key is hidden from the queries of others."""
    p, n_q, n_k = node.params.attn, q.shape[2], k.shape[2]
    firsts, keys = q_starts.flatten(), k_starts.flatten()
    of_q = torch.bucketize(torch.arange(n_q), firsts, right=True) - 1
    of_k = torch.bucketize(torch.arange(n_k), keys, right=True) - 1
    last = len(firsts) - 2
    own = of_q.clamp(max=last)
    position = (keys[1:] - keys[:-1])[own] - (firsts[1:] - firsts[:-1])[own] + torch.arange(n_q) - firsts[own]
    behind = position[:, None] - (torch.arange(n_k) - keys[of_k.clamp(max=last)])
    hidden = (of_q[:, None] != of_k) | (of_q[:, None] > last) | (p.causal & (behind < 0))
    hidden = hidden | ((p.window > 0) & (behind >= p.window))
    slopes = torch.tensor(alibi_slopes(q.shape[1], p.max_bias))[None, :, None, None]
    added = -behind.abs().float() * slopes if p.max_bias else torch.zeros(1, q.shape[1], n_q, n_k)
    added = added.masked_fill(hidden, -math.inf)
    rows = [None if t is None else t[0].transpose(1, 2) for t in (lse, d_lse)]
    assert rows[0] is not None
    nobody = (of_q > last)[None, None]
    d_out, out = (t.transpose(1, 2).masked_fill(nobody[..., None], 0.0) for t in (d_out, out))
    d_rows = None if rows[1] is None else rows[1].masked_fill(nobody, 0.0)
    found = attention_back(node.params.of, p, d_out, q, k, v, out, rows[0], d_rows, added, sinks, rounded, order=order)
    return found.reshape(node.shape)
