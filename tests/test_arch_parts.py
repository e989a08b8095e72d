"""Parts of the architectures' graphs by themselves, where no tiny model goes."""

from __future__ import annotations

import numpy as np
import pytest

from graphrt import Graph, new_input, prepare
from graphrt.models.arch.experts import LEAST_SUM, _shares
from graphrt.models.hparams import ExpertParams


def shares(picked: np.ndarray, gating: str = "sigmoid", norm: bool = True, scale: float = 1.0) -> np.ndarray:
    """The weights of chosen probabilities, [n, used]."""
    n, used = picked.shape
    p = ExpertParams(8, used, 32, gating, norm, scale)
    node = _shares(0, new_input("f32", 1, used, n, name="picked"), p)
    exe = prepare(Graph(node), "cpu")
    exe.write("picked", picked.astype(np.float32)[None, :, :, None])
    exe.run()
    return np.asarray(exe.read(node)).reshape(n, used)


def test_experts_that_nothing_speaks_for_weigh_nothing() -> None:
    """A sum of probabilities is divided by as it is, but by no less than the smallest normal number of f16."""
    found = shares(np.array([[0.0, 0.0], [LEAST_SUM / 4, LEAST_SUM / 4], [0.25, 0.75]]))
    assert found.tolist() == [[0, 0], [0.25, 0.25], [0.25, 0.75]]


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.5])
def test_a_scale_on_experts_weights(scale: float) -> None:
    picked = np.array([[0.1, 0.3]])
    np.testing.assert_allclose(shares(picked, scale=scale), scale * np.array([[0.25, 0.75]]), rtol=1e-6)
    np.testing.assert_allclose(shares(picked, norm=False, scale=scale), scale * picked, rtol=1e-6)
    weights = np.exp(picked) / np.exp(picked).sum()
    np.testing.assert_allclose(shares(picked, "chosen", False, scale), scale * weights, rtol=1e-6)
