"""The judge at its limits: what is just right passes, and what is just wrong does not."""

from __future__ import annotations

import numpy as np
import pytest

from graphrt import new_input, ops
from graphrt.dtypes import CACHES, WRITABLE, dtype
from graphrt.judge import (
    PRECISIONS,
    ROW_CEILING,
    Precision,
    judge,
    judge_equal,
    judge_order,
    judge_share,
    judge_written,
    precision,
)
from graphrt.patterns import describe
from graphrt.testing import dequantize, nmse, quantize

F32 = PRECISIONS["f32"]


def _ones(rows: int = 1, n: int = 64) -> np.ndarray:
    return np.ones((1, 1, rows, n))


@pytest.mark.parametrize("factor, ok", [(0.97, True), (1.03, False)])
def test_an_error_of_twice_the_low_one_and_the_band_is_the_limit(factor: float, ok: bool) -> None:
    node = ops.sqr(new_input("f32", 64, name="a"))
    low = 2.0**-21
    limit = 2.0 * low + F32.band
    assert limit < F32.ceiling
    verdict = judge(node, _ones() * (1 + factor * limit), _ones(), _ones() * (1 + low))
    assert verdict.ok is ok and verdict.limit == pytest.approx(limit**2, rel=1e-6)


@pytest.mark.parametrize("factor, ok", [(0.97, True), (1.03, False)])
@pytest.mark.parametrize("low", [2.0, np.inf, np.nan])
def test_no_low_result_lifts_the_limit_over_the_ceiling(low: float, factor: float, ok: bool) -> None:
    node = ops.sqr(new_input("f32", 64, name="a"))
    verdict = judge(node, _ones() * (1 + factor * F32.ceiling), _ones(), _ones() * low)
    assert verdict.ok is ok and verdict.limit == pytest.approx(F32.ceiling**2)


@pytest.mark.parametrize("factor, ok", [(0.97, True), (1.03, False)])
def test_no_low_result_lifts_a_row_over_its_ceiling(factor: float, ok: bool) -> None:
    """The low-precision computation is lost in one row; another one is off by about a row's ceiling."""
    node = ops.sqr(new_input("f32", 64, 4096, name="a"))
    expected, low = _ones(4096), _ones(4096)
    low[0, 0, 7] = 2.0
    actual = expected.copy()
    actual[0, 0, 9] *= 1 + factor * ROW_CEILING * F32.ceiling
    verdict = judge(node, actual, expected, low)
    assert verdict.nmse is not None and verdict.limit is not None and verdict.nmse < verdict.limit
    assert verdict.ok is ok and ("in one row" in verdict.message) is not ok


@pytest.mark.parametrize("factor, ok", [(0.97, True), (1.03, False)])
def test_a_row_may_be_off_by_three_times_the_worst_low_one(factor: float, ok: bool) -> None:
    node = ops.sqr(new_input("f32", 64, 4096, name="a"))
    low = 2.0**-20
    actual = _ones(4096)
    actual[0, 0, 9] *= 1 + factor * (3 * low + F32.band)
    assert judge(node, actual, _ones(4096), _ones(4096) * (1 + low)).ok is ok


@pytest.mark.parametrize("factor, ok", [(0.97, True), (1.03, False)])
@pytest.mark.parametrize("one_row", [False, True])
def test_of_several_low_ones_the_root_mean_square_counts(factor: float, ok: bool, one_row: bool) -> None:
    """A lucky one (0) does not make the limit smaller than it is on average, an unlucky one not as large as itself."""
    node = ops.sqr(new_input("f32", 64, 4096, name="a"))
    lows = np.array([0.0, 2.0**-20, 2.0**-19, 2.0**-20]).reshape(4, 1, 1, 1, 1)
    mean = float(np.sqrt(np.square(lows).mean()))
    actual = _ones(4096)
    actual[0, 0, slice(9, 10) if one_row else slice(None)] *= 1 + factor * ((3 if one_row else 2) * mean + F32.band)
    assert judge(node, actual, _ones(4096), _ones(4096) * (1 + lows)).ok is ok


@pytest.mark.parametrize("energy, ok", [(2.0**-6, False), (2.0**-24, True)])
def test_a_small_row_counts_and_one_that_cancels_out_does_not(energy: float, ok: bool) -> None:
    """Both are off by 2**-16 of their own size, over what a row may be here, 1.6 * 2**-18; one of them counts."""
    node = ops.sqr(new_input("f32", 64, 4096, name="a"))
    expected = _ones(4096)
    expected[0, 0, 9] *= np.sqrt(energy)
    actual = expected.copy()
    actual[0, 0, 9] *= 1 + 2.0**-16
    low = expected * (1 + 2.0**-19)
    assert judge(node, actual, expected, low).ok is ok


@pytest.mark.parametrize(
    "k, v, kind",
    [("f16", "f16", "f16"), ("f32", "f32", "f32"), ("f32", "f16", "f16"), ("f16", "bf16", "bf16"),
     ("bf16", "f16", "bf16"), ("q8_0", "f32", "f16")],
)  # fmt: skip
def test_the_types_of_k_and_v_decide_what_attention_may_compute_in(k: str, v: str, kind: str) -> None:
    q = new_input("f32", 32, 1, name="q")
    assert (
        precision(ops.flash_attn_ext(q, new_input(k, 32, 4, name="k"), new_input(v, 32, 4, name="v"), None, 1.0))
        == kind
    )


@pytest.mark.parametrize("value, ok", [(np.inf, True), (-np.inf, False), (np.nan, False), (65504.0, False)])
def test_what_f16_can_not_hold_is_infinite_of_its_sign(value: float, ok: bool) -> None:
    node = ops.sqr(new_input("f16", 64, name="a"))
    expected = _ones() * 100.0
    expected[..., 5] = 1e6
    with np.errstate(over="ignore"):
        right = expected.astype(np.float16).astype(np.float64)
    actual = right.copy()
    actual[..., 5] = value
    assert np.isposinf(right[..., 5]).all()
    assert judge(node, actual, expected, right).ok is ok


def test_infinity_has_a_sign() -> None:
    node = ops.sqr(new_input("f32", 4, name="a"))
    expected = np.array([1.0, np.inf, -np.inf, np.nan]).reshape(1, 1, 1, 4)
    assert judge(node, expected, expected, expected).ok
    assert not judge(node, expected * np.array([1.0, -1.0, -1.0, 1.0]), expected, expected).ok


@pytest.mark.parametrize("bad", [-1, 4])
def test_an_index_outside_is_none_whatever_python_makes_of_it(bad: int) -> None:
    order, values = ops.argsort(new_input("f32", 4, name="a")), np.array([[1.0, 2.0, 3.0, 4.0]])
    right = np.array([[0, 1, 2, 3]])
    assert judge_order(order, right, right, values).ok
    wrong = judge_order(order, np.array([[0, 1, 2, bad]]), right, values)
    assert not wrong.ok and "must lie in 0..3" in wrong.message


def test_what_is_moved_keeps_the_sign_of_zero_and_any_nan() -> None:
    node = ops.cont(new_input("f32", 3, name="a"))
    right = np.array([-0.0, np.nan, 1.0], np.float32).reshape(1, 1, 1, 3)
    other_nan = right.copy()
    other_nan.view(np.uint32)[..., 1] = 0x7FC12345
    assert judge_equal(node, right, right).ok and judge_equal(node, other_nan, right).ok
    assert not judge_equal(node, np.abs(right), right).ok


def _off(part: float) -> tuple[np.ndarray, np.ndarray]:
    """10,000 results, and the same with a part of them just over what the share rule calls near: 0.3 + a quarter."""
    expected = np.random.default_rng(1).normal(size=(1, 1, 10, 1000)) + 10.0
    actual = expected.copy()
    actual.reshape(-1)[: round(part * actual.size)] *= 1.25
    actual.reshape(-1)[: round(part * actual.size)] += 0.3001
    return actual, expected


@pytest.mark.parametrize(("part", "ok"), [(0.0051, False), (0.0049, True), (0.005, True), (0.0, True)])
def test_half_a_percent_of_the_elements_may_be_far_off(part: float, ok: bool) -> None:
    verdict = judge_share(ops.sqr(new_input("f32", 1000, 10, name="a")), *_off(part))
    assert verdict.ok is ok and ("51 of 10000 elements are off by more than 0.3 + 0.25" in verdict.message) is not ok


def test_what_is_near_counts_as_right_however_many_there_are() -> None:
    _, expected = _off(0.0)
    node = ops.sqr(new_input("f32", 1000, 10, name="a"))
    assert judge_share(node, expected * 1.25 + 0.2999, expected).ok
    assert not judge_share(node, expected * 1.25 + 0.3001, expected).ok
    assert not judge_share(node, expected * 0.75 - 0.3001, expected).ok
    assert not judge_share(node, np.full_like(expected, np.nan), expected).ok
    assert judge_share(node, np.full_like(expected, np.nan), np.full_like(expected, np.nan)).ok


@pytest.mark.parametrize(
    ("kind", "part", "ok"), [("f8_e4m3", 0.0051, False), ("f8_e4m3", 0.0049, True), ("f16", 0.0051, True)]
)
def test_results_of_8_bits_keep_both_rules(kind: str, part: float, ok: bool) -> None:
    """The relative error allows what a low-precision computation is off by; the share of elements does not."""
    q, k, v = (new_input(dt, 100, n, name=name) for dt, n, name in (("f32", 100, "q"), (kind, 4, "k"), ("f16", 4, "v")))
    node = ops.flash_attn_ext(q, k, v, None, 1.0)
    actual, expected = (x.reshape(node.shape) / 10 for x in _off(part))
    actual = np.where(actual != expected, expected * 1.25 + 0.3001, expected)
    assert judge(node, actual, expected, actual, Precision(1.0, 1.0)).ok is ok


@pytest.mark.parametrize("name", [name for name in WRITABLE if dtype(name).is_quantized])
def test_the_steps_of_a_cache_type(name: str) -> None:
    """Among 32 normal values two are neighbours in most blocks: their distance is a step."""
    values = np.random.default_rng(0).normal(size=(200, 32)).astype(np.float32)
    stored = dequantize(quantize(values, dtype(name)), dtype(name)).reshape(values.shape).astype(np.float64)
    gaps = np.diff(np.sort(stored, axis=1), axis=1)
    step = np.where(gaps > 0, gaps, np.inf).min(1)
    span = np.ptp(stored, axis=1) if CACHES[name].from_least else np.abs(stored).max(1)
    assert float(np.median(span / step)) == pytest.approx(CACHES[name].steps, rel=0.01)


@pytest.mark.parametrize("steps, ok", [(1, True), (2, False)])
def test_one_quantization_step_is_the_most(steps: int, ok: bool) -> None:
    node = ops.cpy(new_input("f32", 64, 8, name="a"), new_input("q8_0", 64, 8, name="b"))
    right = quantize(np.random.default_rng(0).normal(size=node.shape), dtype("q8_0"))
    actual = right.copy()
    codes = actual.reshape(-1, 34)[3, 2:].view(np.int8)
    at = int(np.argmin(np.abs(codes)))
    codes[at] += steps
    assert judge_written(node, actual, right).ok is ok


@pytest.mark.parametrize("count, ok", [(64, True), (65, False)])
def test_few_elements_may_be_a_step_off(count: int, ok: bool) -> None:
    """A hundredth of 6400."""
    node = ops.cpy(new_input("f32", 64, 100, name="a"), new_input("q8_0", 64, 100, name="b"))
    right = quantize(np.random.default_rng(0).normal(size=node.shape), dtype("q8_0"))
    actual = right.copy()
    for block in actual.reshape(-1, 34)[:count]:
        codes = block[2:].view(np.int8)
        codes[int(np.argmin(np.abs(codes)))] += 1
    assert judge_written(node, actual, right).ok is ok


def test_a_block_of_nan_is_no_step_off() -> None:
    """32 elements of 6400 are few: only that they are NaN makes them wrong."""
    node = ops.cpy(new_input("f32", 64, 100, name="a"), new_input("q8_0", 64, 100, name="b"))
    right = quantize(np.random.default_rng(0).normal(size=node.shape), dtype("q8_0"))
    actual = right.copy()
    actual.reshape(-1, 34)[3, :2] = 0xFF  # the block's scale
    assert not judge_written(node, actual, right).ok and judge_written(node, actual, actual).ok


def test_nmse_counts_nan_and_infinity_where_the_reference_has_them() -> None:
    right = [1.0, np.nan, np.inf]
    assert nmse(right, right) == 0.0 and nmse([2.0, np.nan, np.inf], right) == 1.0
    for wrong in ([1.0, 2.0, np.inf], [1.0, np.nan, -np.inf], [1.0, np.nan, 3.0], [np.nan, np.nan, np.inf]):
        assert nmse(wrong, right) == np.inf, wrong


@pytest.mark.parametrize(
    "index, text",
    [
        (np.s_[..., 5::11], "all of every 11th column from 5 of 256"),
        (np.s_[..., 3::12], "all of every 12th column from 3 of 256"),
        (np.s_[..., 2::22], "all of every 22nd column from 2 of 256"),
        (np.s_[..., 1::111], "all of every 111th column from 1 of 256"),
        (np.s_[..., 16:48], "all of columns 16 to 47 of 256"),
        (np.s_[..., 32:64], "all of one tile of 32 columns (32 to 63 of 256)"),
        (np.s_[..., :3], "all of only the first 3 of 256 columns"),
        (np.s_[..., 0:256:255], "all of 2 of 256 columns (from 0 to 255)"),
    ],
)
def test_patterns_in_words(index: object, text: str) -> None:
    bad = np.zeros((1, 1, 1, 256), np.bool_)
    bad[index] = True  # type: ignore[index]
    assert describe(bad, "ADD") == text


def _to_bf16(x: np.ndarray, cut: bool) -> np.ndarray:
    words = x.astype(np.float32).view(np.uint32) + np.uint32(0 if cut else 0x8000)
    return (words & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(("kind", "n"), [("bf16", 64), ("f16", 64), ("bf16", 7), ("f32", 64)])
def test_a_wrong_result_whose_numbers_have_fewer_bits_says_so(kind: str, n: int, cut: bool) -> None:
    """Of seven that could be chance."""
    node = ops.sqr(new_input("f32", n, name="a"))
    expected = np.random.default_rng(1).uniform(0.5, 2.0, (1, 1, 1, n))
    made = {"bf16": _to_bf16(expected, cut), "f16": expected.astype(np.float16).astype(np.float64)}
    message = judge(node, made.get(kind, expected * 1.01), expected, expected).message
    assert message.startswith("NMSE")
    assert ("numbers of" in message) == (n > 7 and kind != "f32")
    if "numbers of" in message:
        assert f"all of them are numbers of {kind}," in message and ("cut off" in message) == (kind == "bf16" and cut)
