"""Progress: what is shown of long work, where, and that nothing is where nobody asked."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.tiny import write_model

from graphrt.models import load
from graphrt.models.engine import SessionOptions
from graphrt.progress import Advance, shown_by, task
from graphrt.tools import cli, progress


class Noted:
    """A display that writes down what it is told."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, int, str, list[int]]] = []

    @contextmanager
    def __call__(self, title: str, total: int, unit: str) -> Iterator[Advance]:
        steps: list[int] = []
        self.tasks.append((title, total, unit, steps))
        yield lambda n=1, /: steps.append(n)


def test_a_task_is_shown_by_the_display_and_what_is_inside_is_a_part_of_it() -> None:
    noted = Noted()
    with task("unseen", 1) as advance:
        advance()
    with shown_by(noted):
        with task("outer", 3, "rows") as advance:
            advance()
            with task("inner", 9) as inner:
                inner(9)
            advance(2)
        with pytest.raises(KeyError), task("failing", 1):
            raise KeyError
        with task("after", 1):
            pass
    with task("unseen again", 1):
        pass
    assert noted.tasks == [("outer", 3, "rows", [1, 2]), ("failing", 1, "", []), ("after", 1, "", [])]


def test_a_pipe_gets_a_line_at_each_tick() -> None:
    now, out = [100.0], io.StringIO()
    lines = progress.Lines(out, "reading the prompt", 2048, "tokens", lambda: now[0])
    now[0] += 5
    lines.tick()
    lines.advance(512)
    now[0] += 65
    lines.tick()
    lines.advance(1536)
    now[0] += 7300
    lines.tick()
    lines.end()
    assert out.getvalue().splitlines() == [
        "reading the prompt: 0 of 2048 tokens, 5 s",
        "reading the prompt: 512 of 2048 tokens, 1 min 10 s, about 3 min 30 s left",
        "reading the prompt: 2048 of 2048 tokens, 2 h 2 min",
    ]


def test_bytes_are_told_in_the_unit_of_the_whole() -> None:
    assert progress.amount(300_000_000, 4_600_000_000, "bytes") == "0.3 of 4.6 GB"
    assert progress.amount(1_000, 98_000_000, "bytes") == "0.0 of 98.0 MB"
    assert progress.amount(10, 999, "bytes") == "10 of 999 bytes" and progress.amount(1, 7, "") == "1 of 7"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_from_the_first_tick_on_and_none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    bar = progress.Bar(out, "loading", 3_000_000, "bytes")
    bar.advance(1_000_000)
    assert out.getvalue() == ""
    bar.tick()
    bar.tick()
    bar.advance(1_000_000)
    bar.end()
    text = out.getvalue()
    assert "loading" in text and "2.0 of 3.0 MB" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is back"


@pytest.mark.parametrize("terminal", [True, False])
def test_quick_work_shows_nothing_and_slow_work_is_shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow is what outlasts a tick, which the test waits for however long it takes."""
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    display = progress.on_stderr()
    with display("quick", 1, "") as advance:
        advance()
    assert out.getvalue() == ""
    monkeypatch.setattr(progress, "BAR_AFTER", 0.001)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.001)
    with display("slow", 1, ""):
        while "slow" not in out.getvalue():
            pass
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == terminal, "the cursor is back"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("progress") / "m.gguf", "llama", tokenizer="spm", context_length=64)


def test_loading_and_prompts_are_tasks_and_single_tokens_none(model: Path) -> None:
    noted = Noted()
    with shown_by(noted):
        loaded = load(model, "cpu")
        session = loaded.session(SessionOptions(n_batch=8))
        session.eval([1] * 20)
        session.eval([1])
        session.reset()
        session.eval_rows([1] * 20, 10)
    loading, whole, rows = noted.tasks
    assert loading[:3:2] == ("loading", "bytes") and sum(loading[3]) == loading[1] == loaded.weights.nbytes
    assert whole == ("reading the prompt", 20, "tokens", [8, 8, 4])
    assert rows == ("reading the prompt", 20, "tokens", [8, 8, 4])


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_the_command_line_shows_progress_unless_it_prints_json(
    flags: tuple[str, ...], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = Noted()
    monkeypatch.setattr(progress, "on_stderr", lambda: noted)
    text = model.with_name("text.txt")
    text.write_text("hello the sea, he sees the sea in the rain. " * 4)
    assert cli.main(["perplexity", str(model), "-f", str(text), "-c", "16", "--chunks", "2", *flags]) == 0
    told: list[Any] = [title for title, *_ in noted.tasks]
    assert told == ([] if flags else ["loading", "perplexity"])
