"""`check`, `trace` and `diff` of a model that is cut over ranks, which are all in one graph."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.tiny import write_model

from graphrt.tools import cli

TEXT = ("-p", "hello the sea", "--exact")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tools") / "m.gguf"
    write_model(path, "llama", tokenizer="spm")
    return path


def test_check_asks_for_all_ranks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = []
    for ranks in ("1", "2"):
        assert cli.main(["check", str(model), "-b", "cpu", "--ranks", ranks, "--json"]) == 0
        nodes.append(json.loads(capsys.readouterr().out)["steps"][1]["nodes"])
    assert nodes[1] > 1.8 * nodes[0]
    assert cli.main(["check", str(model), "-b", "cpu", "--ranks", "4", "--pp", "2"]) == 0
    assert "decode of 1 token, 4 ranks in 2 stages on cpu: all " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("check", "--pp", "2"), "--pp and --ep divide ranks that are not there, got no --ranks"),
        (("trace", "-p", "a", "--ep"), "--pp and --ep divide ranks that are not there, got no --ranks"),
        (("check", "--ranks", "2", "--order"), "--order checks the launches of one GPU, got --ranks"),
        (("trace", "-p", "a", "--ranks", "3"), "got 3 ranks; use 2 or 4"),
    ],
)
def test_what_can_not_be_is_refused(
    model: Path, given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([given[0], str(model), *given[1:]]) == 2
    assert said in capsys.readouterr().err


def test_a_graph_has_no_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "s.py"
    script.write_text(
        "from graphrt import Graph, new_input, ops\n\n"
        "def build():\n    return Graph(ops.sqr(new_input('f32', 4, name='x')))\n"
    )
    assert cli.main(["check", f"{script}:build", "-b", "cpu", "--ranks", "2"]) == 2
    assert "ranks are of a model" in capsys.readouterr().err


def test_trace_has_the_nodes_of_all_ranks(model: Path, tmp_path: Path) -> None:
    found = []
    for ranks in ("1", "2"):
        out = tmp_path / f"{ranks}.npz"
        assert cli.main(["trace", str(model), *TEXT, "--ranks", ranks, "-o", str(out), "--backend", "cpu"]) == 0
        with np.load(out) as file:
            found.append({name: file[name] for name in file.files})
    one, two = found
    assert np.allclose(two["l_out-0"], one["l_out-0"], rtol=1e-4, atol=1e-5)
    assert np.array_equal(two["l_out-0"], two["l_out-0@1"])
    heads = np.concatenate([two["Qcur_rope-0"], two["Qcur_rope-0@1"]], axis=-2)
    assert np.allclose(heads, one["Qcur_rope-0"], rtol=1e-4, atol=1e-5)
