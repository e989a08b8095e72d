"""A profile as data: the parts of a step, the phases of a run, and what parts of one kind take together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from graphrt.op import Work
from graphrt.program import Run


@dataclass(frozen=True, eq=False)
class Part:
    """A group of nodes, or a copy between backends, that can be run and timed by itself.

    op: the op that computes most in it; tensors: names of its results; work: its FLOPs and bytes; make: returns what
    runs it; wait: waits for its backend; queued: running it returns before its backend is done, so that the host's
    clock around it does not tell its time; meets: the op at which it waits for other ranks, "" for none.
    """

    label: str
    op: str
    tensors: tuple[str, ...]
    work: Work
    make: Callable[[], Run]
    wait: Run
    queued: bool
    meets: str = ""


@dataclass(frozen=True)
class GpuStep:
    """A step on a GPU, on average: seconds from its first kernel's start to its last one's end, seconds in which none
    ran, and the number of kernels and copies."""

    span: float
    gaps: float
    kernels: float


@dataclass(frozen=True)
class Phase:
    """What was measured of the prefill, or of decoding. kind: "prefill" or "decode", with n_tokens at once.

    steps: how many whole steps were timed; step: seconds of one by the host's clock, the median; seconds: of each part,
    for one step; gpu: None without a GPU; in_step: whether the parts' times were taken inside whole steps; runs:
    seconds of each part, run by run, where they were taken in each.
    """

    kind: str
    n_tokens: int
    steps: int
    parts: list[Part]
    seconds: list[float]
    step: float
    gpu: GpuStep | None = None
    in_step: bool = False
    runs: list[list[float]] = field(default_factory=list)


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


def time_by_node(phase: Phase) -> dict[str, float]:
    """Microseconds of each part of a step, by the name of its last result."""
    pairs = zip(phase.parts, phase.seconds)
    return {part.tensors[-1]: 1e6 * seconds for part, seconds in pairs if part.tensors and part.op != "copy"}


def rows(phase: Phase, key: Callable[[Part], str]) -> list[Row]:
    """A row for all parts that `key` gives one name, the row that takes longest first."""
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
