"""ADD, SUB, MUL, DIV (the second source is repeated over the first), SCALE, CLAMP, SQR, SQRT, FILL."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Sources, Work, build, elementwise_work, register, require
from graphrt.ops.view import gapped
from graphrt.tensor import Tensor
from graphrt.testing import Case, Given, Inputs, Uniform


def can_repeat(small: Tensor, big: Tensor) -> bool:
    """`small` fills `big` when repeated a whole number of times along every dimension."""
    return all(b % s == 0 for s, b in zip(small.ne, big.ne))


def _float_source(op: str, *tensors: Tensor) -> None:
    require(all(t.dtype.kind == "float" for t in tensors), op, "sources must be plain float types", *tensors)


def _infer_binary(op: str, src: Sources, params: None) -> Result:
    a, b = src
    assert a is not None and b is not None
    _float_source(op, a, b)
    require(can_repeat(b, a), op, "the second source must divide the first along every dimension", a, b)
    return Result(a.dtype, a.ne)


def _binary_cases(op: str) -> Iterator[Case]:
    for (ne_a, ne_b), dt in [
        (((10, 5, 4, 3), (10, 5, 4, 3)), "f32"),
        (((16, 10, 1, 1), (16, 1, 1, 1)), "f32"),
        (((1, 7, 3, 1), (1, 1, 3, 1)), "f32"),
        (((8, 4, 6, 2), (4, 2, 3, 1)), "f32"),
        (((33, 2, 1, 1), (33, 1, 1, 1)), "f16"),
        (((33, 2, 1, 1), (1, 1, 1, 1)), "bf16"),
        (((1025, 3, 2, 1), (1025, 1, 2, 1)), "f32"),
        (((33, 4, 3, 2), (1, 4, 1, 2)), "f32"),
        (((33, 4, 3, 2), (33, 1, 3, 1)), "f16"),
    ]:

        def make(inputs: Inputs, ne_a: tuple[int, ...] = ne_a, ne_b: tuple[int, ...] = ne_b, dt: str = dt) -> Tensor:
            away_from_zero = Uniform(0.5, 2.0) if op == "DIV" else Uniform(-1, 1)
            return build(BINARY[op], inputs("a", dt, ne_a), inputs("b", dt, ne_b, away_from_zero))

        yield Case(op, {"type": dt, "ne_a": ne_a, "ne_b": ne_b}, make)

    for dt, same in itertools.product(("f32", "f16"), (False, True)):

        def make_gapped(inputs: Inputs, dt: str = dt, same: bool = same) -> Tensor:
            b = gapped(inputs, "b", dt, (16, 5, 3, 2) if same else (16, 1, 3, 1), Uniform(0.5, 2.0))
            return build(BINARY[op], gapped(inputs, "a", dt, (16, 5, 3, 2)), b)

        yield Case(op, {"type": dt, "gaps": True, "same_shape": same}, make_gapped)


def _binary(op: str) -> OpSpec:
    return register(
        OpSpec(
            op, partial(_infer_binary, op), lambda: _binary_cases(op), elementwise_work(1), n_src=(2, 2), inplace=(0,)
        )
    )


BINARY: dict[str, OpSpec] = {op: _binary(op) for op in ("ADD", "SUB", "MUL", "DIV")}


@checked(GraphError)
def add(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """a + b, b repeated over a. a, b: any plain float type; the result has a's type and shape."""
    return build(BINARY["ADD"], a, b, name=name)


@checked(GraphError)
def sub(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """a - b, b repeated over a; types and shapes as add()."""
    return build(BINARY["SUB"], a, b, name=name)


@checked(GraphError)
def mul(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """a * b elementwise, b repeated over a; types and shapes as add()."""
    return build(BINARY["MUL"], a, b, name=name)


@checked(GraphError)
def div(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """a / b elementwise, b repeated over a; types and shapes as add()."""
    return build(BINARY["DIV"], a, b, name=name)


@dataclass(frozen=True)
class ScaleParams:
    """x * scale + bias."""

    scale: float
    bias: float = 0.0


@dataclass(frozen=True)
class ClampParams:
    """Limits of the values, low <= high."""

    low: float
    high: float


@dataclass(frozen=True)
class FillParams:
    """What every element becomes; may be infinite."""

    value: float


def _infer_same(op: str, src: Sources, params: object) -> Result:
    a = src[0]
    assert a is not None
    _float_source(op, a)
    if isinstance(params, ClampParams):
        require(params.low <= params.high, op, f"low must not exceed high, got {params.low} and {params.high}")
    return Result(a.dtype, a.ne)


_SHAPES = [((10, 5, 4, 3), "f32", False), ((7, 1, 1, 1), "f32", False), ((33, 3, 1, 1), "f16", False)]
_SHAPES += [((9, 4, 3, 2), "f32", True), ((9, 4, 3, 2), "f16", True), ((1025, 3, 1, 1), "f32", False)]


def _map_cases(op: str, params: object, low: float, high: float) -> Iterator[Case]:
    for ne, dt, gaps in _SHAPES:

        def make(inputs: Inputs, ne: tuple[int, ...] = ne, dt: str = dt, gaps: bool = gaps) -> Tensor:
            values = Uniform(low, high)
            a = gapped(inputs, "a", dt, ne, values) if gaps else inputs("a", dt, ne, values)
            return build(MAPS[op], a, params=params)

        yield Case(op, {"type": dt, "ne": ne, "gaps": gaps, "params": params}, make)

    def make_special(inputs: Inputs) -> Tensor:
        values = (math.nan, math.inf, 0.125, 0.0, 4.0) + (() if op == "SQRT" else (-math.inf, -0.25))
        return build(MAPS[op], inputs("a", "f32", (14, 2), Given(values)), params=params)

    yield Case(op, {"type": "f32", "values": "special", "params": params}, make_special)


def _map(op: str, flops: int, cases: Callable[[], Iterator[Case]], params: type | None = None) -> OpSpec:
    spec = OpSpec(op, partial(_infer_same, op), cases, elementwise_work(flops), params=params, inplace=(0,))
    return register(spec)


MAPS: dict[str, OpSpec] = {
    "SCALE": _map("SCALE", 2, lambda: _map_cases("SCALE", ScaleParams(2.5, -0.75), -1, 1), ScaleParams),
    "CLAMP": _map("CLAMP", 2, lambda: _map_cases("CLAMP", ClampParams(-0.5, 0.25), -1, 1), ClampParams),
    "SQR": _map("SQR", 1, lambda: _map_cases("SQR", None, -2, 2)),
    "SQRT": _map("SQRT", 1, lambda: _map_cases("SQRT", None, 0, 4)),
}


def _fill_cases() -> Iterator[Case]:
    """The source holds NaN and infinity, which must not show."""
    for (ne, dt, gaps), value in itertools.product(_SHAPES[:5], (0.0, -1.5, -math.inf)):

        def make(inputs: Inputs, ne: tuple[int, ...] = ne, dt: str = dt, gaps: bool = gaps, v: float = value) -> Tensor:
            values = Given((math.nan, 1.0, math.inf))
            return fill(gapped(inputs, "a", dt, ne, values) if gaps else inputs("a", dt, ne, values), v)

        yield Case("FILL", {"type": dt, "ne": ne, "gaps": gaps, "value": value}, make)


FILL = register(
    OpSpec(
        "FILL", partial(_infer_same, "FILL"), _fill_cases, lambda node: Work(0, node.data_nbytes), params=FillParams,
        inplace=(0,),
    )
)  # fmt: skip


@checked(GraphError)
def scale(a: Tensor, s: float, bias: float = 0.0, name: str = "") -> Tensor:
    """a * s + bias."""
    return build(MAPS["SCALE"], a, params=ScaleParams(float(s), float(bias)), name=name)


@checked(GraphError)
def clamp(a: Tensor, low: float, high: float, name: str = "") -> Tensor:
    """a limited to low..high."""
    return build(MAPS["CLAMP"], a, params=ClampParams(float(low), float(high)), name=name)


@checked(GraphError)
def fill(a: Tensor, value: float, name: str = "") -> Tensor:
    """`value` everywhere, in a's type and shape. What `a` holds is not read."""
    return build(FILL, a, params=FillParams(float(value)), name=name)


@checked(GraphError)
def sqr(a: Tensor, name: str = "") -> Tensor:
    """a * a."""
    return build(MAPS["SQR"], a, name=name)


@checked(GraphError)
def sqrt(a: Tensor, name: str = "") -> Tensor:
    """The square root of each element; NaN for a negative one."""
    return build(MAPS["SQRT"], a, name=name)
