"""What is worked out of a score function: its derivative by the score, and how large its whole numbers get."""

from __future__ import annotations

import math

from graphrt.errors import GraphError
from graphrt.ops.score_tree import REAL, WHOLE, Expr, literal, make, packed

_ZERO, _ONE = literal(0.0), literal(1.0)


def depends(e: Expr, name: str) -> bool:
    """A symbol is in it."""
    return (e.op == "symbol" and e.value == name) or any(depends(a, name) for a in e.args)


def derivative(e: Expr) -> Expr:
    """de/ds, by the rules of calculus. At corners (abs, min, max, where) that of the side which is taken; of equal
    arguments of min and max the first."""
    return _Derivative().of(e)


def _times(a: Expr, b: Expr) -> Expr:
    if _ZERO in (a, b):
        return _ZERO
    return b if a == _ONE else a if b == _ONE else make("*", a, b)


def _plus(a: Expr, b: Expr) -> Expr:
    return b if a == _ZERO else a if b == _ZERO else make("+", a, b)


def _minus(a: Expr, b: Expr) -> Expr:
    return a if b == _ZERO else make("neg", b) if a == _ZERO else make("-", a, b)


class _Derivative:
    """Each node's once."""

    def __init__(self) -> None:
        self.known: dict[int, Expr] = {}

    def of(self, e: Expr) -> Expr:
        if id(e) not in self.known:
            self.known[id(e)] = self._made(e) if depends(e, "s") and e.kind == REAL else _ZERO
        return self.known[id(e)]

    def _made(self, e: Expr) -> Expr:
        a = e.args[0] if e.args else e
        b = e.args[1] if len(e.args) > 1 else a
        match e.op:
            case "symbol":
                return _ONE
            case "+":
                return _plus(self.of(a), self.of(b))
            case "-":
                return _minus(self.of(a), self.of(b))
            case "*":
                return _plus(_times(self.of(a), b), _times(a, self.of(b)))
            case "/":
                first, second = self.of(a), self.of(b)
                if second == _ZERO:
                    return make("/", first, b)
                return make("/", _minus(first, _times(e, second)), b)
            case "neg":
                return _minus(_ZERO, self.of(a))
            case "abs":
                return make("where", make("<", a, _ZERO), _minus(_ZERO, self.of(a)), self.of(a))
            case "min" | "max":
                return make("where", make("<=" if e.op == "min" else ">=", a, b), self.of(a), self.of(b))
            case "where":
                return make("where", a, self.of(b), self.of(e.args[2]))
        return _times(self._outer(e, a), self.of(a))

    @staticmethod
    def _outer(e: Expr, a: Expr) -> Expr:
        """The derivative of a function by its argument."""
        return {
            "tanh": lambda: 1.0 - e * e, "exp": lambda: e, "exp2": lambda: e * math.log(2.0), "log": lambda: 1.0 / a,
            "log2": lambda: 1.0 / math.log(2.0) / a, "sqrt": lambda: 0.5 / e, "sigmoid": lambda: e * (1.0 - e),
        }[e.op]()  # fmt: skip


def check_extent(e: Expr, sizes: dict[str, range]) -> None:
    """sizes: the values that b, h, i and j have. Raises GraphError where a whole number passes 32 bits."""
    _extent(e, sizes)


def _extent(e: Expr, sizes: dict[str, range]) -> tuple[int, int]:
    """The least and the largest that a whole expression gets; (0, 0) of others, of which only the parts matter."""
    parts = [_extent(a, sizes) for a in e.args]
    if e.kind != WHOLE:
        return 0, 0
    low, high = _range(e, parts, sizes)
    if low <= -(2**31) or high >= 2**31:
        rule = "whole numbers of a score function have 32 bits"
        raise GraphError(f"{rule}, {packed(e)[0][:80]} reaches {low} to {high} here; use floats, as in 1.0 * i")
    return low, high


def _range(e: Expr, parts: list[tuple[int, int]], sizes: dict[str, range]) -> tuple[int, int]:
    match e.op:
        case "literal":
            return e.value, e.value
        case "symbol":
            return sizes[e.value][0], sizes[e.value][-1]
        case "where":
            return min(p[0] for p in parts[1:]), max(p[1] for p in parts[1:])
        case "neg":
            return -parts[0][1], -parts[0][0]
        case "abs":
            low, high = parts[0]
            return max(0, low, -high), max(-low, high)
    (a, b), (c, d) = parts
    match e.op:
        case "+":
            return a + c, b + d
        case "-":
            return a - d, b - c
        case "*":
            ends = (a * c, a * d, b * c, b * d)
            return min(ends), max(ends)
        case "min":
            return min(a, c), min(b, d)
        case "max":
            return max(a, c), max(b, d)
        case "//":
            return a // c, b // c
    return 0, c - 1  # %
