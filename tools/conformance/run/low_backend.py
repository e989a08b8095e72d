"""A backend that computes every node in low precision: what an honest kernel, or a step of them, is off by."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphrt.backends.cpu import CpuBackend
from graphrt.backends.cpu.reference import REFERENCES, Reference
from graphrt.tensor import Tensor
from graphrt.tools.conformance.run.lowprec import LOW, low

#: Rows are moved and decoded, not computed: the reference's way, which decodes no more of a table than it reads.
_AS_REFERENCE = ("GET_ROWS",)


class LowPrecision(CpuBackend):
    """The CPU backend with the functions of lowprec.py; ops that round nothing are the reference's.

    rounds: what a product's activations are rounded to on purpose, as Backend.rounds_activations() has it. It goes by
    the name of cpu, whose memory it uses.
    """

    def __init__(self, rounds: Callable[[Tensor], str | None] = lambda node: None) -> None:
        super().__init__()
        self.rounds = rounds

    def reference_of(self, node: Tensor) -> Reference:
        if node.op not in LOW or node.op in _AS_REFERENCE:
            return REFERENCES[node.op]

        def function(node: Tensor, *sources: torch.Tensor | None) -> torch.Tensor:
            rounded = self.rounds(node) if node.op == "MUL_MAT" else None
            return low(node, list(sources), rounded)

        return Reference(function)
