"""A server's file of prompts (--prompt-cache) while nothing is asked: it is written then too, so that a process that is
killed has left what it knew before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from graphrt.errors import SessionError
from graphrt.models.prefix_file import SaveStopped, save_prefixes
from graphrt.tools.serve.scheduler import Scheduler

log = logging.getLogger("graphrt.serve")

#: Seconds without a step after which the file is written; between the ends of two writings; and the part of the time
#: that writing may take.
QUIET, BETWEEN, SHARE = 2.0, 60.0, 0.01


class KeptPrompts:
    """The file of a scheduler's engine. most: bytes of rows; clock: seconds."""

    def __init__(
        self, scheduler: Scheduler, path: Path, most: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler, self._path, self._most, self._clock = scheduler, path, most, clock
        self._written_steps, self._seen_steps, self._quiet_since = scheduler.counts.steps, -1, 0.0
        self._not_before = 0.0

    def due(self) -> float | None:
        """Seconds until the file is to be written, if nothing is asked until then; None where nothing is new."""
        steps, now = self._scheduler.counts.steps, self._clock()
        if steps == self._written_steps:
            return None
        if steps != self._seen_steps:
            self._seen_steps, self._quiet_since = steps, now
        return max(0.0, self._quiet_since + QUIET - now, self._not_before - now)

    def write(self, is_wanted: Callable[[], bool]) -> None:
        """Writes the file, or leaves it as it was where somebody asks for something meanwhile. What fails is a
        warning."""
        began = self._clock()
        try:
            n = save_prefixes(self._scheduler.engine, self._path, self._most, stops=is_wanted)
            log.info("%d tokens of prompts are kept in %s", n, self._path.name)
        except SaveStopped:
            self._seen_steps = -1
            return
        except SessionError as error:
            log.warning("%s", error)
        now = self._clock()
        self._written_steps = self._scheduler.counts.steps
        self._not_before = now + max(BETWEEN, (now - began) / SHARE)
