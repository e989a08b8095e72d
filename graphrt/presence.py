"""Where this process stands among ranks that wait for each other: what the watch of the ranks tells the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Presence:
    """met: how many times this process has come to where all ranks meet; waits: it is there now, and needs all the
    others; busy: how many pieces of work are under way that take as long as they take: reading weights, compiling,
    waiting for a terminal."""

    met: int = 0
    waits: bool = False
    busy: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def meeting(self, *, needs_all: bool = True) -> Iterator[None]:
        """Around what all ranks do together. needs_all: False where they wait for the first rank alone."""
        self.met += 1
        self.waits = needs_all
        try:
            yield
        finally:
            self.waits = False

    @contextmanager
    def at_length(self) -> Iterator[None]:
        """Around work for which other ranks wait with patience."""
        with self._lock:
            self.busy += 1
        try:
            yield
        finally:
            with self._lock:
                self.busy -= 1


#: This process's.
here = Presence()
