"""A soak: thousands of requests to a server, good, bad and broken off, by clients of every manner; then nothing of
them may be left: no text, no page, no file, no thread, no process, no memory.

    PYTHONPATH=tests python -m support.soak --count 20000 --seed 1      a server of its own with a tiny model
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from support.served import Served, started
from support.tiny import CHAT, write_model

TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "hello the sea"
USER = [{"role": "user", "content": PROMPT}]
TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}
#: Requests whose answers are the same each time: asked for once, alone, before all others.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXTS, {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}),
    "drawn": (TEXTS, {"prompt": PROMPT, "max_tokens": 6, "temperature": 1.2, "seed": 3, "n": 2}),
    "penalties": (TEXTS, {"prompt": PROMPT, "max_tokens": 6, "temperature": 1, "seed": 4, "repeat_penalty": 1.3}),
    "chat": (CHATS, {"messages": USER, "max_tokens": 5, "temperature": 0}),
    "regex": (TEXTS, {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "regex": "(hello|sea){2}"}),
    "form": (CHATS, {"messages": USER, "max_tokens": 9, "temperature": 0, "response_format": {"type": "json_object"}}),
    "long": (TEXTS, {"prompt": "the rain in the sea " * 12, "max_tokens": 3, "temperature": 0}),
    "tokens": ("/tokenize", {"content": PROMPT}),
    "template": ("/apply-template", {"messages": USER, "tools": [TOOL]}),
}
#: Bodies that are refused: their status.
REFUSED: list[tuple[str, bytes, int]] = [
    (TEXTS, b"", 400), (TEXTS, b'{"prompt": ', 400), (CHATS, b"[" * 5000, 400), (TEXTS, b"\xff\x00", 400),
    (TEXTS, json.dumps({"prompt": PROMPT, "model": "gpt-4"}).encode(), 404), ("/v1/nothing", b"{}", 404),
    (TEXTS, json.dumps({"prompt": "the sea " * 4000}).encode(), 400),
    (TEXTS, json.dumps({"prompt": PROMPT, "regex": "("}).encode(), 400),
    (CHATS, json.dumps({"messages": USER, "tool_choice": "required"}).encode(), 400),
    (TEXTS, b" " * 140_000, 413),
]  # fmt: skip
#: What a client sends who then says no more.
HALVES = (
    b"", b"POST /v1/comp", b"\0\0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
)  # fmt: skip
#: What a server for a soak is started with.
ARGV = ("-np", "6", "--max-total-tokens", "4096", "--pooling", "mean", "--timeout", "45", "--max-body", "131072")
#: Bytes by which memory may have grown since the warm-up, however many requests came: what allocators keep.
GROWTH = 24 << 20


@dataclass(frozen=True)
class Left:
    """What a server's process has: open files, threads, child processes, resident bytes."""

    files: int
    threads: int
    children: int
    memory: int

    @classmethod
    def of(cls, pid: int) -> Left:
        """Of a process; Linux alone tells."""
        proc = Path(f"/proc/{pid}")
        status = (proc / "status").read_text()
        numbers = {name: int(number) for name, number in re.findall(r"(\w+):\s+(\d+)", status)}
        children = sum(
            len((task / "children").read_text().split()) for task in (proc / "task").iterdir() if task.exists()
        )
        return cls(len(list((proc / "fd").iterdir())), numbers["Threads"], children, numbers["VmRSS"] << 10)


class Soak:
    """Requests to a server, drawn from a seed; at_once: so many at a time; waits: some who sent half a request wait
    until they are sent away."""

    def __init__(self, server: Served, seed: int = 0, at_once: int = 16, *, waits: bool = True) -> None:
        self.server, self.at_once, self.waits = server, at_once, waits
        self.draws = random.Random(f"soak {seed}")
        self.done = Counter[str]()
        url = urlsplit(server.url)
        self._address = url.hostname, url.port
        self._wanted: dict[str, Any] = {}

    async def run(self, count: int) -> None:
        """So many requests. Raises AssertionError for an answer that is not what it should be."""
        gate = asyncio.Semaphore(self.at_once)
        async with httpx2.AsyncClient(base_url=self.server.url, timeout=300) as http:
            for name in KNOWN if not self._wanted else ():
                self._wanted[name] = await self._known(http, name)
            kinds: Sequence[tuple[Callable[[httpx2.AsyncClient], Awaitable[None]], int]] = (
                (self._answered, 60), (self._streamed, 15), (self._refused, 15), (self._leaves, 30),
                (self._half, 8), (self._slow, 4), (self._asks, 4),
            )  # fmt: skip
            order = self.draws.choices([kind for kind, _ in kinds], [weight for _, weight in kinds], k=count)

            async def one(kind: Callable[[httpx2.AsyncClient], Awaitable[None]]) -> None:
                async with gate:
                    await kind(http)
                    self.done[kind.__name__.strip("_")] += 1

            tasks: set[asyncio.Task[None]] = set()
            for kind in order:
                tasks.add(asyncio.create_task(one(kind)))
                if len(tasks) >= 2 * self.at_once:
                    ended, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in ended:
                        task.result()
            for task in tasks:
                await task

    def settled(self) -> Left:
        """What the server has once nothing runs, waits or is in use. Raises AssertionError where that never comes."""
        end = time.monotonic() + 120
        with httpx2.Client(base_url=self.server.url, timeout=120) as http:
            while not is_quiet(http):
                assert time.monotonic() < end, f"texts or pages are left: {http.get('/slots').text}"
                time.sleep(0.05)
        time.sleep(0.2)
        before = Left.of(self.server.process.pid)
        while (now := Left.of(self.server.process.pid)).files < before.files or now.threads < before.threads:
            before = now
            time.sleep(0.2)
        return now

    # ---- clients ----

    async def _known(self, http: httpx2.AsyncClient, name: str) -> Any:
        path, body = KNOWN[name]
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, (name, answer.text)
        told = answer.json()
        return [_said(choice) for choice in told["choices"]] if "choices" in told else told

    async def _answered(self, http: httpx2.AsyncClient) -> None:
        """Gets what it gets alone."""
        name = self.draws.choice(list(KNOWN))
        found = await self._known(http, name)
        assert found == self._wanted[name], (name, found, self._wanted[name])

    async def _streamed(self, http: httpx2.AsyncClient) -> None:
        """Gets the same in pieces."""
        name = self.draws.choice([name for name in KNOWN if "max_tokens" in KNOWN[name][1]])
        path, body = KNOWN[name]
        texts, lines = Counter[int](), list[str]()
        found = [""] * len(self._wanted[name])
        async with http.stream("POST", path, json=body | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                lines += [line] if line else []
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    texts[choice["index"]] += 1
                    found[choice["index"]] += _said(choice)
        assert lines[-1] == "data: [DONE]" and found == self._wanted[name], (name, found, self._wanted[name])

    async def _refused(self, http: httpx2.AsyncClient) -> None:
        path, body, status = self.draws.choice(REFUSED)
        answer = await http.post(path, content=body)
        assert answer.status_code == status and answer.json()["error"]["message"], (path, body[:80], answer.text)

    async def _leaves(self, http: httpx2.AsyncClient) -> None:
        """Goes in the middle of a long text, or before it begins."""
        draws = self.draws
        body = {"prompt": PROMPT * draws.randint(1, 20), "max_tokens": 500, "ignore_eos": True, "temperature": 1.0}
        body |= {"stream": draws.random() < 0.7, "n": draws.choice([1, 1, 1, 3])}
        path = draws.choice([TEXTS, CHATS])
        if path == CHATS:
            body = {"messages": [{"role": "user", "content": body.pop("prompt")}], **body}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._read(http, path, body, draws.randint(1, 20)), draws.uniform(0.005, 0.5))

    async def _read(self, http: httpx2.AsyncClient, path: str, body: dict[str, Any], pieces: int) -> None:
        async with http.stream("POST", path, json=body) as answer:
            async for _ in answer.aiter_bytes():
                pieces -= 1
                if not pieces:
                    return

    async def _half(self, http: httpx2.AsyncClient) -> None:
        """Sends a part of a request and goes, or waits."""
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(self.draws.choice(HALVES))
        if self.waits and self.draws.random() < 0.02:
            while await asyncio.wait_for(reader.read(1000), 200):
                pass
        writer.close()

    async def _slow(self, http: httpx2.AsyncClient) -> None:
        """Reads a little at a time from a small buffer, some of them to the end; or nothing at all."""
        there = socket.socket()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        there.setblocking(False)
        await asyncio.get_running_loop().sock_connect(there, self._address)
        reader, writer = await asyncio.open_connection(sock=there, limit=256)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 40, "stream": True, "logprobs": 5}).encode()
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (TEXTS.encode(), len(body)) + body)
        stays = self.draws.random() < 0.5
        found = b""
        for i in range(100_000):
            part = await asyncio.wait_for(reader.read(200), 60)
            found += part
            if not part or b"data: [DONE]" in found or not (stays or i < 10):
                break
            await asyncio.sleep(0.002)
        assert not stays or b"data: [DONE]" in found, found[-300:]
        writer.close()

    async def _asks(self, http: httpx2.AsyncClient) -> None:
        """What everybody may know, and vectors."""
        path = self.draws.choice(["/health", "/metrics", "/slots", "/props", "/v1/models", "/openapi.json", "/"])
        assert (await http.get(path)).status_code == 200, path
        answer = await http.post("/v1/embeddings", json={"input": [PROMPT, "a"]})
        assert answer.status_code == 200 and len(answer.json()["data"]) == 2, answer.text


def _said(choice: dict[str, Any]) -> str:
    """The text of a choice, or of a piece of one."""
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("text") or part.get("content") or ""


def is_quiet(http: httpx2.Client) -> bool:
    """Nothing runs, nothing waits, no page is in use."""
    told = http.get("/metrics").text
    names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
    found = [re.search(rf"^graphrt:{name} (\S+)$", told, re.M) for name in names]
    assert all(found), told
    return not any(float(number[1]) for number in found if number)


def check_nothing_left(before: Left, after: Left, server: Served, growth: int = GROWTH) -> None:
    """before: after a warm-up. Raises AssertionError."""
    assert server.process.poll() is None, "the server goes on"
    assert not [line for line in server.log if "Traceback" in line or " ERROR " in line], "".join(server.log[-60:])
    assert not [line for line in server.log if "socket.send() raised" in line], "clients that leave are no lines"
    assert after.files <= before.files and after.threads <= before.threads, (before, after)
    assert after.children <= before.children, (before, after)
    assert after.memory - before.memory <= growth, (before, after)


def soak(server: Served, count: int, seed: int = 0, *, waits: bool = True) -> tuple[Left, Left]:
    """So many requests, the first fourth of which warm up. What the server had after these, and at the end."""
    requests = Soak(server, seed, waits=waits)
    asyncio.run(requests.run(count // 4))
    before = requests.settled()
    asyncio.run(requests.run(count - count // 4))
    after = requests.settled()
    print(f"{dict(requests.done)}\n{before}\n{after}")
    return before, after


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="support.soak", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="requests (default: 20000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "m.gguf", "llama", tokenizer="spm", chat=CHAT, context_length=4096)
        server = started(str(path), *ARGV)
        try:
            check_nothing_left(*soak(server, args.count, args.seed), server)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0, "it ends by SIGTERM"
        finally:
            server.process.kill()
            server.process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
