"""What has a form in plain Triton and one in Gluon gives the same bits in both. Ranges: test_triton_ranges.py."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from support.gluon_emulator import Gl, Memory, Value, rebuilt, run_ptx

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.kernels.common import codebook, gluon_bits, gluon_scales
from graphrt.backends.triton.kernels.common.bits import f16_low
from graphrt.backends.triton.kernels.common.scales import group_scale, half_scales
from graphrt.backends.triton.kernels.flash_attn import decode_join, decode_layouts
from graphrt.backends.triton.kernels.flash_attn.forward import normalized
from graphrt.backends.triton.kernels.flash_attn.tiles import slot_elements
from graphrt.backends.triton.kernels.kinds import codebook_shift, has_small_codebook
from graphrt.backends.triton.packing import packing_of


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


@triton.jit
def _scales(p_scales, p_supers, p_out, KIND: tl.constexpr, HALVES: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    scales, supers = tl.load(p_scales + i), tl.load(p_supers + i)
    if HALVES:
        first, second, d, first_min, second_min, d_min = half_scales(scales, supers, KIND)
        tl.store(p_out + i, first * d)
        tl.store(p_out + N + i, second * d)
    else:
        scale, off = group_scale(scales, supers, KIND)
        tl.store(p_out + i, scale)
        tl.store(p_out + N + i, off)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of f32 that f16 has no place for
@pytest.mark.parametrize(("kind", "halves"), [("q4_K", False), ("iq4_xs", False), ("mxfp4", False), ("q6_K", True),
                                              ("nvfp4", True)])  # fmt: skip
def test_scales(kind: str, halves: bool) -> None:
    """Each byte that a scale can have; exponents alone and e4m3 have more powers of two in Gluon."""
    scales = (np.arange(512, dtype=np.int32) * 40503 % 65521).astype(np.int32)
    supers = np.resize(np.array([0.5, -3.25], np.float16).view(np.int32), 512)
    where = device.target().device
    out = torch.zeros(2, 512, device=where)
    _scales[(1,)](torch.from_numpy(scales).to(where), torch.from_numpy(supers).to(where), out, kind, halves, 512)
    gl, given = {"gl": Gl(Memory({}), 4)}, (Value(scales), Value(supers), kind)
    more = 4 if kind in ("mxfp4", "nvfp4") else 0
    if kind == "nvfp4":
        found = [rebuilt(gluon_scales.half_ue4m3, gl)(Value(scales), at, more) for at in (0, 8)]
    elif halves:
        first, second, d, *_ = rebuilt(gluon_scales.half_scales, gl)(*given)
        found = [first * d, second * d]
    else:
        found = list(rebuilt(gluon_scales.group_scale, gl)(*given, more))
    np.testing.assert_array_equal(out.cpu().numpy() * np.float32(2.0**more), [x.data for x in found])


def _permuted(*given: Any) -> Value:
    inputs = [np.broadcast_to(g.data if isinstance(g, Value) else np.int32(g), 1 << 12).copy() for g in given]
    return Value(run_ptx("prmt.b32 $0, $1, $2, $3;", [np.int32], inputs)[0])


@pytest.mark.parametrize("kind", ["iq4_nl", "mxfp4", "iq2_xs", "iq3_xxs", "iq3_s", "iq1_s"])
def test_codebooks_by_byte_permutations(kind: str) -> None:
    """What NVIDIA's GPUs do with words of eight codes, with and without the shift that makes values small numbers."""
    scope: dict[str, Any] = dict(vars(codebook))
    for name in ("_spread", "of_bytes", "of_nibbles"):
        scope[name] = types.FunctionType(getattr(codebook, name).fn.__code__, scope, name)
    scope |= {"tl": Gl(Memory({}), 4), "permuted": _permuted}
    words = np.random.default_rng(3).integers(-(1 << 31), 1 << 31, 1 << 12).astype(np.int32)
    if has_small_codebook(kind):
        words &= 0x77777777
    facts = packing_of(kind)
    assert facts is not None and facts.codebook is not None
    codes = words[:, None] >> 4 * np.arange(8) & 15
    for shift in {0, int(codebook_shift(kind))}:
        for ptx in (True, False):
            found = [x.data.view(np.int8).reshape(-1, 4) for x in scope["of_nibbles"](Value(words), kind, shift, ptx)]
            np.testing.assert_array_equal(np.concatenate(found, 1), np.array(facts.codebook)[codes] + shift)


@triton.jit
def _normalized(p_m, p_l, p_sink, p_out, N: tl.constexpr):
    i = tl.arange(0, N)
    lse, factor = normalized(tl.load(p_m + i), tl.load(p_l + i), tl.load(p_sink + i))
    tl.store(p_out + i, lse)
    tl.store(p_out + N + i, factor)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_denominator_with_its_sink() -> None:
    """Rows without keys, without a sink, with neither; logits far apart either way."""
    maxima, sinks = np.meshgrid([-np.inf, -300.0, -1.5, 0.0, 40.0, 1e4], [-np.inf, -2e3, 0.25, 3e3], indexing="ij")
    m, sink = (np.resize(a.reshape(-1), 32).astype(np.float32) for a in (maxima, sinks))
    total = np.where(m == -np.inf, 0, np.linspace(1, 70, 32)).astype(np.float32)
    where = device.target().device
    out = torch.zeros(2, 32, device=where)
    _normalized[(1,)](*(torch.from_numpy(a).to(where) for a in (m, total, sink)), out, 32)
    gluon = rebuilt(decode_join.normalized, {"gl": Gl(Memory({}), 4)})(Value(m), Value(total), Value(sink))
    found = np.stack([x.data for x in gluon])
    if device.interpreting():
        np.testing.assert_array_equal(out.numpy().view(np.int32), found.view(np.int32))
    nothing = (m == -np.inf) & (sink == -np.inf)
    assert np.array_equal(found[:, nothing], [[-np.inf] * nothing.sum(), [0] * nothing.sum()]) and nothing.any()
    assert np.isfinite(found[:, ~nothing]).all()


@triton.jit
def _slots(p_out, KIND: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p_out + i, slot_elements(i, KIND, True))


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_the_order_of_elements_in_a_row(kind: str) -> None:
    out = torch.zeros(256, dtype=torch.int32, device=device.target().device)
    _slots[(1,)](out, kind, 256)
    slots = Value(np.arange(256, dtype=np.int32))
    gluon = rebuilt(decode_layouts.slot_elements, {"gl": Gl(Memory({}), 4)})(slots, kind).data
    np.testing.assert_array_equal(out.cpu().numpy(), gluon)
    assert sorted(gluon) == list(range(256))
