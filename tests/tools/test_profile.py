"""`run --profile` and `run --memory`: sums that agree, kernels that find their groups, and models that don't fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import CHAT, tokens, write_model
from support.toy import ToyBackend

import graphrt
from graphrt import ops
from graphrt.backend import Device, Group, get_backend
from graphrt.errors import MemoryPlanError, SessionError
from graphrt.models import Model, load
from graphrt.models.engine import SessionOptions
from graphrt.models.gguf import GGUFFile
from graphrt.models.memory import cache_bytes, check_fits, memory_needs, weights_bytes
from graphrt.models.synthetic import synthetic
from graphrt.op import Work
from graphrt.tools import cli
from graphrt.tools.profile import masks, report, spans
from graphrt.tools.profile.parts import parts_of
from graphrt.tools.profile.phase import Part, Phase, rows
from graphrt.tools.profile.session import profile_session
from graphrt.work import group_work

MIB = 2**20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("profile") / "q.gguf", "llama", "Q4_0", tokenizer="spm", chat=CHAT)


# ---- groups and their work ----


def test_the_bytes_of_a_product_are_weights_x_and_result() -> None:
    w, x = graphrt.new_tensor("q4_0", 64, 96, name="w"), graphrt.new_input("f32", 64, 2, name="x")
    product = ops.mul_mat(w, x)
    assert group_work(Group([product])) == Work(2 * 64 * 96 * 2, w.nbytes + x.nbytes + product.nbytes)
    residual = graphrt.new_input("f32", 96, 2, name="r")
    both = Group([product, ops.add(product, residual)])
    assert group_work(both).bytes == w.nbytes + x.nbytes + 2 * residual.nbytes, "the product itself stays inside"
    assert group_work(both).flops == 2 * 64 * 96 * 2 + 96 * 2


def test_what_several_nodes_of_a_group_read_counts_once() -> None:
    x = graphrt.new_input("f32", 64, 1, name="x")
    gate, up = (ops.mul_mat(graphrt.new_tensor("f16", 64, 32, name=n), x) for n in ("gate", "up"))
    out = ops.glu(gate, up, "swiglu")
    assert group_work(Group([gate, up, out])).bytes == 2 * 64 * 32 * 2 + x.nbytes + out.nbytes
    assert group_work(Group([gate, up], results=[gate, up])).bytes == 2 * 64 * 32 * 2 + x.nbytes + 2 * 32 * 4


def test_an_attention_reads_the_cells_that_its_mask_shows() -> None:
    q = graphrt.new_input("f32", 64, 2, 4, name="q")
    k, v = (graphrt.new_input("f16", 64, 40, 2, name=name) for name in "kv")
    cells, pos = graphrt.new_input("i32", 40, name="cells"), graphrt.new_input("i32", 2, name="pos")
    mask = ops.kq_mask(cells, pos, 8, name="attn_inp_kq_mask")
    out = Group([ops.flash_attn_ext(q, k, v, mask, 0.1)])
    rest = q.nbytes + mask.nbytes + out.nodes[0].nbytes
    assert group_work(out).bytes == k.nbytes + v.nbytes + rest
    shown = group_work(out, {"attn_inp_kq_mask": (0.25, 0.125)})
    assert shown == Work(group_work(out).flops // 8, (k.nbytes + v.nbytes) // 4 + rest)
    exe = graphrt.prepare(graphrt.Graph(out.nodes[0]), "cpu")
    exe.write(cells, np.where(np.arange(40) < 10, np.arange(40), -1).astype(np.int32))
    exe.write(pos, np.array([9, 4], np.int32))
    assert masks.seen_shares(exe) == {"attn_inp_kq_mask": (10 / 40, (8 + 5) / 80)}


def test_an_attention_that_writes_its_cache_reads_the_rest_of_it() -> None:
    q = graphrt.new_input("f32", 64, 1, 2, name="q")
    caches = [graphrt.new_input("f16", 64, 40, 2, name=f"{x}_cache") for x in "kv"]
    new = [graphrt.new_input("f32", 64, 1, 2, name=x) for x in "kv"]
    ids = graphrt.new_input("i32", 1, name="ids")
    sets = [ops.set_rows(rows, ids, cache) for rows, cache in zip(new, caches)]
    out = ops.flash_attn_ext(q, *sets, None, 0.1)
    apart = sum(group_work(Group([node])).bytes for node in (*sets, out))
    assert group_work(Group([*sets, out], results=[*sets, out])).bytes == apart - ids.nbytes


def _made(parts: list[Part]) -> None:
    for part in parts:
        part.make()()
        part.wait()


def _normed() -> tuple[graphrt.Tensor, graphrt.Tensor]:
    x = graphrt.new_input("f32", 64, 3, name="x")
    row = graphrt.new_input("f32", 64, name="row")
    scaled = ops.mul(ops.rms_norm(x, 1e-5), row)
    return x, ops.mul(scaled, scaled)


@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize("exact", [True, False])
def test_groups_one_by_one_give_what_the_whole_gives(name: str, exact: bool) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    x, out = _normed()
    exe = graphrt.prepare(graphrt.Graph(out), get_backend(name, exact=exact))
    exe.write(x, np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32))
    exe.write("row", np.linspace(0.5, 1.5, 64, dtype=np.float32))
    exe.run()
    wanted = exe.read(out)
    parts = parts_of(exe)
    assert [p.label for p in parts] == (["RMS_NORM", "MUL", "MUL"] if exact else ["RMS_NORM+MUL", "MUL"])
    exe.write(x, np.zeros((3, 64), np.float32))
    exe.run()
    assert not exe.read(out).any()
    exe.write(x, np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32))
    _made(parts)
    np.testing.assert_array_equal(exe.read(out), wanted)


def test_copies_between_backends_are_parts() -> None:
    x = graphrt.new_input("f32", 64, name="x")
    out = ops.rms_norm(ops.sqr(x, name="squares"), 1e-5)
    exe = graphrt.prepare(graphrt.Graph(out), [ToyBackend(), get_backend("cpu")])
    exe.write(x, np.arange(64, dtype=np.float32))
    parts = parts_of(exe)
    assert [(p.label, p.op) for p in parts] == [("SQR", "SQR"), ("copy to cpu", "copy"), ("RMS_NORM", "RMS_NORM")]
    assert parts[1].work == Work(0, 2 * 64 * 4) and parts[1].tensors == ("squares",)
    _made(parts)
    by_parts = exe.read(out)
    exe.run()
    np.testing.assert_array_equal(by_parts, exe.read(out))


# ---- tables ----


def _consistent(phase: dict[str, Any], n_groups: int) -> None:
    for table in (phase["groups"], phase["ops"]):
        assert sum(row["calls"] for row in table) == n_groups * phase["steps"]
        assert sum(row["share"] for row in table) == pytest.approx(1)
        assert sum(row["total_us"] for row in table) == pytest.approx(phase["parts_us"] * phase["steps"])
        for row in table:
            assert row["total_us"] == pytest.approx(row["mean_us"] * row["calls"]) and row["total_us"] > 0
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["total_us"] / 1e3)
            assert row["tflop_per_s"] == pytest.approx(row["flops"] / row["total_us"] / 1e6)
        assert [row["total_us"] for row in table] == sorted((row["total_us"] for row in table), reverse=True)


@pytest.mark.parametrize("exact", [True, False])
def test_a_profile_of_a_model(path: Path, exact: bool, tmp_path: Path) -> None:
    session = load(path, "cpu", exact=exact).session(SessionOptions(n_ctx=32, n_batch=8))
    phases = profile_session(session, tokens(12), 4, tmp_path / "trace.json")
    assert [(p.kind, p.n_tokens, p.steps) for p in phases] == [("prefill", 8, 3), ("decode", 1, 4)]
    assert session.n_past == 13, "the second batch was read before the decode steps"
    for phase, told in zip(phases, report.as_json(phases)):
        _consistent(told, len(phase.parts))
        assert told["times_taken"] == "each group by itself, medians by the host's clock" and told["gpu"] is None
        groups = session.executable(phase.n_tokens, 1).splits[0].groups
        assert [p.label for p in phase.parts] == [g.label for g in groups]
        written = {t for row in told["groups"] for t in row["tensors"]}
        assert {"result_output", "l_out-0", "l_out-1"} <= written
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum((len(p.parts) + 1) * p.steps for p in phases)
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in spans)
    assert any(e["name"].startswith("FLASH_ATTN_EXT __fattn__-1 [decode ") for e in spans)


def test_a_full_context_has_no_decode_step(path: Path, tmp_path: Path) -> None:
    session = load(path, "cpu").session(SessionOptions(n_ctx=5))
    assert [p.kind for p in profile_session(session, tokens(5), 2, tmp_path / "t.json")] == ["prefill"]
    with pytest.raises(SessionError, match="the context holds 5 tokens, got 6"):
        profile_session(session, tokens(6), 2, tmp_path / "t.json")


# ---- a GPU's trace, made up ----


def _part(label: str, queued: bool = True) -> Part:
    return Part(label, label, ("t",), Work(2000, 1000), lambda: lambda: None, lambda: None, queued)


class GpuEvents:
    """What torch's profiler writes: spans of the host, launches in them, kernels by correlation."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.n = 0

    def span(self, name: str, start: float, dur: float) -> None:
        self.events.append({"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": dur, "args": {}})
        self.events.append({"ph": "X", "cat": "gpu_user_annotation", "name": name, "ts": start + 50, "dur": dur})

    def kernel(self, launch: float, start: float, dur: float, correlation: int | None = None) -> None:
        self.n += 1
        args = {"correlation": correlation or self.n, "External id": 1}
        if launch >= 0:
            self.events.append({"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": launch, "dur": 1})
            self.events[-1]["args"] = args
        self.events.append({"ph": "X", "cat": "kernel", "name": "k", "ts": start, "dur": dur, "args": args})


def _gpu_trace(in_step: bool = True, noted: bool = True) -> list[dict[str, Any]]:
    """Parts A of two kernels, B of one, C on the host; two whole steps, in which A's kernels overlap by 2 us."""
    t = GpuEvents()
    t.kernel(5, 6, 3)  # outside of every span
    for name, start in (("A", 100), ("B", 200), ("C", 300)):
        t.span(f"{name} t [decode {'ABC'.index(name)}]", start, 90)
    t.span("other [prefill 0]", 400, 90)
    for launch, start in ((110, 120), (112, 130), (210, 220), (410, 420)):
        t.kernel(launch if noted else -1, start, 6)
    for begin in (1000, 2000):
        t.span("step [decode step]", begin, 500)
        same = t.n + 1
        work = [(20, 10), (28, 10), (50, 5)] if in_step else [(20, 10)]
        for i, (start, dur) in enumerate(work):  # a graph has one launch for all
            t.kernel(begin + 2 if i == 0 and noted else -1, begin + start, dur, same if noted else None)
    return t.events


@pytest.mark.parametrize("noted", [True, False])
def test_kernels_of_a_replay_go_to_their_groups(noted: bool) -> None:
    phase = Phase("decode", 1, 2, [_part("A"), _part("B"), _part("C", queued=False)], [], 1e-3)
    timed = spans.timed(phase, _gpu_trace(noted=noted))
    assert timed.in_step and timed.seconds == pytest.approx([18e-6, 5e-6, 90e-6])
    assert timed.gpu is not None and timed.gpu.kernels == 3
    assert (timed.gpu.span, timed.gpu.gaps) == pytest.approx((35e-6, 12e-6))
    (a, b) = (r for r in rows(timed, lambda p: p.label) if r.name != "C")
    assert (a.calls, a.seconds, a.gb_per_s) == (2, pytest.approx(36e-6), pytest.approx(1000 / 18e-6 / 1e9))
    assert b.tflop_per_s == pytest.approx(2000 / 5e-6 / 1e12)
    text = "\n".join(report.lines([timed]))
    assert "35 us on the GPU: 3 kernels and copies, with gaps of 12 us between them (34.3 %)" in text


def test_steps_whose_kernels_were_not_all_seen_leave_the_groups_own() -> None:
    phase = Phase("decode", 1, 2, [_part("A"), _part("B"), _part("C", queued=False)], [], 1e-3)
    timed = spans.timed(phase, _gpu_trace(in_step=False))
    assert not timed.in_step and timed.seconds == pytest.approx([12e-6, 6e-6, 90e-6])
    assert report._how(timed) == "kernels of each group by itself"
    blind = [e for e in _gpu_trace() if e["cat"] != "kernel"]
    assert spans.timed(phase, blind).seconds == pytest.approx([90e-6] * 3), "no kernels at all: the host's clock"


def test_own_times_leave_no_overlap() -> None:
    work = [(0.0, 10.0), (2.0, 4.0), (8.0, 12.0), (20.0, 21.0)]
    assert spans.own_times(work) == [10.0, 0.0, 2.0, 1.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_kernels_are_told_by_group(tmp_path: Path) -> None:
    model = Model(synthetic("tiny:q4_k_m"), [get_backend("triton", exact=False), get_backend("cpu", exact=False)])
    session = model.session(SessionOptions(n_ctx=256))
    assert not session.fallbacks()
    phases = profile_session(session, tokens(40), 8, tmp_path / "trace.json")
    for phase, told in zip(phases, report.as_json(phases)):
        _consistent(told, len(phase.parts))
        assert phase.in_step and phase.gpu is not None and phase.gpu.kernels >= len(phase.parts)
        assert 0 <= phase.gpu.gaps < phase.gpu.span < 2 * phase.step
        assert sum(phase.seconds) == pytest.approx(phase.gpu.span - phase.gpu.gaps)


# ---- memory ----


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("options", [SessionOptions(), SessionOptions(40, 16, "q8_0", "f16")])
def test_needs_are_what_is_then_allocated(architecture: str, options: SessionOptions, tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", architecture, **{"attention.key_length": 32, "attention.value_length": 32})
    if architecture == "llama":
        file = write_model(tmp_path / "m.gguf", architecture)
        options = replace(options, type_k="f16")
    model = load(file, "cpu")
    needs = memory_needs(model.file, model.backends, options)
    session = model.session(options)
    assert (needs.weights, needs.cache) == (model.weights.nbytes, session.cache.nbytes)
    assert needs.in_place and needs.n_ctx == session.n_ctx and needs.taken == session.cache.nbytes
    assert needs.total > needs.free > 0 and str(needs).startswith(f"weights {needs.weights / 1024:.1f} KiB (read in")


def test_a_made_up_model_needs_no_data() -> None:
    file = synthetic("llama-8b:q4_k_m")
    assert weights_bytes(file) == file.nbytes
    needs = memory_needs(file, [ToyBackend()], SessionOptions(8192))
    assert needs.cache == 32 * 2 * 8192 * 1024 * 2 and not needs.total
    assert "weights 4.58 GiB | KV 1.00 GiB (8192 tokens, f16)" in str(needs)
    check_fits(needs, SessionOptions(8192))
    latent = memory_needs(synthetic("deepseek2-lite"), [ToyBackend()], SessionOptions(8192))
    assert latent.cache == 27 * 8192 * 576 * 2, "keys alone, of which values are a part"


def _gpu(free: int) -> Callable[[Any], list[Device]]:
    return lambda self: [Device("cuda:0", "a GPU", 80 * 2**30, free)]


def test_what_does_not_fit_is_refused_with_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    file, options = synthetic("llama-8b:q4_k_m"), SessionOptions(8192)
    monkeypatch.setattr(ToyBackend, "devices", _gpu(weights_bytes(file) + 600 * MIB))
    monkeypatch.setattr("graphrt.models.memory.for_cache", lambda backends, kind: backends[0])
    needs = memory_needs(file, [ToyBackend()], options)
    with pytest.raises(MemoryPlanError) as caught:
        check_fits(needs, options)
    said = str(caught.value)
    assert "memory of cuda:0: 4.58 GiB of weights and 1.00 GiB of cache for 8192 tokens take 5.58 GiB" in said
    assert "and 5.16 GiB of 80.00 GiB can be had" in said and "smaller quantization" in said
    assert "type_k and type_v of q8_0 (a cache of 544.0 MiB) fits; an n_ctx of at most 4800 fits" in said
    hp_bytes = [cache_bytes(load_hparams(file), replace(options, n_ctx=n)) for n in (4800, 4801)]
    assert hp_bytes[0] <= 600 * MIB < hp_bytes[1]
    monkeypatch.setattr(ToyBackend, "devices", _gpu(MIB))
    with pytest.raises(MemoryPlanError, match="smaller quantization of the model") as caught:
        check_fits(memory_needs(file, [ToyBackend()], options), options)
    assert "fits" not in str(caught.value), "no cache is small enough"


def test_a_hosts_limit_is_its_memory_without_the_mapped_weights() -> None:
    file, options = synthetic("tiny:q4_0"), SessionOptions(512)
    needs = replace(memory_needs(file, [get_backend("cpu")], options), total=2**20, free=1)
    assert needs.cache == 3 * 2 * 512 * 128 * 2 == needs.taken < 2**20
    check_fits(needs, options)
    check_fits(replace(needs, total=needs.taken), options)
    with pytest.raises(MemoryPlanError):
        check_fits(replace(needs, total=needs.taken - 1), options)
    with pytest.raises(MemoryPlanError, match="memory of cpu: 768.0 KiB of cache for 512 tokens") as caught:
        check_fits(replace(needs, total=500_000), options)
    assert "type_k and type_v of q8_0 (a cache of 408.0 KiB) fits" in str(caught.value) and "quanti" not in str(
        caught.value
    )


def load_hparams(file: GGUFFile) -> Any:
    from graphrt.models.arch import architecture
    from graphrt.models.hparams import Keys

    return architecture(file.get("general.architecture", str)).read(Keys(file))


def test_run_refuses_before_anything_is_allocated(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton = pytest.importorskip("graphrt.backends.triton.backend")
    for name in ("alloc", "hold"):
        monkeypatch.setattr(triton.TritonBackend, name, lambda *args: pytest.fail("memory was taken"))
    monkeypatch.setattr(triton.TritonBackend, "devices", _gpu(50_000))
    command = ["run", str(path), "--backend", "triton", "-p", "a", "-n", "1", "-c", "64"]
    assert cli.main(command) == 2
    told = capsys.readouterr()
    assert told.out == "" and "memory: weights 59.7 KiB | KV 16.0 KiB (64 tokens, f16) | free 48.8 KiB of " in told.err
    assert "graphrt run: what a model needs must fit in the memory of cuda:0" in told.err


# ---- the command line ----


def test_run_profiles_and_tells_its_memory(path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "p.json"
    base = ["run", str(path), "-p", "hello the sea", "--raw", "-n", "4", "--temp", "0", "--backend", "cpu"]
    assert cli.main([*base, "--profile", str(trace), "--profile-steps", "2", "--memory"]) == 0
    plain = capsys.readouterr()
    assert "memory: weights 59.7 KiB (read in place) | KV 64.0 KiB (256 tokens, f16) | free " in plain.err
    assert "\ndecode: 1 token a step, 2 steps" in plain.err and f"trace: {trace}" in plain.err
    assert "MUL_MAT+MUL_MAT+GLU" in plain.err and "us by the host's clock; its groups one by one" in plain.err
    assert cli.main([*base, "--profile", str(trace), "--profile-steps", "2", "--memory", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == plain.out and found["memory"]["weights"] == 61_096
    assert [p["phase"] for p in found["profile"]["phases"]] == ["prefill", "decode"]
    assert cli.main([*base, "--json"]) == 0
    assert not {"memory", "profile"} & set(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("value", "said"), [("model.gguf", "give MODEL before --profile"), ("no/such/x.json", "in a folder that is there")]
)
def test_a_trace_must_be_writable(value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "-p", "a", "--profile", value])
    assert said in capsys.readouterr().err
