"""The expressions that score functions are made of: nodes, their kinds, and what operators make of them.

An expression is whole (32-bit integers: positions and what is reckoned from them), real (f32) or a truth. Whole becomes
real where it meets a real, and by `/`. Nodes are values: equal ones are equal Python objects, and can be keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphrt.errors import GraphError
from graphrt.op import MAX_F32

WHOLE, REAL, TRUTH = "whole", "real", "truth"
#: Nodes of an expression, and how deep they are nested.
MAX_SIZE, MAX_DEPTH = 200, 40
#: Characters of its text.
MAX_TEXT = 1024
#: Numbers of an expression's tables and parameters in all.
MAX_NUMBERS = 4096
#: Symbols: the score, the sequence, the head of q, the query, the key.
SYMBOLS = {"s": REAL, "b": WHOLE, "h": WHOLE, "i": WHOLE, "j": WHOLE}

#: Functions of one real number, as Python has them.
FUNCTIONS: dict[str, Callable[[float], float]] = {
    "tanh": math.tanh, "exp": math.exp, "exp2": lambda x: 2.0**x, "log": math.log, "log2": math.log2,
    "sqrt": math.sqrt, "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
}  # fmt: skip
_FOLD: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "neg": lambda a: -a, "abs": abs, "min": min, "max": max,
    "real": float, **FUNCTIONS,
}  # fmt: skip
ARITHMETIC = ("+", "-", "*", "neg", "abs", "min", "max")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
#: How tightly operators bind in Python; what is a call, a name or a number binds tightest.
_LEVELS = {**dict.fromkeys(COMPARISONS, 1), "|": 2, "&": 3, "+": 4, "-": 4, "*": 5, "/": 5, "//": 5, "%": 5, "neg": 6}
_TIGHTEST = 9
CALLS = (*FUNCTIONS, "abs", "min", "max", "where")


@dataclass(frozen=True, repr=False)
class Expr:
    """A node. op: "literal", "symbol", "number" (a parameter), "table", "real" (whole as real), "where", an operator or
    a function. value: a literal's, a symbol's name, a number's, a table's numbers. size, depth: of the whole tree."""

    op: str
    args: tuple[Expr, ...] = ()
    value: Any = None
    kind: str = REAL
    size: int = 1
    depth: int = 1

    def __repr__(self) -> str:
        return f"<score function {packed(self)[0]}>" if fits(self) else f"<score function of {self.size} parts>"

    def __bool__(self) -> bool:
        raise GraphError("an expression has no truth value, which positions decide; use score.where(condition, a, b)")

    def __add__(self, other: Operand) -> Expr:
        return make("+", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return make("+", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return make("-", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return make("-", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return make("*", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return make("*", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return make("/", self, other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return make("/", other, self)

    def __floordiv__(self, other: Operand) -> Expr:
        return make("//", self, other)

    def __mod__(self, other: Operand) -> Expr:
        return make("%", self, other)

    def __neg__(self) -> Expr:
        return make("neg", self)

    def __abs__(self) -> Expr:
        return make("abs", self)

    def __lt__(self, other: Operand) -> Expr:
        return make("<", self, other)

    def __le__(self, other: Operand) -> Expr:
        return make("<=", self, other)

    def __gt__(self, other: Operand) -> Expr:
        return make(">", self, other)

    def __ge__(self, other: Operand) -> Expr:
        return make(">=", self, other)

    def equals(self, other: Operand) -> Expr:
        """Whether both are equal; `==` asks whether two expressions are the same."""
        return make("==", self, other)

    def differs(self, other: Operand) -> Expr:
        return make("!=", self, other)

    def __and__(self, other: Expr) -> Expr:
        return make("&", self, other)

    def __or__(self, other: Expr) -> Expr:
        return make("|", self, other)


#: What operators and functions take beside expressions: a number that is compiled in.
Operand = Expr | int | float


def fits(e: Expr) -> bool:
    """It is small enough to be looked at: nodes that a tree has several times count each time."""
    return e.size <= MAX_SIZE and e.depth <= MAX_DEPTH


def literal(x: int | float) -> Expr:
    """A number that is compiled in. Raises GraphError for one that no kernel holds."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise GraphError(f"a score function is made of expressions and numbers, got a {type(x).__name__}")
    if isinstance(x, int) and not -(2**31) < x < 2**31:
        raise GraphError(f"a whole number of a score function has 32 bits, got {x}; write it as a float")
    if isinstance(x, float) and not abs(x) <= MAX_F32:
        raise GraphError(f"a number of a score function must be finite in f32, got {x}")
    return Expr("literal", value=x, kind=WHOLE if isinstance(x, int) else REAL)


def _real(e: Expr) -> Expr:
    if e.kind == REAL:
        return e
    return literal(float(e.value)) if e.op == "literal" else _node("real", (e,), REAL)


def _node(op: str, args: tuple[Expr, ...], kind: str, value: Any = None) -> Expr:
    return Expr(op, args, value, kind, 1 + sum(a.size for a in args), 1 + max(a.depth for a in args))


def make(op: str, *operands: Operand) -> Expr:
    """What an operator or a function makes of its operands: literals of literals. Raises GraphError for operands that
    it does not take."""
    args = tuple(x if isinstance(x, Expr) else literal(x) for x in operands)
    args, kind = _matched(op, args)
    if op in _FOLD and all(a.op == "literal" for a in args):
        try:
            found = _FOLD[op](*(a.value for a in args))
        except (ArithmeticError, ValueError) as error:
            raise GraphError(f"{op} of {', '.join(str(a.value) for a in args)} is no number: {error}") from error
        return literal(found)
    return _node(op, args, kind)


def _matched(op: str, args: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], str]:
    """Operands in the kinds that an operator takes, and the kind of its result."""
    kinds = {a.kind for a in args}
    if op in ("&", "|"):
        return _require(kinds == {TRUTH}, op, "joins truths, as comparisons give", args), TRUTH
    if op == "where":
        _require(args[0].kind == TRUTH, op, "takes a truth first, as comparisons give", args)
        _require(TRUTH not in {a.kind for a in args[1:]}, op, "chooses between numbers", args)
        whole = all(a.kind == WHOLE for a in args[1:])
        return (args[0], *(a if whole else _real(a) for a in args[1:])), WHOLE if whole else REAL
    _require(TRUTH not in kinds, op, "takes numbers, not truths; use score.where(condition, a, b)", args)
    if op in ("//", "%"):
        divisor = args[1].op == "literal" and args[1].kind == WHOLE and args[1].value > 0
        _require(kinds == {WHOLE} and divisor, op, "divides a whole number by a written one over 0", args)
        return args, WHOLE
    if op in COMPARISONS:
        rule = "compares what is known when a kernel runs: two numbers that are written out are no question"
        _require(any(a.op != "literal" for a in args), op, rule, args)
    if (op in ARITHMETIC or op in COMPARISONS) and kinds == {WHOLE}:
        return args, WHOLE if op in ARITHMETIC else TRUTH
    return tuple(map(_real, args)), TRUTH if op in COMPARISONS else REAL


def _require(ok: bool, op: str, rule: str, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    if not ok:
        raise GraphError(f"score function: {op} {rule}, got {', '.join(a.kind for a in args)}")
    return args


def leaf(op: str, values: tuple[float, ...]) -> Expr:
    """A parameter ("number", of one value). Raises GraphError for what f32 does not hold."""
    for x in values:
        literal(float(x))
    return Expr(op, value=tuple(float(x) for x in values))


def lookup(values: tuple[float, ...], index: Operand) -> Expr:
    """The index-th number of a table; beyond its ends the first and the last. Raises GraphError unless it is whole."""
    at = index if isinstance(index, Expr) else literal(index)
    _require(at.kind == WHOLE, "a table", "is asked with a whole number", (at,))
    if not 1 <= len(values) <= MAX_NUMBERS:
        raise GraphError(f"a table has 1 to {MAX_NUMBERS} numbers, got {len(values)}; larger ones are attn_bias")
    return _node("table", (at,), REAL, leaf("number", values).value)


def symbol(name: str) -> Expr:
    return Expr("symbol", value=name, kind=SYMBOLS[name])


class Places:
    """Where numbers lie. numbers: of parameters and tables so far, as the text comes to them; equal ones once."""

    def __init__(self) -> None:
        self.numbers: list[float] = []
        self.found: dict[tuple[float, ...], int] = {}

    def place(self, values: tuple[float, ...]) -> int:
        if values not in self.found:
            self.found[values] = len(self.numbers)
            self.numbers += values
        return self.found[values]

    def write(self, e: Expr) -> tuple[str, int]:
        """(text, how tightly it binds)."""
        if e.op == "literal":
            return repr(e.value), 6 if e.value < 0 else _TIGHTEST
        if e.op == "symbol":
            return e.value, _TIGHTEST
        if e.op == "number":
            return f"p[{self.place(e.value)}]", _TIGHTEST
        if e.op == "table":
            at = self.place(e.value)
            return f"t[{at}:{at + len(e.value)}, {self.write(e.args[0])[0]}]", _TIGHTEST
        if e.op == "real":  # which parsing finds again
            return self.write(e.args[0])
        if e.op in CALLS:
            return f"{e.op}({', '.join(self.write(a)[0] for a in e.args)})", _TIGHTEST
        level = _LEVELS[e.op]
        parts = []
        for at, arg in enumerate(e.args):
            text, binds = self.write(arg)
            tight = binds > level or (binds == level and at == 0 and level > 1 and e.op != "neg")
            parts.append(text if tight else f"({text})")
        return f"-{parts[0]}" if e.op == "neg" else f" {e.op} ".join(parts), level


def packed(e: Expr) -> tuple[str, tuple[float, ...]]:
    """(text, numbers) of an expression. Raises GraphError for one that is too large."""
    if not fits(e):
        rule = f"a score function has up to {MAX_SIZE} parts, {MAX_DEPTH} levels deep"
        raise GraphError(f"{rule}, this one {e.size} and {e.depth}; put what positions decide into a table")
    writer = Places()
    text = writer.write(e)[0]
    if len(text) > MAX_TEXT or len(writer.numbers) > MAX_NUMBERS:
        rule = f"a score function takes {MAX_TEXT} characters and {MAX_NUMBERS} numbers at most"
        raise GraphError(f"{rule}, this one {len(text)} and {len(writer.numbers)}; larger tables are attn_bias")
    return text, tuple(writer.numbers)
