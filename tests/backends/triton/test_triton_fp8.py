"""Attention whose products multiply 8-bit floats (hopper/fp8.py, turned.py) without a GPU, and who gets to use it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support import attention_emulation

from graphrt.ops.cases.flash_attn_axes import Axes, as_case
from graphrt.testing import Case, all_cases

interpreted = pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")
BASE = Axes(d=(64, 64), n_q=75, n_kv=300, types=("f8_e4m3", "f8_e4m3"), mask="random", prec=8)
#: Masks by TMA and by loads, keys that end inside a block or with one, one block alone, sinks, more heads a KV head,
#: rows that see nothing, sums of many equal weights.
CASES = [
    BASE, replace(BASE, mask=None, n_kv=384), replace(BASE, d=(128, 128), heads=(2, 1), mask="causal", n_kv=150),
    replace(BASE, mask=None, n_kv=20, heads=(1, 1)), replace(BASE, sinks="near", heads=(3, 1), n_kv=133),
    replace(BASE, rows="leading", n_kv=260), replace(BASE, values="level", mask=None, n_q=130),
    replace(BASE, layout="cache", n_seq=2, heads=(2, 1)),
]  # fmt: skip


@interpreted
@pytest.mark.parametrize("axes", CASES, ids=lambda axes: str(as_case("FLASH_ATTN_EXT", axes)))
def test_what_it_computes(axes: Axes) -> None:
    kernels, _, verdict = attention_emulation.run(as_case("FLASH_ATTN_EXT", axes), 3, 1)
    assert kernels[-3:] == ["turn_values", "hopper_fp8_attn", "flash_attn"], kernels
    assert verdict.ok, verdict.message
