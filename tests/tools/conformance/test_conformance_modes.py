"""The other ways of `graphrt test`: support, perf, grad, cases from models, files and random graphs; and the judge."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from support import broken_backends
from support.toy import ToyBackend

from graphrt import get_backend, new_input, op, ops
from graphrt.backend import Group, Place
from graphrt.backends.cpu import CpuBackend
from graphrt.backends.cpu.reference import Reference
from graphrt.dtypes import dtype
from graphrt.errors import GraphError
from graphrt.judge import Verdict, judge, judge_order, judge_written
from graphrt.patterns import describe
from graphrt.program import Program
from graphrt.tensor import Tensor
from graphrt.testing import Case, Init, Inputs, Uniform, all_cases, quantize
from graphrt.tools import cli
from graphrt.tools.conformance.cases.graphs import graph_cases, run_graph
from graphrt.tools.conformance.cases.model import model_cases
from graphrt.tools.conformance.cases.operands import Operand, case_of
from graphrt.tools.conformance.cases.programs import seeded_graph
from graphrt.tools.conformance.cases.test_file import GLU, OPS, UNARY, file_cases
from graphrt.tools.conformance.run.grad import check_gradient
from graphrt.tools.conformance.run.step import run_case
from graphrt.tools.conformance.run.support import table


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPHRT_CACHE", str(tmp_path / "cache"))


# -- support, perf, grad


def test_the_support_table_counts_and_gives_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    found = table(list(broken_backends.cases()), [("toy", ToyBackend()), ("cpu", get_backend("cpu"))])
    assert found["ADD"]["toy"].word == "full" and found["SQRT"]["toy"].word == "none"
    assert found["SQRT"]["toy"].reasons == {"op SQRT is unknown to it": 1} and found["SQRT"]["cpu"].word == "full"
    args = ["test", "support", "-b", "support.toy:ToyBackend", "--cases", "support.broken_backends"]
    assert cli.main(args) == 0 and "1  SQRT: op SQRT is unknown to it" in capsys.readouterr().out
    assert cli.main([*args, "--output", "csv", "--require-supported"]) == 1
    rows = {row["op"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert rows["ADD"]["taken"] == "4" and rows["SQRT"]["reason"] == "op SQRT is unknown to it"
    assert cli.main([*args, "--output", "md"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "| op | support.toy:ToyBackend |",
        "|---|---|",
        "| ADD | full 4/4 |",
    ]


def test_support_needs_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans for a GPU that is not here."""
    TritonBackend = pytest.importorskip("graphrt.backends.triton").TritonBackend
    monkeypatch.setattr(TritonBackend, "unusable", classmethod(lambda cls: "it needs a GPU"))
    args = ["test", "support", "-o", "MUL_MAT"]
    assert cli.main([*args, "-b", "triton"]) == 0
    out, err = capsys.readouterr()
    assert "MUL_MAT  full" in out and "rounded" not in out and "planned for NVIDIA H100" in err
    assert cli.main([*args, "-b", "triton-fast", "--device", "RTX 4090"]) == 0
    out, err = capsys.readouterr()
    assert "with activations rounded to int8" in out and "planned for NVIDIA GeForce RTX 4090" in err
    assert cli.main([*args, "-b", "cpu", "--device", "h100"]) == 2
    assert "'cpu' plans for no device" in capsys.readouterr().err
    assert cli.main(["test", "-b", "triton", "--device", "h100"]) == 2
    assert "--device is for the mode support" in capsys.readouterr().err


def test_perf_does_not_time_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "test",
        "perf",
        "-b",
        "support.broken_backends:Swapping",
        "--cases",
        "support.broken_backends",
        "-o",
        "ADD|SQRT",
    ]
    assert cli.main([*args, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    timed = {c["case"]: c["seconds"] for c in report["cases"]}
    assert timed[broken_backends.SPOILT] is None and timed["SQRT()"] is None and timed["ADD(kind=plain)"] > 0
    assert report["ceilings"]["gb_per_s"] > 0


def test_grad_checks_every_op_s_backward(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", "grad", "-b", "cpu", "-o", "SQR|SOFT_MAX", "-j", "0", "-v"]) == 0
    out = capsys.readouterr().out
    assert "SQR       1 passed" in out and "SOFT_MAX  5 passed" in out
    assert "TOP_K  " in out, "ops without a gradient, with the reason"
    assert cli.main(["test", "grad", "-b", "cpu", "-o", "SQR|SCALE", "-j", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(c["op"], c["status"]) for c in report["cases"]] == [("SCALE", "pass"), ("SQR", "pass")]
    assert cli.main(["test", "grad", "-o", "SCALE", "--set", "full"]) == 2
    assert "cases of its own" in capsys.readouterr().err
    assert cli.main(["test", "grad", "-o", "ARGMAX"]) == 2
    assert "there must be a case to run" in capsys.readouterr().err


def test_grad_finds_a_wrong_rule_and_a_wrong_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(node: Tensor, d: Tensor, wanted: frozenset[str]) -> dict[str, Tensor]:
        return {"a": ops.mul(d, node["a"])}

    with monkeypatch.context() as patch:
        patch.setitem(op._BACKWARD, "SQR", doubled)
        assert cli.main(["test", "grad", "-b", "cpu", "-o", "SQR", "-j", "0"]) == 1
        assert "FAILED: SQR(grad=plain)\n  finite differences: input 'a' at" in capsys.readouterr().out
    monkeypatch.setattr(CpuBackend, "reference_of", lambda self, node: Reference(lambda node, *s: s[0] * 1.001))
    assert cli.main(["test", "grad", "-o", "SQR", "-b", "cpu", "-j", "0"]) == 1
    assert "on cpu: off by" in capsys.readouterr().out


def test_a_wrong_gradient_is_found() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 5)), rng.normal(size=(5, 3))
    right = check_gradient(np.matmul, lambda a, b, d: (d @ b.T, a.T @ d), [a, b])
    assert right.relative < 1e-8
    wrong = check_gradient(np.matmul, lambda a, b, d: (d @ b.T, a.T @ d * 1.001), [a, b])
    assert wrong.relative > 5e-4 and wrong.where[0] == 1
    with pytest.raises(GraphError, match="its input's shape"):
        check_gradient(np.matmul, lambda a, b, d: (d, d), [a, b])


# -- cases from elsewhere


def test_every_node_of_a_model_is_a_case(tmp_path: Path) -> None:
    from support import tiny

    path = tmp_path / "tiny.gguf"
    tiny.write_model(path, "llama")
    cases = list(model_cases(path))
    assert len({str(c) for c in cases}) == len(cases)
    attention = [str(c) for c in cases if c.op == "FLASH_ATTN_EXT"]
    assert len(attention) == 2 and all("nb[" in text for text in attention)
    assert all(run_case(c, get_backend("cpu", exact=False)).status == "pass" for c in cases)


def _line(op: str, kind: int, ne: tuple[int, ...], words: list[int], *sources: tuple[int, tuple[int, ...]]) -> str:
    shown = [f"{t} {' '.join(map(str, numbers))}" for t, numbers in sources]
    words = words + [0] * (16 - len(words))
    fields = [OPS.index(op), kind, *ne, len(words), *words, len(sources), *shown, "-"]
    return " ".join(map(str, fields))


def _bits(*values: float) -> list[int]:
    return [int(w) for w in np.array(values, np.float32).view(np.int32)]


def test_a_file_of_llama_cpps_exporter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    f32, f16, i64 = 0, 1, 27
    row = (64, 8, 1, 1, 4, 256, 2048, 2048)
    heads = (64, 8, 2, 1, 4, 512, 256, 4096)  # q with its heads side by side in a row
    cache = (64, 32, 2, 1, 2, 256, 128, 8192)
    lines = [
        _line("RMS_NORM", f32, (64, 8, 1, 1), _bits(1e-5), (f32, row)),
        _line("FLASH_ATTN_EXT", f32, (64, 2, 8, 1), _bits(0.125, 0.0, 30.0), (f32, heads), (f16, cache), (f16, cache),
              (f16, (32, 8, 1, 1, 2, 64, 512, 512))),
        _line("SET_ROWS", f16, (128, 32, 1, 1), [], (f32, (128, 8, 1, 1, 4, 512, 4096, 4096)),
              (i64, (8, 1, 1, 1, 8, 64, 64, 64)), (f16, (128, 32, 1, 1, 2, 256, 8192, 8192))),
        _line("UNARY", f32, (64, 8, 1, 1), [UNARY.index("GELU_ERF")], (f32, row)),
        _line("GLU", f32, (64, 8, 1, 1), [GLU.index("SWIGLU"), 0], (f32, row), (f32, row)),
        _line("UNARY", f32, (64, 8, 1, 1), [UNARY.index("XIELU")], (f32, row)),
        _line("SSM_SCAN", f32, (64, 8, 1, 1), [], (f32, row)),
    ]  # fmt: skip
    path = tmp_path / "ops.txt"
    path.write_text("\n".join(lines) + "\n")
    cases, unknown = file_cases(path)
    assert [c.op for c in cases] == ["RMS_NORM", "FLASH_ATTN_EXT", "SET_ROWS", "UNARY", "GLU"]
    assert unknown == {"UNARY of kind xielu is not there": 1, "op SSM_SCAN is not there": 1}
    attention = cases[1].build().result
    assert attention.params.softcap == 30.0 and attention.src[0].nb == (4, 512, 256, 4096)
    assert cli.main(["test", "-b", "cpu", "--test-file", str(path), "-j", "0"]) == 0
    assert "left out 1: op SSM_SCAN is not there" in capsys.readouterr().err
    path.write_text("7 0 64 eight\n")
    assert cli.main(["test", "-b", "cpu", "--test-file", str(path)]) == 2


@pytest.mark.parametrize("nb", [(4, 16, 64, 192), (64, 4, 16, 192), (48, 16, 4, 192), (4, 32, 96, 384)])
def test_strides_come_through(nb: tuple[int, int, int, int]) -> None:
    f32 = dtype("f32")
    case = case_of("CONT", None, [Operand(f32, (4, 3, 3, 2), nb, 0, 4096, 64)])
    source = case.build().result.src[0]
    assert source is not None and source.nb == nb and source.ne == (4, 3, 3, 2) and source.view_offs == 64


def test_random_graphs_find_a_wrong_fusion() -> None:
    cases = list(graph_cases(60))
    status = {(c.number, c.fused): run_graph(c, broken_backends.BadFusing(), 0).status for c in cases}
    assert all(status[number, False] == "pass" for number in range(60))
    assert sum(status[number, True] != "pass" for number in range(60)) > 3
    assert all(run_graph(c, ToyBackend(), 0).status == "pass" for c in cases)


def test_random_graphs_are_a_function_of_the_seed() -> None:
    keys = [[n.op for n in seeded_graph(i).graph.nodes] for i in range(50)]
    assert keys == [[n.op for n in seeded_graph(i).graph.nodes] for i in range(50)]
    assert len({tuple(k) for k in keys}) > 40 and len({op for k in keys for op in k}) > 12


# -- the judge


def _judged(spoil: object, shape: tuple[int, ...] = (2, 16, 4, 64)) -> Verdict:
    """A right attention result (f32 caches), spoilt by a function."""
    q, k = new_input("f32", 64, 16, 4, 2, name="q"), new_input("f32", 64, 8, 4, 2, name="k")
    node = ops.flash_attn_ext(q, k, k, None, 1.0)
    expected = np.random.default_rng(1).normal(size=node.shape)
    low = expected.astype(np.float32).astype(np.float64)
    actual = low.copy()
    spoil(actual)  # type: ignore[operator]
    return judge(node, actual, expected, low)


@pytest.mark.parametrize(
    "index, text",
    [
        (np.s_[:, :, 3], "all of head 3 of 4, the last"),
        (np.s_[:, -5:], "all of only the last 5 of 16 query rows"),
        (np.s_[..., 1::16], "all of every 16th column from 1 of 64"),
        (np.s_[..., 32:64], "all of one tile of 32 columns (32 to 63 of 64)"),
        (np.s_[1, 7, 2], "all of head 2 of 4 in query row 7 of 16 in sequence 1 of 2, the last"),
    ],
)
def test_where_it_is_wrong_is_said_in_words(index: object, text: str) -> None:
    def spoil(actual: np.ndarray) -> None:
        actual[index] += 1.0  # type: ignore[index]

    verdict = _judged(spoil)
    assert not verdict.ok and text in verdict.message, verdict.message
    assert verdict.worst is not None and len(verdict.worst) == 4


def test_one_wrong_row_can_not_hide_in_the_sum() -> None:
    q, k = new_input("f32", 64, 512, 32, name="q"), new_input("f16", 64, 512, 32, name="k")
    node = ops.flash_attn_ext(q, k, k, None, 1.0)
    expected = np.random.default_rng(1).normal(size=node.shape)
    expected[0, 1:] *= 0.01  # the first query sees one key, the others average
    low = expected * (1 + 1e-3)
    actual = expected.copy()
    actual[0, 400, 7] = 0.0
    verdict = judge(node, actual, expected, low)
    assert verdict.nmse is not None and verdict.limit is not None and verdict.nmse < verdict.limit
    assert not verdict.ok and "in one row (sequence 0, query row 400, head 7)" in verdict.message


def test_nan_and_infinity_are_decided() -> None:
    node = ops.sqr(new_input("f32", 4, name="a"))
    expected = np.array([1.0, np.nan, np.inf, 1e60]).reshape(1, 1, 1, 4)
    right = np.array([1.0, np.nan, np.inf, np.inf]).reshape(1, 1, 1, 4)
    assert judge(node, right, expected, right).ok
    for i, bad in [(0, np.nan), (0, np.inf), (1, 0.0), (2, -np.inf), (2, 3.0), (3, np.nan)]:
        wrong = right.copy()
        wrong[..., i] = bad
        assert not judge(node, wrong, expected, right).ok, (i, bad)
    zeros = np.zeros((1, 1, 1, 4))
    assert judge(node, zeros, zeros, zeros).ok and not judge(node, zeros + 1e-30, zeros, zeros).ok


def test_a_low_result_that_is_useless_does_not_raise_the_limit() -> None:
    node = ops.sqr(new_input("f32", 4, name="a"))
    expected = np.ones((1, 1, 1, 4))
    verdict = judge(node, expected * 1.001, expected, np.full(expected.shape, np.nan))
    assert not verdict.ok and verdict.limit == 2.0**-36


def test_quantized_results_may_be_one_step_off_in_few_elements() -> None:
    q8_0 = dtype("q8_0")
    node = ops.cpy(new_input("f32", 64, 8, name="a"), new_input("q8_0", 64, 8, name="b"))
    right = quantize(np.random.default_rng(0).normal(size=node.shape), q8_0)
    assert judge_written(node, right, right).ok
    for count, step, ok in [(3, 1, True), (1, 3, False), (40, 1, False)]:
        actual = right.copy()
        blocks = actual.reshape(-1, 34)
        for i in range(count):
            at = blocks[i % len(blocks), 2:].view(np.int8)
            j = i // len(blocks)
            at[j] += step if at[j] < 100 else -step
        assert judge_written(node, actual, right).ok is ok, (count, step)


def test_indices_are_judged_by_what_they_point_at() -> None:
    a = new_input("f32", 4, 1, name="a")
    values = np.array([[1.0, 3.0, 3.0, 2.0]])
    order, top = ops.argsort(a), ops.top_k(a, 2)
    assert judge_order(order, np.array([[0, 3, 2, 1]]), np.array([[0, 3, 1, 2]]), values).ok
    assert not judge_order(order, np.array([[0, 3, 1, 1]]), np.array([[0, 3, 1, 2]]), values).ok
    assert not judge_order(order, np.array([[3, 0, 1, 2]]), np.array([[0, 3, 1, 2]]), values).ok
    assert judge_order(top, np.array([[2, 1]]), np.array([[1, 2]]), values).ok
    assert not judge_order(top, np.array([[2, 4]]), np.array([[1, 2]]), values).ok


def test_patterns_without_one() -> None:
    bad = np.ones((1, 2, 3, 4), np.bool_)
    assert describe(bad, "ADD") == "everywhere (100 % of all elements)"


def test_a_dropped_softcap_is_far_over_the_limit() -> None:
    from dataclasses import replace

    from graphrt.op import build, op_spec

    picked = [c for c in all_cases("FLASH_ATTN_EXT") if c.axes.get("softcap") and "far" not in str(c)][:6]
    for case in picked:
        inputs = case.build()
        node = inputs.result
        dropped = build(op_spec(node.op), *node.src, params=replace(node.params, softcap=0.0))

        class Dropping(type(get_backend("cpu"))):  # type: ignore[misc]
            def _bind_node(self, node, *rest):  # type: ignore[no-untyped-def]
                node.params = dropped.params  # noqa: B023
                return super()._bind_node(node, *rest)

        outcome = run_case(Case(case.op, dict(case.axes), case.make), Dropping())
        assert outcome.status == "fail" and outcome.nmse > 4 * outcome.limit, outcome  # type: ignore[operator]


# -- results computed twice


class RepairingProgram(Program):
    def redone(self) -> int:
        return 3


class Repairing(CpuBackend):
    """Right, but says that it computed pieces of every result twice."""

    name: ClassVar[str] = "repairing"

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        return RepairingProgram(groups, super().compile(groups, place))


def _attention(init: Init | None = None, hidden: float = 0.0) -> Case:
    def make(inputs: Inputs) -> Tensor:
        q, k = inputs("q", "f32", (32, 9, 2), init), inputs("k", "f16", (32, 20, 2))
        v = inputs("v", "f16", (32, 20, 2))
        inputs.values[v][0, 0, 3] = hidden
        return ops.flash_attn_ext(q, k, v, None, 0.2)

    return Case("FLASH_ATTN_EXT", {"hidden": hidden}, make)


@pytest.mark.parametrize(
    ("case", "called_for"),
    [(_attention(), False), (_attention(Uniform(-900.0, 900.0)), True), (_attention(hidden=np.nan), True)],
    ids=["plain", "huge", "NaN"],
)
def test_a_repair_that_the_inputs_do_not_call_for_fails(case: Case, called_for: bool) -> None:
    outcome = run_case(case, Repairing())
    assert outcome.status == ("pass" if called_for else "fail")
    assert called_for or "3 tiles were done again" in outcome.message
