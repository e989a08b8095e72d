"""Conformance cases of CPY, CONT, DUP, CONCAT and REPEAT: types, permuted sources, and gaps between rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from graphrt.op import build
from graphrt.ops.cases.gaps import gapped
from graphrt.ops.copy import CONT, DUP, concat, cpy, repeat
from graphrt.ops.view import permute
from graphrt.tensor import Dims, Tensor, full_dims
from graphrt.testing import Case, Inputs, grid, register_cases


@dataclass(frozen=True)
class _Axes:
    """One point. type, to: the types of source and target; ne: the source's shape in memory.

    layout: how the source lies in memory: plain, gaps, or a key of _PERMUTATIONS. With gaps CPY's target has them too.
    """

    type: str = "f32"
    to: str = "f32"
    ne: Dims = (64, 3, 2, 2)
    layout: str = "plain"


_TYPE_PAIRS = (
    ("f32", "f32"), ("f32", "f16"), ("f32", "bf16"), ("f16", "f32"), ("f16", "f16"), ("bf16", "f16"), ("bf16", "f32"),
    ("f32", "q8_0"), ("f32", "q4_0"), ("f32", "q4_1"), ("f32", "q5_0"), ("f32", "q5_1"), ("f16", "q8_0"),
    ("q4_0", "f32"), ("q8_0", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("i32", "i64"), ("i32", "i32"),
    ("f32", "f8_e4m3"), ("bf16", "f8_e4m3"), ("f8_e4m3", "f32"), ("f8_e4m3", "f16"), ("f8_e4m3", "f8_e4m3"),
    ("q8_0", "f8_e4m3"), ("f8_e4m3", "q4_0"), ("f16", "f8_e5m2"), ("f8_e5m2", "f8_e4m3"),
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
    points = grid(_Axes(), {"type": ("f32", "f16", "i32"), "ne": shapes, "layout": (*_PERMUTATIONS, "gaps")})
    panels = _Axes("f16", ne=(8, 8, 33, 4), layout="heads_first")  # what ops.key_panels.key_panels() makes of keys
    for axes in (*points, panels):
        yield Case(op, {"type": axes.type, "ne": axes.ne, "layout": axes.layout}, partial(_make_cont, op=op, axes=axes))


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


register_cases("CPY", quick=_cpy_cases)
register_cases("CONT", quick=partial(_cont_cases, "CONT"))
register_cases("DUP", quick=partial(_cont_cases, "DUP"))
register_cases("CONCAT", quick=_concat_cases)
register_cases("REPEAT", quick=_repeat_cases)
