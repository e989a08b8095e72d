"""`run --profile` over ranks: joins and waits told apart, what all ranks tell, and nodes of the graph of all ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tiny import write_model

from graphrt.op import Work
from graphrt.tools import cli
from graphrt.tools.profile import over_ranks
from graphrt.tools.profile.over_ranks import Told, told_apart
from graphrt.tools.profile.phase import Part, Phase


def part(label: str, name: str, meets: str = "") -> Part:
    return Part(label, label, (name,), Work(1, 1), lambda: lambda: None, lambda: None, False, meets)


def told(runs: Sequence[Sequence[float]], seconds: Sequence[float], *parts: Part, by_mean: bool = False) -> Told:
    return Told.of(
        Phase("decode", 1, len(runs), [*parts], [*seconds], sum(seconds), None, by_mean, [[*run] for run in runs])
    )


PRODUCT, JOIN, ROW = part("MUL_MAT", "q"), part("ALL_REDUCE", "joined", "ALL_REDUCE"), part("ADD", "sum")
FUSED = part("ALL_REDUCE+ADD", "added", "ALL_REDUCE")


@pytest.mark.parametrize(("by_mean", "join"), [(True, 4 / 3), (False, 1.0)])
def test_who_comes_last_in_a_run_tells_what_a_join_takes(by_mean: bool, join: float) -> None:
    """The ranks are late in turn, so that neither's own times are free of waits."""
    first = told([[1, 1, 1], [5, 9, 1], [1, 2, 1]], [2, 4, 1], PRODUCT, JOIN, ROW, by_mean=by_mean)
    second = told([[5, 9, 1], [1, 1, 1], [1, 7, 1]], [2, 5, 1], PRODUCT, JOIN, ROW, by_mean=by_mean)
    found = told_apart([first, second])
    assert [times.parts["ALL_REDUCE"] for times in found] == pytest.approx([join, join])
    assert [times.waits["ALL_REDUCE"] for times in found] == pytest.approx([4 - join, 5 - join])
    assert found[0].parts | {"ALL_REDUCE": 0} == {"MUL_MAT": 2, "ALL_REDUCE": 0, "ADD": 1}


def test_joins_of_one_label_add_up_and_lost_runs_are_left_out() -> None:
    first = told([[1, 2], [2, 2]], [1.5, 2], JOIN, JOIN, by_mean=True)
    second = told([[3, 1]], [3, 1], JOIN, JOIN, by_mean=True)
    assert [times.parts["ALL_REDUCE"] for times in told_apart([first, second])] == [2, 2]  # of the first run alone
    first, second = (told([], seconds, JOIN, JOIN) for seconds in ([4, 1], [2, 3]))
    assert [times.waits["ALL_REDUCE"] for times in told_apart([first, second])] == [2, 2]


def test_stages_wait_for_what_others_send() -> None:
    """Ranks of a stage meet; who receives waits all the while."""
    send, receive = part("SEND", "given", "SEND"), part("RECV", "taken", "RECV")
    early = [told([[n, 1]], [n, 1], JOIN, send) for n in (3, 2)]
    late = [told([[7, n]], [7, n], receive, JOIN) for n in (5, 6)]
    found = told_apart([*early, *late], stages=2)
    assert [times.parts for times in found[:2]] == [{"ALL_REDUCE": 2, "SEND": 1}] * 2
    assert [times.waits for times in found] == [
        {"ALL_REDUCE": 1, "SEND": 0}, {"ALL_REDUCE": 0, "SEND": 0},
        {"RECV": 7, "ALL_REDUCE": 0}, {"RECV": 7, "ALL_REDUCE": 1},
    ]  # fmt: skip
    text = "\n".join(over_ranks.lines([found]))
    assert "waits: RECV" in text and "waits: SEND" not in text and "rank 3" in text


def test_nodes_are_those_of_the_graph_of_all_ranks() -> None:
    ranks = [told([[1, 2, 3, 4]], [1, 2, 3, 4], PRODUCT, JOIN, FUSED, part("SEND", "result_output", "SEND"))] * 4
    assert set(over_ranks.by_node(ranks[:2])) == {"q", "joined", "added", "result_output"} | {
        "q@1", "added@1", "result_output@1",
    }  # fmt: skip
    found = over_ranks.by_node(ranks, stages=2)
    assert "joined@2" in found and "joined@3" not in found
    assert {name for name in found if name.startswith("result_output")} == {"result_output", "result_output@2"}
    beside = [told([[1]], [1], part("MUL_MAT+ALL_REDUCE", "joined", "ALL_REDUCE"))] * 2
    assert set(over_ranks.by_node(beside)) == {"joined"}, "a sum beside its product is one sum as well"


@pytest.mark.parametrize(("how", "n", "planned"), [
    (("--tp", "2"), 2, ("--ranks", "2")), (("--tp", "2", "--pp", "2"), 4, ("--ranks", "4", "--pp", "2")),
])  # fmt: skip
def test_run_profiles_ranks(tmp_path: Path, how: tuple[str, ...], n: int, planned: tuple[str, ...]) -> None:
    model, trace, overlay = tmp_path / "m.gguf", tmp_path / "p.json", tmp_path / "o.json"
    write_model(model, "llama", tokenizer="spm")
    given = ["run", str(model), "-p", "hello the sea", "--raw", "-n", "4", "--temp", "0", "--backend", "cpu", "-t", "1"]
    more = ["--profile", str(trace), "--profile-steps", "2", "--profile-overlay", str(overlay)]

    def ran(*last: str) -> subprocess.CompletedProcess[bytes]:
        argv = [sys.executable, "-m", "graphrt", *given, *more, *how, *last]
        return subprocess.run(argv, capture_output=True, timeout=300)

    done = ran("--json")
    assert done.returncode == 0, done.stderr.decode()
    found: Any = json.loads(done.stdout)["profile"]
    assert [[times["rank"] for times in phase] for phase in found["ranks"]] == [list(range(n))] * 2
    decode = found["ranks"][1]
    assert all(any(row["group"] == "ALL_REDUCE" and row["us"] > 0 for row in times["parts"]) for times in decode)
    for rank in range(n):
        events = json.loads((tmp_path / f"p-{rank}-of-{n}.json").read_text())["traceEvents"]
        assert sum("ALL_REDUCE" in event["name"] for event in events) >= 8
    html = ["dump", str(model), *planned, "--backend", "cpu", "--format", "html", "-o", str(tmp_path / "d.html")]
    assert cli.main([*html, "--overlay", str(overlay)]) == 0
    if n == 2:
        said = ran().stderr.decode()
        assert said.count("the first rank's:") == said.count("decode on 2 ranks: us of a step") == 1
        assert f"traces: {tmp_path}/p-0-of-2.json, and so of each rank" in said
