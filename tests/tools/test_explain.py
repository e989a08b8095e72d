"""`graphrt explain`: that it tells what runs, here and for GPUs that are not here; the picture; what it refuses."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_archs  # noqa: F401  (more models for tiny)
from support.attention_plans import RUNS, Shape, causal, chosen_on, ran
from support.tiny import write_model

pytest.importorskip("triton")

import graphrt
from graphrt import get_backend
from graphrt.backends.triton import TritonBackend, device
from graphrt.backends.triton.kernels.flash_attn import stream_k
from graphrt.backends.triton.kernels.flash_attn.tile_plan import AttentionPlan, attention_plan, program_segments
from graphrt.errors import BackendError
from graphrt.models.engine import SessionOptions
from graphrt.program import LaunchInfo
from graphrt.testing import all_cases
from graphrt.tools import cli
from graphrt.tools.common import DEVICE_NAMES
from graphrt.tools.conformance.run.saved import save_failure
from graphrt.tools.explain.devices import DEVICES, device_called, known_device
from graphrt.tools.explain.masks import masks_of
from graphrt.tools.explain.steps import explained
from graphrt.tools.explain.svg import svg
from graphrt.tools.explain.text import rows_of
from graphrt.tools.inspect.subject import subject

#: The target that Triton's interpreter has, to plan for.
INTERPRETER = replace(device.INTERPRETER, device=device.ELSEWHERE)
interpreted = pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")


# ---- what is chosen ----

MLA = Shape((576, 512), heads=(16, 1), mla=True)
KERNELS: list[tuple[str, Shape, str, str]] = [
    ("h100", Shape(), "decode", "split"),
    ("h100", Shape(n_q=512), "hopper", "tile"),
    ("h200", Shape(n_q=512, kind="q8_0"), "hopper_quant", "tile"),
    ("h100", replace(MLA, n_q=512), "hopper_mla", "tile"),
    ("h100", replace(MLA, n_seq=3), "hopper_mla", "split"),
    ("h100", Shape(d=(80, 80), n_q=2048, heads=(32, 32)), "forward", "tile"),
    ("h100", Shape(n_q=20), "forward", "stream_k"),
    ("a100", Shape(), "decode", "split"),
    ("a100", Shape(n_q=200), "forward", "stream_k"),
    ("b200", Shape(n_q=512), "forward", "stream_k"),
    ("mi300x", Shape(), "forward", "split"),
    ("rtx3090", Shape(), "decode", "split"),
    ("rtx4090", Shape(n_q=512), "forward", "tile"),
    ("rtx5090", Shape(n_q=512, kind="q8_0"), "forward", "stream_k"),
    ("l40s", replace(MLA, n_q=512), "forward", "stream_k"),
    ("rtx6000ada", Shape(), "decode", "split"),
]


@pytest.mark.parametrize(("name", "shape", "kernel", "schedule"), KERNELS, ids=str)
def test_the_kernel_of_a_shape_on_a_device(name: str, shape: Shape, kernel: str, schedule: str) -> None:
    chosen = chosen_on(shape, name)
    assert (chosen.kernel, chosen.choice.schedule) == (kernel, schedule)
    assert chosen.kernel not in chosen.refused, "what serves has no reason not to"
    assert all(reason[0].islower() or reason[0].isdigit() or reason[0] in "KV" for reason in chosen.refused.values())
    if kernel == "forward" and name == "h100":
        assert {"hopper", "decode"} <= chosen.refused.keys(), "each kernel that was asked says why not"


def test_why_kernels_refuse() -> None:
    refused = chosen_on(Shape(n_q=20), "h100").refused
    assert refused["hopper"] == "it takes 48 queries or more, here 20"
    assert refused["decode"] == "it takes 16 query rows of a KV head at most, here 80"
    assert chosen_on(Shape(n_q=20), "mi300x").refused["decode"] == "it is NVIDIA's"


def test_stages_that_shared_memory_has_room_for() -> None:
    assert [chosen_on(Shape(), name).stages for name in ("h100", "a100")] == [3, 2]
    for name in ("a100", "rtx3090", "rtx4090", "rtx5090"):
        assert 0 < (chosen_on(Shape(), name).shared or 0) <= DEVICES[name].shared_memory


def test_hopper_kernels_are_hoppers_alone(run: Run) -> None:
    for name, known in DEVICES.items():
        for phase in ("prefill", "decode"):
            code, out, _ = run("llama.gguf", "--phase", phase, "--device", name, "--json")
            kernels = [x["kernel"] for step in json.loads(out)["steps"] for x in step["launches"]]
            assert code == 0 and kernels
            assert known.arch == "sm_90" or not any("hopper" in k or "wgmma" in k for k in kernels), (name, kernels)


def test_the_devices_that_help_names() -> None:
    assert DEVICE_NAMES.replace(" or ", ", ").split(", ") == list(DEVICES)


def test_who_merges_the_parts() -> None:
    assert chosen_on(Shape(), "h100").join == "kernel"
    assert chosen_on(Shape(kind="q8_0"), "h100").join == "fixup"
    assert chosen_on(Shape(n_q=512), "h100").join == ""


# ---- who does what, counted one by one ----


def owners(plan: AttentionPlan) -> list[set[int]]:
    """The programs that have each tile's k-blocks, from the definition of the schedules."""
    choice, units = plan.chosen.choice, [max(1, n) for n in plan.k_blocks]
    found: list[set[int]] = [set() for _ in units]
    every = [(tile, i) for tile, n in enumerate(units) for i in range(n)]
    for at, (tile, i) in enumerate(every):
        if choice.schedule == "tile":
            found[tile].add(tile)
        elif choice.schedule == "split":
            parts, n = choice.splits, units[tile]
            found[tile].add(next(tile * parts + s for s in range(parts) if s * n // parts <= i < (s + 1) * n // parts))
        else:
            p, w = choice.programs, len(every)
            found[tile].add(next(q for q in range(p) if q * w // p <= at < (q + 1) * w // p))
    return found


PLANS = {
    "split": ("h100", Shape(mask=None), None),
    "stream-K, causal": ("a100", Shape(n_q=200), causal(200, 4096, 0)),
    "stream-K, half full": ("h100", Shape(n_q=20), causal(20, 4096, 2000)),
    "a tile each": ("h100", Shape(n_q=512), causal(512, 4096, 0)),
    "persistent": ("h100", Shape((64, 64), n_q=2048, n_kv=2048), causal(2048, 2048, 0)),
    "two waves": ("a100", Shape(n_q=1024, n_kv=1024), causal(1024, 1024, 0)),
    "split of a short cache": ("h100", Shape(), causal(1, 4096, 100)),
}


@pytest.mark.parametrize("case", PLANS)
def test_tiles_and_efficiency_against_a_count_of_units(case: str) -> None:
    name, shape, mask = PLANS[case]
    chosen = chosen_on(shape, name)
    plan = attention_plan(chosen, DEVICES[name].sm_count, mask)
    by_tile = owners(plan)
    assert len(plan.k_blocks) == chosen.tiling.n_tiles == chosen.choice.tiles
    assert plan.shared_tiles() == {tile: len(who) for tile, who in enumerate(by_tile) if len(who) > 1}
    assert bool(plan.shared_tiles()) == any(bar.segment.slot is not None for bar in plan.bars)
    done = sorted((b.segment.tile, i) for b in plan.bars for i in range(b.segment.start, b.segment.stop))
    assert done == [(tile, i) for tile, n in enumerate(plan.k_blocks) for i in range(max(1, n))], "each unit once"
    for slot in plan.slots:
        assert all(a.stop == b.start for a, b in zip(slot, slot[1:])), "one thing after the other"
    places = DEVICES[name].sm_count * chosen.choice.occupancy
    assert len(plan.slots) <= places
    ends = [sum(b.segment.stop - b.segment.start for b in slot) for slot in plan.slots]
    assert plan.longest == max(ends)
    assert plan.busy_percent == pytest.approx(100 * sum(ends) / (places * max(ends)))
    if chosen.choice.schedule == "stream_k":
        assert max(ends) - min(ends) <= 1


def test_persistent_programs_go_to_and_fro() -> None:
    chosen = chosen_on(Shape((64, 64), n_q=2048, n_kv=2048), "h100")
    assert chosen.programs == 132 < chosen.tiling.n_tiles
    blocks = attention_plan(chosen, 132, causal(2048, 2048, 0)).k_blocks
    segments = program_segments(chosen, blocks)
    first, second = ([blocks[s[turn].tile] for s in segments] for turn in (0, 1))
    assert first == sorted(first, reverse=True) and second == sorted(second), "longest first, then back"


def test_efficiency_of_the_choice_is_that_without_a_mask() -> None:
    for name, shape, _ in PLANS.values():
        chosen = chosen_on(shape, name)
        if chosen.choice.schedule == "tile" and chosen.programs == chosen.tiling.n_tiles:
            plan = attention_plan(chosen, DEVICES[name].sm_count, None)
            assert int(plan.busy_percent) == chosen.choice.efficiency_percent


# ---- what is told is what ran ----


@interpreted
@pytest.mark.parametrize("case", RUNS)
def test_ranges_mask_and_fixup_are_those_of_the_kernel(case: str) -> None:
    _, args, plan = ran(case)
    t = plan.chosen.tiling
    counts = args["p_counts"][: t.n_mask_tiles]
    assert plan.kinds is not None
    assert [plan.kinds["full"], plan.kinds["partial"]] == counts.sum(0).tolist()
    if not t.uniform(True):
        assert args["p_unit_start"][: t.n_tiles + 1].tolist() == list(plan.unit_start)
    assert args["programs"] == plan.chosen.programs and plan.chosen.join == "fixup"
    held = stream_k.scratch_slots("stream_k", t.n_tiles, args["programs"])
    scratch = args["p_part"][: plan.chosen.choice.scratch_bytes // 4].view(held, -1)  # NaN where nobody wrote
    written = (~torch.isnan(scratch)).any(1).nonzero().flatten().tolist()
    assert written == sorted(b.segment.slot for b in plan.bars if b.segment.slot is not None)
    assert written, "a case without fixup proves nothing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain")
    write_model(folder / "llama.gguf", "llama", "Q4_0")
    write_model(folder / "gemma3.gguf", "gemma3")
    write_model(folder / "deepseek2.gguf", "deepseek2", "Q4_0")
    (folder / "script.py").write_text(SCRIPT)
    return folder


SCRIPT = """
import graphrt
from graphrt import ops

def build():
    b = graphrt.new_input("f32", 640, 3, name="b")
    c = graphrt.new_input("f16", 640, 3, name="c")
    wide = ops.flash_attn_ext(b, c, c, None, 1.0, name="wide")
    return graphrt.Graph(ops.sqr(ops.sqr(wide, name="twice"), name="twice"))
"""
OPTIONS = SessionOptions(n_ctx=64, n_batch=32)


def _anywhere(launches: Sequence[LaunchInfo]) -> list[LaunchInfo]:
    """The same launches, which memory they use left out but not where in it."""
    return [replace(x, uses=tuple(replace(use, storage=0) for use in x.uses)) for x in launches]


@interpreted
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_plan_for_a_device_elsewhere_is_what_is_prepared_there(folder: Path, model: str, phase: str) -> None:
    def steps(backend: TritonBackend) -> list[tuple[Any, ...]]:
        found = subject(str(folder / f"{model}.gguf"), [backend], phase, 0, OPTIONS)
        return [(s.kernel, s.schedule, _anywhere(s.launches), s.work, s.cause) for s in explained(found, None).steps]

    assert steps(TritonBackend(exact=False, target=INTERPRETER)) == steps(TritonBackend(exact=False))


def test_what_is_planned_cannot_run(folder: Path) -> None:
    backend = TritonBackend(exact=False, target=device.Target.elsewhere(DEVICES["h100"].elsewhere))
    found = subject(str(folder / "llama.gguf"), [backend], "decode", 0, OPTIONS)
    for leaf in found.executable.graph.inputs:
        found.executable.write(leaf, np.zeros(leaf.shape, np.int64))
    with pytest.raises(BackendError, match="planned for a GPU elsewhere can't run"):
        found.executable.run()
    assert not found.executable.read("result_output").any(), "memory that is not there reads as zeros"


# ---- masks of a model's step ----


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize(("phase", "n", "depth"), [("prefill", 8, 0), ("prefill", 8, 30), ("decode", 0, 50)])
def test_masks_are_those_that_a_session_makes(folder: Path, model: str, phase: str, n: int, depth: int) -> None:
    found = subject(str(folder / f"{model}.gguf"), [get_backend("cpu")], phase, n, OPTIONS)
    session = found.session
    assert session is not None
    before = session.cache.saved()
    told = masks_of(found, depth)
    assert all((cells == before[kind]).all() for kind, cells in session.cache.saved().items())
    masks = [node for node in found.executable.graph.nodes if node.op == "KQ_MASK"]
    assert sorted(told) == sorted(m.name for m in masks)
    if depth:
        session.eval([1] * depth)
    session.eval([1] * found.n_tokens)
    for mask in masks:
        cells, pos = (found.executable.read(s.root).reshape(-1) for s in mask.sources())
        seen = (cells[None] >= 0) & (cells[None] <= pos[:, None])
        window = mask.params.window
        seen &= (cells[None] > pos[:, None] - window) if window else True
        assert ((told[mask.name][0, 0] == 0) == seen).all()


# ---- the figures of a whole step ----


def test_rows_hold_every_step_once(folder: Path) -> None:
    h100 = DEVICES["h100"]
    backend = TritonBackend(exact=False, target=device.Target.elsewhere(h100.elsewhere))
    found = explained(subject(str(folder / "gemma3.gguf"), [backend], "decode", 0, OPTIONS), None, h100)
    rows = rows_of(found)
    assert sorted(s.group for row in rows for s in row.steps) == sorted(s.group for s in found.steps)
    assert found.seconds == pytest.approx(sum(row.seconds or 0 for row in rows))
    gates = [row for row in rows if row.group.startswith("gate_up_glu")]
    assert sum(len(row.steps) for row in gates) == 7 and max(len(row.steps) for row in gates) > 1
    assert {len(s.nodes) for row in gates for s in row.steps} == {3}


def test_a_cost_is_its_largest_part() -> None:
    h100 = DEVICES["h100"]
    cost = h100.cost(graphrt.op.Work(0, int(h100.copy)), 3)
    assert cost is not None
    assert (cost.bytes, cost.flops, cost.launches, cost.bound) == (1.0, 0.0, pytest.approx(3 * h100.launch), "bytes")
    assert cost.seconds == 1.0
    bound = [c.bound for f in (int(h100.product), 1) if (c := h100.cost(graphrt.op.Work(f, 1), 1)) is not None]
    assert bound == ["FLOPs", "launch"]


def test_devices_by_the_names_that_torch_has() -> None:
    assert device_called("NVIDIA H100 80GB HBM3") is DEVICES["h100"]
    assert device_called("NVIDIA A100-SXM4-80GB") is DEVICES["a100"]
    assert device_called("NVIDIA GeForce RTX 4090") is DEVICES["rtx4090"]
    assert device_called("NVIDIA RTX 6000 Ada Generation") is DEVICES["rtx6000ada"]
    assert device_called("NVIDIA L40S") is DEVICES["l40s"]
    for other in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA L40"):
        assert device_called(other) is None, "another card, with other figures"
    assert known_device("RTX 4090") is known_device("rtx-4090") is DEVICES["rtx4090"]
    with pytest.raises(BackendError, match="did you mean h100"):
        known_device("h10")


# ---- the command ----

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the verb in the folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(folder)

    def called(*argv: str) -> tuple[int, str, str]:
        code = cli.main(["explain", *argv])
        out = capsys.readouterr()
        return code, out.out, out.err

    return called


@pytest.mark.parametrize("name", DEVICES)
def test_the_table_for_every_device(run: Run, name: str) -> None:
    code, out, _ = run("gemma3.gguf", "--device", name)
    assert code == 0 and DEVICES[name].title in out
    assert "__fattn__-0" in out and " alike\n" in out and "tokens/s at best" in out and "  launch  " in out
    assert ("not measured" in out) == (name != "h100")


def test_an_attention_in_words(run: Run) -> None:
    code, out, _ = run(
        "llama.gguf", "__fattn__-1", "--device", "h100", "--phase", "prefill", "--tokens", "20", "-d", "9"
    )
    assert code == 0
    for said in (
        "prefill of 20 tokens after 9", "q = ", "mask = attn_inp_kq_mask", "scale 0.25, max_bias 0, softcap 0",
        "kernel      forward", "not hopper: heads must be of 64, 128, 256, they are of 16 and 16",
        "fixup       none: each tile is one program's", "expected", "bound by launch",
    ):  # fmt: skip
        assert said in out, out


def test_a_product_in_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("llama.gguf", "ffn_out-0", "--device", "h100")
    assert code == 0 and "1 token: it takes up to 8, dp4a on activations rounded in two parts of 8 bits" in out
    assert "gemv" in out and "not gemv_heads: it takes a matrix for each head" in out and "activations  read in" in out
    assert "packed as planes (4-bit codes, 1 float16 scale of 32 elements)" in out and "matmul_add" in out
    _, out, _ = run("llama.gguf", "ffn_out-0", "--device", "h100", "--phase", "prefill", "--tokens", "32")
    assert "32 tokens: it takes up to 64" in out and "not gemv: it takes up to 8 tokens" in out and "kernel" in out
    _, out, _ = run("llama.gguf", "ffn_out-0", "--backend", "cpu", "--exact")
    assert "reference mul_mat" in out and "expected" not in out
    monkeypatch.setattr("graphrt.backends.triton.kernels.products.activations.MAX_TWO_PARTS", 0)
    _, out, _ = run("llama.gguf", "ffn_out-0", "--device", "h100")
    assert "dp4a on activations rounded to 8 bits" in out


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("1", "1 token for each of 4 matrices: it takes up to 8, dp4a"),
        ("20", "results written in place, weights dequantized to scratch in each run, then the vendor's product"),
        ("80", "not gemm_small: it takes up to 64 tokens"),
    ],
)
def test_a_product_of_heads_in_words(run: Run, tokens: str, said: str) -> None:
    options = ("--device", "h100", "--phase", "prefill", "--tokens", tokens, "-c", "128", "-b", "128")
    _, out, _ = run("deepseek2.gguf", "fattn_mla-0", *options)
    assert said in out and "head_products: " in out, out
    _, out, _ = run("deepseek2.gguf", "Qcur-0", *options)
    assert said in out and "latent_rope_cache: " in out and "rotate_and_write_row" in out, out


def test_a_view_and_a_fused_node(run: Run) -> None:
    _, out, _ = run("llama.gguf", "kqv_out-0", "--device", "a100")
    assert "a view of __fattn__-0" in out and "made by __fattn__-0" in out
    _, out, _ = run("llama.gguf", "ffn_up-0", "--device", "a100")
    assert "never in memory" in out and "as one step" in out


def test_a_node_that_falls_back_says_why(run: Run) -> None:
    code, out, _ = run("script.py:build", "wide", "--device", "h100")
    reason = "refused by triton (its attention kernel has head sizes up to 576, k's is 640)"
    assert code == 0 and f"cpu: {reason}" in out
    _, out, _ = run("script.py:build", "--device", "h100")
    assert f"1 step on another backend: {reason}" in out and "1 tensors copied between backends" in out


def test_a_saved_case_has_its_own_mask(run: Run, folder: Path) -> None:
    case = next(c for c in all_cases("FLASH_ATTN_EXT") if c.axes["mask"] == "causal")
    inputs = case.build()
    save_failure(folder / "case.npz", inputs, np.zeros(inputs.result.shape, np.float32), None, "kept")
    graph = inputs.graph()
    code, out, err = run("case.npz", f"#{len(graph.leafs) + len(graph.nodes) - 1}", "--device", "a100")
    assert code == 0 and "FLASH_ATTN_EXT" in out, err
    assert "skipped (all hidden)" in out and "its values are not known" not in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["llama.gguf", "__fatn__-0"], "the nearest are __fattn__-0"),
        (["llama.gguf", "token_embd.weight"], "is a leaf: it holds data"),
        (["llama.gguf", "#9999"], "a node's index must be below"),
        (["script.py:build", "twice"], "is the name of 2; give one of #"),
        (
            ["llama.gguf", "--device", "h300"],
            "must be one of h100, h200, a100, b200, mi300x, l40s, rtx6000ada, rtx3090, rtx4090, rtx5090, got 'h300'",
        ),
        (["llama.gguf", "--device", "h100", "--backend", "cpu"], "'cpu' plans for no device but those that are here"),
        (["llama.gguf", "-d", "4000"], "the context holds 256 tokens, got 1 after 4000"),
        (["script.py:build", "-d", "1", "--device", "h100"], "leave -d out"),
        (["llama.gguf", "--svg", "x.svg"], "a picture is of one attention, got no NODE"),
        (["llama.gguf", "ffn_out-0", "--svg", "x.svg", "--device", "h100"], "ffn_out-0 is MUL_MAT; name such a node"),
        (["llama.gguf", "ffn_out-0", "--svg", "no/x.svg"], "must be writable"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_it_refuses(run: Run, argv: list[str], said: str) -> None:
    code, out, err = run(*argv)
    assert code == 2 and said in err and out == ""


def test_json(run: Run) -> None:
    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    _, out, _ = run("llama.gguf", "--device", "h100", "--json")
    table = json.loads(out, parse_constant=refuse)
    assert out.count("\n") == 1 and table["device"]["planned"] and table["tokens_per_second"] > 1000
    assert table["seconds"] == pytest.approx(sum(step["seconds_of_all"] for step in table["steps"]))
    _, out, _ = run("llama.gguf", "#0", "--json", "--device", "h100")
    assert out == "", "a leaf"
    _, out, _ = run("llama.gguf", "__fattn__-1", "--device", "h100", "--json")
    one = json.loads(out, parse_constant=refuse)
    attention = one["step"]["attention"]
    assert one["node"]["name"] == "__fattn__-1" and attention["choice"]["tiles"] == len(attention["k_blocks"])
    assert len(attention["bars"]) >= attention["choice"]["tiles"] and one["facts"]


# ---- the picture ----

SVG = "{http://www.w3.org/2000/svg}"


def texts(plan: AttentionPlan, title: str = "t") -> tuple[ET.Element, str]:
    root = ET.fromstring(svg(plan, title))
    return root, "\n".join(root.itertext())


def test_the_picture_has_every_part() -> None:
    plan = attention_plan(chosen_on(Shape(n_q=20), "h100"), 132, causal(20, 4096, 2000))
    root, words = texts(plan, '<"__fattn__-7">')
    bars = [r for r in root.iter(f"{SVG}rect") if (r.get("class") or "").startswith("bar ")]
    assert len(bars) == len(plan.bars)
    open_parts = [bar for bar in plan.bars if bar.segment.is_fixup]
    finishers = [bar for bar in plan.bars if bar.segment.needs_fixup]
    marked = [r.get("class") for r in root.iter(f"{SVG}rect")]
    assert marked.count("stripes") == len(open_parts) + 1 and marked.count("merges") == len(finishers) + 1  # the legend
    assert len(open_parts) > len(finishers) > 0
    tiles = ", ".join(map(str, range(16)))
    assert f"16 tiles need fixup, by a launch of its own (fixup): {tiles}" in words
    assert words.strip().startswith(f'<"__fattn__-7">: {plan.busy_percent:.0f} % efficient'), "it is in the title"
    assert "open part" in words and "finisher" in words and "prefers-color-scheme: dark" in words


def test_a_picture_of_very_many_programs_is_folded() -> None:
    plan = attention_plan(chosen_on(Shape(n_q=4096), "mi300x"), 304, None)
    _, words = texts(plan)
    assert len(plan.slots) > 264 and "more rows like these" in words and "place for a program" in words


@pytest.mark.parametrize("case", ["split", "stream-K, causal", "two waves", "split of a short cache"])
def test_the_coloured_share_of_the_picture_is_the_efficiency(case: str) -> None:
    name, shape, mask = PLANS[case]
    plan = attention_plan(chosen_on(shape, name), DEVICES[name].sm_count, mask)
    root, words = texts(plan)
    areas: dict[str, float] = {}
    for r in root.iter(f"{SVG}rect"):
        kind = (r.get("class") or "").partition(" ")[0]
        if float(r.get("y") or 0) > 110:  # below the legend
            areas[kind] = areas.get(kind, 0) + float(r.get("width") or 0) * float(r.get("height") or 0)
    assert 100 * areas["bar"] / (areas["bar"] + areas.get("idle", 0)) == pytest.approx(plan.busy_percent, abs=0.5)
    idle = f"{plan.idle_places} of {plan.at_once} places have no program"
    assert (idle in words) == (plan.idle_places > 0) == (len(plan.slots) < plan.at_once)


def test_one_efficiency(run: Run) -> None:
    """The words, the picture's title and JSON have one figure."""
    code, out, _ = run("llama.gguf", "__fattn__-1", "--device", "h100", "-d", "200")
    figures = re.findall(r"(\d+) %[^\n]*places|(\d+) % efficient", out)
    assert code == 0 and len(figures) == 1, out
    assert re.findall("efficien", out) == ["efficien"], "a word that is used once"
    _, text, _ = run("llama.gguf", "__fattn__-1", "--device", "h100", "-d", "200", "--json")
    attention = json.loads(text)["step"]["attention"]
    assert f"{attention['busy_percent']:.0f}" == figures[0][0] and "efficiency" not in str(attention)


def test_the_picture_of_a_model(run: Run, folder: Path) -> None:
    code, _, _ = run("llama.gguf", "__fattn__-0", "--device", "h100", "--svg", "x.svg", "-d", "200")
    assert code == 0
    root = ET.parse(folder / "x.svg").getroot()
    assert root.tag == f"{SVG}svg" and "__fattn__-0 of llama.gguf, decode of 1 token after 200" in "".join(
        root.itertext()
    )
