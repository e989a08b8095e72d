"""A backend in numpy with memory of its own: ADD, MUL and SCALE on contiguous f32, and a reason for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from graphrt import Tensor
from graphrt.backend import Backend, Buffer, Bytes, Device, Group, Place, Program, Usage
from graphrt.errors import MemoryPlanError

Floats = npt.NDArray[np.float32]

OPS: dict[str, Callable[..., Floats]] = {
    "ADD": lambda node, a, b: a + b,
    "MUL": lambda node, a, b: a * b,
    "SCALE": lambda node, a: a * np.float32(node.params.scale) + np.float32(node.params.bias),
}


class TinyBuffer(Buffer):
    """Memory that only this backend addresses: it has no host_view(), so everything goes through read() and write()."""

    backend = "tiny"

    def __init__(self, nbytes: int, usage: Usage) -> None:
        self.nbytes = nbytes
        self.usage = usage
        self._memory = np.full(nbytes, 0xFF, np.uint8)

    def read(self, offset: int, nbytes: int) -> Bytes:
        return self._memory[offset : offset + nbytes].copy()

    def write(self, offset: int, data: Bytes) -> None:
        self._memory[offset : offset + data.size] = data

    def floats(self, offset: int, t: Tensor) -> Floats:
        """A contiguous f32 tensor at that offset, as numpy sees it."""
        return self._memory[offset : offset + t.nbytes].view(np.float32).reshape(t.shape)


class TinyBackend(Backend):
    name: ClassVar[str] = "tiny"
    api_version: ClassVar[int] = 2

    @classmethod
    def unusable(cls) -> str | None:
        return None

    @classmethod
    def score(cls) -> int:
        return 0  # below the CPU: nobody gets it without asking for it

    def devices(self) -> list[Device]:
        return [Device("tiny", "numpy")]

    def supports(self, node: Tensor) -> str | None:
        if node.op not in OPS:
            return f"it has {', '.join(OPS)}, not {node.op}"
        for name, t in {"the result": node, **node.sources_by_name()}.items():
            if t.dtype.name != "f32":
                return f"it computes in f32, {name} is {t.dtype.name}"
            if not t.is_contiguous:
                return f"it takes contiguous tensors, {name} has gaps or another order"
        if any(n not in (1, full) for s in node.sources() for n, full in zip(s.ne, node.ne)):
            return "it repeats dimensions of one element only"
        return None

    def alloc(self, nbytes: int, usage: Usage) -> TinyBuffer:
        try:
            return TinyBuffer(nbytes, usage)
        except MemoryError as error:
            raise MemoryPlanError(f"{nbytes} bytes can't be had; use a smaller graph") from error

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        steps = [_step(node, place) for group in groups for node in group.nodes]

        def run() -> None:
            for step in steps:
                step()

        return Program(groups, run)


def _step(node: Tensor, place: Callable[[Tensor], Place]) -> Callable[[], None]:
    sources = [_floats(s, place) for s in node.sources()]
    out, function = _floats(node, place), OPS[node.op]
    return lambda: np.copyto(out, function(node, *sources))


def _floats(t: Tensor, place: Callable[[Tensor], Place]) -> Floats:
    buffer, offset = place(t)
    assert isinstance(buffer, TinyBuffer)
    return buffer.floats(offset, t)
