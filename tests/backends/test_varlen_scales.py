"""Scales of an f8 cache in pages: with them FLASH_ATTN_VARLEN makes what FLASH_ATTN_EXT makes of the same cache in one
piece."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import graphrt
from graphrt import get_backend, ops
from graphrt.backend import Backend
from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.tensor import new_input
from graphrt.testing import nmse

D, HEADS, KV, PAGE, KEYS, NEW = 64, 6, 2, 16, 45, 3


def _cpu() -> Backend:
    return get_backend("cpu", exact=True)


def _triton() -> Backend:
    pytest.importorskip("triton")
    from graphrt.backends.triton import device

    if device.unusable() is not None:
        pytest.skip(f"the triton backend can't be used here: {device.unusable()}")
    return get_backend("triton")


#: Of each KV head, or one for all; that of k alone.
SCALES = {"heads": {"k": [0.02, 0.3], "v": [5.0, 0.125]}, "one": {"k": [0.1], "v": [3.0]}, "keys": {"k": [0.02, 0.3]}}


@pytest.mark.parametrize("which", SCALES)
@pytest.mark.parametrize("make", [_cpu, _triton])
def test_scales_over_pages(make: Callable[[], Backend], which: str) -> None:
    backend, rng = make(), np.random.default_rng(3)
    n_pages = -(-KEYS // PAGE)
    table = rng.permutation(n_pages)
    whole = {x: rng.integers(0, 0x60, (KV, n_pages * PAGE, D)).astype(np.uint8) for x in "kv"}
    paged = {x: np.zeros((n_pages, KV, PAGE, D), np.uint8) for x in "kv"}
    for x, codes in whole.items():
        paged[x][table] = codes.reshape(KV, n_pages, PAGE, D).transpose(1, 0, 2, 3)
    leafs, values = {}, {}

    def leaf(name: str, kind: str, array: np.ndarray) -> graphrt.Tensor:
        leafs[name] = new_input(kind, *array.shape[::-1], name=name)
        values[leafs[name]] = array
        return leafs[name]

    q = leaf("q", "f32", rng.normal(size=(HEADS, NEW, D)).astype(np.float32))
    mask = leaf(
        "mask", "f16", np.where(np.arange(KEYS) <= KEYS - NEW + np.arange(NEW)[:, None], 0, -np.inf).astype("f2")
    )
    k, v = (leaf(x, "f8_e4m3", whole[x]) for x in "kv")
    scales = {f"{x}_scale": leaf(f"{x}_scale", "f32", np.array(each, np.float32)) for x, each in SCALES[which].items()}
    k, v = (ops.view(t, (D, KEYS, KV), t.nb[1:3]) for t in (k, v))
    one = ops.flash_attn_ext(q, k, v, mask, 0.1, name="one", **scales)

    by_token = ops.permute(ops.cont(ops.permute(q, 0, 2, 1, 3)), 0, 2, 1, 3)  # as a model's step has it
    apart = ops.flash_attn_varlen(
        by_token, leaf("k pages", "f8_e4m3", paged["k"]), leaf("v pages", "f8_e4m3", paged["v"]),
        leaf("q_starts", "i32", np.array([0, NEW], np.int32)), 0.1,
        lengths=leaf("lengths", "i32", np.array([KEYS], np.int32)),
        block_table=leaf("table", "i32", table.astype(np.int32).reshape(1, -1)), name="apart", **scales,
    )  # fmt: skip
    assert apart.ne == (D, HEADS, NEW, 1) and apart.name == "apart"
    exe = graphrt.prepare(Graph(one, apart), backend)
    for tensor, array in values.items():
        exe.write(tensor, array)
    exe.run()
    first, second = (np.asarray(exe.read(t)).reshape(NEW, HEADS, D) for t in (one, apart))
    # By head, whose scales differ by 40: products of a GPU are rounded to f16, those of the CPU to f32.
    limit = 2.0**-40 if backend.name == "cpu" else 2.0**-20
    for h in range(HEADS):
        assert nmse(second[:, h], first[:, h]) < limit, h


@pytest.mark.parametrize("make", [_cpu, _triton])
def test_denominators_know_the_keys_scale(make: Callable[[], Backend]) -> None:
    """Of packed keys, beside a float64 computation."""
    backend, rng = make(), np.random.default_rng(4)
    given = {
        "q": rng.normal(size=(HEADS, NEW, D)), "k": rng.normal(size=(KV, KEYS, D)), "scale": np.array([0.02, 3.0]),
    }  # fmt: skip
    q, k, scale = (new_input("f32", *a.shape[::-1], name=name) for name, a in given.items())
    starts, k_starts = new_input("i32", 2, name="starts"), new_input("i32", 2, name="k_starts")
    lse = ops.flash_attn_varlen_lse(q, k, starts, 0.1, k_starts=k_starts, causal=False, k_scale=scale)
    exe = graphrt.prepare(Graph(lse), backend)
    for t, array in zip((q, k, scale), given.values()):
        exe.write(t, array.astype(np.float32))
    exe.write_all({starts: np.array([0, NEW], np.int32), k_starts: np.array([0, KEYS], np.int32)})
    exe.run()
    logits = 0.1 * given["q"] @ np.repeat(given["k"] * given["scale"][:, None, None], HEADS // KV, 0).swapaxes(1, 2)
    expected = np.log(np.exp(logits).sum(-1))
    assert np.allclose(np.asarray(exe.read(lse)).reshape(NEW, HEADS), expected.T, rtol=1e-5, atol=1e-4)


def test_scales_that_are_refused() -> None:
    q, starts = new_input("f32", D, NEW, HEADS, name="q"), new_input("i32", 2, name="starts")
    k, v = (new_input("f8_e4m3", D, KEYS, KV, name=x) for x in "kv")
    for name, scale in (("k_scale", new_input("f32", HEADS, name="s")), ("v_scale", new_input("f16", 1, name="s"))):
        with pytest.raises(GraphError, match=f"{name} must be f32, contiguous, with one value or one a head .*, {KV}"):
            ops.flash_attn_varlen(q, k, v, starts, 0.1, k_starts=starts, **{name: scale})
    with pytest.raises(GraphError, match="FLASH_ATTN_VARLEN_LSE.*k_scale must be f32"):
        ops.flash_attn_varlen_lse(q, k, starts, 0.1, k_starts=starts, k_scale=new_input("f16", 1, name="s"))
