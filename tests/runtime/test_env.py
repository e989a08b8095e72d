"""Every variable that the sources name is in graphrt/env.py's table, and the table is the README's and the help's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support import ROOT

from graphrt import env
from graphrt.models import hub
from graphrt.tools import cli

#: Of the tests alone; CONTRIBUTING.md has them.
TESTS_ONLY = {
    "GRAPHRT_AOT", "GRAPHRT_VOCAB_DIR", "GRAPHRT_CHROMIUM", "GRAPHRT_QUICK_INTERPRETER", "GRAPHRT_SHARE",
}  # fmt: skip
SOURCES = ("graphrt", "ops", "backends", "models", "tools")


def _named_in(*folders: str) -> set[str]:
    texts = [
        p.read_text(encoding="utf-8") for f in folders for p in (ROOT / f).rglob("*.py") if p != Path(env.__file__)
    ]
    return set(re.findall(r"GRAPHRT_[A-Z_]+", "\n".join(texts)))


def test_every_variable_is_in_the_table() -> None:
    names = {v.name for v in env.VARIABLES}
    assert _named_in(*SOURCES) <= names and _named_in("tests") - {"GRAPHRT_"} <= names | TESTS_ONLY
    code = "\n".join(p.read_text(encoding="utf-8") for f in SOURCES for p in (ROOT / f).rglob("*.py"))
    for name, value in vars(env).items():
        if isinstance(value, env.Variable):
            assert f"{name}.get()" in code, f"nothing reads {value.name}"
            assert value in env.VARIABLES
    assert not re.search(r"environ[^\n]*GRAPHRT_", code), "a variable is read through env.py alone"


def test_the_documents_have_the_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(GRAPHRT_[A-Z_]+)` \| `(--[a-z-]+)", readme, re.MULTILINE)
    assert rows == [(v.name, v.flag) for v in env.VARIABLES]
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(name in contributing for name in TESTS_ONLY)


def test_the_help_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(v.name in out and v.flag in out for v in env.VARIABLES)


def test_a_flag_sets_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for v in env.VARIABLES:
        monkeypatch.setenv(v.name, "0")
    assert cli.main(["devices", "--cache-dir", str(tmp_path)]) == 0
    assert hub.cache_dir() == tmp_path and os.environ["GRAPHRT_FUSE"] == "0"
    monkeypatch.setenv("GRAPHRT_CACHE", "")
    assert env.CACHE.get() is None and hub.cache_dir() != tmp_path


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for v in env.VARIABLES:
        for value, seen in (("", None), ("0", "0"), ("x", "x")):
            monkeypatch.setenv(v.name, value)
            assert v.get() == seen
