"""`graphrt run` on tiny models: what it prints and where, and how it ends."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import GREEDY, Cli, Result, command, environment, text_of, tokenizer
from support.tiny import IM_END, IM_START

from graphrt.models import Model, hub


def test_run_writes_the_text_to_stdout_and_figures_to_stderr(graphrt: Cli, models: Path) -> None:
    plain, as_json = graphrt(*GREEDY, "-n", "12"), graphrt(*GREEDY, "-n", "12", "--json")
    assert plain.code == as_json.code == 0 and as_json.err == ""
    found = as_json.json()
    assert list(found) == ["prompt_tokens", "tokens", "text", "finish", "timings"]
    assert found["prompt_tokens"] == tokenizer(models / "spm.gguf").encode("hello the sea")
    assert len(found["tokens"]) == 12
    assert plain.out == found["text"] == text_of(models / "spm.gguf", found["tokens"])
    (line,) = plain.err.strip().splitlines()
    for figure in ("load ", "prompt 7 tokens, ", "first token after ", "generated 12 tokens, ", " tokens/s, ", " GB/s"):
        assert figure in line
    names = {"prompt_tokens_per_s", "first_token_s", "tokens_per_s", "gb_per_s", "load_s"}
    assert set(found["timings"]) == names and all(value > 0 for value in found["timings"].values())


@pytest.mark.parametrize("n", [0, 1, 5])
def test_run_makes_no_more_than_n_tokens(graphrt: Cli, n: int) -> None:
    found = graphrt(*GREEDY, "-n", str(n), "--json").json()
    assert len(found["tokens"]) == n
    plain = graphrt(*GREEDY, "-n", str(n))
    assert plain.out == found["text"] and f"generated {n or 'none'}" in plain.err


def test_run_is_reproducible(graphrt: Cli) -> None:
    hot = (*GREEDY[:5], "-n", "16", "--temp", "2", "--json")
    greedy = [graphrt(*GREEDY, "-n", "16", "--json").json()["tokens"] for _ in range(2)]
    seeds = [graphrt(*hot, "--seed", seed).json()["tokens"] for seed in ("7", "7", "8")]
    assert greedy[0] == greedy[1]
    assert seeds[0] == seeds[1] != seeds[2]
    assert graphrt(*hot).json()["tokens"] != graphrt(*hot).json()["tokens"], "without a seed each run is a new one"


def test_a_kept_prompt_is_read_once(graphrt: Cli, tmp_path: Path) -> None:
    """Each prompt reads what differs from the one before; the file holds the prompt and no text made from it."""
    kept, more = ("--prompt-cache", str(tmp_path / "prompt.session")), ("-n", "6", "--raw", "--temp", "0")
    for prompt, said in (
        ("hello the sea", "prompt 7 tokens, "),
        ("hello the sea", "prompt 7 tokens, 6 kept, "),
        ("hello the sea, he sees", "kept, "),
        ("hello", "kept, "),
        ("the sea", "1 kept, "),
    ):
        plain = graphrt("run", "spm.gguf", "-p", prompt, *more)
        found = graphrt("run", "spm.gguf", "-p", prompt, *more, *kept)
        assert found.code == 0 and found.out == plain.out and said in found.err
        assert ("kept" in found.err) == ("kept" in said)
    graphrt("run", "spm.gguf", "-p", "hello, he", *more[2:], "-n", "0", *kept)
    found = graphrt("run", "spm.gguf", "-p", "hello, he sees", *more, *kept)
    assert " kept, " in found.err and " 1 kept, " not in found.err, "-n 0 writes it too"


def test_kept_prompts_that_can_not_be(graphrt: Cli, tmp_path: Path) -> None:
    (tmp_path / "no.session").write_text("hello")
    for path, message in (
        (tmp_path, "it is a folder; give another"),
        (tmp_path / "none" / "x", "there is no folder"),
        (tmp_path / "no.session", "it is damaged or cut short; save the session again"),
    ):
        found = graphrt(*GREEDY, "--prompt-cache", str(path))
        assert found.code == 2 and message in found.err and found.out == ""
    kept = ("--prompt-cache", str(tmp_path / "types.session"))
    assert graphrt(*GREEDY, "-n", "1", *kept).code == 0
    assert "its cache has the types f16 and f16" in graphrt(*GREEDY, "-n", "1", "-ctk", "f32", *kept).err
    assert "it is of another model" in graphrt("run", "bpe.gguf", "-p", "hello", "-n", "1", *kept).err


def test_exact_forms_give_the_same_tokens(graphrt: Cli) -> None:
    wanted = graphrt(*GREEDY, "-n", "24", "--json", "--exact").json()["tokens"]
    assert graphrt(*GREEDY, "-n", "24", "--json").json()["tokens"] == wanted
    assert graphrt(*GREEDY, "-n", "24", "--json", "--backend", "cpu", "-t", "1", "-b", "3").json()["tokens"] == wanted


@pytest.mark.parametrize("types", [("f32", "f32"), ("bf16", "f16"), ("q8_0", "q4_0"), ("f8", "f8_e4m3")])
def test_cache_types(graphrt: Cli, types: tuple[str, str]) -> None:
    argv = ("run", "bpe.gguf", "-p", "hello", "-n", "4", "--temp", "0", "--json", "-ctk", types[0], "-ctv", types[1])
    assert len(graphrt(*argv).json()["tokens"]) == 4


@pytest.mark.parametrize(
    ("argv", "stdin"),
    [
        (("-p", "the sea"), b""),
        (("-f", "prompt.txt"), b""),
        (("-f", "-"), b"the sea\n"),
        (("-p", "-"), b"the sea"),
        ((), b"the sea\n"),
    ],
    ids=["-p", "-f", "-f -", "-p -", "piped"],
)
def test_where_a_prompt_comes_from(graphrt: Cli, models: Path, argv: tuple[str, ...], stdin: bytes) -> None:
    (models / "prompt.txt").write_text("the sea\n")  # the newline that editors put at the end is no part of it
    found = graphrt("run", "spm.gguf", *argv, "--raw", "-n", "2", "--json", stdin=stdin).json()
    assert found["prompt_tokens"] == tokenizer(models / "spm.gguf").encode("the sea")


def test_a_terminal_is_not_waited_for(graphrt: Cli) -> None:
    result = graphrt("run", "spm.gguf", stdin=None)
    assert (result.code, result.out) == (2, "") and "-p TEXT, -f FILE" in result.err


def test_the_chat_template_is_applied_unless_raw(graphrt: Cli, models: Path) -> None:
    argv = ("run", "spm.gguf", "-p", "hello", "-n", "1", "--json")
    chat = f"{IM_START}user\nhello{IM_END}\n{IM_START}assistant\n"
    t = tokenizer(models / "spm.gguf")
    assert graphrt(*argv).json()["prompt_tokens"] == [1, *t.encode(chat, add_bos=False, parse_special=True)]
    assert graphrt(*argv, "--raw").json()["prompt_tokens"] == t.encode("hello")
    chat = f"{IM_START}system\nthe sea{IM_END}\n{chat}"
    wanted = [1, *t.encode(chat, add_bos=False, parse_special=True)]
    assert graphrt(*argv, "-sys", "the sea").json()["prompt_tokens"] == wanted


def test_a_full_context_is_a_clear_end(graphrt: Cli) -> None:
    result = graphrt(*GREEDY, "-n", "-1", "-c", "20", "--ignore-eos")
    assert result.code == 0
    note, figures = result.err.strip().splitlines()[0::2]
    assert note == "stopped: the context is full (20 tokens); -c gives a longer one, up to 256"
    assert "generated 14 tokens" in figures  # the 14th comes of a full context and is not put into it
    result = graphrt(*GREEDY, "-n", "-1", "--ignore-eos")
    assert "full (256 tokens); the model was trained on no more" in result.err
    result = graphrt(*GREEDY, "-n", "14", "-c", "20", "--ignore-eos")
    assert "stopped" not in result.err, "it ended because it had all the tokens that were asked for"


def test_ctrl_c_before_the_first_token(graphrt: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Model, "generate", generate)
    result = graphrt(*GREEDY)
    assert (result.code, result.out) == (130, "")
    assert result.err.strip().endswith("generated none | interrupted")
    assert graphrt(*GREEDY, "--json").json()["tokens"] == []


def test_ctrl_c_while_loading(graphrt: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(model: str | None) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "resolve", resolve)
    assert graphrt(*GREEDY) == Result(130, "", "graphrt run: interrupted\n")


def test_ctrl_c_ends_a_run_with_the_figures(models: Path) -> None:
    argv = command("run", "long.gguf", "-p", "hello", "-n", "-1", "-c", "100000", "--ignore-eos", "--seed", "1")
    # A shell's background jobs ignore the signal, and so would all that they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(argv, cwd=models, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    lines = err.decode().strip().splitlines()
    assert len(lines) == 1 and "generated" in lines[0] and lines[0].endswith("| interrupted")
