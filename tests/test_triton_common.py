"""kernels/common: what has a form in plain Triton and one in Gluon gives the same bits in both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from gluon_emulator import Gl, Memory, Value, rebuilt

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.kernels.common import gluon_bits
from graphrt.backends.triton.kernels.common.bits import f16_low


@triton.jit
def _f16_low(p_words, p_out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p_out + i, f16_low(tl.load(p_words + i)))


def test_the_f16_in_a_word() -> None:
    """Every f16, below other bits that must not count."""
    low = np.arange(1 << 16, dtype=np.uint32)
    words = (low | low * 40503 << 16).view(np.int32)
    where = device.target().device
    out = torch.zeros(1 << 16, dtype=torch.float16, device=where)
    _f16_low[(1,)](torch.from_numpy(words).to(where), out, 1 << 16)
    gluon = rebuilt(gluon_bits.f16_low, {"gl": Gl(Memory({}), 4)})(Value(words)).data
    for found in (out.cpu().numpy(), gluon):
        np.testing.assert_array_equal(found.view(np.uint16), low.astype(np.uint16))
