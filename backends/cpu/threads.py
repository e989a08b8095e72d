"""How many threads the CPU backend uses, and what becomes of them after a fork."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that this process may keep busy: those it may run on, hyperthreads of one core counted once, and no more
    than the processor time that its control groups allow."""
    return max(1, int(min(len(_cores(_allowed_cpus())), *_quotas(), math.inf)))


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _cores(cpus: set[int]) -> set[str]:
    """The cores of some logical CPUs, each named by the CPUs that share it, or by itself where that is not known."""
    return {_read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}


def _quotas() -> Iterator[float]:
    """Processors' time that each control group around this process allows, in processors."""
    for line in (_read(_OWN_CGROUP) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / "cpu" if controllers else _CGROUPS
        relative = Path(path.lstrip("/"))
        for folder in (root / relative, *(root / parent for parent in relative.parents)):
            quota, period = _quota(folder)
            if quota > 0 and period > 0:
                yield quota / period


def _quota(folder: Path) -> tuple[int, int]:
    """Microseconds of processor time and of the period they are for; (0, 0) where there is no limit."""
    words = (_read(folder / "cpu.max") or "").split()
    if not words:
        words = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    return (int(words[0]), int(words[1])) if all(word.isdigit() for word in words) and len(words) == 2 else (0, 0)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


@functools.cache
def limit_threads() -> None:
    """Once a process: torch uses no more threads than there are cores to run them. More make each wait for those that
    are not running. A number that somebody has set, with OMP_NUM_THREADS or torch.set_num_threads, stays."""
    cpus = _allowed_cpus()
    chosen_by_torch = torch.get_num_threads() in (len(cpus), len(_cores(cpus)))
    if chosen_by_torch and not os.environ.get("OMP_NUM_THREADS") and usable_cores() < torch.get_num_threads():
        torch.set_num_threads(usable_cores())


def count() -> int:
    """Threads that the CPU backend's work uses: what torch was told, in a forked process what its parent used."""
    return _FORKED.n_threads or torch.get_num_threads()


def use(n: int) -> None:
    """The CPU backend's work uses n threads from now on."""
    limit_threads()
    if _FORKED.n_threads:
        _FORKED.n_threads = n
    else:
        torch.set_num_threads(n)


@contextmanager
def using(n: int) -> Iterator[None]:
    """What is prepared and run inside uses n threads, 0 for as many as outside."""
    before = count()
    if n in (0, before):
        yield
        return
    use(n)
    try:
        yield
    finally:
        use(before)


# ---- after a fork ----


class _Forked:
    """In a forked process OpenMP's threads are gone, and it waits for them for good. It knows its threads by the thread
    that started them: one that is new starts new ones. n_threads: 0 where nothing was forked."""

    def __init__(self) -> None:
        self.n_threads = 0
        self._starter: ThreadPoolExecutor | None = None

    def begin(self) -> None:
        """In a process just forked. torch's functions outside of run() use one thread from now on."""
        self.n_threads, self._starter = count(), None
        torch.set_num_threads(1)

    def run(self, work: Callable[[], object]) -> None:
        """Runs work that may use several threads."""
        if self._starter is None:
            self._starter = ThreadPoolExecutor(1, "graphrt-after-fork")
        self._starter.submit(self._run, work).result()

    def _run(self, work: Callable[[], object]) -> None:
        if torch.get_num_threads() != self.n_threads:
            torch.set_num_threads(self.n_threads)
        work()


_FORKED = _Forked()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_FORKED.begin)


def run(work: Callable[[], object]) -> None:
    """Runs work that may use several threads, in whatever process."""
    if _FORKED.n_threads > 1:
        _FORKED.run(work)
    else:
        work()
