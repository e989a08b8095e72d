"""Floats of 8 bits: what their codes mean, how numbers become codes, where they may be and where not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphrt
from graphrt import float8, ops
from graphrt.backends.cpu import blocks
from graphrt.dtypes import FLOATS8, dtype, dtype_by_id
from graphrt.errors import GGUFError, GraphError
from graphrt.graph import Graph
from graphrt.models import gguf_write
from graphrt.tensor import new_input

CODES = np.arange(256, dtype=np.uint8)
TORCH = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", FLOATS8)
def test_codes_mean_what_torch_says(name: str) -> None:
    expected = torch.from_numpy(CODES).view(TORCH[name]).double().numpy()
    assert np.array_equal(float8.decode(CODES, dtype(name)), expected, equal_nan=True)
    decoded = blocks.decode(torch.from_numpy(CODES), dtype(name), torch.float64).numpy()
    assert np.array_equal(decoded, expected, equal_nan=True)


@pytest.mark.parametrize("name", FLOATS8)
def test_numbers_become_the_nearest_code(name: str) -> None:
    """The host's form, torch's (which makes NaN of what is too large, so that is cut first) and the CPU backend's."""
    dt, largest = dtype(name), FLOATS8[name].largest
    numbers = float8.decode(CODES, dt)
    finite = np.isfinite(numbers)
    assert np.array_equal(float8.encode(numbers, dt)[finite], CODES[finite])
    sorted_numbers = np.unique(numbers[finite])
    x = np.concatenate([(sorted_numbers[1:] + sorted_numbers[:-1]) / 2, sorted_numbers * 1.01, [3e38, 1e-30]]).astype(
        "f4"
    )
    cut = torch.from_numpy(np.clip(x, -largest, largest)).to(TORCH[name]).view(torch.uint8).numpy()
    assert np.array_equal(float8.encode(x, dt), cut)
    special = np.array([np.inf, -np.inf, np.nan, largest * 1.5, -0.0], np.float32)
    for codes in (float8.encode(special, dt), blocks.encode(torch.from_numpy(special), dt).numpy()):
        back = float8.decode(codes, dt)
        assert np.array_equal(back, [largest, -largest, np.nan, largest, 0.0], equal_nan=True) and np.signbit(back[4])
    assert np.array_equal(blocks.encode(torch.from_numpy(x), dt).numpy(), cut)


def test_they_have_names_and_no_number_in_ggml() -> None:
    assert dtype("f8") is dtype("F8_E4M3") is dtype("f8_e4m3")
    assert dtype_by_id(-1) is None and dtype("f8").id is None
    planned = gguf_write.Planned("blk.0.k", dtype("f8"), (32, 2))
    with pytest.raises(GGUFError, match="types that ggml has, 'blk.0.k' is f8_e4m3.*copy it into f16"):
        gguf_write.header({}, [planned])


def test_nothing_is_computed_in_them() -> None:
    a = new_input("f8_e4m3", 8, name="a")
    for make in (lambda: ops.add(a, a), lambda: ops.sqr(a), lambda: ops.scale(a, 2.0)):
        with pytest.raises(GraphError, match="plain float type"):
            make()
    loss = ops.sum_rows(ops.get_rows(a, new_input("i32", 1, name="ids")))
    with pytest.raises(GraphError, match="gradients are of tensors of a plain float type"):
        graphrt.gradients(loss, [a])


def test_scales_of_heads_are_nodes_around_the_attention() -> None:
    """k and v far from 1 lose all of their digits in 8 bits as they are, and none that matter over a scale a head."""
    rng = np.random.default_rng(3)
    d, n_kv, heads = 32, 16, 2
    scales = np.array([1e-4, 3e3], np.float32)
    values = {
        "q": rng.normal(size=(heads, 4, d)).astype("f4") / scales[:, None, None],
        "k": rng.normal(size=(heads, n_kv, d)).astype("f4") * scales[:, None, None],
        "v": rng.normal(size=(heads, n_kv, d)).astype("f4") * scales[:, None, None],
    }
    q, k, v = (new_input("f32", *reversed(x.shape), name=name) for name, x in values.items())
    s, inverse = new_input("f32", 1, 1, heads, name="s"), new_input("f32", 1, 1, heads, name="inverse")
    by_head = new_input("f32", 1, heads, name="by_head")
    k8, v8 = (new_input("f8", d, n_kv, heads, name=f"{name}8") for name in "kv")
    stored = [ops.cpy(ops.mul(x, inverse), x8) for x, x8 in ((k, k8), (v, v8))]
    out = ops.mul(ops.flash_attn_ext(ops.mul(q, s), *stored, None, d**-0.5), by_head)
    plain = ops.flash_attn_ext(q, k, v, None, d**-0.5)
    exe = graphrt.prepare(Graph(out, plain), "cpu")
    for leaf in (q, k, v):
        exe.write(leaf, values[leaf.name])
    exe.write(s, scales.reshape(heads, 1, 1))
    exe.write(inverse, 1 / scales.reshape(heads, 1, 1))
    exe.write(by_head, scales.reshape(heads, 1))
    exe.run()
    found, wanted = exe.read(out), exe.read(plain)
    error = np.sqrt(((found - wanted) ** 2).sum((0, 1, 3)) / (wanted**2).sum((0, 1, 3)))
    assert (error < 0.08).all(), error


def test_a_type_of_8_bits_takes_a_byte() -> None:
    assert dtype("f8").row_size(33) == 33 and new_input("f8", 33, 2, name="a").nbytes == 66
