"""What the server does for each token, counted in calls: it does not grow with a text, and a step wakes the event loop
once."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.served import Served

from graphrt.models.generation import Piece
from graphrt.tools.serve.events import Event, Text
from graphrt.tools.serve.http import WRITE, EventStream, Held
from graphrt.tools.serve.inbox import Inbox
from graphrt.tools.serve.metrics import Metrics
from graphrt.tools.serve.routes_text import Chat, Completion
from graphrt.tools.serve.said import PLAIN, Marks
from graphrt.tools.serve.schemas import ChatRequest, CompletionRequest
from graphrt.tools.serve.state import State
from graphrt.tools.serve.worker import Worker

STATE = cast(State, SimpleNamespace(name="m", fingerprint="f", model=SimpleNamespace(tokenizer=None)))
#: Calls of functions, C's included, that a piece may take between the queue and the text that is written.
MOST_CALLS = 41


def text() -> Text:
    return Text([1], -1, cast(Any, None), cast(Any, None))


class _Loop:
    """Counts what it is called for."""

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def call_soon_threadsafe(self, *what: Any) -> None:
        self.called.append(what)


def test_a_step_calls_the_loop_once() -> None:
    texts, loop = [text() for _ in range(64)], _Loop()
    made = [Event(each, Piece(5, "a")) for each in texts]
    worker = Worker(cast(Any, SimpleNamespace(step=lambda: made, times=[])), Metrics(), 0)
    worker._loop = cast(Any, loop)
    for step in range(1, 4):
        worker._turn([], None)
        assert len(loop.called) == step
        if step == 2:  # the loop is busy meanwhile
            worker._turn([], None)
            assert len(loop.called) == step, "it is called once for all that it has not looked at"
        assert [events for events, _ in worker._outgoing] == [made] * (2 if step == 2 else 1)
        worker._deliver()
        assert not worker._outgoing


@pytest.mark.parametrize("kind", ["completion", "chat", "thinking chat"])
def test_a_piece_costs_the_same_late_in_a_text(kind: str) -> None:
    one, n = text(), 600
    answer: Chat | Completion
    if kind == "completion":
        answer = Completion(STATE, CompletionRequest.model_validate({"prompt": "a"}), [one])
    else:
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})
        marks = Marks(("<think>", "</think>"), opened=True) if kind == "thinking chat" else PLAIN
        answer = Chat(STATE, body, [one], marks)
    counts = asyncio.run(_calls(answer, one, n))
    assert len(counts) >= n
    assert max(counts[-210:-10]) <= MOST_CALLS
    assert set(counts[20:220]) == set(counts[-210:-10]), "calls for a piece, early and late"


async def _calls(answer: Chat | Completion, one: Text, n: int) -> list[int]:
    inbox = Inbox()
    for i in range(n):
        inbox.put(Event(one, Piece(5, "word ", "length" if i == n - 1 else "")))
    counts, count = list[int](), 0

    def seen(frame: object, kind: str, what: object) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    stream = answer.stream(inbox, usage=False)
    while True:
        count = 0
        sys.setprofile(seen)
        try:
            await anext(stream)
        except StopAsyncIteration:
            return counts
        finally:
            sys.setprofile(None)
        counts.append(count)


class Client:
    """Takes what is written, while it is quick."""

    def __init__(self) -> None:
        self.got, self.is_quick = list[bytes](), True

    def write(self, body: bytes) -> bool:
        if self.is_quick:
            self.got.append(body)
        return self.is_quick

    async def send(self, message: Any) -> None:
        if message.get("body"):
            self.got.append(message["body"])


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_usual_pieces_wake_nobody(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go out where a step's events are delivered, one write for all that a client gets then. What is no usual
    piece, and what a slow client doesn't take, goes by the task that waits for it; all come in their order, once."""
    client, texts, woken, made = Client(), [text(), text()], 0, list[Event]()
    answer: Chat | Completion
    if kind == "completion":
        answer = Completion(STATE, CompletionRequest.model_validate({"prompt": "a", "n": 2}), texts)
    else:
        answer = Chat(STATE, ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]}), texts, PLAIN)
    worker = Worker(cast(Any, SimpleNamespace(step=lambda: made, times=[])), Metrics(), 0)
    worker._loop, inbox = cast(Any, _Loop()), Inbox()
    worker._inboxes = dict.fromkeys(texts, inbox)
    get = inbox.get

    async def counted() -> Event:
        nonlocal woken
        event = await get()
        woken += 1
        return event

    monkeypatch.setattr(inbox, "get", counted)

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def play() -> None:
        stream = EventStream(answer.stream(inbox, usage=False), lambda: None, inbox)
        task = asyncio.ensure_future(stream({WRITE: client.write}, receive, client.send))
        for words, quick, ends, writes, seen in (
            ("ab", True, "", 1, 0), ("cd", True, "", 1, 0), ("ef", False, "", 0, 0), ("gh", True, "", 0, 2),
            ("ij", True, "", 1, 0), ("kl", True, "k", 0, 2), (" m", True, "m", 0, 1),
        ):  # fmt: skip
            for _ in range(5):
                await asyncio.sleep(0)
            client.is_quick, before, n = quick, woken, len(client.got)
            made[:] = [
                Event(one, Piece(5, word, "length" if word in ends else ""))
                for one, word in zip(texts, words)
                if word != " "
            ]
            worker._turn([], None)
            worker._deliver()
            assert len(client.got) - n == writes, words
            for _ in range(5):
                await asyncio.sleep(0)
            assert woken - before == seen, words
        await task

    asyncio.run(play())
    whole = b"".join(client.got).decode()
    said = re.findall(r'"index":(\d),(?:"delta":{"content"|"text"):"([^"]+)"', whole)
    assert "".join(word for _, word in said) == "abcdefghijklm"
    assert [int(i) for i, _ in said] == [0, 1] * 6 + [1] and whole.endswith("data: [DONE]\n\n")


def test_a_piece_that_can_not_be_written_is_one_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Others' pieces come all the same; its own task sees the event."""
    bad, good, client = Inbox(), Inbox(), Client()

    async def play() -> None:
        for inbox in (bad, good):
            inbox.out = Held(client.write, lambda seconds: None)
            inbox.form = (lambda event: str(1 // 0)) if inbox is bad else lambda event: "b"
        waiting = [asyncio.ensure_future(inbox.get()) for inbox in (bad, good)]
        await asyncio.sleep(0)
        worker, event = Worker(None, Metrics(), 0), Event(text(), Piece(5, "a"))
        other = Event(text(), Piece(5, "b"))
        worker._inboxes = {event.text: bad, other.text: good}
        worker._outgoing.append(([event, other], 0.0))
        worker._deliver()
        assert client.got == [b"data: b\n\n"]
        assert await waiting[0] is event and not waiting[1].done() and "could not be written" in caplog.text
        waiting[1].cancel()

    asyncio.run(play())


@pytest.mark.parametrize("takes", [True, False])
def test_pieces_go_straight_to_the_connection(takes: bool) -> None:
    """One write for all that are there at once; what the connection does not take is sent in ASGI's way, none is
    lost."""
    written, sent = list[bytes](), list[bytes]()

    def write(body: bytes) -> bool:
        if takes:
            written.append(body)
        return takes

    async def values() -> Any:
        for i in range(6):
            yield str(i)
            if i >= 2:
                for _ in range(3):
                    await asyncio.sleep(0)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(3600)

    asyncio.run(EventStream(values(), lambda: None, Inbox())({WRITE: write}, receive, send))
    pieces = [b"data: %d\n\n" % i for i in range(6)]
    whole, end = b"".join(pieces), b"data: [DONE]\n\n"
    if takes:
        assert written == [b"".join(pieces[:3]), *pieces[3:]]
        assert sent == [b"", end, b""]
    else:
        assert written == [] and b"".join(sent) == whole + end


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_is_framed_as_its_client_knows(served: Served, version: str) -> None:
    """HTTP/1.0 has no chunks."""
    body = b'{"prompt":"a","max_tokens":4,"stream":true,"ignore_eos":true}'
    host, port = served.url.removeprefix("http://").split("/")[0].split(":")
    with socket.create_connection((host, int(port)), 30) as to:
        head = f"POST /v1/completions HTTP/{version}\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        to.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        got = b""
        while piece := to.recv(65536):
            got += piece
    head_got, _, rest = got.partition(b"\r\n\r\n")
    assert (b"chunked" in head_got.lower()) == (version == "1.1")
    if version == "1.1":
        whole, left = b"", rest
        while left:
            size, _, left = left.partition(b"\r\n")
            whole, left = whole + left[: int(size, 16)], left[int(size, 16) + 2 :]
        rest = whole
    assert rest.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
    assert all(line.startswith(b"data: ") for line in rest.split(b"\n\n") if line)
