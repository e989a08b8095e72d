"""What is left when clients have gone, whatever they did; those who stall; and a server that is killed."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from support.served import Served, started
from support.soak import GROWTH, PROMPT, TEXTS, Left, check_nothing_left, soak

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process has")

#: Requests of the short soak; `make soak` sends 20,000.
N_SOAKED = 240


def test_a_short_soak(served: Served) -> None:
    check_nothing_left(*soak(served, N_SOAKED, waits=False), served)


@pytest.mark.parametrize("what", ["files", "threads", "children", "memory"])
def test_what_is_left_is_seen(served: Served, what: str) -> None:
    before = Left(10, 4, 1, 10**8)
    check_nothing_left(before, before, served)
    numbers = vars(before) | {what: vars(before)[what] + (GROWTH + 1 if what == "memory" else 1)}
    with pytest.raises(AssertionError):
        check_nothing_left(before, Left(**numbers), served)


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other side ends the connection, which it may do in any way."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1000):
            found += part
    return found


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
def test_a_body_that_is_refused_may_be_sent_whole(served: Served, more: str) -> None:
    """By a client that reads no answer before it has sent all, and with none left in the connection's way."""
    url, size = urlsplit(served.url), 12 << 20
    with socket.create_connection((url.hostname, url.port)) as client:
        client.settimeout(60)
        client.sendall(f"POST {TEXTS} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {size}\r\n\r\n".encode())
        client.sendall(bytes(size))
        last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        if not more:
            client.sendall(last)
        found = all_of(client)
    assert found.startswith(b"HTTP/1.1 413 ") and b'"message":"a body may have 131072 bytes' in found
    assert (b"HTTP/1.1 200 OK" in found) == (not more)


def test_what_is_no_http_is_told_so(served: Served) -> None:
    url, log = urlsplit(served.url), len(served.log)
    chunks = f"POST {TEXTS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    for sent, status in (b"\x16\x03\x01 hello\r\n\r\n", 400), (chunks + b"zz\r\n", 400), (chunks + b"999999\r\n", 413):
        with socket.create_connection((url.hostname, url.port)) as client:
            client.settimeout(60)
            client.sendall(sent)
            if status == 413:  # an answer has begun
                client.sendall(bytes(0x999999) + b"zz")
            head, _, body = all_of(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status) and json.loads(body)["error"]["message"]
    assert not [line for line in served.log[log:] if "ERROR" in line or "Traceback" in line]


def test_clients_that_stall_are_sent_away(guarded: Served) -> None:
    """One that sends half of a request's head, one that sends half of the next, one that sends a byte of a body that is
    refused, one that reads nothing."""
    url = urlsplit(guarded.url)
    assert url.hostname and url.port
    there, before = (url.hostname, url.port), Left.of(guarded.process.pid)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    refused = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    for sent, told in (b"POST /v1/comp", b""), (whole + b"POST /v1/comp", b"200 OK"), (refused, b"401 Unauthorized"):
        with socket.create_connection(there) as half:
            half.settimeout(20)  # uvicorn ends those on which nothing comes after 30
            half.sendall(sent)
            found = all_of(half)
            assert told in found and bool(told) == bool(found)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(there)
        body = b'{"prompt": "a", "max_tokens": 600, "ignore_eos": true, "stream": true, "logprobs": 20}'
        head = f"POST {TEXTS} HTTP/1.1\r\nHost: x\r\nX-API-Key: first\r\nContent-Length: {len(body)}\r\n\r\n"
        deaf.sendall(head.encode() + body)
        with httpx2.Client(base_url=guarded.url, timeout=60, headers={"x-api-key": "second"}) as other:
            answer = other.post(TEXTS, json={"prompt": PROMPT, "max_tokens": 3})
            assert answer.status_code == 200, "it is not waited for"
        end = time.monotonic() + 120
        while Left.of(guarded.process.pid).files > before.files:
            assert time.monotonic() < end, "its connection ends"
            time.sleep(0.1)


def test_a_server_that_is_killed_begins_again(tiny: Path) -> None:
    """In the middle of a text; at the same address, with the same answers."""
    argv = str(tiny), "--temp", "0", "-np", "2", "--no-warmup"
    first = started(*argv)
    client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=0)
    try:
        wanted = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8).choices[0].text
        stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4000, stream=True)
        next(iter(stream))
        first.process.send_signal(signal.SIGKILL)
        with pytest.raises((openai.APIError, httpx2.TransportError)):
            list(stream)
    finally:
        first.process.kill()
        first.process.wait()
    again = started(*argv, port=urlsplit(first.url).port or 0)
    try:
        assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8).choices[0].text == wanted
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(60) == 0
    finally:
        again.process.kill()
        again.process.wait()


@pytest.mark.parametrize(("flags", "signals"), [(["--shutdown-timeout", "1"], 1), ([], 2)])
def test_who_still_waits_at_the_end_is_told(tiny: Path, flags: list[str], signals: int) -> None:
    """When the time for it is over, or at a second signal: a stream, a whole answer, and one who sends half a body."""
    server = started(str(tiny), "-np", "2", "--no-warmup", "--log-json", *flags)
    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
    url = urlsplit(server.url)
    with (
        httpx2.Client(base_url=server.url, timeout=60) as http,
        socket.create_connection((url.hostname, url.port)) as half,
        ThreadPoolExecutor(1) as pool,
    ):
        half.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        whole = pool.submit(http.post, TEXTS, json=body)
        with http.stream("POST", TEXTS, json=body | {"stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line)
            first = next(lines)
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
            *_, told, last = [first, *lines]
        assert json.loads(told[6:])["error"]["code"] == "server_ends" and last == "data: [DONE]"
        assert whole.result().status_code == 503 and whole.result().json()["error"]["code"] == "server_ends"
        assert server.process.wait(20) == 0, "it doesn't wait for the rest of a body, which has 30 seconds"
    log = [json.loads(line) for line in server.log]
    assert [line["level"] for line in log if line["level"] != "info"] == ["warning"]
    lines_of = {line["status"]: line for line in log if line.get("path") == TEXTS}
    assert set(lines_of) == {200, 503} and lines_of[200]["tokens"] > 1 and lines_of[200]["prompt_tokens"] > 1
    assert lines_of[200]["request_id"] == answer.headers["x-request-id"] and "left" not in lines_of[200]
