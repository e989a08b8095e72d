"""Vectors of constants in LLVM's IR. Most come many times in a kernel, and llvmlite takes long to make one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from llvmlite import ir


def vector(element: Any, values: Iterable[Any]) -> Any:
    """A constant vector of numbers of type `element`."""
    number = int if isinstance(element, ir.IntType) else float
    return _made(element, repr([number(x) for x in values]))  # as text, in which 0.0 and -0.0 are two


@functools.cache
def _made(element: Any, text: str) -> Any:
    number = int if isinstance(element, ir.IntType) else float
    numbers = [number(x) for x in text[1:-1].split(", ")]
    return ir.Constant(ir.VectorType(element, len(numbers)), numbers)
