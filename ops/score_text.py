"""Score functions read from their text and numbers, which is how an op's parameters have them (score_tree.packed).

    p[0] * tanh(s / p[0])              (30.0,)
    s + t[0:255, i - j + 127]          255 numbers: t[from:to, index] is a table among them

The text is Python's syntax, so that anyone can check it with eval(). Numbers are no part of it, so that kernels are
compiled once for all of them.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

from graphrt.errors import GraphError
from graphrt.ops.score_tree import (
    CALLS,
    MAX_DEPTH,
    MAX_NUMBERS,
    MAX_TEXT,
    SYMBOLS,
    Expr,
    leaf,
    literal,
    lookup,
    make,
    packed,
    symbol,
)

_AST: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&",
    ast.BitOr: "|", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_ARGUMENTS = {"min": 2, "max": 2, "where": 3}


@lru_cache(maxsize=256)
def parsed(text: str, numbers: tuple[float, ...]) -> Expr:
    """The expression of a text and numbers, which may be a stranger's. Raises GraphError unless they are what packed()
    gives for it."""
    if len(text) > MAX_TEXT or len(numbers) > MAX_NUMBERS:
        rule = f"a score function takes {MAX_TEXT} characters and {MAX_NUMBERS} numbers at most"
        raise GraphError(f"{rule}, got {len(text)} and {len(numbers)}")
    try:
        e = _Reader(numbers).read(ast.parse(text, mode="eval").body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise GraphError(f"score must be the text of a score function, got {text[:80]!r}: {error}") from error
    again = packed(e)
    if again != (text, numbers):
        raise GraphError(f"score must be written as ops.score writes it, {again[0][:80]!r}, got {text[:80]!r}")
    return e


class _Reader:
    def __init__(self, numbers: tuple[float, ...]) -> None:
        self.numbers = numbers

    def read(self, node: ast.expr, depth: int) -> Expr:
        if depth > MAX_DEPTH:
            raise GraphError(f"a score function is at most {MAX_DEPTH} levels deep")
        match node:
            case ast.Constant(value=int() | float() as value):
                return literal(value)
            case ast.Name(id=name) if name in SYMBOLS:
                return symbol(name)
            case ast.UnaryOp(op=ast.USub(), operand=a):
                return make("neg", self.read(a, depth + 1))
            case ast.BinOp(left=a, op=op, right=b) if type(op) in _AST:
                return make(_AST[type(op)], self.read(a, depth + 1), self.read(b, depth + 1))
            case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in _AST:
                return make(_AST[type(op)], self.read(a, depth + 1), self.read(b, depth + 1))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in CALLS:
                if len(args) != _ARGUMENTS.get(name, 1):
                    raise GraphError(f"{name}() of a score function takes {_ARGUMENTS.get(name, 1)}, got {len(args)}")
                return make(name, *(self.read(a, depth + 1) for a in args))
            case ast.Subscript(value=ast.Name(id="p"), slice=ast.Constant(value=int(at))):
                return leaf("number", self._numbers(at, at + 1))
            case ast.Subscript(
                value=ast.Name(id="t"), slice=ast.Tuple(elts=[ast.Slice(lower=low, upper=high, step=None), index])
            ):
                return lookup(self._numbers(_whole(low), _whole(high)), self.read(index, depth + 1))
        raise GraphError(f"a score function has no {type(node).__name__}; see ops/score.py for what it is made of")

    def _numbers(self, low: int, high: int) -> tuple[float, ...]:
        if not 0 <= low < high <= len(self.numbers):
            raise GraphError(f"it names numbers {low} up to {high} of a score function that has {len(self.numbers)}")
        return self.numbers[low:high]


def _whole(node: Any) -> int:
    value = getattr(node, "value", None)
    if type(value) is not int:
        raise GraphError("a table's ends are whole numbers, t[0:16, index]")
    return value
