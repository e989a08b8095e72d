"""Launches that may overlap keep out of each other's memory: the proof, on made-up launches and on models' steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import (
    tiny,
    tiny_archs,  # noqa: F401  (whose models are among tiny.py's others)
)

pytest.importorskip("triton")

import torch

from graphrt import Graph, Tensor, new_input, new_tensor, ops
from graphrt.backend import Usage
from graphrt.backends.triton import TritonBackend
from graphrt.backends.triton.accesses import Access, Call, accesses
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.device import ELSEWHERE, Target
from graphrt.backends.triton.kernels.flash_attn import decode_launch
from graphrt.backends.triton.launch import Launch
from graphrt.errors import BackendError
from graphrt.execute import prepare
from graphrt.models.engine import SessionOptions
from graphrt.models.model import Model, load
from graphrt.models.synthetic import synthetic
from graphrt.testing import all_cases
from graphrt.tools import cli
from graphrt.tools.check.launch_order import Event, Rule, Use, violations
from graphrt.tools.check.order_report import Ordered, ordered, steps_of
from graphrt.tools.explain.devices import known_device

# -- made-up launches


def reads(start: int, stop: int, **how: bool) -> Use:
    return Use("in", 1, start, stop, reads=True, writes=False, **how)


def writes(start: int, stop: int) -> Use:
    return Use("out", 1, start, stop, reads=False, writes=True)


def launch(name: str, *uses: Use, **how: bool) -> Event:
    return Event(name, "", uses, starts_early=True, **how)


def rules(*events: Event) -> list[tuple[Rule, str, str, bool]]:
    return [(v.rule, v.later, v.earlier, v.next_run) for v in violations(events)]


EARLY = {"early": True, "uncached": True}


def test_what_the_launch_before_writes_may_be_read_late_only() -> None:
    wrote = launch("a", writes(0, 100))
    assert rules(wrote, launch("b", reads(50, 60, **EARLY))) == [(Rule.OVERLAP, "b", "a", False)]
    assert not rules(wrote, launch("b", reads(50, 60)))
    assert not rules(wrote, launch("b", reads(100, 160, **EARLY)))
    assert not rules(wrote, Event("b", "", (reads(50, 60, **EARLY),)))


def test_what_the_launch_before_reads_may_be_written_late_only() -> None:
    assert not rules(launch("a", reads(0, 100)), launch("b", writes(0, 100)))
    early = replace(writes(99, 120), early=True)
    assert rules(launch("a", reads(0, 100)), launch("b", early)) == [(Rule.OVERLAP, "b", "a", False)]


def test_two_launches_back_all_is_complete() -> None:
    events = launch("a", writes(0, 100)), launch("b"), launch("c", reads(0, 4, **EARLY)), launch("d")
    assert not rules(*events)


def test_one_that_does_not_wait_lets_its_successors_overlap_with_its_predecessors() -> None:
    a, c = launch("a", writes(0, 100)), launch("c", reads(0, 4, **EARLY))
    idle, hasty = launch("b", waits=False), launch("b", lets_go_early=True)
    assert rules(a, idle, c, launch("d"))[:2] == [(Rule.NEVER_WAITS, "b", "", False), (Rule.OVERLAP, "c", "a", False)]
    assert rules(a, hasty, c, launch("d")) == [(Rule.LETS_GO_EARLY, "b", "", False), (Rule.OVERLAP, "c", "a", False)]
    # And what has waited for the one that does not wait has not waited for the one before that.
    late = launch("c", reads(0, 4))
    assert (Rule.OVERLAP, "c", "a", False) in rules(a, idle, late, launch("d"))
    assert (Rule.OVERLAP, "c", "a", False) not in rules(a, hasty, late, launch("d"))
    assert (Rule.OVERLAP, "b", "a", False) in rules(a, launch("b", reads(0, 4), waits=False), launch("d"))


def test_the_next_run_comes_without_a_pause() -> None:
    first, last = launch("first", reads(0, 4, **EARLY)), launch("last", writes(0, 4))
    assert rules(first, launch("between"), last) == [(Rule.OVERLAP, "first", "last", True)]
    assert not rules(launch("pause"), first, launch("between"), last)
    assert not rules(Event("another backend"), first, last)
    assert rules(launch("alone", reads(0, 4, **EARLY), writes(2, 3))) == [(Rule.OVERLAP, "alone", "alone", True)]


def test_an_early_read_of_what_the_run_writes_goes_past_the_l1_cache() -> None:
    events = [launch("a", writes(0, 100)), launch("b"), launch("c", reads(0, 4, early=True)), launch("d")]
    assert rules(*events) == [(Rule.CACHED, "c", "a", False)]
    assert "L1" in str(violations(events)[0])


def test_bytes_are_those_of_the_tensors() -> None:
    """Two tensors in one arena; a view's bytes reach from its first element to its last."""
    arena = torch.empty(1024, dtype=torch.uint8, device=ELSEWHERE)
    a, b = arena[:512].view(torch.float32).view(16, 8), arena[256:768].view(torch.float16)
    parts = [Access("x", t, True, True).use for t in (a, b, a[2:4, 1:3], torch.empty_like(arena))]
    assert [(u.start, u.stop) for u in parts] == [(0, 512), (256, 768), (68, 108), (0, 1024)]
    assert [parts[0].meets(other) for other in parts[1:]] == [True, True, False]
    assert not parts[1].meets(parts[2])


def test_a_kernel_has_to_declare() -> None:
    def kernel() -> None: ...

    vars(kernel)["arg_names"] = ["p_x", "p_w", "p_n", "n", "SOON", "PDL"]  # as Triton's functions have them
    with pytest.raises(BackendError, match="must declare what it reads and writes, 'kernel' doesn't"):
        Launch(kernel, (1,), {}).accesses()
    with pytest.raises(AssertionError, match="p_w"):
        accesses(reads="p_x", early="p_w")(kernel)
    accesses(reads="p_x p_w p_n", writes="p_x", early="p_w", early_if={"SOON": "p_n"})(kernel)
    x = torch.zeros(4)
    args = {"p_x": x, "p_w": None, "p_n": x, "n": 3, "SOON": True, "PDL": True}
    for options, early in (({"launch_pdl": True}, {"p_n": True, "p_x": False}), ({}, {"p_n": False, "p_x": False})):
        found = Launch(kernel, (1,), args, options).accesses()
        assert {a.name: a.early for a in found} == early
    assert not any(a.early for a in Launch(kernel, (1,), args | {"SOON": False}, {"launch_pdl": True}).accesses())


# -- steps of models

H100 = Target.elsewhere(known_device("h100").elsewhere)
OPTIONS = SessionOptions(n_ctx=256, n_batch=96)


def planned(exact: bool = False) -> list[Any]:
    return [TritonBackend(exact=exact, target=H100)]


def checked(model: Model, backends: list[Any], options: SessionOptions = OPTIONS) -> list[Ordered]:
    return [ordered(title, exe) for title, exe in steps_of(model, backends, options)]


@pytest.mark.parametrize("name", [*tiny.MODELS, *tiny.OTHERS])
def test_all_models_steps_are_in_order(tmp_path: Path, name: str) -> None:
    """Prefill, decode of one and of many sequences, with the next token's choice, over rings and pages; texts."""
    tiny.write_model(tmp_path / "m.gguf", name)
    backends = planned()
    steps = checked(load(tmp_path / "m.gguf", backends), backends)
    assert len(steps) in (3, 11, 12)
    for step in steps:
        assert not step.violations, [step.title, *map(str, step.violations)]
        choice = step.title.startswith("the choice")  # two launches, which read only what was made before
        assert step.launches <= 2 if choice else 0 < step.starts_early < step.launches, step.title


@pytest.mark.parametrize("name", ["phi3-mini:q4_k_m", "deepseek2-lite:q4_k_m"])
def test_real_shapes_are_in_order(name: str) -> None:
    """Two layers: the last launch of one before the first of the next, and masks' plans that are older."""
    backends = planned()
    steps = checked(Model(synthetic(name, 2), backends), backends, SessionOptions(n_ctx=1024, n_batch=256))
    assert not [str(v) for step in steps for v in step.violations]
    assert {name for step in steps for name in step.early} & {"packed_gemv", "batch_wgmma"}


def test_projections_that_rotate_are_in_order() -> None:
    """Their angles are those that the run's first launches have made, which the L1 cache may not have yet."""
    backends = planned()
    steps = checked(Model(synthetic("llama-8b:q4_k_m", 2), backends), backends, SessionOptions(n_ctx=1024, n_batch=256))
    assert not [str(v) for step in steps for v in step.violations]
    taken = ["over pages" in step.title for step in steps if "p_cos" in step.early.get("rotated_gemv", ())]
    assert {*taken} == {False, True}


def test_single_ops_are_in_order() -> None:
    """Every thirtieth conformance case: steps of few launches, whose last one is right before the first of the next."""
    (backend,) = planned()
    steps = 0
    for case in list(all_cases())[::30]:
        graph = case.build(0).graph()
        if not any(backend.supports(node) for node in graph.nodes):
            found = ordered(str(case), prepare(graph, [backend]))
            assert not found.violations, [found.title, *map(str, found.violations)]
            steps += 1
    assert steps > 50


# -- what was planted


def held(backend: TritonBackend, kind: str, ne: tuple[int, ...], name: str, usage: Usage) -> Tensor:
    t = new_tensor(kind, *ne, name=name)
    t.buffer = backend.alloc(t.nbytes, usage)
    return t


def step_that_writes(what: str) -> Ordered:
    """x w + bias, whose weight or bias the step itself writes in the end."""
    backend = planned()[0]
    usages = {name: Usage.STATE if name == what else Usage.WEIGHTS for name in ("w", "bias")}
    w, bias = held(backend, "f32", (64, 32), "w", usages["w"]), held(backend, "f32", (32,), "bias", usages["bias"])
    y = ops.add(ops.mul_mat(w, new_input("f32", 64, 1, name="x")), bias)
    if what == "bias":
        last = ops.cpy(ops.mul(y, y), bias)
    else:
        last = ops.cpy(ops.repeat(ops.mul(y, y), 32, 64), ops.reshape(w, 32, 64))
    return ordered("step", prepare(Graph(y, last), [backend]))


@pytest.mark.parametrize("what", ["w", "bias"])
def test_what_a_step_writes_its_products_read_in_turn(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    assert not step_that_writes(what).violations
    monkeypatch.setattr(Context, "is_constant", lambda self, t: True)
    found = step_that_writes(what).violations
    assert {v.rule for v in found} == {Rule.OVERLAP, Rule.CACHED}
    assert any(v.next_run and v.use.startswith("p_w" if what == "w" else "p_bias") for v in found)


def first_steps(path: Path) -> list[Ordered]:
    tiny.write_model(path, "llama")
    backends = planned()
    return checked(load(path, backends), backends, SessionOptions(n_ctx=256, n_batch=8))


def test_a_plan_that_is_no_older_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The decode kernel told that the mask's plan is older than the launch before it, which made it."""
    given = decode_launch.arguments
    monkeypatch.setattr(decode_launch, "arguments", lambda *args: given(*args[:5], True))
    backends = planned()
    model = Model(synthetic("llama-1b:q8_0", 1), backends)
    found = [v for step in checked(model, backends, OPTIONS) for v in step.violations]
    assert found and all(v.rule is Rule.OVERLAP and v.later.startswith("flash_attn_decode") for v in found)
    assert {v.use for v in found} <= {"p_counts", "p_runs", "p_unit_start"}
    assert any(v.earlier.startswith(("sum_units", "list_blocks")) for v in found)


def test_scratch_that_is_used_again_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Norms whose weights lie where the launch before writes: arenas' memory is told by its bytes, not by tensors."""
    assert not any(step.violations for step in first_steps(tmp_path / "a.gguf"))
    given, last = Launch.accesses, list[torch.Tensor]()

    def moved(self: Launch) -> list[Access]:
        found = [replace(a, memory=last[-1]) if a.early and last else a for a in given(self)]
        last[:] = [a.memory for a in found if a.writes]
        return found

    monkeypatch.setattr(Launch, "accesses", moved)
    assert any(v.rule is Rule.OVERLAP for step in first_steps(tmp_path / "b.gguf") for v in step.violations)


def test_a_kernel_that_is_not_told_to_wait_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Launch.__init__

    def without(self: Launch, kernel: Any, grid: Any, args: Any, *more: Any) -> None:
        made(self, kernel, grid, args | ({"PDL": False} if kernel.__name__ == "add_norm_rows" else {}), *more)

    monkeypatch.setattr(Launch, "__init__", without)
    found = [v for step in first_steps(tmp_path / "m.gguf") for v in step.violations]
    assert {v.later.partition(" of ")[0] for v in found if v.rule is Rule.NEVER_WAITS} == {"add_norm_rows"}
    assert any(v.rule is Rule.OVERLAP for v in found)


def test_calls_wait_for_all() -> None:
    x = torch.zeros(8)
    call = Call("copy", lambda: None, [x[:4], None], [x[4:]])
    event = Event.of(call.info(), "n")
    assert not event.starts_early and [u.writes for u in event.uses] == [False, True]
    assert not rules(launch("a", Access("p", x, False, True).use), event, launch("z"))


# -- the command


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    tiny.write_model(tmp_path / "llama.gguf", "llama")

    def call(*argv: str) -> tuple[int, str]:
        code = cli.main(["check", str(tmp_path / "llama.gguf"), "--order", "-c", "64", *argv])
        return code, "".join(capsys.readouterr())

    return call


def test_check_says_what_is_proved(check: Callable[..., tuple[int, str]]) -> None:
    code, text = check()
    assert code == 0 and "decode of 16 sequences on h100: " in text and "all in order" in text
    assert "dense_gemv: p_bias0, " in text
    code, text = check("--device", "mi300x", "-b", "triton", "--json")
    steps = json.loads(text)["steps"]
    assert code == 0 and all(step["start_early"] == 0 and not step["read_early"] for step in steps)
    assert check("-b", "cpu")[0] != 0 and check("--device", "vax")[0] != 0


def test_check_lists_violations(check: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "waits", False)
    code, text = check()
    assert code == 1 and "never waits for it" in text and "violations" in text
    code, text = check("--json")
    first = json.loads(text)["steps"][0]["violations"][0]
    assert code == 1 and first["rule"] == "never_waits" and first["text"].startswith(first["later"])
