"""prepare() and Executable: a graph made ready once, run many times.

prepare() checks, assigns, cuts, fuses, plans memory, binds and compiles. run() only calls what came of it: every tensor
stays at one address for the life of the Executable, so that inputs are rewritten in place and a backend may capture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.arguments import checked
from graphrt.backend import Backend, Buffer, Bytes, Place, Region, Usage, distinct, get_backend
from graphrt.errors import BackendError, GraphError, MemoryPlanError
from graphrt.graph import Graph
from graphrt.host import Array, host_bytes, read_tensor, strided
from graphrt.op import made_by, op_spec
from graphrt.places import Arena, Places
from graphrt.plan import MemoryPlan, Request, plan_memory
from graphrt.presence import here
from graphrt.printing import count_text, human_bytes
from graphrt.program import Group, Program, Run, StepInfo
from graphrt.rules import check_graph
from graphrt.schedule import Copy, Schedule, schedule
from graphrt.tensor import Flag, Tensor

#: Inputs that lie side by side are one copy up to so many bytes: larger ones cost more to join than to copy.
MAX_JOINED = 1 << 16


@dataclass(frozen=True, eq=False)
class PreparedSplit:
    """A split as it runs: its backend, its groups of nodes, the copies before them, and `run`, the compiled program."""

    backend: Backend
    groups: list[Group]
    copies: list[Copy]
    run: Program


class Executable:
    """A prepared graph. write() inputs, run(), read() outputs; all three may be repeated in any order.

    One thread at a time may use it: its tensors have one place each. Others, of the same graph too, may run meanwhile
    in other threads, where what they write is not the same buffer.

    graph: as given. schedule: assignments, causes, refusals. splits: what runs. arenas: memory by the backend's id.
    """

    def __init__(self, graph: Graph, sched: Schedule, arenas: dict[str, Arena]) -> None:
        self.graph = graph
        self.schedule = sched
        self.arenas = arenas
        self._places = Places(sched, arenas)
        self._process = os.getpid()
        self.splits: list[PreparedSplit] = []
        self._program: list[Callable[[], None]] = []
        self._steps = {id(a.buffer): a.alignment for a in arenas.values()}
        self._names: dict[str, Tensor] = {t.name: t for t in reversed([*graph.inputs, *graph.leafs, *graph.nodes])}
        self._unwritten = _read_inputs(graph)
        self._targets: dict[Tensor | str, tuple[Tensor, Place]] = {}  # of what was written before
        self._kept = {sched.local.get(t, t).root for t in [*graph.inputs, *graph.kept]}

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(split.backend.id for split in self.splits))
        steps = sum(len(split.groups) for split in self.splits)
        memory = human_bytes(sum(arena.buffer.nbytes for arena in self.arenas.values()))
        waits = f", {count_text(len(self._unwritten), 'input')} yet to be written" if self._unwritten else ""
        return f"<Executable of {self.graph!r} in {count_text(steps, 'step')} on {names}, {memory} of memory{waits}>"

    @checked(GraphError)
    def place(self, tensor: Tensor) -> Place:
        """The buffer a tensor lies in and its offset in bytes. Raises MemoryPlanError for one that has no memory, or
        that does not lie inside it."""
        return self._places(tensor)

    def run(self) -> None:
        """Runs the graph once. Work may still be under way on return; read() waits for it. Raises GraphError while an
        input that a node reads was never written (those that nodes write themselves need not be), and BackendError in a
        forked process, where a backend can't go on there."""
        if self._unwritten:
            raise self._missing()
        if os.getpid() != self._process:
            self._check_fork()
        for step in self._program:
            step()

    def compile_ahead(self) -> None:
        """Begins to compile what the first run would; inside Backend.compiling() of its backends."""
        for split in self.splits:
            split.run.compile_ahead()

    def _check_fork(self) -> None:
        lost = [split.backend.id for split in self.splits if not split.backend.survives_fork]
        if lost:
            raise BackendError(
                f"what was prepared on {lost[0]!r} must run in the process that prepared it, {self._process}, not in "
                f'{os.getpid()}, which was forked from it; start processes by multiprocessing\'s "spawn" method and '
                f"load the model there"
            )

    def _missing(self) -> GraphError:
        named = [f"{t.name!r} ({t.describe()})" for t in self._unwritten]
        more = f" and {len(named) - 20} more" if len(named) > 20 else ""
        return GraphError(
            f"every input must be written before the first run, these were not: {', '.join(named[:20])}{more}; give "
            f"them by write()"
        )

    def alone(self, split: PreparedSplit, step: StepInfo) -> Run:
        """What runs one step of a split's program by itself."""
        return step.alone() if step.alone is not None else split.backend.compile([step.group], self._places)

    def synchronize(self) -> None:
        """Waits until everything that was queued is done."""
        for split in self.splits:
            split.backend.synchronize()

    @checked(GraphError)
    def write(self, tensor: Tensor | str, values: npt.ArrayLike) -> None:
        """Sets an input, by the tensor or its name; it keeps its values for all runs that follow.

        values: an array of the tensor's torch shape, `ne` reversed, where dimensions of one element may be left out, or
        a flat one of as many elements in that order; of a quantized tensor its raw bytes, uint8. Their type must
        convert to the tensor's without loss of kind. Raises GraphError for anything else.
        """
        self.write_all({tensor: values})

    def write_all(self, values: Mapping[Any, npt.ArrayLike]) -> None:
        """Sets several inputs as write() does; those that lie side by side are one copy."""
        spans = sorted((self._bytes_for(t, v) for t, v in values.items()), key=lambda span: (id(span[0]), span[1]))
        while spans:
            buffer, offset, data = spans.pop(0)
            step = self._steps.get(id(buffer), 1)
            while spans and spans[0][0] is buffer and spans[0][1] == -(-(offset + data.size) // step) * step:
                if data.size + spans[0][2].size > MAX_JOINED:
                    break
                _, start, more = spans.pop(0)  # what lies between is nobody's: it fills up to where blocks may begin
                data = np.concatenate([data, np.zeros(start - offset - data.size, np.uint8), more])
            buffer.write(offset, data)

    def _bytes_for(self, tensor: Tensor | str, values: npt.ArrayLike) -> tuple[Buffer, int, Bytes]:
        """Where an input lies, and its bytes."""
        found = self._targets.get(tensor)
        if found is None:
            target = self._named(tensor)
            found = self._targets[tensor] = target, self.place(target)
        target, (buffer, offset) = found
        data = host_bytes(target, values)
        if self._unwritten:
            self._unwritten.pop(target.root, None)
        return buffer, offset, data

    @checked(GraphError)
    def read(self, tensor: Tensor | str) -> Array:
        """A copy of a tensor's elements, in torch's shape (`ne` reversed); quantized rows as their raw bytes.

        Raises MemoryPlanError for a tensor that is no output, since another one may have its memory by now.
        """
        source = self._lasting(tensor)
        return read_tensor(source, *self.place(source))

    @checked(GraphError)
    def host_array(self, tensor: Tensor | str) -> Array | None:
        """The tensor's own memory as a numpy array when the host can address it, else None: no copy either way. An
        input can be filled that way too."""
        target = self._lasting(tensor)
        self._unwritten.pop(target.root, None)
        buffer, offset = self.place(target)
        memory = buffer.host_view()
        return None if memory is None else strided(memory[offset : offset + target.nbytes], target)

    def _lasting(self, tensor: Tensor | str) -> Tensor:
        found = self._named(tensor)
        root = self.schedule.local.get(found, found).root
        if root.buffer is None and root not in self._kept:
            raise MemoryPlanError(
                f"only inputs, outputs and bound buffers keep their values after a run, {found.name!r} is neither; "
                f"make it an output of the graph to read it"
            )
        return found

    def _named(self, tensor: Tensor | str) -> Tensor:
        if isinstance(tensor, Tensor):
            return tensor
        found = self._names.get(tensor)
        if found is None:
            names = ", ".join(t.name for t in [*self.graph.inputs, *self.graph.outputs][:20])
            raise GraphError(f"a tensor's name must be in the graph, got {tensor!r}; inputs and outputs: {names}")
        return found


def _read_inputs(graph: Graph) -> dict[Tensor, None]:
    """The inputs without a buffer that a node reads, or that are a result, before a node has written into them."""
    read: dict[Tensor, None] = {}
    for node in graph.nodes:
        spec = op_spec(node.op)
        if not spec.is_view:
            read |= {made_by(s): None for name, s in node.sources_by_name().items() if name != spec.writes}
    read |= {made_by(output): None for output in graph.outputs}
    return {leaf: None for leaf in graph.inputs if leaf in read and leaf.buffer is None}


@checked(GraphError)
@here.at_length()
def prepare(graph: Graph, backends: Sequence[Backend | str] | Backend | str = "auto") -> Executable:
    """Makes a graph ready to run on some backends, the preferred first.

    Raises GraphError for an invalid graph, UnsupportedError for a node that no backend takes, MemoryPlanError for lack
    of memory, BackendError for two backends with one id.
    """
    listed = [backends] if isinstance(backends, (str, Backend)) else list(backends)
    used = [get_backend(b) if isinstance(b, str) else b for b in listed]
    check_graph(graph)
    sched = schedule(graph, used)
    groups = _fuse(graph, sched)
    exe = Executable(graph, sched, _allocate(graph, sched, used, groups))
    for split, split_groups in zip(sched.splits, groups):
        for copy in split.copies:
            move = _copier(exe, copy)
            if copy.once:
                move()
            else:
                exe._program.append(move)
        program = split.backend.compile(split_groups, exe._places)
        if not isinstance(program, Program):
            raise BackendError(
                f"a backend's compile() must return a graphrt.program.Program, backend {split.backend.id!r} returned "
                f"{program!r}; give Program(groups, function)"
            )
        exe._program.append(program)
        exe.splits.append(PreparedSplit(split.backend, split_groups, split.copies, program))
    return exe


def _fuse(graph: Graph, sched: Schedule) -> list[list[Group]]:
    kept = {sched.local.get(t, t) for t in graph.kept}
    for split in sched.splits:
        kept.update(copy.source for copy in split.copies)
    mine = [set(split.nodes) for split in sched.splits]
    for i, split in enumerate(sched.splits):  # a neighbour split of the same backend reads it in place
        for node in split.nodes:
            kept.update(s for s in node.sources() if not s.is_leaf and made_by(s) not in mine[i])
    roots_kept = kept | {t.root for t in kept}
    regions = [Region(split.nodes, lambda t: t in roots_kept) for split in sched.splits]
    return [s.backend.fuse(r) for s, r in zip(sched.splits, regions)]


def plan_arenas(graph: Graph, backends: Sequence[Backend]) -> dict[str, MemoryPlan]:
    """The plans that prepare() would make, by the backend's id: no memory is taken and nothing compiled.

    Raises GraphError and UnsupportedError as prepare() does.
    """
    check_graph(graph)
    sched = schedule(graph, backends)
    return _plans(graph, sched, backends, _fuse(graph, sched))


def plan_groups(graph: Graph, backends: Sequence[Backend]) -> list[Group]:
    """The groups that prepare() would make, in order: no memory is taken and nothing compiled.

    Raises GraphError and UnsupportedError as prepare() does.
    """
    check_graph(graph)
    sched = schedule(graph, backends)
    return [group for groups in _fuse(graph, sched) for group in groups]


def _plans(
    graph: Graph, sched: Schedule, backends: Sequence[Backend], groups: list[list[Group]]
) -> dict[str, MemoryPlan]:
    requests = _requests(graph, sched, groups)
    return {i: plan_memory(requests[i], b.alignment) for i, b in distinct(backends).items() if requests.get(i)}


def _allocate(
    graph: Graph, sched: Schedule, backends: Sequence[Backend], groups: list[list[Group]]
) -> dict[str, Arena]:
    arenas: dict[str, Arena] = {}
    by_id = distinct(backends)
    for name, plan in _plans(graph, sched, backends, groups).items():
        backend = by_id[name]
        arenas[name] = Arena(backend.alloc(plan.peak, Usage.COMPUTE), plan, backend.alignment)
    return arenas


def _requests(graph: Graph, sched: Schedule, groups: list[list[Group]]) -> dict[str, list[Request]]:
    """What each backend must hold and from which step to which; a group of nodes is one step."""
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    takes: dict[Tensor, tuple[object, ...]] = {}
    step = 0
    for leaf in graph.inputs:  # inputs keep their place for good: a run may find them as the last one left them
        if leaf.buffer is None:
            first[leaf] = 0
    for split, split_groups in zip(sched.splits, groups):
        for copy in split.copies:
            first[copy.target] = 0 if copy.once else step
            last[copy.source.root] = step
        for group in split_groups:
            for node in group.nodes:
                for source in node.sources():
                    last[source.root] = step
            for node in group.results:
                if node.root not in first and node.root.buffer is None:
                    first[node.root] = step
                    takes[node.root] = _takeable(node) if len(group.nodes) == 1 else ()
            step += 1
    for tensor in [*graph.inputs, *(sched.local.get(t, t).root for t in graph.kept)]:
        last[tensor] = step
    for split in sched.splits:
        last.update({copy.target: step for copy in split.copies if copy.once})
    requests: dict[str, list[Request]] = {}
    for tensor, start in first.items():
        request = Request(tensor, tensor.nbytes, start, last.get(tensor, start), takes.get(tensor, ()))
        requests.setdefault(sched.homes.get(tensor) or sched.homes[tensor.root], []).append(request)
    return requests


def _takeable(node: Tensor) -> tuple[object, ...]:
    """The sources whose block `node` may use: the op allows it, same layout, and the node reads it only once."""
    inplace, roots = op_spec(node.op).inplace, [s.root for s in node.sources()]
    return tuple(
        source.root
        for name, source in (node.sources_by_name() if inplace else {}).items()
        if name in inplace and source.nb == node.nb and source.ne == node.ne and source.view_offs == 0
        and source.root.nbytes == node.nbytes and roots.count(source.root) == 1 and not source.root.flags & Flag.INPUT
    )  # fmt: skip


def _copier(exe: Executable, copy: Copy) -> Callable[[], None]:
    source_buffer, source_offset = exe.place(copy.source)
    target_buffer, target_offset = exe.place(copy.target)

    def move() -> None:
        data = read_tensor(copy.source, source_buffer, source_offset)
        target_buffer.write(target_offset, data.reshape(-1).view(np.uint8))

    return move
