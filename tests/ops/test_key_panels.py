"""Keys in panels: the layout, what makes it and writes into it, and that an attention over it is that over rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphrt import gradients, ops, prepare
from graphrt.backend import get_backend
from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.ops.key_panels import key_panels, set_key_panels
from graphrt.tensor import Tensor, new_input

N_KV, HEADS = 21, 2


def run(node: Tensor, values: dict[Tensor, Any]) -> np.ndarray:
    exe = prepare(Graph(node), get_backend("cpu"))
    for t, x in values.items():
        exe.write(t, x)
    exe.run()
    return np.asarray(exe.read(node))


@pytest.mark.parametrize(("kind", "x"), [("f32", 4), ("f16", 8), ("bf16", 8), ("f8_e4m3", 16)])
@pytest.mark.parametrize("d", [32, 96, 256])
def test_where_each_element_lies(kind: str, x: int, d: int) -> None:
    """The formula of the module, element by element, by a copy from f32: every type holds these numbers."""
    k = new_input("f32", d, N_KV, HEADS, 2, name="k")
    values = np.random.default_rng(0).integers(-7, 8, k.shape).astype(np.float32)
    stored = ops.cpy(k, new_input(kind, *k.ne, name="stored")) if kind != "f32" else k
    panels = key_panels(stored)
    assert panels.ne == (x, N_KV, d // x * HEADS, 2)
    found = run(ops.cpy(panels, new_input("f32", *panels.ne, name="out")), {k: values})
    for s, h, row, i in ((0, 0, 0, 0), (1, 1, N_KV - 1, d - 1), (1, 0, 7, x), (0, 1, 3, d - x)):
        assert found[s, h * (d // x) + i // x, row, i % x] == values[s, h, row, i]
    whole = found.reshape(2, HEADS, d // x, N_KV, x).transpose(0, 1, 3, 2, 4).reshape(values.shape)
    np.testing.assert_array_equal(whole, values)


@pytest.mark.parametrize("at", [[0], [5], [N_KV - 1], [20, 3, 11], [4, -1, 30]])
def test_keys_are_written_where_they_belong(at: list[int]) -> None:
    """A step's keys at any places; the others stay, and what names no cell is written nowhere."""
    rows = new_input("f32", 32, HEADS, len(at), name="rows")
    ids, cache = new_input("i64", len(at), name="ids"), new_input("f16", 8, N_KV, 4 * HEADS, name="cache")
    new = np.random.default_rng(1).normal(size=rows.shape).astype(np.float16)
    old = np.random.default_rng(2).normal(size=cache.shape).astype(np.float16)
    node = ops.cont(set_key_panels(rows, ids, cache))
    given = {rows: new.astype(np.float32), ids: np.array(at).reshape(ids.shape), cache: old}
    found = run(node, given).reshape(HEADS, 4, N_KV, 8).transpose(2, 0, 1, 3).reshape(N_KV, HEADS, 32)
    expected = old.reshape(HEADS, 4, N_KV, 8).transpose(2, 0, 1, 3).reshape(N_KV, HEADS, 32).copy()
    for i, cell in enumerate(at):
        if 0 <= cell < N_KV:
            expected[cell] = new[0, i]
    np.testing.assert_array_equal(found, expected)


def test_sequences_have_cells_of_their_own() -> None:
    rows = new_input("f16", 16, HEADS, 1, 3, name="rows")
    ids, cache = new_input("i32", 1, 1, 3, name="ids"), new_input("f16", 8, N_KV, 2 * HEADS, 3, name="cache")
    new, cells = np.random.default_rng(1).normal(size=rows.shape).astype(np.float16), [4, 20, 0]
    node = ops.cont(set_key_panels(rows, ids, cache))
    given = {rows: new, ids: np.array(cells).reshape(ids.shape), cache: np.zeros(cache.shape, np.float16)}
    found = run(node, given)
    for s, cell in enumerate(cells):
        np.testing.assert_array_equal(found[s, :, cell].reshape(HEADS, 16), new[s, 0])
        found[s, :, cell] = 0
    assert not found.any()


@pytest.mark.parametrize("n_q", [1, 3])
def test_an_attention_is_the_same_to_the_bit(n_q: int) -> None:
    q = new_input("f32", 64, n_q, 4, name="q")
    k, v = (new_input("f16", 64, N_KV, HEADS, name=name) for name in "kv")
    rng = np.random.default_rng(3)
    values = {t: rng.normal(size=t.shape).astype(np.float16 if t is not q else np.float32) for t in (q, k, v)}
    plain = run(ops.flash_attn_ext(q, k, v, None, 0.125), values)
    panels = run(ops.flash_attn_ext(q, key_panels(k), v, None, 0.125, k_layout="panels"), values)
    np.testing.assert_array_equal(plain, panels)


def test_the_native_cpu_backend_leaves_them_to_the_reference() -> None:
    q, k = new_input("f32", 64, 1, 4, name="q"), new_input("f16", 8, N_KV, 8 * HEADS, name="k")
    node = ops.flash_attn_ext(q, k, new_input("f16", 64, N_KV, HEADS, name="v"), None, 0.125, k_layout="panels")
    (split,) = prepare(Graph(node), get_backend("cpu", exact=False)).splits
    assert split.run.steps[0].runner == "reference flash_attn_ext (native attention reads keys in rows)"


def test_what_is_refused() -> None:
    q, v = new_input("f32", 64, 1, 4, name="q"), new_input("f16", 64, N_KV, HEADS, name="v")
    good = new_input("f16", 8, N_KV, 8 * HEADS, name="k")

    def attention(k: Tensor, layout: str = "panels") -> Tensor:
        return ops.flash_attn_ext(q, k, v, None, 1.0, k_layout=layout)

    assert attention(good).ne == (64, 4, 1, 1)
    for k, layout, said in (
        (good, "rows", "head size"), (good, "columns", "must be 'rows' or 'panels', got 'columns'"),
        (new_input("f16", 4, N_KV, 16 * HEADS, name="k"), "panels", r"\[8, n_kv"),
        (new_input("f16", 8, N_KV, 9, name="k"), "panels", "key_panels"),
        (new_input("q8_0", 32, N_KV, 8, name="k"), "panels", "of a float type, got q8_0"),
        (new_input("f16", 8, N_KV + 1, 8 * HEADS, name="k"), "panels", "agree in keys"),
    ):  # fmt: skip
        with pytest.raises(GraphError, match=said):
            attention(k, layout)
    with pytest.raises(GraphError, match="whole panels of 8"):
        key_panels(new_input("f16", 20, 3, name="k"))
    with pytest.raises(GraphError, match="go into panels"):
        set_key_panels(new_input("f32", 32, HEADS, 1, name="r"), new_input("i64", 1, name="i"), good)
    with pytest.raises(GraphError, match="in panels are of a cache"):
        gradients(attention(good), [q], d_loss=new_input("f32", 64, 4, 1, name="d"))
