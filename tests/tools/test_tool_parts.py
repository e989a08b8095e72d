"""More parts of the tools by themselves: the honest low-precision result, cases of nodes, what is said and timed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphrt import Graph, Tensor, new_input, ops
from graphrt.errors import GraphError
from graphrt.judge import PRECISIONS, Verdict, precision
from graphrt.testing import Case, all_cases, nmse
from graphrt.tools.bench.op_report import Row, _met, mean_of_llama
from graphrt.tools.bench.op_shapes import Mark, shapes_of
from graphrt.tools.bench.timing import FEWEST, MOST, Ceilings, Times, runs_for
from graphrt.tools.common import print_json, without_last_newline
from graphrt.tools.conformance.cases.model import graph_cases
from graphrt.tools.conformance.run.lowprec import to_int8, why_not_rounded
from graphrt.tools.conformance.run.reference import know
from graphrt.tools.diff.nodes import NodeDiff
from graphrt.tools.inspect import checked_json
from graphrt.tools.inspect.checked_json import Checked, parsed
from graphrt.tools.inspect.describe import describe
from graphrt.tools.inspect.labels import heading, source_text, view_text
from graphrt.tools.inspect.node_stats import ENDS, ends, eval_callback_lines, stats_of
from graphrt.tools.inspect.rebuilt import params_of
from graphrt.tools.inspect.traced_step import looked_at, n_steps
from graphrt.tools.trace import first_nan
from graphrt.tools.verbs import trace

# -- the low-precision result, which tolerances come from


def _kinds() -> list[Case]:
    """A small case of each kind that an op has: of what its axes say in words, switches and parameters."""
    found: dict[object, Case] = {}
    for case in all_cases():
        if case.needs_bytes or case.axes.get("n_kv", 0) > 300 or math.prod(case.axes.get("ne", (1,))) > 9000:  # type: ignore[operator, arg-type]
            continue
        words = {k: v for k, v in case.axes.items() if k in ("kind", "mask", "sinks", "softcap", "max_bias", "params")}
        found.setdefault((case.op, str({k: v is not None and (v if k in ("kind", "params") else v != 0.0)
                                        for k, v in words.items()})), case)  # fmt: skip
    return list(found.values())


def test_an_honest_low_precision_result_is_within_the_ceiling() -> None:
    """One that is wrong would make every tolerance as wide as the ceiling, and the suite blind."""
    checked = set()
    for case in _kinds():
        inputs = case.build()
        known = know(inputs)
        if known.low is not None:
            off = max(math.sqrt(nmse(low, known.expected)) for low in known.low)
            assert off <= PRECISIONS[precision(inputs.result)].ceiling, f"{case}: {off:.3g}"
            checked.add(case.op)
    assert len(checked) >= 20


def test_eight_bits_are_multiples_of_the_127th_part_of_a_groups_largest() -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32))
    x[1, :32] = 0.0
    groups, rounded = x.reshape(-1, 32), to_int8(x).reshape(-1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    assert ((rounded - groups).abs() <= 0.5001 * step).all() and not rounded[2].any()
    codes = rounded[step[:, 0] > 0] / step[step[:, 0] > 0]
    assert (codes - codes.round()).abs().max() < 1e-3 and codes.abs().max() == pytest.approx(127)


def test_only_products_of_quantized_weights_in_whole_groups_may_be_rounded() -> None:
    def product(kind: str, k: int = 64) -> Tensor:
        return ops.mul_mat(new_input(kind, k, 4, name="w"), new_input("f32", k, 2, name="x"))

    assert why_not_rounded(product("q8_0"), "int8") is None
    assert "the only type" in str(why_not_rounded(product("q8_0"), "int4"))
    for node in (product("f16"), product("f32", 40), ops.sqr(new_input("f32", 64, name="a"))):
        assert "products of quantized weights" in str(why_not_rounded(node, "int8"))


def test_a_nodes_case_keeps_what_shares_memory_and_drops_absent_sources_at_the_end() -> None:
    q, k = new_input("f32", 6, 2, 3, name="q"), new_input("f16", 6, 4, name="k")
    shared = ops.flash_attn_ext(q, k, ops.view(k, (4, 4), k.nb[1:2]), None, 1.0)
    (case,) = graph_cases(Graph(shared))
    node = case.build().result
    assert node.src[1].root is node.src[2].root is not node.src[0].root  # type: ignore[union-attr]
    assert len(node.src) == 3 and "-" not in str(case.axes["src"])
    sinks = ops.flash_attn_ext(q, k, k, None, 1.0, sinks=new_input("f32", 3, name="s"))
    (case,) = graph_cases(Graph(sinks))
    assert case.build().result.src[3] is None and case.build().result.src[4] is not None


# -- trace


def test_a_view_of_a_view_is_read_as_what_computes() -> None:
    x = ops.sqr(new_input("f32", 4, 4, name="a"), name="x")
    deep = ops.transpose(ops.reshape(ops.view(x, (4, 4)), 8, 2))
    graph = Graph(deep, ops.transpose(new_input("f32", 4, 4, name="b")))
    index = {t: i for i, t in enumerate(graph.nodes)}
    assert looked_at(graph, [index[deep]]) == {index[x]} == looked_at(graph, [index[x]])
    assert looked_at(graph, [len(graph.nodes) - 1]) == {len(graph.nodes) - 1}, "a view of an input is itself"


@pytest.mark.parametrize(
    "tokens, phase, n", [(8, "prefill", 1), (9, "prefill", 2), (16, "decode", 3), (1, "decode", 2)]
)
def test_steps_of_a_prompt(tokens: int, phase: str, n: int) -> None:
    session: Any = SimpleNamespace(n_batch=8)
    assert n_steps(session, tokens, phase) == n


@pytest.mark.parametrize("n", [2 * ENDS - 1, 2 * ENDS, 2 * ENDS + 1])
def test_rows_up_to_six_are_shown_whole(n: int) -> None:
    node = Tensor("f32", (n, n), name="x", op="SQR")
    lines = list(eval_callback_lines(node, np.arange(float(n * n)).reshape(1, 1, n, n)))
    whole = n <= 2 * ENDS
    assert any("..." in line for line in lines) is not whole
    assert sum(line.startswith(" " * 12 + "[") for line in lines) == min(n, 2 * ENDS)
    assert np.array(ends(np.zeros((1, n)))).shape == (1, min(n, 2 * ENDS))


@pytest.mark.parametrize("bad, vanished", [(np.nan, True), (np.inf, True), (1.0, False)])
def test_what_cutting_does_to_logits_is_told(bad: float, vanished: bool) -> None:
    def head(before: float, after: float) -> dict[str, Any]:
        logits = [np.array([1.0, x], np.float32) for x in (before, after)]
        step: Any = SimpleNamespace(logits=logits[1], ids=[1], n_past=0)
        info = describe(Graph(ops.sqr(new_input("f32", 4, name="a"))))
        with np.errstate(invalid="ignore"):
            change = stats_of((logits[1] - logits[0]).astype("f8"))
        return trace._head(step, info, info, stats_of(logits[0].astype("f8")), change, 1)

    assert head(bad, 1.0)["vanished"] is vanished
    assert not head(bad, np.inf)["vanished"] and not head(bad, np.nan)["vanished"]
    assert head(1.0, 3.0)["logits"]["max_abs_change"] == 2.0


def test_sources_up_to_a_size_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ops.sqr(new_input("f32", 4, name="a"), name="x")
    info = describe(Graph(x)).tensors[1]
    read: list[str] = []
    step: Any = SimpleNamespace(values=lambda t: (read.append(t.name), np.array([1.0, np.nan, 2.0, 3.0]))[1])
    for most, known in ((3, False), (4, True)):
        monkeypatch.setattr(first_nan, "MAX_ELEMENTS", most)
        found = first_nan._source(step, x, info)
        assert (found.stats is not None, found.clean) == (known, False if known else None)
    assert read == ["x"], "of what is too large nothing is read"


# -- what is read and said


def test_json_from_outside_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_json, "MAX_CHARS", 6)
    assert parsed("[1, 2]", "a list").wholes(2) == (1, 2)
    with pytest.raises(GraphError, match="must be at most 6 characters of JSON, got 7"):
        parsed("[1, 23]", "a list")
    monkeypatch.undo()
    assert parsed(str(2**53), "a number").whole() == 2**53
    for text, read, said in (
        (str(2**53 + 1), lambda at: at.whole(), "a whole number from 0 to"),
        ("[1, 2, 3]", lambda at: at.items(2), "an array of at most 2"),
        ("[1, 2, 3]", lambda at: at.wholes(2), "an array of 2 whole numbers"),
        ('"abc"', lambda at: at.text(2), "a text of at most 2 characters"),
        ("true", lambda at: at.number(), "a number or one of inf"),
        ("[" * 100_000, lambda at: at.value, "of few levels|it is not"),
        ("NaN", lambda at: at.value, "not strict JSON"),
    ):
        with pytest.raises(GraphError, match=said):
            read(parsed(text, "it"))  # type: ignore[no-untyped-call]


def test_params_with_lists_become_the_ops_own_again() -> None:
    assert params_of(Checked({"ne": [4, 2, 1, 1]}), "RESHAPE") == {"ne": (4, 2, 1, 1)}
    with pytest.raises(GraphError, match=r"\$ must have no field 'more', only ne"):
        params_of(Checked({"ne": [4, 2, 1, 1], "more": 1}), "RESHAPE")
    assert params_of(Checked(None), "ADD") is None


def test_one_newline_at_the_end_belongs_to_no_prompt() -> None:
    assert [without_last_newline(t) for t in ("a\n", "a\n\n", "a", "\n", "a\n b")] == ["a", "a\n", "a", "", "a\n b"]


def test_json_is_strict_at_any_depth(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, (math.inf, {"b": math.nan})], 2: -math.inf, "c": 0.0})
    assert capsys.readouterr().out == '{"a": [1, [null, {"b": null}]], "2": null, "c": 0.0}\n'


def test_sources_views_and_headings_in_words() -> None:
    q, k = new_input("f32", 4, 1, name="q"), new_input("f32", 4, 3, name="k")
    sinks = new_input("f32", 1, name="s")
    look = ops.view(k, (4, 2), offs=16, name="look")
    first = ops.flash_attn_ext(q, k, k, None, 1.0, name="plain")
    info = describe(Graph(first, ops.flash_attn_ext(q, k, k, None, 1.0, sinks=sinks, name="sunk"), look))
    by_name = {t.name: t for t in info.tensors}
    assert source_text(info, by_name["plain"]) == "q, k, k" and source_text(info, by_name["sunk"]) == "q, k, k, -, s"
    assert view_text(info, by_name["look"]) == "of k +16" and view_text(info, by_name["plain"]) == ""
    shown = {n: heading(SimpleNamespace(title="m", phase="prefill", n_tokens=n)) for n in (1, 2)}  # type: ignore[arg-type]
    assert shown == {1: "m, prefill of 1 token", 2: "m, prefill of 2 tokens"}


def test_how_far_a_node_is_off_in_parts_of_its_tolerance() -> None:
    def ratio(nmse: float | None, limit: float | None, ok: bool = True) -> float:
        return NodeDiff("x", 0, Verdict(ok, "", nmse, limit), None, None, None).ratio

    assert ratio(4e-6, 1e-6) == pytest.approx(2.0) and ratio(0.0, 1e-6) == 0.0
    assert ratio(0.0, 0.0) == 0.0 and ratio(1e-9, 0.0) == math.inf
    assert ratio(None, 0.0) == 0.0 and ratio(None, None, ok=False) == math.inf


# -- bench


def _row(seconds: float, elsewhere: str = "", llama: float | None = None) -> Row:
    shape = SimpleNamespace(name="s", is_decode=True, llama=llama, elsewhere=elsewhere)
    return Row(shape, "ok", "", seconds, (seconds, seconds), 10, 1, 1e9, 1e6, 0.0)  # type: ignore[arg-type]


def test_a_mark_is_met_at_its_value() -> None:
    row = _row(1e-5)
    assert row.tflop_per_s is not None
    for unit, value, worse in (("us", 1e6 * 1e-5, 0.99), ("TFLOP/s", row.tflop_per_s, 1.01)):
        assert _met(row, Mark(value, unit), {}) is True and _met(row, Mark(worse * value, unit), {}) is False


def test_the_mean_is_of_llama_cpps_very_shapes() -> None:
    rows = [_row(1e-5, llama=20.0), _row(1e-5, llama=5.0), _row(1e-5, "H32/8", llama=1000.0), _row(1e-5)]
    found = mean_of_llama(rows)
    assert found is not None and found == (pytest.approx(1.0), 2) and mean_of_llama(rows[2:]) is None


def test_clocks_and_ceilings() -> None:
    assert [runs_for(s) for s in (0.0, 1e-9, 0.01, 10.0)] == [MOST, MOST, 30, FEWEST]
    one, other = Ceilings(10.0, {"f16": 2.0, "bf16": 5.0}), Ceilings(9.0, {"f16": 3.0, "bf16": 4.0})
    assert one.best(other) == other.best(one) == Ceilings(10.0, {"f16": 3.0, "bf16": 5.0})
    both = Times([1.0, 3.0]) + Times([2.0], "by the host")
    assert (both.median, both.note) == (2.0, "by the host")


def test_sets_of_shapes_grow() -> None:
    quick, default, full = (
        {s.name for s in shapes_of("FLASH_ATTN_EXT", which)} for which in ("quick", "default", "full")
    )
    assert quick < default < full
