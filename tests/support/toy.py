"""Backends for tests: a toy with memory of its own that knows few ops, and one that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from graphrt.backend import API_VERSION, Backend, Buffer, Bytes, Device, Group, Place, Usage, numbered
from graphrt.execute import host_type
from graphrt.program import Program, in_order
from graphrt.tensor import Tensor


class ToyBuffer(Buffer):
    """Memory that the host can only read and write. log: what happened to it."""

    def __init__(self, backend: str, nbytes: int, usage: Usage) -> None:
        self.backend = backend
        self.nbytes = nbytes
        self.usage = usage
        self.memory = np.full(nbytes, 0xFF, np.uint8)
        self.log: list[str] = []

    def read(self, offset: int, nbytes: int) -> Bytes:
        self.log.append("read")
        return self.memory[offset : offset + nbytes].copy()

    def write(self, offset: int, data: Bytes) -> None:
        self.log.append("write")
        self.memory[offset : offset + data.size] = data


def _array(t: Tensor, buffer: Buffer, offset: int) -> np.ndarray:
    assert isinstance(buffer, ToyBuffer)
    kind = host_type(t.dtype)
    span = buffer.memory[offset : offset + t.nbytes].view(kind)
    return np.lib.stride_tricks.as_strided(span, t.shape, t.nb[::-1])


class ToyBackend(Backend):
    """ADD, MUL, SCALE, SQR on f32, and SET_ROWS; refuses everything else, and whatever is named `not_here`."""

    name: ClassVar[str] = "toy"
    api_version: ClassVar[int] = API_VERSION
    OPS: ClassVar[dict[str, Callable[..., np.ndarray]]] = {
        "ADD": lambda node, a, b: a + b,
        "MUL": lambda node, a, b: a * b,
        "SCALE": lambda node, a: a * np.float32(node.params.scale) + np.float32(node.params.bias),
        "SQR": lambda node, a: a * a,
    }

    def __init__(self, device: int = 0) -> None:
        self.number = device
        self.buffers: list[ToyBuffer] = []

    @property
    def id(self) -> str:
        return numbered(self.name, self.number)

    @classmethod
    def unusable(cls) -> str | None:
        return None

    @classmethod
    def score(cls) -> int:
        return 0

    def devices(self) -> list[Device]:
        return [Device("toy", "numpy")]

    def supports(self, node: Tensor) -> str | None:
        if node.op not in (*self.OPS, "SET_ROWS"):
            return f"op {node.op} is unknown to it"
        if node.name.startswith("not_here"):
            return f"it does not like {node.name}"
        if node.op == "SET_ROWS":
            return None if node.n_rows == node.ne[1] and node.dtype.name == "f32" else "it writes f32 matrices only"
        if any(t.dtype.name != "f32" for t in (node, *node.sources())):
            return "it knows f32 only"
        if any(n not in (1, full) for s in node.sources() for n, full in zip(s.ne, node.ne)):
            return "it repeats single elements only"
        return None

    def alloc(self, nbytes: int, usage: Usage) -> ToyBuffer:
        self.buffers.append(ToyBuffer(self.id, nbytes, usage))
        return self.buffers[-1]

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        return Program(groups, in_order([self._step(node, place) for group in groups for node in group.nodes]))

    def _step(self, node: Tensor, place: Callable[[Tensor], Place]) -> Callable[[], None]:
        sources = [_array(s, *place(s)) for s in node.sources()]
        if node.op == "SET_ROWS":
            return lambda: sources[2][0, 0].__setitem__(sources[1].reshape(-1), sources[0][0, 0])
        out, function = _array(node, *place(node)), self.OPS[node.op]
        return lambda: np.copyto(out, function(node, *sources))


class NullBackend(ToyBackend):
    """Takes every node and computes nothing: what is left is the runtime's own cost."""

    name: ClassVar[str] = "null"

    def supports(self, node: Tensor) -> str | None:
        return None

    def _step(self, node: Tensor, place: Callable[[Tensor], Place]) -> Callable[[], None]:
        return _nothing


def _nothing() -> None:
    return None
