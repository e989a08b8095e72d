"""A server's process: uvicorn on a socket, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from graphrt.tools.serve.app import application
from graphrt.tools.serve.connection import Connection, connections, limit_waiting
from graphrt.tools.serve.events import ServerEnds
from graphrt.tools.serve.state import State
from graphrt.tools.serve.worker import Worker

log = logging.getLogger("graphrt.serve")

#: Seconds after which a thread that computes lets another one go on. The thread that owns the engine has little to do
#: in a step, and all texts wait for it while the one that writes answers goes on.
SWITCH_SECONDS = 0.0005
#: Seconds in which whoever is told that the server ends can take that.
_LAST_WORDS = 1.0


def run(
    state: State, api_keys: Sequence[str], listening: socket.socket, address: str, shutdown_timeout: int,
    on_ready: Callable[[], None] = lambda: None, origins: Sequence[str] = (),
) -> int:  # fmt: skip
    """Serves until a signal comes: then no new connection is taken, and requests that are there are answered, for at
    most shutdown_timeout seconds, 0 for as long as they take, or until a second signal comes. The exit code. on_ready:
    called when requests are answered; origins: the other sites whose pages may ask. Raises RankError where a rank is
    lost: all that are there have been told so."""

    def ready() -> None:
        log.info("%s is served at %s", state.name, address)
        on_ready()

    seconds = state.limits.body_seconds
    limit_waiting(listening, seconds)
    config = uvicorn.Config(
        application(state, api_keys, ready, origins),
        loop="asyncio",
        http=connections(seconds),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
    )
    # which uvicorn leaves behind at its end: no signal ends the writing of --prompt-cache
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    sys.setswitchinterval(SWITCH_SECONDS)
    server = _Server(config, state.worker, shutdown_timeout)

    def stop() -> None:
        server.should_exit = True

    state.worker.on_failed = stop
    server.run(sockets=[listening])
    if state.worker.failed is not None:
        raise state.worker.failed
    log.info("ended")
    return 0


class _Server(uvicorn.Server):
    """uvicorn's, which would cut off what is under way when the time of its end is over, and at a second signal: here
    all that wait are told that the server ends. seconds: until then from the first signal on, 0: any number."""

    def __init__(self, config: uvicorn.Config, worker: Worker, seconds: float) -> None:
        super().__init__(config)
        self._worker, self._seconds, self._hurries = worker, seconds, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        self._hurries = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut_off = asyncio.ensure_future(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            cut_off.cancel()

    async def _cut_off(self) -> None:
        """Once it is time, ends what is under way."""
        began = asyncio.get_running_loop().time()
        while not self._hurries:
            await asyncio.sleep(0.05)  # a signal's handler can't wake the loop
            if self._seconds and asyncio.get_running_loop().time() - began > self._seconds:
                break
        n = self._worker.refuse(ServerEnds("the server ends and can't make this text to its end; ask again later"))
        log.warning("%d texts were cut off, since the server ends", n)
        await asyncio.sleep(_LAST_WORDS)
        for each in self.server_state.connections:  # whose clients take or send nothing
            if isinstance(each, Connection):
                each.transport.abort()
