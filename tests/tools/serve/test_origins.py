"""--cors-origins: pages of the sites that it names may ask, and read what they get; no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.requests import Request
from support.served import Served, started
from support.verbs import Verb

from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.origins import Origins

SITE, OTHER = "https://chat.example", "https://evil.example"
ALLOWED = "access-control-allow-origin"
CHATS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def open_to(tiny: Path) -> Iterator[Served]:
    server = started(str(tiny), "-np", "1", "--cors-origins", f"{SITE},null", "--api-key", "k")
    yield server
    server.process.kill()
    server.process.wait()


def test_pages_that_may_ask(open_to: Served) -> None:
    http = httpx2.Client(base_url=open_to.url, timeout=60, headers={"authorization": "Bearer k"})
    asks = {"origin": SITE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    first = httpx2.options(f"{open_to.url}{CHATS}", headers=asks)  # a browser sends no key with it
    assert first.status_code == 200 and first.headers[ALLOWED] == SITE and first.headers["vary"] == "Origin"
    assert "POST" in first.headers["access-control-allow-methods"]
    assert first.headers["access-control-allow-headers"] == "authorization"
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    for stream in False, True:
        answer = http.post(CHATS, json={**body, "stream": stream}, headers={"origin": SITE})
        assert answer.status_code == 200 and answer.headers[ALLOWED] == SITE
    refused = httpx2.post(f"{open_to.url}{CHATS}", json=body, headers={"origin": SITE})
    assert refused.status_code == 401 and refused.headers[ALLOWED] == SITE, "a page can read why"
    assert http.get("/v1/models", headers={"origin": "null"}).headers[ALLOWED] == "null"
    assert ALLOWED not in http.get("/v1/models").headers


def test_others_may_not(open_to: Served, served: Served) -> None:
    asks = {"origin": OTHER, "access-control-request-method": "POST"}
    for answer in (
        httpx2.options(f"{open_to.url}{CHATS}", headers=asks),
        httpx2.get(f"{open_to.url}/health", headers={"origin": OTHER}),
        httpx2.get(f"{served.url}/health", headers={"origin": SITE}),
    ):
        assert answer.status_code == 403 and ALLOWED not in answer.headers
    assert httpx2.options(f"{served.url}{CHATS}").status_code == 405
    assert httpx2.post(f"{open_to.url}/nothing").status_code == 404


def test_pages_of_the_visitors_own_machine() -> None:
    origins = Origins(["localhost"])

    def asked(origin: str) -> str | None:
        headers = [(b"host", b"127.0.0.1:8080"), (b"origin", origin.encode())]
        return origins.of(Request({"type": "http", "headers": headers}))

    for origin in ("http://localhost", "http://localhost:5173", "http://127.0.0.1:3000", "https://[::1]:3000"):
        assert asked(origin) == origin
    assert asked("http://127.0.0.1:8080") is not None
    for origin in ("http://localhost.evil.example", "http://notlocalhost", OTHER, "http://[::1", "null"):
        with pytest.raises(ApiError):
            asked(origin)


def test_every_answer_has_a_number(served: Served) -> None:
    found = [httpx2.get(f"{served.url}{path}").headers["x-request-id"] for path in ("/health", "/v1/models/none")]
    assert all(each.startswith("req_") for each in found) and found[0] != found[1]


@pytest.mark.parametrize("origins", ["chat.example", "https://chat.example/page", "https://"])
def test_what_is_no_origin(tiny: Path, capsys: pytest.CaptureFixture[str], origins: str) -> None:
    found = Verb(capsys)("serve", tiny, "--cors-origins", origins)
    assert found.code == 2 and "an origin must be as https://chat.example" in found.err
