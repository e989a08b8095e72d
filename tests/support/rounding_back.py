"""The part of rounding.py for gradients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graphrt.tensor import Tensor
from support.reference64 import REFERENCE64
from support.reference64_back import Head, back_heads, packed_heads, slopes
from support.rounding import FUNCTION, ROUNDING, of_decoding, of_sum, variance
from support.score64 import of_slope, scored

Array = npt.NDArray[np.generic]


@variance("REPEAT_BACK")
def repeat_back(node: Tensor, expected: Array, d: Array) -> Array:
    n = max(d.size // expected.size, 1)
    return of_sum(REFERENCE64["REPEAT_BACK"](node, d**2), expected, n)


@variance("GET_ROWS_BACK")
def get_rows_back(node: Tensor, expected: Array, d: Array, ids: Array) -> Array:
    counts = REFERENCE64["GET_ROWS_BACK"](node, np.ones_like(d), ids)
    return of_sum(REFERENCE64["GET_ROWS_BACK"](node, d**2, ids), expected, counts)


@variance("VIEW_BACK")
def view_back(node: Tensor, expected: Array, d: Array) -> Array:
    counts = REFERENCE64["VIEW_BACK"](node, np.ones_like(d))
    return of_sum(REFERENCE64["VIEW_BACK"](node, d**2), expected, counts)


@variance("SET_ROWS_BACK")
def set_rows_back(node: Tensor, expected: Array, d: Array, ids: Array) -> Array:
    return np.zeros_like(expected)


def _of_slope(kind: str, a: Array) -> Array:
    """Of a derivative: its argument and its parts are rounded. The parts are at most as large as 1 + |a|, and where the
    function is flat they cancel; exp's is as large as itself."""
    made, moved = slopes(kind, a), slopes(kind, a * (1 + 2.0**-24))
    parts = (1.0 + np.minimum(np.abs(a), 10.0)) ** 2
    if kind == "exp":
        parts = made**2
    elif kind == "relu":
        parts = np.zeros_like(a)
    return (moved - made) ** 2 + 2 * FUNCTION * parts


@variance("SILU_BACK", "UNARY_BACK")
def unary_back(node: Tensor, expected: Array, d: Array, a: Array) -> Array:
    kind = "silu" if node.params is None else node.params.kind
    return d**2 * _of_slope(kind, a) + 2 * ROUNDING * expected**2


@variance("RMS_NORM_BACK")
def rms_norm_back(node: Tensor, expected: Array, d: Array, a: Array) -> Array:
    """r d less a c, c = r^3 mean(d a): both have the relative error of r's energy, and c that of a sum."""
    n = a.shape[-1]
    square = (a**2).mean(-1, keepdims=True) + node.params.eps
    quartic, energy = (a**4).sum(-1, keepdims=True), (a**2).sum(-1, keepdims=True)
    of_square = (of_sum(quartic, energy, n) + ROUNDING * quartic) / n**2 / square**2
    terms = d * a
    total = terms.sum(-1, keepdims=True)
    of_total = of_sum((terms**2).sum(-1, keepdims=True), total, n) + ROUNDING * (terms**2).sum(-1, keepdims=True)
    along = a**2 / square**3
    first, second = d**2 / square, along * (total / n) ** 2
    return (of_square + 8 * ROUNDING) * (first + 4 * second) + along * of_total / n**2


@variance("ROPE_BACK")
def rope_back(node: Tensor, expected: Array, d: Array, positions: Array, factors: Array | None = None) -> Array:
    from support.rounding import rope

    return rope(node, expected, d, positions, factors)


@variance("SOFT_MAX_BACK")
def soft_max_back(node: Tensor, expected: Array, d: Array, weights: Array) -> Array:
    terms = d * weights
    total, squares = terms.sum(-1, keepdims=True), (terms**2).sum(-1, keepdims=True)
    of_total = of_sum(squares, total, d.shape[-1]) + ROUNDING * squares
    within = (node.params.scale * weights) ** 2
    return within * (of_total + ROUNDING * (d - total) ** 2) + 4 * ROUNDING * expected**2


@variance("OUT_PROD")
def out_prod(node: Tensor, expected: Array, a: Array, b: Array) -> Array:
    out, of_a = np.empty_like(expected), of_decoding(node.src[0], a)
    r3, r2 = b.shape[0] // a.shape[0], b.shape[1] // a.shape[1]
    for i3, i2 in np.ndindex(*b.shape[:2]):
        x, y, decoding = a[i3 // r3, i2 // r2], b[i3, i2], of_a[i3 // r3, i2 // r2]
        squares = (y**2).T @ x**2
        out[i3, i2] = of_sum(squares, expected[i3, i2], len(x)) + 2 * ROUNDING * squares + (y**2).T @ decoding
    return out


@variance("MUL_MAT_ID_BACK")
def mul_mat_id_back(node: Tensor, expected: Array, weights: Array, d: Array, ids: Array) -> Array:
    out, of_w = np.zeros_like(expected), of_decoding(node.src[0], weights)
    for t, slot in np.ndindex(*expected.shape[1:3]):
        e = int(ids[0, 0, t, slot])
        if 0 <= e < weights.shape[1]:
            y = d[0, t, slot] ** 2
            squares = y @ weights[0, e] ** 2
            made = of_sum(squares, expected[0, t, slot], len(y)) + 2 * ROUNDING * squares
            out[0, t, slot] = made + y @ of_w[0, e]
    return out


@variance("OUT_PROD_ID")
def out_prod_id(node: Tensor, expected: Array, x: Array, d: Array, ids: Array) -> Array:
    made = REFERENCE64["OUT_PROD_ID"]
    squares, counts = made(node, x**2, d**2, ids), made(node, np.ones_like(x), np.ones_like(d), ids)
    return of_sum(squares, expected, np.maximum(counts, 1)) + 2 * ROUNDING * squares


def _of_log_shares(logits: Array) -> Array:
    """Of the log of each share: logits less the largest, and the log of a sum."""
    x = logits - logits.max(-1, keepdims=True)
    total = np.exp(x).sum(-1, keepdims=True)
    powers = (np.exp(2 * x) * (FUNCTION + ROUNDING * x**2)).sum(-1, keepdims=True)
    of_total = (of_sum(np.exp(2 * x).sum(-1, keepdims=True), total, logits.shape[-1]) + powers) / total**2
    return 2 * ROUNDING * x**2 + of_total + FUNCTION * np.log(total) ** 2 + ROUNDING * (x - np.log(total)) ** 2


@variance("CROSS_ENTROPY_LOSS")
def cross_entropy_loss(node: Tensor, expected: Array, logits: Array, labels: Array) -> Array:
    rows = logits.size // logits.shape[-1]
    x = logits - logits.max(-1, keepdims=True)
    terms = labels * (x - np.log(np.exp(x).sum(-1, keepdims=True)))
    made = of_sum((terms**2).sum(), terms.sum(), terms.size) + (2 * ROUNDING * terms**2).sum()
    return ((made + (labels**2 * _of_log_shares(logits)).sum()) / rows**2).reshape(expected.shape)


@variance("CROSS_ENTROPY_LOSS_BACK")
def cross_entropy_loss_back(node: Tensor, expected: Array, d: Array, logits: Array, labels: Array) -> Array:
    rows = logits.size // logits.shape[-1]
    x = logits - logits.max(-1, keepdims=True)
    total = labels.sum(-1, keepdims=True)
    shares = np.exp(x) / np.exp(x).sum(-1, keepdims=True) * total
    of_labels = of_sum((labels**2).sum(-1, keepdims=True), total, logits.shape[-1]) / np.maximum(total**2, 1e-300)
    own = shares**2 * (_of_log_shares(logits) + FUNCTION + of_labels + 4 * ROUNDING)
    return own * (float(d.reshape(-1)[0]) / rows) ** 2 + 4 * ROUNDING * expected**2


@variance("OPT_STEP_SGD")
def opt_step_sgd(node: Tensor, expected: Array, a: Array, grad: Array, hyper: Array) -> Array:
    alpha, _ = hyper.reshape(-1)
    return ROUNDING * (4 * a**2 + 2 * (alpha * grad) ** 2 + expected**2)


@variance("OPT_STEP_ADAMW")
def opt_step_adamw(node: Tensor, expected: Array, a: Array, m: Array, v: Array, hyper: Array) -> Array:
    alpha, eps, _, m_h, v_h = hyper.reshape(-1)
    change = alpha * m * m_h / (np.sqrt(v * v_h) + eps)
    return ROUNDING * (4 * a**2 + 8 * change**2 + expected**2)


# -- attention


class Errors:
    """Variances of what a Head has. of_weights: of P, relative; of_added: of P * score; of_logits: of scale * dS."""

    def __init__(self, head: Head, p: object) -> None:
        scale, cap = p.scale, p.softcap  # type: ignore[attr-defined]
        squares = head.q**2 @ (head.k**2).T
        of_logits = scale**2 * (of_sum(squares, head.logits / scale, head.q.shape[-1]) + 2 * ROUNDING * squares)
        of_logits = of_logits + 2 * ROUNDING * head.logits**2
        of_bent = of_logits * head.bend**2 + (3 * FUNCTION * head.bent**2 if cap else 0.0)
        found = scored(p, head.unscored, head.s, head.h, head.keys)
        of_bent = of_bent if found is None else of_bent + found.var
        bent, x = (np.where(np.isneginf(t), 0.0, t) for t in (head.bent, head.x))  # where a score function hides
        sums = (bent + head.added) ** 2 + (bent + head.added + head.bias) ** 2
        of_x = of_bent + ROUNDING * (2 * head.added**2 + sums + 2 * x**2)
        self.of_weights = of_x + FUNCTION
        of_v = head.d_out**2 @ (head.v**2).T
        n = head.d_out.shape[-1]
        of_v = of_sum(of_v, head.of_v, n) + 2 * ROUNDING * of_v
        of_delta = of_sum(head.squares, head.delta, n) + 2 * ROUNDING * head.squares
        self.of_delta = of_delta + ROUNDING * head.delta**2
        of_score = head.factor**2 * (of_v + 2 * ROUNDING * head.of_v**2) + self.of_delta[:, None]
        of_score = of_score + ROUNDING * head.score**2
        self.of_added = head.weights**2 * (of_score + head.score**2 * (self.of_weights + 2 * ROUNDING))
        flat = head.bend * scale
        bent_part = (head.d_added * scale) ** 2 * (8 * FUNCTION + 4 * of_logits / cap**2) if cap else 0.0
        if found is not None:
            slope = of_slope(p, head.unscored, of_logits, head.s, head.h, head.keys)
            bent_part = bent_part + (head.d_added * scale) ** 2 * slope
        self.of_logits = self.of_added * flat**2 + bent_part + 3 * ROUNDING * head.d_logits**2


def _of_part(of: str, head: Head, p: object, sinks: Array | None) -> Array:
    """The variance of what a head gives to a gradient, and of adding it up."""
    errors = Errors(head, p)
    if of == "q":
        squares = head.d_logits**2 @ head.k**2
        return (
            errors.of_logits @ head.k**2 + of_sum(squares, head.d_logits @ head.k, len(head.keys)) + squares * ROUNDING
        )
    if of == "k":
        squares = (head.d_logits**2).T @ head.q**2
        made = of_sum(squares, head.d_logits.T @ head.q, len(head.q)) + squares * ROUNDING
        return errors.of_logits.T @ head.q**2 + made
    if of == "v":
        weights = head.weights * head.factor
        squares = (weights**2).T @ head.d_out**2
        made = of_sum(squares, weights.T @ head.d_out, len(head.q)) + 2 * squares * ROUNDING
        return (weights**2 * (errors.of_weights + 2 * ROUNDING)).T @ head.d_out**2 + made
    if of == "attn_bias":
        return errors.of_added
    safe = np.where(head.dead, 0.0, head.lse)
    x = float(sinks.reshape(-1)[head.h]) - safe  # type: ignore[union-attr]
    share = np.where(head.dead, 0.0, np.exp(x))
    terms = share * head.delta
    own = share**2 * errors.of_delta + terms**2 * (2 * ROUNDING * x**2 + FUNCTION + 2 * ROUNDING)
    return own.sum() + of_sum((terms**2).sum(), terms.sum(), len(terms))


def _gather(out: Array, of: str, head: Head, part: Array, group: int, where: tuple[Array, Array]) -> None:
    queries, keys = where
    s, h, g = head.s, head.h, head.h // group
    if of == "q":
        out[s, h, queries] += part
    elif of in ("k", "v"):
        out[s, g, keys[head.keys]] += part
    elif of == "attn_bias":
        out[s % out.shape[0], h % out.shape[1]][:, head.keys] += part
    else:
        out.reshape(-1)[h] += part


@variance("FLASH_ATTN_BACK")
def flash_attn_back(
    node: Tensor, expected: Array, d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
    mask: Array | None = None, sinks: Array | None = None, attn_bias: Array | None = None, d_lse: Array | None = None,
) -> Array:  # fmt: skip
    found, p, group, of = np.zeros_like(expected), node.params, q.shape[1] // k.shape[1], node.params.of
    where = (np.arange(q.shape[2]), np.arange(k.shape[2]))
    for head in back_heads(node, d_out, q, k, v, out, lse, mask, attn_bias, d_lse):
        _gather(found, of, head, _of_part(of, head, p.attn, sinks), group, where)
    return found + group * ROUNDING * expected**2


@variance("FLASH_ATTN_VARLEN_BACK")
def flash_attn_varlen_back(
    node: Tensor, expected: Array, d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, q_starts: Array,
    k_starts: Array, sinks: Array | None = None, d_lse: Array | None = None,
) -> Array:  # fmt: skip
    found, p, group, of = np.zeros_like(expected), node.params, q.shape[1] // k.shape[1], node.params.of
    for head, where in packed_heads(node, d_out, q, k, v, out, lse, q_starts, k_starts, d_lse):
        _gather(found, of, head, _of_part(of, head, p.attn, sinks), group, where)
    return found + group * ROUNDING * expected**2
