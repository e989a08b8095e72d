"""What routes share of HTTP: bodies with limits, answers that come in pieces, and clients that leave."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphrt.tools.serve.errors import ApiError, of_validation
from graphrt.tools.serve.inbox import Inbox

B = TypeVar("B", bound=BaseModel)
#: A value as JSON. json.dumps() would make an encoder for each.
encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
#: A request's way to its connection: takes bytes of a body, and says whether it did. What it doesn't take is sent in
#: ASGI's way.
WRITE = "graphrt.write"
#: Where the text belongs in a prepared piece.
HERE = "\0"


def together(values: Iterable[str]) -> str:
    """Data of several events as that of one, for who gives one event at a time."""
    return "\n\ndata: ".join(values)


class Chunks:
    """Pieces of a streamed answer as JSON texts. What all have in common is made once. usage: asked for each piece."""

    def __init__(self, head: Mapping[str, Any], usage: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self._head, self._usage = encoded(dict(head))[:-1], usage

    def __call__(self, choice: Mapping[str, Any], **more: Any) -> str:
        """A piece of one choice. more: what is told beside it."""
        told = "".join(f",{encoded(name)}:{encoded(value)}" for name, value in more.items())
        if self._usage is not None:
            told += f',"usage":{encoded(self._usage())}'
        return f'{self._head},"choices":[{encoded(choice)}]{told}}}'

    def form(self, choice: Mapping[str, Any]) -> Callable[[str], str]:
        """Makes pieces that differ by one text, which stands wherever this choice has HERE."""
        parts = self(choice).split(encoded(HERE))

        def made(text: str) -> str:
            return encoded(text).join(parts)

        return made


async def body_of(request: Request, kind: type[B], most: int, seconds: float) -> B:
    """A request's body, of at most so many bytes, which are to come within so many seconds. Raises ApiError,
    ClientDisconnect."""
    data = await data_of(request, most, seconds)
    try:
        return kind.model_validate_json(data.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        raise of_validation(error) from None


async def data_of(request: Request, most: int, seconds: float) -> bytes:
    """The same as it came."""
    packed = request.headers.get("content-encoding", "identity")
    if packed.lower() not in ("", "identity"):
        raise ApiError(f"a body must come as it is, this one is {packed[:20]!r}; send it without Content-Encoding",
                       status=415, headers={"accept-encoding": "identity"})  # fmt: skip
    try:
        return await asyncio.wait_for(_read(request, most), seconds)
    except TimeoutError:
        raise ApiError(
            f"a body must come within {seconds:g} s, this one did not; send it at once",
            status=408,
            headers={"connection": "close"},
        ) from None


async def _read(request: Request, most: int) -> bytes:
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told[:20]) > most:
        raise _too_large(most, told)
    found = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        found += message.get("body", b"")
        if len(found) > most:
            raise _too_large(most, f"more than {most}")
        if not message.get("more_body"):
            return bytes(found)


def _too_large(most: int, got: str) -> ApiError:
    return ApiError(
        f"a body may have {most} bytes, this one has {got[:20]}; send less, or start the server with --max-body",
        status=413,
    )


@contextlib.contextmanager
def watched(receive: Receive, leave: Callable[[], None]) -> Iterator[None]:
    """Calls leave() when the client goes, while what is inside runs. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    task = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        task.cancel()


class OnEnd(Protocol):
    def __call__(self, *, left: bool) -> None: ...


def _nothing(*, left: bool) -> None:
    """Nobody is told of a stream's end."""


class EventStream(Response):
    """Server-sent events: "data:" and JSON texts, or lines of a named event's. leave: called when the client goes, and
    in any case at the end, as on_end is with whether it has gone; inbox: its usual pieces are written without waking
    `values`; last: data of the last event, "" for none; told: gets the seconds of each write to the socket. A client
    that reads slowly is waited for.

    Events that are there at once go out in one write: a loop that is late catches up, since a write to a socket costs
    it more than the making of an event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        values: AsyncIterator[str],
        leave: Callable[[], None],
        inbox: Inbox,
        last: str = "[DONE]",
        told: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._values, self._leave, self._inbox, self._last, self._told = values, leave, inbox, last, told
        self._left = False
        self.on_end: OnEnd = _nothing

    def _client_left(self) -> None:
        self._left = True
        self._leave()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with watched(receive, self._client_left):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._inbox.out = out = Held(scope.get(WRITE), self._told)
                async for value in self._values:
                    if not out.add(value):
                        await _send(send, out.taken())
                self._inbox.out = None
                if self._last:
                    out.add(self._last)
                await _send(send, out.taken())
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._inbox.out = None
            self._leave()
            self.on_end(left=self._left)


class Held:
    """Events that go out when the loop has come round: until then others are added. write: scope[WRITE], or None; told:
    gets the seconds of each write."""

    def __init__(self, write: Callable[[bytes], bool] | None, told: Callable[[float], None]) -> None:
        self._write, self._held, self._told = write, bytearray(), told
        self.is_free = write is not None

    def add(self, value: str) -> bool:
        """Takes an event's data, or its lines if it has a name. Whether it goes out by itself; else who adds has to
        send what is held."""
        if not self._held and self.is_free:
            asyncio.get_running_loop().call_soon(self.flush)
        self.hold(value)
        return self.is_free

    def hold(self, value: str) -> None:
        """The same; it goes out with what comes, or by flush()."""
        event = value if value.startswith("event: ") else f"data: {value}"
        self._held += f"{event}\n\n".encode("utf-8", "replace")

    def taken(self) -> bytes:
        """What is held, which whoever asks sends."""
        found = bytes(self._held)
        self._held.clear()
        self.is_free = self._write is not None
        return found

    def flush(self) -> None:
        """Has what is held go out. A slow client's bytes are kept until the next are added, or the end."""
        if self._held and self._write is not None:
            began = time.perf_counter()
            self.is_free = self._write(bytes(self._held))
            self._told(time.perf_counter() - began)
            if self.is_free:
                self._held.clear()


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
