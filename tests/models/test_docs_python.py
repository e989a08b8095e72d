"""docs/python.md: every example runs as it stands, on a tiny model in place of the one that it names."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from support import ROOT
from support.tiny import CHAT, write_model

from graphrt.models import hub


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", chat=CHAT)
    monkeypatch.setattr(hub, "resolve", lambda name: model)
    failed, tried = doctest.testfile(
        str(ROOT / "docs" / "python.md"), module_relative=False, optionflags=doctest.ELLIPSIS
    )
    assert tried > 20 and failed == 0
