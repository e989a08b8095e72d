"""FLASH_ATTN_EXT whose parameter prec asks for f32: who serves it, and that nothing is rounded on the way."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("triton")

import graphrt
from graphrt import new_input, ops, prepare
from graphrt.backends.triton import TritonBackend, device
from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen
from graphrt.tensor import Tensor
from graphrt.tools.explain.devices import DEVICES

interpreted = pytest.mark.skipif(not device.interpreting(), reason="needs Triton's interpreter")


def attention(prec: int, kind: str = "f16", n_q: int = 64, lse: bool = False) -> Tensor:
    q, k = new_input("f32", 128, n_q, 4, name="q"), new_input(kind, 128, 96, 2, name="k")
    v = new_input(kind, 128, 96, 2, name="v")
    if lse:
        return ops.flash_attn_lse(q, k, None, 0.1, prec=prec)
    return ops.flash_attn_ext(q, k, v, None, 0.1, prec=prec)


def backend(name: str) -> TritonBackend:
    return TritonBackend(exact=False, target=device.Target.elsewhere(DEVICES[name].elsewhere))


@pytest.mark.parametrize("n_q", [1, 64])
@pytest.mark.parametrize("name", ["h100", "a100"])
def test_the_portable_kernel_takes_it_with_f32s_configuration(name: str, n_q: int) -> None:
    found = {}
    for prec in (0, 10):
        exe = prepare(graphrt.Graph(attention(prec, n_q=n_q)), [backend(name)])
        segment = exe.splits[0].run.segments[0]  # type: ignore[attr-defined]
        found[prec] = segment.chosen, segment.steps[0]
    chosen, launch = found[10]
    assert isinstance(chosen, Chosen) and chosen.kernel == "forward"
    assert "it multiplies in k's and v's types, prec asks for f32" in chosen.refused.values()
    assert "fp32" in str(launch.args["K_DOT"]) and "fp32" in str(launch.args["V_DOT"])
    as_f32 = prepare(graphrt.Graph(attention(0, "f32", n_q)), [backend(name)]).splits[0].run
    assert chosen.config == as_f32.segments[0].chosen.config  # type: ignore[attr-defined]
    if n_q == 1 or name == "h100":
        assert found[0][0].kernel != "forward", "else nothing is shown"


def test_what_is_unpacked_to_f16_is_refused() -> None:
    gpu = backend("h100")
    assert gpu.supports(attention(0, "q8_0")) is None and gpu.supports(attention(10)) is None
    assert gpu.supports(attention(10, "q8_0")) == (
        "its attention kernel unpacks k's q8_0 to f16, prec asks for products in f32"
    )


@interpreted
@pytest.mark.parametrize("kind", ["f16", "f32"])
@pytest.mark.parametrize("lse", [False, True])
def test_nothing_is_rounded_on_the_way(kind: str, lse: bool) -> None:
    """Against float64, within what f32 leaves: half an ulp of each of some hundred sums. f16 loses a thousand times
    that."""
    node = attention(10, kind, 5, lse)
    exe = prepare(graphrt.Graph(node), [TritonBackend(exact=False)])
    rng, values = np.random.default_rng(3), {}
    for leaf in exe.graph.leafs:
        values[leaf.name] = rng.standard_normal(leaf.shape).astype(np.float16 if leaf.dtype.name == "f16" else "f4")
        exe.write(leaf, values[leaf.name])
    exe.run()
    q, k, v = (values[n].astype(np.float64)[0] for n in ("q", "k", "k" if lse else "v"))
    s = np.einsum("hqd,hkd->hqk", q, k.repeat(2, 0)) * 0.1
    weights = np.exp(s)
    if lse:
        expected, actual = np.log(weights.sum(-1)).T, np.asarray(exe.read(node)).reshape(5, 4)
    else:
        p = weights / weights.sum(-1, keepdims=True)
        expected, actual = np.einsum("hqk,hkd->qhd", p, v.repeat(2, 0)), np.asarray(exe.read(node))[0]
    error = math.sqrt(((actual - expected) ** 2).sum() / (expected**2).sum())
    assert error < 128 * 2**-24, error
