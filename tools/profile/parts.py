"""The parts of a prepared graph that can be run and timed by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from graphrt.backend import Backend
from graphrt.execute import Executable
from graphrt.host import read_tensor
from graphrt.op import Work, op_spec
from graphrt.ops.collectives import COLLECTIVES
from graphrt.ops.send_recv import LINKED
from graphrt.program import Group, Run
from graphrt.schedule import Copy
from graphrt.tools.profile.masks import seen_shares
from graphrt.tools.profile.phase import Part
from graphrt.work import group_work

#: Ops that are done when other ranks have come to theirs.
LINKS = (*COLLECTIVES, *LINKED)


def parts_of(exe: Executable) -> list[Part]:
    """The groups of all splits in order, and the copies before them."""
    seen = seen_shares(exe)
    found: list[Part] = []
    for split in exe.splits:
        found += [_copy_part(exe, split.backend, copy) for copy in split.copies if not copy.once]
        for step in split.run.steps:
            found.append(_step_part(step.group, partial(exe.alone, split, step), split.backend, seen))
    return found


def _step_part(
    group: Group, make: Callable[[], Run], backend: Backend, seen: Mapping[str, tuple[float, float]]
) -> Part:
    nodes = group.working
    heaviest = max(nodes, key=lambda n: op_spec(n.op).work(n))
    names = tuple(n.name for n in group.results)
    work, queued = group_work(group, seen), backend.asynchronous
    meets = next((node.op for node in nodes if node.op in LINKS), "")
    return Part(group.label, heaviest.op, names, work, make, backend.synchronize, queued, meets)


def _copy_part(exe: Executable, to: Backend, copy: Copy) -> Part:
    source, (buffer, offset) = copy.source, exe.place(copy.target)

    def move() -> None:
        buffer.write(offset, read_tensor(source, *exe.place(source)).reshape(-1).view(np.uint8))

    label, work = f"copy to {to.id}", Work(0, 2 * source.data_nbytes)
    return Part(label, "copy", (source.name,), work, lambda: move, to.synchronize, queued=False)
