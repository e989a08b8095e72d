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
from graphrt.backends.triton.kernels.flash_attn.fusions import attention_of
from graphrt.backends.triton.kernels.flash_attn.launcher import Launcher
from graphrt.backends.triton.kernels.flash_attn.passes_launch import TogetherLaunch
from graphrt.backends.triton.kernels.flash_attn.stream_k import PASS_FORMS
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.judge import Verdict
from graphrt.tensor import Tensor
from graphrt.testing import Case
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


@pytest.mark.parametrize("form", PASS_FORMS)
@pytest.mark.parametrize("what", WANTED)
def test_every_form_gives_the_right_result(what: str, form: str) -> None:
    pattern, sm_count = WANTED[what]
    steps, _, verdict = run(named_case("FLASH_ATTN_EXT", pattern), form, sm_count)
    assert verdict.ok, verdict.message
    names = [step.name for step in steps if "mask" not in step.name and "units" not in step.name]
    assert len(names) >= 1 + form.endswith("-two"), names
    assert any("decode" in name for name in names), names
