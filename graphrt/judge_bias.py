"""Is a result off in one direction? The judge's rule for results of 8 bits, which are rounded too coarsely for the size
of their errors to tell a wrong factor from rounding.

Rounding goes up as often as down, so that over many elements it cancels out, and a wrong factor or offset does not. Two
sums over elements find those: the slope, sum(d e) / sum(e^2), which is the factor less 1, and the mean of d over the
root mean square of e. e is what must be there (float64, rounded as the result is stored), d the difference from it.
Both are taken over all elements and over each head, query, sequence and column, after each row was divided by its size:
under a causal mask the rows of few keys are so much larger than others that they alone would decide, and the first one,
which is V's row, has no rounding at all.

How far they may be from 0 by chance follows from the independent low-precision computation's errors x, before it is
rounded to 8 bits, and from what that rounding does to such errors:

- x cancel out within a row only as far as a row's do: the deviation of a row's own slope, pooled over all rows,
  divides by the root of the rows. Columns have an element of each row, pooled over all elements.
- A number that is off by x is rounded to the next number of 8 bits, a step h away, with probability |x| / h: variance
  |x| h an element. Few elements are, so the bound is Bernstein's: sqrt(2 V t) + M t / 3, M the largest single part.

An honest kernel's errors are taken for up to FACTOR times the low-precision ones, and t is UNLIKELY: a right result
fails once in e**UNLIKELY cases. To that the type's `bias` is added, for roundings that go one way, as sums of some
matrix units do, and how far the low-precision computation's own slope is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt import float8
from graphrt.dtypes import FLOATS8, DType
from graphrt.patterns import words_of
from graphrt.tensor import Tensor

Floats = npt.NDArray[np.float64]

#: An honest kernel's errors, in those of the low-precision computation.
FACTOR = 1.5
#: A right result fails once in e**UNLIKELY = 7e10 cases.
UNLIKELY = 25.0
#: A row counts as no smaller than this part of the middle one: what cancels out is no measure of its own errors.
SMALLEST = 2.0**-4


def step_of(values: Floats, dt: DType) -> Floats:
    """How far the numbers of an 8-bit type lie apart around `values`."""
    kind = FLOATS8[dt.name]
    _, exponent = np.frexp(np.abs(values))  # |x| = m 2^exponent, m from a half to 1
    exponent = np.where(values == 0, 1 - kind.bias, exponent - 1)
    steps: Floats = np.ldexp(1.0, np.maximum(exponent, 1 - kind.bias) - kind.mantissa)
    return steps


def row_sizes(e: Floats, counted: npt.NDArray[np.bool_]) -> Floats:
    """Root mean squares of the rows of e, which is 0 where it does not count, [..., 1]: none too small or 0."""
    sizes: Floats = np.sqrt((e**2).sum(-1, keepdims=True) / np.maximum(counted.sum(-1, keepdims=True), 1))
    middle = float(np.median(sizes[sizes > 0])) if sizes.any() else 1.0
    return np.maximum(sizes, SMALLEST * middle)


#: Bits of mantissa that are stored, and the exponent of the smallest normal number.
_HALVES = {"f16": (10, -14), "bf16": (7, -126)}
#: Even errors of a whole step go to one side in so many elements only once in 2**CHANCE cases.
CHANCE = 24


def why_cut(dt: DType, actual: Floats, expected: Floats) -> str:
    """Says if results of f16 or bf16 were cut off where they must be rounded, or "".

    Cutting errs twice as far as rounding, which the rule of sizes allows. But what lies nearer to the next number away
    from 0 never goes there. However large an honest kernel's own errors are, some of it does.
    """
    if dt.name not in _HALVES:
        return ""
    mantissa, least = _HALVES[dt.name]
    e = np.abs(expected)
    exponent = np.maximum(np.frexp(e)[1] - 1, least)
    steps = np.ldexp(e, mantissa - exponent)
    larger = np.isfinite(actual) & (steps - np.floor(steps) > 0.5)
    count = int(larger.sum())
    if count < CHANCE or (np.abs(actual[larger]) > e[larger]).any():
        return ""
    return f"none of the {count} results that rounding to {dt.name} makes larger is: bits were cut off, not rounded"


@dataclass(frozen=True)
class _Sum:
    """A sum of errors, each times its weight. said: what it tells of a result, with a place for its figure.

    rows, elements: what the square of a row's sum, and of an element's part, is taken to be proportional to. scale:
    what the sum over these axes is divided by.
    """

    said: Callable[[float], str]
    weights: Floats
    rows: Floats
    elements: Floats
    scale: Callable[[tuple[int, ...]], Floats]


def _sums(e: Floats, counted: npt.NDArray[np.bool_]) -> tuple[_Sum, _Sum]:
    """The slope and the mean. counted: the elements that take part; e is 0 elsewhere."""
    energy, weight = e**2, counted.astype(np.float64)

    def root(axes: tuple[int, ...]) -> Floats:
        made: Floats = np.sqrt(energy.sum(axes) * weight.sum(axes))
        return made

    slope = _Sum(
        lambda x: f"{1 + x:.4g} times what they must be", e, energy.sum(-1) ** 2, energy**2, lambda a: energy.sum(a)
    )
    mean = _Sum(lambda x: f"off by {x:.3g} of their root mean square on average", weight, energy.sum(-1), energy, root)
    return slope, mean


def why_biased(node: Tensor, actual: Floats, expected: Floats, low: Floats, bias: float, band: float) -> str:
    """Says where a result is off in one direction, or "".

    actual, expected, low: in torch's shape, numbers; expected has no number past the type's largest, low is not
    rounded to the node's type. bias: how far the sums may be off by themselves; band: relative error that roundings of
    what is computed in may have, whatever the low-precision computation does.
    """
    e, counted, dt = expected, np.ones(expected.shape, np.bool_), node.dtype
    error = np.where(np.isfinite(low), low - e, 0.0)
    steps = flips = np.zeros(e.shape)
    if dt.is_float8:
        counted = np.abs(e) < FLOATS8[dt.name].largest  # the results of all larger ones are the same
        sizes = FACTOR * np.sqrt((error**2).mean(-1, keepdims=True)) + band * np.abs(e)
        e = float8.decode(float8.encode(e, dt), dt)
        steps = np.where(counted, step_of(e, dt), 0.0)
        flips = np.minimum(sizes, steps) * steps
    e, error, d = (np.where(counted, x, 0.0) for x in (e, error, actual - e))
    size = row_sizes(e, counted)
    e, error, d, steps, flips = e / size, error / size, d / size, steps / size, flips / size**2
    for found in _sums(e, counted):
        if message := _why(node, found, d, error, flips, steps, bias):
            return message
    return ""


def _groups(ndim: int) -> Iterator[tuple[int, ...]]:
    """The axes to sum over: all, and all but one."""
    yield tuple(range(ndim))
    for axis in reversed(range(ndim)):
        yield tuple(a for a in range(ndim) if a != axis)


def _why(node: Tensor, s: _Sum, d: Floats, error: Floats, flips: Floats, steps: Floats, bias: float) -> str:
    """What one of the sums says. d: the errors; error: the low-precision computation's; flips: the variance that
    rounding gives an element; steps: the most that it gives one."""
    whole = float(s.scale(tuple(range(d.ndim))))
    if whole == 0.0:
        return ""
    parts = error * s.weights
    own = abs(float(parts.sum())) / whole
    of_rows = float((parts.sum(-1) ** 2).sum()) / float(s.rows.sum())
    of_elements = float((parts**2).sum()) / float(s.elements.sum())
    for axes in _groups(d.ndim):
        whole_rows = d.ndim - 1 in axes
        variance = of_rows * s.rows.sum(axes[:-1]) if whole_rows else of_elements * s.elements.sum(axes)
        chance = FACTOR * np.sqrt(2 * UNLIKELY * variance)
        chance = chance + np.sqrt(2 * UNLIKELY * (flips * s.weights**2).sum(axes))
        chance = chance + UNLIKELY / 3 * (steps * np.abs(s.weights)).max(axes)
        scale = s.scale(axes)
        safe = np.where(scale > 0, scale, 1.0)
        off, limit = np.where(scale > 0, (d * s.weights).sum(axes), 0.0) / safe, bias + own + chance / safe
        worst = int(np.argmax(np.abs(off) - limit))
        figure, most = float(np.ravel(off)[worst]), float(np.ravel(limit)[worst])
        if abs(figure) > most:
            kept = [a for a in range(d.ndim) if a not in axes]
            where = f" of {words_of(node.op)[d.ndim - 1 - kept[0]]} {worst}" if kept else ""
            return f"the results{where} are {s.said(figure)}; chance and rounding explain {most:.2g}"
    return ""
