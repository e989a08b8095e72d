"""`graphrt chat` over ranks: the answers of one rank, Ctrl-C at any place, a rank that is killed, commands."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import ROOT
from support.chat_ranks import N_BATCH, PREDICT, PRESSED, work
from support.pseudo_terminal import PseudoTerminal
from support.talks import FakeScreen, answer, talk
from support.tiny import CHAT, write_model

from graphrt.errors import RankError
from graphrt.models import load
from graphrt.tools.chat import loop
from graphrt.tools.chat.saved import Turn
from graphrt.tools.ranks.launch import Job

CTRL_C = "\x03"
EXACT = ("--exact", "--backend", "cpu", "-t", "1", "--cache-type-k", "f32", "--cache-type-v", "f32")
#: With a full context, another answer, turns that are taken back, forgotten and read from a file.
TYPED = (
    "hello\n/regen\n/undo\nthe sea\n/set temp 0\nagain hello\nthe sea\n/save {file}\n/clear\nhello\n"
    "/load {file}\nhello\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("chat") / "m.gguf"
    return write_model(path, "llama", tokenizer="spm", chat=CHAT, context_length=20_000)


def chatted(model: Path, typed: str, *more: str) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-m", "graphrt", "chat", str(model), "--seed", "5", *EXACT, *more]
    return subprocess.run(argv, input=typed.encode(), capture_output=True, timeout=300)


@pytest.mark.parametrize("how", [("--tp", "2"), ("--pp", "2")])
def test_a_chat_over_ranks_is_that_of_one(model: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    given = "-n", "24", "-c", "80", "--temp", "1"
    one = chatted(model, TYPED.format(file=tmp_path / "one"), *given)
    two = chatted(model, TYPED.format(file=tmp_path / "two"), *given, *how)
    assert (one.returncode, two.returncode) == (0, 0), two.stderr.decode()
    assert two.stdout == one.stdout and one.stdout.count(b"\n") > 5
    assert two.stderr.replace(b"two", b"one") == one.stderr and b"the context of 80 tokens was full" in one.stderr
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()


def test_what_can_not_be_done_is_said_once_and_counts(model: Path) -> None:
    done = chatted(model, "/nothing\nhello\n", "--tp", "2", "-n", "2")
    assert done.returncode == 2 and done.stdout.strip()
    assert done.stderr.count(b"a command must be one of") == 1 and b"rank" not in done.stderr


def test_a_rank_that_is_lost_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, chat = FakeScreen(["hello", "again"]), SimpleNamespace(ask=lambda question: ())

    def lost(*given: object) -> None:
        raise RankError("every rank must answer, one has not")

    monkeypatch.setattr(loop, "_answer", lost)
    with pytest.raises(RankError):
        loop.converse(chat, screen)  # type: ignore[arg-type]
    assert screen.typed == ["again"] and not screen.warned


def test_files_are_read_before_there_are_ranks(model: Path) -> None:
    done = chatted(model, "hello\n", "--tp", "2", "--load", "nowhere.json")
    assert done.returncode == 2 and b"nowhere.json" in done.stderr and b"rank" not in done.stderr


def job(model: Path, path: Path, pp: int) -> Job:
    args = argparse.Namespace(model=str(model), backend="cpu", threads=1, json=True, pp=pp)
    return Job(args, 2, work, str(path))


@pytest.mark.parametrize(("chosen_by", "stages"), [("host", 1), ("ahead", 1), ("ahead", 2)])
def test_ctrl_c_stops_all_ranks_at_one_place(model: Path, tmp_path: Path, chosen_by: str, stages: int) -> None:
    """What comes after it is what a session of one rank says that was never stopped."""
    assert job(model, tmp_path / chosen_by, stages).run() == 0
    found = json.loads((tmp_path / chosen_by).read_text())
    one, places = load(model, "cpu", exact=True), PRESSED[chosen_by]
    assert len(found) == 2 * len(places)
    for i, made in enumerate(found):
        fresh = talk(one, predict=PREDICT, n_batch=N_BATCH)
        fresh.turns = [Turn(*turn) for turn in made["before"]]
        whole = answer(fresh, made["question"])
        n_made = places[i // 2][3] if i % 2 == 0 else fresh.answers[-1].n_made
        assert made["n_made"] == n_made and whole.startswith(made["text"])
        assert made["ended"] == (fresh.answers[-1].ended if i % 2 else "stopped")
        assert made["text"] == whole or i % 2 == 0
        if not n_made:  # within the prompt: it ends behind a batch, not behind all of them
            assert made["n_past"] < made["n_prompt"]


def test_ranks_that_hold_other_tokens_stop(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 2: all ranks must hold the same tokens, rank 1 holds others"):
        job(model, tmp_path / "other tokens", 1).run()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process has")
def test_on_a_terminal_ctrl_c_stops_an_answer_and_a_lost_rank_ends_the_chat(model: Path, tmp_path: Path) -> None:
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    env = {**os.environ, **ours, "XDG_CACHE_HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    argv = [sys.executable, "-m", "graphrt", "run", str(model), "--temp", "0", "-c", "20000", "--tp", "2", *EXACT]
    with PseudoTerminal(argv, env) as chat:
        chat.expect_editor()
        chat.type("the sea\r")
        chat.expect_raw(r"\x1b\[\?2004l.*\x1b\[\?25l[^\x1b\r\n]")
        chat.type(CTRL_C)
        chat.expect("(stopped)")
        chat.expect_editor()
        chat.type("/set predict 3\r")
        chat.expect("predict  3")
        chat.expect_editor()
        chat.type("hello\r")
        chat.expect("(stopped after 3 tokens")
        chat.expect_editor()
        pid = chat.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ranks = [int(p) for p in children if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]
        assert len(ranks) == 2
        os.kill(max(ranks), signal.SIGKILL)
        chat.expect("\r\ngraphrt run: rank 1 of 2: it was ended by SIGKILL")
        assert chat.code() == 2
        assert chat.echoes  # what is typed, as before
