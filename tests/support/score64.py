"""Score functions in float64: their text, which is Python, evaluated with numbers that carry a slope and an error.

Independent of ops.score's own reading of it: Python parses it, and what operators do is written here again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

ROUNDING = 2.0**-48 / 3
FUNCTION = 4 * ROUNDING
Array = Any


class Number:
    """x: the value; d: its derivative by the score; size: the sum of the sizes of d's terms; var: the variance of what
    operations in f32 round."""

    def __init__(self, x: Array, d: Array = 0.0, size: Array = 0.0, var: Array = 0.0) -> None:
        self.x, self.d, self.size, self.var = x, d, size, var

    def _joined(self, other: Any, x: Array, by_self: Array, by_other: Array) -> Number:
        d = self.d * by_self + other.d * by_other
        size = self.size * np.abs(by_self) + other.size * np.abs(by_other)
        with np.errstate(invalid="ignore"):
            var = self.var * by_self**2 + other.var * by_other**2 + ROUNDING * np.where(np.isfinite(x), x, 0.0) ** 2
        return Number(x, d, size, var)

    def __add__(self, other: Any) -> Number:
        o = _number(other)
        return self._joined(o, self.x + o.x, 1.0, 1.0)

    def __sub__(self, other: Any) -> Number:
        o = _number(other)
        return self._joined(o, self.x - o.x, 1.0, -1.0)

    def __mul__(self, other: Any) -> Number:
        o = _number(other)
        return self._joined(o, self.x * o.x, o.x, self.x)

    def __truediv__(self, other: Any) -> Number:
        o = _number(other)
        return self._joined(o, self.x / o.x, 1 / o.x, -self.x / o.x**2)

    def __floordiv__(self, other: int) -> Number:
        return Number(np.floor_divide(self.x, other))

    def __mod__(self, other: int) -> Number:
        return Number(self.x - other * np.floor_divide(self.x, other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: Any) -> Number:
        return _number(other) - self

    def __rtruediv__(self, other: Any) -> Number:
        return _number(other) / self

    def __neg__(self) -> Number:
        return Number(-self.x, -self.d, self.size, self.var)

    def __abs__(self) -> Number:
        return _chosen(self.x < 0, -self, self)

    def __lt__(self, other: Any) -> Array:
        return self.x < _number(other).x

    def __le__(self, other: Any) -> Array:
        return self.x <= _number(other).x

    def __gt__(self, other: Any) -> Array:
        return self.x > _number(other).x

    def __ge__(self, other: Any) -> Array:
        return self.x >= _number(other).x

    def __eq__(self, other: Any) -> Array:
        return self.x == _number(other).x

    def __ne__(self, other: Any) -> Array:
        return self.x != _number(other).x


def _number(x: Any) -> Number:
    return x if isinstance(x, Number) else Number(float(x))


def _chosen(condition: Array, a: Any, b: Any) -> Number:
    a, b = _number(a), _number(b)
    return Number(*(np.where(condition, u, v) for u, v in zip(vars(a).values(), vars(b).values())))


def _function(f: Callable[[Array], Array], slope: Callable[[Array, Array], tuple[Array, Array]]) -> Any:
    """slope(x, f(x)): the derivative, and the sum of its terms' sizes."""

    def of(a: Number) -> Number:
        with np.errstate(divide="ignore"):
            x = f(a.x)
            d, size = slope(a.x, x)
        return Number(x, a.d * d, a.size * size, a.var * d**2 + FUNCTION * np.where(np.isfinite(x), x, 0.0) ** 2)

    return of


def _once(f: Callable[[Array, Array], Array]) -> Callable[[Array, Array], tuple[Array, Array]]:
    return lambda x, y: (f(x, y), np.abs(f(x, y)))


_FUNCTIONS: dict[str, Any] = {
    "tanh": _function(np.tanh, lambda x, y: (1 / np.cosh(np.clip(x, -300, 300)) ** 2, 1 + y**2)),
    "exp": _function(np.exp, _once(lambda x, y: y)),
    "exp2": _function(np.exp2, _once(lambda x, y: y * math.log(2))),
    "log": _function(np.log, _once(lambda x, y: 1 / np.where(x == 0, 1, x))),
    "log2": _function(np.log2, _once(lambda x, y: 1 / np.where(x == 0, 1, x) / math.log(2))),
    "sqrt": _function(np.sqrt, _once(lambda x, y: 0.5 / y)),
    "sigmoid": _function(
        lambda x: 0.5 + 0.5 * np.tanh(x / 2), lambda x, y: (0.25 / np.cosh(np.clip(x / 2, -300, 300)) ** 2, y + y**2)
    ),
    "abs": abs, "where": _chosen, "min": lambda a, b: _chosen(_number(a) <= b, a, b),
    "max": lambda a, b: _chosen(_number(a) >= b, a, b),
}  # fmt: skip


class _Tables:
    def __init__(self, numbers: Array) -> None:
        self.numbers = numbers

    def __getitem__(self, asked: tuple[slice, Any]) -> Number:
        part, index = self.numbers[asked[0]], _number(asked[1]).x
        return Number(part[np.clip(np.asarray(index, np.int64), 0, len(part) - 1)])


def scored(p: object, s: Array, b: int, h: int, keys: Array, first: int = 0) -> Number | None:
    """The score function of one head for scores s [n_q, len(keys)], None without one. first: the first query's i."""
    text = getattr(p, "score", "")
    if not text:
        return None
    numbers = np.array(p.score_numbers, np.float64)  # type: ignore[attr-defined]
    names = {
        "s": Number(s, np.ones_like(s), np.ones_like(s)), "b": Number(float(b)), "h": Number(float(h)),
        "i": Number(first + np.arange(s.shape[0], dtype=np.float64)[:, None]),
        "j": Number(np.asarray(keys, np.float64)[None, :]), "p": [Number(x) for x in numbers], "t": _Tables(numbers),
    }  # fmt: skip
    found: Number = eval(text, {"__builtins__": {}}, names | _FUNCTIONS)
    return Number(*(np.broadcast_to(x, s.shape) for x in vars(found).values()))


def of_slope(p: object, s: Array, of_s: Array, b: int, h: int, keys: Array, step: float = 1e-5) -> Array:
    """The variance of the derivative: of its own operations, and what an error of the score makes of it."""
    at, low, high = (scored(p, s + x, b, h, keys) for x in (0.0, -step, step))
    assert at is not None and low is not None and high is not None
    curve = np.where(np.abs(high.d - low.d) > 0.1 * at.size, 0.0, (high.d - low.d) / (2 * step))  # not over a corner
    return 16 * FUNCTION * at.size**2 + curve**2 * of_s
