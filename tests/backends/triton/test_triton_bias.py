"""Attention's bias and packed sequences of the triton backend in Triton's interpreter: a few small cases, each of which
shows what a kernel may get wrong of them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.named_cases import assert_passes

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
    assert_passes(*WANTED[what])
