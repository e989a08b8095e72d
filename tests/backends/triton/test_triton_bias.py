"""Attention's bias and packed sequences of the triton backend in Triton's interpreter: a few small cases, each of which
shows what a kernel may get wrong of them."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.backend import TritonBackend
from graphrt.testing import all_cases
from graphrt.tools.conformance.run.step import run_case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
#: op and what stands in the case.
WANTED = {
    "a bias of each head": ("FLASH_ATTN_EXT", r"n_q=9.*,bias=\[6,2,f16\]"),
    "its gradient, shared": ("FLASH_ATTN_BACK", r"of=attn_bias,.*bias=\[2,1\]"),
    "beside ALiBi": ("FLASH_ATTN_BACK", r"of=q,.*max_bias=4.0,bias=\[1,1\]"),
    "with dropout": ("FLASH_ATTN_BACK", r"of=k,.*dropout_p=0.3"),
    "packed sequences": ("FLASH_ATTN_VARLEN_BACK", r"of=k,.*window=0"),
}


@pytest.mark.parametrize("what", WANTED)
def test_case(what: str) -> None:
    op, pattern = WANTED[what]
    found = [case for case in all_cases(op) if re.search(pattern, str(case))]
    assert found, what
    outcome = run_case(found[0], TritonBackend(), 0)
    assert outcome.status == "pass", (str(found[0]), outcome.message)
