"""CpuBackend: binds reference functions, or their fast forms, to memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from graphrt.backend import API_VERSION, Backend, Bytes, Device, Group, Place, Region, Usage
from graphrt.backends.cpu import arithmetic, attention, matmul, movement  # noqa: F401  (they fill REFERENCES)
from graphrt.backends.cpu.blocks import decode, encode
from graphrt.backends.cpu.memory import CpuBuffer, allocate, strided, wrap
from graphrt.backends.cpu.reference import REFERENCES, why_unsupported
from graphrt.op import op_spec
from graphrt.tensor import Tensor

Step = Callable[[], None]


class CpuBackend(Backend):
    """The reference. dtype: the compute type, torch.float32 or torch.float64 (results are stored in their own types).

    Constant weights of a quantized type are decoded once and kept in the compute type.
    """

    name: ClassVar[str] = "cpu"
    api_version: ClassVar[int] = API_VERSION

    def __init__(self, *, exact: bool = True, dtype: torch.dtype = torch.float32) -> None:
        self.exact = exact
        self.dtype = dtype
        self._decoded: dict[object, torch.Tensor] = {}

    @classmethod
    def unusable(cls) -> str | None:
        return None

    @classmethod
    def score(cls) -> int:
        return 1

    def devices(self) -> list[Device]:
        pages, free, size = (os.sysconf(n) for n in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES", "SC_PAGE_SIZE"))
        name = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        return [Device("cpu", name, pages * size, free * size)]

    def supports(self, node: Tensor) -> str | None:
        return why_unsupported(node)

    def alloc(self, nbytes: int, usage: Usage) -> CpuBuffer:
        return allocate(nbytes, usage)

    def wrap_host(self, data: Bytes) -> CpuBuffer:
        return wrap(data)

    def fuse(self, region: Region) -> list[Group]:
        return [Group([node]) for node in region.nodes]

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Step:
        steps = [self.bind(node, place) for group in groups for node in group.nodes]

        def run() -> None:
            for step in steps:
                step()

        return run

    def bind(self, node: Tensor, place: Callable[[Tensor], Place]) -> Step:
        """The step that computes `node` from memory into memory by its reference function."""
        ref = REFERENCES[node.op]
        load = [self._loader(s, i in ref.stored, place) if s is not None else _absent for i, s in enumerate(node.src)]
        function = ref.function
        if op_spec(node.op).writes is not None:  # it has written into its source already

            def write() -> None:
                function(node, *[get() for get in load])

            return write
        target = self._stored(node, place)

        def step() -> None:
            target.copy_(encode(function(node, *[get() for get in load]), node.dtype))

        return step

    def _stored(self, t: Tensor, place: Callable[[Tensor], Place]) -> torch.Tensor:
        buffer, offset = place(t)
        assert isinstance(buffer, CpuBuffer)
        return strided(buffer.memory, offset, t)

    def _loader(self, t: Tensor, stored: bool, place: Callable[[Tensor], Place]) -> Callable[[], torch.Tensor]:
        memory = self._stored(t, place)
        if stored or (t.dtype.kind == "float" and memory.dtype == self.dtype):
            return lambda: memory
        buffer, offset = place(t)
        if buffer.usage is Usage.WEIGHTS:
            return lambda: self._constant(t, memory, (id(buffer), offset, t.ne, t.nb))
        return lambda: decode(memory, t.dtype, self.dtype)

    def _constant(self, t: Tensor, memory: torch.Tensor, key: object) -> torch.Tensor:
        if key not in self._decoded:
            self._decoded[key] = decode(memory, t.dtype, self.dtype)
        return self._decoded[key]


def _absent() -> None:
    return None
