"""Ctrl-C while a model answers: it ends the answer, at a place where all that counts tokens is right, and no more."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class Interrupts:
    """stopped: Ctrl-C was pressed since the answer began."""

    def __init__(self) -> None:
        self.stopped = False
        self._inside = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ctrl-C sets `stopped` meanwhile; KeyboardInterrupt is raised only within a step of between()."""
        self.stopped = self._inside = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def between(self, steps: Iterator[T]) -> Generator[T, None, None]:
        """The same steps, until Ctrl-C; one in which it was pressed ends there: no long prompt is waited for."""
        while not self.stopped:
            try:
                self._inside = True
                step = next(steps)
                self._inside = False
            except StopIteration:
                self._inside = False
                return
            except KeyboardInterrupt:
                self.stopped, self._inside = True, False
                return
            yield step

    def _take(self, number: int, frame: FrameType | None) -> None:
        first, self.stopped = not self.stopped, True
        if first and self._inside:
            raise KeyboardInterrupt
