"""The part of rounding.py for SOFT_MAX and attention: an error of a logit is a relative error of its weight.

With weights w of exp(x), x a logit less the largest, d w_i = w_i (d x_i - sum_j w_j d x_j): what all logits of a row
have in common drops out, and so does everything where one weight is all there is. Large logits are rounded coarsely,
and so are small ones beside a large sink, whose difference to it is what is raised to a power.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from graphrt.tensor import Tensor
from support.reference64 import alibi_slope, gathered, key_rows, of_heads, varlen_sequences
from support.reference64_back import dropout_factor
from support.rounding import FUNCTION, ROUNDING, of_decoding, of_products, of_sum, variance
from support.score64 import scored

Array = npt.NDArray[np.generic]


class Rows:
    """What softmax makes of rows of logits [n_q, n] with the variance of each, and of that head's sink (-inf: none).

    weights, of_x: [n_q, n]; the rest [n_q, 1]. of_x: the variance of x; of_total: that of the sum of powers, relative;
    shared: that of x for all keys of a row together, as when the largest logit of all keys is found before the sink.
    """

    def __init__(self, logits: Array, of_logits: Array, sink: float) -> None:
        seen = ~np.isneginf(logits)
        top = np.maximum(logits.max(-1, keepdims=True, initial=-np.inf), sink)
        top = np.where(np.isneginf(top), 0.0, top)
        x = np.where(seen, logits - top, 0.0)
        powers = np.where(seen, np.exp(x), 0.0)
        total = powers.sum(-1, keepdims=True) + np.exp(sink - top)
        total = np.where(total == 0, 1.0, total)
        self.top, self.total, self.weights = top, total, powers / total
        self.of_x = np.where(seen, of_logits + 2 * ROUNDING * x**2 + FUNCTION, 0.0)
        n = seen.sum(-1, keepdims=True) + 1
        self.of_total = of_sum((powers**2).sum(-1, keepdims=True), total, n) / total**2
        self.kept = self.weights.sum(-1, keepdims=True)
        self.shared = ROUNDING * (self.weights * x**2).sum(-1, keepdims=True) / np.maximum(self.kept, 1e-300)
        self.n = n

    def of_weights(self) -> Array:
        """The variance of each weight."""
        w, others = self.weights, (self.weights**2 * self.of_x).sum(-1, keepdims=True)
        own = np.maximum(self.of_x * (1 - 2 * w), 0.0) + others
        return w**2 * (own + self.of_total + self.shared * (1 - self.kept) ** 2 + 2 * ROUNDING)

    def of_mean(self, v: Array, out: Array, factor: Array | float = 1.0) -> Array:
        """The variance of the values' [n, d] mean by weight, out [n_q, d]. factor: dropout's, of the weights."""
        w = self.weights
        a = w**2 * self.of_x
        moved = (a * factor**2) @ v**2 - 2 * out * ((a * factor) @ v) + out**2 * a.sum(-1, keepdims=True)
        squares = (w * factor) ** 2 @ v**2
        common = self.of_total + self.shared * (1 - self.kept) ** 2 + 2 * ROUNDING
        return np.maximum(moved, 0) + out**2 * common + of_sum(squares, out, self.n) + 2 * ROUNDING * squares

    def of_lse(self) -> Array:
        """The variance of the log of the sum of powers, [n_q, 1]."""
        log = np.log(self.total)
        inside = (self.weights**2 * self.of_x).sum(-1, keepdims=True) + self.of_total + self.shared * self.kept**2
        return inside + FUNCTION * log**2 + ROUNDING * ((self.top + log) ** 2 + self.top**2)


def _with_mask(logits: Array, of_logits: Array, mask: Array | None, slope: float) -> tuple[Array, Array]:
    """Logits with slope times mask added, and their variance; -inf of the mask stays."""
    if mask is None:
        return logits, of_logits
    seen = ~np.isneginf(mask)
    bias = slope * np.where(seen, mask, 0.0)
    total = np.where(seen, logits + bias, -np.inf)
    return total, of_logits + ROUNDING * np.where(seen, 2 * bias**2 + (logits + bias) ** 2, 0.0)


def _sink(sinks: Array | None, head: int) -> float:
    return float(sinks.reshape(-1)[head]) if sinks is not None else -np.inf


@variance("SOFT_MAX")
def soft_max(node: Tensor, expected: Array, a: Array, mask: Array | None = None, sinks: Array | None = None) -> Array:
    out = np.zeros_like(expected)
    p, n_q = node.params, a.shape[2]
    for s, h in np.ndindex(*a.shape[:2]):
        logits = a[s, h] * p.scale
        part = mask[s % mask.shape[0], h % mask.shape[1], :n_q] if mask is not None else None
        slope = alibi_slope(h, a.shape[1], p.max_bias)
        out[s, h] = Rows(*_with_mask(logits, 2 * ROUNDING * logits**2, part, slope), _sink(sinks, h)).of_weights()
    return out


def _attention(
    node: Tensor, q: Array, k: Array, mask: Array | None, sinks: Array | None, attn_bias: Array | None = None,
    first: tuple[int, int] = (0, 0),
) -> Iterator[tuple[int, int, Array, Rows]]:  # fmt: skip
    """(sequence, head, keys that some query sees, their rows) of every head. first: as reference64's."""
    p = node.params
    n_head = q.shape[1]
    k = key_rows(p, k, q.shape[3])
    group, of_k = n_head // k.shape[1], of_decoding(node.src[1], np.nan_to_num(k, nan=0.0, posinf=0.0, neginf=0.0))
    for s, h in np.ndindex(*q.shape[:2]):
        part = mask[s % mask.shape[0], h % mask.shape[1]] if mask is not None else None
        keys = np.arange(k.shape[2]) if part is None else np.flatnonzero(~np.isneginf(part).all(0))
        of_keys = of_k[s, h // group, keys]
        logits = q[s, h] @ k[s, h // group, keys].T * p.scale
        of_logits = p.scale**2 * of_products(k[s, h // group, keys], q[s, h], of_keys) + 2 * ROUNDING * logits**2
        if p.softcap > 0:
            capped = np.tanh(logits / p.softcap)
            of_logits = (1 - capped**2) ** 2 * (of_logits + ROUNDING * logits**2)
            logits = p.softcap * capped
            of_logits += (FUNCTION + ROUNDING) * logits**2
        found = scored(p, logits, s + first[0], h, keys, first[1])
        if found is not None:
            logits, of_logits = found.x, of_logits * found.d**2 + found.var
        if attn_bias is not None:
            logits = logits + attn_bias[s % attn_bias.shape[0], h % attn_bias.shape[1]][:, keys]
            of_logits = of_logits + ROUNDING * logits**2
        slope = alibi_slope(h, n_head, p.max_bias)
        masked = _with_mask(logits, of_logits, part[:, keys] if part is not None else None, slope)
        yield s, h, keys, Rows(*masked, _sink(sinks, h))


@variance("FLASH_ATTN_EXT")
def flash_attn_ext(
    node: Tensor, expected: Array, q: Array, k: Array, v: Array, mask: Array | None = None, sinks: Array | None = None,
    attn_bias: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None,
) -> Array:  # fmt: skip
    stored = of_heads(v_scale, q.shape[1])[0, :, 0] / node.params.out_scale
    return stored**2 * _of_means(node, expected, q * of_heads(k_scale, q.shape[1]), k, v, mask, sinks, attn_bias)


def _of_means(
    node: Tensor, like: Array, q: Array, k: Array, v: Array, mask: Array | None, sinks: Array | None,
    attn_bias: Array | None = None, first: tuple[int, int] = (0, 0),
) -> Array:  # fmt: skip
    """Of the weighted means of values, in the shape of like. first: as reference64's."""
    out = np.zeros_like(like)
    group = q.shape[1] // v.shape[1]
    for s, h, keys, rows in _attention(node, q, k, mask, sinks, attn_bias, first):
        values = v[s, h // group, keys]
        factor = dropout_factor(node.params, s, h, len(rows.weights), keys)
        of_v = rows.weights**2 @ of_decoding(node.src[2], values)
        out[s, :, h] = rows.of_mean(values, (rows.weights * factor) @ values, factor) + of_v
    return out


@variance("FLASH_ATTN_LSE")
def flash_attn_lse(
    node: Tensor, expected: Array, q: Array, k: Array, mask: Array | None = None, sinks: Array | None = None,
    attn_bias: Array | None = None,
) -> Array:  # fmt: skip
    out = np.zeros_like(expected)
    for s, h, _, rows in _attention(node, q, k, mask, sinks, attn_bias):
        out[0, s, :, h] = rows.of_lse()[:, 0]
    return out


@variance("FLASH_ATTN_VARLEN", "FLASH_ATTN_VARLEN_LSE")
def flash_attn_varlen(node: Tensor, expected: Array, *sources: Array | None) -> Array:
    """Of each sequence what it has as an attention by itself."""
    given = dict(zip(node.sources_by_name(), (s for s in sources if s is not None)))
    q, k, v, sinks = given["q"], given["k"], given.get("v"), given.get("sinks")
    out, at = np.zeros_like(expected), (given["q_starts"], given.get("lengths"), given.get("block_table"))
    for queries, places, mask, first in varlen_sequences(node, q, *at, given.get("k_starts"), given.get("mask")):
        shown = ~np.isneginf(mask).all((0, 1, 2))
        part, keys = q[:, :, queries], gathered(k, places, shown)
        if v is None:
            alone = np.empty((1, len(queries), q.shape[1], 1))
            for _, h, _, rows in _attention(node, part, keys, mask, sinks, first=first):
                alone[0, :, h] = rows.of_lse()
            out[0, 0, queries] = alone[0, ..., 0]
        else:
            like = np.empty((1, len(queries), q.shape[1], v.shape[-1]))
            values = gathered(v, places, shown)
            out[0, queries] = _of_means(node, like, part, keys, values, mask, sinks, first=first)[0]
    return out
