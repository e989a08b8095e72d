"""graphrt bench serve: what it sends, what it counts, and what it says of servers that do something else."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.command_line import command, environment
from support.served import Served

from graphrt.errors import SessionError
from graphrt.tools.bench.load import Ask, closed, opened, summary
from graphrt.tools.bench.load_client import Answer, Server
from graphrt.tools.bench.load_lengths import Lengths, lengths_of
from graphrt.tools.bench.load_server import as_json, rows
from graphrt.tools.bench.load_svg import picture
from graphrt.tools.cli import verb_parser
from graphrt.tools.serve.tally import STEPS, TOKENS, Tally
from graphrt.tools.verbs import bench_serve
from graphrt.tools.verbs.bench_serve import main


def test_lengths(tmp_path: Path) -> None:
    assert lengths_of("128:256", 3) == [(128, 256)] * 3
    drawn = lengths_of("sharegpt", 4000, seed=1)
    assert drawn == lengths_of("sharegpt", 4000, seed=1) != lengths_of("sharegpt", 4000, seed=2)
    prompts, texts = np.mean(drawn, 0)
    assert 150 < prompts < 300 and 130 < texts < 260 and max(max(each) for each in drawn) == 1024
    plain, listed = tmp_path / "l.txt", tmp_path / "l.json"
    plain.write_text("3 4\n\n5,6\n")
    listed.write_text("[[7, 8]]")
    assert lengths_of(str(plain), 3) == [(3, 4), (5, 6), (3, 4)] and lengths_of(str(listed), 1) == [(7, 8)]
    for bad in ("0:5", "5", "12:", str(tmp_path / "none")):
        with pytest.raises(SessionError):
            lengths_of(bad, 1)


def test_prompts_share_what_they_should() -> None:
    ask = Ask("m", 50, shared=6, seed=4)
    first, second = ask.body(0, Lengths(10, 3)), ask.body(1, Lengths(10, 3))
    assert first["prompt"][:6] == second["prompt"][:6] and first["prompt"][6:] != second["prompt"][6:]
    assert len(first["prompt"]) == 10 and max(first["prompt"]) < 50 and first["max_tokens"] == 3
    assert len(ask.body(2, Lengths(4, 1))["prompt"]) == 4


def test_figures_by_hand() -> None:
    """Two answers of 3 and 5 tokens within 2 seconds, and one that failed."""
    answers = [
        Answer(10.0, [10.5, 10.7, 10.9], 11.0, 7, 3),
        Answer(10.0, [11.0, 11.8], 12.0, 9, 5),
        Answer(10.0, [], 30.0, error="no"),
    ]
    found = summary(answers)
    assert found["requests"] == 2 and found["errors"] == 1 and found["first_error"] == "no"
    assert found["output_tokens_per_s"] == pytest.approx(4.0) and found["total_tokens_per_s"] == pytest.approx(12.0)
    assert found["time_to_first_token_ms"]["p50"] == pytest.approx(750.0)
    assert found["per_token_ms"]["mean"] == pytest.approx(200.0)
    assert found["between_pieces_ms"]["p99"] == pytest.approx(np.percentile([200, 200, 800], 99))
    assert summary(answers[2:]) == {"requests": 0, "errors": 1, "first_error": "no"}


def test_users_ask_one_after_the_other() -> None:
    there, most = 0, 0

    class Slow(Server):
        async def complete(self, body: Any) -> Answer:
            nonlocal there, most
            there += 1
            most = max(most, there)
            for _ in range(5):
                await asyncio.sleep(0)
            there -= 1
            return Answer(0.0, [0.5], 1.0, 1, 1)

    answers = asyncio.run(closed(Slow("http://there"), [{}] * 20, 3, lambda n=1: None))
    assert len(answers) == 20 and most == 3


def test_a_picture() -> None:
    steps = [("1 users", summary([Answer(0.0, [0.1, 0.2], 0.3, 5, 2)])), ("9 users", {"requests": 0, "errors": 9})]
    root = ET.fromstring(picture("a <b>", steps))
    assert root.tag.endswith("svg") and len(root.findall(".//{*}circle")) == 6
    ET.fromstring(picture("nothing", []))


class Strange(BaseHTTPRequestHandler):
    """A server that closes connections, spaces its JSON."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 2}
        chunks = [{"choices": [{"text": t}], "usage": None} for t in ("a", "", "b")]
        self.send_response(500 if body["max_tokens"] == 5 else 200)
        self.send_header("connection", "close")
        self.end_headers()
        for chunk in [*chunks, {"choices": [], "usage": usage}][: 2 if body["max_tokens"] == 6 else None]:
            self.wfile.write(f"data: {json.dumps(chunk)}\r\n\r\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def strange() -> Iterator[Server]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Strange)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Server(f"http://127.0.0.1:{server.server_port}/v1")
    server.shutdown()
    server.server_close()


def test_other_servers(strange: Server) -> None:
    """One without chunks, whose JSON has spaces; errors and streams that break off are counted as such."""
    ask = Ask("m", 9)
    bodies = [ask.body(i, Lengths(4, made)) for i, made in enumerate((1, 1, 5, 6, 1, 1))]
    done = list[int]()
    answers = asyncio.run(closed(strange, bodies, 2, lambda n=1: done.append(n)))
    assert sum(done) == 6
    good = [a for a in answers if not a.error]
    assert len(good) == 4 and all(len(a.came) == 2 and (a.n_prompt, a.n_made) == (4, 2) for a in good)
    errors = sorted(a.error for a in answers if a.error)
    assert errors[0].startswith("500: ") and errors[1] == "the stream ended without usage"
    late = asyncio.run(opened(strange, bodies[:2], 50.0, 0, lambda n=1: None))
    assert [a.error for a in late] == ["", ""] and late[1].began > late[0].began
    with pytest.raises(SessionError, match="must answer"):
        asyncio.run(Server("http://127.0.0.1:1").get("/v1/models"))
    with pytest.raises(SessionError, match="http://HOST:PORT"):
        Server("ftp://there")


def run_cli(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*argv), env=environment(), capture_output=True, text=True, check=False)


def test_a_server_of_ours(served: Served, tmp_path: Path) -> None:
    picture_file = tmp_path / "l.svg"
    done = run_cli(
        "bench", "serve", served.url, "--users", "1,2", "--rate", "40", "--requests", "3", "--lengths", "5:4",
        "--json", "--svg", str(picture_file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [step.get("users", step.get("rate")) for step in report["steps"]] == [1, 2, 40]
    for step in report["steps"]:
        assert (step["requests"], step["errors"], step["output_tokens"], step["prompt_tokens"]) == (3, 0, 12, 15)
        assert step["time_to_first_token_ms"]["p50"] > 0
        told = step["server"]
        read = 15 + 12 - 3
        assert told["iteration_tokens_total"]["sum"] == read, "the last token of a text is read by no step"
        # At most a step for each token: on a busy machine a prompt may be read in pieces.
        assert told["step_device_seconds"]["n"] == told["iteration_tokens_total"]["n"] <= read
        assert told["step_wait_seconds"]["sum"] > 0 and 0 < told["step_host_seconds"]["n"] <= read
        assert told["request_queue_time_seconds"]["n"] == told["request_prefill_time_seconds"]["n"] == 3
        assert told["step_delivery_seconds"]["n"] >= 3
    assert len(ET.parse(picture_file).findall(".//{*}circle")) == 18
    assert run_cli("bench", "serve", served.url, "--lengths", "5000:4", "--requests", "1").returncode == 1


def tallied(**values: list[float]) -> str:
    registry = CollectorRegistry()
    for name, added in values.items():
        tally = Tally(f"graphrt:{name}", "", TOKENS if name.startswith("iteration") else STEPS)
        registry.register(tally)
        for value in added:
            tally.add(value)
    return generate_latest(registry).decode() + 'graphrt:steps_prepared_total 7.0\nother_bucket{le="1"} 3\n'


def test_where_a_server_s_time_went() -> None:
    """By hand: what a load has added."""
    before = tallied(step_device_seconds=[4.0] * 9, iteration_tokens_total=[])
    new = [4.0] * 9 + [0.0045] * 4 + [0.00275] * 16
    after = tallied(step_device_seconds=new, iteration_tokens_total=[1, 1, 1, 64, 65]).replace(" 7.0", " 9.0")
    told = as_json(before, after)
    device, tokens = told["step_device_seconds"], told["iteration_tokens_total"]
    assert device["n"] == 20 and device["sum"] == pytest.approx(0.018 + 0.044)
    assert device["p50"] == pytest.approx(0.002 + 0.001 * 10 / 16) and device["p95"] == pytest.approx(0.00475)
    assert (tokens["n"], tokens["sum"], tokens["p50"], tokens["p95"]) == (5, 132, 1, 128), "ends belong to ranges"
    assert told["steps_prepared"] == 2
    assert rows(told)[1] == ["a step on the device", "20", "3.10", "2.62", "4.75", "0.06"]
    assert rows(told)[0][1:] == ["5", "26.40", "1.00", "128.00", ""]
    assert as_json("", "python_info 1\n") == {} and as_json(after, after) == {}


def test_what_it_refuses() -> None:
    with pytest.raises(SessionError, match="--users must be numbers over 0"):
        main(parsed("--users", "0", "http://x"))
    with pytest.raises(SessionError, match="one server must be given"):
        main(parsed("--users", "1"))


def parsed(*argv: str) -> argparse.Namespace:
    return verb_parser("bench serve", bench_serve).parse_args(list(argv))
