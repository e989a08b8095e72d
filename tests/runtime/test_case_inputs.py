"""Inputs of conformance cases: what each distribution promises, without which a case does not test what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from graphrt import op, ops
from graphrt.dtypes import TYPES
from graphrt.errors import GraphError
from graphrt.ops.cases.gaps import gapped
from graphrt.testing import (
    BlockMask,
    Case,
    CausalMask,
    Distinct,
    GgmlSparseMask,
    Given,
    Hiding,
    Inputs,
    Islands,
    LengthMask,
    MaskValues,
    Normal,
    Positions,
    Rows,
    Spoiled,
    Uniform,
    all_cases,
    dequantize,
    grid,
    random_blocks,
    register_cases,
)
from graphrt.testing import case as case_module

RNG = np.random.default_rng(0)


def _case(kind: str) -> Case:
    return Case("ADD", {"kind": kind}, lambda i: ops.add(i("a", "f32", (32, 3)), i("b", "f32", (32, 3))))


def test_inputs_of_one_shape_differ_and_so_do_cases_and_seeds() -> None:
    drawn = [v for case in ("one", "other") for seed in (0, 1) for v in _case(case).build(seed).values.values()]
    assert len({v.tobytes() for v in drawn}) == len(drawn) == 8
    again = [v for case in ("one", "other") for seed in (0, 1) for v in _case(case).build(seed).values.values()]
    assert all(np.array_equal(a, b) for a, b in zip(drawn, again))


@pytest.mark.parametrize("window", [1, 3])
def test_a_causal_window_sees_its_own_key_and_so_many_before(window: int) -> None:
    seen = np.isfinite(CausalMask(window)(RNG, (1, 1, 4, 9))[0, 0])
    for query, row in enumerate(seen):
        own = query + 5
        assert np.flatnonzero(row).tolist() == list(range(own - window + 1, own + 1))


def test_a_causal_mask_ends_with_the_last_key() -> None:
    mask = CausalMask()(RNG, (1, 1, 3, 5))[0, 0]
    assert np.isfinite(mask).sum(1).tolist() == [3, 4, 5] and not mask[np.isfinite(mask)].any()
    assert CausalMask(distance=True)(RNG, (1, 1, 1, 4))[0, 0].tolist() == [[-3.0, -2.0, -1.0, 0.0]]


def test_random_masks_hide_rows_where_they_say_and_no_other() -> None:
    hides = np.isneginf(MaskValues(0.97, empty_rows=2)(RNG, (2, 1, 9, 5))).all(-1)
    assert hides[..., [0, 1, 7, 8]].all()
    assert not np.isneginf(MaskValues(0.97)(RNG, (2, 1, 50, 5))).all(-1).any()
    assert 0.2 < np.isneginf(MaskValues(0.3)(RNG, (1, 1, 40, 40))).mean() < 0.4


def test_masks_of_blocks_and_lengths() -> None:
    blocks = np.isfinite(BlockMask(4, 8, one_in=3)(RNG, (2, 1, 12, 40)))
    whole = blocks.reshape(2, 3, 4, 5, 8)
    assert (whole.all((2, 4)) == whole.any((2, 4))).all() and not blocks.all()
    assert whole.any((2, 4))[..., 1:].any(-1).all(), "a row of blocks sees more than its first"
    lengths = np.isfinite(LengthMask()(RNG, (2, 3, 2, 12))).sum(-1)
    assert sorted(lengths[:, :, 0].reshape(-1).tolist()) == [2, 4, 6, 8, 10, 12] and (np.ptp(lengths, -1) == 0).all()


def test_hidden_cells_and_rows_are_hidden() -> None:
    hidden = np.isneginf(Hiding(MaskValues(0.0), (1, 4), (0.25, 0.5))(RNG, (1, 1, 8, 6))[0, 0])
    assert np.flatnonzero(hidden.all(0)).tolist() == [1, 4] and np.flatnonzero(hidden.all(1)).tolist() == [2, 3]


def test_sparse_masks_see_as_many_keys_as_asked() -> None:
    seen = np.isfinite(GgmlSparseMask(20)(RNG, (1, 1, 19, 64))[0, 0]).sum(1)
    assert seen.tolist() == [*range(20, 3, -1), 20, 19]


def test_indices_and_positions_have_their_ends() -> None:
    rows = Rows(5, distinct=True)(RNG, (3, 4))
    assert all(len(set(row)) == 4 for row in rows.tolist()) and rows.min() >= 0 and rows.max() < 5
    assert set(Rows(3)(RNG, (200,)).tolist()) == {0, 1, 2}
    positions = Positions(99)(RNG, (1, 7))
    assert positions[0, 0] == 99 and positions[0, -1] == 0 and positions.min() >= 0 and positions.max() <= 99
    assert all(len(set(row)) == 40 for row in Distinct()(RNG, (3, 40)).tolist())


def test_values_are_those_that_are_given_and_multiples_of_a_step() -> None:
    assert Given((1.0, 2.0, 3.0))(RNG, (2, 4)).tolist() == [[1, 2, 3, 1], [2, 3, 1, 2]]
    steps = Normal(2.0, 1.0, 0.25)(RNG, (1000,))
    assert not (steps % 0.25).any() and 1.8 < steps.std() < 2.2 and 0.7 < steps.mean() < 1.3
    assert -2.0 <= Uniform(-2.0, 3.0)(RNG, (500,)).min() < -1.5


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_K"])
def test_spoiled_cells_and_ends_are_nan_and_the_rest_is_not(kind: str) -> None:
    dt = TYPES[kind]
    used = dt.block_size if dt.is_quantized else 5
    raw = Spoiled(Normal(1.0), (0, 2), used=used).store(RNG, (1, 1, 4, 2 * used), dt)
    good = np.isfinite(dequantize(raw, dt))
    assert not good[..., [0, 2], :].any() and good[..., [1, 3], :used].all() and not good[..., used:].any()


def test_infinite_cells_are_infinite() -> None:
    raw = Spoiled(Normal(1.0), (1,), infinite=True).store(RNG, (1, 1, 3, 4), TYPES["f32"])
    assert np.isposinf(raw[..., 1, :]).all() and np.isfinite(raw[..., [0, 2], :]).all()


def test_what_lies_between_rows_with_gaps_is_nan() -> None:
    inputs = Inputs("gaps", 0)
    look = gapped(inputs, "a", "f32", (5, 3, 2))
    (whole,) = inputs.values.values()
    outside = np.ones(whole.size, np.bool_)
    for i in range(2):
        for j in range(3):
            start = (look.view_offs + i * look.nb[2] + j * look.nb[1]) // 4
            outside[start : start + 5] = False
    flat = whole.reshape(-1)
    assert np.isnan(flat[outside]).all() and np.isfinite(flat[~outside]).all() and outside.sum() == flat.size - 30


@pytest.mark.parametrize("op", ["MUL_MAT", "MUL_MAT_ID"])
def test_products_with_gaps_have_them_on_both_sides(op: str) -> None:
    """Weights and activations: a kernel may take the strides of either for granted."""
    looks = [c.build().result for c in all_cases(op) if c.axes.get("layout") == "gaps"]
    assert looks and all(s.op == "VIEW" for node in looks for s in node.src[:2] if s is not None)


@pytest.mark.parametrize("last", [6, 31, 32, 700])
def test_cells_hold_the_last_positions_each_in_its_own_place(last: int) -> None:
    """As a session fills a ring: a position's cell is the position modulo the size; the tokens are the last ones."""
    case = next(c for c in all_cases("KQ_MASK") if c.axes["n_cells"] == 33 and c.axes["last"] in (last, 1000)
                and c.axes["window"] == 0 and not c.axes["broken"] and "alibi" not in c.axes)  # fmt: skip
    inputs = {t.name: v[0, 0] for t, v in case.build().values.items()}
    cells, newest = inputs["cells"][0], int(case.axes["last"])  # type: ignore[call-overload]
    held = [p for p in cells.tolist() if p >= 0]
    assert sorted(held) == list(range(max(newest - 32, 0), newest + 1)) and set(cells.tolist()) - set(held) <= {-1}
    assert all(cells[p % 33] == p for p in held)
    assert inputs["pos"][0].tolist() == list(range(newest - 6, newest + 1))


def test_islands_hold_values_and_the_sea_is_zero() -> None:
    init = Islands(Uniform(1.0, 2.0), (2, 10), 3)
    for values in (init(RNG, (1, 1, 16, 8)), init.store(RNG, (1, 1, 16, 8), TYPES["f32"])):
        assert np.flatnonzero(values[0, 0].any(-1)).tolist() == [2, 3, 4, 10, 11, 12]


#: Those that gguf can't quantize to, so that cases draw their bits.
DRAWN = (
    "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s",
    "iq1_s", "iq1_m", "nvfp4",
)  # fmt: skip


@pytest.mark.parametrize("kind", DRAWN)
def test_random_blocks_are_valid(kind: str) -> None:
    dt = TYPES[kind]
    values = dequantize(random_blocks(dt, (3, 2 * dt.block_size), RNG), dt)
    assert np.isfinite(values).all() and values.std() > 0 and np.abs(values).max() < 1e4


def test_a_grid_leaves_out_what_any_rule_names() -> None:
    points = list(grid(CausalMask(), {"window": (0, 1, 2), "distance": (False, True)},
                       {"far": lambda m: m.window == 2, "odd": lambda m: m.distance and m.window == 0}))  # fmt: skip
    assert [(m.window, m.distance) for m in points] == [(0, False), (1, False), (1, True)]


def test_a_package_of_ops_names_its_cases_and_they_load_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As graphrt.ops does: the module is not imported before somebody asks for cases."""
    (tmp_path / "cases_of_a_package.py").write_text(
        "from graphrt.testing import all_cases, register_cases\n"
        "register_cases('ADD', of_a_package=lambda: list(all_cases('ADD'))[:2])\n"
    )
    assert list(all_cases("ADD"))  # those of graphrt.ops are there
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(op, "_CASES_MODULES", list(op.cases_modules()))
    monkeypatch.setitem(case_module._SETS, "ADD", dict(case_module._SETS["ADD"]))
    for _ in range(2):  # a name is kept once
        op.register_cases_module("cases_of_a_package")
    assert "cases_of_a_package" not in sys.modules and len(op.cases_modules()) == 2
    assert [c.op for c in all_cases(which="of_a_package")] == ["ADD", "ADD"]
    del sys.modules["cases_of_a_package"]


def test_a_set_of_cases_is_registered_once_and_for_an_op_that_there_is() -> None:
    assert next(all_cases("SQR")).op == "SQR"
    with pytest.raises(GraphError, match="registered once, SQR has 'quick' already"):
        register_cases("SQR", quick=tuple)
    with pytest.raises(GraphError, match="must be registered, got 'NOPE'"):
        register_cases("NOPE", quick=tuple)


def test_an_op_without_a_set_has_its_quick_cases_for_full_and_nothing_else() -> None:
    assert [str(c) for c in all_cases("SQR", "full")] == [str(c) for c in all_cases("SQR")] != []
    assert list(all_cases("SQR", "ggml")) == []
