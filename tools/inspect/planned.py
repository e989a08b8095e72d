"""Backends that only plan: who would run what, and why not, without memory, without running and where possible without
the device.

    Model(file, [planned("triton"), planned("cpu")])     # no weight is read, no GPU is needed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from graphrt.backend import API_VERSION, Backend, Buffer, Bytes, Device, Group, Place, Usage, discover
from graphrt.errors import BackendError
from graphrt.program import Program
from graphrt.tensor import Tensor
from graphrt.tools.conformance.cases.sources import FAST, make_backend


class PlannedBuffer(Buffer):
    """A place without memory."""

    def __init__(self, backend: str, nbytes: int, usage: Usage) -> None:
        self.backend, self.nbytes, self.usage = backend, nbytes, usage

    def read(self, offset: int, nbytes: int) -> Bytes:
        raise BackendError("a planned buffer holds nothing; prepare the graph on a backend that runs")

    def write(self, offset: int, data: Bytes) -> None:
        raise BackendError("a planned buffer holds nothing; prepare the graph on a backend that runs")


class Planned(Backend):
    """Goes by another backend's name and answers supports() as it does; nothing else."""

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.name = backend.name  # type: ignore[misc]
        self.alignment = backend.alignment

    @classmethod
    def unusable(cls) -> str | None:
        return None

    @classmethod
    def score(cls) -> int:
        return 0

    def devices(self) -> list[Device]:
        return []

    def supports(self, node: Tensor) -> str | None:
        try:
            return self.backend.supports(node)
        except AttributeError as error:  # it was not set up, see planned()
            raise BackendError(
                f"backend {self.name!r} can't be asked here: without its device supports() fails with {error}; ask it "
                f"on a machine that has one"
            ) from error

    def alloc(self, nbytes: int, usage: Usage) -> PlannedBuffer:
        return PlannedBuffer(self.id, nbytes, usage)

    def hold(self, weight: Tensor, data: Bytes) -> PlannedBuffer:
        return PlannedBuffer(self.id, data.size, Usage.WEIGHTS)

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        raise BackendError("a planned backend runs nothing; prepare the graph on the backend itself")


def planned(name: str) -> Planned:
    """A backend of that name to plan with, as `graphrt test -b` takes names; "auto" is the best usable one.

    A backend that can't be used here is not set up: supports() depends on types, shapes and strides only, and answers
    nonetheless where it asks its device nothing. Raises BackendError for an unknown name.
    """
    found, base = discover(), FAST[name][0] if name in FAST else name
    info = found.get(next(iter(found)) if base == "auto" else base)
    if info is not None and info.cls is not None and info.reason is not None:
        return Planned(object.__new__(info.cls))
    return Planned(make_backend(info.name if info is not None else base))
