"""llama.cpp's flags: what takes their place, and what is said where nothing does. None gives argparse's own error."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny
from support.verbs import Verb

from graphrt.errors import SessionError
from graphrt.models import hub
from graphrt.tools.foreign_flags import FOREIGN, MODEL, adapted

OWN = {"-p", "--backend", "--raw", "--system", "--predict", "--temp", "--typical", "-t"}


def run(*argv: str) -> tuple[list[str], list[str]]:
    return adapted(argv, OWN.__contains__, True)


@pytest.mark.parametrize(
    ("argv", "becomes"),
    [
        (("-m", "a.gguf", "-p", "x"), ["a.gguf", "-p", "x"]),
        (("-p", "x", "--model=a.gguf"), ["a.gguf", "-p", "x"]),
        (("-hf", "o/r:Q8_0", "-p", "x"), ["hf:o/r:Q8_0", "-p", "x"]),
        (("a", "-ngl", "0"), ["a", "--backend", "cpu"]),
        (("a", "-no-cnv"), ["a", "--raw"]),
        (("a", "--temperature", "0.5", "--n-predict=3"), ["a", "--temp", "0.5", "--predict", "3"]),
        (("a", "--", "-m", "b"), ["a", "--", "-m", "b"]),
        (("a", "-t", "2", "--odd", "1"), ["a", "-t", "2", "--odd", "1"]),
    ],
)
def test_what_takes_their_place(argv: tuple[str, ...], becomes: list[str]) -> None:
    assert run(*argv) == (becomes, [])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("-ngl", "99"), "all layers run on the backend"),
        (("-ngl=auto",), "all layers run on the backend"),
        (("-fa",), "attention is always the fused op"),
        (("-fa", "on"), "attention is always the fused op"),
        (("--flash-attn=off",), "attention is always the fused op"),
        (("--mlock",), "files are mapped"),
        (("--no-mmap",), "files are mapped"),
        (("-tb", "4"), "-t gives the threads"),
        (("-ub", "64"), "--batch-size"),
        (("-e",), "as it stands"),
        (("--metrics",), "has these routes"),
        (("--cache-reuse", "256"), "while pages are free"),
        (("-nocb",), "-np 1"),
    ],
)
def test_what_changes_nothing_is_said_and_left_out(argv: tuple[str, ...], says: str) -> None:
    given, (note,) = run("a", *argv, "-p", "x")
    assert given == ["a", "-p", "x"] and says in note and note.startswith(argv[0].partition("=")[0])


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("-cnv", "graphrt chat"),
        ("--lora", "merge one"),
        ("-sm", "one device"),
        ("--list-devices", "graphrt devices"),
        ("-md", "second model"),
        ("--slot-save-path", "--prompt-cache"),
        ("--context-shift", "-c N"),
    ],
)
def test_what_would_be_another_answer_is_refused(flag: str, says: str) -> None:
    with pytest.raises(SessionError, match=says):
        run("a", flag, "x")


@pytest.mark.parametrize("flag", FOREIGN)
def test_every_row_is_a_sentence_or_a_flag_of_ours(flag: str) -> None:
    row = FOREIGN[flag]
    assert bool(row.says) != bool(row.ours) and row.says == row.says.strip() and not row.says.endswith(".")
    assert row.takes in (0, 1)
    if row.takes:
        with pytest.raises(SessionError, match="needs a value"):
            run("a", flag)


def test_a_verbs_own_flags_go_first(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Through the command line: real verbs, some of which have flags of these names."""
    own = ["a", "-m", "b", "--rope-scaling", "yarn", "-e=1"]
    assert adapted(own, {"-m", "--rope-scaling", "-e"}.__contains__, True) == (own, [])
    path = tiny.write_model(tmp_path / "m.gguf", "llama", tokenizer="spm")
    monkeypatch.setattr(hub, "pull", lambda name: pytest.fail(name))
    graphrt = Verb(capsys)
    argv = ("run", "-p", "hello", "-n", "2", "--temp", "0", "--json")
    plain = graphrt(*argv, path, "--raw")
    typed = graphrt(*argv, "-m", path, "-no-cnv", "-ngl", "99", "-fa", "on", "--mlock", "-tb", "2")
    assert plain.code == typed.code == 0 and plain.json()["tokens"] == typed.json()["tokens"]
    assert len(typed.err.splitlines()) == 2 and all(
        line.startswith("graphrt run: -") for line in typed.err.splitlines()
    )
    assert graphrt("tokenize", "-m", path, "-p", "-cnv", "--ids").code == 0, "a text that looks like a flag is a text"
    assert graphrt("info", "-m", path).code == 0
    refused = graphrt("info", path, "--rope-freq-base", "5")
    assert refused.code == 2 and "verbs that run a model change its rotation" in refused.err
    assert graphrt("devices", "-m", path).code == 2
    for flag in (*FOREIGN, *MODEL):
        result = graphrt("tokenize", path, "-p", "x", flag, "0")
        assert "Traceback" not in result.err and result.err.count("\n") <= 3
        assert "unrecognized arguments: -" not in result.err, flag
