"""Conformance cases of UNARY and GLU: every kind, extreme and special values, gaps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

from graphrt.ops.cases.gaps import gapped
from graphrt.ops.unary import GLU_KINDS, UNARY_KINDS, glu, unary
from graphrt.tensor import Dims, Tensor
from graphrt.testing import Case, Given, Init, Inputs, Uniform, grid, register_cases

#: Where activations saturate, overflow in a careless form (e^x at 100) or change sign.
_EXTREMES = Given(
    (0.0, -0.0, 1e-8, -1e-8, 1.0, -1.0, 20.0, -20.0, 88.0, -88.0, 100.0, -100.0, 1e4, -1e4, 0.5, -0.5, 7.0)
)

#: exp has no larger argument in f32.
_EXP_EXTREMES = Given((0.0, -0.0, 1e-8, -1e-8, 1.0, -1.0, 20.0, -20.0, 80.0, -80.0, -100.0, -1e4, 0.5))

#: NaN and infinities beside numbers, for a gate and for what it multiplies (up). The lists have 11 and 7 values, which
#: have no common divisor, so that every pair comes up when both are repeated.
_SPECIAL = Given((math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 10.0, -20.0, 7.5, 0.5))

_SPECIAL_UP = Given((1.0, math.nan, -2.0, math.inf, 0.0, -math.inf, 9.0))


@dataclass(frozen=True)
class _Axes:
    """One point. ne: the shape of each source; extreme: values up to 1e4 instead of -10 to 10; gaps: between rows.

    special: NaN and infinities among the values. Of GLU, split: gate and value are two sources; swapped: see GluParams.
    """

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


register_cases("UNARY", quick=partial(_cases, "UNARY"))
register_cases("GLU", quick=partial(_cases, "GLU"))
