"""NORM, RMS_NORM and L2_NORM over ne[0]; SUM_ROWS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Sources, build, elementwise_work, reduction_work, register, require
from graphrt.ops.view import gapped
from graphrt.tensor import Tensor
from graphrt.testing import Case, Init, Inputs, Normal, Uniform


@dataclass(frozen=True)
class NormParams:
    """eps: added to the mean square under the root (L2_NORM: least norm divided by)."""

    eps: float


def _infer(op: str, src: Sources, params: NormParams) -> Result:
    a = src[0]
    assert a is not None
    require(a.dtype.name == "f32", op, "the source must be f32", a)
    require(params.eps >= 0, op, f"eps must not be negative, got {params.eps}")
    return Result(a.dtype, a.ne)


_Shape = tuple[int, int, int, int]
#: Shape, eps, values and whether there are gaps: one element, tails, more than a block of threads takes, a large mean
#: (whose square must not swallow the variance), rows so small that eps decides, or that their squares underflow f16.
_POINTS: tuple[tuple[_Shape, float, str, bool], ...] = (
    ((64, 5, 4, 3), 1e-6, "spread", False),
    ((1, 3, 1, 1), 1e-5, "spread", False),
    ((2, 3, 1, 1), 1e-5, "spread", False),
    ((1023, 3, 1, 1), 1e-5, "spread", False),
    ((1025, 2, 1, 1), 1e-5, "spread", False),
    ((8193, 2, 1, 1), 1e-6, "spread", False),
    ((33, 2, 1, 1), 0.1, "spread", False),
    ((64, 5, 1, 1), 1e-12, "spread", False),
    ((64, 5, 4, 3), 1e-6, "spread", True),
    ((257, 3, 2, 1), 1e-5, "spread", True),
    ((513, 7, 1, 1), 1e-6, "far", False),
    ((64, 5, 1, 1), 1e-6, "tiny", False),
    ((64, 5, 1, 1), 1e-5, "huge", False),
)
_VALUES: dict[str, Init] = {
    "spread": Uniform(-1, 2), "far": Normal(1.0, 50.0, 2.0**-6), "tiny": Normal(1e-4), "huge": Normal(1e6),
}  # fmt: skip


def _make(inputs: Inputs, op: str, ne: _Shape, eps: float, values: str, gaps: bool) -> Tensor:
    init = _VALUES[values]
    a = gapped(inputs, "a", "f32", ne, init) if gaps else inputs("a", "f32", ne, init)
    return build(NORMS[op], a, params=NormParams(eps))


def _cases(op: str) -> Iterator[Case]:
    for ne, eps, values, gaps in _POINTS:
        make = partial(_make, op=op, ne=ne, eps=eps, values=values, gaps=gaps)
        yield Case(op, {"ne": ne, "eps": eps, "values": values, "gaps": gaps}, make)


def _norm(op: str) -> OpSpec:
    spec = OpSpec(op, partial(_infer, op), lambda: _cases(op), elementwise_work(4), params=NormParams, inplace=(0,))
    return register(spec)


NORMS: dict[str, OpSpec] = {op: _norm(op) for op in ("NORM", "RMS_NORM", "L2_NORM")}


@checked(GraphError)
def norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """(a - mean) / sqrt(variance + eps) over ne[0]; f32."""
    return build(NORMS["NORM"], a, params=NormParams(float(eps)), name=name)


@checked(GraphError)
def rms_norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """a / sqrt(mean(a^2) + eps) over ne[0]; f32."""
    return build(NORMS["RMS_NORM"], a, params=NormParams(float(eps)), name=name)


@checked(GraphError)
def l2_norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """a / max(|a|_2, eps) over ne[0]; f32."""
    return build(NORMS["L2_NORM"], a, params=NormParams(float(eps)), name=name)


def _infer_sum_rows(src: Sources, params: None) -> Result:
    a = src[0]
    assert a is not None
    require(a.dtype.name == "f32", "SUM_ROWS", "the source must be f32", a)
    return Result(a.dtype, (1, *a.ne[1:]))


def _sum_rows_cases() -> Iterator[Case]:
    for ne in [(10, 5, 4, 3), (1, 7, 1, 1), (33, 3, 1, 1), (1000, 2, 1, 1), (8193, 3, 1, 1)]:

        def make(inputs: Inputs, ne: tuple[int, ...] = ne) -> Tensor:
            return sum_rows(inputs("a", "f32", ne))

        yield Case("SUM_ROWS", {"ne": ne}, make)

    def make_gapped(inputs: Inputs) -> Tensor:
        return sum_rows(gapped(inputs, "a", "f32", (10, 5, 4, 3)))

    yield Case("SUM_ROWS", {"ne": (10, 5, 4, 3), "gaps": True}, make_gapped)


SUM_ROWS = register(OpSpec("SUM_ROWS", _infer_sum_rows, _sum_rows_cases, reduction_work(1)))


@checked(GraphError)
def sum_rows(a: Tensor, name: str = "") -> Tensor:
    """The sum over ne[0]: [n, ...] to [1, ...]; f32."""
    return build(SUM_ROWS, a, name=name)
