"""Clocks: seconds of single runs, by the GPU's own events or by the host's clock; and a device's ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Run = Callable[[], object]

#: A measurement has so many runs: what fits in the time, within these bounds.
BUDGET_S, FEWEST, MOST = 0.3, 10, 100
#: Of the time that the host saw pass, the events must see at least this part; else the work is on another stream.
_LEAST_SEEN = 0.5


@dataclass(frozen=True)
class Times:
    """Seconds of each run, in order. note: what a reader must know of how they were taken, "" for nothing."""

    seconds: list[float]
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __add__(self, other: Times) -> Times:
        return Times(self.seconds + other.seconds, self.note or other.note)


class Clock(Protocol):
    """Times a run that has been warmed up. wait: until a run that was queued is done."""

    def times(self, run: Run, n: int, wait: Run) -> Times: ...


class HostClock:
    """For work on the CPU: from the start of a run until it is done."""

    def times(self, run: Run, n: int, wait: Run) -> Times:
        def finished() -> None:
            run()
            wait()

        return Times([_seconds(finished) for _ in range(n)])


class CudaClock:
    """Times runs by events on torch's current stream, one before and one after each.

    All runs are queued at once: where the GPU takes longer than the host needs to start a run, that cost does not show.
    """

    def times(self, run: Run, n: int, wait: Run) -> Times:
        wait()
        torch.cuda.synchronize()
        pairs = [(_event(), _event()) for _ in range(n)]
        started = time.perf_counter()
        run()  # the GPU is busy with it while the host gets ahead
        for before, after in pairs:
            before.record()
            run()
            after.record()
        wait()
        torch.cuda.synchronize()
        passed = (time.perf_counter() - started) * n / (n + 1)
        if pairs[0][0].elapsed_time(pairs[-1][1]) / 1e3 < _LEAST_SEEN * passed:
            note = "by the host's clock, an upper bound: its work is not on torch's current stream"
            return Times([passed / n] * n, note)
        return Times([before.elapsed_time(after) / 1e3 for before, after in pairs])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _seconds(work: Run) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def runs_for(seconds: float) -> int:
    """How many runs of that length to time."""
    return int(min(max(BUDGET_S / max(seconds, 1e-9), FEWEST), MOST))


@dataclass(frozen=True)
class Ceilings:
    """What the device does at best. copy_gb_per_s: bytes read and written; tflop_per_s: a square product, by type."""

    copy_gb_per_s: float
    tflop_per_s: dict[str, float]

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of each."""
        products = {kind: max(rate, other.tflop_per_s[kind]) for kind, rate in self.tflop_per_s.items()}
        return Ceilings(max(self.copy_gb_per_s, other.copy_gb_per_s), products)


def ceilings(cuda: bool) -> Ceilings:
    """Medians: a copy of 2 GiB and f16 and bf16 products of 8192^3 on the GPU, less of both and f32 on the CPU."""
    device, clock = ("cuda", CudaClock()) if cuda else ("cpu", HostClock())
    kinds = {"f16": torch.float16, "bf16": torch.bfloat16} if cuda else {"f32": torch.float32}
    n_bytes, n, runs = (2**31, 8192, 20) if cuda else (2**24, 512, 5)

    def median(work: Run) -> float:
        for _ in range(3):
            work()
        return clock.times(work, runs, lambda: None).median

    def copy() -> Run:
        source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    def product(kind: torch.dtype) -> Run:
        a = torch.randn(n, n, device=device).to(kind)  # not zeros: a GPU's clock depends on the bits that flip
        return lambda: a @ a

    rates = {name: 2 * n**3 / median(product(kind)) / 1e12 for name, kind in kinds.items()}
    return Ceilings(2 * n_bytes / median(copy()) / 1e9, rates)
