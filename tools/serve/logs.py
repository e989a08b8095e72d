"""A server's log: lines for people, or JSON objects, on stderr; a line for each request, once its answer has ended."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from graphrt.tools.serve.events import Text

log = logging.getLogger("graphrt.serve")

#: The texts that the request asks for whose task runs.
ASKED: ContextVar[list[Text]] = ContextVar("asked")


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
    """A line is an object. A request's has what is told of it by name too."""

    def format(self, record: logging.LogRecord) -> str:
        found = {"time": time.time(), "level": record.levelname.lower(), "message": record.getMessage()}
        found |= getattr(record, "told", {})
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


class RequestLine:
    """What is told of a request, whose answer begins now or has ended already. path: as requests are counted; number:
    that of the answer's x-request-id; texts: what it has asked for."""

    def __init__(self, method: str, path: str, number: str, texts: Sequence[Text]) -> None:
        self._method, self._path, self._number, self._texts = method, path, number, texts
        self._began = time.monotonic()

    def write(self, status: int, *, left: bool = False) -> None:
        """left: the client did, before the answer's end."""
        seconds = round(time.monotonic() - self._began, 3)
        told: dict[str, Any] = {"method": self._method, "path": self._path, "status": status, "seconds": seconds}
        said = f"{self._method} {self._path} {status} {seconds:.3f} s"
        if self._texts:  # of the texts of one prompt the first one reads it
            n_read = sum(len(text.prompt) for text in self._texts if text.leader is None)
            told |= {"prompt_tokens": n_read, "tokens": sum(text.n_made for text in self._texts)}
            said += f", {n_read} + {told['tokens']} tokens"
        if left:
            told["left"] = True
            said += ", the client left"
        log.info("%s, %s", said, self._number, extra={"told": told | {"request_id": self._number}})
