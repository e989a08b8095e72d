"""`graphrt bench op`: right results become rows, wrong ones don't; the shapes, the marks and the options."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import graphrt
from graphrt.backend import Group, Place
from graphrt.backends.cpu import CpuBackend
from graphrt.dtypes import dtype
from graphrt.judge import Verdict
from graphrt.program import Program
from graphrt.tensor import Tensor
from graphrt.testing import CausalMask, dequantize
from graphrt.tools import cli
from graphrt.tools.bench import back_shapes, backward
from graphrt.tools.bench import torch_sdpa as peers
from graphrt.tools.bench.op_check import _told, check, expected_rows, sample
from graphrt.tools.bench.op_inputs import Noise, build, n_nodes_for
from graphrt.tools.bench.op_report import PeerTime, Report, Row, judge_marks, mean_of_llama, measured
from graphrt.tools.bench.op_shapes import SETS, SHAPES, Mark, Shape, shapes_of, tiny
from graphrt.tools.bench.timing import Ceilings, CudaClock, HostClock, Times, runs_for

OP = "FLASH_ATTN_EXT"
ALL = SHAPES[OP]
Step = Callable[[], None]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Tiny products: waiting threads would only get in the way of other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def noise() -> Noise:
    return Noise()


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `graphrt bench op FLASH_ATTN_EXT ...` in this process: exit code, stdout, stderr."""

    def run(*argv: str, op: str = OP) -> tuple[int, str, str]:
        try:
            code = cli.main(["bench", "op", op, *argv])
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


Bench = Callable[..., tuple[int, str, str]]
TINY = ("-b", "cpu", "--tiny", "-r", "2")


# ---- backends that are wrong, one way each: `-b test_bench_op:NaNs` ----


class Spoilt(CpuBackend):
    """The reference, with `spoil` called on the outputs after each run."""

    name: ClassVar[str] = "spoilt"

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        right = super().compile(groups, place)
        outputs = [self._stored(node, place) for group in groups for node in group.nodes if node.op == OP]
        run = 0

        def wrong() -> None:
            nonlocal run
            right()
            self.spoil(outputs, run)
            run += 1

        return Program(groups, wrong)

    def spoil(self, outputs: list[torch.Tensor], run: int) -> None:
        """outputs: [1, n_q, n_head, d_v] of each node; run: how many there were before."""


class SlightlyOff(Spoilt):
    def spoil(self, outputs: list[torch.Tensor], run: int) -> None:
        outputs[0] *= 1.005


class NaNs(Spoilt):
    """In one element of a node that is not looked at otherwise."""

    def spoil(self, outputs: list[torch.Tensor], run: int) -> None:
        outputs[1][0, -1, 1, 3] = float("nan")


class OneBadRow(Spoilt):
    def spoil(self, outputs: list[torch.Tensor], run: int) -> None:
        outputs[0][0, -1, -1] = outputs[0][0, -1, 0]


class LastNodeAsFirst(Spoilt):
    def spoil(self, outputs: list[torch.Tensor], run: int) -> None:
        outputs[-1].copy_(outputs[0])


class Stale(Spoilt):
    """Replays what the first run gave: queries that are written later change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[torch.Tensor] = []

    def spoil(self, outputs: list[torch.Tensor], run: int) -> None:
        if run == 0:
            self.first = [o.clone() for o in outputs]
        for out, first in zip(outputs, self.first):
            out.copy_(first)


class Deaf(Spoilt):
    """Does not hear of sinks, softcaps and ALiBi."""

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        nodes = [node for group in groups for node in group.nodes if node.op == OP]
        right = [(node.params, node.src) for node in nodes]

        def spoilt(call: Callable[[], Any]) -> Any:
            """What `call` gives while the nodes are poorer; afterwards they are what they were."""
            for node in nodes:
                node.params, node.src = replace(node.params, softcap=0.0, max_bias=0.0), (*node.src[:4], None)
            result = call()
            for node, (params, src) in zip(nodes, right):
                node.params, node.src = params, src
            return result

        inner: Step = spoilt(lambda: CpuBackend.compile(self, groups, place))
        return Program(groups, lambda: spoilt(inner))


class Refusing(Spoilt):
    def supports(self, node: Tensor) -> str | None:
        return "it has no causal masks" if node.src[3] is not None else None


class Raising(Spoilt):
    def spoil(self, outputs: list[torch.Tensor], run: int) -> None:
        raise ValueError("\n\nptxas fatal: no registers\nmore of it")


# ---- what becomes a row ----


def test_every_shape_becomes_a_row(bench: Bench) -> None:
    code, out, err = bench(*TINY, "--set", "full", "--json", "-r", "1")
    report = json.loads(out)
    assert (code, report["backend"], report["op"], report["tiny"]) == (0, "cpu", OP, True)
    assert [r["shape"] for r in report["results"]] == [s.name for s in ALL]
    for row in report["results"]:
        assert row["status"] == "ok" and row["us"] > 0 and row["relative_error"] < 1e-5, row
        assert row["first"] is row["goal"] is row["llama"] is None, "the figures are of other sizes"
    assert len(err.splitlines()) == 2 * len(ALL) + 1, "what is done, then a line for each as it comes"
    assert err.startswith("measuring what this machine can do")
    assert report["ceilings"]["before"]["copy_gb_per_s"] > 0 and report["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("backend", "shape", "said"),
    [
        (SlightlyOff, "decode D128 H32/8 1x4096", "out0: NMSE"),
        (NaNs, "decode D128 H32/8 1x4096", "out1: 1 elements are NaN or infinite, first at head 1, query 0, 3"),
        (OneBadRow, "D128 H32/8 4096x4096 causal", "worst at head 7, query 31"),
        (LastNodeAsFirst, "decode D128 H32/8 1x4096", "out2: NMSE"),
        (Stale, "decode D64 H64/8 1x7680 q8_0", "out0: NMSE"),
        (Deaf, "causal softcap", "out0: NMSE"),
        (Deaf, "alibi", "out0: NMSE"),
        (Deaf, "sinks", "out0: NMSE"),
    ],
)
def test_a_wrong_result_is_not_reported(bench: Bench, backend: type, shape: str, said: str) -> None:
    code, out, _ = bench("-b", f"{__name__}:{backend.__name__}", "--tiny", "-r", "1", "--json", "-s", shape)
    assert code == 1
    row = next(r for r in json.loads(out)["results"] if shape in r["shape"])
    assert (row["status"], row["us"], row["tflop_per_s"]) == ("wrong", None, None)
    assert said in row["message"]


def test_what_a_backend_refuses_or_raises_is_a_row_and_the_others_go_on(bench: Bench) -> None:
    argv = ("--tiny", "-r", "1", "--json", "-s", "D256 H16/4")
    code, out, _ = bench("-b", f"{__name__}:Refusing", *argv)
    full, causal = json.loads(out)["results"]
    assert (code, full["status"], causal["status"]) == (0, "ok", "unsupported")
    assert "it has no causal masks" in causal["message"]
    code, out, _ = bench("-b", f"{__name__}:Raising", *argv)
    rows = json.loads(out)["results"]
    assert code == 1 and [r["status"] for r in rows] == ["failed", "failed"]
    assert rows[0]["message"] == "ValueError: ptxas fatal: no registers"


def test_nothing_measured_is_no_success(bench: Bench) -> None:
    code, out, _ = bench("-b", f"{__name__}:Refusing", "--tiny", "-s", "D256 H16/4 4096x4096 causal")
    assert code == 1 and "unsupported" in out and "right before" not in out


def test_the_table_and_files(bench: Bench, tmp_path: Path) -> None:
    one = (*TINY, "-s", "decode D64 H64/8 1x7680")
    code, out, _ = bench(*one)
    assert code == 0 and out.startswith(f"{OP} on cpu, ") and "ceilings before and after" in out
    assert "decode D64 H64/8 1x7680 q4_0" in out and "say nothing of speed" in out
    path = tmp_path / "report.json"
    code, out, _ = bench(*one, "--json", "-o", str(path))
    assert code == 0 and out.startswith(f"{OP} on cpu, ")
    assert len(json.loads(path.read_text(encoding="utf-8"))["results"]) == 3
    assert "| decode D64 H64/8 1x7680 q8_0 | " in bench(*one, "--md")[1]
    code, out, err = bench(*one, "-o", str(tmp_path / "none" / "report"))
    assert (code, out) == (2, "") and "there is no folder" in err and "[1/3]" not in err


# ---- options ----


def test_list_and_filters(bench: Bench) -> None:
    code, out, err = bench("--list", "--json")
    listed = json.loads(out)
    assert (code, err) == (0, "") and [r["shape"] for r in listed] == [s.name for s in ALL if s.set != "full"]
    assert {"shape": "decode D128 H32/8 1x65536", "set": "quick", "llama.cpp": "128", "first": "93 us",
            "goal": "91 us"} in listed  # fmt: skip
    assert bench("--list", "--set", "full")[1].count("\n") == len(ALL) + 1
    assert [r["shape"] for r in json.loads(bench("--list", "--json", "-s", "d64 h64/8 1X4096")[1])] == [
        "decode D64 H64/8 1x4096"
    ]


def test_what_a_mark_refers_to_comes_along() -> None:
    names = [s.name for s in shapes_of(OP, "default", "q4_0")]
    assert names == ["decode D128 H32/8 1x65536", "decode D128 H32/8 1x65536 q4_0", "decode D64 H64/8 1x7680 q4_0"]
    for which in SETS:
        chosen = shapes_of(OP, which)
        assert {n.name for s in chosen for n in s.needs} <= {s.name for s in chosen}


@pytest.mark.parametrize(
    ("argv", "op", "said"),
    [
        (("-s", "nothing"), OP, "a shape's name must have 'nothing' in it"),
        ((), "MUL_MAT", "FLASH_ATTN_EXT, FLASH_ATTN_VARLEN, FLASH_ATTN_BACK, got 'MUL_MAT'"),
        (("-b", "nope"), OP, "a backend must be one of"),
        (("-b", "cpu", "--schedule", "x"), OP, "does not take these options"),
        (("-b", "a:B", "--schedule", "x"), OP, "--schedule is for a backend that is named"),
        (("--set", "huge"), OP, "must be one of"),
        (("-r", "0"), OP, "must be at least 1, got 0"),
    ],
)
def test_what_can_not_be_asked(bench: Bench, argv: tuple[str, ...], op: str, said: str) -> None:
    code, out, err = bench(*argv, op=op)
    assert (code, out) == (2, "") and said in err and len(err.splitlines()) <= 3


def test_without_a_gpu(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = bench()
    assert (code, out) == (2, "") and "measures on a CUDA GPU, torch finds none here" in err
    assert bench("--tiny", "-r", "1", "-s", "decode D64 H64/8 1x4096")[0] == 0


def test_a_schedule_reaches_the_backend(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduled(CpuBackend):
        name: ClassVar[str] = "scheduled"
        given: ClassVar[list[str]] = []

        def __init__(self, *, schedule: str) -> None:
            super().__init__()
            self.given.append(schedule)

    monkeypatch.setattr("graphrt.backend._REGISTERED", {"scheduled": Scheduled})
    argv = ("-b", "scheduled", "--schedule", "stream-k", "--tiny", "-r", "1", "-s", "decode D64 H64/8 1x4096")
    assert bench(*argv)[0] == 0 and Scheduled.given == ["stream-k"]


def test_bench_of_a_model_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, usage in ((["bench", "--help"], "usage: graphrt bench [-h]"),
                        (["bench", "op", "--help"], "usage: graphrt bench op [-h]")):  # fmt: skip
        with pytest.raises(SystemExit) as left:
            cli.main(argv)
        assert left.value.code == 0 and capsys.readouterr().out.startswith(usage)
    assert cli.main(["bench", "op.gguf"]) == 2 and "op.gguf" in capsys.readouterr().err


# ---- the shapes ----


def test_the_shapes_are_what_they_say() -> None:
    assert len({s.name for s in ALL}) == len(ALL)
    for s in ALL:
        assert s.set in SETS and s.n_head % s.n_head_kv == 0 and (s.d_v == s.d or s.v_in_k)
        assert (s.max_bias > 0) == (s.mask == "distance") and s.is_decode == (s.mask == "visible")
        marks = [m for m in (s.first, s.goal) if m is not None and m.of is None and m.unit != "of cuDNN"]
        assert all(m.unit == ("us" if s.is_decode else "TFLOP/s") for m in marks)
    assert [s.name for s in tiny(ALL)] == [s.name for s in ALL]


def test_work_is_the_attention_itself(noise: Noise) -> None:
    """2 products of 2 FLOPs; half of a square counts as causal; a v in k is read once."""
    square = Shape("prefill", 64, 4, 2, 16, 16, 64, mask="causal")
    assert square.counted == 0.5 and replace(square, mask="none").counted == 1.0
    assert replace(square, n_q=4, n_kv=16).counted == 0.875
    mla = Shape("decode", 96, 4, 1, 1, 32, 64, mask="visible", v_in_k=True)
    node = build(mla, 1, noise).nodes[0]
    work = graphrt.op.op_spec(OP).work(node)
    assert work.flops == 2 * (96 + 64) * 32 * 4
    assert work.bytes == 4 * 96 * 4 + 2 * 96 * 32 + 2 * 32 + 4 * 64 * 4
    assert mla.cache_bytes == 2 * 96 * 32


def test_decode_graphs_are_larger_than_the_devices_cache() -> None:
    for s in ALL:
        n = n_nodes_for(s, 50 * 2**20)
        if not s.is_decode:
            assert n == 2
        else:
            assert 4 <= n <= 64 and (n == 64 or n * s.cache_bytes >= 256 * 2**20)
    small = Shape("decode", 64, 8, 8, 1, 4096, 64)
    assert n_nodes_for(small, 100 * 2**20) > n_nodes_for(small, 0)


# ---- inputs and the gate ----


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_noise_is_random_valid_and_does_not_repeat(noise: Noise, kind: str) -> None:
    n = 2**22 + 2**20
    values = dequantize(noise.take(kind, n, 0).reshape(-1, dtype(kind).type_size * 64), dtype(kind)).reshape(-1)
    assert values.size == n and np.isfinite(values).all()
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1.0) < 0.02
    period = (2**21 // dtype(kind).block_size + 1) * dtype(kind).block_size
    assert np.allclose(np.abs(values[period:]), np.abs(values[:-period])), "drawn values come again"
    assert abs(np.corrcoef(values[period:], values[:-period])[0, 1]) < 0.05, "with signs of their own"
    other = dequantize(noise.take(kind, n, 1).reshape(-1, dtype(kind).type_size * 64), dtype(kind)).reshape(-1)
    assert abs(np.corrcoef(values, other)[0, 1]) < 0.01
    again = Noise().take(kind, 4096, 0)
    assert np.array_equal(again, noise.take(kind, 4096, 0)), "the same whatever was taken before"


def test_leafs_of_a_graph_differ(noise: Noise) -> None:
    program = build(replace(tiny(ALL)[0], n_kv=64), 3, noise)
    k = [program.values[node.src[1]] for node in program.nodes if node.src[1] is not None]
    v = [program.values[node.src[2]] for node in program.nodes if node.src[2] is not None]
    assert len({a.tobytes() for a in [*k, *v]}) == 6
    assert len({node.src[3] for node in program.nodes}) == 1, "one mask for all"


@pytest.mark.parametrize(("n_q", "n_kv"), [(8, 8), (3, 8), (1, 5)])
def test_masks(noise: Noise, n_q: int, n_kv: int) -> None:
    """As the conformance cases have them: the last query sees the last key."""
    shape = Shape("prefill", 64, 2, 1, n_q, n_kv, 64)
    expected = {
        "visible": np.zeros((n_q, n_kv)),
        "causal": CausalMask()(np.random.default_rng(0), (n_q, n_kv)),
        "distance": CausalMask(distance=True)(np.random.default_rng(0), (n_q, n_kv)),
    }
    for kind, values in expected.items():
        program = build(replace(shape, mask=kind), 1, noise)
        mask = program.nodes[0].src[3]
        assert mask is not None and np.array_equal(program.values[mask], values)
    dense = build(replace(shape, mask="dense"), 1, noise)
    mask = dense.nodes[0].src[3]
    assert mask is not None and np.isfinite(dense.values[mask]).all() and np.ptp(dense.values[mask]) > 1
    assert build(shape, 1, noise).nodes[0].src[3] is None


@pytest.mark.parametrize("shape", tiny(ALL), ids=lambda s: s.name)
def test_expected_rows_are_those_of_the_reference(noise: Noise, shape: Shape) -> None:
    program = build(shape, 1, noise)
    exe = graphrt.prepare(program.graph, CpuBackend(dtype=torch.float64))
    program.fill(exe)
    exe.run()
    node = program.nodes[0]
    rows = sample(shape.n_head, shape.n_q, 0)
    reference = np.asarray(exe.read(node)[0], np.float64)
    expected, low = expected_rows(program, node, rows, "cpu")
    exact = np.stack([reference[i, h] for h, i in rows])
    scale = np.sqrt((exact**2).mean())
    assert np.abs(expected - exact).max() < 1e-6 * scale
    least, most = (5e-3, 6e-2) if shape.prec == 8 else (1e-5, 2e-3)
    assert least < np.sqrt(((low - expected) ** 2).mean()) / scale < most, "the type's rounding shows, and no more"


def test_the_sample_has_the_corners() -> None:
    for n_head, n_q in ((32, 4096), (8, 1), (1, 1), (2, 3)):
        rows = sample(n_head, n_q, 5)
        assert len(rows) == len(set(rows)) == min(64, n_head * n_q)
        assert {(0, 0), (n_head - 1, 0), (0, n_q - 1), (n_head - 1, n_q - 1)} <= set(rows)
        assert all(h < n_head and i < n_q for h, i in rows)


# ---- marks, means, clocks ----


def _row(us: float, flops: float = 1e9, **shape: Any) -> Row:
    base = Shape("prefill", 128, 32, 8, 4096, 4096, 128)
    return measured(replace(base, name="", **shape), Times([1e-6 * us] * 3), 1, flops, 1e6, 0.0)


def test_marks() -> None:
    plain = _row(100.0)
    slower = plain.shape
    cases = [
        (Mark(10.0, "TFLOP/s"), True), (Mark(10.1, "TFLOP/s"), False), (Mark(100.0, "us"), True),
        (Mark(99.0, "us"), False), (Mark(1.0, "of cuDNN"), True), (Mark(1.3, "of cuDNN"), False),
        (Mark(1.0, "speed of", slower), True), (Mark(1.01, "speed of", slower), False),
        (Mark(1.0, "time of", slower), True), (Mark(0.99, "time of", slower), False),
    ]  # fmt: skip
    for mark, met in cases:
        row = _row(100.0, first=mark, kv_type="q8_0")
        row.peers["cudnn"] = PeerTime(120e-6, "enable_gqa")
        judge_marks([plain, row])
        assert (row.first, row.goal) == (met, None), mark
    alone = _row(100.0, first=Mark(1.0, "time of", slower), goal=Mark(1.0, "of cuDNN"), kv_type="q8_0")
    judge_marks([alone, Row(slower, "wrong", "it is")])
    assert alone.first is alone.goal is None, "nothing to judge by is no answer"


def test_ratios() -> None:
    prefill, decode = _row(100.0, llama=5.0), _row(10.0, n_q=1, mask="visible", llama=80.0)
    assert prefill.of_llama == pytest.approx(2.0) and decode.of_llama == pytest.approx(8.0)
    elsewhere, wrong = _row(1.0, llama=5.0, elsewhere="H32/8"), Row(prefill.shape, "wrong")
    assert mean_of_llama([prefill, decode, elsewhere, wrong]) == (pytest.approx(4.0), 2)
    assert mean_of_llama([wrong]) is None
    decode.peers = {"cudnn": PeerTime(12e-6, ""), "flash": PeerTime(9e-6, ""), "none": PeerTime(None, "no")}
    assert decode.of_best_peer == pytest.approx(0.9)


def test_the_report_with_peers_and_marks() -> None:
    row = _row(100.0, llama=5.0, first=Mark(9.0, "TFLOP/s"), goal=Mark(1.0, "of cuDNN"))
    row.peers = {"cudnn": PeerTime(80e-6, "enable_gqa"), "flash": PeerTime(None, "it does not")}
    judge_marks([row])
    machine = dict.fromkeys(("device", "driver", "torch", "triton", "graphrt"), "x")
    low, high = Ceilings(3000.0, {"f16": 18.0, "bf16": 30.0}), Ceilings(2900.0, {"f16": 20.0, "bf16": 30.0})
    report = Report(OP, "triton", machine, low, high, [row])
    table = "\n".join(report.lines(markdown=True))
    shown = "| 100.0 | 10 | 10 | 50 % | - | 12.5 | - | 5 | 0.80 | 2.00 | yes (9 TFLOP/s) | no (1 of cuDNN) |"
    assert shown in table and "quoted, not measured here" in table and "mean of the ratios to llama.cpp: 2.00" in table
    found = report.as_json()["results"][0]
    assert found["llama"]["quoted"] is True and found["first"] == {"mark": "9 TFLOP/s", "met": True}
    assert found["peers"]["flash"] == {"us": None, "said": "it does not"}


@pytest.mark.parametrize("mask", ["none", "causal", "dense", "chunk"])
def test_the_forms_of_a_peer_are_the_same_attention(monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    """On the CPU, by torch's plain form: heads that share keys are those that share them in ours."""
    n_q = {"chunk": 5, "none": 1}.get(mask, 24)
    shape = Shape("prefill", 32, 8, 2, n_q, 24, 32, mask="causal" if mask == "chunk" else mask)
    monkeypatch.setattr(peers, "DEVICE", "cpu")
    torch.manual_seed(0)
    q, k, v = peers.random(shape)
    bias = peers._mask(shape)
    assert (bias is None) == (mask in ("none", "causal"))
    results = []
    for form in peers.forms(shape):
        out = peers.attend(shape, form, *(form.prepare(shape, t) for t in (q, k, v)), bias)
        results.append(out.reshape(8, n_q, 32).float())
    assert [f.name for f in peers.forms(shape)][1] == ("heads as queries" if n_q == 1 else "keys repeated")
    scores = q[0].float() @ k[0].float().repeat_interleave(4, 0).mT * shape.scale
    if mask == "dense":
        assert bias is not None
        scores = scores + bias[0].float()
    elif mask != "none":
        scores = scores + torch.full((n_q, 24), -torch.inf).triu(25 - n_q)
    expected = torch.softmax(scores, -1) @ v[0].float().repeat_interleave(4, 0)
    for result in results:
        assert (result - expected).abs().max() < 5e-3


def test_who_can_not_be_a_peer() -> None:
    shape = Shape("prefill", 128, 8, 2, 16, 16, 128)
    assert peers.why_not(shape) is None
    for change, said in (({"kv_type": "q8_0"}, "no q8_0"), ({"softcap": 30.0}, "softcap"), ({"sinks": True}, "sinks"),
                         ({"max_bias": 8.0, "mask": "distance"}, "ALiBi")):  # fmt: skip
        assert said in (peers.why_not(replace(shape, **change)) or "")


@pytest.mark.parametrize("seen", [True, False])
def test_work_that_the_events_do_not_see_is_timed_by_the_host(monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    """A backend on a stream of its own would otherwise look fast without bound."""

    now = 0.0

    def work() -> None:
        nonlocal now
        now += 0.01

    class Event:
        def record(self) -> None:
            self.at = now if seen else 0.0

        def elapsed_time(self, other: Any) -> float:
            return 1e3 * (other.at - self.at) + 1e-3

    monkeypatch.setattr("graphrt.tools.bench.timing._event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("graphrt.tools.bench.timing.time.perf_counter", lambda: now)
    times = CudaClock().times(work, 4, lambda: None)
    assert len(times.seconds) == 4 and all(t == pytest.approx(0.01, rel=1e-3) for t in times.seconds)
    assert ("not on torch's current stream" in times.note) is not seen
    assert (times + Times([1.0])).note == times.note


def test_the_host_clock_waits() -> None:
    log: list[str] = []
    times = HostClock().times(lambda: log.append("run"), 2, lambda: log.append("wait"))
    assert log == ["run", "wait"] * 2 and len(times.seconds) == 2
    assert [runs_for(t) for t in (1.0, 0.01, 1e-6)] == [10, 30, 100]


def test_one_cache_for_all_nodes_is_held_against_llama() -> None:
    shape = Shape("decode", 64, 8, 2, 1, 96, 64, mask="visible", llama=12.0)
    program = build(shape, 3, Noise(), one_cache=True)
    assert len({n.src[1] for n in program.nodes}) == 1 and len({n.src[0] for n in program.nodes}) == 3
    row = Row(shape, "ok", seconds=20e-6)
    assert row.of_llama == pytest.approx(0.6)
    row.reused = 8e-6
    assert row.of_llama == pytest.approx(1.5)


# ---- models by name, and standard attention ----


def test_shapes_of_a_model_by_name(bench: Bench) -> None:
    code, out, _ = bench("--list", "--model", "llama-8b")
    assert code == 0 and "decode D128 H32/8 1x65536" in out and "prefill D128 H32/8 512x16384 causal" in out
    assert "decode D576/512 H16/1 1x4096" in bench("--list", "--model", "deepseek2-lite")[1]
    assert "decode D64 H64/8" in bench("--list", "--model", "gpt-oss-20b")[1]
    code, _, err = bench("--model", "llama-9b")
    assert code == 2 and "a model's name must be one of llama-8b" in err
    assert bench("--model", "llama-8b", op="FLASH_ATTN_BACK")[0] == 2


def test_tables_of_packed_sequences_of_a_model(bench: Bench) -> None:
    code, out, _ = bench("--list", "--model", "llama-8b", op="FLASH_ATTN_VARLEN")
    assert code == 0 and "pa_decode" in out and "decode 256x4096 page 16" in out and "pa_prefill" in out
    asked = ("--model", "llama-1b", "-s", "decode 4x", "--tiny", "-r", "1", "-b", "cpu", "--csv")
    code, out, _ = bench(*asked, op="FLASH_ATTN_VARLEN")
    head, row = (line.split(",") for line in out.splitlines()[:2])
    assert code == 0 and row[head.index("HQ")] == "32" and row[head.index("HEAD_DIM")] == "64"
    assert all(float(row[head.index(rate)]) >= 0 for rate in ("TFLOPS", "Bandwidth_(GB/s)")), "both rates, always"


def test_gradients_have_both_rates() -> None:
    shape = back_shapes.BackShape("x", 4, (2, 1), (3,))
    row = backward.BackRow(shape, seconds=1e-6)
    moved = 4 * 4 * (4 * 2 * 3) + 2 * (2 + 4) * (4 * 1 * 3)  # q, d_out, out and dq; k, v and theirs
    (told,) = backward.as_json([row])
    assert told["gb_per_s"] == pytest.approx(moved / 1e3) and told["tflop_per_s"] == shape.flops / 1e6
    cells = dict(zip(backward.COLUMNS, backward.cells_of(row, [row], 1.0)))
    assert cells["GB/s"] == f"{moved / 1e3:.0f}" and cells["goal"] == "-" and len(cells) == len(backward.COLUMNS)


def test_standard_attention_beside_the_fused_op(bench: Bench) -> None:
    argv = ("--set", "full", "-s", "prefill D64 H32/8 2048x2048", "--tiny", "-r", "1", "-b", "cpu")
    code, out, err = bench(*argv, "--json")
    rows = {r["shape"]: r for r in json.loads(out)["results"]}
    assert code == 0 and len(rows) == 4 and {r["status"] for r in rows.values()} == {"ok"}, err
    name = "prefill D64 H32/8 2048x2048"
    for mask in ("", " causal"):
        fused, apart = rows[name + mask], rows[f"{name}{mask} standard"]
        n_scores = 8 * 16 * 32
        assert apart["memory"] >= fused["memory"] + 4 * n_scores, "scores lie in memory"
    code, out, _ = bench(*argv)
    assert f"{name} standard: " in out and "times the time of the fused op" in out
    assert "for results instead of" in out and "TFLOP/s" in out and "GB/s" in out


def test_a_standard_attention_that_is_wrong_is_seen(noise: Noise) -> None:
    shape = Shape("prefill", 64, 4, 2, 6, 24, 64, mask="causal", apart=True)
    program = build(shape, 2, noise)
    exe = graphrt.prepare(program.graph, CpuBackend())
    program.fill(exe)
    exe.run()
    assert check(program, exe, "cpu").wrong == ""
    program.shape = replace(shape, softcap=1.0)
    assert "NMSE" in check(program, exe, "cpu").wrong and shape.name.endswith("causal standard")


def test_what_is_told_is_the_rule_that_was_broken() -> None:
    """The relative error of all rows, or what the judge says where that is small enough."""
    rows = [(3, 5), (4, 6)]
    over = _told(Verdict(False, "", 0.02, 0.01, worst=(7, 1)), rows)
    assert over == "NMSE 0.02 over 0.01; worst at head 4, query 6, element 7"
    other = _told(Verdict(False, "the results are 1.1 times", 0.005, 0.01, worst=(7, 0)), rows)
    assert "over all; of 2 rows of the result: the results are 1.1 times; worst at head 3, query 5" in other


def test_rows_as_comma_separated_values(bench: Bench) -> None:
    code, out, _ = bench("-s", "decode D64 H64/8 1x4096", "--tiny", "-r", "1", "-b", "cpu", "--csv")
    head, row = (line.split(",") for line in out.splitlines())
    assert code == 0 and head[:5] == ["shape", "status", "us", "tflop_per_s", "gb_per_s"] and row[1] == "ok"
    assert bench("--csv", op="FLASH_ATTN_BACK")[0] == 2


def test_a_form_of_flash_decoding_says_its_costs() -> None:
    """Those of `explain`, from the plan of what runs: a device that is not here has one too."""
    pytest.importorskip("triton")
    from support.attention_plans import Shape as Attention

    from graphrt.backends.triton import TritonBackend, device
    from graphrt.tools.explain.devices import DEVICES
    from graphrt.tools.verbs.bench_op import _cost

    form = "global-two"
    backend = TritonBackend(
        exact=False, target=device.Target.elsewhere(DEVICES["h200"].elsewhere), schedule=form
    )  # fmt: skip
    exe = graphrt.prepare(graphrt.Graph(Attention().node()), [backend])
    row = _row(10.0, kind="decode", n_q=1, form=form)
    row.cost = _cost(exe, form)
    # 8 KV heads of 4096 keys of 128, f16, K read twice and V once, beside 4 rows each of q and the result in f32.
    read = 8 * (3 * 2 * 128 * 4096 + 4 * 4 * 2 * 128)
    assert f"{read / 2**20:.1f} MiB by memory" in row.cost, row.cost
    assert _cost(exe, "") == "", "nothing was asked for"
    machine = dict.fromkeys(("device", "driver", "torch", "triton", "graphrt"), "x")
    best = Ceilings(3000.0, {"f16": 20.0})
    report = Report(OP, "triton", machine, best, best, [row])
    assert f"{row.shape.name}: 10.0 us; {row.cost}." in report.lines(False)
    assert report.as_json()["results"][0]["cost"] == row.cost
