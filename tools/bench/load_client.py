"""A client for `graphrt bench serve`: one streamed completion a connection, and when each of its pieces came. It does
as little as it can, so that what is measured is the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from graphrt.errors import SessionError

#: Bytes that are read at a time, and that a head may have.
_READ, _HEAD = 1 << 16, 1 << 16


@dataclass
class Answer:
    """What became of a request. began: when it was sent; came: when each piece of text came; ended: when all had come,
    seconds by the clock; n_prompt, n_made: tokens as the server counts them; error: what went wrong, "" for nothing."""

    began: float
    came: list[float] = field(default_factory=list)
    ended: float = 0.0
    n_prompt: int = 0
    n_made: int = 0
    error: str = ""


class Server:
    """Where requests go. url: "http://host:port", with or without /v1 behind; key: of the API, "" for none. Raises
    SessionError for another URL."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SessionError(f"a server must be given as http://HOST:PORT, got {url[:80]!r}")
        self.host, self.tls = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.head = {"host": parts.netloc, "content-type": "application/json", "connection": "close"}
        if key:
            self.head["authorization"] = f"Bearer {key}"

    @contextlib.asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """(status, the body piece by piece)."""
        context = ssl.create_default_context() if self.tls else None
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context, limit=_HEAD)
        try:
            data = json.dumps(body).encode() if body is not None else b""
            head = self.head | {"content-length": str(len(data))}
            lines = [f"{method} {self.base}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            await writer.drain()
            first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
            chunked = fields.get("transfer-encoding", "").lower() == "chunked"
            yield int(first.split()[1]), _chunks(reader) if chunked else _plain(reader, fields)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def get(self, path: str) -> Any:
        """What a path has, as JSON. Raises SessionError."""
        return await self._got(path, json.loads)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """What a path answers, as JSON. Raises SessionError."""
        return await self._got(path, json.loads, body)

    async def text(self, path: str) -> str:
        """What a path has, "" where the server has none."""
        try:
            return str(await self._got(path, bytes.decode))
        except SessionError:
            return ""

    async def _got(self, path: str, read: Callable[[bytes], Any], body: Mapping[str, Any] | None = None) -> Any:
        try:
            async with self._asked("GET" if body is None else "POST", path, body) as (status, pieces):
                data = b"".join([piece async for piece in pieces])
            if status != 200:
                raise SessionError(f"a server must have {path}, it answers {status}: {data[:200].decode('latin-1')}")
            return read(data)
        except (OSError, ValueError, EOFError, IndexError) as error:
            raise SessionError(f"a server must answer at {self.host}:{self.port}: {error or type(error)}") from error

    async def complete(self, body: Mapping[str, Any]) -> Answer:
        """A completion, streamed, with usage at its end."""
        answer = Answer(time.perf_counter())
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._asked("POST", "/v1/completions", wanted) as (status, pieces):
                if status != 200:
                    answer.error = f"{status}: " + b"".join([p async for p in pieces])[:300].decode("utf-8", "replace")
                else:
                    async for event in _events(pieces):
                        _take(answer, event)
        except (OSError, ValueError, EOFError, IndexError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()
        if not answer.error and not answer.n_made:
            answer.error = "the stream ended without usage"
        return answer


def _take(answer: Answer, event: bytes) -> None:
    """Notes an event. Pieces of text are not parsed, but for the rare ones that may hold usage or an error."""
    now = time.perf_counter()
    if b'"usage":{' in event or b'"usage": {' in event or b'"error"' in event:
        found = json.loads(event)
        if "error" in found:
            answer.error = str(found["error"])[:300]
        if found.get("usage"):
            answer.n_prompt = found["usage"].get("prompt_tokens", 0)
            answer.n_made = found["usage"].get("completion_tokens", 0)
        if not any(choice.get("text") for choice in found.get("choices") or ()):
            return
    if b'"text":""' not in event and b'"text": ""' not in event and event != b"[DONE]":
        answer.came.append(now)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events."""
    held = b""
    async for piece in pieces:
        *lines, held = (held + piece).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _plain(reader: asyncio.StreamReader, fields: Mapping[str, str]) -> AsyncIterator[bytes]:
    left = int(fields.get("content-length", 1 << 62))
    while left and (piece := await reader.read(min(left, _READ))):
        left -= len(piece)
        yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
