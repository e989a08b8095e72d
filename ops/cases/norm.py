"""Conformance cases of NORM, RMS_NORM, L2_NORM and SUM_ROWS."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from graphrt.op import build
from graphrt.ops.cases.gaps import gapped
from graphrt.ops.norm import NORMS, NormParams, sum_rows
from graphrt.tensor import Tensor
from graphrt.testing import Case, Init, Inputs, Normal, Uniform, register_cases

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


def _sum_rows_cases() -> Iterator[Case]:
    for ne in [(10, 5, 4, 3), (1, 7, 1, 1), (33, 3, 1, 1), (1000, 2, 1, 1), (8193, 3, 1, 1)]:

        def make(inputs: Inputs, ne: tuple[int, ...] = ne) -> Tensor:
            return sum_rows(inputs("a", "f32", ne))

        yield Case("SUM_ROWS", {"ne": ne}, make)

    def make_gapped(inputs: Inputs) -> Tensor:
        return sum_rows(gapped(inputs, "a", "f32", (10, 5, 4, 3)))

    yield Case("SUM_ROWS", {"ne": (10, 5, 4, 3), "gaps": True}, make_gapped)


for _op in NORMS:
    register_cases(_op, quick=partial(_cases, _op))
register_cases("SUM_ROWS", quick=_sum_rows_cases)
