"""A folder of tiny models, and the command line run in it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import gguf_files
from support.command_line import TEXT, Cli, Result, Terminal
from support.tiny import CHAT, write_model

from graphrt.models import hub
from graphrt.tools import cli


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good and bad files."""
    folder = tmp_path_factory.mktemp("models")
    good = write_model(folder / "spm.gguf", "llama", tokenizer="spm", chat=CHAT)
    write_model(folder / "bpe.gguf", "gemma3", tokenizer="bpe", context_length=5000)
    write_model(folder / "long.gguf", "llama", tokenizer="bpe", context_length=100_000)
    write_model(folder / "missing.gguf", "llama", tokenizer="spm", block_count=3)
    write_model(folder / "shape.gguf", "llama", tokenizer="spm", feed_forward_length=64)
    write_model(folder / "no_vocab.gguf", "llama")
    write_model(folder / "refuses.gguf", "llama", tokenizer="spm", chat="{{ raise_exception('only users') }}")
    write_model(folder / "no_jinja.gguf", "llama", tokenizer="spm", chat="{% if %}")
    (folder / "junk.gguf").write_bytes(b"no model at all" * 20)
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "cut.gguf").write_bytes(good.read_bytes()[:-1000])
    (folder / "folder.gguf").mkdir()
    gguf_files.write_gguf(folder / "mamba.gguf", [("general.architecture", "string", "mamba")], [])
    built = gguf_files.build([("general.architecture", "string", "llama")], [("w", "f32", (4,), bytes(16))])
    (folder / "type.gguf").write_bytes(built.patch("w.type", 99))
    (folder / "text.txt").write_text(TEXT * 6)
    (folder / "short.txt").write_text("hello")
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    return folder


@pytest.fixture
def graphrt(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Cli]:
    """Runs a command line in the folder of models; no network, a cache of its own.

    stdin: what is piped in, None for a terminal.
    """
    monkeypatch.chdir(models)
    monkeypatch.setenv("GRAPHRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("GRAPHRT_FUSE", "")  # so that a flag's value goes when the test ends
    monkeypatch.setattr(hub, "_download", lambda part, *_: pytest.fail(f"{part} must not be fetched"))
    threads = torch.get_num_threads()

    def run(*argv: str, stdin: bytes | None = b"") -> Result:
        piped = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO()) if stdin is None else piped)
        capsys.readouterr()
        try:
            code = cli.main(argv)
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    yield run
    torch.set_num_threads(threads)
