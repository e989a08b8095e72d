"""ARGMAX, ARGSORT and TOP_K over ne[0]: indices, i32."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.dtypes import I32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, reduction_work, register, require
from graphrt.tensor import Tensor


@dataclass(frozen=True)
class ArgsortParams:
    """descending: the largest first."""

    descending: bool = False


@dataclass(frozen=True)
class TopKParams:
    """k: how many."""

    k: int


def _infer_argmax(params: None, a: Tensor) -> Result:
    require(a.dtype.name == "f32" and a.ne[2] == a.ne[3] == 1, "ARGMAX", "the source must be an f32 matrix", a)
    return Result(I32, (a.ne[1],))


def _infer_argsort(params: ArgsortParams, a: Tensor) -> Result:
    require(a.dtype.name == "f32", "ARGSORT", "the source must be f32", a)
    return Result(I32, a.ne)


def _infer_top_k(params: TopKParams, a: Tensor) -> Result:
    require(a.dtype.name == "f32", "TOP_K", "the source must be f32", a)
    require(1 <= params.k <= a.ne[0], "TOP_K", f"k must be 1 to ne[0], got {params.k}", a)
    return Result(I32, (params.k, *a.ne[1:]))


ARGMAX = register(OpSpec("ARGMAX", _infer_argmax, reduction_work(1)))
ARGSORT = register(OpSpec("ARGSORT", _infer_argsort, elementwise_work(10), params=ArgsortParams))
TOP_K = register(OpSpec("TOP_K", _infer_top_k, reduction_work(10), params=TopKParams))


@checked(GraphError)
def argmax(a: Tensor, name: str = "") -> Tensor:
    """The index of the largest of each row, the first of equal ones: result[j] = argmax over i of a[i, j].

    a: f32 [n, m]; the result is i32 [m]. Source: ggml_argmax. Raises GraphError for other types and more dimensions.
    """
    return build(ARGMAX, a, name=name)


@checked(GraphError)
def argsort(a: Tensor, descending: bool = False, name: str = "") -> Tensor:
    """The indices that sort each row: a[result[0], j] <= a[result[1], j] <= ..., where result means row j of it.

    a: f32 [n, ...]; descending: the largest first instead. The result is i32 of a's shape; equal elements come in any
    order. Source: ggml_argsort. Raises GraphError for other types.
    """
    return build(ARGSORT, a, params=ArgsortParams(descending), name=name)


@checked(GraphError)
def top_k(a: Tensor, k: int, name: str = "") -> Tensor:
    """The indices of the k largest of each row. !! In no particular order, as in ggml.

    No formula: the result is a set, of the first k indices of argsort(a, descending=True). a: f32 [n, ...]; k: 1 to n.
    The result is i32 [k, ...]. Source: ggml_top_k. Raises GraphError for other types and numbers.
    """
    return build(TOP_K, a, params=TopKParams(int(k)), name=name)
