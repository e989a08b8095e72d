"""`graphrt serve --tp 2`: the texts of one rank, and what becomes of requests when a rank is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from support.served import Served, started

from graphrt.errors import RankError
from graphrt.ranks import Ranks
from graphrt.tools.cli import main
from graphrt.tools.serve.ranks import Turn, follow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process has")

TEXTS = "/v1/completions"
GREEDY = {"prompt": "hello the sea", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
DRAWN = GREEDY | {"temperature": 1, "n": 3}
#: Seconds in which ranks start again, far more than it takes.
AGAIN = 240


def texts(client: httpx2.Client, asked: dict[str, Any]) -> list[str]:
    answer = client.post(TEXTS, json=asked)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def vectors(client: httpx2.Client) -> np.ndarray:
    answer = client.post("/v1/embeddings", json={"input": ["hello", "the sea hello"]}).json()
    return np.array([row["embedding"] for row in answer["data"]])


def ranks_of(server: Served) -> list[int]:
    """The processes of its ranks, the first one's first: they are started in order."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(p) for p in children if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes())


def answers_again(server: Served, client: httpx2.Client) -> list[str]:
    until = time.monotonic() + AGAIN
    while True:
        try:
            return texts(client, GREEDY)
        except (AssertionError, httpx2.HTTPError):  # 503, or a connection that its process has left
            if time.monotonic() > until or server.process.poll() is not None:
                raise
            time.sleep(0.2)


def test_two_ranks_serve_and_begin_again(tiny: Path, served: Served) -> None:
    with httpx2.Client(base_url=served.url, timeout=60) as one:
        wanted, wanted_vectors = texts(one, GREEDY), vectors(one)
    server = started(str(tiny), "--tp", "2", "-np", "3", "--pooling", "mean")
    try:
        with httpx2.Client(base_url=server.url, timeout=AGAIN) as client:
            assert texts(client, GREEDY) == wanted
            found: list[list[str]] = []
            many = [threading.Thread(target=lambda: found.append(texts(client, DRAWN | {"seed": 7}))) for _ in range(3)]
            for thread in many:
                thread.start()
            with client.stream("POST", TEXTS, json=DRAWN | {"stream": True, "max_tokens": 900}) as left:
                next(left.iter_lines())  # and nobody waits for the rest
            (form,) = texts(client, GREEDY | {"regex": "(hello|sea){2}", "ignore_eos": False})
            assert form in ("hellohello", "hellosea", "seahello", "seasea")
            assert np.abs(vectors(client) - wanted_vectors).max() < 1e-5
            for thread in many:
                thread.join()
            assert len(found) == 3 and found[0] == found[1] == found[2] and len(set(found[0])) == 3
            with client.stream("POST", TEXTS, json=GREEDY | {"stream": True, "max_tokens": 4000}) as going:
                lines = going.iter_lines()
                next(lines)
                os.kill(ranks_of(server)[1], signal.SIGKILL)
                said = "".join(lines)
            assert "all ranks of this server must answer, one has not" in said and '"code":"rank_lost"' in said
            assert answers_again(server, client) == wanted
            long: list[httpx2.Response] = []
            asked = threading.Thread(target=lambda: long.append(client.post(TEXTS, json=GREEDY | {"max_tokens": 4000})))
            asked.start()
            time.sleep(0.5)
            os.kill(ranks_of(server)[1], signal.SIGKILL)
            asked.join()
            assert long[0].status_code == 503 and long[0].json()["error"]["code"] == "rank_lost"
            assert answers_again(server, client) == wanted
            os.kill(ranks_of(server)[0], signal.SIGKILL)  # the one that listens, while nobody asks
            assert answers_again(server, client) == wanted
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=AGAIN) == 0
    finally:
        server.process.kill()
        server.process.wait()
    log = "".join(server.log)
    assert log.count("rank 1 of 2: it was ended by SIGKILL") == 2 and log.count("rank 0 of 2: it was ended by") == 1
    assert log.count("the ranks are started again") == 3
    assert "Traceback" not in log


@pytest.mark.parametrize(
    "more", [("--lookup", "4"), ("--model-draft", "x.gguf"), ("--lora", "x.gguf"), ("--prompt-cache", "x")]
)
def test_what_one_rank_does_is_refused(tiny: Path, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny), "--tp", "2", "--port", "0", *more]) == 2
    said = capsys.readouterr().err
    assert "several ranks make texts of one model, without guesses, adapters" in said and f"got {more[0]}" in said


class Told(Ranks):
    """The second of two ranks, whose first one says this, and then that it ends."""

    def told(self, value: Any) -> Any:
        return self.group.pop(0)


def test_ranks_that_make_other_texts_stop() -> None:
    with pytest.raises(RankError, match="all ranks must make the same texts, rank 1 makes others than the first one"):
        follow(Told(1, 2, [Turn([], digest=5), None]), None, None, lambda ids: [])  # type: ignore[arg-type]
