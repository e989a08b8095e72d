"""Conformance cases of GET_ROWS and SET_ROWS: every type, batches of rows and of indices, gaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from graphrt.dtypes import WRITABLE, dtype
from graphrt.ops.cases.gaps import gapped
from graphrt.ops.key_panels import panel_width, set_key_panels
from graphrt.ops.rows import get_rows, set_rows
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, Rows, grid, register_cases

_GET_TYPES = (
    "f32", "f16", "bf16", "i32", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K",
    "iq4_nl", "iq4_xs", "mxfp4", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0",
    "nvfp4", "f8_e4m3", "f8_e5m2",
)  # fmt: skip


@dataclass(frozen=True)
class _Axes:
    """One point: a table [n, n_rows, *batch] of a type, and n_ids indices into its rows for each matrix.

    When rows are read there may be more indices than rows. ids_batch: dimensions 2 and 3 as the indices have them, None
    for `batch`. ids, rows: the types of the indices and of the rows that SET_ROWS writes. gaps: between the rows.
    """

    type: str
    n: int
    n_rows: int = 9
    n_ids: int = 5
    batch: tuple[int, int] = (1, 1)
    ids_batch: tuple[int, int] | None = None
    ids: str = "i64"
    rows: str = "f32"
    gaps: bool = False


def _width(dt: str) -> int:
    """How many elements a row has: 33 of a plain type, two blocks where a block has 256 elements, else three blocks."""
    block = dtype(dt).block_size
    return 33 if block == 1 else 2 * block if block == 256 else 3 * block


def _get_rows_axes() -> Iterator[_Axes]:
    for dt in _GET_TYPES:
        yield from grid(_Axes(dt, _width(dt), ids="i32"), {"batch": ((1, 1), (3, 2))})
    for dt in ("f32", "f16", "q8_0", "q4_K"):
        yield from grid(_Axes(dt, _width(dt), batch=(3, 2), ids="i32", gaps=True), {"n_ids": (1, 4)})
        yield _Axes(dt, _width(dt), n_rows=700, n_ids=1000, ids="i32")
    yield from grid(_Axes("f32", 1, ids="i32"), {"n": (1, 1025, 8193)})
    yield from grid(_Axes("q8_0", 4096, ids="i32"), {"type": ("q4_0", "q6_K", "f16")})


def _set_rows_axes() -> Iterator[_Axes]:
    for dt in WRITABLE:
        base = _Axes(dt, _width(dt))
        yield base
        yield replace(base, batch=(3, 2), ids="i32")
        yield replace(base, batch=(4, 2), ids_batch=(2, 1))  # each matrix of indices serves several
        yield replace(base, n_rows=700, n_ids=300, rows="f16")
        yield replace(base, batch=(3, 2), gaps=True)
    yield _Axes("i32", 3, rows="i32")
    yield _Axes("i32", 1, n_rows=700, n_ids=64, rows="i32")
    yield from grid(_Axes("f16", 1, n_ids=1), {"n": (1, 127, 1025), "type": ("f16", "f32", "bf16")})
    yield from grid(_Axes("q8_0", 4096, n_ids=1), {"type": ("q8_0", "q4_0", "f16"), "ids": ("i64", "i32")})


def _make_get(inputs: Inputs, axes: _Axes) -> Tensor:
    ne = (axes.n, axes.n_rows, *axes.batch)
    a = gapped(inputs, "a", axes.type, ne) if axes.gaps else inputs("a", axes.type, ne)
    return get_rows(a, inputs("ids", axes.ids, (axes.n_ids, *axes.batch), Rows(axes.n_rows)))


def _make_set(inputs: Inputs, axes: _Axes) -> Tensor:
    ids_ne = (axes.n_ids, *(axes.ids_batch or axes.batch))
    ids = inputs("ids", axes.ids, ids_ne, Rows(axes.n_rows, distinct=True))
    source, target = (axes.n, axes.n_ids, *axes.batch), (axes.n, axes.n_rows, *axes.batch)
    if axes.gaps:
        rows = gapped(inputs, "rows", axes.rows, source)
        return set_rows(rows, ids, gapped(inputs, "target", axes.type, target))
    return set_rows(inputs("rows", axes.rows, source), ids, inputs("target", axes.type, target))


@dataclass(frozen=True)
class _Panels:
    """n_ids new keys [d, heads] a sequence, written into a cache of n_cells keys in panels. ids: their type."""

    type: str
    d: int = 64
    heads: int = 2
    n_cells: int = 33
    n_ids: int = 1
    n_seq: int = 1
    ids: str = "i64"
    rows: str = "f32"
    layout: str = "panels"


def _make_panels(inputs: Inputs, axes: _Panels) -> Tensor:
    x = panel_width(dtype(axes.type))
    rows = inputs("rows", axes.rows, (axes.d, axes.heads, axes.n_ids, axes.n_seq))
    ids = inputs("ids", axes.ids, (axes.n_ids, 1, axes.n_seq), Rows(axes.n_cells, distinct=True))
    cache = inputs("target", axes.type, (x, axes.n_cells, axes.d // x * axes.heads, axes.n_seq))
    return set_key_panels(rows, ids, cache)


def _panel_cases() -> Iterator[Case]:
    odd = _Panels("bf16", 48, 3, 200, 2, 2, "i32", "f16")
    for axes in (_Panels("f16"), _Panels("f32", n_ids=3), _Panels("f8_e4m3", d=32), odd):
        yield Case("SET_ROWS", asdict(axes), partial(_make_panels, axes=axes))


def _cases(op: str) -> Iterator[Case]:
    points, make = (_get_rows_axes(), _make_get) if op == "GET_ROWS" else (_set_rows_axes(), _make_set)
    for axes in dict.fromkeys(points):
        yield Case(op, asdict(axes), partial(make, axes=axes))
    if op == "SET_ROWS":
        yield from _panel_cases()


register_cases("GET_ROWS", quick=partial(_cases, "GET_ROWS"))
register_cases("SET_ROWS", quick=partial(_cases, "SET_ROWS"))
