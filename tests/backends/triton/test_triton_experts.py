"""Mixtures of experts on the triton backend, in Triton's interpreter: products by chosen experts, routing, fusions."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import graphrt
from graphrt import Graph, Tensor, get_backend, new_input, ops
from graphrt.backend import Backend, Usage
from graphrt.backends.triton import device
from graphrt.execute import Executable
from graphrt.testing import Case, all_cases, dequantize, nmse, quantize
from graphrt.tools.conformance.run.step import run_case

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.aot_arch import target_of
from support.aot_rows import context
from support.batch_products import seen_by_wgmma
from support.gluon_warps import emulate
from support.planned import groups_in, lowered_group, routed
from support.wgmma_order import wgmma_order

from graphrt.backends.triton.kernels.experts import gather, pairs, wgmma
from graphrt.backends.triton.kernels.experts.gemv import packed_expert_gemv
from graphrt.backends.triton.kernels.experts.lower import EXPERT_GATE_UP
from graphrt.backends.triton.kernels.products import activations, route
from graphrt.backends.triton.kernels.products.activations import MAX_TWO_PARTS
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.packing import Packed, PackedBuffer, pack
from graphrt.backends.triton.support import why_unsupported

#: Sums in another order, as NMSE; and where both round activations to 8 bits of values that differ in a last bit.
SAME, STEPS = 1e-11, 1e-4
#: `graphrt test -b triton` runs all cases; this is every n-th, less what takes long interpreted.
EVERY = {"MUL_MAT_ID": 29, "ADD_ID": 4, "FILL": 5}
SLOW = ("tokens=300", "tokens=70", "n_expert=128", "k=2304", "m=130", "tokens=40")


def _some() -> list[Case]:
    found = [c for op, every in EVERY.items() for c in all_cases(op) if zlib.crc32(str(c).encode()) % every == 0]
    return [c for c in found if not any(part in str(c) for part in SLOW)]


@pytest.fixture(scope="module", params=[True, False], ids=["exact", "fast"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return get_backend("triton", exact=request.param)


@pytest.mark.parametrize("case", _some(), ids=str)
def test_a_case(case: Case, backend: Backend) -> None:
    outcome = run_case(case, backend)
    assert outcome.status == "pass", outcome.message


@pytest.mark.parametrize("case", [c for c in all_cases("MUL_MAT_ID") if c.axes["m"] == 5 and c.axes["tokens"] == 2 and
                                  c.axes["n_expert"] == 4 and c.axes["k"] == 256], ids=str)  # fmt: skip
def test_every_type(case: Case, backend: Backend) -> None:
    outcome = run_case(case, backend)
    assert outcome.status == "pass", outcome.message


def test_what_takes_which_way() -> None:
    def node(kind: str, tokens: int, used: int = 4, k: int = 256) -> Tensor:
        x, ids = Tensor("f32", (k, 1, tokens)), Tensor("i32", (used, tokens))
        return ops.mul_mat_id(Tensor(kind, (k, 8, 16)), x, ids)

    exact, fast = get_backend("triton"), get_backend("triton", exact=False)
    for kind, when_exact, when_fast in (("q4_K", False, True), ("f16", True, True), ("iq3_s", False, True)):
        most = route.MAX_PAIRS // 4
        taken = [routed(node(kind, n), b).kernel.name for n, b in ((most, exact), (most, fast), (most + 1, fast))]
        assert [name == "expert_gemv" for name in taken] == [when_exact, when_fast, False]
        assert why_unsupported(node(kind, most)) is None
    long = MAX_TWO_PARTS + 256  # shorter rows are rounded in two parts, which is nothing to declare
    assert fast.rounds_activations(node("q4_K", 1, k=long)) == "int8"
    assert fast.rounds_activations(node("q4_K", 1)) is fast.rounds_activations(node("q4_K", most + 1, k=long)) is None
    assert exact.rounds_activations(node("q4_K", 1, k=long)) is None
    assert "not f64" in (why_unsupported(node("f64", 1)) or "")
    assert "no decoder for q8_1" in (why_unsupported(node("q8_1", 1)) or "")


# -- the order of pairs


@pytest.mark.parametrize(("used", "tokens", "n_expert"), [(1, 1, 1), (2, 3, 4), (4, 70, 8), (3, 50, 129)])
def test_pairs_are_sorted_by_expert(used: int, tokens: int, n_expert: int) -> None:
    """As a stable sort does it, whatever the strides; ids that are no experts come last."""
    rng = np.random.default_rng(tokens)
    whole = Tensor("i32", (used + 2, tokens))
    ids = ops.view(whole, (used, tokens), whole.nb[1:2])
    ctx = context(device.target())
    values = rng.integers(-1, n_expert + 2, (tokens, used + 2)).astype(np.int32)
    ctx.place(whole)[0].write(0, values.reshape(-1).view(np.uint8))
    found, steps = pairs.sorted_pairs(ids, n_expert, ctx)
    assert pairs.sorted_pairs(ids, n_expert, ctx) == (found, [])
    for step in steps:
        step()
    flat = values[:, :used].reshape(-1)
    group = np.where((flat >= 0) & (flat < n_expert), flat, n_expert)
    np.testing.assert_array_equal(found.sorted.cpu().numpy(), np.argsort(group, kind="stable"))
    np.testing.assert_array_equal(found.first.cpu().numpy(), np.searchsorted(np.sort(group), np.arange(n_expert + 2)))


@pytest.mark.parametrize("kind", ["f32", "f16"])
@pytest.mark.parametrize(("slots", "k"), [(1, 288), (3, 256), (3, 100)])
def test_rows_are_gathered_in_the_order_of_pairs(slots: int, k: int, kind: str) -> None:
    """In wgmma.py's order, zeros behind them; of strided rows, of values that f16 ends before."""
    rng = np.random.default_rng(k)
    ids, whole = Tensor("i32", (3, 7)), Tensor(kind, (k, slots + 1, 7))
    x = ops.view(whole, (k, slots, 7), whole.nb[1:3])
    ctx = context(device.target())
    chosen = rng.integers(0, 4, (7, 3)).astype(np.int32)
    values = rng.standard_normal((7, slots + 1, k)) * (1e30 if kind == "f32" else 1.0)
    values[2] *= 1e-20 if kind == "f32" else 1.0
    values = values.astype(np.float32 if kind == "f32" else np.float16)
    ctx.place(ids)[0].write(0, chosen.reshape(-1).view(np.uint8))
    ctx.place(whole)[0].write(0, values.reshape(-1).view(np.uint8))
    found, steps = pairs.sorted_pairs(ids, 4, ctx)
    rows, gathering = gather.gathered(ctx.view(x), found, ctx)
    for step in (*steps, gathering):
        step()
    row = -(-k // 128) * 128
    assert rows.ordered and rows.k == row and rows.factors is not None
    places = found.sorted.cpu().numpy()
    expected = np.zeros((21, row))
    expected[:, :k] = values[places // 3, np.minimum(places % 3, slots - 1)]
    expected = expected[:, wgmma_order(row)]
    got = rows.values.cpu().numpy().astype(np.float64) * rows.factors.cpu().numpy().astype(np.float64)[:, None]
    np.testing.assert_allclose(got, expected, rtol=2**-11, atol=1e-9 * np.abs(expected).max(1, keepdims=True).min())


@pytest.mark.parametrize(("kind", "k"), [("mxfp4", 160), ("q4_K", 512)])
def test_the_way_of_many_pairs_on_hopper(kind: str, k: int) -> None:
    """Its steps as they follow one another, wgmma.py's emulated: gate, up and their GLU; some ids are no experts."""
    rng = np.random.default_rng(k)
    tokens, m, n_expert = 40, 72, 3
    x, ids = Tensor("f32", (k, 1, tokens)), Tensor("i32", (4, tokens))
    weights = [Tensor(kind, (k, m, n_expert)) for _ in range(2)]
    biases = [Tensor("f32", (m, n_expert)) for _ in range(2)]
    made = [ops.mul_mat_id(w, x, ids) for w in weights]
    sums = [ops.add_id(p, b, ids) for p, b in zip(made, biases)]
    glu = ops.glu(*sums, "swiglu_oai", alpha=1.702, limit=7.0)
    ctx = context(replace(target_of("sm_90"), sm_count=5))
    values: dict[Tensor, np.ndarray] = {}
    for t in (x, *biases):
        values[t] = rng.standard_normal(t.ne[::-1]).astype(np.float32)
        ctx.place(t)[0].write(0, values[t].reshape(-1).view(np.uint8))
    chosen = rng.integers(-1, n_expert + 1, (tokens, 4)).astype(np.int32)
    ctx.place(ids)[0].write(0, chosen.reshape(-1).view(np.uint8))
    packed: dict[Tensor, PackedBuffer] = {}
    for w in weights:
        raw = quantize(rng.standard_normal((n_expert * m, k)).astype(np.float32), w.dtype, rng)
        packed[w] = PackedBuffer(Packed.empty(kind, n_expert * m, k, "cpu"), Usage.WEIGHTS)
        pack(torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8).reshape(n_expert * m, -1)), packed[w].packed)
        values[w] = seen_by_wgmma(packed[w].packed, dequantize(raw, w.dtype).reshape(-1, k)).reshape(n_expert, m, k)
    place = ctx.place
    ctx.place = lambda t: (packed[t], 0) if t in packed else place(t)
    for step in lowered_group(groups_in(Graph(glu), EXPERT_GATE_UP)["expert_gate_up"], ctx):
        assert isinstance(step, Launch)
        if step.kernel is wgmma.expert_wgmma:
            emulate(step, seed=1)
        else:
            step.args |= {"PDL": False} if "PDL" in step.args else {}
            step.options = {}
            step()
    found = ctx.view(glu).torch()[0].numpy()
    live = (chosen >= 0) & (chosen < n_expert)
    which = np.where(live, chosen, 0)
    xs = values[x].reshape(tokens, k).astype(np.float64)
    gate, up = (
        np.einsum("tk,tumk->tum", xs, values[w][which]) + values[b].reshape(n_expert, m)[which]
        for w, b in zip(weights, biases)
    )
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    expected = gate / (1 + np.exp(np.minimum(-1.702 * gate, 700.0))) * (up + 1)
    assert np.isnan(found[~live]).all()
    assert nmse(found[live], expected[live]) < 1e-6  # x is rounded to f16


def test_tiles_suffice_however_experts_are_chosen() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        n_expert, count, size = int(rng.integers(1, 9)), int(rng.integers(1, 200)), int(2 ** rng.integers(4, 8))
        group = rng.choice(rng.integers(0, n_expert + 1, rng.integers(1, 5)), count)
        needed = sum(-(-int((group == g).sum()) // size) for g in range(n_expert + 1))
        assert needed <= min(count, count // size + min(n_expert + 1, count))


def test_ids_are_read_on_the_device() -> None:
    """A prepared graph whose ids change between runs."""
    for tokens in (2, 11):
        x, ids = new_input("f32", 32, 1, tokens, name="x"), new_input("i32", 2, tokens, name="ids")
        out = ops.mul_mat_id(new_input("f16", 32, 5, 4, name="w"), x, ids)
        exes = [graphrt.prepare(Graph(out), b) for b in ("cpu", get_backend("triton", exact=False))]
        rng = np.random.default_rng(tokens)
        w, values = rng.standard_normal((4, 5, 32)), rng.standard_normal((tokens, 1, 32))
        for _ in range(3):
            chosen = rng.integers(0, 4, (tokens, 2))
            for exe in exes:
                for name, value in (("w", w), ("x", values), ("ids", chosen)):
                    exe.write(name, value)
                exe.run()
            expected, found = (exe.read(out) for exe in exes)
            assert nmse(found, expected) < 1e-6


def test_nothing_is_compiled_by_a_length() -> None:
    code = """
from graphrt.backends.triton.kernels.experts import gather, gemm, gemv, pairs, route, sums, wgmma
kernels = (gather.gather_rows, gemm.expert_gemm_packed, gemm.expert_gemm_plain, gemv.packed_expert_gemv,
           gemv.plain_expert_gemv, pairs.list_tiles, pairs.sort_pairs, route.route_tokens, sums.add_id,
           sums.weighted_sum, wgmma.expert_wgmma)
for kernel in kernels:
    print(*(p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize and p.name[:2] != "p_"))
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True, timeout=300)
    of_weights = {f"{name}_step{i}" for name in ("row", "expert") for i in ("", "0", "1")} | {"k", "x_row"}
    rest = {"alpha", "limit", "x_desc"}  # Triton specializes no floats, and of a descriptor its block's shape only
    planes = {"packed", "packed0", "packed1"}  # all pointers
    assert set(done.stdout.split()) <= of_weights | rest | planes


# -- fusions


@dataclass(frozen=True)
class Layer:
    """A block of experts as llama.cpp builds it. gating: softmax, sigmoid, or of the chosen logits alone (weight).

    order: argsort or top_k; biased: experts' matrices have biases; chosen_by: a bias is added for the choice; read:
    what another node reads too, so that no group may take it; normed: x is a norm, of which a shared expert has
    products too."""

    kind: str = "q8_0"
    tokens: int = 1
    used: int = 3
    gating: str = "softmax"
    norm: bool = True
    clamp: bool = True
    scale: float = 0.0
    biased: bool = False
    chosen_by: bool = False
    act: str = "swiglu"
    order: str = "argsort"
    read: str = ""
    normed: bool = False
    inside: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def graph(self) -> Graph:
        k, ff, n_expert, t, used = 64, 32, 6, self.tokens, self.used
        x = new_input("f32", k, t, name="x")
        if self.normed:
            total = ops.add(x, new_input("f32", k, t, name="r"))
            x = ops.mul(ops.rms_norm(total, 1e-5), new_input("f32", k, name="norm"))
        weights, ids = self.routing(ops.mul_mat(new_input("f32", k, n_expert, name="router"), x))

        def product(name: str, source: Tensor, m: int) -> Tensor:
            made = ops.mul_mat_id(new_input(self.kind, source.ne[0], m, n_expert, name=name), source, ids)
            return ops.add_id(made, new_input("f32", m, n_expert, name=f"{name}_b"), ids) if self.biased else made

        source = ops.reshape(x, k, 1, t)
        gate, up = product("gate", source, ff), product("up", source, ff)
        down = product("down", ops.glu(gate, up, self.act), k)
        weighted = ops.mul(down, weights)
        slots = [ops.view(weighted, (k, t), weighted.nb[2:3], offs=i * weighted.nb[1]) for i in range(used)]
        total = slots[0]
        for slot in slots[1:]:
            total = ops.add(total, slot)
        if self.normed:
            halves = (ops.mul_mat(new_input(self.kind, k, ff, name=f"shared_{name}"), x) for name in ("gate", "up"))
            total = ops.add(total, ops.mul_mat(new_input(self.kind, ff, k, name="shared"), ops.glu(*halves, "swiglu")))
        known = self.inside | {"gate": gate, "down": down, "weighted": weighted}
        also = known.get(self.read.lstrip("="))
        return Graph(ops.add(total, x), *([also if self.read[:1] == "=" else ops.cont(also)] if also else []))

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [1, used, tokens] and ids [used, tokens] of logits [n_expert, tokens]."""
        n_expert, t = logits.ne[:2]
        probs = logits
        if self.gating != "weight":
            probs = ops.soft_max(logits) if self.gating == "softmax" else ops.unary(logits, "sigmoid")
        select = ops.add(probs, new_input("f32", n_expert, name="chosen_by")) if self.chosen_by else probs
        order = ops.argsort(select, descending=True) if self.order == "argsort" else ops.top_k(select, self.used)
        ids = ops.view(order, (self.used, t), order.nb[1:2]) if self.order == "argsort" else order
        picked = ops.get_rows(ops.reshape(probs, 1, n_expert, t), ids)
        self.inside.update(probs=probs, order=order, picked=picked)
        return self._shares(picked), ids

    def _shares(self, picked: Tensor) -> Tensor:
        used, t = picked.ne[1:3]
        weights = ops.reshape(picked, used, t)
        if self.gating == "weight":
            weights = ops.soft_max(weights)
        elif self.norm:
            total = ops.sum_rows(weights)
            weights = ops.div(weights, ops.clamp(total, 6.1e-5, math.inf) if self.clamp else total)
        weights = ops.reshape(weights, 1, used, t)
        return ops.scale(weights, self.scale) if self.scale else weights


def filled(graph: Graph) -> Executable:
    exe = graphrt.prepare(graph, [get_backend("triton", exact=False)])
    rng = np.random.default_rng(11)
    for t in graph.inputs:
        values = rng.standard_normal(t.shape).astype(np.float32)
        exe.write(t, quantize(values, t.dtype, rng) if t.dtype.is_quantized else values)
    return exe


def formed(exe: Executable) -> set[str]:
    """The kernels of the groups."""
    (split,) = exe.splits
    return {group.kernel for group in split.groups if group.kernel}


def results(exe: Executable) -> list[np.ndarray]:
    for _ in range(2):  # the second run finds the first one's memory
        exe.run()
    return [exe.read(t).astype(np.float64) for t in exe.graph.outputs]


ALL = {"expert_routing", "expert_gate_up", "expert_down"}
MIXTRAL = Layer()
GPT_OSS = Layer("mxfp4", used=2, gating="weight", norm=False, biased=True, act="swiglu_oai", order="top_k")
DEEPSEEK = Layer("q4_0", used=2, gating="sigmoid", chosen_by=True, scale=2.5)
#: A layer, whether its products take gemm.py, and how near fused and unfused must be.
FORMS: dict[str, tuple[Layer, bool, float]] = {
    "mixtral": (MIXTRAL, False, STEPS),
    "mixtral, many pairs": (replace(MIXTRAL, tokens=2), True, SAME),
    "gpt-oss": (GPT_OSS, False, STEPS),
    "gpt-oss, many pairs": (replace(GPT_OSS, tokens=2), True, SAME),
    "deepseek3": (DEEPSEEK, False, STEPS),
    "deepseek2, plain weights": (Layer("f16", 1, norm=False, scale=1.5), False, SAME),
    "experts and a shared one of a norm": (replace(MIXTRAL, normed=True), False, STEPS),
    "experts and a shared one of a norm, tokens": (replace(DEEPSEEK, normed=True, tokens=5), False, STEPS),
    "experts and a shared one of a norm, many pairs": (replace(MIXTRAL, normed=True, tokens=12), True, STEPS),
    "plain weights, many pairs": (Layer("f32", 2, 2, clamp=False, act="geglu"), True, SAME),
    "experts' results are read": (Layer("f16", 2, read="down", biased=True), False, SAME),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_fused_is_unfused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, many, limit = FORMS[form]
    if many:
        monkeypatch.setattr(route, "MAX_PAIRS", 0)
    exe = filled(layer.graph())
    assert formed(exe) >= (ALL if not layer.read else {"expert_sum"})
    fused = results(exe)
    monkeypatch.setenv("GRAPHRT_FUSE", "0")
    apart = filled(layer.graph())
    assert not formed(apart)
    for a, b in zip(fused, results(apart)):
        assert nmse(a, b) <= limit


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_a_norm_is_rounded_once_for_all_experts(tokens: int) -> None:
    """By the launch that makes it, which writes f32 for the router too; what comes of gate and up is rounded as ever.

    Of more than 8 tokens the shared expert's products are in 16 bits."""
    exe = filled(replace(MIXTRAL, normed=True, tokens=tokens).graph())
    steps = [step for segment in exe.splits[0].run.segments for step in segment.steps]  # type: ignore[attr-defined]
    used = [step.kernel for step in steps if isinstance(step, Launch)]
    assert "add_norm" in formed(exe) and used.count(activations.add_norm_rows) == 1
    gated = used.index(packed_expert_gemv)
    assert activations.round_rows not in used[:gated] and used.count(activations.round_rows) <= 2


INSIDE = [
    (Layer(used=1), "expert_down"), (replace(MIXTRAL, read="order"), "expert_routing"),
    (replace(MIXTRAL, read="gate"), "expert_gate_up"), (replace(MIXTRAL, read="weighted"), "expert_down"),
    (replace(MIXTRAL, read="=order"), "expert_routing"), (replace(MIXTRAL, read="=weighted"), "expert_down"),
    (replace(MIXTRAL, read="=gate"), "expert_gate_up"), (replace(MIXTRAL, read="probs"), ""),
    (replace(GPT_OSS, read="order"), ""), (replace(MIXTRAL, read="picked"), ""),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "missing"), INSIDE, ids=str)
def test_a_group_whose_inside_is_read_is_not_formed(layer: Layer, missing: str) -> None:
    exe = graphrt.prepare(layer.graph(), [get_backend("triton", exact=False)])
    assert formed(exe) & ALL == ALL - {missing}


#: What a routing has, beside the order of experts and the chosen probabilities.
ROUTINGS = {
    "softmax": Layer(norm=False), "softmax, norm": Layer(), "no clamp": Layer(clamp=False, order="top_k"),
    "sigmoid, bias": Layer(gating="sigmoid", norm=False, chosen_by=True),
    "sigmoid, bias, norm, scale": Layer(gating="sigmoid", chosen_by=True, scale=2.5),
    "bias of a softmax": Layer(chosen_by=True, scale=0.5, order="top_k"),
    "softmax of the chosen": Layer(gating="weight", norm=False, scale=1.5), "one expert": Layer(used=1, scale=3.0),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens; the first have equal logits, one expert alone, and none."""
    layer, n_expert, tokens = ROUTINGS[name], 20, 24
    rng = np.random.default_rng(1)
    given = {"logits": rng.standard_normal((tokens, n_expert)), "chosen_by": rng.standard_normal(n_expert)}
    given["logits"][0] = 0.5
    given["logits"][1, 3:9] = given["logits"][1].max()
    given["logits"][2, 1:] = -np.inf
    given["logits"][3] = -np.inf
    found = []
    for fuse in ("1", "0"):
        monkeypatch.setenv("GRAPHRT_FUSE", fuse)
        weights, ids = layer.routing(new_input("f32", n_expert, tokens, name="logits"))
        exe = graphrt.prepare(Graph(weights, chosen := ops.cont(ids)), [get_backend("triton", exact=False)])
        assert formed(exe) == ({"expert_routing"} if fuse == "1" else set())
        for t in exe.graph.inputs:
            exe.write(t, given[t.name])
        exe.run()
        order = np.argsort(exe.read(chosen)[0, 0], axis=-1)  # TOP_K has none
        found += [np.take_along_axis(x, order, -1) for x in (exe.read(chosen)[0, 0], exe.read(weights)[0, :, :, 0])]
    # Of equal ones TOP_K may take any; of no logits but -inf no softmax is told.
    rows = slice(4 if layer.order == "top_k" or layer.gating == "weight" else 0, None)
    np.testing.assert_array_equal(found[0][rows], found[2][rows])
    np.testing.assert_allclose(found[1][rows], found[3][rows], rtol=2e-6)


def test_each_pattern_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("expert_routing", "expert_gate_up", "expert_sum"):
        monkeypatch.setenv("GRAPHRT_FUSE", name)
        wanted = {"expert_sum": "expert_down"}.get(name, name)
        assert formed(graphrt.prepare(MIXTRAL.graph(), [get_backend("triton", exact=False)])) == {wanted}


def _of_two_choices(biases: bool) -> Graph:
    """Gate and up, or the biases of one of them, by ids of their own."""
    x, ids, others = (new_input(t, *ne, name=n) for t, ne, n in (("f32", (32, 1, 2), "x"), ("i32", (2, 2), "i"),
                                                                 ("i32", (2, 2), "o")))  # fmt: skip
    gate = ops.mul_mat_id(new_input("f16", 32, 8, 4, name="gate"), x, ids)
    up = ops.mul_mat_id(new_input("f16", 32, 8, 4, name="up"), x, ids if biases else others)
    return Graph(ops.glu(gate, ops.add_id(up, new_input("f32", 8, 4, name="b"), others) if biases else up, "swiglu"))


def _sum_of_slots(*order: int, offset: int = 0) -> Graph:
    """offset: bytes that all slots but the last are read from."""
    weighted = ops.mul(new_input("f32", 8, 3, 4, name="a"), new_input("f32", 1, 3, 4, name="w"))
    a, b, c = (ops.view(weighted, (8, 4), weighted.nb[2:3], offs=i * weighted.nb[1] + offset * (i < 2)) for i in order)
    return Graph(ops.add(ops.add(a, b), c))


def _sum_of_tokens() -> Graph:
    """Views that begin like slots but go along them."""
    weighted = ops.mul(new_input("f32", 8, 3, 3, name="a"), new_input("f32", 1, 3, 3, name="w"))
    a, b, c = (ops.view(weighted, (8, 3), weighted.nb[1:2], offs=i * weighted.nb[1]) for i in range(3))
    return Graph(ops.add(ops.add(a, b), c))


def _chosen(descending: bool = True, offs: int = 0, scale: float = 1.0, also: int = 0) -> Graph:
    """Two of eight experts; also: so many are read by another node."""
    probs = ops.soft_max(new_input("f32", 8, 3, name="l"), scale=scale)
    order = ops.argsort(probs, descending)
    picked = ops.get_rows(ops.reshape(probs, 1, 8, 3), ops.view(order, (2, 3), order.nb[1:2], offs=offs))
    return Graph(picked, *([ops.cont(ops.view(order, (also, 3), order.nb[1:2]))] if also else []))


def _chosen_shares(what: str) -> Graph:
    """A routing in which something is not as the pattern wants it."""
    n_expert, used = (80, 65) if what == "many" else (8, 3)
    tokens = 3
    probs = ops.soft_max(new_input("f32", n_expert, tokens, name="l"))
    select = ops.sub(probs, new_input("f32", n_expert, name="b")) if what == "bias off" else probs
    order = ops.argsort(select, True)
    ids = ops.view(order, (used, tokens), order.nb[1:2])
    picked = ops.reshape(ops.get_rows(ops.reshape(probs, 1, n_expert, tokens), ids), used, tokens)
    total = ops.clamp(ops.sum_rows(picked), 0.1, 10.0)
    shares = ops.div(ops.transpose(picked) if what == "turned" else picked, total)
    if what == "scale with a bias":
        shares = ops.scale(shares, 2.0, 0.5)
    return Graph(shares, *([ops.sqr(total)] if what == "clamp read" else []))


def _gates_of(what: str) -> Graph:
    """Gate and up of two inputs, or of unlike widths."""
    x, y = (new_input("f32", 32, 1, 2, name=name) for name in "xy")
    ids = new_input("i32", 2, 2, name="i")
    gate = ops.mul_mat_id(new_input("f16", 32, 8, 4, name="gate"), x, ids)
    up = ops.mul_mat_id(new_input("f16", 32, 8, 4, name="up"), y if what == "inputs" else x, ids)
    return Graph(ops.glu(gate, up, "swiglu"))


def _inner_sum_is_kept() -> Graph:
    weighted = ops.mul(new_input("f32", 8, 3, 4, name="a"), new_input("f32", 1, 3, 4, name="w"))
    a, b, c = (ops.view(weighted, (8, 4), weighted.nb[2:3], offs=i * weighted.nb[1]) for i in range(3))
    inner = ops.add(a, b)
    return Graph(inner, ops.add(inner, c))


UNFORMED: dict[str, Callable[[], Graph]] = {
    "gate and up of two inputs": lambda: _gates_of("inputs"),
    "an inner sum of slots that is an output": _inner_sum_is_kept,
    "gate and up of two choices": lambda: _of_two_choices(False),
    "biases of another choice": lambda: _of_two_choices(True),
    "slots in another order": lambda: _sum_of_slots(1, 0, 2),
    "a slot twice": lambda: _sum_of_slots(0, 1, 1),
    "slots from the middle of a row": lambda: _sum_of_slots(0, 1, 2, offset=4),
    "a sum over tokens": _sum_of_tokens,
    "experts from the second on": lambda: _chosen(offs=4),
    "the worst experts": lambda: _chosen(descending=False),
    "more experts are read": lambda: _chosen(also=3),
    "a softmax with a scale": lambda: _chosen(scale=2.0),
}


#: What of a routing may still be one launch, the rest being nodes of their own.
HALF_FORMED = ("clamp read", "turned", "scale with a bias", "bias off", "many")


@pytest.mark.parametrize("what", HALF_FORMED)
def test_of_a_routing_only_what_fits_is_one_launch(what: str) -> None:
    graph = _chosen_shares(what)
    exe, expected = filled_by_kind(graph), filled_by_kind(_chosen_shares(what), "cpu")
    for a, b in zip(results(exe), results(expected)):
        assert nmse(a, b) <= 1e-6
    if what == "many":
        assert "expert_routing" not in formed(exe), "more than a program has slots for"


@pytest.mark.parametrize("why", UNFORMED)
def test_no_group_is_formed(why: str) -> None:
    exe, expected = filled_by_kind(UNFORMED[why]()), filled_by_kind(UNFORMED[why](), "cpu")
    assert not formed(exe)
    for a, b in zip(results(exe), results(expected)):
        assert nmse(a, b) <= 1e-6


def filled_by_kind(graph: Graph, backend: str = "") -> Executable:
    exe = graphrt.prepare(graph, backend or [get_backend("triton", exact=False)])
    rng = np.random.default_rng(5)
    for t in graph.inputs:
        exe.write(t, rng.integers(0, 4, t.shape) if t.dtype.kind == "int" else rng.standard_normal(t.shape))
    return exe


def test_groups_of_experts() -> None:
    """As deepseek3 chooses: the best groups by their two best experts; FILL and SET_ROWS hide the others."""
    n_group, per_group, tokens, used = 4, 4, 5, 3
    probs = ops.unary(new_input("f32", n_group * per_group, tokens, name="logits"), "sigmoid")
    groups = ops.reshape(probs, per_group, n_group, tokens)
    best = ops.top_k(groups, 2)
    scores = ops.get_rows(ops.reshape(groups, 1, per_group, n_group, tokens), best)
    scores = ops.reshape(ops.sum_rows(ops.reshape(scores, 2, n_group, tokens)), n_group, tokens)
    kept = ops.top_k(scores, 2)
    hidden = ops.fill(groups, -math.inf)
    select = ops.reshape(ops.set_rows(ops.get_rows(groups, kept), kept, hidden), n_group * per_group, tokens)
    order = ops.argsort(select, descending=True)
    ids = ops.view(order, (used, tokens), order.nb[1:2])
    graph = Graph(ops.get_rows(ops.reshape(probs, 1, n_group * per_group, tokens), ids), ops.cont(ids))
    found = [results(filled_by_kind(graph, name)) for name in ("", "cpu")]
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=1e-6)
