"""Launches: a kernel with all its arguments, made once and run many times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphrt.backends.triton.device import interpreting

if interpreting():
    from graphrt.backends.triton import interpreter  # noqa: F401  (mends Triton's interpreter)


@dataclass(frozen=True)
class Launch:
    """kernel: a triton.jit function; args: tensors, numbers and constexprs by name; options: num_warps etc."""

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> None:
        self.kernel[self.grid](**self.args, **self.options)
