"""docs/python.md and docs/training.md: every example runs as it stands, on a tiny model in place of the one that it
names."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from support import ROOT
from support.tiny import CHAT, write_model

from graphrt.models import hub


@pytest.mark.parametrize(("name", "least"), [("python.md", 20), ("training.md", 10)])
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, least: int) -> None:
    model = write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", chat=CHAT)
    monkeypatch.setattr(hub, "resolve", lambda name: model)
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(ROOT / "docs" / name), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried >= least and failed == 0
