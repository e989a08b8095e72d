"""Gradients held against finite differences. No op has a backward yet: an op will register one in its OpSpec."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.errors import GraphError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GradientError:
    """The largest difference from the finite ones, beside their scale; where: (input, flat index)."""

    relative: float
    where: tuple[int, int]
    actual: float
    expected: float


def check_gradient(
    function: Callable[..., Floats], gradient: Callable[..., Sequence[Floats]], inputs: Sequence[Floats],
    eps: float = 1e-3, seed: int = 0, most: int = 200,
) -> GradientError:  # fmt: skip
    """Compares gradient(*inputs, d_out), one array an input, with four-point finite differences of `function` in
    float64.

    The loss is the sum of the output times a random d_out, so that errors that cancel in a plain sum show. Of each
    input at most `most` elements are tried, evenly spread. relative: to the largest gradient of that input.
    """
    rng = np.random.default_rng(seed)
    d_out = rng.normal(size=function(*inputs).shape)
    worst = GradientError(0.0, (0, 0), 0.0, 0.0)
    for i, analytic in enumerate(gradient(*inputs, d_out)):
        if analytic.shape != inputs[i].shape:
            raise GraphError(
                f"a gradient must have its input's shape {inputs[i].shape}, input {i} got {analytic.shape}"
            )
        size = inputs[i].size
        places = np.unique(np.linspace(0, size - 1, min(size, most)).astype(int))
        numeric = np.array([_difference(function, inputs, i, int(j), eps, d_out) for j in places])
        actual = analytic.reshape(-1)[places]
        scale = max(float(np.abs(numeric).max()), np.finfo(np.float64).tiny)
        error = np.nan_to_num(np.abs(actual - numeric) / scale, nan=np.inf)
        k = int(error.argmax())
        if error[k] > worst.relative:
            worst = GradientError(float(error[k]), (i, int(places[k])), float(actual[k]), float(numeric[k]))
    return worst


def _difference(
    function: Callable[..., Floats], inputs: Sequence[Floats], i: int, j: int, eps: float, d_out: Floats
) -> float:
    """d loss / d inputs[i][j] from four points: its error falls with eps^4."""

    def loss(shift: float) -> float:
        moved = [x.copy() if k == i else x for k, x in enumerate(inputs)]
        moved[i].reshape(-1)[j] += shift
        return float((function(*moved) * d_out).sum())

    near, far = loss(eps) - loss(-eps), loss(2 * eps) - loss(-2 * eps)
    return (8 * near - far) / (12 * eps)


def main(args: argparse.Namespace) -> int:
    """`graphrt test grad`. Raises GraphError while there is nothing to check."""
    raise GraphError("grad checks ops that have a backward, no op has one yet; use `graphrt test`")
