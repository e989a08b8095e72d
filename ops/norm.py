"""NORM, RMS_NORM and L2_NORM over ne[0]; SUM_ROWS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from graphrt.op import OpSpec, Result, Sources, build, elementwise_work, reduction_work, register, require
from graphrt.ops.view import gapped
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, Uniform


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


def _cases(op: str) -> Iterator[Case]:
    for ne, eps in [((64, 5, 4, 3), 1e-6), ((1, 3, 1, 1), 1e-5), ((1025, 2, 1, 1), 1e-5), ((33, 2, 1, 1), 0.1)]:

        def make(inputs: Inputs, ne: tuple[int, ...] = ne, eps: float = eps) -> Tensor:
            return build(NORMS[op], inputs("a", "f32", ne, Uniform(-1, 2)), params=NormParams(eps))

        yield Case(op, {"ne": ne, "eps": eps}, make)

    def make_gapped(inputs: Inputs) -> Tensor:
        return build(NORMS[op], gapped(inputs, "a", "f32", (64, 5, 4, 3), Uniform(-1, 2)), params=NormParams(1e-6))

    yield Case(op, {"ne": (64, 5, 4, 3), "gaps": True}, make_gapped)


def _norm(op: str) -> OpSpec:
    spec = OpSpec(op, partial(_infer, op), lambda: _cases(op), elementwise_work(4), params=NormParams, inplace=(0,))
    return register(spec)


NORMS: dict[str, OpSpec] = {op: _norm(op) for op in ("NORM", "RMS_NORM", "L2_NORM")}


def norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """(a - mean) / sqrt(variance + eps) over ne[0]; f32."""
    return build(NORMS["NORM"], a, params=NormParams(float(eps)), name=name)


def rms_norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """a / sqrt(mean(a^2) + eps) over ne[0]; f32."""
    return build(NORMS["RMS_NORM"], a, params=NormParams(float(eps)), name=name)


def l2_norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """a / max(|a|_2, eps) over ne[0]; f32."""
    return build(NORMS["L2_NORM"], a, params=NormParams(float(eps)), name=name)


def _infer_sum_rows(src: Sources, params: None) -> Result:
    a = src[0]
    assert a is not None
    require(a.dtype.name == "f32", "SUM_ROWS", "the source must be f32", a)
    return Result(a.dtype, (1, *a.ne[1:]))


def _sum_rows_cases() -> Iterator[Case]:
    for ne in [(10, 5, 4, 3), (1, 7, 1, 1), (1000, 2, 1, 1)]:

        def make(inputs: Inputs, ne: tuple[int, ...] = ne) -> Tensor:
            return sum_rows(inputs("a", "f32", ne))

        yield Case("SUM_ROWS", {"ne": ne}, make)

    def make_gapped(inputs: Inputs) -> Tensor:
        return sum_rows(gapped(inputs, "a", "f32", (10, 5, 4, 3)))

    yield Case("SUM_ROWS", {"ne": (10, 5, 4, 3), "gaps": True}, make_gapped)


SUM_ROWS = register(OpSpec("SUM_ROWS", _infer_sum_rows, _sum_rows_cases, reduction_work(1)))


def sum_rows(a: Tensor, name: str = "") -> Tensor:
    """The sum over ne[0]: [n, ...] to [1, ...]; f32."""
    return build(SUM_ROWS, a, name=name)
