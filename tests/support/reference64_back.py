"""The part of reference64.py for gradients: sums over what each element was read for, derivatives in other forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from graphrt.tensor import Tensor
from support.reference64 import _logistic, _rows, _yarn_share, alibi_slope, reference64
from support.score64 import scored

Array = npt.NDArray[np.generic]


# -- movement


@reference64("REPEAT_BACK")
def repeat_back(node: Tensor, d: Array) -> Array:
    out = np.zeros(node.shape, d.dtype)
    for i in np.ndindex(*d.shape[:3]):
        row = out[i[0] % out.shape[0], i[1] % out.shape[1], i[2] % out.shape[2]]
        for start in range(0, d.shape[3], row.size):
            row += d[i][start : start + row.size]
    return out


@reference64("GET_ROWS_BACK")
def get_rows_back(node: Tensor, d: Array, ids: Array) -> Array:
    out = np.zeros(node.shape, d.dtype)
    for i3, i2, i1 in np.ndindex(*d.shape[:3]):
        row = int(ids[0, i3, i2, i1])
        if 0 <= row < node.ne[1]:
            out[i3, i2, row] += d[i3, i2, i1]
    return out


@reference64("SET_ROWS_BACK")
def set_rows_back(node: Tensor, d: Array, ids: Array) -> Array:
    out = np.zeros(node.shape, d.dtype)
    for i3, i2, i1 in np.ndindex(*node.shape[:3]):
        row = int(ids[0, i3 % ids.shape[1], i2 % ids.shape[2], i1])
        if 0 <= row < d.shape[2]:
            out[i3, i2, i1] = d[i3, i2, row]
    return out


@reference64("VIEW_BACK")
def view_back(node: Tensor, d: Array) -> Array:
    """By the byte that each element of the view begins at."""
    p = node.params
    of_byte: dict[int, float] = {}
    for i3, i2, i1, i0 in np.ndindex(*d.shape):
        byte = p.offs + i3 * p.view_nb[2] + i2 * p.view_nb[1] + i1 * p.view_nb[0] + i0 * p.nb[0]
        of_byte[byte] = of_byte.get(byte, 0.0) + float(d[i3, i2, i1, i0])
    out = np.zeros(node.shape, d.dtype)
    for i3, i2, i1, i0 in np.ndindex(*out.shape):
        out[i3, i2, i1, i0] = of_byte.get(i3 * p.nb[3] + i2 * p.nb[2] + i1 * p.nb[1] + i0 * p.nb[0], 0.0)
    return out


# -- elements and rows


def _normal(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _gelu(x: float) -> float:
    """x times a logistic of u, with u twice the argument of tanh."""
    c = math.sqrt(2 / math.pi)
    s = _logistic(2 * c * (x + 0.044715 * x**3))
    return s + x * s * (1 - s) * 2 * c * (1 + 0.134145 * x * x)


def _gated(slope: float) -> Callable[[float], float]:
    """Of x times a logistic of slope x."""

    def derivative(x: float) -> float:
        s, other = _logistic(slope * x), _logistic(-slope * x)
        return s + slope * x * s * other

    return derivative


SLOPES: dict[str, Callable[[float], float]] = {
    "silu": _gated(1.0),
    "gelu": _gelu,
    "gelu_erf": lambda x: math.erfc(-x / math.sqrt(2)) / 2 + x * _normal(x),
    "gelu_quick": _gated(1.702),
    "relu": lambda x: 1.0 if x > 0 else 0.0,
    "tanh": lambda x: 1 / math.cosh(x) ** 2 if abs(x) < 300 else 0.0,
    "sigmoid": lambda x: _logistic(x) * _logistic(-x),
    "exp": math.exp,
    "softplus": _logistic,
}


def slopes(kind: str, a: Array) -> Array:
    return np.array([SLOPES[kind](float(x)) for x in a.reshape(-1)]).reshape(a.shape)


@reference64("SILU_BACK", "UNARY_BACK")
def unary_back(node: Tensor, d: Array, a: Array) -> Array:
    return d * slopes("silu" if node.params is None else node.params.kind, a)


@reference64("RMS_NORM_BACK")
def rms_norm_back(node: Tensor, d: Array, a: Array) -> Array:
    out = np.empty_like(d)
    for i, row in _rows(a):
        r = (np.dot(row, row) / row.size + node.params.eps) ** -0.5
        out[i] = r * d[i] - row * (r**3 / row.size * np.dot(row, d[i]))
    return out


@reference64("ROPE_BACK")
def rope_back(node: Tensor, d: Array, positions: Array, factors: Array | None = None) -> Array:
    """A turn's gradient is the turn back: each pair as a complex number by the conjugate."""
    p, out = node.params, d.copy()
    magnitude = p.attn_factor * (1 - 0.1 * math.log(p.freq_scale) if p.ext_factor else 1.0)
    for token, i in np.ndindex(d.shape[1], p.n_dims // 2):
        theta = int(positions.reshape(-1)[token]) / math.pow(p.freq_base, 2 * i / p.n_dims)
        theta /= 1.0 if factors is None else float(factors.reshape(-1)[i])
        share = _yarn_share(node, i) if p.ext_factor else 0.0
        angle = theta * (p.freq_scale * (1 - share) + share)
        x, y = (2 * i, 2 * i + 1) if p.mode == "normal" else (i, i + p.n_dims // 2)
        pair = (d[:, token, :, x] + 1j * d[:, token, :, y]) * magnitude * np.exp(-1j * angle)
        out[:, token, :, x], out[:, token, :, y] = pair.real, pair.imag
    return out


@reference64("SOFT_MAX_BACK")
def soft_max_back(node: Tensor, d: Array, weights: Array) -> Array:
    """The Jacobian, diag(w) - w w^T, times d."""
    out = np.empty_like(d)
    for i, w in _rows(weights):
        out[i] = node.params.scale * (w * d[i] - w * math.fsum(w * d[i]))
    return out


# -- products


@reference64("OUT_PROD")
def out_prod(node: Tensor, a: Array, b: Array) -> Array:
    out = np.empty(node.shape, b.dtype)
    r3, r2 = b.shape[0] // a.shape[0], b.shape[1] // a.shape[1]
    for i3, i2 in np.ndindex(*b.shape[:2]):
        out[i3, i2] = np.einsum("rm,rp->pm", a[i3 // r3, i2 // r2], b[i3, i2])
    return out


@reference64("MUL_MAT_ID_BACK")
def mul_mat_id_back(node: Tensor, weights: Array, d: Array, ids: Array) -> Array:
    out = np.full(node.shape, np.nan, d.dtype)
    for t, slot in np.ndindex(*node.shape[1:3]):
        expert = int(ids[0, 0, t, slot])
        if 0 <= expert < weights.shape[1]:
            out[0, t, slot] = np.einsum("mk,m->k", weights[0, expert], d[0, t, slot])
    return out


@reference64("OUT_PROD_ID")
def out_prod_id(node: Tensor, x: Array, d: Array, ids: Array) -> Array:
    out = np.zeros(node.shape, d.dtype)
    for t, slot in np.ndindex(*d.shape[1:3]):
        expert = int(ids[0, 0, t, slot])
        if 0 <= expert < node.ne[2]:
            out[0, expert] += np.outer(d[0, t, slot], x[0, t, slot % x.shape[2]])
    return out


# -- losses and steps


def log_shares(row: Array) -> Array:
    top = row.max()
    return row - (top + math.log(math.fsum(np.exp(row - top))))


@reference64("CROSS_ENTROPY_LOSS")
def cross_entropy_loss(node: Tensor, logits: Array, labels: Array) -> Array:
    each = [math.fsum(labels[i] * log_shares(row)) for i, row in _rows(logits)]
    return np.array(-math.fsum(each) / len(each)).reshape(node.shape)


@reference64("CROSS_ENTROPY_LOSS_BACK")
def cross_entropy_loss_back(node: Tensor, d: Array, logits: Array, labels: Array) -> Array:
    out = np.empty_like(logits)
    for i, row in _rows(logits):
        out[i] = (np.exp(log_shares(row)) * math.fsum(labels[i]) - labels[i]) * float(d.reshape(-1)[0])
    return out / (logits.size // logits.shape[-1])


@reference64("OPT_STEP_SGD")
def opt_step_sgd(node: Tensor, a: Array, grad: Array, hyper: Array) -> Array:
    alpha, wd = (float(h) for h in hyper.reshape(-1))
    return a - alpha * (grad + wd * a)


@reference64("OPT_STEP_ADAMW")
def opt_step_adamw(node: Tensor, a: Array, m: Array, v: Array, hyper: Array) -> Array:
    alpha, eps, wd, m_h, v_h = (float(h) for h in hyper.reshape(-1))
    return a - alpha * (m_h * m / (np.power(v_h * v, 0.5) + eps) + wd * a)


# -- attention


def philox(counter: list[int], seed: int) -> list[int]:
    """Four words, with Python's own integers."""
    c, k = counter, [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def planes(i: int, h: int, s: int, word: int, seed: int, offset: int) -> Array:
    """Numbers of 16 bits of a row's 32 weights that share a word, by their bits in it: all four calls."""
    found = [w for c in range(4) for w in philox([word + (c << 30), i, h + (s << 16), offset], seed)]
    return sum(((np.full(32, w) >> np.arange(32)) & 1) << (15 - n) for n, w in enumerate(found))  # type: ignore[return-value]


def dropout_rate(p: float) -> float:
    """What dropout_p is rounded to: 8 bits, of small ones 16."""
    steps = 256 if p >= 0.0625 else 65536
    return min(round(p * steps), steps - 1) / steps


def dropout_factor(p: object, s: int, h: int, n_q: int, keys: Array) -> Array:
    """What dropout multiplies the weights of one head with, [n_q, len(keys)]."""
    rate = dropout_rate(getattr(p, "dropout_p", 0.0))
    if rate == 0:
        return np.ones((n_q, len(keys)))
    block, inside = np.divmod(np.asarray(keys, np.int64), 128)
    eights, rest = np.divmod(inside, 8)
    words, bits = 4 * block + rest // 2, eights % 8 + 8 * (rest % 2) + 16 * (eights // 8)
    factor = np.empty((n_q, len(keys)))
    for i in range(n_q):
        for word in np.unique(words):
            mine = words == word
            numbers = planes(i, h, s, int(word), p.seed, p.offset)[bits[mine]]  # type: ignore[attr-defined]
            factor[i, mine] = np.where(numbers < rate * 65536, 0.0, 1 / (1 - rate))
    return factor


class Head:
    """One query head of a backward: everything [n_q, n_keys] over the keys that some query sees.

    x: t + slope * mask + bias - lse; weights: P; factor: M; score: M * (d_out v) - delta; bend: dt/ds; unscored: t
    before a score function.
    """

    def __init__(
        self, p: object, s: int, h: int, d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
        mask: Array | None, bias: Array | None, n_head: int, d_lse: Array | None,
    ) -> None:  # fmt: skip
        self.s, self.h, self.q, self.d_out, self.lse = s, h, q, d_out, lse
        hidden = np.zeros((len(q), len(k)), bool) if mask is None else np.isneginf(mask)
        self.keys = np.flatnonzero(~hidden.all(0))
        hidden, self.k, self.v = hidden[:, self.keys], k[self.keys], v[self.keys]
        self.logits = q @ self.k.T * p.scale  # type: ignore[attr-defined]
        cap = p.softcap  # type: ignore[attr-defined]
        bent = cap * np.tanh(self.logits / cap) if cap else self.logits
        self.bend = 1 / np.cosh(np.clip(self.logits / cap, -300, 300)) ** 2 if cap else np.ones_like(bent)
        found = scored(p, bent, s, h, self.keys)
        self.unscored = bent
        if found is not None:
            bent, self.bend = found.x, self.bend * found.d
        self.added = np.zeros_like(bent)
        if mask is not None:
            slope = alibi_slope(h, n_head, p.max_bias)  # type: ignore[attr-defined]
            self.added = slope * np.where(hidden, 0, mask[:, self.keys])
        self.bias = bias[:, self.keys] if bias is not None else np.zeros_like(bent)
        self.dead = np.isneginf(lse)
        safe = np.where(self.dead, 0, lse)
        self.bent = bent
        self.x = bent + self.added + self.bias - safe[:, None]
        self.weights = np.where(hidden | self.dead[:, None], 0.0, np.exp(self.x))
        self.delta = np.einsum("ij,ij->i", d_out, out) - (0 if d_lse is None else d_lse)
        self.squares = np.einsum("ij,ij->i", d_out**2, out**2)  # of delta's terms
        self.factor = dropout_factor(p, s, h, len(q), self.keys)
        self.of_v = d_out @ self.v.T
        self.score = self.factor * self.of_v - self.delta[:, None]
        self.d_added = self.weights * self.score
        self.d_logits = self.d_added * self.bend * p.scale  # type: ignore[attr-defined]


def _share(head: Head, sinks: Array) -> Array:
    return np.where(head.dead, 0.0, np.exp(float(sinks.reshape(-1)[head.h]) - np.where(head.dead, 0, head.lse)))


def add_part(out: Array, of: str, head: Head, group: int, sinks: Array | None, where: tuple[Array, Array]) -> None:
    """Adds what a head gives to a gradient. where: its queries and keys in the result."""
    queries, keys = where
    s, h, g = head.s, head.h, head.h // group
    if of == "q":
        out[s, h, queries] += head.d_logits @ head.k
    elif of == "k":
        out[s, g, keys[head.keys]] += head.d_logits.T @ head.q
    elif of == "v":
        out[s, g, keys[head.keys]] += (head.weights * head.factor).T @ head.d_out
    elif of == "attn_bias":
        part = out[s % out.shape[0], h % out.shape[1]]
        part[:, head.keys] += head.d_added
    else:
        out.reshape(-1)[h] -= (_share(head, sinks) * head.delta).sum()


def back_heads(
    node: Tensor, d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, mask: Array | None,
    bias: Array | None, d_lse: Array | None,
) -> Iterator[Head]:  # fmt: skip
    group = q.shape[1] // k.shape[1]
    for s, h in np.ndindex(*q.shape[:2]):
        own = [None if t is None else t[s % t.shape[0], h % t.shape[1]] for t in (mask, bias)]
        yield Head(
            node.params.attn, s, h, d_out[s, :, h], q[s, h], k[s, h // group], v[s, h // group], out[s, :, h],
            lse[0, s, :, h], *own, q.shape[1], None if d_lse is None else d_lse[0, s, :, h],
        )  # fmt: skip


@reference64("FLASH_ATTN_BACK")
def flash_attn_back(
    node: Tensor, d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, mask: Array | None = None,
    sinks: Array | None = None, attn_bias: Array | None = None, d_lse: Array | None = None,
) -> Array:  # fmt: skip
    found, group = np.zeros(node.shape, q.dtype), q.shape[1] // k.shape[1]
    where = (np.arange(q.shape[2]), np.arange(k.shape[2]))
    for head in back_heads(node, d_out, q, k, v, out, lse, mask, attn_bias, d_lse):
        add_part(found, node.params.of, head, group, sinks, where)
    return found


def packed_heads(
    node: Tensor, d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, q_starts: Array,
    k_starts: Array, d_lse: Array | None,
) -> Iterator[tuple[Head, tuple[Array, Array]]]:  # fmt: skip
    p, group = node.params.attn, q.shape[1] // k.shape[1]
    first, keys = q_starts.reshape(-1), k_starts.reshape(-1)
    for s, h in np.ndindex(first.size - 1, q.shape[1]):
        a, b, c, e = int(first[s]), int(first[s + 1]), int(keys[s]), int(keys[s + 1])
        if a >= b:
            continue
        behind = (e - c) - (b - a) + np.arange(b - a)[:, None] - np.arange(e - c)
        seen = (behind >= 0) | (not p.causal)
        seen &= (behind < p.window) | (p.window == 0)
        mask = np.where(seen, -np.abs(behind) if p.max_bias else 0.0, -np.inf)
        own = None if d_lse is None else d_lse[0, 0, a:b, h]
        head = Head(
            p, 0, h, d_out[0, a:b, h], q[0, h, a:b], k[0, h // group, c:e], v[0, h // group, c:e], out[0, a:b, h],
            lse[0, 0, a:b, h], mask, None, q.shape[1], own,
        )  # fmt: skip
        yield head, (np.arange(a, b), np.arange(c, e))


@reference64("FLASH_ATTN_VARLEN_BACK")
def flash_attn_varlen_back(
    node: Tensor, d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, q_starts: Array,
    k_starts: Array, sinks: Array | None = None, d_lse: Array | None = None,
) -> Array:  # fmt: skip
    found, group = np.zeros(node.shape, q.dtype), q.shape[1] // k.shape[1]
    for head, where in packed_heads(node, d_out, q, k, v, out, lse, q_starts, k_starts, d_lse):
        add_part(found, node.params.of, head, group, sinks, where)
    return found
