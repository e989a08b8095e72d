"""Gradients of the triton backend but attention's, in Triton's interpreter: cases, routes, forms with several pieces,
equal bits, and whole steps of training held against the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from support import tiny_archs
from support.aot_arch import target_of
from support.aot_backward import adamw_group
from support.planned import routed
from support.tiny import tokens, write_model

from graphrt import Graph, get_backend, gradients, new_input, new_tensor, ops, prepare
from graphrt.backend import Usage, backend_elsewhere
from graphrt.backends.triton import device
from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.kernels.backward import loss, rows
from graphrt.backends.triton.kernels.backward.movement import disjoint_parts
from graphrt.backends.triton.kernels.products import gemm_large
from graphrt.models.gguf import GGUFFile
from graphrt.models.model import Model
from graphrt.models.training.lora import LoraOptions
from graphrt.models.training.trainer import AdamW, Trainer
from graphrt.ops.opt_step import adamw_moments
from graphrt.testing import Case, all_cases
from graphrt.tools.bench.training import scattered
from graphrt.tools.check.order_report import ordered
from graphrt.tools.conformance.run.step import run_case
from graphrt.tools.explain.devices import known_device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
#: Every so many of an op's cases run here; on a GPU the conformance tool runs all.
EVERY = {
    "SILU_BACK": 6, "UNARY_BACK": 7, "RMS_NORM_BACK": 3, "ROPE_BACK": 3, "SOFT_MAX_BACK": 5, "REPEAT_BACK": 2,
    "GET_ROWS_BACK": 5, "SET_ROWS_BACK": 2, "VIEW_BACK": 1, "OUT_PROD": 4, "MUL_MAT_ID_BACK": 2, "OUT_PROD_ID": 4,
    "CROSS_ENTROPY_LOSS": 5, "CROSS_ENTROPY_LOSS_BACK": 5, "OPT_STEP_SGD": 6, "OPT_STEP_ADAMW": 6,
}  # fmt: skip
ALL = {op: list(all_cases(op)) for op in EVERY}
CASES = {str(case): case for op, step in EVERY.items() for case in ALL[op][::step]}


def right(case: Case) -> str:
    """What is wrong with a case's result, "" if nothing is."""
    outcome = run_case(case, TritonBackend(), 0)
    return "" if outcome.status == "pass" else outcome.message or outcome.status


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    assert right(CASES[name]) == ""


def test_long_rows_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_ROW", 512)
    monkeypatch.setattr(rows, "LONG_BLOCK", 256)
    long = [c for op in ("RMS_NORM_BACK", "SOFT_MAX_BACK") for c in ALL[op] if "1025" in str(c)]
    assert len(long) > 3
    for case in long[::2]:
        assert right(case) == "", str(case)


def test_products_of_weights_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are dequantized some rows, or some experts, at a time."""
    monkeypatch.setattr(gemm_large, "SCRATCH", 2 * 256 * 3)
    chosen = [c for c in ALL["OUT_PROD"] if "q4_K" in str(c)]
    monkeypatch.setattr(gemm_large, "SCRATCH", 2 * 256 * 3)
    for case in chosen:
        assert right(case) == "", str(case)
    monkeypatch.setattr(gemm_large, "SCRATCH", 2 * 256 * 7 * 2)  # two experts of five
    for case in [c for c in ALL["MUL_MAT_ID_BACK"] if "q8_0" in str(c)]:
        assert right(case) == "", str(case)


def test_infinite_and_missing_logits() -> None:
    """-inf has no share; a row of them, and NaN, give NaN in that row alone."""
    x, labels, d = (
        new_input("f32", 40, 4, name="x"),
        new_input("f32", 40, 4, name="labels"),
        new_input("f32", 1, name="d"),
    )
    back = ops.cross_entropy_loss_back(d, x, labels)
    given = np.random.default_rng(0).normal(size=(4, 40)).astype(np.float32)
    given[0, 5:] = -np.inf
    given[1] = -np.inf
    given[2, 7] = np.nan
    found = []
    for backend in ("cpu", TritonBackend()):
        exe = prepare(Graph(back), backend)
        exe.write_all({"x": given, "labels": np.full((4, 40), 1 / 40, np.float32), "d": [1.0]})
        exe.run()
        found.append(np.asarray(exe.read(back))[0, 0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-9)
    assert np.isnan(found[1][1:3]).all() and np.isfinite(found[1][[0, 3]]).all()


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_a_view_are_apart_and_all_of_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        ne, strides = rng.integers(1, 6, 4).tolist(), rng.integers(0, 9, 4).tolist()
        places = sum(
            np.arange(n).reshape([-1 if k == i else 1 for k in range(4)]) * step
            for i, (n, step) in enumerate(zip(ne, strides))
        )
        numbers, seen = np.arange(places.size).reshape(ne), []
        for part in disjoint_parts(ne, strides):
            inside = places[part].reshape(-1)
            assert len(set(inside.tolist())) == inside.size
            seen += numbers[part].reshape(-1).tolist()
        assert sorted(seen) == list(range(places.size))


class Setting:
    target, exact = target_of("sm_90"), False


def test_routes() -> None:
    """A product that is a gradient has a kernel of its own, and forward ones never have it."""
    weights, x = new_tensor("q4_K", 256, 64), new_tensor("f32", 256, 4)
    back = routed(ops.out_prod(weights, ops.transpose(new_tensor("f32", 64, 4))), Setting())
    assert (
        back.kernel.name == "gemm_large_back" and "dequantized to scratch" in back.reason and "4 tokens" in back.reason
    )
    assert "along a weight's rows" in back.refused["gemv"] and back.form.value == "f16"
    assert routed(ops.mul_mat(weights, x), Setting()).kernel.name == "gemv"
    ids, experts = new_tensor("i32", 2, 4), new_tensor("q8_0", 64, 32, 8)
    of_experts = routed(ops.mul_mat_id_back(experts, new_tensor("f32", 32, 2, 4), ids), Setting())
    assert of_experts.kernel.name == "expert_back"
    assert "expert_back" not in routed(ops.mul_mat_id(experts, new_tensor("f32", 64, 1, 4), ids), Setting()).kernel.name
    plain = routed(ops.out_prod(new_tensor("f32", 8, 5), new_tensor("f32", 3, 5)), Setting())
    assert plain.form.value == "f32" and "dequantized" not in plain.reason


def _step(share: str = "") -> tuple[Graph, list[Any]]:
    """A step of AdamW on a leaf. share: what keeps the fusion from it."""
    backend, rng = TritonBackend(exact=False), np.random.default_rng(3)
    leafs = []
    for name in ("a", "m", "v"):
        leaf = new_tensor("f32", 70, 30, name=name)
        leaf.buffer = backend.alloc(leaf.nbytes, Usage.STATE)
        leaf.buffer.write(0, np.abs(rng.normal(size=2100)).astype(np.float32).view(np.uint8))
        leafs.append(leaf)
    a, m, v = leafs
    grad, hyper = new_input("f32", 70, 30, name="grad"), new_input("f32", 5, name="hyper")
    means = adamw_moments(grad, m, v, 0.8, 0.95)
    graph = Graph(ops.cpy(ops.opt_step_adamw(a, *means, hyper), a))
    if share == "m":
        graph.expand(ops.scale(means[0], 2.0))
    exe = prepare(graph, [backend, get_backend("cpu")])
    exe.write_all({"grad": rng.normal(size=(30, 70)).astype(np.float32), "hyper": [0.1, 1e-3, 0.2, 1.5, 20.0]})
    return exe, leafs


def test_a_step_of_adamw_is_one_launch() -> None:
    exe, leafs = _step()
    apart, expected = _step("m")
    assert [step.kernel for step in exe.splits[0].run.steps] == ["adamw_in_place"]
    assert len(apart.splits[0].run.steps) > 8
    for _ in range(3):
        exe.run()
        apart.run()
    for ours, other in zip(leafs, expected):
        np.testing.assert_allclose(*(t.buffer.read(0, t.nbytes).view(np.float32) for t in (ours, other)), rtol=2e-6)
    assert len(adamw_group().nodes) == 11


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "reglu"])
def test_both_gradients_of_a_glu_are_one_launch(kind: str) -> None:
    gate, value, d = (new_input("f32", 130, 9, name=name) for name in ("gate", "value", "d"))
    found = gradients(ops.glu(gate, value, kind), [gate, value], d_loss=d)
    rng, made = np.random.default_rng(2), []
    given = {name: rng.normal(size=(9, 130)).astype(np.float32) for name in ("gate", "value", "d")}
    for backend in (TritonBackend(), TritonBackend(exact=False)):
        exe = prepare(Graph(*found), backend)
        exe.write_all(given)
        exe.run()
        made.append([np.array(exe.read(t)) for t in found])
    assert [step.kernel for step in exe.splits[0].run.steps] == ["glu_gradients"]
    for ours, expected in zip(*made[::-1]):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-7)


def test_the_same_bits_each_time() -> None:
    for op, part in (("GET_ROWS_BACK", "n_ids=70"), ("REPEAT_BACK", "1025"), ("OUT_PROD_ID", "tokens=40")):
        case = next(c for c in ALL[op] if part in str(c))
        inputs = case.build()
        exe = prepare(inputs.graph(), TritonBackend())
        inputs.fill(exe)
        exe.run()
        first = np.array(exe.read(inputs.result))
        exe.run()
        np.testing.assert_array_equal(first, exe.read(inputs.result))


#: Steps of a tiny model of so many tokens.
N = 6


@pytest.mark.parametrize("arch", ["llama Q4_0"])
def test_a_step_of_training_is_the_cpu_s(tmp_path: Path, arch: str) -> None:
    """Loss and every gradient, on the triton backend alone: nothing goes to the host."""
    path, found = write_model(tmp_path / "m.gguf", *arch.split()), []
    for backends in ([get_backend("cpu")], [TritonBackend(exact=False), get_backend("cpu")]):
        trainer = Trainer(
            Model(GGUFFile.open(path), backends), N, lora=LoraOptions(rank=2, targets=("attn_q", "ffn_down")),
            optimizer=AdamW(lr=0.0),
        )  # fmt: skip
        assert [split.backend.id for split in trainer.exe.splits] == [backends[0].id]
        scattered(trainer.adapters)
        loss_of = trainer.step(np.array(tokens()[:N], np.int32))
        found.append((loss_of, np.concatenate([trainer.exe.read(g).reshape(-1) for g in trainer.gradients])))
    (loss_cpu, expected), (loss_gpu, actual) = found
    assert loss_gpu == pytest.approx(loss_cpu, rel=2e-3)
    assert np.linalg.norm(actual - expected) < 0.03 * np.linalg.norm(expected)  # 8-bit activations of 6 tokens


@pytest.mark.parametrize(("arch", "n"), [("llama Q4_0", 5), *[(f"{name} Q4_K", 80) for name in [*tiny_archs.WIDE][:1]]])
def test_launches_of_a_step_come_in_order(tmp_path: Path, arch: str, n: int) -> None:
    """Planned for an H100: adapters that a step overwrites are read by the next one, which may begin early."""
    backends = [backend_elsewhere("triton", known_device("h100").elsewhere, exact=False), get_backend("cpu")]
    model = Model(GGUFFile.open(write_model(tmp_path / "m.gguf", *arch.split())), backends)
    trainer = Trainer(model, n, lora=LoraOptions(rank=4))
    assert len(trainer.exe.splits) == 1
    found = ordered("training", trainer.exe)
    assert not found.violations and found.starts_early > 20


def test_large_rows_of_a_loss_keep_all_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of many blocks, its labels in the last one."""
    monkeypatch.setattr(loss, "_MOST", 32)
    x, labels = new_input("f32", 301, 2, name="x"), new_input("f32", 301, 2, name="labels")
    node, rng = ops.cross_entropy_loss(x, labels), np.random.default_rng(1)
    exe = prepare(Graph(node), TritonBackend())
    logits, wanted = rng.normal(size=(2, 301)).astype(np.float32), np.zeros((2, 301), np.float32)
    wanted[0, 300] = wanted[1, 299] = 1.0
    exe.write_all({"x": logits, "labels": wanted})
    exe.run()
    expected = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(wanted)).item()
    assert float(np.asarray(exe.read(node)).reshape(())) == pytest.approx(expected, rel=1e-6)
