"""A server's process: uvicorn on a socket, its log, and how it ends."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

import uvicorn

from graphrt.tools.serve.app import application
from graphrt.tools.serve.connection import connections, limit_waiting
from graphrt.tools.serve.state import State

log = logging.getLogger("graphrt.serve")

#: Seconds after which a thread that computes lets another one go on. The thread that owns the engine has little to do
#: in a step, and all texts wait for it while the one that writes answers goes on.
SWITCH_SECONDS = 0.0005


def run(
    state: State, api_keys: Sequence[str], listening: socket.socket, address: str, shutdown_timeout: int,
    on_ready: Callable[[], None] = lambda: None, origins: Sequence[str] = (),
) -> int:  # fmt: skip
    """Serves until a signal comes: then no new connection is taken, and requests that are there are answered, for at
    most shutdown_timeout seconds, 0 for as long as they take. The exit code. on_ready: called when requests are
    answered; origins: the other sites whose pages may ask. Raises RankError where a rank is lost: all that are there
    have been told so."""

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
        timeout_graceful_shutdown=shutdown_timeout or None,
    )
    # uvicorn raises the signal that ended it once more when all is done: then nothing is to happen
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    sys.setswitchinterval(SWITCH_SECONDS)
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True

    state.worker.on_failed = stop
    server.run(sockets=[listening])
    if state.worker.failed is not None:
        raise state.worker.failed
    log.info("ended")
    return 0


def setup_logging(*, as_json: bool) -> None:
    """Lines of this server, and warnings of others, go to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("graphrt.serve").setLevel(logging.INFO)
    # which warns of every piece of an answer whose client has just left
    logging.getLogger("asyncio").setLevel(logging.ERROR)


class _Json(logging.Formatter):
    """A line is an object."""

    def format(self, record: logging.LogRecord) -> str:
        found = {"time": time.time(), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)
