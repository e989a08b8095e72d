"""NORM, RMS_NORM and L2_NORM over ne[0]; SUM_ROWS."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, reduction_work, register, require
from graphrt.tensor import Tensor


@dataclass(frozen=True)
class NormParams:
    """eps: added to the mean square under the root (L2_NORM: least norm divided by)."""

    eps: float


def _infer(op: str, params: NormParams, a: Tensor) -> Result:
    require(a.dtype.name == "f32", op, "the source must be f32", a)
    require(params.eps >= 0, op, f"eps must not be negative, got {params.eps}")
    return Result(a.dtype, a.ne)


def _norm(op: str) -> OpSpec:
    spec = OpSpec(op, partial(_infer, op), elementwise_work(4), params=NormParams, inplace=("a",))
    return register(spec)


NORMS: dict[str, OpSpec] = {op: _norm(op) for op in ("NORM", "RMS_NORM", "L2_NORM")}


@checked(GraphError)
def norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """Layer norm without weights, over ne[0]: result = (a - mean(a)) / sqrt(mean((a - mean(a))^2) + eps).

    a: f32 [n, ...], whose type and shape the result has; eps: a number from 0 on. Source: Layer Normalization (arXiv
    1607.06450), as ggml_norm has it. Raises GraphError for other types and a negative eps.
    """
    return build(NORMS["NORM"], a, params=NormParams(float(eps)), name=name)


@checked(GraphError)
def rms_norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """Root mean square norm without weights, over ne[0]: result = a / sqrt(mean(a^2) + eps).

    a: f32 [n, ...], whose type and shape the result has; eps: a number from 0 on. Source: Root Mean Square Layer
    Normalization (arXiv 1910.07467), as ggml_rms_norm has it. Raises GraphError for other types and a negative eps.
    """
    return build(NORMS["RMS_NORM"], a, params=NormParams(float(eps)), name=name)


@checked(GraphError)
def l2_norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """Each row divided by its length, over ne[0]: result = a / max(sqrt(sum(a^2)), eps).

    a: f32 [n, ...], whose type and shape the result has; eps: a number from 0 on. Source: ggml_l2_norm. Raises
    GraphError for other types and a negative eps.
    """
    return build(NORMS["L2_NORM"], a, params=NormParams(float(eps)), name=name)


def _infer_sum_rows(params: None, a: Tensor) -> Result:
    require(a.dtype.name == "f32", "SUM_ROWS", "the source must be f32", a)
    return Result(a.dtype, (1, *a.ne[1:]))


SUM_ROWS = register(OpSpec("SUM_ROWS", _infer_sum_rows, reduction_work(1)))


@checked(GraphError)
def sum_rows(a: Tensor, name: str = "") -> Tensor:
    """The sum of each row: result[0, j, ...] = sum over i of a[i, j, ...].

    a: f32 [n, a1, a2, a3]; the result is f32 [1, a1, a2, a3]. Source: ggml_sum_rows. Raises GraphError for other types.
    """
    return build(SUM_ROWS, a, name=name)
