"""The part of lowprec.py for differences of few elements: the same formulas with roundings that are drawn at random.

What is left of a difference of nearly equal terms has their rounding errors, however little is left. In a row of one
element nothing averages those, and one computation in float32 may be lucky.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from graphrt.tensor import Tensor

T = torch.Tensor


class Roundings:
    """float32's roundings drawn at random, for what is computed in float64: each operation's result is off by a random
    part of half a unit in the last place, and no two draws are lucky in the same way."""

    def __init__(self, draw: int) -> None:
        self._random = torch.Generator().manual_seed(draw)

    def _errors(self, x: T) -> T:
        return x * (2.0 * torch.rand(x.shape, generator=self._random, dtype=torch.float64) - 1.0) * 2.0**-24

    def __call__(self, x: T) -> T:
        """The result of one operation."""
        return x + self._errors(x)

    def sum(self, terms: T) -> T:
        """The sums of the rows, [..., 1], terms added one by one in a random order."""
        order = torch.randperm(terms.shape[-1], generator=self._random)
        sums = terms[..., order].cumsum(-1)
        return sums[..., -1:] + self._errors(sums[..., 1:]).sum(-1, keepdim=True)


def soft_max_back(node: Tensor, d: T, weights: T, draw: int) -> T:
    r, d, weights = Roundings(draw), d.double(), weights.double()
    terms = r(d * weights)
    return r(r(terms - r(weights * r.sum(terms))) * node.params.scale)


def rms_norm_back(node: Tensor, d: T, a: T, draw: int) -> T:
    r, d, a = Roundings(draw), d.double(), a.double()
    n = a.shape[-1]
    factor = r(1.0 / r(torch.sqrt(r(r(r.sum(r(a * a)) / n) + node.params.eps))))
    along = r(r(r.sum(r(d * a)) / n) * r(factor * factor))
    return r(r(d - r(a * along)) * factor)


def step_sgd(node: Tensor, a: T, grad: T, hyper: T, draw: int) -> T:
    r, a, (alpha, wd) = Roundings(draw), a.double(), hyper.double().flatten()
    return r(r(a - r(alpha * grad.double())) - r(r(alpha * wd) * a))


def step_adamw(node: Tensor, a: T, m: T, v: T, hyper: T, draw: int) -> T:
    r, a, (alpha, eps, wd, m_h, v_h) = Roundings(draw), a.double(), hyper.double().flatten()
    step = r(r(m.double() * m_h) / r(r(torch.sqrt(r(v.double() * v_h))) + eps))
    return r(r(a - r(alpha * step)) - r(r(alpha * wd) * a))


def _silu(r: Roundings, x: T, factor: float = 1.0) -> T:
    x = x if factor == 1.0 else r(factor * x)
    s = r(torch.sigmoid(x))
    return r(s * r(1.0 + r(x * r(1.0 - s))))


def _gelu(r: Roundings, x: T) -> T:
    c, square = math.sqrt(2.0 / math.pi), r(x * x)
    t = r(torch.tanh(r(c * r(x * r(1.0 + r(0.044715 * square))))))
    slope = r(c * r(1.0 + r(3 * 0.044715 * square)))
    return r(r(0.5 * r(1.0 + t)) + r(r(r(0.5 * x) * r(1.0 - r(t * t))) * slope))


def _gelu_erf(r: Roundings, x: T) -> T:
    below = r(0.5 * r(1.0 + r(torch.erf(r(x * math.sqrt(0.5))))))
    return r(below + r(x * r(r(torch.exp(r(-0.5 * r(x * x)))) / math.sqrt(2.0 * math.pi))))


def _sigmoid(r: Roundings, x: T) -> T:
    s = r(torch.sigmoid(x))
    return r(s * r(1.0 - s))


def _tanh(r: Roundings, x: T) -> T:
    t = r(torch.tanh(x))
    return r(1.0 - r(t * t))


_SLOPES: dict[str, Callable[[Roundings, T], T]] = {
    "silu": _silu, "gelu": _gelu, "gelu_erf": _gelu_erf, "gelu_quick": lambda r, x: _silu(r, x, 1.702),
    "relu": lambda r, x: (x > 0).double(), "tanh": _tanh, "sigmoid": _sigmoid, "exp": lambda r, x: r(torch.exp(x)),
    "softplus": lambda r, x: r(torch.sigmoid(x)),
}  # fmt: skip


def unary_back(node: Tensor, d: T, a: T, draw: int) -> T:
    kind = "silu" if node.op == "SILU_BACK" else node.params.kind
    r = Roundings(draw)
    return r(d.double() * _SLOPES[kind](r, a.double()))


#: By op: of the node, its sources and the number of the draw.
DIFFERENCES: dict[str, Callable[..., T]] = {
    "SOFT_MAX_BACK": soft_max_back, "RMS_NORM_BACK": rms_norm_back, "SILU_BACK": unary_back, "UNARY_BACK": unary_back,
    "OPT_STEP_SGD": step_sgd, "OPT_STEP_ADAMW": step_adamw,
}  # fmt: skip
