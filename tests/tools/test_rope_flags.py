"""The flags that change a rotation of positions are those of every verb that runs or plans a model's steps."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path

import pytest
from support.tiny import CHAT, write_model
from support.verbs import Verb

from graphrt.backend import get_backend
from graphrt.models.gguf import GGUFFile
from graphrt.models.rope_options import RopeOptions
from graphrt.tools.bench.model import Source
from graphrt.tools.cli import VERBS, verb_parser
from graphrt.tools.rope_flags import FLAGS
from graphrt.tools.verbs import bench

P = ("-p", "a")
#: Verb -> its arguments behind the model. `tokens` and the like run nothing, `quantize` changes files.
ARGS: dict[str, tuple[str, ...]] = {
    "run": (*P, "-n", "1"), "chat": ("-n", "1"), "check": ("-b", "cpu"), "dump": (), "explain": (), "memory": (),
    "trace": P, "diff": P, "perplexity": ("-f", "t.txt", "-c", "32", "--chunks", "1"),
    "embed": (*P, "--pooling", "mean"), "logits": ("--tokens", "1", "-o", "l.npy"),
    "imatrix": ("-f", "t.txt", "-c", "32", "--chunks", "1"), "bench": ("-p", "2", "-n", "1", "-r", "1"), "serve": (),
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RopeOptions]:
    """The changes that files were opened with from now on."""
    write_model(tmp_path / "m.gguf", "llama", tokenizer="spm", chat=CHAT)
    (tmp_path / "t.txt").write_text("the sea " * 99)
    monkeypatch.chdir(tmp_path)
    found: list[RopeOptions] = []
    apply = RopeOptions.apply

    def seen(self: RopeOptions, file: GGUFFile) -> None:
        found.append(self)
        apply(self, file)

    monkeypatch.setattr(RopeOptions, "apply", seen)
    return found


def test_verbs_that_have_them() -> None:
    modules = {name: importlib.import_module(f"graphrt.tools.verbs.{name}") for name in VERBS}
    have = {name for name, module in modules.items() if verb_parser(name, module).has_flag("--rope-scale")}
    assert have == set(ARGS)
    assert all(verb_parser(name, modules[name]).has_flag(flag) for name in have for flag in FLAGS)


# bench measures the machine first, serve waits for requests
@pytest.mark.parametrize("name", [name for name in ARGS if name not in ("bench", "serve")])
def test_they_reach_the_model(
    name: str, asked: list[RopeOptions], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    result = Verb(capsys)(name, "m.gguf", *ARGS[name], "--rope-freq-base", "20000", "--rope-scale", "2")
    assert result.code == 0, result.err
    assert asked and set(asked) == {RopeOptions(freq_base=20000.0, freq_scale=0.5)}


def test_what_is_timed_has_them(asked: list[RopeOptions]) -> None:
    for model in ("m.gguf", "--synthetic=tiny"):
        args = verb_parser("bench", bench).parse_args([model, "--rope-freq-base", "20000"])
        Source(args).load([get_backend("cpu")])
    assert asked == [RopeOptions(freq_base=20000.0)] * 2


def test_a_made_up_model_and_a_graph(asked: list[RopeOptions], capsys: pytest.CaptureFixture[str]) -> None:
    verb = Verb(capsys)
    shown = verb("dump", "--synthetic", "tiny", "--rope-freq-base", "20000")
    assert shown.code == 0 and "freq_base=20000" in shown.out and len(asked) == 1
    for name in ("dump", "check", "diff"):
        refused = verb(name, "none.py:build", "--rope-freq-base", "20000", *(("-b", "cpu") if name == "check" else ()))
        assert refused.code == 2 and "a rotation of positions is of a model" in refused.err
