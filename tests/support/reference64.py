"""Every op once more, in numpy, written apart from the CPU backend: loops over rows and heads, formulas derived anew.

REFERENCE64[op](node, *sources) takes float64 (or int64) arrays in torch's shape and gives the result in that precision.
"""

from __future__ import annotations

import bisect
import cmath
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from graphrt.ops.sample_each import RowSettings
from graphrt.tensor import Tensor
from support import score64

Array = npt.NDArray[np.generic]
Reference = Callable[..., Array]

REFERENCE64: dict[str, Reference] = {}


def reference64(*ops: str) -> Callable[[Reference], Reference]:
    def declare(function: Reference) -> Reference:
        REFERENCE64.update(dict.fromkeys(ops, function))
        return function

    return declare


def _each(function: Callable[[float], float], a: Array) -> Array:
    return np.array([function(float(x)) for x in a.reshape(-1)], dtype=a.dtype).reshape(a.shape)


# -- elementwise


def _at_modulo(b: Array, shape: tuple[int, ...]) -> Array:
    """b[i mod n] along every dimension: what repeating means."""
    return b[np.ix_(*[np.arange(full) % n for n, full in zip(b.shape, shape)])]


@reference64("ADD", "SUB", "MUL", "DIV")
def binary(node: Tensor, a: Array, b: Array) -> Array:
    function = {"ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide}[node.op]
    return function(a, _at_modulo(b, a.shape))


@reference64("SCALE")
def scale(node: Tensor, a: Array) -> Array:
    return _each(lambda x: x * node.params.scale + node.params.bias, a)


@reference64("CLAMP")
def clamp(node: Tensor, a: Array) -> Array:
    return _each(lambda x: min(max(x, node.params.low), node.params.high), a)


@reference64("FILL")
def fill(node: Tensor, a: Array) -> Array:
    return np.array([node.params.value] * a.size, dtype=a.dtype).reshape(a.shape)


@reference64("SQR")
def sqr(node: Tensor, a: Array) -> Array:
    return np.power(a, 2)


@reference64("SQRT")
def sqrt(node: Tensor, a: Array) -> Array:
    return _each(math.sqrt, a)


def _sigmoid(x: float) -> float:
    return (1.0 + math.tanh(x / 2.0)) / 2.0


def _logistic(x: float) -> float:
    """1 / (1 + e^-x), where e^-x is no number either."""
    return 1.0 / (1.0 + math.exp(-x)) if x > -700.0 else math.exp(x)


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * _logistic(x),
    "gelu": lambda x: x * _sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)),
    "gelu_erf": lambda x: x * (1.0 - math.erfc(x / math.sqrt(2.0)) / 2.0),
    "gelu_quick": lambda x: x * _logistic(1.702 * x),
    "relu": lambda x: 0.0 if x <= 0.0 else x,
    "tanh": math.tanh,
    "sigmoid": _logistic,
    "exp": math.exp,
    "softplus": lambda x: math.log1p(math.exp(-abs(x))) + max(x, 0.0),
}


@reference64("UNARY")
def unary(node: Tensor, a: Array) -> Array:
    return _each(ACTIVATIONS[node.params.kind], a)


@reference64("GLU")
def glu(node: Tensor, a: Array, b: Array | None = None) -> Array:
    p = node.params
    if b is None:
        n = a.shape[-1] // 2
        a, b = (a[..., n:], a[..., :n]) if p.swapped else (a[..., :n], a[..., n:])
    if p.kind == "swiglu_oai":
        x = np.minimum(a, p.limit)
        y = np.minimum(np.maximum(b, -p.limit), p.limit)
        return _each(lambda v: v * _logistic(p.alpha * v), x) * (y + 1.0)
    gate = ACTIVATIONS[{"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}[p.kind]]
    return _each(gate, a) * b


# -- rows


def _rows(a: Array) -> Iterator[tuple[tuple[int, ...], Array]]:
    for index in np.ndindex(*a.shape[:-1]):
        yield index, a[index]


@reference64("NORM")
def norm(node: Tensor, a: Array) -> Array:
    out = np.empty_like(a)
    for i, row in _rows(a):
        mean = row.sum() / row.size
        variance = ((row - mean) ** 2).sum() / row.size
        out[i] = (row - mean) * (variance + node.params.eps) ** -0.5
    return out


@reference64("RMS_NORM")
def rms_norm(node: Tensor, a: Array) -> Array:
    out = np.empty_like(a)
    for i, row in _rows(a):
        out[i] = row * (np.dot(row, row) / row.size + node.params.eps) ** -0.5
    return out


@reference64("L2_NORM")
def l2_norm(node: Tensor, a: Array) -> Array:
    out = np.empty_like(a)
    for i, row in _rows(a):
        out[i] = row / max(np.linalg.norm(row), node.params.eps)
    return out


@reference64("SUM_ROWS")
def sum_rows(node: Tensor, a: Array) -> Array:
    return np.einsum("abcd->abc", a)[..., None]


@reference64("ARGMAX")
def argmax(node: Tensor, a: Array) -> Array:
    return np.array([list(row).index(max(row)) for _, row in _rows(a)]).reshape(node.shape)


@reference64("ARGSORT")
def argsort(node: Tensor, a: Array) -> Array:
    sign = -1.0 if node.params.descending else 1.0
    order = [sorted(range(row.size), key=lambda j, row=row: sign * row[j]) for _, row in _rows(a)]
    return np.array(order).reshape(node.shape)


@reference64("TOP_K")
def top_k(node: Tensor, a: Array) -> Array:
    """Sorted by index: only the set matters."""
    best = [sorted(sorted(range(row.size), key=lambda j, row=row: -row[j])[: node.params.k]) for _, row in _rows(a)]
    return np.array(best).reshape(node.shape)


def _shares(entries: list[tuple[float, int]], temp: float) -> list[float]:
    """Probabilities of (logit, id), the highest first."""
    weights = [math.exp((x - entries[0][0]) / temp) for x, _ in entries]
    total = math.fsum(weights)
    return [w / total for w in weights]


def _first_over(parts: list[float], holds: Callable[[float], bool]) -> int:
    """The first index up to which the parts' exact sum `holds`, their number if none: sums only grow."""
    return bisect.bisect_left(range(len(parts)), True, key=lambda j: holds(math.fsum(parts[: j + 1])))


def _drawn(row: Array, u: float, v: float, s: RowSettings, top_k: int) -> int:
    """u: what the token is drawn by; v: what says whether XTC takes part."""
    left = sorted(((float(x), j) for j, x in enumerate(row)), key=lambda e: (-e[0], e[1]))[:top_k]
    if s.temp <= 0:
        return left[0][1]
    keep = max(1, int(s.min_keep))
    if s.typical_p < 1:
        shares = _shares(left, 1.0)
        entropy = math.fsum(-p * math.log(p) for p in shares if p > 0)
        away = [abs(-math.log(p) - entropy) if p > 0 else math.inf for p in shares]
        order = sorted(range(len(left)), key=lambda j: (away[j], j))
        n = max(keep, _first_over([shares[j] for j in order], lambda total: total > s.typical_p) + 1)
        left = [left[j] for j in sorted(order[:n])]
    if s.top_p < 1:
        kept = _first_over(_shares(left, 1.0), lambda total: total >= s.top_p)
        left = left[: max(keep, kept + 1)]
    if s.least > -math.inf:
        left = [e for j, e in enumerate(left) if j < keep or e[0] - left[0][0] >= s.least]
    if s.xtc_probability > 0 and v <= s.xtc_probability and s.xtc_threshold <= 0.5:
        last = sum(p >= s.xtc_threshold for p in _shares(left, 1.0)) - 1
        left = left[last:] if last > 0 and len(left) - last >= s.min_keep else left
    return left[min(_first_over(_shares(left, s.temp), lambda total: total > u), len(left) - 1)][1]


def _settings(table: Array, slot: int) -> RowSettings:
    return RowSettings(*table[0, 0, slot, : len(RowSettings.__dataclass_fields__)].tolist())


@reference64("SAMPLE")
def sample(node: Tensor, logits: Array, uniforms: Array) -> Array:
    p, numbers = node.params, uniforms.reshape(-1)
    chosen = [_drawn(row, numbers[i], 0.0, RowSettings.of(p), p.top_k) for (*_, i), row in _rows(logits)]
    return np.array(chosen).reshape(node.shape)


@reference64("SAMPLE_EACH")
def sample_each(node: Tensor, logits: Array, uniforms: Array, slots: Array, settings: Array) -> Array:
    chosen = []
    for (*_, i), row in _rows(logits):
        s, (u, v) = _settings(settings, int(slots.reshape(-1)[i])), uniforms.reshape(-1, 2)[i]
        chosen.append(_drawn(row, u, v, s, min(int(s.top_k), node.params.most)))
    return np.array(chosen).reshape(node.shape)


@reference64("PENALIZE")
def penalize(
    node: Tensor, logits: Array, slots: Array, settings: Array, biased: Array, biases: Array, past: Array,
    n_past: Array, allowed: Array,
) -> Array:  # fmt: skip
    """Token by token."""
    out, size = logits.copy(), past.shape[-1]
    for (*_, i), row in _rows(out):
        slot, length = int(slots.reshape(-1)[i]), int(n_past.reshape(-1)[i])
        s = _settings(settings, slot)
        added = dict(zip(biased[0, 0, slot, : int(s.n_biases)], biases[0, 0, slot]))
        last = [past[0, 0, slot, p % size] for p in range(length - min(int(s.last_n), size, length), length)]
        for j in range(len(row)):
            row[j] += added.get(j, 0.0)
            if s.masked and not int(allowed[0, 0, slot, j // 32]) >> j % 32 & 1:
                row[j] = -math.inf
            if (count := last.count(j)) and s.penalizes:
                row[j] = row[j] * s.repeat if row[j] <= 0 else row[j] / s.repeat
                row[j] -= count * s.frequency + s.presence
    return out


@reference64("KQ_MASK")
def kq_mask(node: Tensor, cells: Array, pos: Array) -> Array:
    window = node.params.window or math.inf
    out = np.full(node.shape, -math.inf)
    for seq, _, token, cell in np.ndindex(*node.shape):
        back = int(pos[0, 0, seq, token]) - int(cells[0, 0, seq, cell])
        if cells[0, 0, seq, cell] != -1 and 0 <= back < window:
            with np.errstate(over="ignore"):  # distances that f16 has no number for
                out[seq, 0, token, cell] = np.float16(-back) if node.params.alibi else 0.0
    return out


# -- movement


@reference64("CONT", "DUP")
def same(node: Tensor, a: Array) -> Array:
    return a


@reference64("CPY")
def cpy(node: Tensor, a: Array, target: Array) -> Array:
    return np.array([a[i] for i in np.ndindex(*a.shape)], dtype=a.dtype).reshape(node.shape)


@reference64("CONCAT")
def concat(node: Tensor, a: Array, b: Array) -> Array:
    axis = len(a.shape) - 1 - node.params.dim
    out = np.empty(node.shape, dtype=a.dtype)
    for i in np.ndindex(*node.shape):
        n = a.shape[axis]
        out[i] = a[i] if i[axis] < n else b[(*i[:axis], i[axis] - n, *i[axis + 1 :])]
    return out


def _all_parts(parts: tuple[Array | None, ...]) -> list[Array]:
    return [part for part in parts if part is not None]


@reference64("ALL_REDUCE")
def all_reduce(node: Tensor, *parts: Array | None) -> Array:
    return np.stack(_all_parts(parts)).sum(0)


@reference64("ALL_GATHER")
def all_gather(node: Tensor, *parts: Array | None) -> Array:
    out, start = np.empty(node.shape, dtype=_all_parts(parts)[0].dtype), 0
    for part in _all_parts(parts):
        for i in np.ndindex(*part.shape):
            out[(*i[:3], start + i[3])] = part[i]
        start += part.shape[3]
    return out


@reference64("REDUCE_SCATTER")
def reduce_scatter(node: Tensor, *parts: Array | None) -> Array:
    edges = np.cumsum([0, *node.params.sizes])
    return all_reduce(node, *parts)[..., edges[node.params.rank] : edges[node.params.rank + 1]]


@reference64("SEND")
def send(node: Tensor, a: Array) -> Array:
    return a.copy()


@reference64("RECV")
def recv(node: Tensor, after: Array, sent: Array) -> Array:
    return sent.copy()


@reference64("REPEAT")
def repeat(node: Tensor, a: Array) -> Array:
    return _at_modulo(a, node.shape)


@reference64("GET_ROWS")
def get_rows(node: Tensor, a: Array, ids: Array) -> Array:
    out = np.empty(node.shape, dtype=a.dtype)
    for i3, i2, i1 in np.ndindex(*node.shape[:3]):
        out[i3, i2, i1] = a[i3, i2, ids[0, i3, i2, i1]]
    return out


@reference64("SET_ROWS")
def set_rows(node: Tensor, rows: Array, ids: Array, target: Array) -> Array:
    """The target after the write, in whatever form rows and target come: values, or stored bytes."""
    out = target.copy()
    for i3, i2, i1 in np.ndindex(*rows.shape[:3]):
        out[i3, i2, ids[0, i3 % ids.shape[1], i2 % ids.shape[2], i1]] = rows[i3, i2, i1]
    return out


# -- matrices, positions, attention


@reference64("MUL_MAT")
def mul_mat(node: Tensor, a: Array, b: Array) -> Array:
    out = np.empty(node.shape, dtype=b.dtype)
    r3, r2 = b.shape[0] // a.shape[0], b.shape[1] // a.shape[1]
    for i3, i2 in np.ndindex(*b.shape[:2]):
        out[i3, i2] = np.einsum("mk,nk->nm", a[i3 // r3, i2 // r2], b[i3, i2])
    return out


@reference64("MUL_MAT_ID")
def mul_mat_id(node: Tensor, a: Array, b: Array, ids: Array) -> Array:
    out = np.full(node.shape, np.nan, dtype=b.dtype)
    for t, slot in np.ndindex(*node.shape[1:3]):
        expert = int(ids[0, 0, t, slot])
        if 0 <= expert < a.shape[1]:
            out[0, t, slot] = np.einsum("mk,k->m", a[0, expert], b[0, t, slot % b.shape[2]])
    return out


@reference64("ADD_ID")
def add_id(node: Tensor, a: Array, b: Array, ids: Array) -> Array:
    out = np.full(node.shape, np.nan, dtype=a.dtype)
    for t, slot in np.ndindex(*node.shape[1:3]):
        expert = int(ids[0, 0, t, slot])
        if 0 <= expert < b.shape[2]:
            out[0, t, slot] = b[0, 0, expert] + a[0, t, slot]
    return out


def _yarn_share(node: Tensor, i: int) -> float:
    """How far pair i keeps its own frequency. A pair that turns r times within n_ctx_orig has wavelength n_ctx/r,
    which solves to the dimension n_dims * ln(n_ctx / (2 pi r)) / (2 ln base)."""
    p = node.params

    def dimension(turns: float) -> float:
        return p.n_dims * math.log(p.n_ctx_orig / (2 * math.pi * turns)) / (2 * math.log(p.freq_base))

    low = max(0, math.floor(dimension(p.beta_fast)))
    high = min(p.n_dims - 1, math.ceil(dimension(p.beta_slow)))
    position = (i - low) / max(0.001, high - low)
    return p.ext_factor * (1.0 - (0.0 if position < 0 else 1.0 if position > 1 else position))


@reference64("ROPE")
def rope(node: Tensor, a: Array, positions: Array, factors: Array | None = None) -> Array:
    """Each pair as a complex number, turned by e^(i theta)."""
    p = node.params
    out = a.copy()
    magnitude = p.attn_factor if p.ext_factor == 0 else p.attn_factor * (1 - 0.1 * math.log(p.freq_scale))
    for token, i in itertools.product(range(a.shape[1]), range(p.n_dims // 2)):
        theta = int(positions.reshape(-1)[token]) / math.pow(p.freq_base, 2 * i / p.n_dims)
        if factors is not None:
            theta /= float(factors.reshape(-1)[i])
        share = _yarn_share(node, i) if p.ext_factor != 0 else 0.0
        angle = p.freq_scale * theta * (1 - share) + theta * share
        turn = complex(magnitude * cmath.exp(1j * angle))
        x, y = (2 * i, 2 * i + 1) if p.mode == "normal" else (i, i + p.n_dims // 2)
        pair = (a[:, token, :, x] + 1j * a[:, token, :, y]) * turn
        out[:, token, :, x], out[:, token, :, y] = pair.real, pair.imag
    return out


def alibi_slope(head: int, n_head: int, max_bias: float) -> float:
    """For 2^n heads the series 2^(-max_bias/2^n), squared, cubed...; further heads take the odd terms of the series for
    2^(n+1) heads."""
    if max_bias == 0:
        return 1.0
    power = 2 ** math.floor(math.log2(n_head))
    if head < power:
        return 2.0 ** (-max_bias * (head + 1) / power)
    return 2.0 ** (-max_bias * (2 * (head - power) + 1) / (2 * power))


def _row_softmax(logits: Array, sink: float | None) -> tuple[Array, float]:
    """Weights and the log of the denominator of one row, by log-sum-exp; only keys with a finite logit count."""
    seen = logits[logits != -np.inf]
    terms = [*seen.tolist(), sink] if sink is not None else seen.tolist()
    if not terms or max(terms) == -np.inf:
        return np.zeros_like(logits), -math.inf
    top = max(terms)
    lse = top + math.log(math.fsum(math.exp(t - top) for t in terms))
    return np.exp(logits - logits.dtype.type(lse)), lse


@reference64("SOFT_MAX")
def soft_max(node: Tensor, a: Array, mask: Array | None = None, sinks: Array | None = None) -> Array:
    out = np.empty_like(a)
    p = node.params
    for s, h, i in np.ndindex(*a.shape[:3]):
        logits = a[s, h, i] * p.scale
        if mask is not None:
            slope = alibi_slope(h, a.shape[1], p.max_bias)
            logits = logits + slope * mask[s % mask.shape[0], h % mask.shape[1], i]
        out[s, h, i] = _row_softmax(logits, float(sinks.reshape(-1)[h]) if sinks is not None else None)[0]
    return out


def key_rows(p: object, k: Array, d: int) -> Array:
    """k [n_seq, n_head_kv, n_kv, d], of a k in panels element by element."""
    if getattr(p, "k_layout", "rows") == "rows":
        return k
    x, panels = k.shape[3], d // k.shape[3]
    columns = [k[:, c // x :: panels, :, c % x] for c in range(d)]  # [n_seq, n_head_kv, n_kv] each
    return np.stack(columns, axis=-1)


def _attention_heads(
    node: Tensor, q: Array, k: Array, mask: Array | None, sinks: Array | None, attn_bias: Array | None = None,
    first: tuple[int, int] = (0, 0),
) -> Iterator[tuple[int, int, Array, Array, Array, Array]]:  # fmt: skip
    """(sequence, head, keys that some query sees, which of them each query sees, weights, lse) of every head. first:
    the number of the first sequence, and the position of its first query.

    Keys that no query sees are never looked at.
    """
    p = node.params
    k, n_head = key_rows(p, k, q.shape[3]), q.shape[1]
    group = n_head // k.shape[1]
    for s, h in np.ndindex(*q.shape[:2]):
        sink = float(sinks.reshape(-1)[h]) if sinks is not None else -math.inf
        bias = np.zeros((q.shape[2], k.shape[2]), q.dtype)
        if mask is not None:
            bias = mask[s % mask.shape[0], h % mask.shape[1]]
        keys = np.flatnonzero(~np.isneginf(bias).all(0))
        bias = bias[:, keys]
        seen = ~np.isneginf(bias)
        logits = (q[s, h] @ k[s, h // group, keys].T) * q.dtype.type(p.scale)
        if p.softcap > 0:
            logits = q.dtype.type(p.softcap) * np.tanh(logits / q.dtype.type(p.softcap))
        found = score64.scored(p, logits, s + first[0], h, keys, first[1])
        logits = logits if found is None else found.x.astype(q.dtype)
        slope = q.dtype.type(alibi_slope(h, n_head, p.max_bias))
        if attn_bias is not None:
            logits = logits + attn_bias[s % attn_bias.shape[0], h % attn_bias.shape[1]][:, keys]
        logits = np.where(seen, logits + slope * np.where(seen, bias, 0), -np.inf)
        top = np.maximum(logits.max(axis=1, initial=-np.inf), sink)
        shift = np.where(np.isneginf(top), 0, top).astype(q.dtype)
        powers = np.exp(logits - shift[:, None])
        total = np.exp(q.dtype.type(sink) - shift)
        if len(keys) > 0:  # one after the other, as the plainest loop in low precision does
            total = total + np.cumsum(powers, axis=1)[:, -1]
        with np.errstate(divide="ignore"):
            lse = np.log(total) + shift
        yield s, h, keys, seen, powers / np.where(np.isneginf(lse), 1, total)[:, None], lse


def of_heads(scale: Array | None, n_head: int) -> Array:
    """What k or v are times of, for each of n_head query heads: [1, n_head, 1, 1]."""
    values = np.ones(1) if scale is None else scale.reshape(-1)
    return np.repeat(values, n_head // len(values)).reshape(1, n_head, 1, 1)


@reference64("FLASH_ATTN_EXT")
def flash_attn_ext(
    node: Tensor, q: Array, k: Array, v: Array, mask: Array | None = None, sinks: Array | None = None,
    attn_bias: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None,
) -> Array:  # fmt: skip
    out = np.zeros(node.shape, dtype=q.dtype)
    group = q.shape[1] // v.shape[1]
    q, factor = q * of_heads(k_scale, q.shape[1]), of_heads(v_scale, q.shape[1])[0, :, 0] / node.params.out_scale
    for s, h, keys, seen, weights, _ in _attention_heads(node, q, k, mask, sinks, attn_bias):
        values = v[s, h // group, keys]
        weights = weights * reference64_back.dropout_factor(node.params, s, h, len(weights), keys)
        if np.isfinite(values).all():
            out[s, :, h] = weights @ values
        else:  # a weight of 0 must not meet NaN
            for i, row in enumerate(seen):
                out[s, i, h] = weights[i, row] @ values[row]
    return out * factor.astype(q.dtype)


@reference64("FLASH_ATTN_LSE")
def flash_attn_lse(
    node: Tensor, q: Array, k: Array, mask: Array | None = None, sinks: Array | None = None,
    attn_bias: Array | None = None,
) -> Array:  # fmt: skip
    out = np.empty(node.shape, dtype=q.dtype)
    for s, h, _, _, _, lse in _attention_heads(node, q, k, mask, sinks, attn_bias):
        out[0, s, :, h] = lse
    return out


def varlen_sequences(
    node: Tensor, q: Array, q_starts: Array, lengths: Array | None, table: Array | None, k_starts: Array | None,
    explicit: Array | None = None,
) -> Iterator[tuple[list[int], list[tuple[int, int]], Array, tuple[int, int]]]:  # fmt: skip
    """(its queries, where each of its keys lies, mask, its number and its first query's position) of every sequence
    that has both.

    A key lies at (page, slot), a packed one at (0, row). mask: [1, m2, queries, keys], -inf where a query does not see
    a key, else minus the distance with ALiBi, plus what the explicit mask has.
    """
    p = node.params
    owner = [bisect.bisect_right(q_starts.reshape(-1).tolist(), t) - 1 for t in range(q.shape[2])]
    for s in range(q_starts.size - 1):
        queries = [t for t, of in enumerate(owner) if of == s]
        if table is not None:
            size = node["k"].ne[1]
            places = [(int(table[0, 0, s, j // size]), j % size) for j in range(int(lengths.reshape(-1)[s]))]
        else:
            first, end = k_starts.reshape(-1)[s : s + 2].tolist()
            places = [(0, j) for j in range(first, end)]
        if not queries or not places:
            continue
        m2 = 1 if explicit is None else explicit.shape[1]
        mask = np.full((1, m2, len(queries), len(places)), -np.inf, q.dtype)
        for i, j in np.ndindex(*mask.shape[2:]):
            behind = len(places) - len(queries) + i - j
            if (behind >= 0 or not p.causal) and (p.window == 0 or behind < p.window):
                mask[0, :, i, j] = -abs(behind) if p.max_bias > 0 else 0
                column = i - behind if p.mask_new else j
                if explicit is not None and 0 <= column < explicit.shape[3]:
                    mask[0, :, i, j] += explicit[0, :, queries[i], column]
        yield queries, places, mask, (s, len(places) - len(queries))


def gathered(cache: Array, places: list[tuple[int, int]], seen: Array) -> Array:
    """The rows at `places`, [1, n_head_kv, n, D]; of those that nobody sees, which may be nowhere, zeros."""
    rows = [cache[page, :, slot] if some else np.zeros_like(cache[0, :, 0]) for (page, slot), some in zip(places, seen)]
    return np.stack(rows, axis=1)[None]


@reference64("FLASH_ATTN_VARLEN")
def flash_attn_varlen(
    node: Tensor, q: Array, k: Array, v: Array, q_starts: Array, lengths: Array | None = None,
    table: Array | None = None, k_starts: Array | None = None, sinks: Array | None = None,
    prefixes: Array | None = None, explicit: Array | None = None,
) -> Array:  # fmt: skip
    out = np.zeros(node.shape, dtype=q.dtype)
    group = q.shape[1] // v.shape[1]
    for queries, places, mask, first in varlen_sequences(node, q, q_starts, lengths, table, k_starts, explicit):
        shown = ~np.isneginf(mask).all((0, 1, 2))
        keys, values = gathered(k, places, shown), gathered(v, places, shown)
        for _, h, used, seen, weights, _ in _attention_heads(node, q[:, :, queries], keys, mask, sinks, first=first):
            for i, row in enumerate(seen):
                out[0, queries[i], h] = weights[i, row] @ values[0, h // group, used][row]
    return out


@reference64("FLASH_ATTN_VARLEN_LSE")
def flash_attn_varlen_lse(
    node: Tensor, q: Array, k: Array, q_starts: Array, lengths: Array | None = None, table: Array | None = None,
    k_starts: Array | None = None, sinks: Array | None = None, prefixes: Array | None = None,
    explicit: Array | None = None,
) -> Array:  # fmt: skip
    out = np.full(node.shape, -np.inf, dtype=q.dtype)
    if sinks is not None:  # all that a query of a sequence without keys sees
        out[0, 0, : int(q_starts.reshape(-1)[-1])] = sinks.reshape(-1)
    for queries, places, mask, first in varlen_sequences(node, q, q_starts, lengths, table, k_starts, explicit):
        keys = gathered(k, places, ~np.isneginf(mask).all((0, 1, 2)))
        for _, h, _, _, _, lse in _attention_heads(node, q[:, :, queries], keys, mask, sinks, first=first):
            out[0, 0, queries, h] = lse
    return out


from support import reference64_back  # noqa: E402, F401  (adds the gradients' ops)
