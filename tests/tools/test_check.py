"""`graphrt check`: what a backend would not run, why, and into how many parts that cuts a step; with nothing run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tiny

from graphrt.backend import Usage
from graphrt.backends.triton import device
from graphrt.errors import BackendError
from graphrt.tools import cli
from graphrt.tools.inspect.planned import Planned, planned

Check = Callable[..., tuple[int, Any]]

SCRIPT = """
import graphrt
from graphrt import ops

def build():
    a = graphrt.new_input("f32", 64, 4, name="a")
    return graphrt.Graph(ops.add(ops.sqrt(ops.sqr(a, name="square"), name="root"), a, name="sum"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    tiny.write_model(folder / "llama.gguf", "llama")
    tiny.write_model(folder / "q4.gguf", "llama", "Q4_0")
    (folder / "script.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def check(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.chdir(folder)

    def call(*argv: str) -> tuple[int, Any]:
        capsys.readouterr()
        code = cli.main(["check", *argv])
        out = capsys.readouterr().out
        return code, json.loads(out) if "--json" in argv else out

    return call


@pytest.mark.parametrize("backend", ["cpu", "cpu-fast", "triton", "triton-fast"])
def test_what_runs_whole(check: Check, backend: str) -> None:
    code, found = check("llama.gguf", "-b", backend, "-c", "64", "--json")
    assert code == 0 and [s["step"] for s in found["steps"]] == ["prefill of 64 tokens", "decode of 1 token"]
    assert all(s["splits"] == 1 and not s["fallbacks"] and not s["copies"] for s in found["steps"])
    assert "one split, no copies" in check("llama.gguf", "-b", backend, "-c", "64")[1]


@pytest.mark.parametrize("name", ["llama-8b:q4_k_m", "gpt-oss-20b", "deepseek2-lite"])
def test_the_gpu_backend_is_asked_without_a_gpu(check: Check, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(device, "interpreting", lambda: False)
    if device.unusable() is None:
        pytest.skip("there is a GPU")
    assert check("--synthetic", name, "-b", "triton", "--json")[0] == 0


def test_a_fallback_by_an_unsupported_type_names_node_and_reason(check: Check) -> None:
    assert check("llama.gguf", "-b", "support.broken_backends:Picky", "-c", "64")[0] == 0, "weights in f32 it takes"
    code, found = check("q4.gguf", "-b", "support.broken_backends:Picky", "-c", "64", "--json")
    step = found["steps"][1]
    (fallback,) = step["fallbacks"]
    assert code == 1 and step["splits"] > 2
    assert fallback["cause"] == "its product has no 4-bit weights, these are q4_0"
    assert (fallback["op"], fallback["backend"], fallback["where"]) == ("MUL_MAT", "cpu", "0-1 and -")
    assert "ffn_gate-1" in fallback["names"] and fallback["count"] == len(fallback["names"]) > 10
    assert {(c["origin"], c["target"]) for c in step["copies"]} == {("cpu", "picky"), ("picky", "cpu")}
    code, out = check("q4.gguf", "-b", "support.broken_backends:Picky", "-c", "64")
    assert "MUL_MAT  0-1 and -" in out and "these are q4_0" in out and "copied between backends" in out


def test_what_its_place_decides_says_so(check: Check) -> None:
    _, found = check("llama.gguf", "-b", "support.toy:ToyBackend", "-c", "64", "--json")
    causes = {f["op"]: f["cause"] for f in found["steps"][1]["fallbacks"]}
    assert causes["RMS_NORM"] == "op RMS_NORM is unknown to it" and "f32" in causes["SET_ROWS"]


def test_a_script(check: Check) -> None:
    code, found = check("script.py:build", "-b", "support.toy:ToyBackend", "--json")
    (step,) = found["steps"]
    assert code == 1 and [f["names"] for f in step["fallbacks"]] == [["root"]] and step["splits"] == 3
    assert [(c["example"], c["nbytes"]) for c in step["copies"]] == [("square", 1024), ("root", 1024)]
    assert check("script.py:build", "-b", "cpu")[0] == 0


def test_what_can_not_be_asked(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["llama.gguf", "-b", "nope"], ["none.gguf"], [], ["llama.gguf", "--synthetic", "llama-8b:q8_0"]):
        assert check(*argv)[0] == 2


def test_a_planned_backend_only_plans() -> None:
    backend = planned("cpu")
    buffer = backend.alloc(1 << 50, Usage.WEIGHTS)
    assert isinstance(backend, Planned) and (backend.name, buffer.nbytes) == ("cpu", 1 << 50)
    for work in (lambda: buffer.read(0, 1), lambda: backend.compile([], lambda t: (buffer, 0))):
        with pytest.raises(BackendError, match="prepare the graph on"):
            work()
