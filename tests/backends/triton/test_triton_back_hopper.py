"""Hopper's kernels of attention's gradients without a GPU: their source on numpy arrays, warps, TMA and wgmma in many
orders; which problems they take."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.backends.triton import device
from graphrt.ops.cases.flash_attn_back import Axes, _make
from graphrt.testing import Case, all_cases

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support import back_emulation

from graphrt.backends.triton.kernels.flash_attn.backward.shared import Shared
from graphrt.backends.triton.kernels.flash_attn.hopper import backward_stored_kernels, softcap

#: Every case of f16 that the kernels take, but for its source: several blocks and ragged ends, heads of each size,
#: masks that TMA brings and others, of each head, windows, ALiBi, soft caps, empty rows, NaN in cells that nobody sees.
CASE = r"of=q,n_q=\d{2,},n_kv=\d{3},.*d=.(64|128|256),.*type=f16"
CASES = [c for c in all_cases("FLASH_ATTN_BACK") if re.search(CASE, str(c)) and "together" not in str(c)]


#: Those with all gradients in one graph, of bf16, that Hopper's kernels take.
OF_BF16 = [
    c for c in all_cases("FLASH_ATTN_BACK")
    if re.search("of=q.*type=bf16,mask=(None.*bias_type=f16|causal).*together", str(c))
]  # fmt: skip


def _stored(case: Case) -> bool:
    """Whether gradients of scores are stored where all are wanted: of these scores are dear, or a bias's is one."""
    return "d=[256,256]" not in str(case) and any(f",{x}=" in str(case) for x in ("softcap", "max_bias", "bias"))


def _check(found: np.ndarray, expected: np.ndarray, bits: int = 11) -> None:
    """Operands, weights and gradients of scores have so many bits."""
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - expected) <= 6e-4 * 2 ** (11 - bits) * np.linalg.norm(expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_gradients_at_once(case: Case) -> None:
    """K's and V's come of one launch."""
    has_bias = ",bias=" in str(case) and "d=[256,256]" not in str(case)  # of these the portable kernel makes it
    chosen, ran, pairs = back_emulation.run(case, ("q", "k", "v", "attn_bias")[: 3 + has_bias], seed=len(str(case)))
    wanted = ["hopper_stored"] if _stored(case) else ["hopper_keys", "hopper_queries"]
    assert [kernel.name for kernel in chosen.kernels] == wanted, chosen.refused
    assert len([name for name in ran if name.startswith("hopper")]) == 2, ran
    for found, expected in pairs:
        _check(found, expected)


@pytest.mark.parametrize("case", OF_BF16, ids=str)
def test_all_gradients_at_once_of_bf16(case: Case) -> None:
    """Stored gradients of scores are bf16 too, beside a bias of another type."""
    has_bias = ",bias=" in str(case)
    chosen, _, pairs = back_emulation.run(case, ("q", "k", "v", "attn_bias")[: 3 + has_bias], seed=len(str(case)))
    assert (chosen.kernels[0].name == "hopper_stored") == _stored(case), chosen.refused
    for found, expected in pairs:
        _check(found, expected, bits=8)


@pytest.mark.parametrize("of", ["q", "k", "v"])
@pytest.mark.parametrize("case", [*CASES[:2], *filter(_stored, CASES), *CASES[-2:]], ids=str)
def test_one_by_itself(case: Case, of: str) -> None:
    _, ran, pairs = back_emulation.run(case, (of,), seed=7)
    own = [name for name in ran if name.startswith("hopper")]
    assert len(own) == 1 and "stored" not in own[0], ran
    _check(*pairs[0])


def test_the_same_in_every_order() -> None:
    results = [back_emulation.run(CASES[0], ("q", "k", "v"), seed)[2] for seed in range(3)]
    for again in results[1:]:
        for (first, _), (second, _) in zip(results[0], again):
            np.testing.assert_array_equal(first, second)


PTX = {
    "mul": np.multiply, "add": np.add, "neg": np.negative, "mov": lambda x: x, "fma": lambda a, b, c: a * b + c,
    "ex2": np.exp2, "rcp": lambda x: 1 / x,
}  # fmt: skip


@pytest.mark.parametrize(("form", "reach", "error"), [(softcap.SHORT, 0.45, 8.1e-5), (softcap.EXACT, 6.0, 1e-9)])
def test_the_soft_cap_and_its_slope(form: Any, reach: float, error: float) -> None:
    """Each form in its range, its instructions in float64; and which scores the short one says are inside."""
    scale, cap, shift = 0.3, 5.0, -7.0
    ratio, unit = scale / cap, cap * np.log2(np.e)
    near = [c * unit * ratio ** (2 * i + 1) for i, c in enumerate(softcap.TANH_FROM_END.value)]
    slopes = [c * ratio ** (2 * i) for i, c in enumerate(softcap.SLOPE_FROM_END.value)]
    names = ["ratio", "cap", "c0", "c1", "c2", "d1", "d2"]
    end = -((softcap.SHORT_RANGE.value / ratio) ** 2)
    held = dict(zip(names, [ratio, unit, *near, *slopes[1:]])) | {"shift": shift, "end": end}
    x = np.linspace(-reach * (1 - 1e-9), reach * (1 - 1e-9), 1001)
    held["score"] = x / ratio
    lines = softcap.sloped_lines(form, ["out", "slope", "score", "shift", "inside"], names)
    for line in [softcap.inside_line("inside", "score", "end"), *lines]:
        name, target, *sources = line.strip(";").replace(",", "").split()
        held[target] = PTX[name.partition(".")[0]](*(held[s] if s in held else float(s) for s in sources))
    assert np.abs(held["slope"] - 1 / np.cosh(x) ** 2).max() <= error
    assert np.abs(held["out"] - (unit * np.tanh(x) + shift)).max() <= 3e-5
    if form == softcap.SHORT:
        assert (held["inside"] < 0).all() and (held["score"][-1] * (1 + 1e-8)) ** 2 + end > 0


REFUSED = {
    "type=f16,mask=None": "heads must be of 64, 128, 256, they are of 40 and 40",
    "max_bias=4.0,bias=[1,1]": "it adds an attn_bias of f16 where there is no mask, here it is one beside a mask",
    "d=[64,64]": "K and V must both be f16 or both bf16, they are f32 and f32",
}


@pytest.mark.parametrize(("part", "why"), list(REFUSED.items()))
def test_refused_with_a_reason(part: str, why: str) -> None:
    case = next(c for c in all_cases("FLASH_ATTN_BACK") if part in str(c))
    chosen = back_emulation.chosen(case, ("q", "k"))
    assert all(chosen.refused[name] == why for name in ("hopper_keys", "hopper_queries")), chosen.refused


def test_few_rows_are_refused() -> None:
    case = dataclasses.replace(CASES[0], make=partial(_make, Axes("q", n_q=47, n_kv=64, d=(64, 64), type="f16")))
    refused = back_emulation.chosen(case, ("q",)).refused
    assert refused["hopper_queries"] == "it takes 48 queries and keys or more, here 47 and 64"


def _unseen(name: str, values: Any) -> Any:
    """A bias that hides whole tiles, pieces of others, and, of the second one, a tile more."""
    if name == "attn_bias":
        i, j = np.indices(values.shape[-2:])
        values[..., (j > i + 40) | ((i >= 128) & (j < 70))] = -np.inf
        values[:, 1, :, 128:] = -np.inf
    return values


def _unseen_and_odd(name: str, values: Any) -> Any:
    """The same, and NaN in keys that no query sees."""
    if name in ("k", "v"):
        values[..., 180:, :] = np.nan
    return _unseen(name, values)


@pytest.mark.parametrize("of", [("q", "k", "v", "attn_bias"), ("k", "attn_bias")], ids=" ".join)
def test_what_a_bias_hides_is_in_no_sum(of: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of scores of tiles that nobody sees are never written: there memory holds NaN."""

    def unwritten(self: Shared, *shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=kind)

    monkeypatch.setattr(Shared, "empty", unwritten)
    point = Axes("q", 140, 200, (4, 2), 2, (64, 64), "f16", mask=None, bias=(2, 1), bias_type="f16", dropout_p=0.3)
    case = Case("FLASH_ATTN_BACK", {}, partial(_make, point))
    chosen, _, pairs = back_emulation.run(case, of, 5, change=_unseen)
    assert [kernel.name for kernel in chosen.kernels] == ["hopper_stored"], chosen.refused
    for found, expected in pairs:
        _check(found, expected)
    odd = back_emulation.run(case, of, 5, change=_unseen_and_odd)[2]
    for (found, _), (again, _) in zip(pairs, odd):
        np.testing.assert_array_equal(found, again)


def test_gradients_of_scores_that_take_too_much_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_stored_kernels, "MOST_BYTES", 1000)
    case = next(c for c in CASES if ",bias=" in str(c) and "d=[128,128]" in str(c))
    chosen = back_emulation.chosen(case, ("q", "k", "v", "attn_bias"))
    assert [kernel.name for kernel in chosen.kernels] == ["hopper_keys", "hopper_queries", "hopper_bias"]
    assert "gradients of scores may take 1,000 bytes, here they would take" in chosen.refused["hopper_stored"]


@pytest.mark.parametrize("part", ["mask=per_head,softcap", "empty=2,max_bias", "mask=None,softcap=30"])
def test_heads_in_parts_have_the_same_bits(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of scores of some heads at a time, in the same memory in turn."""
    case = next(c for c in CASES if part in str(c))
    whole = back_emulation.run(case, ("q", "k", "v"), seed=1)
    monkeypatch.setattr(backward_stored_kernels, "MOST_BYTES", 3 * 2 * 256 * 208)
    parts = back_emulation.run(case, ("q", "k", "v"), seed=2)
    assert [kernel.name for chosen, _, _ in (whole, parts) for kernel in chosen.kernels] == ["hopper_stored"] * 2
    launches = [sum(name == "hopper_attn_back_stored" for name in ran) for _, ran, _ in (whole, parts)]
    assert launches[0] == 1 and launches[1] > 1
    for (found, _), (again, expected) in zip(whole[2], parts[2]):
        np.testing.assert_array_equal(found, again)
        _check(again, expected)


def test_a_bias_s_sum_has_all_heads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in CASES if ",bias=" in str(c) and "d=[128,128]" in str(c))
    monkeypatch.setattr(backward_stored_kernels, "MOST_BYTES", 2 * 2 * 256 * 208)
    of = back_emulation.chosen(case, ("q", "k", "v"))
    assert [kernel.name for kernel in of.kernels] == ["hopper_stored"]
    of = back_emulation.chosen(case, ("q", "k", "v", "attn_bias"))
    assert "gradients of scores may take" in of.refused["hopper_stored"]


def _last_hides(name: str, values: Any) -> Any:
    """The bias of the last sequence, if each has its own, hides some keys of a whole block."""
    if name == "attn_bias":
        values[-1, ..., 100:128] = -np.inf
    return values


def _last_hides_odd(name: str, values: Any) -> Any:
    """The same, and NaN in these keys."""
    if name in ("k", "v"):
        values[-1, :, 100:128] = np.nan
    return _last_hides(name, values)


@pytest.mark.parametrize("bias", [(2, 1), (1, 2)])
def test_a_bias_s_kernel_without_stored_scores(bias: tuple[int, int]) -> None:
    point = Axes("q", 70, 200, (4, 2), 2, (64, 64), "f16", mask=None, bias=bias, bias_type="f16", dropout_p=0.3)
    case = Case("FLASH_ATTN_BACK", {}, partial(_make, point))
    chosen, _, pairs = back_emulation.run(case, ("attn_bias",), 3, change=_last_hides)
    assert [kernel.name for kernel in chosen.kernels] == ["hopper_bias"], chosen.refused
    _check(*pairs[0])
    odd = back_emulation.run(case, ("attn_bias",), 3, change=_last_hides_odd)[2]
    np.testing.assert_array_equal(pairs[0][0], odd[0][0])
