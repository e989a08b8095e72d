"""`graphrt serve --tp 2`: the texts of one rank, and what becomes of requests when a rank is killed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
from support.adapters import write_adapter
from support.ranked import Alone
from support.served import Served, started

from graphrt.errors import RankError, SessionError
from graphrt.models import Model, guesses, load
from graphrt.models.draft import DraftedText
from graphrt.models.generation import TextRules
from graphrt.models.prefix_file import load_prefixes
from graphrt.models.ranks.drafts import FirstRanksDrafts
from graphrt.models.sampling_params import SamplerParams
from graphrt.ranks import Ranks
from graphrt.tools.cli import verb_parser
from graphrt.tools.common import load_model
from graphrt.tools.serve.events import Text
from graphrt.tools.serve.ranks import Leader, Turn, follow
from graphrt.tools.serve.scheduler import Scheduler
from graphrt.tools.verbs import serve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process has")

TEXTS = "/v1/completions"
GREEDY: dict[str, Any] = {"prompt": "hello the sea", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
DRAWN = GREEDY | {"temperature": 1, "n": 3}
#: Three pages of a prompt, and a text that says what it has said: guesses of it are made.
REPEATING: dict[str, Any] = {"prompt": [5 + i % 50 for i in range(200)], "max_tokens": 40, "temperature": 0}
#: Seconds in which ranks start again, far more than it takes.
AGAIN = 240


def texts(client: httpx2.Client, asked: dict[str, Any]) -> list[str]:
    answer = client.post(TEXTS, json=asked)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def vectors(client: httpx2.Client) -> np.ndarray:
    answer = client.post("/v1/embeddings", json={"input": ["hello", "the sea hello"]}).json()
    return np.array([row["embedding"] for row in answer["data"]])


def guessed(client: httpx2.Client) -> float:
    """Tokens that were guessed so far."""
    lines = client.get("/metrics").text.splitlines()
    return float(next(x for x in lines if x.startswith("graphrt:spec_decode_num_draft_tokens_total")).split()[1])


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


def test_two_ranks_serve_and_begin_again(tiny: Path, tmp_path: Path, served: Served) -> None:
    """With guesses, an adapter that a text may ask for, and prompts that are kept when it ends."""
    with httpx2.Client(base_url=served.url, timeout=60) as one:
        wanted, wanted_vectors, wanted_long = texts(one, GREEDY), vectors(one), texts(one, REPEATING)
    whole = load(tiny, "cpu")
    write_adapter(tmp_path / "a.gguf", whole)
    whole.use_adapters({"a": tmp_path / "a.gguf"})
    adapted = "".join(each.text for each in whole.generate(GREEDY["prompt"], 12, temp=0.0, ignore_eos=True))
    more = "--lookup", "4", "--lora", str(tmp_path / "a.gguf"), "--lora-init-without-apply"
    kept = "--prompt-cache", str(tmp_path / "kept"), "--pooling", "mean"
    server = started(str(tiny), "--tp", "2", "-np", "3", *more, *kept)
    try:
        with httpx2.Client(base_url=server.url, timeout=AGAIN) as client:
            assert texts(client, GREEDY) == wanted != [adapted]
            assert texts(client, GREEDY | {"lora": [{"id": 0, "scale": 1}]}) == [adapted]
            assert texts(client, REPEATING) == wanted_long and guessed(client) > 0
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
            assert not [*tmp_path.glob("kept*")] and texts(client, REPEATING) == wanted_long
            with client.stream("POST", TEXTS, json=GREEDY | {"stream": True, "max_tokens": 56}) as going:
                lines = going.iter_lines()
                next(lines)
                for pid in (*ranks_of(server), server.process.pid):  # as systemd does, and torchrun
                    os.kill(pid, signal.SIGTERM)
                answered = "".join(lines)
            assert answered.endswith("data: [DONE]") and "rank_lost" not in answered
        assert server.process.wait(timeout=AGAIN) == 0
    finally:
        server.process.kill()
        server.process.wait()
    log = "".join(server.log)
    assert log.count("rank 1 of 2: it was ended by SIGKILL") == 2 and log.count("rank 0 of 2: it was ended by") == 1
    assert log.count("the ranks are started again") == 3
    assert "Traceback" not in log and "192 tokens of prompts are kept in kept.0-of-2" in log
    for rank in range(2):
        part = load(tiny, "cpu", ranks=Alone(rank, 2))
        args = verb_parser("serve", serve).parse_args([str(tiny), "-np", "3", "--backend", "cpu"])
        engine = serve.engine_of(part, args)
        assert load_prefixes(engine, tmp_path / f"kept.{rank}-of-2") == 192
        assert engine.cache.pool.n_known(0, REPEATING["prompt"]) == 192


#: Tokens of a text, for which steps with guesses and without are looked at.
LONG = 32


class Noted(Ranks):
    """The first of two ranks, which notes in `group` what it says, or the second one, which hears that later."""

    def told(self, value: Any) -> Any:
        if self.rank:
            return self.group.pop(0)
        self.group.append(value)
        return value


def test_ranks_make_the_same_steps(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, each with the whole model, one after the other: guesses pay by the first one's clock, not by the
    other's; texts have adapters of their own, and as many guesses as they ask for."""
    monkeypatch.setattr(guesses, "LOOKED_AT", 2)
    monkeypatch.setattr(guesses, "UNSETTLED", 1)
    write_adapter(tmp_path / "a.gguf", load(tiny, "cpu", exact=True))
    argv = [str(tiny), "--backend", "cpu", "-np", "3", "-c", "128", "-md", str(tiny)]
    args = verb_parser("serve", serve).parse_args([*argv, "--lora", str(tmp_path / "a.gguf")])
    said: list[Any] = []
    model, scheduler = scheduler_of_rank(args, Noted(0, 2, said))
    leader, rules = Leader(Noted(0, 2, said), scheduler), TextRules(LONG)
    prompt = model.prompt_tokens("hello the sea")
    texts = [
        Text(prompt, LONG, *model.new_text(SamplerParams(temp=0), rules), "", None, most, scales, rules)
        for most, scales in ((None, (0.0,)), (None, (1.0,)), (0, (0.0,)))
    ]
    ticks = iter(range(10**6))
    monkeypatch.setattr("graphrt.tools.serve.ranks.time.perf_counter", lambda: float(next(ticks)))
    commands = [(scheduler.add, text) for text in texts]
    while commands or not scheduler.is_idle:
        leader.tell(commands)
        for command, text in commands:
            command(text)
        commands = []
        scheduler.step()
    leader.end()
    assert texts[0].tokens == texts[2].tokens != texts[1].tokens
    assert scheduler.counts.guessed_tokens > 20

    model, other = scheduler_of_rank(args, Noted(1, 2, said))
    added: list[Text] = []

    def add(text: Text) -> None:
        added.append(text)
        Scheduler.add(other, text)

    monkeypatch.setattr(other, "add", add)
    assert isinstance(other.drafter, FirstRanksDrafts) and other.drafter.drafter is None, "the first rank has it"
    assert other.pace is not None
    other.pace.clock = lambda: -(2.0 ** -len(said))
    follow(Noted(1, 2, said), model, other, lambda ids: [])
    assert not said and other.counts == scheduler.counts
    assert [text.tokens for text in added] == [text.tokens for text in texts]


def scheduler_of_rank(args: argparse.Namespace, ranks: Ranks) -> tuple[Model, Scheduler]:
    model = load_model(args, exact=False)
    model.ranks = ranks
    scheduler = serve.scheduler_of(model, args)
    assert scheduler is not None
    return model, scheduler


def test_where_the_first_rank_can_not_guess_no_rank_waits() -> None:
    def fails(asked: object) -> dict[DraftedText, list[int]]:
        raise SessionError("logits are no numbers")

    said: list[Any] = []
    drafter: Any = SimpleNamespace(draft=fails)
    for rank, refused in ((0, "logits are no numbers"), (1, "by the first rank, which has failed")):
        with pytest.raises(SessionError, match=refused):
            FirstRanksDrafts(Noted(rank, 2, said), None if rank else drafter).draft({})
    assert not said


def test_ranks_warm_up_for_as_long_as_the_first_one() -> None:
    said: list[Any] = []
    first = serve.clock_of(Noted(0, 2, said))()
    assert first > 0 and serve.clock_of(Noted(1, 2, said))() == first
    assert serve.clock_of(None) is time.monotonic


class Told(Ranks):
    """The second of two ranks, whose first one says this, and then that it ends."""

    def told(self, value: Any) -> Any:
        return self.group.pop(0)


def test_ranks_that_make_other_texts_stop() -> None:
    with pytest.raises(RankError, match="all ranks must make the same texts, rank 1 makes others than the first one"):
        follow(Told(1, 2, [Turn([], digest=5), None]), None, None, lambda ids: [])  # type: ignore[arg-type]
