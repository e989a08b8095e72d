"""Hopper's kernels of gradients of packed sequences, and the one of the form fused-k, without a GPU: their source on
numpy arrays, as in test_triton_back_hopper.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.backends.triton import device
from graphrt.ops.cases.flash_attn_back import Axes, Packed, _make, packed_case
from graphrt.testing import Case, all_cases

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support import back_emulation

from graphrt.backends.triton.kernels.flash_attn.hopper.backward_packing import order_packed_tiles

QKV = ("q", "k", "v")
#: Those of f16 that the kernels take: ends inside of tiles, a sequence of one query and one of none, windows, ALiBi.
PACKED = [c for c in all_cases("FLASH_ATTN_VARLEN_BACK") if "of=q,q_starts=[0,130,131" in str(c) and "f16,c" in str(c)]
PACKED = [c for c in PACKED if "type=bf16" not in str(c)]
#: Two blocks of keys, the last not whole: with NaN in cells that nobody sees; without a mask; and of several heads.
SMALL = Axes("q", n_q=70, n_kv=150, heads=(2, 1), d=(128, 128), type="f16", mask=None)
FUSED = [c for c in all_cases("FLASH_ATTN_BACK") if "of=q,n_q=70" in str(c) and "cache" in str(c)]
FUSED.append(Case("FLASH_ATTN_BACK", {"mask": None, "n_kv": 150}, partial(_make, SMALL)))


def _check(found: np.ndarray, expected: np.ndarray) -> None:
    """Operands, weights and gradients of scores have 11 bits."""
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - expected) <= 6e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences(case: Case) -> None:
    chosen, ran, pairs = back_emulation.run(case, QKV, seed=len(str(case)))
    assert [kernel.name for kernel in chosen.kernels] == ["hopper_packed_keys", "hopper_packed_queries"], chosen.refused
    why = dict.fromkeys(("hopper_keys", "hopper_queries"), "it takes no packed sequences")
    assert {name: chosen.refused[name] for name in why} == why
    assert ran.count("order_packed_tiles") == 2 and ran.count("attention_back_slots") == 1
    for found, expected in pairs:
        _check(found, expected)


def _spoilt(name: str, values: Any) -> Any:
    """NaN in the last sequence and in what is nobody's."""
    axis = {"q": -2, "k": -2, "v": -2, "lse": -2, "d_out": -3, "out": -3}.get(name)
    if axis is None:
        return values
    made = np.moveaxis(values.copy(), axis, 0)
    assert len(made) in (302, 343)
    made[131 if len(made) == 302 else 206 :] = np.nan
    return np.moveaxis(made, 0, axis)


@pytest.mark.parametrize("of", QKV)
def test_sequences_do_not_touch_one_another(of: str) -> None:
    """By itself, too: what each kernel needs is made for it."""
    case = packed_case(Packed(of, (0, 130, 131, 131, 300), (0, 200, 205, 206, 340), (2, 1), (64, 64), "f16"))
    [(clean, expected)] = back_emulation.run(case, (of,), seed=2)[2]
    _check(clean, expected)
    [(found, _)] = back_emulation.run(case, (of,), seed=2, change=_spoilt)[2]
    end = 131 if of == "q" else 206
    # Factors of d_out and dS are found in all rows: other powers of two, whose sums round elsewhere.
    _check(found[..., :end, :], clean[..., :end, :])
    nobody = 300 if of == "q" else 340
    assert (clean[..., nobody:, :] == 0.0).all()


def _same(name: str, values: Any) -> Any:
    return values


def _larger_keys(name: str, values: Any) -> Any:
    """K of another sequence, eight times as large, in a block that the first two visit."""
    if name != "k":
        return values
    made = values.copy()
    made[..., 206:, :] *= 8
    return made


def test_hidden_keys_do_not_choose_the_form_of_the_soft_cap() -> None:
    """Not a bit of it: one warpgroup may have cleared them before the other multiplies, or not."""
    starts = (0, 130, 131, 131, 300), (0, 200, 205, 206, 340)
    case = packed_case(Packed("q", *starts, (2, 1), (128, 128), "f16", window=70, softcap=12.0))
    clean, found = (back_emulation.run(case, ("q",), 2, change=c)[2][0][0] for c in (_same, _larger_keys))
    np.testing.assert_array_equal(found[..., :131, :], clean[..., :131, :])
    assert (found[..., 131:300, :] != clean[..., 131:300, :]).any()


def test_tiles_with_the_most_work_come_first() -> None:
    """Of two causal sequences of 300 and 200 keys with as many queries, in tiles of 128; the last is not there."""
    records = [(0, 0, 300, i * 128, 300, 0, 0, 0) for i in range(3)]
    records += [(1, 300, 200, i * 128, 200, 300, 0, 0) for i in range(2)] + [(3, 500, 0, 0, 0, 0, 0, 0)]
    for of_keys, order in ((True, (0, 3, 1, 4, 2, 5)), (False, (2, 1, 4, 0, 3, 5))):
        tiles, made = torch.tensor(records, dtype=torch.int32), torch.full((6, 8), -1, dtype=torch.int32)
        order_packed_tiles[(2,)](
            tiles, made, 6, 0, BLOCK=128, CAUSAL=True, WINDOW=False, OF_KEYS=of_keys, TILES=4, CHUNK=4, PDL=False
        )  # fmt: skip
        slots = [(*records[i][:7], records[i][5 if of_keys else 1] // 128 + records[i][0]) for i in order]
        assert made.tolist() == [list(r) for r in slots]


REFUSED = {
    "it takes 48 queries and keys a sequence or more, here 96 and 144 of 3": {"q_starts": (0, 40, 80, 94)},
    "heads must be of 64, 128, they are of 256 and 256": {"d": (256, 256)},
    "K and V must both be f16 or both bf16, they are f32 and f32": {"type": "f32"},
}


@pytest.mark.parametrize(("why", "axes"), list(REFUSED.items()))
def test_packed_sequences_refused_with_a_reason(why: str, axes: dict[str, Any]) -> None:
    given = {"q_starts": (0, 50, 100, 150), "k_starts": (0, 50, 100, 141), "d": (64, 64), "type": "f16"} | axes
    chosen = back_emulation.chosen(packed_case(Packed("q", **given)), QKV)
    assert all(chosen.refused[f"hopper_packed_{own}"] == why for own in ("keys", "queries")), chosen.refused


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_all_gradients_of_one_launch(case: Case) -> None:
    """Its sums for q have no order, the others have."""
    results = []
    for seed in range(2):
        chosen, ran, pairs = back_emulation.run(case, QKV, seed, "fused-k")
        assert [kernel.name for kernel in chosen.kernels] == ["hopper_fused"], chosen.refused
        assert chosen.kernels[0].unordered == ("q",) and not chosen.kernels[0].repeatable
        assert len([name for name in ran if name.startswith("hopper")]) == 1, ran
        for found, expected in pairs:
            _check(found, expected)
        results.append(pairs)
    for i in (1, 2):
        np.testing.assert_array_equal(results[0][i][0], results[1][i][0])


@pytest.mark.parametrize(("axes", "why"), [
    ({"d": (64, 64)}, "heads must be of 128, they are of 64"),
    ({"softcap": 2.0}, "a soft cap or dropout takes registers that the sums leave none of"),
])  # fmt: skip
def test_the_portable_kernel_makes_the_rest(axes: dict[str, Any], why: str) -> None:
    case = Case("FLASH_ATTN_BACK", axes, partial(_make, Axes(**(vars(SMALL) | axes))))
    chosen = back_emulation.chosen(case, QKV, "fused-k")
    assert [kernel.name for kernel in chosen.kernels] == ["fused-k"] and chosen.refused == {"hopper_fused": why}
