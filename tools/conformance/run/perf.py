"""Time of each case whose result is right, beside the device's ceilings measured in the same process."""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import graphrt
from graphrt.backend import Backend
from graphrt.op import op_spec
from graphrt.testing import Case
from graphrt.tools.common import progress, write_text
from graphrt.tools.conformance.cases.sources import make_backend, pick, source_of
from graphrt.tools.conformance.run.step import BAD, Outcome, run_case

#: A case is repeated for so many seconds, and at least so many times.
MIN_SECONDS, MIN_RUNS = 0.2, 5


@dataclass(frozen=True)
class Timing:
    """status: pass, or why it was not timed. share: of the ceiling that binds, the larger of FLOP/s and bytes/s."""

    case: str
    op: str
    status: str
    message: str = ""
    seconds: float | None = None
    gflop_per_s: float | None = None
    gb_per_s: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Ceilings:
    """What the device does at best: its name, bytes/s of memory and FLOP/s of a matrix product."""

    device: str
    gb_per_s: float
    gflop_per_s: float


def ceilings(backend: Backend) -> Ceilings:
    """Measured with torch: on the GPU for a backend whose device is one, else on the CPU."""
    import torch

    from graphrt.tools.bench.machine import cpu, on_gpu

    if backend.device is None or not on_gpu(backend):
        machine = cpu().report
        return Ceilings(machine["cpu"], machine["read_gb_per_s"], machine["f32_gflop_per_s"])
    n = 8192
    a = torch.randn(n, n, device="cuda", dtype=torch.float16)
    source = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)

    def best(work: Callable[[], object]) -> float:
        work()
        return min(_timed(work, torch.cuda.synchronize) for _ in range(10))

    copy = best(lambda: target.copy_(source))
    return Ceilings(backend.device.description, 2 * source.numel() / copy / 1e9, 2 * n**3 / best(lambda: a @ a) / 1e9)


def _timed(work: Callable[[], object], wait: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def measure(case: Case, backend: Backend, seed: int, best: Ceilings) -> Timing:
    """Tests the case, then times it as prepared by the runtime: median of several runs."""
    outcome: Outcome = run_case(case, backend, seed)
    if outcome.status != "pass":
        return Timing(str(case), case.op, outcome.status, outcome.message)
    inputs = case.build(seed)
    exe = graphrt.prepare(inputs.graph(), backend)
    inputs.fill(exe)
    _timed(exe.run, exe.synchronize)
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < MIN_RUNS or time.perf_counter() - started < MIN_SECONDS:
        times.append(_timed(exe.run, exe.synchronize))
    seconds = statistics.median(times)
    work = op_spec(inputs.result.op).work(inputs.result)
    flops, moved = work.flops / seconds / 1e9, work.bytes / seconds / 1e9
    share = max(flops / best.gflop_per_s, moved / best.gb_per_s)
    return Timing(str(case), case.op, "pass", "", seconds, flops, moved, share)


def main(args: argparse.Namespace) -> int:
    """`graphrt test perf`. What is wrong is not timed, and makes the exit code 1."""
    backend = make_backend(args.backend)
    cases = pick(list(source_of(args).cases()), args.op, args.params)
    best = ceilings(backend)
    timings = []
    with progress(f"perf {backend.name}", len(cases)) as advance:
        for case in cases:
            timings.append(measure(case, backend, args.seed, best))
            advance()
    text = _render(args.output, timings, best, backend.name)
    if args.output_file is not None:
        write_text(args.output_file, text + "\n")
    else:
        print(text)
    return 1 if any(t.status in BAD for t in timings) else 0


def _render(kind: str, timings: Sequence[Timing], best: Ceilings, backend: str) -> str:
    if kind == "json":
        return json.dumps(
            {"backend": backend, "ceilings": asdict(best), "cases": [asdict(t) for t in timings]}, indent=1
        )
    if kind == "csv":
        out = io.StringIO()
        rows = csv.DictWriter(out, list(asdict(timings[0])), lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(t) for t in timings)
        return out.getvalue().rstrip("\n")
    lines = [f"{backend} on {best.device}: at best {best.gb_per_s:.1f} GB/s, {best.gflop_per_s:.0f} GFLOP/s", ""]
    lines.append(f"{'us':>10}  {'GFLOP/s':>9}  {'GB/s':>8}  {'ceiling':>7}  case")
    lines += [_line(t) for t in timings]
    if any((t.share or 0.0) > 1.0 for t in timings):
        lines += ["", "Over 100 %: the case fits in caches, which are faster than the memory that the ceiling is of."]
    return "\n".join(lines)


def _line(t: Timing) -> str:
    if t.seconds is None:
        return f"{'not timed':>10}  {t.case}: {t.status}, {t.message}"
    figures: tuple[Any, ...] = (1e6 * t.seconds, t.gflop_per_s, t.gb_per_s, 100 * (t.share or 0.0))
    return "{:>10.1f}  {:>9.2f}  {:>8.2f}  {:>5.1f} %  ".format(*figures) + t.case
