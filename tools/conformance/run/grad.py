"""Gradients held against finite differences: `graphrt test grad`.

Every op's cases of the set "grad", small nodes, in float64 by the reference functions: the nodes that OpSpec.backward
builds against finite differences of the forward, and against torch's derivative of it. Then the same nodes on the
backend that is asked for, against float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphrt.backend import Backend, get_backend
from graphrt.errors import GraphError
from graphrt.execute import prepare
from graphrt.graph import Graph
from graphrt.judge import PRECISIONS, precision
from graphrt.ops.gradients import gradients
from graphrt.ops.recompute import post_order
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, Normal, all_cases, dequantize
from graphrt.tools.conformance.run.exact import exact_values
from graphrt.tools.conformance.run.step import Outcome, outcome_of

Floats = npt.NDArray[np.float64]
Array = npt.NDArray[np.generic]

#: What an input's name begins with if it has no gradient.
CONSTANT = "constant "
#: Relative errors in float64: of finite differences, whose own error is some 1e-10, and of torch's derivative.
NUMERIC, EXACT = 1e-7, 1e-9


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


@dataclass(frozen=True)
class Gradient:
    """A case with the gradients of all its inputs, as nodes. wrt: these inputs; d_loss: the gradient of the result."""

    inputs: Inputs
    wrt: list[Tensor]
    d_loss: Tensor
    found: list[Tensor]

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Gradient:
        inputs = case.build(seed)
        result = inputs.result
        plain = [t for t in inputs.values if t.dtype.kind == "float" and not t.name.startswith(CONSTANT)]
        d_loss = inputs("d_loss", "f32", result.ne, Normal(1.0))
        return cls(inputs, plain, d_loss, gradients(result, plain, d_loss=d_loss))

    @property
    def numbers(self) -> dict[Tensor, Array]:
        """What the inputs hold, as float64 or int64."""
        return {t: dequantize(v, t.dtype) for t, v in self.inputs.values.items()}

    def exact(self, wanted: Sequence[Tensor], changed: Mapping[Tensor, Any] = {}) -> list[torch.Tensor]:
        """Some tensors' values in float64, with some inputs' values changed."""
        nodes = list(dict.fromkeys(n for t in wanted for n in post_order(t)))
        values = exact_values(nodes, {**self.numbers, **changed})
        return [values[t] for t in wanted]

    def numeric(self, most: int = 200) -> GradientError:
        """The gradients in float64 against finite differences."""
        shapes = [t.shape for t in self.wrt]

        def function(*xs: Floats) -> Floats:
            return self.exact([self.inputs.result], dict(zip(self.wrt, xs)))[0].numpy()

        def gradient(*xs: Floats) -> Sequence[Floats]:
            given = dict(zip([*self.wrt, self.d_loss], xs))
            return [g.numpy().reshape(n) for g, n in zip(self.exact(self.found, given), shapes)]

        given = [self.numbers[t].astype(np.float64).reshape(t.shape) for t in self.wrt]
        return check_gradient(function, gradient, given, most=most)

    def differentiated(self) -> float:
        """The largest relative error of the gradients in float64 against torch's of the forward."""
        given = {t: torch.tensor(self.numbers[t], dtype=torch.float64).requires_grad_() for t in self.wrt}
        result = self.exact([self.inputs.result], given)[0]
        d = torch.as_tensor(self.numbers[self.d_loss], dtype=torch.float64).reshape(result.shape)
        expected = torch.autograd.grad(result, list(given.values()), d, allow_unused=True, materialize_grads=True)
        return max(relative(a, e.reshape(a.shape)) for a, e in zip(self.exact(self.found), expected))

    def on(self, backend: Backend) -> float:
        """The largest relative error of the gradients that a backend computes, against float64."""
        exe = prepare(
            Graph(self.inputs.result, *self.found), backend if backend.id == "cpu" else [backend, get_backend("cpu")]
        )
        self.inputs.fill(exe)
        exe.run()
        made = [torch.as_tensor(exe.read(t), dtype=torch.float64) for t in self.found]
        return max(relative(a, e) for a, e in zip(made, self.exact(self.found)))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the error by that of what is expected; infinite where NaN is among them."""
    error, norm = float((actual - expected).norm()), float(expected.norm())
    return math.inf if math.isnan(error) or math.isnan(norm) else error / norm if norm else error


def _of_precision(node: Tensor) -> float:
    """What a backend's gradient may be off: as much as the op's own result, and more where several are added up."""
    named = {precision(n) for n in post_order(node)}
    return 4 * max(PRECISIONS[name].ceiling for name in named)


def check_case(case: Case, backend: Backend, seed: int = 0, most: int = 200) -> str:
    """What is wrong with the gradients of a case, "" if nothing is."""
    gradient = Gradient.of(case, seed)
    numeric = gradient.numeric(most)
    if not numeric.relative <= NUMERIC:
        where = f"input {gradient.wrt[numeric.where[0]].name!r} at {numeric.where[1]}"
        return f"finite differences: {where} is {numeric.actual:.9g} instead of {numeric.expected:.9g}"
    if not (off := gradient.differentiated()) <= EXACT:
        return f"torch's derivative in float64: off by {off:.3g}, at most {EXACT:g}"
    limit = max(_of_precision(t) for t in gradient.found)
    if not (off := gradient.on(backend)) <= limit:
        return f"on {backend.id}: off by {off:.3g}, at most {limit:.3g}"
    return ""


@dataclass(frozen=True)
class GradientCase(Case):
    """A case of the set "grad", whose node's gradients are wanted."""


def gradient_cases() -> Iterator[GradientCase]:
    """Those of all ops."""
    for case in all_cases(which="grad"):
        yield GradientCase(**vars(case))


def run_gradient(case: GradientCase, backend: Backend, seed: int) -> Outcome:
    """What check_case() says of one."""
    return outcome_of(case, lambda: check_case(case, backend, seed))
