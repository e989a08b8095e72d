"""Score functions (ops/score.py) of the reference: the value of an expression for every score of an attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphrt.backends.cpu.arithmetic import by_rows
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams
from graphrt.ops.score import of_params
from graphrt.ops.score_tree import Expr

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh, "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2,
    "sqrt": torch.sqrt, "sigmoid": torch.sigmoid,
}  # fmt: skip
_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div, "neg": torch.neg, "abs": torch.abs,
    "min": torch.minimum, "max": torch.maximum, "%": torch.remainder, "where": torch.where,
    "//": lambda a, b: torch.div(a, b, rounding_mode="floor"), "&": torch.logical_and, "|": torch.logical_or,
    "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne,
}  # fmt: skip


def score_of(p: FlashAttnParams | FlashAttnVarlenParams) -> Expr | None:
    """An attention's score function, None without one."""
    return of_params(p.score, p.score_numbers)


def value(e: Expr, s: torch.Tensor, b: int = 0, i: int = 0) -> torch.Tensor:
    """The value for scores s [n_seq, n_head, n_q, n_kv], in that shape and type. b, i: the first sequence and query."""
    symbols = {name: _positions(s, dim) for dim, name in enumerate("bhij")} | {"s": s}
    symbols |= {"b": symbols["b"] + b, "i": symbols["i"] + i}
    return value_at(e, symbols, s.dtype).expand(s.shape)


def _positions(s: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [1] * s.ndim
    shape[dim] = -1
    return torch.arange(s.shape[dim]).reshape(shape)


def value_at(e: Expr, symbols: dict[str, torch.Tensor], kind: torch.dtype) -> torch.Tensor:
    """The value of an expression where its symbols have these, reals in `kind`; of as many elements as it takes."""
    if e.op == "symbol":
        return symbols[e.value]
    if e.op == "literal":
        return torch.tensor(e.value, dtype=torch.int64 if isinstance(e.value, int) else kind)
    if e.op == "number":
        return torch.tensor(e.value[0], dtype=kind)
    args = [value_at(a, symbols, kind) for a in e.args]
    if e.op == "table":
        return torch.tensor(e.value, dtype=kind)[args[0].clamp(0, len(e.value) - 1)]
    if e.op == "real":
        return args[0].to(kind)
    if e.op in _FUNCTIONS:
        return by_rows(_FUNCTIONS[e.op], args[0])
    found: torch.Tensor = _OPERATORS[e.op](*args)
    return found
