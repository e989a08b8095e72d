"""`check`, `trace` and `diff` of a model that is cut over ranks, which are all in one graph."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import tiny_archs  # noqa: F401 (what write_model knows of)
from support.ranked import F32
from support.tiny import write_model
from support.trace_ranks import off

from graphrt import Graph, new_input, new_tensor, ops
from graphrt.models import load
from graphrt.models.cache import KVCache
from graphrt.models.ranks import weights
from graphrt.models.ranks.plan import Cut
from graphrt.models.ranks.played import PlayedDecoder, PlayedWeights
from graphrt.models.ranks.weights import part_of
from graphrt.tools import cli
from graphrt.tools.diff.nodes import UNNAMED
from graphrt.tools.inspect.traced_step import Step, WatchedSession
from graphrt.tools.ranks.launch import Job
from graphrt.tools.trace.ranks import same_on_all
from graphrt.tools.verbs import trace

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
        (("trace", "-p", "a", "--ranks", "3"), "4 heads of q, and 2 of k and v; use 2 or 4"),
        (
            ("trace", "-p", "a", "--ranks", "2", "--tp", "2"),
            "played in one process (--ranks) or started (--tp), got both",
        ),
        (("trace", "-p", "a", "--tp", "2", "--first-nan"), "trace what each of them has, got --first-nan"),
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


def parted(capfd: pytest.CaptureFixture[str], model: Path, at: int, *given: str) -> tuple[int, dict[str, Any]]:
    """The exit code of `trace --tp 2 --json`, and what it says of ranks, where the second one's at-th sum is off."""
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    argv = [str(model), "-p", "", "--backend", "cpu", "-t", "1", "--tp", "2", "--json", *given]
    args = parser.parse_args(argv)
    code = Job(args, args.tp * args.pp, off, f"hello the sea {at}").run()
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return code, found["ranks"]


@pytest.mark.parametrize("how", [("--exact",), (), ("--pp", "2")])
def test_ranks_that_are_there_have_the_same_bits(
    model: Path, how: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.npz"
    code, found = parted(capfd, model, 0, *how, "-o", str(out))
    assert code == 0 and found["parted"] is None and found["compared"] >= 8
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"v-{rank}-of-{len(files)}.npz" for rank in range(4 if "--pp" in how else 2)]


@pytest.mark.parametrize(("at", "nodes"), [(1, ("attn_joined-0", "ffn_inp-0")), (4, ("ffn_joined-1", "l_out-1"))])
def test_where_ranks_part_first(
    model: Path, at: int, nodes: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    code, found = parted(capfd, model, at, "--exact")
    first = found["parted"]
    assert code == 1 and first["node"] in nodes and first["rank"] == 1
    assert first["largest"] == pytest.approx(0.25, rel=1e-3) and first["differ"] == 1


@pytest.mark.parametrize("name", ["olmo2", "mpt", "phi3", "qwen2-fused", "gpt-oss", "deepseek2"])
def test_nodes_that_are_the_same_are_known(name: str, tmp_path: Path) -> None:
    """By the values of ranks that are played: those that are said to be the same are, and some of each layer are."""
    played = load(write_model(tmp_path / "m.gguf", name), "cpu", exact=True, ranks=2)
    session = WatchedSession(played.decoder, played.backends, F32)
    step = Step(session, [3, 1, 4, 1, 5])
    graph = step.run(range(len(step.graph().nodes))).graph
    assert isinstance(played.weights, PlayedWeights) and isinstance(played.decoder, PlayedDecoder)
    share = played.decoder.ranks[0]
    inputs = share.inputs(5, 1, KVCache(share.hp, session.home, share.hp.windowed, 64, 5, "f32", "f32"))
    same = {node.name for node in same_on_all(Graph(share.result(inputs)), played.weights.plan)}
    read = {node.name: step.values(node) for node in graph.nodes if not UNNAMED.match(node.name)}
    values = {key: value for key, value in read.items() if value is not None}
    compared = [key for key in same if {key, f"{key}@1"} <= set(values)]
    assert all(np.array_equal(values[key], values[f"{key}@1"], equal_nan=True) for key in compared)
    assert {"l_out-0", "l_out-1"} <= set(compared)


def test_what_each_rank_takes_of_the_same_is_its_own() -> None:
    x, own = new_input("f32", 8, name="x"), new_tensor("f32", 8, name="own")
    slice_ = ops.sqr(ops.cont(ops.view(x, (4,))), name="slice")
    whole, mixed = ops.sqr(ops.view(x, (8,)), name="whole"), ops.add(x, own, name="mixed")
    summed = ops.all_reduce(mixed, ranks=2, rank=0, name="summed")
    plan: Any = SimpleNamespace(cuts={"own": Cut("columns", 0, (((0, 8),), ((8, 16),)))})
    named = {node.name for node in same_on_all(Graph(slice_, whole, summed), plan)}
    assert named & {"slice", "whole", "mixed", "summed"} == {"whole", "summed"}


def differing(capsys: pytest.CaptureFixture[str], model: Path, *given: str) -> tuple[int, dict[str, Any]]:
    """The exit code of diff, and its nodes by name."""
    code = cli.main(["diff", str(model), "--tokens", "3,1,4,1,5,9,2", "--json", *given])
    (mode,) = json.loads(capsys.readouterr().out)["modes"]
    return code, {node["name"]: node for node in mode["nodes"]}


@pytest.mark.parametrize(
    ("name", "how", "compared"),
    [
        ("llama", "ranks=2", {"Qcur_rope-1", "Kcur_rope-1", "ffn_glu-0", "attn_out-0", "l_out-1", "result_output"}),
        ("llama", "ranks=4,pp=2", {"Qcur_rope-1", "l_out-0", "l_out-1", "result_output"}),
        ("qwen2-fused", "ranks=2", {"l_out-1", "result_output"}),
        ("phi3", "ranks=2", {"ffn_out-0", "l_out-1", "result_output"}),
        ("olmo2", "ranks=2", {"Qcur_rope-0", "l_out-1", "result_output"}),
        ("gpt-oss", "ranks=2,ep=1", {"l_out-1", "result_output"}),
        ("deepseek2", "ranks=4", {"l_out-1", "result_output"}),
    ],
)
def test_what_ranks_hold_together_is_what_one_has(
    name: str, how: str, compared: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, nodes = differing(capsys, write_model(tmp_path / "m.gguf", name), "-a", "cpu", "-b", f"cpu,{how}")
    assert code == 0 and compared <= set(nodes), sorted(nodes)
    code, nodes = differing(capsys, tmp_path / "m.gguf", "-a", f"cpu,{how}", "-b", f"cpu,{how},fuse=0")
    assert code == 0 and "result_output" in nodes and any("@1" in node for node in nodes)


def test_a_wrong_cut_is_named(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second rank multiplies with the first one's columns of a matrix."""

    def wrong(file: Any, name: str, cut: Cut, rank: int) -> Any:
        return part_of(file, name, cut, 0 if name == "blk.1.attn_output.weight" else rank)

    monkeypatch.setattr(weights, "part_of", wrong)
    code, nodes = differing(capsys, model, "-a", "cpu", "-b", "cpu,ranks=2")
    over = [name for name, node in nodes.items() if node["over"]]
    assert code == 1 and over[0] == "ffn_inp-1" and "l_out-1" in over


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("-b", "cpu,ranks=9"), "ranks must be a whole number from 1 to 8, got '9'"),
        (("-b", "cpu,ranks=two"), "ranks must be a whole number from 1 to 8, got 'two'"),
        (("-b", "cpu,ranks=2,ep=3"), "ep must be 0 or 1"),
        (("-b", "cpu,pp=2"), "pp= and ep= divide ranks, got 'cpu,pp=2'"),
        (("-a", "cpu,ranks=2", "-b", "cpu"), "ranks= is of the other side (-b)"),
        (("-a", "cpu,ranks=2", "-b", "cpu,ranks=4"), "ranks= is of the other side (-b)"),
        (("-a", "values.npz", "-b", "cpu,ranks=2"), "ranks= is of the other side (-b)"),
        (("-b", "cpu,ranks=2", "--cut"), "need sides of the same nodes, one over ranks has others"),
    ],
)
def test_sides_that_can_not_be(
    model: Path, given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["diff", str(model), "--tokens", "3,1", *given]) == 2
    assert said in capsys.readouterr().err
