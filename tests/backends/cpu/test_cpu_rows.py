"""The native kernels of whole rows against float64: layer norm, softmax, sums, orders; and values that lie in any way.

Outputs start as NaN, and every buffer has guard bytes on both sides that must survive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

gguf: Any = pytest.importorskip("gguf")
from graphrt.backends.cpu import fast  # noqa: E402

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)
from support.cpu_kernels import Memory, at, nmse, run  # noqa: E402

pytestmark = pytest.mark.usefixtures("many_chunks")

SIZES = [1, 15, 16, 33, 1100]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("weighted", "biased"), [(False, False), (True, False), (True, True), (False, True)])
def test_layer_norm(n: int, weighted: bool, biased: bool, mem: Memory, rng: np.random.Generator) -> None:
    x, y = mem.put((rng.standard_normal((3, n + 2)) + 5).astype(np.float32)), mem.nan(3, n)
    w, bias = (mem.put(rng.standard_normal(n).astype(np.float32)) for _ in range(2))
    run(fast.layer_norm(
        y=at(y), x=at(x), n_rows=3, n=n, x_nb=4 * (n + 2), y_nb=4 * n, eps=1e-3, w=at(w) if weighted else 0,
        bias=at(bias) if biased else 0,
    ))  # fmt: skip
    a = x[:, :n].astype(np.float64)
    centred = a - a.mean(1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-3)
    want = want * (w if weighted else 1) + (bias if biased else 0)
    assert nmse(y, want) < (1e-11 if n > 1 or biased else np.inf)


@pytest.mark.parametrize("n", SIZES)
def test_soft_max(n: int, mem: Memory, rng: np.random.Generator) -> None:
    x, y = mem.put((rng.standard_normal((4, n)) * 20).astype(np.float32)), mem.nan(4, n)
    x[1], x[2, n // 2 :] = -np.inf, -np.inf
    x[3] += 1000
    run(fast.soft_max(y=at(y), x=at(x), n_rows=4, n=n, x_nb=4 * n, y_nb=4 * n, scale=0.5))
    a = x.astype(np.float64) * 0.5
    top = a.max(1, keepdims=True)
    weights = np.exp(a - np.where(np.isinf(top), 0, top))
    total = weights.sum(1, keepdims=True)
    assert nmse(y, np.where(total == 0, 0, weights / np.where(total == 0, 1, total))) < 1e-12
    assert not y[1].any()
    x[0, -1] = np.nan
    run(fast.soft_max(y=at(x), x=at(x), n_rows=4, n=n, x_nb=4 * n, y_nb=4 * n, scale=1.0))  # in place
    assert np.isnan(x[0]).all() and np.isfinite(x[1:]).all()


@pytest.mark.parametrize("n", SIZES)
def test_sum_rows(n: int, mem: Memory, rng: np.random.Generator) -> None:
    x, y = mem.put(rng.standard_normal((5, n + 1)).astype(np.float32)), mem.nan(5)
    run(fast.sum_rows(y=at(y), x=at(x), n_rows=5, n=n, x_nb=4 * (n + 1)))
    assert nmse(y, x[:, :n].sum(1, dtype=np.float64)) < 1e-11


def hard_to_order(rng: np.random.Generator, n: int) -> np.ndarray:
    """Rows with many equals, with zeros of both signs, NaN of both signs, infinities."""
    x = rng.integers(-20, 20, (8, n)).astype(np.float32)
    x[1, rng.random(n) < 0.3] = np.nan
    x[2, rng.random(n) < 0.5] = -np.nan
    x[3] = np.where(rng.random(n) < 0.5, 0.0, -0.0)
    x[4], x[5] = -np.inf, -5.0
    x[6, -1], x[7, n // 2] = 99.0, np.inf
    return x


def ranks(x: np.ndarray) -> np.ndarray:
    """Values that numpy orders as the kernels are to: a NaN above all."""
    return np.where(np.isnan(x), np.float64(1e300), np.clip(x.astype(np.float64), -1e299, 1e299))


@pytest.mark.parametrize("n", [*SIZES, 4096, 4099])
def test_argmax(n: int, mem: Memory, rng: np.random.Generator) -> None:
    x = mem.put(hard_to_order(rng, n))
    out, found = mem.put(np.full(8, -1, np.int32)), mem.put(np.zeros((8, fast.PIECES), np.int64))
    fast.Program(fast.argmax(out=at(out), x=at(x), found=at(found), n_rows=8, n=n, x_nb=4 * n), 2)()
    assert out.tolist() == ranks(x).argmax(1).tolist()


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("n", [1, 15, 16, 33, fast.MAX_ORDERED])
def test_order(n: int, descending: bool, mem: Memory, rng: np.random.Generator) -> None:
    x, k = mem.put(hard_to_order(rng, n)), max(1, n // 2)
    out = mem.put(np.full((8, k), -1, np.int32))
    run(fast.order(out=at(out), x=at(x), n_rows=8, n=n, x_nb=4 * n, k=k, descending=descending))
    want = np.argsort(-ranks(x) if descending else ranks(x), axis=1, kind="stable")
    assert out.tolist() == want[:, :k].tolist()


def test_longer_rows_are_not_put_in_order() -> None:
    with pytest.raises(ValueError, match="at most 1024"):
        fast.order(out=0, x=0, n_rows=1, n=1025, x_nb=0, k=1, descending=True)


def test_values_that_lie_in_any_way(mem: Memory, rng: np.random.Generator) -> None:
    """Gaps along every dimension, and one value of b for a row, for a plane and for all."""
    shape = (2, 3, 4, 37)
    a = mem.put(rng.standard_normal((3, 4, 5, 40)).astype(np.float32))[:2, :3, :4, :37]
    whole = mem.nan(2, 4, 4, 38)
    y = whole[:, :3, :, :37]
    for b_shape in ((2, 3, 4, 1), (1, 3, 1, 37), (1, 1, 1, 1), (2, 1, 4, 37)):
        b = mem.put(rng.standard_normal(b_shape).astype(np.float32))
        strides = tuple(nb if n > 1 else 0 for n, nb in zip(b.shape[2::-1], b.strides[2::-1]))
        run(fast.elementwise(
            "div", y=at(y), a=at(a), b=at(b), n=37, n_rows=shape[2::-1], y_nb=y.strides[2::-1], a_nb=a.strides[2::-1],
            b_nb=strides, one_each=b_shape[3] == 1,
        ))  # fmt: skip
        assert nmse(y, a.astype(np.float64) / b) < 1e-13
    assert np.isnan(whole[:, 3]).all() and np.isnan(whole[..., 37]).all()


def test_rows_of_several_matrices(mem: Memory, rng: np.random.Generator) -> None:
    table = mem.put(rng.standard_normal((3, 5, 21)).astype(np.float32))
    held, dst = mem.put(rng.integers(0, 4, (3, 5)).astype(np.int32)), mem.nan(3, 2, 19)
    ids = held[:, :2]
    run(fast.get_rows(
        "f32", "i32", dst=at(dst), w=at(table), idx=at(ids), n_rows=6, n=19, w_nb=84, dst_nb=76, n_src=4,
        per_matrix=2, matrix_nb=420, idx_nb=20,
    ))  # fmt: skip
    assert np.array_equal(dst, np.take_along_axis(table[..., :19], ids[..., None], 1))
