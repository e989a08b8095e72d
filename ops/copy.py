"""CPY, CONT, DUP, CONCAT, REPEAT: what moves elements without changing them, but for their type."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, register, require
from graphrt.ops.elementwise import can_repeat
from graphrt.tensor import Dims, Tensor, full_dims


def _infer_cpy(params: None, a: Tensor, target: Tensor) -> Result:
    require(a.n_elements == target.n_elements, "CPY", "source and target must have equally many elements", a, target)
    same = a.ne == target.ne
    require(same or not target.dtype.is_quantized, "CPY", "a quantized target must have the source's shape", a, target)
    floats = {"float", "float8", "quant"}
    convertible = (
        a.dtype == target.dtype
        or (a.dtype.kind in floats and target.dtype.kind in floats)
        or (a.dtype.kind == "int" and target.dtype.kind == "int")
    )
    require(convertible, "CPY", "an integer type is copied to integer types only", a, target)
    return Result(target.dtype, target.ne)


def _infer_same(params: None, a: Tensor) -> Result:
    return Result(a.dtype, a.ne)


CPY = register(OpSpec("CPY", _infer_cpy, elementwise_work(0), ("a", "target"), writes="target"))
CONT = register(OpSpec("CONT", _infer_same, elementwise_work(0)))
DUP = register(OpSpec("DUP", _infer_same, elementwise_work(0)))


@checked(GraphError)
def cpy(a: Tensor, target: Tensor, name: str = "") -> Tensor:
    """Copies `a` into `target`'s memory, converting or quantizing, element by element in memory's order.

    No formula: nothing is computed beyond the change of type, which is that of each type's definition (dtypes.py). a:
    [a0, a1, a2, a3] of any type; target: as many elements, in any shape if its type is plain and in a's shape if it is
    quantized; an integer type is copied to integer types only. The result is a view of `target`, of its type and shape.
    Source: ggml_cpy. Raises GraphError for types that are not converted and for other numbers of elements.
    """
    return build(CPY, a, target, name=name)


@checked(GraphError)
def cont(a: Tensor, name: str = "") -> Tensor:
    """A contiguous copy of `a`.

    No formula: no value changes. a: any type, shape and strides; the result has its type and shape. Source: ggml_cont.
    Raises GraphError where `a` is no tensor.
    """
    return build(CONT, a, name=name)


@checked(GraphError)
def dup(a: Tensor, name: str = "") -> Tensor:
    """A copy of `a` in memory of its own, contiguous as well.

    No formula: no value changes. a: any type, shape and strides; the result has its type and shape. Source: ggml_dup.
    Raises GraphError where `a` is no tensor.
    """
    return build(DUP, a, name=name)


@dataclass(frozen=True)
class ConcatParams:
    """dim: along which dimension, 0 to 3."""

    dim: int


def _infer_concat(params: ConcatParams, a: Tensor, b: Tensor) -> Result:
    require(0 <= params.dim <= 3, "CONCAT", f"the dimension must be 0 to 3, got {params.dim}")
    require(a.dtype == b.dtype and not a.dtype.is_quantized, "CONCAT", "both must have one plain type", a, b)
    fits = all(i == params.dim or a.ne[i] == b.ne[i] for i in range(4))
    require(fits, "CONCAT", f"shapes may differ along dimension {params.dim} only", a, b)
    ne = list(a.ne)
    ne[params.dim] += b.ne[params.dim]
    return Result(a.dtype, ne)


CONCAT = register(OpSpec("CONCAT", _infer_concat, elementwise_work(0), ("a", "b"), params=ConcatParams))


@checked(GraphError)
def concat(a: Tensor, b: Tensor, dim: int, name: str = "") -> Tensor:
    """`a` followed by `b` along one dimension.

    No formula: no value changes. a, b: one plain type, and one shape but for dimension `dim`; dim: 0 to 3. The result
    has their type, and along `dim` a.ne[dim] + b.ne[dim] elements. Source: ggml_concat. Raises GraphError for quantized
    or differing types, for other shapes and dimensions.
    """
    return build(CONCAT, a, b, params=ConcatParams(int(dim)), name=name)


@dataclass(frozen=True)
class RepeatParams:
    """ne: the shape of the result."""

    ne: Dims


def _infer_repeat(params: RepeatParams, a: Tensor) -> Result:
    require(not a.dtype.is_quantized, "REPEAT", "the source must have a plain type", a)
    fits = can_repeat(a, Tensor(a.dtype, params.ne))
    require(fits, "REPEAT", f"the source must divide {list(params.ne)} along every dimension", a)
    return Result(a.dtype, params.ne)


REPEAT = register(OpSpec("REPEAT", _infer_repeat, elementwise_work(0), params=RepeatParams))


@checked(GraphError)
def repeat(a: Tensor, *ne: int, name: str = "") -> Tensor:
    """`a` repeated until it fills a shape: result[i, j, ...] = a[i mod a.ne[0], j mod a.ne[1], ...].

    a: any plain type; ne: one to four numbers, the shape of the result, each divided by a's. The result has a's type.
    Source: ggml_repeat. Raises GraphError for quantized types and for shapes that `a` does not divide.
    """
    return build(REPEAT, a, params=RepeatParams(full_dims(ne)), name=name)
