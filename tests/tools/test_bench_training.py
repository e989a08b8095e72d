"""`graphrt bench --train` and `graphrt memory --train`: gradients are checked first, and what a step takes is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny import write_model

from graphrt.tools.bench import training
from graphrt.tools.cli import main

ARGS = ["--train", "lora:2", "--backend", "cpu"]


def test_a_row_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_model(tmp_path / "m.gguf", "llama", "Q4_0"))
    assert main(["bench", path, *ARGS, "-p", "12", "-r", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["results"]
    assert row["test"] == "lora:2 pp12" and row["splits"] == 1 and row["tokens_per_s"] > 0 and row["gflop_per_s"] > 0
    assert row["loss"] == sorted(row["loss"], reverse=True)
    assert row["memory"]["trained"] > 0 and "peer" not in row
    assert row["memory"]["arenas"] < row["memory"]["without_reuse"]
    assert report["checked"]["what"] == "all gradients of a step of 256 tokens" and report["error_nmse"] < 1e-4


def test_wrong_gradients_are_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = str(write_model(tmp_path / "m.gguf", "llama", "Q4_0")), []
    scattered = training.scattered

    def differently(adapters: list[training.Adapter]) -> None:
        calls.append(scattered(adapters[len(calls) :]))  # the second model's first adapter keeps its zeros

    monkeypatch.setattr(training, "scattered", differently)
    assert main(["bench", path, *ARGS, "-p", "12"]) == 1
    shown = capsys.readouterr()
    assert "loss or gradients differ from the reference" in shown.err and "t/s" not in shown.out


def test_the_memory_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_model(tmp_path / "m.gguf", "llama", "Q4_0"))
    assert main(["memory", path, *ARGS, "--tokens", "16"]) == 0
    out = capsys.readouterr().out
    assert "lora:2, a step on 16 tokens" in out and "optimizer f32" in out and "adapters f32" in out
    for extra in (["--phase", "decode"], ["--limit", "1G"]):
        assert main(["memory", path, *ARGS, *extra]) == 2
        assert "--train is of one model" in capsys.readouterr().err
