"""The table of reference functions, one an op, and how they are called.

A reference function takes the node and its sources and returns the result. Sources come decoded: float types in the
compute type (float32, or float64 on request), integers as int64, shapes as torch's (`ne` reversed, four dimensions).
Sources listed in `stored` come as they lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphrt.backends.cpu.blocks import DECODABLE, ENCODABLE, decode
from graphrt.dtypes import DType
from graphrt.tensor import Tensor

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """function: (node, *sources) -> result. stored: indices of sources that are passed undecoded."""

    function: Function
    stored: tuple[int, ...] = ()


REFERENCES: dict[str, Reference] = {}


def reference(op: str, stored: tuple[int, ...] = ()) -> Callable[[Function], Function]:
    """Declares the reference function of an op."""

    def declare(function: Function) -> Function:
        REFERENCES[op] = Reference(function, stored)
        return function

    return declare


def evaluate(node: Tensor, sources: Sequence[torch.Tensor | None], to: torch.dtype = torch.float64) -> torch.Tensor:
    """The result of one node in the compute type `to`, not rounded to the node's own type.

    sources: stored elements in torch's shape (quantized rows as uint8 bytes), None where absent. For an op that writes
    into a source (SET_ROWS, CPY) the result is the value of what it writes, before encoding.
    """
    ref = REFERENCES[node.op]
    decoded = [
        source if source is None or i in ref.stored else decode(source, _dtype_of(node, i), to)
        for i, source in enumerate(sources)
    ]
    return ref.function(node, *decoded)


def _dtype_of(node: Tensor, i: int) -> DType:
    source = node.src[i]
    assert source is not None
    return source.dtype


def why_unsupported(node: Tensor) -> str | None:
    """None when the reference takes the node, else a sentence why not. Only types can stand in the way."""
    if node.op not in REFERENCES:
        return f"op {node.op} has no reference function"
    for source in node.sources():
        if source.dtype.kind != "int" and source.dtype.name not in DECODABLE:
            return f"type {source.dtype.name} of {source.name!r} can't be decoded"
    if node.dtype.kind != "int" and node.dtype.name not in ENCODABLE:
        return f"results of type {node.dtype.name} can't be encoded"
    return None
