"""Conformance cases of ADD, SUB, MUL, DIV, SCALE, CLAMP, SQR, SQRT and FILL."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

from graphrt.op import build
from graphrt.ops.cases.gaps import gapped
from graphrt.ops.elementwise import BINARY, MAPS, ClampParams, ScaleParams, fill
from graphrt.tensor import Tensor
from graphrt.testing import Case, Given, Inputs, Uniform, register_cases


def _binary_cases(op: str) -> Iterator[Case]:
    for (ne_a, ne_b), dt in [
        (((10, 5, 4, 3), (10, 5, 4, 3)), "f32"),
        (((16, 10, 1, 1), (16, 1, 1, 1)), "f32"),
        (((1, 7, 3, 1), (1, 1, 3, 1)), "f32"),
        (((8, 4, 6, 2), (4, 2, 3, 1)), "f32"),
        (((33, 2, 1, 1), (33, 1, 1, 1)), "f16"),
        (((33, 2, 1, 1), (1, 1, 1, 1)), "bf16"),
        (((1025, 3, 2, 1), (1025, 1, 2, 1)), "f32"),
        (((33, 4, 3, 2), (1, 4, 1, 2)), "f32"),
        (((33, 4, 3, 2), (33, 1, 3, 1)), "f16"),
    ]:

        def make(inputs: Inputs, ne_a: tuple[int, ...] = ne_a, ne_b: tuple[int, ...] = ne_b, dt: str = dt) -> Tensor:
            away_from_zero = Uniform(0.5, 2.0) if op == "DIV" else Uniform(-1, 1)
            return build(BINARY[op], inputs("a", dt, ne_a), inputs("b", dt, ne_b, away_from_zero))

        yield Case(op, {"type": dt, "ne_a": ne_a, "ne_b": ne_b}, make)

    for dt, same in itertools.product(("f32", "f16"), (False, True)):

        def make_gapped(inputs: Inputs, dt: str = dt, same: bool = same) -> Tensor:
            b = gapped(inputs, "b", dt, (16, 5, 3, 2) if same else (16, 1, 3, 1), Uniform(0.5, 2.0))
            return build(BINARY[op], gapped(inputs, "a", dt, (16, 5, 3, 2)), b)

        yield Case(op, {"type": dt, "gaps": True, "same_shape": same}, make_gapped)


_SHAPES = [((10, 5, 4, 3), "f32", False), ((7, 1, 1, 1), "f32", False), ((33, 3, 1, 1), "f16", False)]

_SHAPES += [((9, 4, 3, 2), "f32", True), ((9, 4, 3, 2), "f16", True), ((1025, 3, 1, 1), "f32", False)]


def _map_cases(op: str, params: object, low: float, high: float) -> Iterator[Case]:
    for ne, dt, gaps in _SHAPES:

        def make(inputs: Inputs, ne: tuple[int, ...] = ne, dt: str = dt, gaps: bool = gaps) -> Tensor:
            values = Uniform(low, high)
            a = gapped(inputs, "a", dt, ne, values) if gaps else inputs("a", dt, ne, values)
            return build(MAPS[op], a, params=params)

        yield Case(op, {"type": dt, "ne": ne, "gaps": gaps, "params": params}, make)

    def make_special(inputs: Inputs) -> Tensor:
        values = (math.nan, math.inf, 0.125, 0.0, 4.0) + (() if op == "SQRT" else (-math.inf, -0.25))
        return build(MAPS[op], inputs("a", "f32", (14, 2), Given(values)), params=params)

    yield Case(op, {"type": "f32", "values": "special", "params": params}, make_special)


def _fill_cases() -> Iterator[Case]:
    """The source holds NaN and infinity, of which nothing may be in the result."""
    for (ne, dt, gaps), value in itertools.product(_SHAPES[:5], (0.0, -1.5, -math.inf)):

        def make(inputs: Inputs, ne: tuple[int, ...] = ne, dt: str = dt, gaps: bool = gaps, v: float = value) -> Tensor:
            values = Given((math.nan, 1.0, math.inf))
            return fill(gapped(inputs, "a", dt, ne, values) if gaps else inputs("a", dt, ne, values), v)

        yield Case("FILL", {"type": dt, "ne": ne, "gaps": gaps, "value": value}, make)


for _op in BINARY:
    register_cases(_op, quick=partial(_binary_cases, _op))
register_cases("SCALE", quick=partial(_map_cases, "SCALE", ScaleParams(2.5, -0.75), -1, 1))
register_cases("CLAMP", quick=partial(_map_cases, "CLAMP", ClampParams(-0.5, 0.25), -1, 1))
register_cases("SQR", quick=partial(_map_cases, "SQR", None, -2, 2))
register_cases("SQRT", quick=partial(_map_cases, "SQRT", None, 0, 4))
register_cases("FILL", quick=_fill_cases)
