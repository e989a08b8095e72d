"""Score functions: what an attention makes of a score before its softmax, written as an expression.

    s, b, h, i, j = score.symbols()
    cap = score.number(30.0)
    out = ops.flash_attn_ext(q, k, v, mask, scale, score=cap * score.tanh(s / cap))

s is scale * q.k (of an attention with a softcap: what that made of it); b, h, i, j are the sequence, the head of q, the
query and the key, counted from 0 as they lie in q and k; in packed sequences (FLASH_ATTN_VARLEN) i and j are positions
in the sequence, so that its last query is its last key. The result takes the place of s; attn_bias and mask are added
to it. Keys whose mask is -inf stay hidden whatever it gives, so that blocks of them are skipped; -inf hides a key too,
but saves no work.

Numbers that are written as such are compiled into kernels; score.number() and score.table() are read by them, so that
other values compile nothing. A table is asked with a whole number and gives its ends beyond them. Whole numbers have
32 bits; // and % round down and divide by a written number over 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.ops.score_calculus import check_extent, depends
from graphrt.ops.score_text import parsed
from graphrt.ops.score_tree import REAL, SYMBOLS, Expr, Operand, leaf, lookup, make, packed, symbol
from graphrt.ops.soft_max import alibi_slopes

__all__ = [
    "Expr", "Table", "alibi", "bias", "exp", "exp2", "identity", "log", "log2", "maximum", "minimum", "number",
    "relative", "sigmoid", "sigmoid_gate", "softcap", "sqrt", "symbols", "table", "tanh", "temperature", "where",
]  # fmt: skip


def symbols() -> tuple[Expr, Expr, Expr, Expr, Expr]:
    """(s, b, h, i, j)."""
    s, b, h, i, j = map(symbol, SYMBOLS)
    return s, b, h, i, j


@checked(GraphError)
def number(x: float) -> Expr:
    """A parameter, which kernels read. Raises GraphError unless it is finite in f32."""
    return leaf("number", (float(x),))


class Table:
    """Numbers that are looked up: table(values)[index]."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = tuple(float(x) for x in values)

    def __getitem__(self, index: Operand) -> Expr:
        return lookup(self.values, index)


@checked(GraphError)
def table(values: Sequence[float]) -> Table:
    """Up to 4096 numbers; table(values)[index] is an expression. Raises GraphError for others when it is asked."""
    return Table(values)


def tanh(x: Operand) -> Expr:
    return make("tanh", x)


def exp(x: Operand) -> Expr:
    return make("exp", x)


def exp2(x: Operand) -> Expr:
    return make("exp2", x)


def log(x: Operand) -> Expr:
    return make("log", x)


def log2(x: Operand) -> Expr:
    return make("log2", x)


def sqrt(x: Operand) -> Expr:
    return make("sqrt", x)


def sigmoid(x: Operand) -> Expr:
    return make("sigmoid", x)


def minimum(a: Operand, b: Operand) -> Expr:
    return make("min", a, b)


def maximum(a: Operand, b: Operand) -> Expr:
    return make("max", a, b)


def where(condition: Expr, a: Operand, b: Operand) -> Expr:
    """a where the condition holds, else b."""
    return make("where", condition, a, b)


# -- a set of them


def identity() -> Expr:
    """The score as it is: an attention without a function."""
    return symbol("s")


def softcap(cap: float) -> Expr:
    """cap * tanh(s / cap)."""
    c = number(cap)
    return c * tanh(symbol("s") / c)


def bias(values: Sequence[float]) -> Expr:
    """s plus a number of each key."""
    return symbol("s") + table(values)[symbol("j")]


def alibi(n_head: int, max_bias: float = 8.0) -> Expr:
    """s less the distance of query and key times the head's slope (arXiv 2108.12409); for as many queries as keys."""
    s, _, h, i, j = symbols()
    return s - table(alibi_slopes(n_head, max_bias))[h] * abs(i - j)


def relative(values: Sequence[float]) -> Expr:
    """s plus a number for the distance i - j, the middle one of an odd number of them for 0; farther ones get the ends,
    as T5's (arXiv 1910.10683) do."""
    if len(values) % 2 == 0:
        raise GraphError(f"a table of distances has a middle: an odd number of numbers, got {len(values)}")
    s, _, _, i, j = symbols()
    return s + table(values)[i - j + len(values) // 2]


def sigmoid_gate(slope: float, offset: float = 0.0) -> Expr:
    """s * sigmoid(slope * s + offset): small scores count less."""
    s = symbol("s")
    return s * sigmoid(number(slope) * s + number(offset))


def temperature(of_head: Sequence[float]) -> Expr:
    """s over a temperature of each head. Raises GraphError for one that is not over 0."""
    if any(not x > 0 for x in of_head):
        raise GraphError(f"temperatures are over 0, got {min(of_head)}")
    return symbol("s") * table([1.0 / x for x in of_head])[symbol("h")]


# -- as an op has them


def as_params(e: Expr | None) -> tuple[str, tuple[float, ...]]:
    """An op's parameters score and score_numbers; ("", ()) for none and for the score itself. Raises GraphError for an
    expression that is too large, or no number."""
    if e is None or e == symbol("s"):
        return "", ()
    text, numbers = packed(e)
    check_use(e)
    return text, numbers


def check_use(e: Expr) -> None:
    """Raises GraphError for an expression that is no function of the score."""
    if e.kind != REAL or not depends(e, "s"):
        raise GraphError(f"a score function gives a number that depends on s, got {packed(e)[0][:80]!r}")


@lru_cache(maxsize=256)
def of_params(text: str, numbers: tuple[float, ...]) -> Expr | None:
    """The function of an op's parameters, None without one. Raises GraphError for what is none."""
    if text in ("", "s"):
        if text or numbers:
            raise GraphError(f"no score function is the text '' and no numbers, got {text!r} and {len(numbers)}")
        return None
    e = parsed(text, numbers)
    check_use(e)
    return e


def check_params(text: str, numbers: tuple[float, ...], sizes: dict[str, range]) -> None:
    """Raises GraphError for what is no score function of an attention of these sequences (b), heads (h), queries (i)
    and keys (j)."""
    if not all(math.isfinite(x) for x in numbers):
        raise GraphError("the numbers of a score function must be finite")
    e = of_params(text, numbers)
    if e is not None:
        check_extent(e, sizes)


# -- those that an attention has as parameters of its own

P = TypeVar("P")
#: Texts whose values are, operation by operation, those of a parameter of the op: the parameter, which must be 0 beside
#: it, and what of the function's only number it is. tanh is odd: -c * tanh(s / -c) is c * tanh(s / c) to the bit.
BUILT_IN = {"p[0] * tanh(s / p[0])": ("softcap", abs)}


def built_in(params: P) -> P:
    """An attention's parameters with a score function that a parameter of the op stands for as that parameter; the same
    object where there is none of the kind. Backends ask it, so that such a function takes the path of the parameter."""
    p: Any = params
    name, made_of = BUILT_IN.get(getattr(p, "score", ""), ("", abs))
    if not name or getattr(p, name) != 0 or p.score_numbers[0] == 0:
        return params
    return replace(p, score="", score_numbers=(), **{name: made_of(p.score_numbers[0])})  # type: ignore[no-any-return]
