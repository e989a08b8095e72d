"""`graphrt run --profile`: where a run's time goes, by group of nodes and by op, and the gaps between kernels.

A batch of the prompt and some decode steps run twice over: in parts, a group of nodes at a time, which tells whose work
is whose, and whole, as always. On a GPU a kernel's time is the one that it takes in whole steps, where its turn tells
it. On the CPU a group's time is the host's clock around the group alone, compiled by itself: a fast step that is one
native call is shorter than the sum of its groups. All of it lies in a trace file for Perfetto.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.backend import Backend
from graphrt.errors import BackendError
from graphrt.execute import Executable, prepare
from graphrt.graph import Graph
from graphrt.host import Array, read_tensor
from graphrt.op import Work, op_spec
from graphrt.program import Group, Run
from graphrt.schedule import Copy
from graphrt.tensor import Tensor, new_input
from graphrt.tools.common import table_lines
from graphrt.work import group_work

if TYPE_CHECKING:
    from graphrt.models.session import Session

Event = Mapping[str, Any]

DEFAULT_STEPS, PREFILL_STEPS = 16, 3
#: Runs before anything is timed: a GPU backend may compile in the first and capture in the next ones.
WARM_UPS = 3
#: Runs in parts on a GPU, where the whole step gives the times.
GPU_PASSES = 2


@dataclass(frozen=True, eq=False)
class Part:
    """A group of nodes, or a copy between backends, that can be run and timed by itself.

    op: the op that computes most in it; tensors: names of its results; make: gives what runs it; queued: its
    backend's work goes on after that, so that the host's clock does not tell its time.
    """

    label: str
    op: str
    tensors: tuple[str, ...]
    work: Work
    make: Callable[[], Run]
    wait: Run
    queued: bool


@dataclass(frozen=True)
class GpuStep:
    """A step on a GPU, on average: seconds from its first kernel's start to its last one's end, seconds in which none
    ran, and the number of kernels and copies."""

    span: float
    gaps: float
    kernels: float


@dataclass(frozen=True)
class Phase:
    """kind: "prefill" or "decode", n_tokens at once, so many steps. seconds: of each part, a step; step: of a whole one
    by the host's clock, the median; in_step: whether the parts' times were taken inside whole steps."""

    kind: str
    n_tokens: int
    steps: int
    parts: list[Part]
    seconds: list[float]
    step: float
    gpu: GpuStep | None = None
    in_step: bool = False


@dataclass(frozen=True)
class Row:
    """What parts of one kind take together. calls: of all steps; share: of all parts' time."""

    name: str
    op: str
    tensors: tuple[str, ...]
    calls: int
    seconds: float
    share: float
    work: Work

    @property
    def gb_per_s(self) -> float:
        return self.work.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def tflop_per_s(self) -> float:
        return self.work.flops / self.seconds / 1e12 if self.seconds > 0 else 0.0


# ---- what is run ----


def seen_shares(exe: Executable) -> dict[str, tuple[float, float]]:
    """By the name of each mask that a step makes: the shares of cells that any query sees, and of pairs of query and
    cell that count."""
    found = {}
    for node in exe.graph.nodes:
        if node.op == "KQ_MASK":
            # Of what its inputs hold now: its own memory may be another tensor's after a run.
            found[node.name] = shares_of(made_mask(node, [exe.read(s) for s in node.sources()]))
    return found


def shares_of(mask: npt.NDArray[Any]) -> tuple[float, float]:
    """Of a mask, f16 [..., n_q, n_kv], the shares of cells that any query sees, and of pairs that count."""
    seen = ~np.isneginf(mask)
    return float(seen.any(-2).mean()), float(seen.mean())


def made_mask(mask: Tensor, values: Sequence[Array]) -> Array:
    """A KQ_MASK, f16 in torch's shape, of its sources' values: the cells' positions and the tokens'."""
    cells, pos = (new_input(s.dtype, *s.ne, name=str(i)) for i, s in enumerate(mask.sources()))
    alone = prepare(Graph(ops.kq_mask(cells, pos, mask.params.window, mask.params.alibi, name="mask")), "cpu")
    for leaf, given in zip((cells, pos), values):
        alone.write(leaf, given)
    alone.run()
    return alone.read("mask")


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
    return Part(group.label, heaviest.op, names, work, make, backend.synchronize, queued)


def _copy_part(exe: Executable, to: Backend, copy: Copy) -> Part:
    source, (buffer, offset) = copy.source, exe.place(copy.target)

    def move() -> None:
        buffer.write(offset, read_tensor(source, *exe.place(source)).reshape(-1).view(np.uint8))

    label, work = f"copy to {to.id}", Work(0, 2 * source.data_nbytes)
    return Part(label, "copy", (source.name,), work, lambda: move, to.synchronize, queued=False)


# ---- how it is timed ----


class Trace(ABC):
    """Notes named spans of the host's time, and on a GPU what ran meanwhile. passes: how often parts are run."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    @abstractmethod
    def span(self, name: str) -> AbstractContextManager[object]:
        """What runs in it gets the name."""

    @abstractmethod
    def __enter__(self) -> Trace: ...

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @abstractmethod
    def write(self, path: Path) -> list[Event]:
        """Writes the trace file and returns its events."""


class HostTrace(Trace):
    """The host's clock alone."""

    def __enter__(self) -> HostTrace:
        self.events: list[dict[str, Any]] = []
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        where = {"pid": os.getpid(), "tid": 1, "ts": (start - self.start) * 1e6, "dur": (end - start) * 1e6}
        self.events.append({"ph": "X", "cat": "user_annotation", "name": name, **where})

    def write(self, path: Path) -> list[Event]:
        name = {"ph": "M", "name": "process_name", "pid": os.getpid(), "tid": 1, "args": {"name": "graphrt run"}}
        path.write_text(json.dumps({"traceEvents": [name, *self.events], "displayTimeUnit": "ms"}), encoding="utf-8")
        return [*self.events]


class GpuTrace(Trace):
    """torch's profiler: the host's spans, and every kernel of the GPU."""

    def __enter__(self) -> GpuTrace:
        from torch.profiler import ProfilerActivity, profile

        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        try:
            self.profiler.start()
        except RuntimeError as error:
            raise BackendError(f"torch's profiler must start, and it says: {error}; is another one running?") from error
        return self

    def __exit__(self, *error: object) -> None:
        import torch

        torch.cuda.synchronize()
        self.profiler.stop()

    def span(self, name: str) -> AbstractContextManager[object]:
        from torch.profiler import record_function

        return record_function(name)

    def write(self, path: Path) -> list[Event]:
        try:
            self.profiler.export_chrome_trace(str(path))
            found = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"torch's profiler must write a trace, and {path} is none: {error}") from error
        return list(found["traceEvents"])


def time_by_node(phase: Phase) -> dict[str, float]:
    """Microseconds of each part of a step, by the name of its last result."""
    pairs = zip(phase.parts, phase.seconds)
    return {part.tensors[-1]: 1e6 * seconds for part, seconds in pairs if part.tensors and part.op != "copy"}


def profile_session(session: Session, tokens: Sequence[int], steps: int, path: Path) -> list[Phase]:
    """Profiles the first batch of `tokens` and so many decode steps behind all of them, and writes a trace to `path`.

    The session loses its sequence. Raises SessionError as eval() does, BackendError where the profiler fails.
    """
    session.reset()
    session.eval(tokens)
    phases = []
    for kind, n, exe in _visit(session, tokens):
        for _ in range(WARM_UPS):
            _step(exe)
        times = [_seconds(partial(_step, exe)) for _ in range(_steps(kind, steps))]
        phases.append(Phase(kind, n, len(times), parts_of(exe), [], statistics.median(times)))
    with _trace_for(session, steps) as trace:
        for phase, (_, _, exe) in zip(phases, _visit(session, tokens)):
            _record(phase, exe, trace)
    events = trace.write(path)
    return [_timed(phase, events) for phase in phases]


def _visit(session: Session, tokens: Sequence[int]) -> Iterator[tuple[str, int, Executable]]:
    """What runs the first batch, and a step behind all tokens if the context has room: its kind, tokens at once, and
    the Executable with its inputs written."""
    session.reset()
    first, rest = tokens[: session.n_batch], tokens[session.n_batch :]
    yield "prefill", len(first), _fed(session, first)
    if rest:
        session.eval(rest)
    if session.n_past < session.n_ctx:
        yield "decode", 1, _fed(session, tokens[-1:])


def _fed(session: Session, ids: Sequence[int]) -> Executable:
    """The Executable that reads these tokens next, ready to run, as often as wanted."""
    exe = session.feed({0: np.asarray(ids, np.int32)}).exe
    exe.run()
    session.lengths += len(ids)
    return exe


def _steps(kind: str, steps: int) -> int:
    return min(steps, PREFILL_STEPS) if kind == "prefill" else steps


def _trace_for(session: Session, steps: int) -> Trace:
    """torch's profiler where a GPU has work, else the host's clock."""
    import torch

    queued = any(split.backend.asynchronous for split in session.executable(1, 1).splits)
    return GpuTrace(min(steps, GPU_PASSES)) if queued and torch.cuda.is_available() else HostTrace(steps)


def _record(phase: Phase, exe: Executable, trace: Trace) -> None:
    """Runs a phase's step in parts, then whole, each under its name."""
    kept = [p.make() for p in phase.parts] if phase.n_tokens == 1 else None  # work memory of large batches is large
    for run in kept or ():
        run()
    exe.synchronize()
    for _ in range(min(trace.passes, phase.steps)):
        for i, part in enumerate(phase.parts):
            run = kept[i] if kept else part.make()
            with trace.span(_span_name(part, phase.kind, i)):
                run()
                part.wait()
    for _ in range(phase.steps):
        with trace.span(f"step [{phase.kind} step]"):
            _step(exe)


def _step(exe: Executable) -> None:
    exe.run()
    exe.synchronize()


def _seconds(work: Run) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _span_name(part: Part, kind: str, i: int) -> str:
    """The trace's writers escape nothing, so that a name has plain characters only."""
    return re.sub(r"[^\w+\-. ()]", "_", f"{part.label} {part.tensors[0]}", flags=re.ASCII) + f" [{kind} {i}]"


# ---- what the trace says ----

_SPAN = re.compile(r"\[(\w+) (\d+|step)\]$")
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class _Span:
    """Of the host: part is None for a whole step. work: what the GPU did for it: start and end, in order of starts."""

    part: int | None
    start: float
    end: float
    work: list[tuple[float, float]]


def spans_of(events: Sequence[Event], kind: str) -> list[_Span]:
    """The spans of a phase in order, with the GPU's work that was launched in each. Times in microseconds."""
    spans = []
    for e in events:
        match = (
            _SPAN.search(str(e.get("name", ""))) if e.get("cat") == "user_annotation" and e.get("ph") == "X" else None
        )
        if match and match[1] == kind:
            part = None if match[2] == "step" else int(match[2])
            spans.append(_Span(part, e["ts"], e["ts"] + e["dur"], []))
    spans.sort(key=lambda s: s.start)
    starts = np.array([s.start for s in spans])
    launched: dict[object, float] = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", ())
    }
    for e in sorted((e for e in events if e.get("cat") in _GPU_WORK), key=lambda e: float(e["ts"])):
        # Each span waits for its work, so that the work's own time tells the span where its launch was not noted.
        when = launched.get(e.get("args", {}).get("correlation"), float(e["ts"]))
        i = int(np.searchsorted(starts, when, "right")) - 1
        if i >= 0 and when <= spans[i].end:
            spans[i].work.append((e["ts"], e["ts"] + e["dur"]))
    return spans


def own_times(work: Sequence[tuple[float, float]]) -> list[float]:
    """What each adds to the time in which anything ran: one that starts before the last one ends counts from there.

    They add up to the time that is no gap.
    """
    found, until = [], float("-inf")
    for start, end in work:
        found.append(max(end - max(start, until), 0.0))
        until = max(until, end)
    return found


def _timed(phase: Phase, events: Sequence[Event]) -> Phase:
    """The phase with its parts' times, as the trace has them."""
    spans = spans_of(events, phase.kind)
    passes = [s for s in spans if s.part is not None]
    whole = [s for s in spans if s.part is None]
    n_passes = max(len(passes) // max(len(phase.parts), 1), 1)
    by_host: list[list[float]] = [[] for _ in phase.parts]
    alone = np.zeros(len(phase.parts))
    for s in passes:
        assert s.part is not None
        by_host[s.part].append(s.end - s.start)
        alone[s.part] += sum(own_times(s.work)) / n_passes
    on_host = np.array([statistics.median(times) if times else 0.0 for times in by_host])
    owners = [s.part for s in passes[-len(phase.parts) :] if s.part is not None for _ in s.work]
    matched = [s for s in whole if owners and len(s.work) == len(owners)]  # a profiler may lose some work
    if matched:
        alone[:] = 0
        for s in matched:
            np.add.at(alone, owners, np.array(own_times(s.work)) / len(matched))
    queued = np.array([p.queued for p in phase.parts]) & bool(owners)
    seconds = np.where(queued, alone, on_host) / 1e6
    gpu = _gpu_step(matched or whole)
    return replace(phase, seconds=seconds.tolist(), gpu=gpu, in_step=bool(matched))


def _gpu_step(whole: Sequence[_Span]) -> GpuStep | None:
    seen = [s.work for s in whole if s.work]
    if not seen:
        return None
    spans = [max(end for _, end in work) - work[0][0] for work in seen]
    gaps = [span - sum(own_times(work)) for span, work in zip(spans, seen)]
    return GpuStep(statistics.mean(spans) / 1e6, statistics.mean(gaps) / 1e6, statistics.mean(map(len, seen)))


# ---- what is told ----


def rows(phase: Phase, key: Callable[[Part], str]) -> list[Row]:
    """Parts of one key together, the longest first."""
    total = sum(phase.seconds) or 1.0
    kinds: dict[str, list[int]] = {}
    for i, part in enumerate(phase.parts):
        kinds.setdefault(key(part), []).append(i)
    found = []
    for name, members in kinds.items():
        parts = [phase.parts[i] for i in members]
        seconds = sum(phase.seconds[i] for i in members)
        work = Work(*(phase.steps * sum(p.work[j] for p in parts) for j in range(2)))
        tensors = tuple(t for p in parts for t in p.tensors)
        calls = phase.steps * len(parts)
        found.append(Row(name, parts[0].op, tensors, calls, phase.steps * seconds, seconds / total, work))
    return sorted(found, key=lambda r: -r.seconds)


def as_json(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Times in microseconds."""
    return [
        {
            "phase": p.kind, "tokens": p.n_tokens, "steps": p.steps, "step_us": p.step * 1e6,
            "parts_us": sum(p.seconds) * 1e6, "times_taken": _how(p),
            "gpu": _gpu_figures(p.gpu) if p.gpu else None,
            "groups": [{"group": r.name, "op": r.op, "tensors": r.tensors, **_figures(r)} for r in rows(p, _label)],
            "ops": [{"op": r.name, **_figures(r)} for r in rows(p, _op)],
        }
        for p in phases
    ]  # fmt: skip


def _gpu_figures(g: GpuStep) -> dict[str, float]:
    return {"span_us": g.span * 1e6, "gaps_us": g.gaps * 1e6, "kernels": g.kernels}


def _label(part: Part) -> str:
    return part.label


def _op(part: Part) -> str:
    return part.op


def _figures(r: Row) -> dict[str, Any]:
    return {
        "calls": r.calls, "total_us": r.seconds * 1e6, "mean_us": r.seconds / r.calls * 1e6, "share": r.share,
        "bytes": r.work.bytes, "flops": r.work.flops, "gb_per_s": r.gb_per_s, "tflop_per_s": r.tflop_per_s,
    }  # fmt: skip


def _how(phase: Phase) -> str:
    if phase.gpu is None:
        return "each group by itself, medians by the host's clock"
    return "kernels inside whole steps" if phase.in_step else "kernels of each group by itself"


def lines(phases: Sequence[Phase]) -> list[str]:
    """Two tables a phase, and a sentence on the gaps."""
    out = []
    for p in phases:
        out += [
            "",
            f"{p.kind}: {p.n_tokens} token{'s' * (p.n_tokens > 1)} a step, {p.steps} steps; times are of {_how(p)}",
        ]
        out += _table("group", rows(p, _label), tensors=True)
        out += ["", *_table("op", rows(p, _op), tensors=False), "", _step_line(p)]
    return out


def _table(first: str, found: Sequence[Row], tensors: bool) -> list[str]:
    columns = [first, "calls", "total us", "mean us", "share", "GB/s", "TFLOP/s", *(["tensors"] if tensors else [])]
    body = []
    for r in found:
        figures = f"{r.seconds * 1e6:.0f}", f"{r.seconds / r.calls * 1e6:.2f}", f"{100 * r.share:.1f} %"
        rates = f"{r.gb_per_s:.1f}", f"{r.tflop_per_s:.3f}"
        more = [", ".join(r.tensors[:2]) + (f" and {len(r.tensors) - 2} more" if len(r.tensors) > 2 else "")]
        body.append([r.name, str(r.calls), *figures, *rates, *(more if tensors else [])])
    widths = [max(len(line[i]) for line in [columns, *body]) for i in range(7)]
    body = [[c.rjust(w) if i else c for i, (c, w) in enumerate(zip(row, widths))] + row[7:] for row in body]
    return table_lines([columns[0], *(c.rjust(w) for c, w in zip(columns[1:7], widths[1:])), *columns[7:]], body)


def _step_line(p: Phase) -> str:
    whole = f"a whole step takes {p.step * 1e6:.0f} us by the host's clock"
    if p.gpu is None:
        return f"{whole}; its groups one by one add up to {sum(p.seconds) * 1e6:.0f} us"
    share = 100 * p.gpu.gaps / p.gpu.span if p.gpu.span else 0.0
    return (
        f"{whole}, {p.gpu.span * 1e6:.0f} us on the GPU: {p.gpu.kernels:.0f} kernels and copies, with gaps of "
        f"{p.gpu.gaps * 1e6:.0f} us between them ({share:.1f} %)"
    )
