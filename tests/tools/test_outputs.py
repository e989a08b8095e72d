"""Files that verbs write: no file that is read is lost, whatever it is called, and none is begun in vain."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

import pytest
from support.tiny import write_model
from support.verbs import Verb

from graphrt.errors import SessionError
from graphrt.tools.cli import FORMS, VERBS, verb_parser
from graphrt.tools.outputs import OutputFile, check_outputs

#: Arguments that are written, wherever they are.
WRITTEN = ("output", "output_file", "svg", "save", "overlay", "profile", "profile_overlay", "prompt_cache")
SCRIPT = """
from graphrt import Graph, new_input, ops
def build():
    return Graph(ops.scale(new_input("f32", 4, name="a"), 2.0))
"""


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb(capsys)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_model(tmp_path / "m.gguf", "llama", tokenizer="spm")
    (tmp_path / "t.txt").write_text("the sea " * 99)
    (tmp_path / "s.py").write_text(SCRIPT)
    (tmp_path / "o.json").write_text('{"Qcur-0": 1.0}')
    os.link(tmp_path / "m.gguf", tmp_path / "same.npz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "argv",
    [
        ("logits", "m.gguf", "--tokens", "1", "-o", "m.gguf"),
        ("logits", "m.gguf", "--tokens", "1", "-o", "./x/../m.gguf"),
        ("embed", "m.gguf", "-p", "a", "--pooling", "mean", "-o", "m.gguf"),
        ("embed", "m.gguf", "-f", "t.txt", "--pooling", "mean", "-o", "t.txt"),
        ("imatrix", "m.gguf", "-f", "t.txt", "-c", "64", "-o", "t.txt"),
        ("dump", "m.gguf", "-o", "m.gguf"),
        ("dump", "s.py:build", "-o", "s.py"),
        ("dump", "m.gguf", "--format", "html", "--overlay", "o.json", "-o", "o.json"),
        ("explain", "m.gguf", "__fattn__-0", "--svg", "m.gguf"),
        ("memory", "m.gguf", "--svg", "m.gguf"),
        ("memory", "m.gguf", "--svg", "new", "--overlay", "new"),
        ("trace", "m.gguf", "-p", "a", "-o", "same.npz"),
        ("trace", "m.gguf", "-p", "a", "--overlay", "m.gguf"),
        ("diff", "m.gguf", "-p", "a", "-b", "cpu,model=m.gguf", "--svg", "m.gguf"),
        ("diff", "m.gguf", "-f", "t.txt", "--overlay", "t.txt"),
        ("run", "m.gguf", "-p", "a", "-n", "1", "--profile", "p.json", "--profile-overlay", "p.json"),
        ("run", "m.gguf", "-f", "t.txt", "-n", "1", "--prompt-cache", "t.txt"),
        ("test", "-b", "cpu", "--test-file", "t.txt", "-O", "t.txt"),
    ],
    ids=" ".join,
)
def test_what_is_read_is_not_written(verb: Verb, folder: Path, argv: tuple[str, ...]) -> None:
    (folder / "x").mkdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = verb(*argv)
    assert result.code == 2 and "a file to write must have a name of its own" in result.err
    assert len(result.err.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_other_names(folder: Path) -> None:
    """A prompt is no file, a device may be written twice, a name may have a NUL, a file may be written anew."""
    new = OutputFile("new.npy")
    check_outputs(argparse.Namespace(model="m.gguf", prompt=["new.npy"], output=new, svg=None, n=3))
    null = OutputFile(os.devnull)
    check_outputs(argparse.Namespace(model="m.gguf", file="a\0b", output=null, svg=null))
    (folder / "new.npy").write_text("")
    check_outputs(argparse.Namespace(model="m.gguf", prompt="new.npy", output=new))
    with pytest.raises(SessionError, match="output and svg are both 'new.npy'; give another"):
        check_outputs(argparse.Namespace(output=new, svg=Path("./new.npy")))
    with pytest.raises(SessionError, match="there is no folder 'none'"):
        check_outputs(argparse.Namespace(output=OutputFile("none/a")))


def test_every_output_is_known() -> None:
    """Whose help says that it is written is an OutputFile, or its verb looks after it by itself."""
    theirs = {("test", "save"), ("quantize", "output"), ("merge", "output"), ("split", "prefix"), ("dump", "overlay")}
    seen = set()
    for name in [*VERBS, *(" ".join(form) for form in FORMS)]:
        module = importlib.import_module(f"graphrt.tools.verbs.{name.replace(' ', '_')}")
        for action in verb_parser(name, module)._actions:
            if action.dest in WRITTEN and action.metavar and (name, action.dest) not in theirs:
                made = action.type("a.json") if callable(action.type) else None
                assert isinstance(made, OutputFile), (name, action.dest)
                seen.add((name, action.dest))
    assert len(seen) > 15
