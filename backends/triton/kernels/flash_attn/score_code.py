"""Score functions as Triton code: a @triton.jit function a text, which attention's kernels take as a constant.

Triton reads a function's source by its file's name. Generated source has the name `<score NAME>` and lies in linecache,
where Python's own tools look for source that is in no file. NAME is a digest of all that its code is made of: kernels
that are compiled with it are found again on disk, whatever they have it in.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common import activation
from graphrt.backends.triton.kernels.flash_attn import score_math
from graphrt.op import MAX_F32
from graphrt.ops.score import of_params
from graphrt.ops.score_calculus import derivative
from graphrt.ops.score_tree import REAL, Expr, Places, packed

_BINARY = ("+", "-", "*", "/", "<", "<=", ">", ">=", "==", "!=", "&", "|")
#: Functions of score_math that made code calls.
HELPERS = ("tanh", "floor_div", "floor_mod", "look_up")
#: The smallest f32 that Triton takes a written number for.
_TINY = 2.0**-126


class Code:
    """Lines of a function's body: each value that is different is made once. language: the module that it calls; nan:
    how minima are told to keep NaN."""

    language = "tl"
    nan = "propagate_nan=tl.PropagateNan.ALL"

    def __init__(self, e: Expr) -> None:
        self.places = Places()
        self.places.write(e)  # numbers lie where the text has them
        self.lines: list[str] = []
        self.made: dict[str, str] = {}
        self.seen: dict[int, tuple[Expr, str]] = {}

    def of(self, e: Expr) -> str:
        """The name of an expression's value, or a written number."""
        if id(e) not in self.seen:
            self.seen[id(e)] = e, self._name(e)
        return self.seen[id(e)][1]

    def _name(self, e: Expr) -> str:
        if e.op == "literal":
            return _written(e.value)
        if e.op == "symbol":
            return str(e.value)
        return self._line(self._text(e, [self.of(a) for a in e.args]))

    def _line(self, code: str) -> str:
        if code not in self.made:
            self.made[code] = f"x{len(self.made)}"
            self.lines.append(f"{self.made[code]} = {code}")
        return self.made[code]

    def _text(self, e: Expr, args: list[str]) -> str:
        if e.op in ("min", "max"):
            end = f", {self.nan}" if e.kind == REAL else ""
            return f"{self.language}.{e.op}imum({args[0]}, {args[1]}{end})"
        if e.op == "/" and e.args[1].op in ("number", "literal"):  # one division for all scores
            return f"{args[0]} * {self._inverse(e.args[1], args[1])}"
        if e.op in _BINARY:
            return f"{args[0]} {e.op} {args[1]}"
        match e.op:
            case "number":
                return f"{self.language}.load(p + {self.places.place(e.value)})"
            case "table":
                return f"look_up(p, {args[0]}, {self.places.place(e.value)}, {len(e.value)})"
            case "//":
                return f"floor_div({args[0]}, {args[1]})"
            case "%":
                return f"floor_mod({args[0]}, {args[1]})"
            case "real":
                return f"{args[0]}.to({self.language}.float32)"
            case "neg":
                return f"-{args[0]}"
        return self.call(e.op, args)

    def call(self, function: str, args: list[str]) -> str:
        """A call of one of score_tree.FUNCTIONS, abs or where."""
        if function == "tanh":
            return f"tanh({args[0]}, ACCURATE)"
        return f"{self.language}.{function}({', '.join(args)})"

    def _inverse(self, divisor: Expr, name: str) -> str:
        if divisor.op == "literal" and _TINY <= abs(1.0 / divisor.value) <= MAX_F32:
            return _written(1.0 / divisor.value)
        return self._line(f"1.0 / {name}")


def _written(x: int | float) -> str:
    if isinstance(x, int):
        return repr(x)
    rounded = float(np.float32(x))
    return repr(rounded if abs(rounded) >= _TINY else 0.0)


def source(text: str, numbers: tuple[float, ...], slope: bool) -> str:
    """The function of a text in Triton: (s, b, h, i, j, p, ACCURATE) -> its value, f32 in the shape of s; with slope:
    (value, its derivative by s, which may have fewer elements and spreads). p: f32, the numbers."""
    e = of_params(text, numbers)
    assert e is not None
    code = Code(e)
    results = [code.of(e)]
    if slope:
        d = derivative(e)
        results.append(f"tl.full([1, 1], {_written(d.value)}, tl.float32)" if d.op == "literal" else code.of(d))
    body = "".join(f"    {line}\n" for line in code.lines)
    body += f"    return {', '.join(results)}\n"
    name = hashlib.sha256((_helpers() + body).encode()).hexdigest()[:16]
    return f"@triton.jit\ndef score_{name}(s, b, h, i, j, p, ACCURATE: tl.constexpr):\n{body}"


@lru_cache
def _helpers() -> str:
    return inspect.getsource(score_math) + inspect.getsource(activation)


def function_of(params: Any, slope: bool = False) -> Any:
    """The jit function of an attention's parameters, None without a score function."""
    text = getattr(params, "score", "")
    return _function(text, params.score_numbers, slope) if text else None


@lru_cache(maxsize=256)
def _function(text: str, numbers: tuple[float, ...], slope: bool) -> Any:
    return _of_source(source(text, numbers, slope))


@lru_cache(maxsize=256)
def _of_source(code: str) -> Any:
    """One function for all numbers of a text."""
    helpers = {name: getattr(score_math, name) for name in HELPERS}
    found = made(code, score_math.__name__, {"triton": triton, "tl": tl, **helpers})
    return found[code.partition("def ")[2].partition("(")[0]]


def made(code: str, module: str, scope: dict[str, Any]) -> dict[str, Any]:
    """What generated code defines, by name. module: that it counts as part of; scope: names that it may use."""
    file = f"<score {code.partition('def ')[2].partition('(')[0]}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    namespace = {"__name__": module, **scope}
    exec(compile(code, file, "exec"), namespace)  # noqa: S102 (our own code)
    return namespace


def numbers_of(params: Any, device: str | torch.device) -> torch.Tensor:
    """The numbers as functions read them, f32; one that nobody reads where there are none."""
    e = of_params(getattr(params, "score", ""), getattr(params, "score_numbers", ()))
    return torch.tensor((packed(e)[1] if e is not None else ()) or (0.0,), dtype=torch.float32, device=device)


def why_not(params: Any) -> str | None:
    """Why a kernel that knows no score functions does not serve, None where there is none."""
    text = getattr(params, "score", "")
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return f"it has no score function, which the portable kernel has, {shown} here" if text else None
