"""What lowering a group needs: addresses, torch looks, shared temporaries, and what must be kept alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graphrt.backend import Place
from graphrt.backends.cpu import fast
from graphrt.backends.cpu.memory import CpuBuffer, strided, zeros
from graphrt.bounds import span
from graphrt.tensor import Tensor

if TYPE_CHECKING:
    from graphrt.backends.cpu.fast import Step


class Lowering:
    """Lowers groups, given where tensors lie. keep: objects whose memory the native steps point to."""

    def __init__(self, place: Callable[[Tensor], Place]) -> None:
        self.place = place
        self.keep: list[Any] = []
        self._temporaries: dict[tuple[str, int, int], torch.Tensor] = {}

    def program(self, steps: Sequence[Step]) -> Callable[[], None]:
        """Native steps as one native call."""
        joined = fast.Program(steps)
        self.keep.append(joined)
        return joined.call

    def at(self, t: Tensor | None) -> int:
        """The address of a tensor, 0 for an absent one. Raises MemoryPlanError for one that leaves its buffer."""
        if t is None:
            return 0
        buffer, offset = self.place(t)
        assert isinstance(buffer, CpuBuffer)
        start, _ = span(t, offset, buffer.nbytes)
        return buffer.memory.data_ptr() + start

    def look(self, t: Tensor) -> torch.Tensor:
        """The tensor's stored elements as torch sees them."""
        buffer, offset = self.place(t)
        assert isinstance(buffer, CpuBuffer)
        return strided(buffer.memory, offset, t)

    def array(self, values: Sequence[float], kind: type) -> int:
        """The address of a new constant array."""
        array: Any = np.asarray(values, kind)
        self.keep.append(array)
        return int(array.ctypes.data)

    def temporary(self, purpose: str, rows: int, n: int) -> torch.Tensor:
        """f32 [rows, n] that the steps of this program share for one purpose, one after the other."""
        known = self._temporaries.get((purpose, rows, n))
        if known is None:
            known = zeros(4 * rows * n).view(torch.float32).view(rows, n)
            self._temporaries[purpose, rows, n] = known
        return known


def rows_of(t: Tensor | None) -> tuple[int, int] | None:
    """(number of rows, bytes between them) of an f32 tensor whose rows lie evenly, else None."""
    if t is None or t.dtype.name != "f32" or not t.has_contiguous_rows:
        return None
    even = t.is_contiguous or t.ne[2] == t.ne[3] == 1
    return (t.n_rows, t.ne[0] * 4 if t.is_contiguous else t.nb[1]) if even else None
