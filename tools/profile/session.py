"""`graphrt run --profile`: where a run's time goes, by group of nodes and by op, and the gaps between kernels.

A batch of the prompt and some decode steps run in two ways: a group of nodes at a time, which tells what kernels a
group launches, and as whole steps, as without a profile. On a GPU the kernels' times are taken from the whole steps,
which launch the same kernels in the same order. On the CPU a group's time is the host's clock around the group alone,
compiled by itself: a decode step that is one native call takes less than the sum of its groups. All spans are written
to a trace file that Perfetto can open.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphrt.execute import Executable
from graphrt.program import Run
from graphrt.tools.profile.parts import parts_of
from graphrt.tools.profile.phase import Phase
from graphrt.tools.profile.spans import span_name, timed
from graphrt.tools.profile.traces import GpuTrace, HostTrace, Trace

if TYPE_CHECKING:
    from graphrt.models.session import Session


PREFILL_STEPS = 3
#: Runs before anything is timed: a GPU backend may compile in the first and capture in the next ones.
WARM_UPS = 3
#: Runs in parts on a GPU, where the whole step gives the times.
GPU_PASSES = 2


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
    return [timed(phase, events) for phase in phases]


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
            with trace.span(span_name(part, phase.kind, i)):
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
