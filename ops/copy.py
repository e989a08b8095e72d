"""CPY, CONT, DUP, CONCAT, REPEAT: what moves elements without changing them, but for their type."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Sources, build, elementwise_work, register, require
from graphrt.ops.elementwise import can_repeat
from graphrt.ops.view import gapped, permute
from graphrt.tensor import Dims, Tensor, full_dims
from graphrt.testing import Case, Inputs, grid


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


@dataclass(frozen=True)
class _Axes:
    """type, to: of source and target. layout: of the source; gaps also of CPY's target."""

    type: str = "f32"
    to: str = "f32"
    ne: Dims = (64, 3, 2, 2)
    layout: str = "plain"


_TYPE_PAIRS = (
    ("f32", "f32"), ("f32", "f16"), ("f32", "bf16"), ("f16", "f32"), ("f16", "f16"), ("bf16", "f16"), ("bf16", "f32"),
    ("f32", "q8_0"), ("f32", "q4_0"), ("f32", "q4_1"), ("f32", "q5_0"), ("f32", "q5_1"), ("f16", "q8_0"),
    ("q4_0", "f32"), ("q8_0", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("i32", "i64"), ("i32", "i32"),
)  # fmt: skip
_PERMUTATIONS: dict[str, tuple[int, int, int, int]] = {
    "transposed": (1, 0, 2, 3), "heads_first": (0, 2, 1, 3), "all_moved": (1, 2, 3, 0),
}  # fmt: skip
_EXCLUDED: dict[str, Callable[[_Axes], bool]] = {
    "blocks across rows": lambda a: a.layout in ("transposed", "all_moved") and "q" in a.type + a.to,
}


def _look(inputs: Inputs, axes: _Axes) -> Tensor:
    """The source: contiguous, permuted or with gaps."""
    if axes.layout == "gaps":
        return gapped(inputs, "a", axes.type, axes.ne)
    a = inputs("a", axes.type, axes.ne)
    return permute(a, *_PERMUTATIONS[axes.layout]) if axes.layout in _PERMUTATIONS else a


def _make_cpy(inputs: Inputs, axes: _Axes) -> Tensor:
    source, target = _look(inputs, axes), gapped if axes.layout == "gaps" else Inputs.__call__
    return cpy(source, target(inputs, "b", axes.to, source.ne))


def _cpy_cases() -> Iterator[Case]:
    for dt, to in _TYPE_PAIRS:
        layouts = ("plain", "transposed", "heads_first", "gaps")
        for axes in grid(_Axes(dt, to), {"layout": layouts}, _EXCLUDED):
            yield Case("CPY", asdict(axes), partial(_make_cpy, axes=axes))


def _make_cont(inputs: Inputs, op: str, axes: _Axes) -> Tensor:
    return build(CONT if op == "CONT" else DUP, _look(inputs, axes))


def _cont_cases(op: str) -> Iterator[Case]:
    shapes = ((5, 4, 3, 2), (33, 65, 2, 1), (1025, 3, 1, 1))
    for axes in grid(_Axes(), {"type": ("f32", "f16", "i32"), "ne": shapes, "layout": (*_PERMUTATIONS, "gaps")}):
        yield Case(op, {"type": axes.type, "ne": axes.ne, "layout": axes.layout}, partial(_make_cont, op=op, axes=axes))


CPY = register(OpSpec("CPY", _infer_cpy, _cpy_cases, elementwise_work(0), n_src=(2, 2), writes=1))
CONT = register(OpSpec("CONT", _infer_same, lambda: _cont_cases("CONT"), elementwise_work(0)))
DUP = register(OpSpec("DUP", _infer_same, lambda: _cont_cases("DUP"), elementwise_work(0)))


@checked(GraphError)
def cpy(a: Tensor, target: Tensor, name: str = "") -> Tensor:
    """Copies `a` into `target`'s memory, converting or quantizing; returns a view of `target`."""
    return build(CPY, a, target, name=name)


@checked(GraphError)
def cont(a: Tensor, name: str = "") -> Tensor:
    """A contiguous copy of `a`."""
    return build(CONT, a, name=name)


@checked(GraphError)
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


def _make_concat(inputs: Inputs, dim: int, dt: str, ne: Dims, layout: str) -> Tensor:
    longer = full_dims([n + 2 if i == dim else n for i, n in enumerate(ne)])
    if layout == "gaps":
        return concat(gapped(inputs, "a", dt, ne), gapped(inputs, "b", dt, longer), dim)
    if layout == "permuted":  # only the second: both may not share one index
        swapped = (longer[0], longer[2], longer[1], longer[3])
        return concat(inputs("a", dt, ne), permute(inputs("b", dt, swapped), 0, 2, 1, 3), dim)
    return concat(inputs("a", dt, ne), inputs("b", dt, longer), dim)


def _concat_cases() -> Iterator[Case]:
    ne: Dims = (5, 4, 3, 2)
    for dim, dt, layout in itertools.product(range(4), ("f32", "f16", "i32"), ("plain", "gaps", "permuted")):
        make = partial(_make_concat, dim=dim, dt=dt, ne=ne, layout=layout)
        yield Case("CONCAT", {"dim": dim, "type": dt, "ne": ne, "layout": layout}, make)
    for dim in (0, 1):
        make = partial(_make_concat, dim=dim, dt="f32", ne=(129, 33, 1, 1), layout="plain")
        yield Case("CONCAT", {"dim": dim, "type": "f32", "ne": (129, 33, 1, 1), "layout": "plain"}, make)


CONCAT = register(
    OpSpec("CONCAT", _infer_concat, _concat_cases, elementwise_work(0), n_src=(2, 2), params=ConcatParams)
)


@checked(GraphError)
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


def _make_repeat(inputs: Inputs, ne: Dims, times: Dims, dt: str, gaps: bool) -> Tensor:
    a = gapped(inputs, "a", dt, ne) if gaps else inputs("a", dt, ne)
    return repeat(a, *(n * t for n, t in zip(ne, times)))


def _repeat_cases() -> Iterator[Case]:
    shapes: tuple[tuple[Dims, Dims], ...] = (
        ((5, 4, 3, 2), (1, 1, 1, 1)), ((5, 4, 3, 2), (2, 1, 1, 1)), ((5, 4, 3, 2), (1, 3, 1, 2)),
        ((5, 4, 3, 2), (2, 3, 2, 2)), ((1, 4, 1, 1), (33, 1, 5, 2)), ((65, 1, 1, 1), (1, 33, 1, 1)),
    )  # fmt: skip
    for (ne, times), dt, gaps in itertools.product(shapes, ("f32", "f16", "i32"), (False, True)):
        make = partial(_make_repeat, ne=ne, times=times, dt=dt, gaps=gaps)
        yield Case("REPEAT", {"ne": ne, "times": times, "type": dt, "gaps": gaps}, make)


REPEAT = register(OpSpec("REPEAT", _infer_repeat, _repeat_cases, elementwise_work(0), params=RepeatParams))


@checked(GraphError)
def repeat(a: Tensor, *ne: int, name: str = "") -> Tensor:
    """`a` repeated along each dimension until it fills the shape `ne`."""
    return build(REPEAT, a, params=RepeatParams(full_dims(ne)), name=name)
