"""A backend whose kernels are a GPU's ways in numpy, correct unless a mutant replaces one of their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from graphrt.backend import API_VERSION, Backend, Device, Group, Usage
from graphrt.backends.cpu.memory import CpuBuffer, allocate
from graphrt.backends.cpu.reference import why_unsupported
from graphrt.ops.flash_attn_ext import PREC_F32
from graphrt.program import Program, in_order
from graphrt.tensor import Tensor
from graphrt.tools.conformance.mutants.memory import Kernel, Place
from graphrt.tools.conformance.mutants.pieces import KERNELS, Mutant


class KernelBuffer(CpuBuffer):
    """Host memory of this backend."""

    backend = "kernels"


class KernelBackend(Backend):
    """Runs a mutant, or correct kernels without one. A mutant's change only stands in nodes where it is active."""

    name: ClassVar[str] = "kernels"
    api_version: ClassVar[int] = API_VERSION

    def __init__(self, mutant: Mutant | None = None) -> None:
        self.mutant = mutant
        self.mutated = mutant.kernel() if mutant else None

    @classmethod
    def unusable(cls) -> str | None:
        return None

    @classmethod
    def score(cls) -> int:
        return 0

    def devices(self) -> list[Device]:
        return [Device("kernels", "numpy, one thread")]

    def supports(self, node: Tensor) -> str | None:
        if node.op not in KERNELS:
            return f"it has no kernel for {node.op}"
        if node.op in ("FLASH_ATTN_EXT", "FLASH_ATTN_LSE") and (node["attn_bias"] or node.params.dropout_p):
            return "its attention has neither attn_bias nor dropout"
        if getattr(node.params, "prec", 0) == PREC_F32:
            return "its attention multiplies in f16, prec asks for f32"
        eight = node.op in ("FLASH_ATTN_EXT", "FLASH_ATTN_LSE")
        if not eight and any(t.dtype.is_float8 for t in (node, *node.sources())):
            return "of its kernels attention alone has floats of 8 bits"
        return why_unsupported(node)

    def alloc(self, nbytes: int, usage: Usage) -> KernelBuffer:
        return KernelBuffer(allocate(nbytes, usage).memory, usage)

    def kernel(self, node: Tensor) -> type[Kernel]:
        """The class that runs a node."""
        if self.mutant is None or self.mutated is None or node.op != self.mutant.op or not self.mutant.active(node):
            return KERNELS[node.op]
        return self.mutated

    def compile(self, groups: Sequence[Group], place: Place) -> Program:
        bound = [self.kernel(node)(node, place) for group in groups for node in group.nodes]
        return Program(groups, in_order([kernel.run for kernel in bound]))
