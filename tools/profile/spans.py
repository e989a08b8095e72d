"""From a trace's events to the times of a phase's parts: spans of the host, and the GPU's work in each."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graphrt.tools.profile.phase import GpuStep, Part, Phase
from graphrt.tools.profile.traces import Event

#: How the names of spans end: the phase, and the number of a part or "step" for a whole one.
_SPAN = re.compile(r"\[(\w+) (\d+|step)\]$")
#: Categories of events: what the GPU does, and what the host calls to launch it.
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def span_name(part: Part, kind: str, i: int) -> str:
    """The name of a part's span, which spans_of() reads. Other characters than plain ones are replaced: what writes
    the trace file does not escape them."""
    return re.sub(r"[^\w+\-. ()]", "_", f"{part.label} {part.tensors[0]}", flags=re.ASCII) + f" [{kind} {i}]"


@dataclass(frozen=True)
class _Span:
    """A span of the host's time. part: the index of the part that ran, None for a whole step; start, end: microseconds.

    work: start and end of everything that the GPU did for it, in order of starts.
    """

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
    """By how much each piece of work (start and end, in order of starts) makes the time longer in which anything ran.

    Of a piece that starts before those before it have ended, only what comes after their end counts. So the sum is the
    time in which something ran.
    """
    found, until = [], float("-inf")
    for start, end in work:
        found.append(max(end - max(start, until), 0.0))
        until = max(until, end)
    return found


def timed(phase: Phase, events: Sequence[Event]) -> Phase:
    """The phase with the times of its parts filled in from a trace's events."""
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
    in_steps = np.zeros((len(matched), len(phase.parts)))
    for times, s in zip(in_steps, matched):
        np.add.at(times, owners, own_times(s.work))
    if matched:
        alone = in_steps.mean(0)
    queued = np.array([p.queued for p in phase.parts]) & bool(owners)
    seconds = np.where(queued, alone, on_host) / 1e6
    gpu, runs = _gpu_step(matched or whole), _by_run(by_host)
    if queued.any():  # whose times the host's clock does not tell
        runs = in_steps
    return replace(phase, seconds=seconds.tolist(), gpu=gpu, in_step=bool(matched), runs=(runs / 1e6).tolist())


def _by_run(by_part: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """Times of each part, as times of each run."""
    n = min(map(len, by_part), default=0)
    return np.array([times[:n] for times in by_part]).reshape(len(by_part), n).T


def _gpu_step(whole: Sequence[_Span]) -> GpuStep | None:
    seen = [s.work for s in whole if s.work]
    if not seen:
        return None
    spans = [max(end for _, end in work) - work[0][0] for work in seen]
    gaps = [span - sum(own_times(work)) for span, work in zip(spans, seen)]
    return GpuStep(statistics.mean(spans) / 1e6, statistics.mean(gaps) / 1e6, statistics.mean(map(len, seen)))
