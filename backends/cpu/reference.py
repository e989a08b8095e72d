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
from graphrt.op import op_spec
from graphrt.tensor import Tensor

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """function: (node, *sources) -> result, with the sources in the op's order and by its names for them. stored: the
    sources that are passed undecoded."""

    function: Function
    stored: tuple[str, ...] = ()


REFERENCES: dict[str, Reference] = {}


def reference(op: str, stored: tuple[str, ...] = ()) -> Callable[[Function], Function]:
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
        given if given is None or name in ref.stored else decode(given, node[name].dtype, to)
        for name, given in zip(op_spec(node.op).names, sources)
    ]
    return ref.function(node, *decoded)


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
