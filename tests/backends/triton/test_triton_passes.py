"""Flash decoding in two passes: decode_passes.py's kernel in the emulator, its programs as threads that do wait for
each other; who is served, what is refused, and a launch that would hang."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support import gluon_emulator, gluon_together
from support.aot_arch import target_of
from support.named_cases import named_case

from graphrt.backend import Usage
from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.kernels.flash_attn.fusions import attention_of
from graphrt.backends.triton.kernels.flash_attn.launcher import Launcher
from graphrt.backends.triton.kernels.flash_attn.passes_launch import DecodePasses, TogetherLaunch
from graphrt.backends.triton.kernels.flash_attn.problem import Problem
from graphrt.backends.triton.kernels.flash_attn.stream_k import PASS_FORMS
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.errors import BackendError
from graphrt.judge import Verdict
from graphrt.ops import decode_costs
from graphrt.tensor import Tensor
from graphrt.testing import Case
from graphrt.tools.bench import op_shapes
from graphrt.tools.conformance.cases.sources import FORMS
from graphrt.tools.conformance.run.reference import know

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
GLOBAL = ("global-wait", "global-two")
#: What a case shows: its name's part, and how many multiprocessors there are.
WANTED = {
    "logits of +-200": (r"n_q=1,n_kv=1025.*mask=causal,values=sunken", 4),
    "raised ones with sinks": (r"n_q=3,n_kv=1025.*sinks=near,values=raised", 7),
    "1e5": (r"n_q=1,n_kv=1025.*mask=causal,values=huge", 9),
    "no mask, several rows": (r"n_q=3,n_kv=1025.*mask=None,layout=padded", 5),
    "a sequence that misses parts": (r"n_kv=1100.*mask=lengths.*values=raised", 10),
    "nothing seen": (r"n_q=1,n_kv=1025.*rows=all,sinks=large", 4),
}


def run(case: Case, form: str, sm_count: int, resident: int | None = None) -> tuple[list[Launch], np.ndarray, Verdict]:
    """(launches, result, verdict) of a case. Memory that nothing was written to holds NaN."""
    inputs, places = case.build(), dict[Tensor, TritonBuffer]()

    def place(t: Tensor) -> tuple[TritonBuffer, int]:
        unwritten = torch.full((t.root.nbytes,), 0xFF, dtype=torch.uint8)
        return places.setdefault(t.root, TritonBuffer(unwritten, Usage.COMPUTE)), t.view_offs

    for leaf, values in inputs.values.items():
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        place(leaf)[0].memory[: len(data)] = torch.from_numpy(data.copy())
    node = inputs.result
    launcher = Launcher(replace(target_of("sm_90"), sm_count=sm_count), place, form)
    steps = [step for step in launcher.launches(attention_of(node)) if isinstance(step, Launch)]
    for step in steps:
        if isinstance(step, TogetherLaunch):
            gluon_together.emulate(step, True, resident)
        elif step.kernel.__name__.startswith("flash_attn_decode"):
            gluon_emulator.emulate(step, True)
        else:
            step.args |= {name: False for name in ("PDL", "PTX") if name in step.args}
            step.options.pop("launch_pdl", None)
            step()
    out = places[node.root].memory.view(torch.float32)[: node.n_elements].numpy().reshape(node.shape)
    return steps, out, know(inputs).judge(node, out)


#: Every case in the form that waits with scores kept; the others where they differ from it.
TRIED = [
    *((what, "global-wait") for what in WANTED), ("logits of +-200", "global-two"), ("1e5", "global-two"),
    ("no mask, several rows", "global-two"), ("a sequence that misses parts", "partial-wait"),
    ("logits of +-200", "partial-wait"), ("raised ones with sinks", "partial-two"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "form"), TRIED)
def test_every_form_gives_the_right_result(what: str, form: str) -> None:
    pattern, sm_count = WANTED[what]
    steps, _, verdict = run(named_case("FLASH_ATTN_EXT", pattern), form, sm_count)
    assert verdict.ok, verdict.message
    names = [step.name for step in steps if step.name.startswith("flash_attn")]
    assert names == {
        "partial-wait": ["flash_attn_decode_passes"], "partial-two": ["flash_attn_decode", "flash_attn_fixup"],
        "global-wait": ["flash_attn_decode_passes"], "global-two": ["flash_attn_decode_passes"] * 2,
    }[form], names  # fmt: skip


def test_programs_that_do_not_run_together_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What TogetherLaunch refuses: fewer places than programs, where one waits for one that has not begun."""
    monkeypatch.setattr(gluon_together, "PATIENCE", 1)
    with pytest.raises(AssertionError, match="wait for one that does not run"):
        run(named_case("FLASH_ATTN_EXT", WANTED["logits of +-200"][0]), "global-wait", 4, resident=2)


def test_a_launch_counts_what_the_compiled_kernel_leaves_room_for() -> None:
    launch = run(named_case("FLASH_ATTN_EXT", WANTED["logits of +-200"][0]), "global-wait", 4)[0][-1]
    assert isinstance(launch, TogetherLaunch) and launch.grid == (6,) and launch.options["launch_cooperative_grid"]
    launch.check(registers=255, shared=98308)  # two a multiprocessor
    with pytest.raises(BackendError, match="6, and 4 multiprocessors hold 4 by its shared memory; take schedule"):
        launch.check(registers=255, shared=120000)
    launch.grid = (9,)
    with pytest.raises(BackendError, match="by its registers"):
        launch.check(registers=255, shared=1024)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"d=\[64,64\],n_q=1.*types=\[q8_0,q8_0\]", "f16 and bf16"), (r"d=\[256,256\].*n_q=3", "take columns"),
        (r"n_q=1,n_kv=113.*types=\[f16,f16\],mask=causal\)", "in parts"), (r"n_q=33", "16 query rows"),
    ],
)  # fmt: skip
def test_what_a_form_does_not_serve_goes_to_the_other_kernels(pattern: str, why: str) -> None:
    node = named_case("FLASH_ATTN_EXT", pattern).build().result
    places = dict[Tensor, TritonBuffer]()

    def place(t: Tensor) -> tuple[TritonBuffer, int]:
        nothing = torch.zeros(t.root.nbytes, dtype=torch.uint8)
        return places.setdefault(t.root, TritonBuffer(nothing, Usage.COMPUTE)), t.view_offs

    attention = attention_of(node)
    reason = DecodePasses(Problem(attention, place), target_of("sm_90"), "global-wait").serves()
    assert reason is not None and why in reason, reason
    launcher = Launcher(target_of("sm_90"), place, "global-wait")
    assert launcher.launches(attention) and launcher.chosen[node].kernel != "decode_passes"
    assert launcher.chosen[node].refused["decode_passes"] == f"global-wait is asked for, but {reason}"


def test_forms_are_told_apart_from_schedules() -> None:
    assert TritonBackend(schedule="global-two").schedule == "global-two"
    with pytest.raises(BackendError, match="global-three"):
        TritonBackend(schedule="global-three")
    assert {f"triton-{form}" for form in PASS_FORMS} <= FORMS.keys() and set(PASS_FORMS) == set(op_shapes.PASS_FORMS)


@pytest.mark.parametrize("parts", [1, 2, 127])
def test_both_algorithms_are_softmax_and_cost_what_they_say(parts: int) -> None:
    rng = np.random.default_rng(parts)
    q, k, v = (rng.standard_normal((n, 64)) for n in (4, 200, 200))
    k[7] *= 300  # a logit of hundreds in one part
    s = q @ k.T * 3.0
    p = np.exp(s - s.max(1, keepdims=True))
    wanted = p @ v / p.sum(1, keepdims=True)
    for algorithm in (decode_costs.decode_by_parts, decode_costs.decode_by_one_maximum):
        assert np.allclose(algorithm(q, k, v, 3.0, parts), wanted, rtol=1e-12, atol=1e-12)
    costs = decode_costs.split_costs(4, 200, 64, 64, parts)
    wait, two, kept, again = (costs[form] for form in PASS_FORMS)
    assert again.keys == 2 * kept.keys == 2 * 200 * 64 and {c.values for c in costs.values()} == {200 * 64}
    assert kept.cached - wait.cached == 2 * 4 * 200 and again.cached == wait.cached > two.cached
    assert wait.operations - kept.operations == parts * 4 * (64 + 3)
    assert wait.operations - two.operations == parts * parts * 4
    assert again.nbytes(2, 2)[1] - kept.nbytes(2, 2)[1] == 200 * 64 * 2
