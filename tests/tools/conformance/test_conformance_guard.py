"""What a run of one case finds, fault by fault: in guarded memory, in place, run again; and which cases run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from support import broken_backends
from support.toy import NullBackend, ToyBackend, ToyBuffer, _array

from graphrt import get_backend, ops
from graphrt.backend import Group, Place, Usage
from graphrt.backends.cpu import CpuBackend
from graphrt.dtypes import dtype
from graphrt.errors import BackendError, GraphError, MemoryPlanError
from graphrt.op import op_spec
from graphrt.program import Program
from graphrt.tensor import Tensor
from graphrt.testing import Case, all_cases
from graphrt.tools import cli
from graphrt.tools.conformance.cases.graphs import graph_cases, run_graph
from graphrt.tools.conformance.cases.operands import Operand
from graphrt.tools.conformance.cases.programs import make_graph, seeded_graph
from graphrt.tools.conformance.cases.sources import Source, pick
from graphrt.tools.conformance.run import guard, pool, step
from graphrt.tools.conformance.run.guard import Guarded
from graphrt.tools.conformance.run.perf import Ceilings, measure
from graphrt.tools.conformance.run.pool import Settings, sweep
from graphrt.tools.conformance.run.reference import Memory, know
from graphrt.tools.conformance.run.report import as_junit
from graphrt.tools.conformance.run.saved import save_failure
from graphrt.tools.conformance.run.step import Outcome, run_case
from graphrt.tools.conformance.run.support import table

Step = Callable[[], None]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPHRT_CACHE", str(tmp_path / "cache"))


def _case(name: str = broken_backends.SPOILT) -> Case:
    return next(c for c in broken_backends.cases() if str(c) == name)


def _two_ops() -> Case:
    return Case("SQR", {"of": "a root"}, lambda inputs: ops.sqr(ops.sqrt(inputs("a", "f32", (5,)))))


def _rows_of_a_part() -> Case:
    """SET_ROWS into rows 1 to 3 of five."""

    def make(inputs):  # type: ignore[no-untyped-def]
        cache = inputs("cache", "f32", (4, 5))
        part = ops.view(cache, (4, 3), cache.nb[1:2], offs=16)
        return ops.set_rows(inputs("rows", "f32", (4, 2)), inputs("ids", "i64", (2,), broken_rows), part)

    return Case("SET_ROWS", {"of": "a part"}, make)


def _glu() -> Case:
    make = lambda inputs: ops.glu(inputs("gate", "f32", (32, 3)), inputs("up", "f32", (32, 3)), "reglu")  # noqa: E731
    return Case("GLU", {"kind": "reglu"}, make)


def broken_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.array([2, 0]).reshape(shape)


# -- what a run does wrong


class ZeroingFirst(ToyBackend):
    """ADD clears its result and sums up into that: right anywhere but in a source's place."""

    def _step(self, node: Tensor, place: Callable[[Tensor], Place]) -> Step:
        if node.op != "ADD":
            return super()._step(node, place)
        out, sources = _array(node, *place(node)), [_array(s, *place(s)) for s in node.sources()]

        def run() -> None:
            out[...] = 0.0
            for source in sources:
                out[...] += source

        return run


class GateFirst(CpuBackend):
    """GLU writes the gate's activation to its result before it reads the other half: wrong in that half's place."""

    name: ClassVar[str] = "cpu"  # whose memory it uses

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        (node,) = groups[0].nodes
        gate, up = (self._stored(s, place) for s in node.sources())
        out = self._stored(node, place)

        def run() -> None:
            out.copy_(torch.relu(gate))
            out.mul_(up)

        return Program(groups, run)


class Lazy(ToyBackend):
    """Computes in its first run, and finds its results in place later."""

    def _step(self, node: Tensor, place: Callable[[Tensor], Place]) -> Step:
        steps = [super()._step(node, place)]
        return lambda: steps.pop()() if steps else None


class Before(broken_backends.Right):
    """Writes 8 bytes before its result."""

    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        buffer.memory[end - out.nbytes - 8 : end - out.nbytes] = 0


class Smearing(ToyBackend):
    """SET_ROWS also writes the row before the first that it may."""

    def _step(self, node: Tensor, place: Callable[[Tensor], Place]) -> Step:
        step, (buffer, offset) = super()._step(node, place), place(node)

        def run() -> None:
            step()
            buffer.write(offset - 16, np.zeros(4, np.uint8))

        return run


class Wobbling(broken_backends.Undecided):
    deterministic = False


class WithoutTail(ToyBackend):
    """ADD leaves the last column of each row as it is. made: what it writes to the first one."""

    made: float | None = None

    def _step(self, node: Tensor, place: Callable[[Tensor], Place]) -> Step:
        out, (a, b) = _array(node, *place(node)), [_array(s, *place(s)) for s in node.sources()]

        def run() -> None:
            out[..., :-1] = (a + b)[..., :-1]
            if self.made is not None:
                out[..., 0] = self.made

        return run


class WithoutTailAndNan(WithoutTail):
    made = math.nan


class MakingNan(ToyBackend):
    """ADD reads NaN where b is."""

    def _step(self, node: Tensor, place: Callable[[Tensor], Place]) -> Step:
        out, a = _array(node, *place(node)), _array(next(node.sources()), *place(next(node.sources())))
        return lambda: np.copyto(out, a + np.float32(math.nan))


class Full(ToyBackend):
    def alloc(self, nbytes: int, usage: Usage) -> ToyBuffer:
        raise MemoryPlanError(f"{nbytes} bytes are too many")


@pytest.mark.parametrize(
    "backend, make, status, message",
    [
        (ZeroingFirst, _case, "fail", "in its source's memory it is wrong"),
        (GateFirst, _glu, "fail", "in its source's memory it is wrong"),
        (CpuBackend, _glu, "pass", ""),
        (Lazy, _case, "fail", "two runs on the same inputs differ in 30"),
        (Before, _case, "fail", "it wrote 8 bytes before 'node_0', up to 8 bytes away"),
        (Smearing, _rows_of_a_part, "fail", "it wrote to 'cache' beside what it may write: 4 bytes, from byte 0"),
        (ToyBackend, _rows_of_a_part, "pass", ""),
        (broken_backends.Undecided, _case, "fail", "two runs on the same inputs differ"),
        (Wobbling, _case, "pass", ""),
        (Full, _case, "unsupported", "no room: "),
        (WithoutTail, _case, "fail", "the last; none of these was ever written"),
        (WithoutTailAndNan, _case, "fail", "elements were never written: all of column"),
        (MakingNan, _case, "fail", "all elements were written, so that NaN was computed, or read"),
        (ToyBackend, _two_ops, "unsupported", "op SQRT is unknown to it"),
    ],
)
def test_a_fault_is_found_and_no_other(backend: type, make: Callable[[], Case], status: str, message: str) -> None:
    outcome = run_case(make(), backend())
    assert outcome.status == status and message in outcome.message, outcome


def test_damage_is_found_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is compared in pieces: where damage lies must not depend on where a piece begins."""
    for piece in (64, 4096, 2**20):
        monkeypatch.setattr(guard, "_PIECE", piece)
        outcome = run_case(_case(), broken_backends.InputWriting())
        assert outcome.message == "it wrote to its input 'b': 4 bytes, from byte 4"


def test_guards_are_nan_wherever_a_kernel_begins_to_read() -> None:
    raw = guard._guard_bytes(4096)
    for start in range(0, 16, 2):
        raw_here = raw[start : start + 2048]
        assert np.isnan(raw_here.view(np.float16)).all() and np.isnan(raw_here.view(np.float32)).all()
        bf16 = raw_here.view(np.uint16).astype(np.uint32) << 16
        assert np.isnan(bf16.view(np.float32)).all()
    assert len(set(raw.tolist())) > 50, "bytes that are moved must show"


def test_memory_is_what_models_have() -> None:
    """Weights and tables in a buffer of weights, what is written into in one of state, the rest in others."""

    def usages(op: str, layout: str = "") -> dict[str, Usage]:
        inputs = next(c for c in all_cases(op) if layout in str(c)).build()
        guarded = Guarded(NullBackend(), inputs, inputs.graph())
        found = {t.name: guarded.places[t][0].usage for t in inputs.values}
        return found | {"result": guarded.place(inputs.result)[0].usage}

    assert usages("MUL_MAT") == {"a": Usage.WEIGHTS, "b": Usage.COMPUTE, "result": Usage.COMPUTE}
    assert usages("MUL_MAT", "layout=gaps")["a"] is Usage.WEIGHTS, "a view of weights too"
    assert usages("GET_ROWS") == {"a": Usage.WEIGHTS, "ids": Usage.COMPUTE, "result": Usage.COMPUTE}
    written = {"rows": Usage.COMPUTE, "ids": Usage.COMPUTE, "target": Usage.STATE, "result": Usage.STATE}
    assert usages("SET_ROWS") == written


def test_a_case_that_needs_more_memory_than_there_is_does_not_run() -> None:
    free = step._free_bytes()
    assert free > 2**26, "in bytes: a machine that runs this has 64 MiB to spare"
    case = Case("ADD", {}, _case().make, needs_bytes=2**60)
    outcome = run_case(case, ToyBackend())
    assert outcome.status == "unsupported" and "it needs 1073741824 GiB of free memory" in outcome.message
    assert run_case(Case("ADD", {}, _case().make, needs_bytes=1), ToyBackend()).status == "pass"


# -- replay


class Refusing(ToyBackend):
    def supports(self, node: Tensor) -> str | None:
        return "not today"


@pytest.mark.parametrize("backend, code", [("Right", 0), ("Swapping", 1), ("Raising", 1), ("OutOfBounds", 1)])
def test_replay_exits_0_for_a_pass_alone(tmp_path: Path, backend: str, code: int) -> None:
    inputs = _case().build()
    save_failure(tmp_path / "case.npz", inputs, np.zeros(1), None, "")
    assert cli.main(["replay", str(tmp_path / "case.npz"), "-b", f"support.broken_backends:{backend}"]) == code


def test_replay_of_what_is_refused_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_failure(tmp_path / "case.npz", _case("SQRT()").build(), np.zeros(1), None, "")
    assert cli.main(["replay", str(tmp_path / "case.npz"), "-b", "support.toy:ToyBackend"]) == 1
    assert "unsupported" in capsys.readouterr().out


# -- what is known of a result


def test_what_is_known_goes_by_case_seed_and_rounding() -> None:
    case, memory = next(all_cases("MUL_MAT")), Memory()
    first, other = case.build(0), case.build(1)
    known = memory.know(case, first)
    assert memory.know(case, first) is known
    assert not np.array_equal(memory.know(case, other).expected, known.expected)
    rounded = memory.know(case, first, "int8")
    assert rounded.rounded == "int8" and not np.array_equal(rounded.low, known.low)


def test_seeds_one_after_another_pass() -> None:
    case = next(all_cases("RMS_NORM"))
    assert [run_case(case, get_backend("cpu"), seed).status for seed in (0, 1, 0)] == ["pass"] * 3


def test_memory_for_what_is_known_is_bounded() -> None:
    memory = Memory(most_bytes=100_000)
    for case in list(all_cases("ADD"))[:9]:
        memory.know(case, case.build())
    assert memory._bytes <= 100_000


@pytest.mark.parametrize("op", ["CONT", "CONCAT", "REPEAT", "KQ_MASK"])
def test_what_is_moved_or_a_mask_is_judged_by_its_bits(op: str) -> None:
    inputs = next(all_cases(op)).build()
    known = know(inputs)
    assert known.stored is not None and known.judge(inputs.result, known.stored).ok
    off = known.stored.copy()
    off.reshape(-1).view(np.uint8)[0] ^= 1
    assert not known.judge(inputs.result, off).ok


@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_bf16_is_rounded_and_not_cut_off(interpreted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But in Triton's interpreter, which cuts."""
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    inputs = next(c for c in all_cases("MUL") if "type=bf16" in str(c)).build()
    known = know(inputs)
    words = known.expected.astype(np.float32).view(np.uint32)
    cut, near = ((words + add >> 16).astype(np.uint16) for add in (0, 0x8000))
    verdict = known.judge(inputs.result, cut)
    assert known.judge(inputs.result, near).ok and verdict.ok == (interpreted == "1")
    assert ("cut off, not rounded" in verdict.message) == (interpreted == "0")


# -- which cases, in which order


def test_ops_are_picked_by_whole_names_and_parameters_by_parts() -> None:
    cases = list(all_cases())
    assert {c.op for c in pick(cases, "ADD|MUL", None)} == {"ADD", "MUL"}
    assert {c.op for c in pick(cases, "MUL.*", None)} == {"MUL", "MUL_MAT", "MUL_MAT_ID", "MUL_MAT_ID_BACK"}
    with pytest.raises(GraphError, match="there must be a case to run"):
        pick(cases, None, "SOFT_MAX")
    assert all("eps=0.1" in str(c) for c in pick(cases, None, r"eps=0\.1,"))


@pytest.mark.parametrize("argv", [["--cases", "support.broken_backends", "--graphs", "2"], ["perf", "--graphs", "2"]])
def test_cases_come_from_one_place(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", "-b", "cpu", "-j", "0", *argv]) == 2
    assert "graphs" in capsys.readouterr().err or argv[0] == "--cases"


def test_operands_that_differ_are_named_differently() -> None:
    f32, ne = dtype("f32"), (4, 3, 2, 1)
    made = [
        Operand(f32, ne, (4, 16, 48, 96), 0, 96), Operand(f32, ne, (4, 16, 48, 96), 0, 192),
        Operand(f32, ne, (4, 16, 48, 96), 0, 192, 96), Operand(f32, ne, (4, 32, 96, 192), 0, 192),
        Operand(f32, ne, (4, 16, 96, 192), 0, 192), Operand(f32, ne, (4, 16, 48, 96), 1, 192),
    ]  # fmt: skip
    assert len({str(operand) for operand in made}) == len(made)


class _Process:
    def poll(self) -> int | None:
        return None


class _Worker:
    """Answers for the first case only once another worker has answered for the others."""

    first_may_end: ClassVar[threading.Event]

    def __init__(self, settings: Settings) -> None:
        self.process = _Process()

    def run(self, index: int, limit: float) -> Outcome:
        if index == 0:
            assert self.first_may_end.wait(60)
        elif index == 2:
            self.first_may_end.set()
        return Outcome(str(index), "ADD", "pass")

    def stop(self) -> None:
        return None


def test_outcomes_are_in_the_order_of_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Worker", _Worker)
    monkeypatch.setattr(_Worker, "first_may_end", threading.Event(), raising=False)
    as_they_came: list[str] = []
    cases = [(i, _case()) for i in range(3)]
    outcomes = sweep(cases, Settings(Source(), "cpu"), 2, lambda o: as_they_came.append(o.case))
    assert [o.case for o in outcomes] == ["0", "1", "2"] and as_they_came[-1] == "0"


def test_a_worker_that_can_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: Settings) -> None:
        raise BackendError("no more processes")

    monkeypatch.setattr(pool, "Worker", refuse)
    with pytest.raises(BackendError, match="no more processes"):
        sweep([(0, _case())], Settings(Source(), "cpu"), 1, lambda o: None)


def test_junit_counts_what_crashed_and_what_hung_as_errors() -> None:
    made = [Outcome(str(i), "ADD", status) for i, status in enumerate(("pass", "fail", "crashed", "timeout"))]  # type: ignore[arg-type]
    text = as_junit(made, {"backend": "cpu", "seconds": 1.0})
    assert 'tests="4" failures="1" errors="2" skipped="0"' in text


# -- several ops


class Skewed(ToyBackend):
    """SCALE is off by a hundredth."""

    OPS: ClassVar[dict[str, Callable[..., np.ndarray]]] = {
        **ToyBackend.OPS,
        "SCALE": lambda node, a: np.float32(1.01) * ToyBackend.OPS["SCALE"](node, a),
    }


class InputSpoiling(ToyBackend):
    """SCALE clears the input that it reads, once it is done with it."""

    def _step(self, node: Tensor, place: Callable[[Tensor], Place]) -> Step:
        step, source = super()._step(node, place), next(node.sources())
        if node.op != "SCALE" or not source.is_leaf:
            return step
        array = _array(source, *place(source))

        def run() -> None:
            step()
            array[...] = 0.0

        return run


def _statuses(backend: ToyBackend) -> list[str]:
    """Of random graphs that write nothing and begin with a SCALE of an input that nothing else reads, as an output."""
    found = []
    for case in graph_cases(150):
        graph = seeded_graph(case.number).graph if case.fused else None
        if graph is None or graph.nodes[0].op != "SCALE":
            continue
        first = graph.nodes[0]
        source = next(first.sources())
        alone = source.is_leaf and graph.uses(source) == 1 and all(op_spec(n.op).writes is None for n in graph.nodes)
        if alone and first in graph.outputs:
            found.append(run_graph(case, backend, 0).status)
    return found


@pytest.mark.parametrize("backend, status", [(Skewed, "fail"), (InputSpoiling, "fail"), (ToyBackend, "pass")])
def test_random_graphs_find_a_hundredth_and_a_spoilt_input(backend: type[ToyBackend], status: str) -> None:
    """Their third run begins with the inputs as the second one left them."""
    assert set(_statuses(backend())) == {status}


def test_a_program_s_write_comes_before_what_it_reads_later() -> None:
    made = make_graph([0, 0], [("write", 0, 0, 0), ("scale", 0, 0, 0), ("scale", 2, 0, 0)], [1])
    assert [n.op for n in made.graph.nodes if n.op in ("SET_ROWS", "SCALE")][0] == "SET_ROWS"


# -- other modes


@pytest.mark.parametrize("gflop, gb", [(1e-3, 1e6), (1e6, 1e-3)])
def test_the_ceiling_that_binds_is_told(gflop: float, gb: float) -> None:
    timed = measure(_case(), ToyBackend(), 0, Ceilings("made up", gb, gflop))
    assert timed.gflop_per_s is not None and timed.gb_per_s is not None
    assert timed.share == pytest.approx(timed.gflop_per_s / gflop if gflop < gb else timed.gb_per_s / gb)


def test_support_in_part_is_neither_full_nor_none() -> None:
    class Small(ToyBackend):
        def supports(self, node: Tensor) -> str | None:
            return "it is too large" if node.n_elements > 8 else super().supports(node)

    def add(n: int) -> Case:
        return Case("ADD", {"n": n}, lambda inputs: ops.add(inputs("a", "f32", (n,)), inputs("b", "f32", (n,))))

    words = [
        table([add(n) for n in sizes], [("small", Small())])["ADD"]["small"].word for sizes in ((4,), (4, 9), (9,))
    ]
    assert words == ["full", "partial", "none"]
