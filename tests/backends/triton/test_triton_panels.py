"""Keys in panels on the triton backend, in Triton's interpreter: few queries and many, each width, who refuses."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support import aot_arch
from support.named_cases import assert_passes

from graphrt import ops
from graphrt.backend import Usage
from graphrt.backends.triton.kernels.flash_attn.fusions import attention_of
from graphrt.backends.triton.kernels.flash_attn.kernels import kernels_of
from graphrt.backends.triton.kernels.flash_attn.problem import Problem
from graphrt.backends.triton.memory import allocate
from graphrt.tensor import new_input

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
WANTED = {
    "one query": ("FLASH_ATTN_EXT", r"d=.128,128.,n_q=1,.*layout=panels"),
    "two parts of a head": ("FLASH_ATTN_EXT", r"d=.96,96.,n_q=9,.*layout=panels"),
    "4 elements a panel": ("FLASH_ATTN_EXT", r"n_kv=257.*f32,f32.*layout=panels"),
    "16 elements a panel": ("FLASH_ATTN_EXT", r"n_kv=257.*f8_e4m3,f8_e4m3.*layout=panels"),
    "hidden NaN": ("FLASH_ATTN_EXT", r"layout=panels,spoil=nan"),
    "products in f32, a score function": ("FLASH_ATTN_EXT", r"layout=panels,prec=10,score=branches"),
    "the denominators": ("FLASH_ATTN_LSE", r"layout=panels"),
}


@pytest.mark.parametrize("what", WANTED)
def test_case(what: str) -> None:
    assert_passes(*WANTED[what])


@pytest.mark.parametrize("n_q", [1, 64])
def test_other_kernels_refuse(n_q: int) -> None:
    q, v = new_input("f32", 64, n_q, 4, name="q"), new_input("f16", 64, 300, 2, name="v")
    node = ops.flash_attn_ext(q, new_input("f16", 8, 300, 16, name="k"), v, None, 0.2, k_layout="panels")
    p = Problem(attention_of(node), lambda t: (allocate(t.nbytes, Usage.COMPUTE, "cpu"), 0))
    target = aot_arch.target_of("sm_90")
    *others, last = kernels_of(target)
    assert all("reads keys in rows" in (kind(p, target).serves() or "") for kind in others)
    assert last(p, target).serves() is None
