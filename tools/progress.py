"""Shows on stderr how far long work is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from graphrt.progress import Advance, Display

#: Seconds before a bar appears: quick work shows none, and does not import rich.
BAR_AFTER = 0.7
#: Seconds between lines in a pipe or a file.
LINE_EVERY = 5.0


def on_stderr() -> Display:
    """A bar if stderr is a terminal, else lines."""
    stream = sys.stderr
    if stream.isatty():
        return lambda title, total, unit: _shown(Bar(stream, title, total, unit), BAR_AFTER)
    return lambda title, total, unit: _shown(Lines(stream, title, total, unit), LINE_EVERY)


class Shown(Protocol):
    """One task on display."""

    def advance(self, n: int = 1, /) -> None: ...
    def tick(self) -> None:
        """Called from another thread, again and again while the task lasts."""

    def end(self) -> None: ...


@contextmanager
def _shown(shown: Shown, every: float) -> Iterator[Advance]:
    """Ticks every so many seconds from a thread of its own, since a single step of the work may take minutes."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every):
            shown.tick()

    ticking = threading.Thread(target=run, name="progress", daemon=True)
    ticking.start()
    try:
        yield shown.advance
    finally:
        ended.set()
        try:
            ticking.join()
        finally:
            shown.end()  # whatever came in between, Ctrl-C too: a bar hides the cursor while it is there


class Lines:
    """A line at each tick: what, how many of how many, how long so far and about how long still."""

    def __init__(
        self, stream: TextIO, title: str, total: int, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._title, self._total, self._unit, self._clock = stream, title, total, unit, clock
        self._started, self._done = clock(), 0

    def advance(self, n: int = 1, /) -> None:
        self._done += n

    def tick(self) -> None:
        seconds = self._clock() - self._started
        line = f"{self._title}: {amount(self._done, self._total, self._unit)}, {duration(seconds)}"
        if 0 < self._done < self._total:
            line += f", about {duration(seconds * (self._total - self._done) / self._done)} left"
        print(line, file=self._stream, flush=True)

    def end(self) -> None:
        """The work's own output follows."""


class Bar:
    """rich's bar, from the first tick on; it is wiped out at the end."""

    def __init__(self, stream: TextIO, title: str, total: int, unit: str) -> None:
        self._stream, self._title, self._total, self._unit = stream, title, total, unit
        self._done = 0
        self._stop: Callable[[], None] | None = None
        self._update: Callable[[], None] = lambda: None

    def advance(self, n: int = 1, /) -> None:
        self._done += n
        self._update()

    def tick(self) -> None:
        if self._stop is None:
            self._begin()

    def _begin(self) -> None:
        from rich.console import Console  # well-kept, and copes with every terminal
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}")
        bar = Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=True,
            redirect_stdout=False,
        )
        task = bar.add_task(self._title, total=self._total, amount=self._amount())
        self._stop, self._update = bar.stop, lambda: bar.update(task, completed=self._done, amount=self._amount())
        bar.start()
        self._update()

    def _amount(self) -> str:
        return amount(self._done, self._total, self._unit)

    def end(self) -> None:
        if self._stop is not None:
            self._stop()


def amount(done: int, total: int, unit: str) -> str:
    """ "512 of 2048 tokens", "1.2 of 4.0 GB"."""
    if unit != "bytes":
        return f"{done} of {total} {unit}".rstrip()
    scale, name = next((s, n) for s, n in ((1e9, "GB"), (1e6, "MB"), (1.0, "bytes")) if total >= s or s == 1.0)
    digits = 0 if scale == 1.0 else 1
    return f"{done / scale:.{digits}f} of {total / scale:.{digits}f} {name}"


def duration(seconds: float) -> str:
    """ "7 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
