"""Buffers: memory of a backend, as the host reads, writes and compares it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Usage(Enum):
    """What a buffer is for: weights never change, state (a cache) outlives runs, compute is a plan's arena."""

    WEIGHTS = "weights"
    STATE = "state"
    COMPUTE = "compute"


class Buffer(ABC):
    """Memory of a backend at a fixed address. backend: its owner's id; nbytes: its size; usage: see Usage."""

    backend: str
    nbytes: int
    usage: Usage

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> Bytes:
        """A copy of `nbytes` bytes from `offset`, on the host, after all work queued on the buffer."""

    @abstractmethod
    def write(self, offset: int, data: Bytes) -> None:
        """Copies host bytes to `offset`. The caller may reuse `data` at once."""

    def read_later(self, offset: int, nbytes: int) -> Callable[[], Bytes]:
        """What read() would give now, when the call of the result asks for it: a backend whose work is queued copies in
        its turn meanwhile."""
        data = self.read(offset, nbytes)
        return lambda: data

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """(optional) Copies bytes of the buffer to another place in it, which does not overlap with theirs, in the
        order of queued work."""
        self.write(target, self.read(source, nbytes))

    def comparison(self, offset: int, expected: Bytes) -> Comparison:
        """What looks, as often as it is told to, whether the bytes from `offset` on are `expected`. A backend whose
        work is queued compares on its device, in its turn, so that many runs can be queued at once."""
        return Comparison(self, offset, expected)

    @property
    def footprint(self) -> int:
        """(optional) Bytes of memory that it takes: its size, unless the backend keeps the bytes in another form."""
        return self.nbytes

    @property
    def layout(self) -> str:
        """(optional) The planes that a weight is kept as ("4-bit codes, 1 float16 scale of 32 elements"), where it does
        not lie as in the file; "" where it does."""
        return ""

    @property
    def address(self) -> int | None:
        """(optional) Of its first byte, in the memory of its device, as this process has it; None where it is not
        told, or not there."""
        return None

    def host_view(self) -> Bytes | None:
        """The memory itself as uint8 [nbytes] when the host can address it, else None."""
        return None


class Comparison:
    """See Buffer.comparison."""

    def __init__(self, buffer: Buffer, offset: int, expected: Bytes) -> None:
        self._buffer, self._offset, self._expected = buffer, offset, expected
        self._differing, self._last = 0, expected

    def look(self) -> None:
        """Compares what the memory holds after all work queued so far."""
        found = self._buffer.read(self._offset, self._expected.size)
        if not np.array_equal(found, self._expected):
            self._differing, self._last = self._differing + 1, found

    def found(self) -> tuple[int, Bytes]:
        """Waits. How many looks since the last call saw other bytes, and the last such bytes."""
        differing, self._differing = self._differing, 0
        return differing, self._last


Place = tuple[Buffer, int]
