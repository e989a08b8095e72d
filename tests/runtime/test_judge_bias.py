"""The judge's rule against errors that go one way: what rounding to 8 bits can't explain is found, rounding is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from graphrt import float8, new_input, ops
from graphrt.dtypes import dtype
from graphrt.judge import PRECISIONS, judge
from graphrt.judge_bias import step_of, why_biased, why_cut
from graphrt.tensor import Tensor

Floats = npt.NDArray[np.float64]
#: What a computation in f16 is off by, in the size of a row.
NOISE = 2.0**-11
D, HEADS, QUERIES = 64, 8, 40


def node_of(kind: str = "f8_e4m3", prec: int = 0) -> Tensor:
    q = new_input("f32", D, QUERIES, HEADS, name="q")
    k, v = (new_input("f8_e4m3", D, 16, HEADS, name=name) for name in "kv")
    return ops.flash_attn_ext(q, k, v, None, 1.0, out_type=kind, prec=prec)


def results(node: Tensor, seed: int, noise: float = NOISE) -> tuple[Floats, Floats, Floats]:
    """(what must be there, two computations of it that are off by their own noise), rows of quite different sizes."""
    random = np.random.default_rng(seed)
    e = random.normal(size=node.shape) * 2.0 ** random.integers(-3, 4, size=(*node.shape[:3], 1))
    size = np.sqrt((e**2).mean(-1, keepdims=True))
    first, second = (e + noise * size * random.normal(size=e.shape) for _ in range(2))
    return e, first, second


def stored(node: Tensor, values: Floats) -> Floats:
    return float8.decode(float8.encode(values, node.dtype), node.dtype) if node.dtype.is_float8 else values


def said(node: Tensor, actual: Floats, expected: Floats, low: Floats) -> str:
    return judge(node, stored(node, actual), expected, low).message


@pytest.mark.parametrize("kind", ["f8_e4m3", "f32"])
def test_rounding_is_right(kind: str) -> None:
    """The low-precision computation's own errors, twice over, and others of their size; 60 draws."""
    node = node_of(kind, 8 if kind == "f32" else 0)
    for seed in range(60):
        e, honest, low = results(node, seed, NOISE if kind != "f32" else 0.02)
        assert not said(node, honest, e, low), seed
        assert not said(node, low, e, low)
        assert not said(node, e, e, low)


def head(n: int, factor: float) -> Callable[[Floats], Floats]:
    def change(x: Floats) -> Floats:
        y = x.copy()
        y[:, :, n] *= factor  # result: [sequence, query, head, D]
        return y

    return change


def toward_zero(x: Floats) -> Floats:
    below = stored(node_of(), x)
    steps = step_of(below, dtype("f8_e4m3"))
    return np.where(np.abs(below) > np.abs(x), below - np.sign(x) * steps / 2, below)


def column(x: Floats) -> Floats:
    y = x.copy()
    y[..., 5] *= 1.12
    return y


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda x: x * 1.06, "results are 1.06", id="6 percent"),
        pytest.param(lambda x: x * 0.94, "results are 0.94", id="6 percent less"),
        pytest.param(lambda x: x * 1.02, "results are 1.02", id="2 percent"),
        pytest.param(lambda x: x * 1.01, "results are 1.01", id="1 percent"),
        pytest.param(lambda x: x * 0.99, "results are 0.9", id="1 percent less"),
        pytest.param(toward_zero, "results are 0.9", id="cut off"),
        pytest.param(head(3, 1.02), "of head 3 are 1.02", id="one head's scale of 1.02 dropped"),
        pytest.param(column, "of column 5 are 1.1", id="a column"),
        pytest.param(lambda x: x + 0.03 * np.sqrt((x**2).mean(-1, keepdims=True)), "on average", id="an offset"),
    ],
)  # fmt: skip
def test_what_goes_one_way_is_found(change: Callable[[Floats], Floats], words: str) -> None:
    """None of it is more than the relative error allows, which has to leave room for rounding."""
    node = node_of()
    e, honest, low = results(node, 1)
    verdict = judge(node, stored(node, change(honest)), e, low)
    assert not verdict.ok and words in verdict.message and "chance and rounding explain" in verdict.message
    assert verdict.nmse is not None and verdict.limit is not None and verdict.nmse < verdict.limit


@pytest.mark.parametrize(("factor", "ok"), [(1.003, True), (1.02, False), (0.98, False)])
def test_products_of_8_bits_may_be_a_little_off(factor: float, ok: bool) -> None:
    """Whose results are not rounded to 8 bits; matrix units may cut sums off."""
    node = node_of("f32", 8)
    e, honest, low = results(node, 2, 0.02)
    assert (not said(node, honest * factor, e, low)) is ok


def test_what_is_too_large_for_the_type_takes_no_part() -> None:
    node = node_of()
    e, honest, low = results(node, 3)
    many = e.copy()
    many[..., ::2] = 1e4 * np.sign(many[..., ::2])
    assert not said(node, np.where(many == e, honest, many * 1.5), many, np.where(many == e, low, many))


def test_where_there_is_nothing_nothing_is_off() -> None:
    node, nothing = node_of(), np.zeros(node_of().shape)
    rule = PRECISIONS["stored f8_e4m3"]
    assert rule.bias is not None and why_biased(node, nothing, nothing, nothing, rule.bias, 0.0) == ""
    e, honest, low = results(node, 4)
    for x in (e, honest, low):
        x[:, :, 2] = 0.0
    assert not said(node, honest, e, low)


def e4m3(x: Floats) -> Floats:
    return float8.decode(float8.encode(x, dtype("f8_e4m3")), dtype("f8_e4m3"))


#: Queries of a causal attention that are judged.
AT = np.array([0, *range(100, 400, 12)])


def causal(seed: int, kernel: bool) -> tuple[Floats, Floats]:
    """Causal attention of the queries AT, [1, query, head, D]: in float64, and with q and weights rounded to e4m3, by
    powers of two, or as Hopper's kernel does: q by 448 over a row's largest, weights relative to an older maximum."""
    random, n_keys = np.random.default_rng(seed), int(AT[-1]) + 1
    q, k, v = (random.normal(size=(HEADS, n, D)) for n in (len(AT), n_keys, n_keys))
    k, v = e4m3(k), e4m3(v)
    hidden = np.where(np.arange(n_keys) <= AT[:, None], 0.0, -np.inf)

    def scores(q: Floats) -> Floats:
        made: Floats = q @ k.transpose(0, 2, 1) / 8.0 + hidden
        return made

    exact = np.exp(scores(q))
    expected = exact / exact.sum(-1, keepdims=True) @ v
    unit = 448.0 / np.abs(q).max(-1, keepdims=True)
    unit = unit if kernel else np.exp2(np.floor(np.log2(unit)))
    s = scores(e4m3(q * unit) / unit)
    top = s[..., :64].max(-1, keepdims=True) if kernel else s.max(-1, keepdims=True)
    weights = np.exp(s - top)
    result = e4m3(32.0 * weights) / 32.0 @ v / weights.sum(-1, keepdims=True)
    return expected.transpose(1, 0, 2)[None], result.transpose(1, 0, 2)[None]


def test_rows_of_few_keys_do_not_decide_alone() -> None:
    """Under a causal mask the first row, of one key, is not rounded, and larger than many others together."""
    node = node_of("f32", 8)
    for seed in range(20):
        (e, honest), (_, low) = causal(seed, kernel=True), causal(seed, kernel=False)
        assert not said(node, honest, e, low), (seed, said(node, honest, e, low))
        assert "results are 1.0" in said(node, 1.03 * honest, e, low), seed


def test_steps_of_a_type() -> None:
    values = np.array([0.0, 2.0**-9, 2.0**-6, 1.0, 1.9, 448.0])
    assert step_of(values, dtype("f8_e4m3")).tolist() == [2.0**-9, 2.0**-9, 2.0**-9, 0.125, 0.125, 32.0]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_what_is_cut_off_is_not_rounded(kind: str) -> None:
    """Of few numbers that could be chance; errors of one step before rounding are none."""
    rng = np.random.default_rng(5)
    node = ops.sqr(new_input(kind, 200, name="a"))
    e = rng.normal(size=(1, 1, 1, 200))
    bits = {"f16": 13, "bf16": 16}[kind]
    words = e.astype(np.float32).view(np.uint32)
    cut = (words >> bits << bits).view(np.float32).astype(np.float64)
    near = ((words + (1 << (bits - 1))) >> bits << bits).view(np.float32).astype(np.float64)
    noisy = e * (1 + rng.normal(size=e.shape) * 2.0 ** (bits - 24))
    noisy = (noisy.astype(np.float32).view(np.uint32) >> bits << bits).view(np.float32).astype(np.float64)
    assert f"results that rounding to {kind} makes larger is" in why_cut(node.dtype, cut, e)
    assert not why_cut(node.dtype, near, e) and not why_cut(node.dtype, noisy, e)
    larger = np.abs(near) > np.abs(e)
    few = np.where(np.cumsum(larger).reshape(e.shape) < 24, cut, near)
    assert not why_cut(node.dtype, few, e)
    assert not why_cut(node.dtype, cut[..., :30], e[..., :30])
    assert not why_cut(dtype("f32"), cut, e)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_the_smallest_numbers_lie_one_step_apart(kind: str) -> None:
    """Below the smallest normal number, where a number's own exponent says nothing of the step."""
    step = {"f16": 2.0**-24, "bf16": 2.0**-133}[kind]
    e = (np.arange(100) + 0.75) * step
    assert why_cut(dtype(kind), np.floor(e / step) * step, e) and not why_cut(dtype(kind), np.ceil(e / step) * step, e)
