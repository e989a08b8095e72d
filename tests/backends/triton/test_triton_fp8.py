"""Attention over 8-bit floats on Hopper without a GPU: products of them (hopper/fp8.py, turned.py), rows that are
widened (hopper/quant.py), and who gets which."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support import attention_emulation

import graphrt
from graphrt import new_input, ops
from graphrt.backends.triton import TritonBackend
from graphrt.errors import GraphError
from graphrt.float8 import encode
from graphrt.ops.cases.flash_attn_axes import Axes, as_case
from graphrt.ops.flash_attn_ext import PREC_DEFAULT, PREC_F8
from graphrt.testing import Case
from graphrt.tools.explain.devices import DEVICES

interpreted = pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")
BASE = Axes(d=(64, 64), n_q=75, n_kv=300, types=("f8_e4m3", "f8_e4m3"), mask="random", prec=PREC_F8)
#: Masks by TMA and by loads, keys that end inside a block or with one, one block alone, sinks, more heads a KV head,
#: rows that see nothing, many nearly equal weights, several sequences.
PRODUCTS = [
    BASE, replace(BASE, mask=None, n_kv=384), replace(BASE, d=(128, 128), heads=(2, 1), mask="causal", n_kv=150),
    replace(BASE, mask=None, n_kv=20, heads=(1, 1)), replace(BASE, sinks="near", heads=(3, 1), n_kv=133),
    replace(BASE, rows="leading", n_kv=260), replace(BASE, values="level", mask=None, n_q=130),
    replace(BASE, layout="cache", n_seq=2, heads=(2, 1)),
]  # fmt: skip
#: Widened: both types, beside each other and beside blocks.
WIDENED = [
    replace(BASE, prec=PREC_DEFAULT), replace(BASE, prec=PREC_DEFAULT, d=(128, 128), mask=None, heads=(2, 1)),
    replace(BASE, prec=PREC_DEFAULT, types=("f8_e5m2", "f8_e4m3"), heads=(2, 1)),
    replace(BASE, prec=PREC_DEFAULT, types=("q8_0", "f8_e5m2"), heads=(2, 1), n_kv=130),
]  # fmt: skip


def _case(axes: Axes) -> Case:
    return as_case("FLASH_ATTN_EXT", axes)


def _name(axes: Axes) -> str:
    return str(_case(axes))


@interpreted
@pytest.mark.parametrize("axes", PRODUCTS, ids=_name)
def test_products_of_8_bits(axes: Axes) -> None:
    kernels, _, verdict = attention_emulation.run(_case(axes), 3, 1)
    assert kernels[-3:] == ["turn_values", "hopper_fp8_attn", "flash_attn"], kernels
    assert verdict.ok, verdict.message


@interpreted
@pytest.mark.parametrize("axes", WIDENED, ids=_name)
def test_rows_that_are_widened(axes: Axes) -> None:
    kernels, _, verdict = attention_emulation.run(_case(axes), 3, 2)
    assert kernels[-2:] == ["hopper_quant_attn", "flash_attn"], kernels
    assert verdict.ok, verdict.message


@interpreted
def test_the_order_of_things_changes_nothing() -> None:
    """The same bits whatever lands and goes on first: of more blocks than there are buffers."""
    case = _case(replace(BASE, mask=None, n_kv=1000, heads=(1, 1)))
    first, *others = (attention_emulation.run(case, 3, seed)[1] for seed in (100, *range(6)))
    for other in others:
        np.testing.assert_array_equal(first, other)


@interpreted
def test_small_weights_count() -> None:
    """One key with a score 7.5 over 4000 others': each of these has 2^-10.8 of its weight, 0 in e4m3 without headroom,
    and all together more than it."""
    q, k = new_input("f32", 64, 64, 1, name="q"), new_input("f8_e4m3", 64, 4001, 1, name="k")
    v = new_input("f8_e4m3", 64, 4001, 1, name="v")
    node = ops.flash_attn_ext(q, k, v, None, 0.125, prec=PREC_F8)
    keys, values = np.zeros((1, 1, 4001, 64)), np.ones((1, 1, 4001, 64))
    keys[..., 0, :], values[..., 0, :] = 1.0, -1.0
    given = {q: np.full((1, 1, 64, 64), 7.5 / 8.0, np.float32), k: encode(keys, k.dtype), v: encode(values, v.dtype)}
    found = attention_emulation.result(node, given, 3)
    top = np.exp(7.5)
    np.testing.assert_allclose(found, (4000 - top) / (4000 + top), rtol=0.05)


@interpreted
def test_a_long_row_is_not_left_to_14_bits() -> None:
    """P V of each block is a sum of its own: of 40 blocks of equal weights no product starts from more than its block's
    sums, and the result is as near as one block's."""
    axes = replace(BASE, values="level", mask=None, n_kv=40 * 128, heads=(1, 1), n_q=48)
    starts = attention_emulation.largest_start(_case(axes))
    assert starts == 0.0, f"a product of 8-bit floats goes on from a sum of {starts:g}"


def attention(kind: str, prec: int, n_q: int = 64, **more: float) -> graphrt.Tensor:
    q, (k, v) = new_input("f32", 128, n_q, 4, name="q"), (new_input(kind, 128, 512, 2, name=name) for name in "kv")
    return ops.flash_attn_ext(q, k, v, None, 0.1, prec=prec, **more)


@pytest.mark.parametrize(
    ("node", "kernel", "reason"),
    [
        (lambda: attention("f8_e4m3", PREC_F8), "hopper_fp8", ""),
        (lambda: attention("f8_e4m3", PREC_DEFAULT), "hopper_quant", "which prec does not allow"),
        (lambda: attention("f8_e5m2", PREC_DEFAULT), "hopper_quant", "which prec does not allow"),
        (lambda: attention("f8_e4m3", PREC_F8, softcap=9.0), "hopper_quant", "neither soft cap nor ALiBi"),
        (lambda: attention("f8_e4m3", PREC_F8, n_q=1), "decode", "48 queries or more"),
    ],
)
def test_who_serves(node: object, kernel: str, reason: str) -> None:
    """No f8 cache loses accuracy that its graph does not give up: products of 8 bits are asked for."""
    target = device.Target.elsewhere(DEVICES["h100"].elsewhere)
    backend = TritonBackend(exact=False, target=target, schedule="tile" if kernel != "decode" else None)
    run = graphrt.prepare(graphrt.Graph(node()), [backend]).splits[0].run  # type: ignore[operator]
    chosen = run.segments[0].chosen  # type: ignore[attr-defined]
    assert chosen.kernel == kernel
    assert not reason or reason in chosen.refused["hopper_fp8"]


def test_products_of_8_bits_are_for_caches_of_8_bits() -> None:
    q = new_input("f32", 128, 64, 4, name="q")
    for kinds in (("f16", "f8_e4m3"), ("f8_e4m3", "q8_0"), ("f8_e5m2", "f8_e5m2")):
        k, v = (new_input(kind, 128, 512, 2, name=name) for kind, name in zip(kinds, "kv"))
        with pytest.raises(GraphError, match="prec 8 multiplies 8-bit floats: k and v must be f8_e4m3"):
            ops.flash_attn_ext(q, k, v, None, 0.1, prec=PREC_F8)
