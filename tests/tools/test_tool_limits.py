"""Parts of the tools by themselves, at equality and where other parts hide them: verdicts, peaks, units, rates."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.toy import ToyBackend

from graphrt import Graph, Tensor, get_backend, new_input, new_tensor, ops
from graphrt.backend import Usage
from graphrt.errors import GraphError
from graphrt.judge import Verdict
from graphrt.printing import human_bytes
from graphrt.schedule import schedule
from graphrt.tools.bench.model import _seen, measure
from graphrt.tools.bench.workload import Batch
from graphrt.tools.bench.workload import Test as Timed
from graphrt.tools.check.report import Checked, _copies
from graphrt.tools.common import whole
from graphrt.tools.diff import report as diff_report
from graphrt.tools.diff.file import FileSide
from graphrt.tools.diff.nodes import NodeDiff, compare_all
from graphrt.tools.diff.report import Cut, Mode, Report
from graphrt.tools.inspect.checked_json import Checked as Json
from graphrt.tools.inspect.describe import GroupInfo, describe
from graphrt.tools.inspect.labels import flop_text, si
from graphrt.tools.memory.lifetimes import ArenaLives, Life
from graphrt.tools.memory.limit import Fit
from graphrt.tools.memory.report import peak
from graphrt.tools.trace.first_nan import Found, Source, _culprit, _good
from graphrt.tools.verbs import memory

INFO = describe(Graph(ops.sqr(new_input("f32", 4, name="a"), name="out")))


# -- diff


def _side(graph: Graph, values: dict[str, np.ndarray]) -> Any:
    """A side of a pair whose nodes have these values."""
    run = SimpleNamespace(exe=SimpleNamespace(graph=graph), values=lambda t: values[t.name], cells=lambda t: None)
    return SimpleNamespace(run=run, nodes={t.name: t for t in graph.nodes})


def _diffs(actual: Sequence[float], low: Sequence[float]) -> list[NodeDiff]:
    """Two layers' nodes of ones, that the other side and the low-precision run are off by these parts of."""
    first = ops.sqr(new_input("f32", 64, name="a"), name="x-0")
    graph = Graph(ops.sqr(first, name="x-1"))

    def off(parts: Sequence[float]) -> Any:
        return _side(graph, {f"x-{i}": np.full((1, 1, 1, 64), 1.0 + part) for i, part in enumerate(parts)})

    reference = off((0.0, 0.0))
    pair: Any = SimpleNamespace(
        reference=reference, other=off(actual), low=off(low), running=[reference], alike=True, plan=None
    )  # fmt: skip
    return compare_all(pair)


def test_a_free_run_may_be_off_by_four_times_the_low_one() -> None:
    """Twice for the judge, twice for FREE_FACTOR; a few more and it is over."""
    for factor, over in ((3.9, False), (4.3, True), (10.0, True)):
        assert [d.over for d in _diffs((0.0, factor * 1e-3), (0.0, 1e-3))] == [False, over]


def test_a_low_error_that_cancels_by_luck_counts_as_in_the_layers_before() -> None:
    assert [d.over for d in _diffs((0.0, 3e-3), (1e-3, 0.0))] == [False, False]
    assert [d.over for d in _diffs((0.0, 3e-3), (0.0, 0.0))] == [False, True]


def test_what_opening_a_fusion_makes_vanish_is_a_difference() -> None:
    clean = Mode("free-running", [], 0, None)
    for cut, differs in ((None, False), (Cut(1, 1, (), False), False), (Cut(1, 1, ("x",), True), True)):
        assert Report("t", ("a", "b"), INFO, [clean], cut, 1, 0).differs is differs
    bad = NodeDiff("out", 0, Verdict(False, "wrong"), None, None, None)
    assert Report("t", ("a", "b"), INFO, [clean, Mode("re-synced", [bad], 0, None)], None, 1, 0).differs


def test_of_nodes_with_one_name_elsewhere_the_last_is_meant() -> None:
    """llama.cpp calls both q-0: alone it is the normed one, beside q-0#2 the first."""
    down = ops.scale(new_input("f32", 4, name="a"), 2.0, name="q_a-0")
    graph = Graph(ops.rms_norm(down, 0.1, name="q_a_normed-0"))
    run: Any = _side(graph, {}).run
    values = np.arange(4.0)
    assert list(FileSide("f", {"q-0": values}).by_key(run)) == ["q_a_normed-0"]
    both = FileSide("f", {"q-0": values, "q-0#2": values + 1}).by_key(run)
    assert {key: float(v.reshape(-1)[0]) for key, v in both.items()} == {"q_a-0": 0.0, "q_a_normed-0": 1.0}


def test_what_a_node_writes_into_is_none_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_report, "_input_nmse", lambda pair, name: 0.0)
    rows, ids = new_input("f32", 4, 2, name="rows"), new_input("i64", 2, name="ids")
    written = ops.set_rows(ops.scale(rows, 2.0, name="doubled"), ids, new_input("f32", 4, 9, name="cache"), name="set")
    info = describe(Graph(written))
    pair: Any = None
    assert [i.name for i in diff_report._inputs(pair, info, ("set",))] == ["doubled", "ids"]
    assert [i.name for i in diff_report._inputs(pair, info, ("doubled", "set"))] == ["rows", "ids"]


# -- the first NaN


def _source(name: str, clean: bool | None, largest: float = 1.0) -> Source:
    stats: Any = None if clean is None else SimpleNamespace(largest=largest)
    return Source(name, "ADD", "f32[4]", stats, clean)


def _found(*sources: Source) -> Found:
    stats: Any = None
    return Found(INFO.tensors[1], (), stats, (0, 0, 0, 0), None, 0, None, (0,), "row", sources)


def test_a_source_that_can_not_be_read_is_not_called_spoilt() -> None:
    assert _found(_source("known", True), _source("inside a fusion", None)).inputs_clean
    assert not _found(_source("known", True), _source("spoilt", False)).inputs_clean
    worst = _found(_source("huge", True, 1e30), _source("spoilt", False), _source("unknown", None)).worst
    assert worst is not None and worst.name == "spoilt"
    worst = _found(_source("small", True), _source("huge", True, 1e30)).worst
    assert worst is not None and worst.name == "huge"


def test_a_mask_hides_with_minus_infinity_alone() -> None:
    mask = ops.kq_mask(new_input("i32", 3, name="cells"), new_input("i32", 1, name="pos"))
    values = np.array([0.0, -np.inf, np.inf, np.nan])
    assert _good(mask, values).tolist() == [True, True, False, False]
    assert _good(ops.sqr(new_input("f32", 4, name="a")), values).tolist() == [True, False, False, False]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_the_culprit_is_found_wherever_it_stands(n: int) -> None:
    """Of n fusions of two nodes one makes a NaN as long as it is whole; or none does by itself."""
    fused = [GroupInfo(f"fusion {i}", 0, (2 * i, 2 * i + 1), (2 * i + 1,), 0, 0) for i in range(n)]

    class Step:
        def __init__(self, culprit: int | None) -> None:
            self.culprit = culprit

        def run(self, keep: Sequence[int]) -> None:
            self.clean = self.culprit is None or 2 * self.culprit in keep

        def is_clean(self) -> bool:
            return self.clean

    for culprit in (None, *range(n)):
        step: Any = Step(culprit)
        found = _culprit(step, range(2 * n), fused, 0, lambda: None)
        assert found is (None if culprit is None else fused[culprit])


# -- memory


def _life(number: int, offset: int, nbytes: int, first: int, last: int) -> Life:
    return Life(number, f"t{number}", "ADD", "cpu", offset, nbytes, first, last)


def test_of_equal_peaks_the_first_is_told() -> None:
    found = peak(ArenaLives("cpu", 1024, 64, (_life(0, 0, 128, 0, 0), _life(1, 64, 100, 1, 1), _life(2, 0, 64, 2, 2))))
    assert (found.step, found.nbytes, found.top, found.gaps) == (0, 128, 128, 0)


@pytest.mark.parametrize(
    "needs, wrong, code", [((None, 1), [], 0), ((None, None), [], 1), ((1,), [], 0), ((1,), ["v"], 1), (None, [], 0)]
)
def test_memory_exits_1_where_no_type_of_cache_fits_or_the_plan_is_wrong(
    needs: tuple[Any, ...] | None, wrong: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphrt.tools.memory import report as memory_report
    from graphrt.tools.memory import text as memory_text

    monkeypatch.setattr(memory, "subject_of", lambda args: None)
    monkeypatch.setattr(memory, "_larger", lambda subject, args: (subject, None))
    monkeypatch.setattr(memory, "_fits", lambda subject, args: [Fit("f16", n, 9) for n in needs or ()])
    monkeypatch.setattr(memory_report, "report", lambda subject: SimpleNamespace(wrong=wrong))
    monkeypatch.setattr(memory_text, "lines", lambda *rest: [])
    limit = None if needs is None else 100
    args: Any = SimpleNamespace(cache_types=False, limit=limit, svg=None, overlay=None, json=False, train=None)
    assert memory.main(args) == code


# -- check


def test_a_step_in_several_splits_is_not_whole() -> None:
    assert Checked("s", 3, 0, 1, [], []).is_whole and Checked("s", 0, 0, 0, [], []).is_whole
    assert not Checked("s", 3, 0, 2, [], []).is_whole


def test_weights_that_are_copied_once_are_no_copies_of_a_run() -> None:
    cpu = get_backend("cpu")
    leafs: list[Tensor] = []
    for name, usage in (("w", Usage.WEIGHTS), ("state", Usage.STATE)):
        leafs.append(new_tensor("f32", 4, name=name))
        leafs[-1].buffer = cpu.alloc(16, usage)
    plan = schedule(Graph(ops.add(ops.sqr(leafs[0]), ops.sqr(leafs[1]))), [ToyBackend(), cpu])
    assert [(c.example, c.count, c.nbytes, c.origin, c.target) for c in _copies(plan, {})] == [
        ("state", 1, 16, "cpu", "toy")
    ]


# -- what tools say and read


def test_layers_of_a_chain_that_a_later_layer_reads_first() -> None:
    a = new_input("f32", 4, name="a")
    shared = ops.sqr(a)
    later = ops.add(shared, a, name="later-3")
    layers = {t.name: t.layer for t in describe(Graph(ops.add(ops.sqrt(shared, name="early-1"), later))).tensors}
    assert layers["node_0"] == 1
    swapped = Graph(ops.add(later, ops.sqrt(shared, name="early-1")))
    assert {t.name: t.layer for t in describe(swapped).tensors}["node_0"] == 1


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, 8, -1])
def test_a_whole_number_is_one_and_lies_within(value: object) -> None:
    assert (Json(0).whole(0, 7), Json(7).whole(0, 7)) == (0, 7)
    with pytest.raises(GraphError, match="a whole number from 0 to 7"):
        Json(value).whole(0, 7)


def test_units_change_at_their_size() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 2**20 - 2**10, 2**20, 2**30, 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "1023.0 KiB", "1.0 MiB", "1.0 GiB", "1024.0 GiB",
    ]  # fmt: skip
    assert [si(n) for n in (0, 999, 1000, 1_500_000, 10**9, 10**12, 10**15)] == [
        "0", "999", "1.0 k", "1.5 M", "1.0 G", "1.0 T", "1000.0 T",
    ]  # fmt: skip
    assert [flop_text(n) for n in (999, 1000)] == ["999 FLOP", "1.0 kFLOP"]


def test_whole_numbers_on_the_command_line_have_both_ends() -> None:
    from argparse import ArgumentTypeError

    assert [whole(1, 8)(text) for text in ("1", "8")] == [1, 8]
    for text in ("0", "9", "1.5", ""):
        with pytest.raises(ArgumentTypeError, match="from 1 to 8, got"):
            whole(1, 8)(text)


# -- bench


@pytest.mark.parametrize("batch, rate", [(1, 20.0), (4, 80.0)])
def test_the_tokens_of_all_sequences_count(batch: int, rate: float) -> None:
    prepared: Any = SimpleNamespace(
        test=Timed("tg", 10, batch=Batch(batch)), ids=[], once=lambda: 0.5,
        engine=SimpleNamespace(backends=[SimpleNamespace(name="cpu")], n_batch=8),
    )  # fmt: skip
    row = measure(prepared, 3, None)
    assert row["tokens_per_s"] == rate and row["deviation"] == 0.0


def test_the_middle_of_several_rates_is_told_whatever_the_slowest_was() -> None:
    times = iter([1.0, 0.1, 10.0, 0.2, 0.1, 0.1])  # the first warms up
    prepared: Any = SimpleNamespace(
        test=Timed("tg", 1), ids=[], once=lambda: next(times),
        engine=SimpleNamespace(backends=[SimpleNamespace(name="cpu")], n_batch=8),
    )  # fmt: skip
    assert measure(prepared, 5, None)["tokens_per_s"] == pytest.approx(10.0)


def test_a_token_sees_itself() -> None:
    assert _seen(Timed("pp", 4), 0) == 2.5 and _seen(Timed("pp", 4), 2) == 1.75
    assert _seen(Timed("tg", 2, 10), 0) == 11.5 and _seen(Timed("tg", 2, 10), 11) == 11.0
