"""A model whose attention runs on the triton backend and the rest on the CPU: right, and told in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tokens, write_model

pytest.importorskip("triton")

from graphrt.backends.triton import device
from graphrt.models import load
from graphrt.models.session import SessionOptions
from graphrt.testing import nmse
from graphrt.tools.cli import main

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_logits_are_the_cpus_and_memory_lies_where_it_is_worked_on(architecture: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", architecture)
    shared, alone = load(path, ["triton", "cpu"]), load(path, "cpu")
    options = SessionOptions(n_ctx=64, n_batch=16)
    a, b = shared.session(options), alone.session(options)
    assert {layer.k.buffer.backend for layer in a.cache.layers if layer.k.buffer is not None} == {"cpu"}
    ids = tokens(20)
    assert nmse(a.eval(ids[:17]), b.eval(ids[:17])) < 1e-6
    assert nmse(a.eval(ids[17:18]), b.eval(ids[17:18])) < 1e-6
    told = " ".join(a.fallbacks())
    assert "MUL_MAT run on cpu: triton says it has no kernel for MUL_MAT yet" in told and "parts with copies" in told
    assert not b.fallbacks()


def test_run_reports_its_fallbacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", tokenizer="spm")
    command = ["run", str(path), "--backend", "triton", "-p", "a", "-n", "2", "--raw", "-c", "32", "--temp", "0"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "fallback: " in said and "MUL_MAT run on cpu" in said
