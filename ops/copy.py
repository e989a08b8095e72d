"""CPY, CONT, DUP, CONCAT, REPEAT: what moves elements without changing them, but for their type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphrt.op import OpSpec, Result, Sources, build, elementwise_work, register, require
from graphrt.ops.elementwise import can_repeat
from graphrt.ops.view import permute
from graphrt.tensor import Dims, Tensor, full_dims
from graphrt.testing import Case, Inputs


def _infer_cpy(src: Sources, params: None) -> Result:
    a, target = src
    assert a is not None and target is not None
    require(a.n_elements == target.n_elements, "CPY", "source and target must have equally many elements", a, target)
    same = a.ne == target.ne
    require(same or not target.dtype.is_quantized, "CPY", "a quantized target must have the source's shape", a, target)
    floats = {"float", "quant"}
    convertible = (
        a.dtype == target.dtype
        or (a.dtype.kind in floats and target.dtype.kind in floats)
        or (a.dtype.kind == "int" and target.dtype.kind == "int")
    )
    require(convertible, "CPY", "an integer type is copied to integer types only", a, target)
    return Result(target.dtype, target.ne)


def _infer_same(src: Sources, params: None) -> Result:
    a = src[0]
    assert a is not None
    return Result(a.dtype, a.ne)


def _cpy_cases() -> Iterator[Case]:
    for a_type, b_type in [
        ("f32", "f32"), ("f32", "f16"), ("f32", "bf16"), ("f16", "f32"), ("bf16", "f16"), ("f32", "q8_0"),
        ("f32", "q4_0"), ("f16", "q8_0"), ("q4_0", "f32"), ("q8_0", "f16"), ("i32", "i64"),
    ]:  # fmt: skip
        for permuted in (False, True):
            if permuted and "q" in a_type + b_type:
                continue

            def make(inputs: Inputs, a: str = a_type, b: str = b_type, permuted: bool = permuted) -> Tensor:
                source = inputs("a", a, (64, 3, 2, 2))
                source = permute(source, 1, 0, 2, 3) if permuted else source
                return cpy(source, inputs("b", b, source.ne))

            yield Case("CPY", {"type_a": a_type, "type_b": b_type, "permuted": permuted}, make)


def _cont_cases(op: str) -> Iterator[Case]:
    for dt in ("f32", "f16", "i32"):

        def make(inputs: Inputs, dt: str = dt) -> Tensor:
            return build(CONT if op == "CONT" else DUP, permute(inputs("a", dt, (5, 4, 3, 2)), 1, 2, 0, 3))

        yield Case(op, {"type": dt}, make)


CPY = register(OpSpec("CPY", _infer_cpy, _cpy_cases, elementwise_work(0), n_src=(2, 2), writes=1))
CONT = register(OpSpec("CONT", _infer_same, lambda: _cont_cases("CONT"), elementwise_work(0)))
DUP = register(OpSpec("DUP", _infer_same, lambda: _cont_cases("DUP"), elementwise_work(0)))


def cpy(a: Tensor, target: Tensor, name: str = "") -> Tensor:
    """Copies `a` into `target`'s memory, converting or quantizing; returns a view of `target`."""
    return build(CPY, a, target, name=name)


def cont(a: Tensor, name: str = "") -> Tensor:
    """A contiguous copy of `a`."""
    return build(CONT, a, name=name)


def dup(a: Tensor, name: str = "") -> Tensor:
    """A copy of `a`; contiguous too."""
    return build(DUP, a, name=name)


@dataclass(frozen=True)
class ConcatParams:
    """dim: along which dimension, 0 to 3."""

    dim: int


def _infer_concat(src: Sources, params: ConcatParams) -> Result:
    a, b = src
    assert a is not None and b is not None
    require(0 <= params.dim <= 3, "CONCAT", f"the dimension must be 0 to 3, got {params.dim}")
    require(a.dtype == b.dtype and not a.dtype.is_quantized, "CONCAT", "both must have one plain type", a, b)
    fits = all(i == params.dim or a.ne[i] == b.ne[i] for i in range(4))
    require(fits, "CONCAT", f"shapes may differ along dimension {params.dim} only", a, b)
    ne = list(a.ne)
    ne[params.dim] += b.ne[params.dim]
    return Result(a.dtype, ne)


def _concat_cases() -> Iterator[Case]:
    for dim in range(4):
        for dt in ("f32", "i32"):

            def make(inputs: Inputs, dim: int = dim, dt: str = dt) -> Tensor:
                ne = [5, 4, 3, 2]
                longer = [n + 2 if i == dim else n for i, n in enumerate(ne)]
                return concat(inputs("a", dt, ne), inputs("b", dt, longer), dim)

            yield Case("CONCAT", {"dim": dim, "type": dt}, make)


CONCAT = register(
    OpSpec("CONCAT", _infer_concat, _concat_cases, elementwise_work(0), n_src=(2, 2), params=ConcatParams)
)


def concat(a: Tensor, b: Tensor, dim: int, name: str = "") -> Tensor:
    """`a` followed by `b` along dimension `dim`."""
    return build(CONCAT, a, b, params=ConcatParams(int(dim)), name=name)


@dataclass(frozen=True)
class RepeatParams:
    """The shape to fill."""

    ne: Dims


def _infer_repeat(src: Sources, params: RepeatParams) -> Result:
    a = src[0]
    assert a is not None
    require(not a.dtype.is_quantized, "REPEAT", "the source must have a plain type", a)
    fits = can_repeat(a, Tensor(a.dtype, params.ne))
    require(fits, "REPEAT", f"the source must divide {list(params.ne)} along every dimension", a)
    return Result(a.dtype, params.ne)


def _repeat_cases() -> Iterator[Case]:
    for times in [(1, 1, 1, 1), (2, 1, 1, 1), (1, 3, 1, 2), (2, 3, 2, 2)]:

        def make(inputs: Inputs, times: tuple[int, ...] = times) -> Tensor:
            return repeat(inputs("a", "f32", (5, 4, 3, 2)), *(n * t for n, t in zip((5, 4, 3, 2), times)))

        yield Case("REPEAT", {"times": times}, make)


REPEAT = register(OpSpec("REPEAT", _infer_repeat, _repeat_cases, elementwise_work(0), params=RepeatParams))


def repeat(a: Tensor, *ne: int, name: str = "") -> Tensor:
    """`a` repeated along each dimension until it fills the shape `ne`."""
    return build(REPEAT, a, params=RepeatParams(full_dims(ne)), name=name)
