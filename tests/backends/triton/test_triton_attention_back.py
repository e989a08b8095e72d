"""FLASH_ATTN_BACK of the triton backend in Triton's interpreter: its cases, who is refused, and equal bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from graphrt.backends.triton import device
from graphrt.ops.cases.flash_attn_back import Axes
from graphrt.testing import all_cases
from graphrt.tools.conformance.run.step import run_case

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt import prepare
from graphrt.backends.triton.backend import TritonBackend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CASES = {str(case): case for case in all_cases("FLASH_ATTN_BACK")}
#: Every so many of them run here; on a GPU the conformance tool runs all.
SOME = list(CASES)[::4]


@pytest.mark.parametrize("name", SOME)
def test_case(name: str) -> None:
    outcome = run_case(CASES[name], TritonBackend(), 0)
    refused = CASES[name].axes.get("bias") or CASES[name].axes.get("dropout_p")
    assert outcome.status == ("unsupported" if refused else "pass"), outcome.message


def test_every_kernel_and_form_is_among_them() -> None:
    for part in ("of=q", "of=k", "of=v", "of=sinks", "softcap", "max_bias", "layout=cache", "d_lse", "type=f16"):
        assert any(part in name for name in SOME), part
    assert Axes("q").mask == "random"


def test_the_same_bits_each_time() -> None:
    case = CASES["FLASH_ATTN_BACK(of=k,softcap=2.0)"]
    inputs = case.build()
    exe = prepare(inputs.graph(), TritonBackend())
    inputs.fill(exe)
    runs = []
    for _ in range(3):
        exe.run()
        runs.append(torch.as_tensor(exe.read(inputs.result)).clone().numpy())
    for again in runs[1:]:
        np.testing.assert_array_equal(runs[0], again)
