"""ADD, SUB, MUL, DIV (the second source is repeated over the first), SCALE, CLAMP, SQR, SQRT, FILL."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, elementwise_work, register, require
from graphrt.tensor import Tensor


def can_repeat(small: Tensor, big: Tensor) -> bool:
    """`small` fills `big` when repeated a whole number of times along every dimension."""
    return all(b % s == 0 for s, b in zip(small.ne, big.ne))


def _float_source(op: str, *tensors: Tensor) -> None:
    require(all(t.dtype.kind == "float" for t in tensors), op, "sources must be plain float types", *tensors)


def _infer_binary(op: str, params: None, a: Tensor, b: Tensor) -> Result:
    _float_source(op, a, b)
    require(can_repeat(b, a), op, "the second source must divide the first along every dimension", a, b)
    return Result(a.dtype, a.ne)


def _binary(op: str) -> OpSpec:
    return register(OpSpec(op, partial(_infer_binary, op), elementwise_work(1), ("a", "b"), inplace=("a",)))


BINARY: dict[str, OpSpec] = {op: _binary(op) for op in ("ADD", "SUB", "MUL", "DIV")}


@checked(GraphError)
def add(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """Adds b, repeated over a: result = a + b.

    a: any plain float type (f32, f16, bf16, f64) and shape; b: any plain float type, each of its dimensions divides
    a's. The result has a's type and shape. Source: ggml_add. Raises GraphError for other types and shapes.
    """
    return build(BINARY["ADD"], a, b, name=name)


@checked(GraphError)
def sub(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """Subtracts b, repeated over a: result = a - b.

    a: any plain float type (f32, f16, bf16, f64) and shape; b: any plain float type, each of its dimensions divides
    a's. The result has a's type and shape. Source: ggml_sub. Raises GraphError for other types and shapes.
    """
    return build(BINARY["SUB"], a, b, name=name)


@checked(GraphError)
def mul(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """Multiplies element by element with b, repeated over a: result = a * b.

    a: any plain float type (f32, f16, bf16, f64) and shape; b: any plain float type, each of its dimensions divides
    a's. The result has a's type and shape. Source: ggml_mul. Raises GraphError for other types and shapes.
    """
    return build(BINARY["MUL"], a, b, name=name)


@checked(GraphError)
def div(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """Divides element by element by b, repeated over a: result = a / b, infinite or NaN where b is 0.

    a: any plain float type (f32, f16, bf16, f64) and shape; b: any plain float type, each of its dimensions divides
    a's. The result has a's type and shape. Source: ggml_div. Raises GraphError for other types and shapes.
    """
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
    """value: what every element of the result is; may be infinite."""

    value: float


def _infer_same(op: str, params: object, a: Tensor) -> Result:
    _float_source(op, a)
    if isinstance(params, ClampParams):
        require(params.low <= params.high, op, f"low must not exceed high, got {params.low} and {params.high}")
    return Result(a.dtype, a.ne)


def _map(op: str, flops: int, params: type | None = None) -> OpSpec:
    spec = OpSpec(op, partial(_infer_same, op), elementwise_work(flops), params=params, inplace=("a",))
    return register(spec)


MAPS: dict[str, OpSpec] = {
    "SCALE": _map("SCALE", 2, ScaleParams),
    "CLAMP": _map("CLAMP", 2, ClampParams),
    "SQR": _map("SQR", 1),
    "SQRT": _map("SQRT", 1),
}


FILL = register(
    OpSpec(
        "FILL", partial(_infer_same, "FILL"), lambda node: Work(0, node.data_nbytes), params=FillParams,
        inplace=("a",),
    )
)  # fmt: skip


@checked(GraphError)
def scale(a: Tensor, s: float, bias: float = 0.0, name: str = "") -> Tensor:
    """Multiplies by a number and adds one: result = a * s + bias.

    a: any plain float type (f32, f16, bf16, f64) and shape, which the result has too; s, bias: numbers. Source:
    ggml_scale_bias. Raises GraphError for other types.
    """
    return build(MAPS["SCALE"], a, params=ScaleParams(float(s), float(bias)), name=name)


@checked(GraphError)
def clamp(a: Tensor, low: float, high: float, name: str = "") -> Tensor:
    """Limits each element: result = min(max(a, low), high).

    a: any plain float type (f32, f16, bf16, f64) and shape, which the result has too; low, high: numbers, low <= high.
    Source: ggml_clamp. Raises GraphError for other types, and where low is over high.
    """
    return build(MAPS["CLAMP"], a, params=ClampParams(float(low), float(high)), name=name)


@checked(GraphError)
def fill(a: Tensor, value: float, name: str = "") -> Tensor:
    """One number everywhere: result = value.

    a: any plain float type (f32, f16, bf16, f64) and shape, which the result has too; what it holds is not read. value:
    a number, which may be infinite. Source: ggml_fill. Raises GraphError for other types.
    """
    return build(FILL, a, params=FillParams(float(value)), name=name)


@checked(GraphError)
def sqr(a: Tensor, name: str = "") -> Tensor:
    """The square of each element: result = a * a.

    a: any plain float type (f32, f16, bf16, f64) and shape, which the result has too. Source: ggml_sqr. Raises
    GraphError for other types.
    """
    return build(MAPS["SQR"], a, name=name)


@checked(GraphError)
def sqrt(a: Tensor, name: str = "") -> Tensor:
    """The square root of each element, NaN for a negative one: result = sqrt(a).

    a: any plain float type (f32, f16, bf16, f64) and shape, which the result has too. Source: ggml_sqrt. Raises
    GraphError for other types.
    """
    return build(MAPS["SQRT"], a, name=name)
