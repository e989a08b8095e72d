"""Each op once more in float32 torch, written apart from the reference: the error of an honest kernel.

low(node, sources) takes each source's numbers (float32, or int64) in torch's shape and gives the result. MUL_MAT rounds
both to the type that the weights suggest, attention q, k, v and the probabilities; all else is float32. For a backend
that rounds activations to 8 bits on purpose MUL_MAT does that instead, and takes the weights as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from graphrt.backends.cpu.score import score_of, value
from graphrt.judge import precision
from graphrt.ops.dropout import kept, left_out
from graphrt.ops.key_panels import ROWS
from graphrt.ops.rope import rope_frequencies
from graphrt.ops.sample_each import RowSettings
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor
from graphrt.tools.conformance.run import lowprec_back as back
from graphrt.tools.conformance.run.lowprec_drawn import DIFFERENCES

T = torch.Tensor
LowPrecision = Callable[..., T]

#: Activations that share a step where they are rounded to 8 bits.
GROUP = 32
_TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def low(node: Tensor, sources: list[T | None], rounded: str | None = None) -> T:
    """The result of a node in low precision, rounded to the node's type. rounded: see why_not_rounded()."""
    if rounded is not None:
        w, x, *ids = sources
        assert x is not None
        result = _expert_product(node, w, to_int8(x), ids[0]) if ids else _product(node, w, to_int8(x))
    else:
        result = LOW[node.op](node, *sources)
    kind = _TYPES.get(node.dtype.name, torch.float32)
    return result.to(kind).to(torch.float64)


class Drawn(NamedTuple):
    """An op whose error in float32 is mostly luck, so that one computation says little of another.

    once: (node, *sources, number of the draw) -> the result, by roundings that this number chooses; draws: how many are
    made; most: of no result with more elements, which average luck out by themselves.
    """

    once: Callable[..., T]
    draws: int
    most: float = math.inf


def _ordered(function: LowPrecision, draws: int, most: float = math.inf) -> Drawn:
    """By the order of adding up: terms are added one by one."""
    return Drawn(lambda node, *given: function(node, *given[:-1], order=back.drawn_order(given[-1])), draws, most)


def _drawn() -> dict[str, Drawn]:
    """By op. exp makes a score's rounding an error of a whole weight, so that attention's error is that of its few
    largest weights. A product of few elements has few to average, and so has a row of one element, where it is what is
    left of a difference: its roundings are drawn themselves, since there is no order to choose."""
    products = {"MUL_MAT": _ordered(_product, 4, 2**12), "MUL_MAT_ID": _ordered(_expert_product, 4, 2**12)}
    attention = {name: _ordered(LOW[name], 4, 2**15) for name in LOW if name in _ATTENTION}
    gradients = {name: _ordered(LOW[name], 16) for name in ("FLASH_ATTN_BACK", "FLASH_ATTN_VARLEN_BACK")}
    differences = {name: Drawn(function, 16, 2**12) for name, function in DIFFERENCES.items()}
    return {**products, **attention, **gradients, **differences}


_ATTENTION = ("FLASH_ATTN_EXT", "FLASH_ATTN_VARLEN", "FLASH_ATTN_LSE", "FLASH_ATTN_VARLEN_LSE")


def lows(node: Tensor, sources: list[T | None], rounded: str | None = None) -> T:
    """Results of a node in low precision, [draws, *shape]: low() alone, or where only float32's roundings are between a
    result and the exact one, and luck decides how large their sum is, some draws (see Drawn)."""
    drawn = DRAWN.get(node.op) if precision(node) == "f32" and rounded is None else None
    if drawn is None or math.prod(node.shape) > drawn.most:
        return low(node, sources, rounded)[None]
    return torch.stack([drawn.once(node, *sources, draw) for draw in range(drawn.draws)]).double()


def why_not_rounded(node: Tensor, rounded: str) -> str | None:
    """None if a backend may say that it rounds a node's activations so, else a sentence why not.

    It is a wider tolerance, so it is had by what it is meant for alone: products of quantized weights.
    """
    w = node["weights"] if node.op in ("MUL_MAT", "MUL_MAT_ID") else None
    if rounded != "int8":
        return f"the only type that activations may be rounded to on purpose is int8, got {rounded!r}"
    if w is None or not w.dtype.is_quantized or w.ne[0] % GROUP:
        return "activations may be rounded on purpose in products of quantized weights, in whole groups of 32"
    return None


def to_int8(x: T) -> T:
    """x, float32 [..., k], with each group of 32 rounded to multiples of its largest magnitude's 127th part."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    step = torch.div(groups.abs().amax(-1, keepdim=True), 127.0)
    codes = torch.div(groups, torch.where(step > 0, step, 1.0)).round()
    return (codes * step).reshape(x.shape)


def _tiled(b: T, a: T) -> T:
    return torch.tile(b, tuple(m // n for m, n in zip(a.shape, b.shape)))


def to_e4m3(x: T) -> T:
    """x, float32 [..., k], rounded to e4m3, each row times a power of two that takes its largest below 448: numbers
    that e4m3 has stay what they are."""
    size = x.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(torch.where(size > 0, 448.0 / size, 1.0))))
    return (x * scale).to(torch.float8_e4m3fn).to(torch.float32) / scale


def _rounding(node: Tensor) -> Callable[[T], T]:
    if precision(node) == "f8":
        return to_e4m3
    kind = _TYPES[precision(node)]
    return lambda x: x.to(kind).to(torch.float32)


def _mul_mat(node: Tensor, a: T, b: T) -> T:
    rounded = _rounding(node)
    return _product(node, rounded(a), rounded(b))


def _product(node: Tensor, a: T | None, b: T, order: back.Order | None = None) -> T:
    assert a is not None
    shared = (b.shape[0] // a.shape[0], b.shape[1] // a.shape[1])
    if order is not None:
        return back.in_order(b, a.repeat_interleave(shared[0], 0).repeat_interleave(shared[1], 1), order)
    grouped = b.reshape(a.shape[0], shared[0], a.shape[1], shared[1], *b.shape[2:])
    product: T = torch.einsum("xymk,xiyjnk->xiyjnm", a, grouped)
    return product.reshape(node.shape)


def _mul_mat_id(node: Tensor, a: T, b: T, ids: T) -> T:
    rounded = _rounding(node)
    return _expert_product(node, rounded(a), rounded(b), ids)


def _expert_product(node: Tensor, a: T | None, b: T, ids: T | None, order: back.Order | None = None) -> T:
    """Every token times every expert's matrix, of which each slot takes one."""
    assert a is not None and ids is not None
    _, n_tokens, n_used, m = node.shape
    if order is None:
        everyone = torch.einsum("emk,tsk->tsem", a[0], b[0])
    else:
        everyone = back.in_order(b.flatten(1, 2)[None], a.flatten(1, 2)[None], order)
        everyone = everyone.reshape(*b.shape[1:3], a.shape[1], m)
    everyone = everyone.expand(n_tokens, n_used, a.shape[1], m)
    return _of_expert(everyone, ids.reshape(n_tokens, n_used))[None]


def _of_expert(everyone: T, ids: T) -> T:
    """[tokens, slots, n] of [tokens, slots, experts, n]; NaN where an id is none of theirs."""
    outside = (ids < 0) | (ids >= everyone.shape[2])
    at = ids.masked_fill(outside, 0)[..., None, None].expand(*ids.shape, 1, everyone.shape[3])
    return torch.gather(everyone, 2, at)[:, :, 0].masked_fill(outside[..., None], math.nan)


def _add_id(node: Tensor, a: T, b: T, ids: T) -> T:
    _, n_tokens, n_used, n = node.shape
    everyone = b[0, 0].expand(n_tokens, n_used, *b.shape[2:])
    return torch.add(_of_expert(everyone, ids.reshape(n_tokens, n_used))[None], a)


def _mask_of(mask: T, n_head: int, n_seq: int, max_bias: float) -> T:
    """[n_seq, n_head, n_q, n_kv], slopes included; -inf stays."""
    heads = torch.arange(n_head) % mask.shape[1]
    seqs = torch.arange(n_seq) % mask.shape[0]
    slopes = torch.tensor(alibi_slopes(n_head, max_bias))[None, :, None, None]
    return mask[seqs][:, heads] * slopes


def _scores(
    node: Tensor, q: T, k: T, mask: T | None, first: tuple[int, int] = (0, 0), order: back.Order | None = None
) -> T:
    """Logits [n_seq, n_head, n_q, n_kv]. first: number of the first sequence, position of its first query."""
    p, rounded = node.params, _rounding(node)
    n_seq, n_head, n_q, d = q.shape
    if getattr(p, "k_layout", ROWS) != ROWS:  # [n_seq, heads, panels, n_kv, x] to rows
        k = k.reshape(n_seq, -1, d // k.shape[3], *k.shape[2:]).permute(0, 1, 3, 2, 4).flatten(3)
    per = n_head // k.shape[1]
    grouped = rounded(q).reshape(n_seq, k.shape[1], per * n_q, d)
    s = back.in_order(grouped, rounded(k), order).reshape(n_seq, n_head, n_q, -1) * p.scale
    if p.softcap > 0:
        s = torch.tanh(s / p.softcap) * p.softcap
    function = score_of(p)
    s = s if function is None else value(function, s, *first)
    if mask is None:
        return s
    bias = _mask_of(mask, n_head, n_seq, p.max_bias)
    masked: T = torch.where(torch.isneginf(bias), bias, s + bias)
    return masked


def _with_sink(s: T, sinks: T | None) -> T:
    """The logits with the sink as one more column, -inf where there is none."""
    shape = (*s.shape[:3], 1)
    column = torch.full(shape, -math.inf) if sinks is None else sinks.reshape(1, -1, 1, 1).expand(shape)
    return torch.cat((s, column), dim=-1)


def _flash_attn_ext(
    node: Tensor, q: T, k: T, v: T, mask: T | None = None, sinks: T | None = None, attn_bias: T | None = None,
    k_scale: T | None = None, v_scale: T | None = None, first: tuple[int, int] = (0, 0),
    order: back.Order | None = None,
) -> T:  # fmt: skip
    rounded = _rounding(node)
    q = q * _of_heads(k_scale, q.shape[1])
    s = _with_sink(_with_bias(_scores(node, q, k, mask, first, order), attn_bias), sinks)
    top = s.amax(-1, keepdim=True)
    e = torch.exp(s - torch.where(torch.isneginf(top), 0.0, top))
    total = e.sum(-1, keepdim=True)
    p = e[..., :-1]
    rate = getattr(node.params, "dropout_p", 0.0)
    if rate:
        keep = torch.from_numpy(kept(rate, node.params.seed, node.params.offset, p.shape))
        p = torch.where(keep, p / (1.0 - left_out(rate)), 0.0)
    p = rounded(p)
    n_seq, n_head, n_q, n_kv = p.shape
    values = torch.nan_to_num(rounded(v), 0.0).transpose(2, 3)
    out = back.in_order(p.reshape(n_seq, v.shape[1], -1, n_kv), values, order)
    out = out.reshape(n_seq, n_head, n_q, -1) / torch.where(total > 0, total, 1.0)
    out = out * _of_heads(v_scale, n_head) / getattr(node.params, "out_scale", 1.0)
    return out.permute(0, 2, 1, 3)


def _of_heads(scale: T | None, n_head: int) -> T:
    """What k or v are times of, for each of n_head query heads."""
    values = torch.ones(1) if scale is None else scale.flatten()
    return values.repeat_interleave(n_head // len(values)).reshape(1, n_head, 1, 1)


def _with_bias(s: T, attn_bias: T | None) -> T:
    if attn_bias is None:
        return s
    reps = (s.shape[0] // attn_bias.shape[0], s.shape[1] // attn_bias.shape[1], 1, 1)
    return torch.add(s, torch.tile(attn_bias, reps))


def _flash_attn_lse(
    node: Tensor, q: T, k: T, mask: T | None = None, sinks: T | None = None, attn_bias: T | None = None,
    order: back.Order | None = None,
) -> T:  # fmt: skip
    s = _with_bias(_scores(node, q, k, mask, order=order), attn_bias)
    lse = torch.logsumexp(_with_sink(s, sinks), dim=-1)
    return lse.permute(0, 2, 1).reshape(node.shape)


def _varlen(
    node: Tensor, q: T, q_starts: T, lengths: T | None, table: T | None, k_starts: T | None, mask: T | None
) -> Iterator[tuple[T, T, T, tuple[int, int]]]:
    """(its queries, the rows of its keys in pages put end to end, mask, its number and its first query's position) of
    each sequence that has both."""
    p, of = node.params, torch.bucketize(torch.arange(q.shape[2]), q_starts.flatten(), right=True) - 1
    for s in range(q_starts.numel() - 1):
        queries = (of == s).nonzero().flatten()
        if table is not None and lengths is not None:
            size = node["k"].ne[1]
            key = torch.arange(int(lengths.flatten()[s].clamp(0, table.shape[-1] * size)))
            rows = table[0, 0, s].clamp(min=0)[key // size] * size + key % size
        else:
            assert k_starts is not None
            first, end = k_starts.flatten()[s : s + 2].clamp(0, node["k"].ne[1]).tolist()
            rows = torch.arange(first, max(first, end))
        if len(queries) and len(rows):
            behind = (len(rows) - len(queries) + torch.arange(len(queries)))[:, None] - torch.arange(len(rows))
            hidden = ((behind < 0) & p.causal) | ((behind >= p.window) & (p.window > 0))
            bias = -behind.abs().float() if p.max_bias > 0 else torch.zeros(behind.shape)
            bias, first = bias[None, None], len(rows) - len(queries)
            if mask is not None:
                begin = first if p.mask_new else 0  # zeros before and behind the columns
                width = max(mask.shape[-1], len(rows) - begin)
                every = torch.nn.functional.pad(mask[:, :, queries], (max(begin, 0), width - mask.shape[-1]))
                bias = bias + every[..., max(-begin, 0) :][..., : len(rows)]
            yield queries, rows, bias.masked_fill(hidden, -math.inf), (s, first)


def _end_to_end(cache: T, rows: T, mask: T) -> T:
    """Rows of pages [n_pages, n_head_kv, page, D] put end to end, [1, n_head_kv, n, D]; of what is hidden zeros."""
    found = cache.transpose(1, 2).flatten(0, 1)[rows].transpose(0, 1)[None]
    return found.masked_fill(torch.isneginf(mask).all(2).all(1, keepdim=True)[..., None], 0.0)


def _flash_attn_varlen(
    node: Tensor, q: T, k: T, v: T, q_starts: T, lengths: T | None = None, table: T | None = None,
    k_starts: T | None = None, sinks: T | None = None, prefixes: T | None = None, mask: T | None = None,
    order: back.Order | None = None,
) -> T:  # fmt: skip
    out = torch.zeros(node.shape)
    for queries, rows, bias, first in _varlen(node, q, q_starts, lengths, table, k_starts, mask):
        keys, values = _end_to_end(k, rows, bias), _end_to_end(v, rows, bias)
        out[:, queries] = _flash_attn_ext(node, q[:, :, queries], keys, values, bias, sinks, first=first, order=order)
    return out


def _flash_attn_varlen_lse(
    node: Tensor, q: T, k: T, q_starts: T, lengths: T | None = None, table: T | None = None, k_starts: T | None = None,
    sinks: T | None = None, prefixes: T | None = None, mask: T | None = None, order: back.Order | None = None,
) -> T:  # fmt: skip
    out = torch.full(node.shape, -math.inf)
    if sinks is not None:
        out[0, 0, : int(q_starts.flatten()[-1])] = sinks.flatten()
    for queries, rows, bias, first in _varlen(node, q, q_starts, lengths, table, k_starts, mask):
        s = _scores(node, q[:, :, queries], _end_to_end(k, rows, bias), bias, first, order)
        out[0, 0, queries] = torch.logsumexp(_with_sink(s, sinks), dim=-1)[0].T
    return out


def _soft_max(node: Tensor, a: T, mask: T | None = None, sinks: T | None = None) -> T:
    s = a * node.params.scale
    if mask is not None:
        s = s + _mask_of(mask[:, :, : a.shape[2]], a.shape[1], a.shape[0], node.params.max_bias)
    s = _with_sink(s, sinks)
    empty = torch.isneginf(s).all(-1, keepdim=True)
    return torch.where(empty, 0.0, torch.softmax(s, dim=-1))[..., :-1]


def _rope(node: Tensor, a: T, positions: T, factors: T | None = None) -> T:
    p = node.params
    theta, magnitude = rope_frequencies(p, None if factors is None else factors.flatten().tolist())
    angle = torch.outer(positions.flatten().double(), torch.tensor(theta, dtype=torch.float64))
    turn = torch.polar(torch.full_like(angle, magnitude), angle).to(torch.complex64)[None, :, None]
    head, rest = a[..., : p.n_dims], a[..., p.n_dims :]
    shape = (*head.shape[:3], -1, 2) if p.mode == "normal" else (*head.shape[:3], 2, p.n_dims // 2)
    pairs = head.reshape(shape) if p.mode == "normal" else head.reshape(shape).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned if p.mode == "normal" else turned.transpose(-1, -2)
    return torch.cat((turned.reshape(head.shape), rest), dim=-1)


_UNARY: dict[str, Callable[[T], T]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "gelu_quick": lambda x: x / (1.0 + torch.exp(-1.702 * x)),
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "softplus": F.softplus,
}


#: Forms that torch differentiates where the others overflow.
_SMOOTH: dict[str, Callable[[T], T]] = {"gelu_quick": lambda x: x * torch.sigmoid(1.702 * x)}


def _glu(node: Tensor, a: T, b: T | None = None) -> T:
    p = node.params
    if b is None:
        n = a.shape[-1] // 2
        a, b = (a[..., n:], a[..., :n]) if p.swapped else (a[..., :n], a[..., n:])
    if p.kind == "swiglu_oai":
        gate = torch.clamp(a, max=p.limit)
        return (torch.clamp(b, -p.limit, p.limit) + 1.0) * gate / (1.0 + torch.exp(-p.alpha * gate))
    return _UNARY[{"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}[p.kind]](a) * b


def _rms_norm(node: Tensor, a: T) -> T:
    return a * torch.rsqrt(a.square().mean(-1, keepdim=True) + node.params.eps)


def _get_rows(node: Tensor, a: T, ids: T) -> T:
    index = ids.reshape(*node.shape[:3], 1).expand(node.shape)
    outside = (index < 0) | (index >= a.shape[2])
    return torch.gather(a, 2, index.masked_fill(outside, 0)).masked_fill(outside, math.nan)


def _penalize(
    node: Tensor, logits: T, slots: T, settings: T, biased: T, biases: T, past: T, n_past: T, allowed: T
) -> T:  # fmt: skip
    """All of a row at a time, by tables of the vocabulary's size."""
    n, size, out = logits.shape[-1], past.shape[-1], logits.clone()
    for row, slot, length in zip(out.view(-1, n), slots.flatten().tolist(), n_past.flatten().tolist()):
        s = RowSettings(*settings[0, 0, slot, : len(RowSettings.__dataclass_fields__)].tolist())
        n_biases, last = int(s.n_biases), range(max(0, length - min(int(s.last_n), size)), length)
        row += torch.zeros_like(row).index_add(0, biased[0, 0, slot, :n_biases], biases[0, 0, slot, :n_biases].to(row))
        bits = (allowed[0, 0, slot].repeat_interleave(32)[:n] >> (torch.arange(n) % 32)) & 1
        row.masked_fill_((bits == 0) & (s.masked != 0), -math.inf)
        said = torch.bincount(past[0, 0, slot, [p % size for p in last]], minlength=n)[:n]
        less = row * torch.where(row <= 0, s.repeat, 1 / s.repeat) - said * s.frequency - s.presence
        row.copy_(torch.where(said > 0, less, row))
    return out


def _added(parts: tuple[T | None, ...]) -> T:
    """In halves, as a tree of ranks adds up."""
    given = [a for a in parts if a is not None]
    while len(given) > 1:
        given = [*(a + b for a, b in zip(given[::2], given[1::2])), *given[len(given) // 2 * 2 :]]
    return given[0]


def _scattered(node: Tensor, total: T) -> T:
    start = sum(node.params.sizes[: node.params.rank])
    return total[..., start : start + node.ne[0]]


LOW: dict[str, LowPrecision] = {
    "PENALIZE": _penalize,
    "ADD": lambda node, a, b: torch.add(a, _tiled(b, a)),
    "SUB": lambda node, a, b: torch.sub(a, _tiled(b, a)),
    "MUL": lambda node, a, b: torch.mul(a, _tiled(b, a)),
    "DIV": lambda node, a, b: torch.mul(a, torch.reciprocal(_tiled(b, a))),
    "SCALE": lambda node, a: torch.add(torch.full_like(a, node.params.bias), a, alpha=node.params.scale),
    "CLAMP": lambda node, a: torch.clip(a, node.params.low, node.params.high),
    "SQR": lambda node, a: torch.square(a),
    "FILL": lambda node, a: torch.full_like(a, node.params.value),
    "SQRT": lambda node, a: torch.pow(a, 0.5),
    "UNARY": lambda node, a: _UNARY[node.params.kind](a),
    "GLU": _glu,
    "NORM": lambda node, a: F.layer_norm(a, a.shape[-1:], eps=node.params.eps),
    "RMS_NORM": _rms_norm,
    "L2_NORM": lambda node, a: F.normalize(a, dim=-1, eps=node.params.eps),
    "SUM_ROWS": lambda node, a: torch.einsum("abcd->abc", a)[..., None],
    "SOFT_MAX": _soft_max,
    "ROPE": _rope,
    "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _mul_mat_id,
    "ADD_ID": _add_id,
    "FLASH_ATTN_EXT": _flash_attn_ext,
    "FLASH_ATTN_LSE": _flash_attn_lse,
    "FLASH_ATTN_VARLEN": _flash_attn_varlen,
    "FLASH_ATTN_VARLEN_LSE": _flash_attn_varlen_lse,
    "GET_ROWS": _get_rows,
    "CONT": lambda node, a: a,
    "DUP": lambda node, a: a,
    "CONCAT": lambda node, a, b: torch.cat((a, b), dim=3 - node.params.dim),
    "ALL_REDUCE": lambda node, *parts: _added(parts),
    "ALL_GATHER": lambda node, *parts: torch.cat([a for a in parts if a is not None], dim=-1),
    "REDUCE_SCATTER": lambda node, *parts: _scattered(node, _added(parts)),
    "SEND": lambda node, a: a,
    "RECV": lambda node, after, sent: sent,
    "REPEAT": lambda node, a: torch.tile(a, tuple(m // n for m, n in zip(node.shape, a.shape))),
    "REPEAT_BACK": back.repeat_back,
    "GET_ROWS_BACK": back.get_rows_back,
    "SET_ROWS_BACK": back.set_rows_back,
    "VIEW_BACK": back.view_back,
    "SILU_BACK": lambda node, d, a: back.of_forward(F.silu, a, d),
    "UNARY_BACK": lambda node, d, a: back.of_forward(_SMOOTH.get(node.params.kind, _UNARY[node.params.kind]), a, d),
    "RMS_NORM_BACK": lambda node, d, a: back.of_forward(partial(_rms_norm, node), a, d),
    "ROPE_BACK": back.rope_back,
    "SOFT_MAX_BACK": lambda node, d, w: (d * w - w * (d * w).sum(-1, keepdim=True)) * node.params.scale,
    "OUT_PROD": lambda node, a, b: back.out_prod(node, a, b, _rounding(node)),
    "MUL_MAT_ID_BACK": lambda node, w, d, ids: back.mul_mat_id_back(node, w, d, ids, _rounding(node)),
    "OUT_PROD_ID": back.out_prod_id,
    "CROSS_ENTROPY_LOSS": back.cross_entropy_loss,
    "CROSS_ENTROPY_LOSS_BACK": back.cross_entropy_loss_back,
    "OPT_STEP_SGD": back.opt_step_sgd,
    "OPT_STEP_ADAMW": back.opt_step_adamw,
    "FLASH_ATTN_BACK": lambda node, *given, order=None: back.flash_attn_back(
        _rounding(node), node, *given, order=order),
    "FLASH_ATTN_VARLEN_BACK": lambda node, *given, order=None: back.flash_attn_varlen_back(
        _rounding(node), node, *given, order=order),
}  # fmt: skip
DRAWN = _drawn()
