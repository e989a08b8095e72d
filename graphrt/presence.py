"""Where this process stands among ranks that wait for each other: what the watch of the ranks tells the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Presence:
    """met: how many times this process has come to where it needs other ranks; waits: it is there now, and needs them
    to do their part; there: it is there now, if only to listen to the first one; busy: how many pieces of work are
    under way that take as long as they take: reading weights, compiling, waiting for a terminal."""

    met: int = 0
    waits: bool = False
    busy: int = 0
    there: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def meeting(self, *, needs_all: bool = True) -> Iterator[None]:
        """Around what ranks do together. needs_all: False where they wait for the first rank alone."""
        self.met += 1
        self.waits, self.there = needs_all, True
        try:
            yield
        finally:
            self.waits = self.there = False

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
