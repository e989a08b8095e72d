"""How far off a right result in f32 may be: the variance of each element's error, from the formula and the inputs.

VARIANCE[op](node, expected, *sources) gives it in the result's shape; all arrays are float64 (or int64) in torch's
shape. Nothing here is computed in low precision, so the same inputs give the same figures on every machine.

The model: each operation of f32 rounds once, by a random part of half a unit in the last place, independently of the
others. To first order the errors then add up in variance, each weighted by how much the result depends on it. A sum is
taken one term after the other in random order, which is worse than the sums in lanes and blocks that kernels have.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from graphrt.dtypes import DType
from graphrt.tensor import Tensor
from support.reference64 import ACTIVATIONS

Array = npt.NDArray[np.generic]
Variance = Callable[..., Array]

#: Of one rounding, relative to what is rounded: evenly spread over +-2**-24, the most that f32 allows.
ROUNDING = 2.0**-48 / 3
#: Of exp, tanh and their like, which good libraries have within two units in the last place.
FUNCTION = 4 * ROUNDING
#: A bound is passed by chance once in e**UNLIKELY = 7e10 results.
UNLIKELY = 25.0
#: Relative half units in the last place, and the absolute ones below the smallest normal number.
UNITS = {
    "f32": (2.0**-24, 2.0**-150), "f16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134),
    "f8_e4m3": (2.0**-4, 2.0**-10), "f8_e5m2": (2.0**-3, 2.0**-17),
}  # fmt: skip

VARIANCE: dict[str, Variance] = {}


def variance(*ops: str) -> Callable[[Variance], Variance]:
    def declare(function: Variance) -> Variance:
        VARIANCE.update(dict.fromkeys(ops, function))
        return function

    return declare


def of_storing(expected: Array, dt: DType) -> Array:
    """The variance that rounding to a result's type adds."""
    relative, absolute = UNITS[dt.name]
    return (relative**2 * expected**2 + absolute**2) / 3


def largest_energy(energies: Array) -> float:
    """What the sum of independent squared errors passes once in e**UNLIKELY cases. energies: what each is on average.

    Laurent and Massart's inequality (2000, lemma 1), for normal errors: many small parts hardly exceed their mean, a
    single one may be eight times its standard deviation.
    """
    w = energies.reshape(-1)
    return float(w.sum() + 2 * math.sqrt(UNLIKELY * float((w**2).sum())) + 2 * UNLIKELY * w.max(initial=0.0))


def largest_energies(energies: Array) -> Array:
    """The same for each by itself."""
    return energies * (1 + 2 * math.sqrt(UNLIKELY) + 2 * UNLIKELY)


def of_sum(squares: Array, total: Array, n: Array | int) -> Array:
    """Of summing n terms in random order. squares: the sum of their squares; total: the sum itself.

    After j terms the partial sum's square is j (n - j) / n**2 squares + j**2 / n**2 total**2 on average.
    """
    return ROUNDING * (n / 6 * squares + (n + 1) / 3 * total**2)


def of_decoding(source: Tensor, values: Array) -> Array:
    """Of the elements of a source as a kernel decodes them: a block's scale times a code, less an offset, which is no
    larger than twice the row's largest value, in an order of its own."""
    if not source.dtype.is_quantized:
        return np.zeros_like(values)
    return np.broadcast_to(4 * ROUNDING * np.abs(values).max(-1, keepdims=True) ** 2, values.shape)


def of_products(a: Array, b: Array, of_a: Array) -> Array:
    """Of b [n, k] times a [m, k] transposed, whose elements have errors of their own; b may be scaled before."""
    k = a.shape[-1]
    return of_sum(b**2 @ (a**2).T, b @ a.T, k) + 2 * ROUNDING * (b**2 @ (a**2).T) + b**2 @ of_a.T


# -- elementwise


@variance("ADD", "SUB", "MUL", "DIV", "CLAMP", "FILL", "SQR", "SQRT", "ADD_ID")
def rounded_once(node: Tensor, expected: Array, *sources: Array | None) -> Array:
    return ROUNDING * expected**2


@variance("PENALIZE")
def penalize(node: Tensor, expected: Array, logits: Array, *tables: Array) -> Array:
    """Each step rounds what is at most as large as the logit, the result and the difference of both."""
    finite = np.where(np.isfinite(expected), expected, 0.0)
    return 4 * ROUNDING * (np.abs(logits) + np.abs(finite)) ** 2


@variance("ALL_REDUCE", "REDUCE_SCATTER")
def of_ranks(node: Tensor, expected: Array, *parts: Array | None) -> Array:
    """A sum with a term of each rank."""
    given = np.stack([part for part in parts if part is not None])
    if node.op == "REDUCE_SCATTER":
        start = sum(node.params.sizes[: node.params.rank])
        given = given[..., start : start + node.ne[0]]
    return of_sum((given**2).sum(0), expected, len(given))


@variance("GET_ROWS")
def get_rows(node: Tensor, expected: Array, a: Array, ids: Array) -> Array:
    """Of decoded rows; those of a plain type are moved, see judging.py."""
    return of_decoding(node.src[0], expected)


@variance("SCALE")
def scale(node: Tensor, expected: Array, a: Array) -> Array:
    """Both parameters are rounded to f32 too."""
    return ROUNDING * (2 * (a * node.params.scale) ** 2 + node.params.bias**2 + expected**2)


def _of_activation(kind: str, x: Array) -> Array:
    """Of an activation: its argument and its result are rounded, and so is what it is made of."""
    function = ACTIVATIONS[kind]
    made, moved = (np.array([function(v) for v in at.reshape(-1).tolist()]) for at in (x, x * (1 + 2.0**-24)))
    own = ((moved - made) ** 2 + FUNCTION * made**2).reshape(x.shape)
    # GELU is x times (1 + tanh) / 2, which is rounded in units of 1 where it is nearly 0; beyond 10 it is 0 anyway
    return own + FUNCTION * (np.clip(x, -10, 10) / 2) ** 2 if kind.startswith("gelu") else own


@variance("UNARY")
def unary(node: Tensor, expected: Array, a: Array) -> Array:
    return _of_activation(node.params.kind, a)


@variance("GLU")
def glu(node: Tensor, expected: Array, a: Array, b: Array | None = None) -> Array:
    p = node.params
    if b is None:
        n = a.shape[-1] // 2
        a, b = (a[..., n:], a[..., :n]) if p.swapped else (a[..., :n], a[..., n:])
    if p.kind != "swiglu_oai":
        gate = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}[p.kind]
        return _of_activation(gate, a) * b**2 + ROUNDING * expected**2
    b = np.clip(b, -p.limit, p.limit) + 1.0
    x = np.minimum(a, p.limit)
    return _of_activation("silu", p.alpha * x) / p.alpha**2 * b**2 + 4 * ROUNDING * expected**2


# -- rows


def _of_energy(a: Array, added: float) -> Array:
    """Of the root of a row's sum of squares plus `added`, relative: half that of what is below the root."""
    energy = (a**2).sum(-1, keepdims=True)
    of_squares = of_sum((a**4).sum(-1, keepdims=True), energy, a.shape[-1]) + ROUNDING * (a**4).sum(-1, keepdims=True)
    return of_squares / np.maximum(energy + added, np.finfo(float).tiny) ** 2 / 4


@variance("RMS_NORM", "L2_NORM")
def rms_norm(node: Tensor, expected: Array, a: Array) -> Array:
    added = node.params.eps * a.shape[-1] if node.op == "RMS_NORM" else 0.0
    return expected**2 * (_of_energy(a, added) + 5 * ROUNDING)


@variance("NORM")
def norm(node: Tensor, expected: Array, a: Array) -> Array:
    """The mean's error moves the whole row; the deviations' energy does not depend on it to first order."""
    n = a.shape[-1]
    mean = a.mean(-1, keepdims=True)
    of_mean = of_sum((a**2).sum(-1, keepdims=True), n * mean, n) / n**2 + ROUNDING * mean**2
    deviations = a - mean
    below = (deviations**2).mean(-1, keepdims=True) + node.params.eps
    return of_mean / below + expected**2 * (_of_energy(deviations, node.params.eps * n) + 6 * ROUNDING)


@variance("SUM_ROWS")
def sum_rows(node: Tensor, expected: Array, a: Array) -> Array:
    return of_sum((a**2).sum(-1, keepdims=True), expected, a.shape[-1])


@variance("ROPE")
def rope(node: Tensor, expected: Array, a: Array, positions: Array, factors: Array | None = None) -> Array:
    """Of a pair's turn: sine, cosine, their factor, two products and a sum; the angle itself is float64's."""
    n, interleaved = node.params.n_dims, node.params.mode == "normal"
    energy, out = expected[..., :n] ** 2, np.zeros_like(expected)
    pairs = energy.reshape(*energy.shape[:-1], n // 2, 2) if interleaved else np.stack(np.split(energy, 2, -1), -1)
    both = (FUNCTION + 3 * ROUNDING) * pairs.sum(-1)
    out[..., :n] = both.repeat(2, -1) if interleaved else np.concatenate([both, both], -1)
    return out


# -- matrices


@variance("MUL_MAT")
def mul_mat(node: Tensor, expected: Array, a: Array, b: Array) -> Array:
    out, of_a = np.empty_like(expected), of_decoding(node.src[0], a)
    r3, r2 = b.shape[0] // a.shape[0], b.shape[1] // a.shape[1]
    for i3, i2 in np.ndindex(*b.shape[:2]):
        out[i3, i2] = of_products(a[i3 // r3, i2 // r2], b[i3, i2], of_a[i3 // r3, i2 // r2])
    return out


@variance("MUL_MAT_ID")
def mul_mat_id(node: Tensor, expected: Array, a: Array, b: Array, ids: Array) -> Array:
    out, of_a = np.zeros_like(expected), of_decoding(node.src[0], a)
    for t, slot in np.ndindex(*expected.shape[1:3]):
        expert = int(ids[0, 0, t, slot])
        if 0 <= expert < a.shape[1]:
            out[0, t, slot] = of_products(a[0, expert], b[0, t, slot % b.shape[2]][None], of_a[0, expert])[0]
    return out


#: Activations of products that a backend rounds on purpose: the largest integer of so many bits, in groups of 32.
LARGEST = {16: 32639.0, 8: 127.0}


def of_rounded(b: Array, bits: int) -> Array:
    """Of the activations of a product that are rounded to integers, each evenly within half a step."""
    groups = b.reshape(*b.shape[:-1], -1, 32)
    step = np.abs(groups).max(-1, keepdims=True) / LARGEST[bits]
    return np.broadcast_to(step**2 / 12, groups.shape).reshape(b.shape)


def of_rounded_products(node: Tensor, bits: int, a: Array, b: Array, ids: Array | None = None) -> Array:
    """What that adds to the variance of a MUL_MAT of one matrix, or of a MUL_MAT_ID."""
    of_b = of_rounded(b, bits)
    if ids is None:
        return of_b @ (a[0, 0] ** 2).T
    out = np.zeros(node.shape)
    for t, slot in np.ndindex(*out.shape[1:3]):
        expert = int(ids[0, 0, t, slot])
        if 0 <= expert < a.shape[1]:
            out[0, t, slot] = of_b[0, t, slot % b.shape[2]] @ (a[0, expert] ** 2).T
    return out
