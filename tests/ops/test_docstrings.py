"""What a user calls to build graphs says what it takes, what it computes and after whom, and what it refuses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graphrt import ops
from graphrt.dtypes import TYPES

BUILDERS = [name for name in ops.__all__ if name[0].islower()]
#: A formula, or the reason why there is none.
FORMULA = re.compile(r"\bresult\b(\[[^=]*\])?[^;:=]{0,40}? = |a\[result\[0\], j\] <= |\bNo formula: \w")
TYPE = re.compile(rf"\b(any( plain)?( float)?( or quantized)? type|one plain type|{'|'.join(TYPES)})\b")


def missing(build: Callable[..., Any]) -> Iterator[str]:
    """What the docstring of an op's function does not say."""
    text = inspect.getdoc(build) or ""
    for name in inspect.signature(build).parameters:
        if name != "name" and not re.search(rf"(?<!\w){name}(?!\w)", text):  # every node may have a name
            yield f"its argument {name!r}"
    for what, rule in (
        ("a formula, or `No formula:` and why", FORMULA), ("a type", TYPE), ("the result's type or shape", r"result"),
        ("its source (`Source: ...`)", r"Source: \w"), ("its errors", r"Raises GraphError\s+(for|where)\s\S"),
    ):  # fmt: skip
        if not re.search(rule, re.sub(r"\s+", " ", text)):
            yield what


@pytest.mark.parametrize("name", BUILDERS)
def test_an_op_says_what_it_is(name: str) -> None:
    assert list(missing(getattr(ops, name))) == []


def test_what_is_missing_is_found() -> None:
    def whole(a: int, eps: float, name: str = "") -> None:
        """Norm: result = a / eps. a: f32. Source: ggml_norm. Raises GraphError for others."""

    assert list(missing(whole)) == []
    text = str(whole.__doc__)
    for cut in ("a: f32", "/ eps", "result = ", "Source: ggml_norm", "Raises GraphError"):
        whole.__doc__ = text.replace(cut, "").replace("a / ", "") if cut == "a: f32" else text.replace(cut, "")
        assert list(missing(whole)), cut
