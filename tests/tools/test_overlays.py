"""What tools write with --overlay, `graphrt dump` lays over the graph: magnitudes, bytes, time. diff: test_diff.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import tiny

from graphrt.tools import cli

TOOLS = {
    "trace": ["trace", "text.gguf", "-p", "hello", "--phase", "decode", "--overlay"],
    "memory": ["memory", "text.gguf", "--overlay"],
    "run": ["run", "text.gguf", "-p", "hello", "-n", "1", "--profile", "p.json", "--profile-steps", "1"]
    + ["--profile-overlay"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_dump_takes_the_overlay(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.write_model(tmp_path / "text.gguf", "llama", tokenizer="spm")
    model = ["--backend", "cpu", "-c", "64"]
    assert cli.main([*TOOLS[tool], f"{tool}.json", *model]) == 0
    values = json.loads((tmp_path / f"{tool}.json").read_text())
    assert values["__fattn__-1"] > 0 and values["result_output"] > 0 and len(values) > 25
    capsys.readouterr()
    assert cli.main(["dump", "text.gguf", *model, "--format", "html", "--overlay", f"{tool}.json"]) == 0
    assert f'"name": "{tool}"' in capsys.readouterr().out


def test_a_profile_is_what_its_overlay_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "text.gguf", "-p", "x", "--profile-overlay", "x.json"]) == 2
    assert "got no --profile; give both" in capsys.readouterr().err
