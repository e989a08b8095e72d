"""Inbox: a request's events on their way to who answers it, all of it on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from graphrt.tools.serve.events import Event

log = logging.getLogger(__name__)


class Out(Protocol):
    """A stream's way to its client. is_free: it takes more now."""

    @property
    def is_free(self) -> bool: ...

    def hold(self, value: str) -> None:
        """Takes an event's data, which goes out with flush()."""

    def flush(self) -> None: ...


class Inbox:
    """Events in their order. A stream's usual pieces need not wake the task that reads them, which costs more than all
    else that becomes of a piece: while it waits here and nothing is left, `form` makes them data for `out`.

    form: an event's data, "" for none, None for what the task has to see; out: where it goes; both None unless a stream
    gave them."""

    form: Callable[[Event], str | None] | None = None
    out: Out | None = None

    def __init__(self) -> None:
        self._events = deque[Event]()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> Out | None:
        """Takes an event. What is to be flushed by and by, None where the task has to see the event."""
        waiter, out, form = self._waiter, self.out, self.form
        if waiter is not None and out is not None and form is not None and out.is_free:
            try:
                value = form(event)
            except Exception:  # of one request: others' events come behind this one
                log.exception("a piece could not be written")
                self.form = value = None
            if value is not None:
                if value:
                    out.hold(value)
                return out
        self._events.append(event)
        self._waiter = None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return None

    async def get(self) -> Event:
        """The next event, once it is there. One task may wait at a time."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()
