"""Worker: the one thread that owns the engine. The event loop hands it texts, and gets their events back; between two
steps it does one other piece of work with the model, such as embeddings; and while nothing is asked it writes what is
to be kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from graphrt.errors import GraphrtError, RankError
from graphrt.tools.serve.events import Event, Text
from graphrt.tools.serve.inbox import Inbox, Out
from graphrt.tools.serve.kept_prompts import KeptPrompts
from graphrt.tools.serve.metrics import Metrics
from graphrt.tools.serve.ranks import Leader, lost
from graphrt.tools.serve.scheduler import Scheduler

log = logging.getLogger(__name__)

T = TypeVar("T")
#: What is done with a text, and a piece of other work.
Command = tuple[Callable[[Text], None], Text]
Other = tuple[Callable[[], Any], Future[Any]]


class Busy(Exception):
    """As many texts wait as may."""


class Worker:
    """Runs a scheduler; without one (an encoder's) only other work. most_waiting: texts that may wait for their turn;
    leader: tells other ranks what it does; kept: what is written while nothing is asked. submit() and do() are for the
    event loop, which start() is told. failed: the error of a rank that is lost, after which nothing is done; on_failed:
    called then."""

    def __init__(
        self, scheduler: Scheduler | None, metrics: Metrics, most_waiting: int, leader: Leader | None = None
    ) -> None:
        self.scheduler, self.metrics, self.most_waiting, self.leader = scheduler, metrics, most_waiting, leader
        self.failed: RankError | None = None
        self.on_failed: Callable[[], None] = lambda: None
        self._inboxes: dict[Text, Inbox] = {}
        self._outgoing: deque[tuple[Sequence[Event], float]] = deque()
        self._is_called = False  # the loop has been told of these
        self._commands: deque[Command] = deque()
        self._others: deque[Other] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self.kept: KeptPrompts | None = None
        self._thread = threading.Thread(target=self._run, name="graphrt-serve-worker", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- of the event loop ----

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to work; events are delivered on this loop."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Ends all texts and the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, texts: Sequence[Text]) -> Inbox:
        """Has texts made: all of them or none. The inbox gets their events, up to a last piece or an error of each.
        Raises Busy, and RankError where a rank is lost."""
        scheduler = self.scheduler
        assert scheduler is not None
        self._check()
        waiting = sum(text.seq < 0 for text in self._inboxes)
        if waiting + len(texts) > self.most_waiting + scheduler.engine.n_seq:
            raise Busy
        inbox = Inbox()
        self._inboxes |= dict.fromkeys(texts, inbox)
        self._tell(scheduler.add, texts)
        return inbox

    def n_of_key(self, key: str) -> int:
        """Texts of a key that wait or are made."""
        return sum(text.key == key for text in self._inboxes)

    def cancel(self, texts: Sequence[Text]) -> None:
        """Nobody wants these any more; their last event is an error, unless they have ended."""
        scheduler = self.scheduler
        assert scheduler is not None
        going = [text for text in texts if text in self._inboxes]
        if going:
            self._tell(scheduler.cancel, going)

    async def do(self, work: Callable[[], T]) -> T:
        """Runs something else with the model, between two steps. Raises what that raises, and RankError as submit()."""
        self._check()
        found: Future[T] = Future()
        with self._wake:
            self._others.append((work, found))
            self._wake.notify()
        return await asyncio.wrap_future(found)

    def _check(self) -> None:
        if self.failed is not None:
            raise self.failed

    def give_up(self, error: RankError) -> None:
        """A rank is lost: all that wait for something are told so, and nothing more is done. From any thread."""
        self.failed = self.failed or error
        if self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._refuse_all, error)
        self.on_failed()

    def _refuse_all(self, error: RankError) -> None:
        self._refuse_texts(error)
        for _, found in self._others:
            found.set_exception(error)

    def _refuse_texts(self, error: GraphrtError) -> None:
        for text, inbox in self._inboxes.items():
            inbox.put(Event(text, None, error))
        self._inboxes.clear()

    def refuse(self, error: GraphrtError) -> int:
        """Ends all texts with this error. How many there were."""
        texts = list(self._inboxes)
        self._refuse_texts(error)
        if self.scheduler is not None:
            self._tell(self.scheduler.cancel, texts)
        return len(texts)

    def _tell(self, command: Callable[[Text], None], texts: Sequence[Text]) -> None:
        with self._wake:
            self._commands += [(command, text) for text in texts]
            self._wake.notify()

    def _deliver(self) -> None:
        """All events that there are go to their inboxes. Pieces of several steps go out in one write to each client:
        a loop that is late catches up, since a write costs it more than the making of a piece."""
        self._is_called = False
        outs = dict[Out, None]()
        while self._outgoing:
            events, sent = self._outgoing.popleft()
            self.metrics.late.add(time.perf_counter() - sent)
            for event in events:
                inbox = self._inboxes.get(event.text)
                if inbox is None:
                    continue
                out = inbox.put(event)
                if out is not None:
                    outs[out] = None
                if event.piece is None or event.piece.finish:
                    del self._inboxes[event.text]
        for out in outs:
            out.flush()

    # ---- of the thread ----

    def _is_wanted(self) -> bool:
        """There is something to do for somebody."""
        asked = self._stopping or self._commands or self._others
        return bool(asked) or (self.scheduler is not None and not self.scheduler.is_idle)

    def _rest(self) -> None:
        """Returns once there is something to do. With the lock, which others may have meanwhile."""
        while not self._is_wanted():
            seconds = self.kept.due() if self.kept is not None else None
            if self._wake.wait(seconds) or self._is_wanted() or self.kept is None:
                continue
            self._wake.release()
            try:
                self.kept.write(self._is_wanted)
            finally:
                self._wake.acquire()

    def _run(self) -> None:
        scheduler = self.scheduler
        while True:
            with self._wake:
                self._rest()
                if self._stopping:
                    break
                commands, self._commands = self._commands, deque()
                other = self._others.popleft() if self._others else None
            try:
                self._turn(commands, other)
            except RankError as error:
                self.give_up(error)
                return
        if self.leader is not None:
            self.leader.end()
        if scheduler is not None:
            scheduler.close()
            self._send(scheduler.step())
        for _, found in self._others:
            found.cancel()

    def _turn(self, commands: Sequence[Command], other: Other | None) -> None:
        """What has come, a step, and a piece of other work. Raises RankError where a rank is lost."""
        scheduler = self.scheduler
        if self.leader is not None:
            self.leader.tell(commands)
        for command, text in commands:
            try:
                command(text)
            except Exception:
                log.exception("a text could not be added or cancelled")
        gone = None
        if scheduler is not None:
            began = time.perf_counter()
            events = scheduler.step()
            self.metrics.steps(scheduler.times)
            self._send(events)
            self.metrics.turn(scheduler.times, time.perf_counter() - began)
            gone = lost(events)
        if other is not None:
            gone = _do(*other) or gone
        if gone is not None:
            raise gone

    def _send(self, events: Sequence[Event]) -> None:
        """Gives events to the event loop, which is called once for all that it has not looked at."""
        if not events:
            return
        self.metrics.tell(events)
        assert self._loop is not None
        self._outgoing.append((events, time.perf_counter()))
        if self._is_called:
            return
        self._is_called = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody waits
            log.debug("%d events came after the end", len(events))


def _do(work: Callable[[], T], found: Future[T]) -> RankError | None:
    """Does a piece of work. The error of a rank that is lost, if it came to that."""
    if not found.set_running_or_notify_cancel():
        return None
    try:
        found.set_result(work())
    except BaseException as error:
        found.set_exception(error)
        return error if isinstance(error, RankError) else None
    return None
