"""Quantizers: their errors against rounding to nearest in float64 and against llama.cpp's, and what they refuse."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from graphrt.dtypes import TYPES
from graphrt.errors import GGUFError
from graphrt.models.quantize.fit import Grid, scales, scales_and_minimums
from graphrt.models.quantize.types import ALWAYS, IQ4_VALUES, WITH_IMPORTANCE, WRITABLE, quantize

Floats = npt.NDArray[np.float32]

N_ROWS, N = 64, 512
IMPORTANCE = (1 + np.arange(N) % 7).astype(np.float32) ** 2
#: The errors that llama.cpp's quantizers (ggml 0.25.3, by ggml_quantize_chunk) leave on sample(): the sum of squares
#: over that of the values, without importances, and with IMPORTANCE, by which the squares are then weighed too.
LLAMA_CPP = {
    "q2_K": (1.008e-01, 6.508e-02), "q3_K": (2.658e-02, 2.149e-02), "q4_K": (5.897e-03, 5.136e-03),
    "q5_K": (1.520e-03, 1.328e-03), "q6_K": (3.791e-04, 3.253e-04), "iq4_nl": (6.675e-03, 5.830e-03),
    "iq4_xs": (6.793e-03, 5.968e-03), "q4_0": (9.167e-03, 7.768e-03), "q5_0": (2.249e-03, 1.918e-03),
    "q4_1": (7.005e-03, 4.955e-03), "q5_1": (1.644e-03, 1.163e-03),
}  # fmt: skip


def sample(n_rows: int = N_ROWS, n: int = N) -> Floats:
    """Values with tails heavier than a normal distribution's, as weights have, the same everywhere."""
    raw = np.random.Philox(key=11).random_raw(n_rows * n * 4).reshape(4, -1)
    u = ((raw[0] >> np.uint64(40)).astype(np.float64) + 0.5) / 2.0**24
    return (np.log(u / (1 - u)) * 0.02).astype(np.float32).reshape(n_rows, n)


def back(data: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.float64]:
    """What the gguf package reads of it."""
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(TYPES[name].id))
    return values.astype(np.float64)


def error(x: Floats, name: str, importance: Floats | None = None, weights: Floats | None = None) -> float:
    """The squares of errors over the values' squares, weighed by `weights`."""
    w = np.ones(x.shape[1]) if weights is None else weights.astype(np.float64)
    made = quantize(x, TYPES[name], importance)
    return float((np.square(back(made, name) - x) * w).sum() / (np.square(x.astype(np.float64)) * w).sum())


def nearest(x: Floats, size: int, low: int, high: int) -> float:
    """The error of rounding to the nearest code with a float64 scale, and minimum where low is 0, of each group."""
    groups = x.astype(np.float64).reshape(-1, size)
    if low == 0:
        minimum = np.minimum(groups.min(1, keepdims=True), 0)
        s = (groups.max(1, keepdims=True) - minimum) / high
        found = np.clip(np.rint((groups - minimum) / s), 0, high) * s + minimum
    else:
        extreme = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
        s = extreme / low
        found = np.clip(np.rint(groups / s), low, high) * s
    return float(np.square(found - groups).sum() / np.square(groups).sum())


@pytest.mark.parametrize(
    ("name", "size", "low", "high"),
    [
        ("q2_K", 16, 0, 3),
        ("q3_K", 16, -4, 3),
        ("q4_K", 32, 0, 15),
        ("q5_K", 32, 0, 31),
        ("q6_K", 16, -32, 31),
    ],
)
def test_k_quants_lose_less_than_rounding_to_nearest(name: str, size: int, low: int, high: int) -> None:
    x = sample()
    assert error(x, name) < nearest(x, size, low, high), "though their scales are rounded too"


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_errors_are_no_larger_than_llama_cpps(name: str) -> None:
    plain, weighed = LLAMA_CPP[name]
    x = sample()
    assert error(x, name) < 1.001 * plain  # of the package's own, the same but for the figures' rounding
    assert error(x, name, IMPORTANCE, weights=IMPORTANCE) < weighed


@pytest.mark.parametrize("name", [*ALWAYS, *WITH_IMPORTANCE])
def test_importances_move_errors_to_where_they_matter_less(name: str) -> None:
    x = sample(8)
    with_them = error(x, name, IMPORTANCE, weights=IMPORTANCE)
    assert with_them < 0.97 * error(x, name, weights=IMPORTANCE)
    flat = quantize(x, TYPES[name], np.full(N, 3.0, np.float32))
    assert np.array_equal(flat, quantize(x, TYPES[name], np.full(N, 3.0 * 2.0**-30, np.float32))), (
        "only their ratios count"
    )
    assert quantize(x, TYPES[name], np.zeros(N, np.float32)).shape == flat.shape


@pytest.mark.parametrize("name", WRITABLE)
def test_rows_are_quantized_by_themselves(name: str) -> None:
    x = sample(5)
    whole = quantize(x, TYPES[name])
    assert whole.shape == (5, TYPES[name].row_size(N)) and whole.dtype == np.uint8
    for i in (0, 4):
        assert np.array_equal(whole[i : i + 1], quantize(x[i : i + 1], TYPES[name]))


@pytest.mark.parametrize("name", [t for t in WRITABLE if TYPES[t].is_quantized])
def test_special_values(name: str) -> None:
    n = TYPES[name].block_size
    zeros = np.zeros((1, n), np.float32)
    assert not back(quantize(zeros, TYPES[name]), name).any()
    spike = zeros.copy()
    spike[0, n // 3] = -2.5
    found = back(quantize(spike, TYPES[name]), name)[0]
    assert abs(found[n // 3] + 2.5) < (0.3 if name != "mxfp4" else 0.51), "mxfp4 has 2 and 3"
    assert np.abs(np.delete(found, n // 3)).max() < 0.3 or name in ("mxfp4", "iq4_nl", "iq4_xs")
    tiny = np.full((1, n), 1e-30, np.float32)  # below what an f16 scale can say
    assert np.isfinite(back(quantize(tiny, TYPES[name]), name)).all()


@pytest.mark.parametrize("name", ["q2_K", "q4_K", "q5_K", "q4_1", "q5_1"])
@pytest.mark.parametrize("level", [0.75, -0.75])
def test_a_constant_is_kept(name: str, level: float) -> None:
    x = np.full((1, 256), level, np.float32)
    importance = None if name in ALWAYS else np.ones(256, np.float32)
    found = back(quantize(x, TYPES[name], importance), name)
    assert np.allclose(found, level, rtol=2**-10), "a scale, or a minimum, as exact as an f16"


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(name: str, bad: float) -> None:
    x = sample(2)
    x[1, 77] = bad
    with pytest.raises(GGUFError, match="must be finite"):
        quantize(x, TYPES[name])


@pytest.mark.parametrize("name", ["f16", "q4_0", "q4_K", "q6_K", "iq4_xs", "q8_0"])
@pytest.mark.parametrize("size", [6e5, 1e21, 3e38])  # over what scales hold, their squares over f32's, near f32's own
def test_what_is_too_large_is_refused(name: str, size: float) -> None:
    x = np.full((1, 256), size, np.float32)
    x[0, ::2] *= -1
    with pytest.raises(GGUFError, match="not too large"):
        quantize(x, TYPES[name])


def test_a_fit_finds_what_a_search_of_all_scales_finds() -> None:
    """On a few groups, by trying 20,000 scales in float64."""
    x, w = sample(1, 128).reshape(8, 16), np.abs(sample(2, 64)).reshape(8, 16) + 0.01
    grid = Grid(-4, 3)
    found = scales(torch.from_numpy(x), torch.from_numpy(w), grid).numpy().astype(np.float64)
    tried = np.linspace(-1, 1, 20001)[:, None] * np.abs(x).max() / 2

    def lost(s: npt.NDArray[np.float64], i: int) -> npt.NDArray[np.float64]:
        safe = np.where(s == 0, 1, s)
        codes = np.clip(np.rint(x[i] / safe), -4, 3)
        return np.asarray((w[i] * np.square(codes * s - x[i])).sum(-1))

    for i in range(8):
        assert lost(found[i : i + 1, None], i)[0] < 1.02 * lost(tried, i).min()


def test_a_minimum_is_found_where_all_values_lie_above_it() -> None:
    codes = np.random.Philox(key=3).random_raw(64) % np.uint64(16)
    codes[:2] = 0, 15
    x = torch.from_numpy((0.5 * codes.astype(np.float32) - 3.0).reshape(1, 64).astype(np.float32))
    s, m = scales_and_minimums(x, torch.ones_like(x), 15)
    assert s.item() == pytest.approx(0.5, rel=1e-6) and m.item() == pytest.approx(3.0, rel=1e-6)
    s, m = scales_and_minimums(x + 5, torch.ones_like(x), 15)
    assert m.item() >= 0.0, "a minimum over zero can't be stored"
    s, m = scales_and_minimums(x + 5, torch.ones_like(x), 15, below_zero=False)
    assert s.item() == pytest.approx(0.5, rel=1e-5) and m.item() == pytest.approx(-2.0, rel=1e-5)


@pytest.mark.parametrize("step", [1, -1, 16, -16])  # of the low or the high nibble's code
def test_no_neighbouring_code_is_nearer(step: int) -> None:
    """Codes are chosen for the scales and minimums as they are stored."""
    x = sample(8)
    made = quantize(x, TYPES["q4_K"]).reshape(-1, 144)
    moved = made.copy()
    codes = moved[:, 16:]
    nibble = codes & 15 if abs(step) == 1 else codes >> 4
    may = nibble != (15 if step > 0 else 0)
    codes[may] += np.uint8(step % 256)
    before, after = (np.abs(back(raw.reshape(8, -1), "q4_K") - x) for raw in (made, moved))
    assert (after - before).min() > -1e-7 and may.mean() > 0.5


def test_the_table_of_iq4_is_ggmls() -> None:
    """Each code's value, as the gguf package reads it."""
    block = np.zeros((1, 18), np.uint8)
    block[0, :2] = np.array([1.0], np.float16).view(np.uint8)
    block[0, 2:] = np.arange(16, dtype=np.uint8)
    assert back(block, "iq4_nl")[0, :16].tolist() == list(IQ4_VALUES)
