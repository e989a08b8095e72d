"""Where the tensors of a prepared graph lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphrt.backend import Buffer, Place
from graphrt.bounds import span
from graphrt.errors import MemoryPlanError
from graphrt.plan import MemoryPlan
from graphrt.schedule import Schedule
from graphrt.tensor import Tensor


@dataclass(frozen=True)
class Arena:
    """One backend's compute memory: its buffer, the plan behind it, and what every block's offset is a multiple of."""

    buffer: Buffer
    plan: MemoryPlan
    alignment: int


@dataclass(frozen=True)
class Places:
    """The buffer and offset of each tensor. Compiled programs may keep it: it knows nothing of them, so that an
    Executable's memory is given back as soon as nobody uses it, and not when the garbage collector looks for cycles."""

    schedule: Schedule
    arenas: Mapping[str, Arena]

    def __call__(self, tensor: Tensor) -> Place:
        """The buffer a tensor lies in and its offset in bytes. Raises MemoryPlanError for one that has no memory, or
        that does not lie inside it."""
        local = self.schedule.local.get(tensor, tensor)
        root = local.root
        if root.buffer is not None:
            return root.buffer, span(local, root.offset + local.view_offs, root.buffer.nbytes)[0]
        arena = self.arenas.get(self.schedule.homes.get(root, ""))
        if arena is None or root not in arena.plan.offsets:
            raise MemoryPlanError(
                f"{tensor.name!r} has no memory of its own here (it is fused away, or not in the graph); "
                f"make it an output of the graph to read it"
            )
        return arena.buffer, span(local, arena.plan.offsets[root] + local.view_offs, arena.buffer.nbytes)[0]
