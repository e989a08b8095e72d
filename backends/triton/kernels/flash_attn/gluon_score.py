"""Score functions as Gluon code: score_code.py for kernels that hold rows of queries against blocks of keys.

A text becomes two functions. `rows` makes, once a tile, what does not depend on score and key: numbers and their
inverses, what tables have for a head, the query's position. `value` makes of a block's scores, its keys and what `rows`
found the scores that take their place.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from functools import lru_cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan, constexpr

from graphrt.backends.triton.kernels.flash_attn import gluon_score_math
from graphrt.backends.triton.kernels.flash_attn.score_code import HELPERS, Code, made
from graphrt.ops.score import of_params
from graphrt.ops.score_calculus import depends
from graphrt.ops.score_tree import Expr


class _Gluon(Code):
    """inner: names of lines that depend on score or key."""

    language = "gl"
    nan = "propagate_nan=ALL"

    def __init__(self, e: Expr) -> None:
        super().__init__(e)
        self.inner: set[str] = set()

    def _name(self, e: Expr) -> str:
        found = super()._name(e)
        if found in self.made.values() and (depends(e, "s") or depends(e, "j")):
            self.inner.add(found)
        return found

    def call(self, function: str, args: list[str]) -> str:
        return f"{function}({args[0]})" if function in ("tanh", "sigmoid") else super().call(function, args)


def source(text: str, numbers: tuple[float, ...]) -> str:
    """Both functions of a text. rows: (b, h, i, p) -> a tuple; b: int32, the sequence; h, i: int32 [rows, 1], head and
    query; p: the numbers, f32. value: (s, j, that tuple) -> f32 in the shape of s; j: int32 [1, keys]."""
    e = of_params(text, numbers)
    assert e is not None
    code = _Gluon(e)
    result = code.of(e)
    inner = [line for line in code.lines if line.split(" = ")[0] in code.inner]
    outer = [line for line in code.lines if line not in inner]
    known = ["b", "h", "i", "p", *(line.split(" = ")[0] for line in outer)]
    asked = set(re.findall(r"\w+", " ".join([*(line.split(" = ", 1)[1] for line in inner), result])))
    kept = [name for name in known if name in asked] or ["p"]
    comma = "," if len(kept) == 1 else ""
    names = ", ".join(kept) + comma
    of_rows = [*outer, f"return ({names})"]
    of_value = [f"{names} = rows", *inner, f"return {result}"]
    body = "".join(f"    {line}\n" for line in (*of_rows, *of_value))
    name = hashlib.sha256((_helpers() + body).encode()).hexdigest()[:16]
    parts = [("rows", "b, h, i, p", of_rows), ("value", "s, j, rows", of_value)]
    return "\n\n".join(
        f"@gluon.jit\ndef {part}_{name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines)
        for part, arguments, lines in parts
    )


@lru_cache
def _helpers() -> str:
    return inspect.getsource(gluon_score_math)


def functions_of(params: Any) -> dict[str, Any]:
    """A Spec's constants score and score_rows for an attention's parameters; nothing without a score function."""
    return _functions(params.score, params.score_numbers) if params.score else {}


@lru_cache(maxsize=256)
def _functions(text: str, numbers: tuple[float, ...]) -> dict[str, Any]:
    code = source(text, numbers)
    helpers = {name: getattr(gluon_score_math, name) for name in (*HELPERS, "sigmoid")}
    scope = {"gluon": gluon, "gl": gl, "ALL": constexpr(PropagateNan.ALL), **helpers}
    found = made(code, gluon_score_math.__name__, scope)
    rows, value = (found[name] for name in re.findall(r"def (\w+)", code))
    return {"score": value, "score_rows": rows}
