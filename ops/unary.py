"""UNARY: one function of each element. GLU: a gate's activation times the other half."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Sources, build, elementwise_work, register, require
from graphrt.ops.view import gapped
from graphrt.tensor import Dims, Tensor
from graphrt.testing import Case, Given, Init, Inputs, Uniform, grid

#: silu = x sigmoid(x); gelu: the tanh form; gelu_erf: exact; gelu_quick = x sigmoid(1.702 x); softplus = ln(1 + e^x).
UNARY_KINDS = ("silu", "gelu", "gelu_erf", "gelu_quick", "relu", "tanh", "sigmoid", "exp", "softplus")
#: Activation of the gate: reglu relu, geglu gelu (tanh form), swiglu silu, swiglu_oai as gpt-oss has it.
GLU_KINDS = ("reglu", "geglu", "swiglu", "swiglu_oai")


def _one_of(what: str, kind: str, kinds: tuple[str, ...]) -> None:
    if kind not in kinds:
        raise GraphError(f"{what} must be one of {', '.join(kinds)}, got {kind!r}")


@dataclass(frozen=True)
class UnaryParams:
    """kind: one of UNARY_KINDS."""

    kind: str

    def __post_init__(self) -> None:
        _one_of("a unary function", self.kind, UNARY_KINDS)


@dataclass(frozen=True)
class GluParams:
    """kind: one of GLU_KINDS. alpha, limit: swiglu_oai's. swapped: of a single source the gate is the second half."""

    kind: str
    alpha: float = 1.702
    limit: float = 7.0
    swapped: bool = False

    def __post_init__(self) -> None:
        _one_of("a gated activation", self.kind, GLU_KINDS)


def _infer_unary(src: Sources, params: UnaryParams) -> Result:
    a = src[0]
    assert a is not None
    require(a.dtype.kind == "float", "UNARY", "the source must be a plain float type", a)
    return Result(a.dtype, a.ne)


def _infer_glu(src: Sources, params: GluParams) -> Result:
    a, b = (*src, None)[:2]
    assert a is not None
    require(a.dtype.kind == "float", "GLU", "sources must be plain float types", a, b)
    if b is None:
        require(a.ne[0] % 2 == 0, "GLU", "without a second source ne[0] must be even: gate and value halves", a)
        return Result(a.dtype, (a.ne[0] // 2, *a.ne[1:]))
    require(a.ne == b.ne and a.dtype == b.dtype, "GLU", "gate and value must have one type and shape", a, b)
    return Result(a.dtype, a.ne)


#: Where activations saturate, overflow in a careless form (e^x at 100) or change sign.
_EXTREMES = Given(
    (0.0, -0.0, 1e-8, -1e-8, 1.0, -1.0, 20.0, -20.0, 88.0, -88.0, 100.0, -100.0, 1e4, -1e4, 0.5, -0.5, 7.0)
)
#: exp has no larger argument in f32.
_EXP_EXTREMES = Given((0.0, -0.0, 1e-8, -1e-8, 1.0, -1.0, 20.0, -20.0, 80.0, -80.0, -100.0, -1e4, 0.5))
#: NaN and infinities beside numbers, of a gate and its up: as many as have no common divisor, so that all pairs meet.
_SPECIAL = Given((math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 10.0, -20.0, 7.5, 0.5))
_SPECIAL_UP = Given((1.0, math.nan, -2.0, math.inf, 0.0, -math.inf, 9.0))


@dataclass(frozen=True)
class _Axes:
    """ne: of each source. extreme: values up to 1e4 instead of -10 to 10. split: gate and value apart. special: NaN and

    infinities among the values."""

    kind: str
    type: str = "f32"
    ne: Dims = (17, 3, 2, 2)
    extreme: bool = False
    gaps: bool = False
    split: bool = True
    swapped: bool = False
    special: bool = False


def _unary_axes() -> Iterator[_Axes]:
    for kind in UNARY_KINDS:
        yield _Axes(kind)
        yield _Axes(kind, "f16", (33, 2, 1, 1))
        yield _Axes(kind, ne=(51, 1, 1, 1), extreme=True)
        yield from grid(_Axes(kind, ne=(22, 1, 1, 1), special=True), {"type": ("f32", "f16")})
    for kind in ("silu", "gelu"):
        yield from grid(_Axes(kind), {"ne": ((1, 9, 1, 1), (1023, 3, 1, 1), (4097, 1, 1, 1))})
        yield from grid(_Axes(kind, gaps=True), {"type": ("f32", "f16")})


def _glu_axes() -> Iterator[_Axes]:
    wide: Dims = (18, 5, 2, 1)
    for kind in GLU_KINDS:
        yield from grid(_Axes(kind, ne=wide), {"split": (True, False)})
        yield _Axes(kind, ne=wide, split=False, swapped=True)
        yield _Axes(kind, ne=(51, 2, 1, 1), extreme=True)
        yield from grid(_Axes(kind, ne=(77, 1, 1, 1), special=True), {"type": ("f32", "f16")})
        yield from grid(_Axes(kind, ne=(17, 3, 2, 2), gaps=True), {"split": (True, False)})
    yield from grid(_Axes("swiglu"), {"ne": ((1, 3, 1, 1), (1025, 2, 1, 1)), "split": (True, False)})
    yield from grid(_Axes("swiglu", "f16"), {"kind": ("swiglu", "geglu"), "split": (True, False)})


def _make(inputs: Inputs, op: str, axes: _Axes) -> Tensor:
    values: Init = Uniform(-10, 10) if op == "GLU" else Uniform(-6, 6)
    if axes.extreme:
        values = _EXP_EXTREMES if axes.kind == "exp" else _EXTREMES
    if axes.special:
        values = _SPECIAL

    def source(name: str, ne: Dims, init: Init) -> Tensor:
        return gapped(inputs, name, axes.type, ne, init) if axes.gaps else inputs(name, axes.type, ne, init)

    if op == "UNARY":
        return unary(source("a", axes.ne, values), axes.kind)
    if axes.split:
        # not the gate's values again: swapping the two must show
        up = _SPECIAL_UP if axes.special else Uniform(-10, 10)
        return glu(source("gate", axes.ne, values), source("up", axes.ne, up), axes.kind)
    both = (2 * axes.ne[0], *axes.ne[1:])
    return glu(source("a", both, values), None, axes.kind, swapped=axes.swapped)


def _cases(op: str) -> Iterator[Case]:
    for axes in dict.fromkeys(_unary_axes() if op == "UNARY" else _glu_axes()):
        shown = asdict(axes)
        if op == "UNARY":
            del shown["split"], shown["swapped"]
        if not axes.special:
            del shown["special"]
        yield Case(op, shown, partial(_make, op=op, axes=axes))


UNARY = register(
    OpSpec("UNARY", _infer_unary, partial(_cases, "UNARY"), elementwise_work(8), params=UnaryParams, inplace=(0,))
)
GLU = register(
    OpSpec(
        "GLU", _infer_glu, partial(_cases, "GLU"), elementwise_work(10), n_src=(1, 2), params=GluParams, inplace=(0, 1)
    )
)


@checked(GraphError)
def unary(a: Tensor, kind: str, name: str = "") -> Tensor:
    """The function `kind` (see UNARY_KINDS) of each element."""
    return build(UNARY, a, params=UnaryParams(kind), name=name)


@checked(GraphError)
def glu(
    a: Tensor, b: Tensor | None, kind: str, *, alpha: float = 1.702, limit: float = 7.0, swapped: bool = False,
    name: str = "",
) -> Tensor:  # fmt: skip
    """activation(gate) * value. a: gate, b: value, both [n, ...]; or b None and a [2n, ...] with the gate first.

    swiglu_oai: x = min(gate, limit), y = clamp(value, -limit, limit), x * sigmoid(alpha x) * (y + 1).
    """
    return build(GLU, a, b, params=GluParams(kind, alpha, limit, swapped), name=name)
