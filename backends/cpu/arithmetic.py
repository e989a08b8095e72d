"""ADD, SUB, MUL, DIV, SCALE, CLAMP, SQR, SQRT, FILL, UNARY, GLU, NORM, RMS_NORM, L2_NORM, SUM_ROWS."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from graphrt.backends.cpu.reference import reference
from graphrt.tensor import Tensor

Unary = Callable[[torch.Tensor], torch.Tensor]


def repeat_to(b: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`b` repeated a whole number of times along each dimension."""
    if all(n in (1, full) for n, full in zip(b.shape, shape)):
        return b  # torch broadcasts by itself
    return b.repeat([full // n for n, full in zip(b.shape, shape)])


@reference("ADD")
def add(node: Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + repeat_to(b, a.shape)


@reference("SUB")
def sub(node: Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a - repeat_to(b, a.shape)


@reference("MUL")
def mul(node: Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * repeat_to(b, a.shape)


@reference("DIV")
def div(node: Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / repeat_to(b, a.shape)


@reference("SCALE")
def scale(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    factor: float = node.params.scale
    bias: float = node.params.bias
    return a * factor + bias


@reference("CLAMP")
def clamp(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a.clamp(node.params.low, node.params.high)


@reference("SQR")
def sqr(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a * a


@reference("SQRT")
def sqrt(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a.sqrt()


@reference("FILL")
def fill(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return torch.full_like(a, node.params.value)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of GELU (arXiv 1606.08415)."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


UNARY: dict[str, Unary] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": gelu_tanh,
    "gelu_erf": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: x.clamp(min=0.0),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}
GATES: dict[str, Unary] = {"reglu": UNARY["relu"], "geglu": UNARY["gelu"], "swiglu": UNARY["silu"]}


#: Elements that torch computes together. It takes what is left over at a tensor's end one by one, by other functions.
VECTOR = 64


def by_rows(function: Unary, a: torch.Tensor) -> torch.Tensor:
    """A function of each element, whose results for a row don't depend on how many rows there are."""
    width = a.shape[-1]
    return function(torch.nn.functional.pad(a, (0, -width % VECTOR)))[..., :width]


@reference("UNARY")
def unary(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return by_rows(UNARY[node.params.kind], a)


@reference("GLU")
def glu(node: Tensor, gate: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
    p = node.params
    if value is None:
        first, second = gate.chunk(2, dim=-1)
        gate, value = (second, first) if p.swapped else (first, second)
    if p.kind == "swiglu_oai":
        gate, value = gate.clamp(max=p.limit), value.clamp(-p.limit, p.limit)
        return gate * by_rows(torch.sigmoid, p.alpha * gate) * (value + 1.0)
    return by_rows(GATES[p.kind], gate) * value


@reference("NORM")
def norm(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    centred = a - a.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + node.params.eps)


@reference("RMS_NORM")
def rms_norm(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a / torch.sqrt((a * a).mean(-1, keepdim=True) + node.params.eps)


@reference("L2_NORM")
def l2_norm(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a / torch.sqrt((a * a).sum(-1, keepdim=True)).clamp(min=node.params.eps)


@reference("SUM_ROWS")
def sum_rows(node: Tensor, a: torch.Tensor) -> torch.Tensor:
    return a.sum(-1, keepdim=True)
