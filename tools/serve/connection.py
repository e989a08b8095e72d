"""Connections that don't stay for ever: clients that send half a request, take nothing of their answer, or vanish."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.http import WRITE

#: Seconds without a word after which the system asks whether a client is still there, and between its questions.
_IDLE, _BETWEEN = 60, 20
#: Seconds that are waited for more of a body that nobody wants.
_MORE = 5.0


def limit_waiting(listening: socket.socket, seconds: float) -> None:
    """The system ends connections of this socket whose client takes nothing of what was sent for so long, or doesn't
    answer its questions any more. Systems without such an option wait."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE),
        ("TCP_KEEPINTVL", _BETWEEN),
        ("TCP_USER_TIMEOUT", int(1000 * seconds)),  # of a full window too
    ):
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Connection(H11Protocol):
    """uvicorn's, which would wait as long as the client likes for the rest of a request's head, and would end a
    connection while a body that was refused (413) still comes, so that the client loses the answer. Such a body is read
    to its end and thrown away before the answer ends. Each has `seconds`, a head from when the connection was made or
    from its first byte.

    A stream's pieces are written as chunks of HTTP/1.1 here (scope[WRITE]): by ASGI each would pass four coroutines and
    h11's state, which it does not change."""

    seconds = 30.0
    _late: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        app: Any = self.app

        async def told(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
                scope[WRITE] = self._write
            still_comes = self.conn.their_state is h11.SEND_BODY
            await app(scope, receive, self._behind_the_body(receive, send) if still_comes else send)

        self.app = told

    def _write(self, body: bytes) -> bool:
        """A piece of the body of an answer that has begun and whose length nobody knows. False where the client is
        slow or gone: nothing was done."""
        if self.flow.write_paused or self.cycle is None or self.cycle.disconnected or not body:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _behind_the_body(self, receive: Receive, send: Send) -> Send:
        """send() of a request whose body still comes: an answer that doesn't wait for it ends once it has come."""

        async def sent(message: Message) -> None:
            ends = message["type"] == "http.response.body" and not message.get("more_body")
            if not ends or self.conn.their_state is not h11.SEND_BODY:
                await send(message)
                return
            await send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_read_out(receive, min(_MORE, self.seconds)), self.seconds)
            await send({"type": "http.response.body"})
            if self.conn.their_state is h11.SEND_BODY:
                self.transport.abort()

        return sent

    def _should_upgrade(self) -> bool:
        """To another protocol: there is none, and a client may go on with this one."""
        return False

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in the form of all errors, unless an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = ApiError("what was sent is no request of HTTP/1.1; use an HTTP client").response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            told = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in told, h11.Data(data=bytes(answer.body)), h11.EndOfMessage():
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Whether a head is waited for that may never come, and uvicorn doesn't look at the time."""
        begun = self.timeout_keep_alive_task is None or self.conn.trailing_data[0]
        head = self.conn.their_state is h11.IDLE and begun
        if not head or self.transport.is_closing():
            self._stop_waiting()
        elif self._late is None:
            self._late = self.loop.call_later(self.seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


async def _read_out(receive: Receive, seconds: float) -> None:
    """Reads the rest of a body. Raises TimeoutError where nothing comes for so long."""
    more = True
    while more:
        message = await asyncio.wait_for(receive(), seconds)
        more = message["type"] == "http.request" and message.get("more_body", False)


def connections(seconds: float) -> type[Connection]:
    """Connections whose clients have so long to send a request's head, or what is left of a refused body."""
    return type("Connection", (Connection,), {"seconds": seconds})
