"""GET_ROWS and SET_ROWS: rows by index, dequantized on reading and quantized on writing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from graphrt.arguments import checked
from graphrt.dtypes import F32, dtype
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Sources, Work, build, register, require
from graphrt.ops.view import gapped
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, Rows, grid

#: Types that SET_ROWS writes.
WRITABLE = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")


def _infer_get_rows(src: Sources, params: None) -> Result:
    a, ids = src
    assert a is not None and ids is not None
    require(ids.dtype.name == "i32", "GET_ROWS", "indices must be i32", ids)
    fits = a.ne[2] == ids.ne[1] and a.ne[3] == ids.ne[2] and ids.ne[3] == 1
    require(fits, "GET_ROWS", "indices [n, d2, d3] must match dimensions 2 and 3 of the source", a, ids)
    return Result(a.dtype if a.dtype.kind == "int" else F32, (a.ne[0], *ids.ne[:3]))


def _infer_set_rows(src: Sources, params: None) -> Result:
    rows, ids, target = src
    assert rows is not None and ids is not None and target is not None
    op = "SET_ROWS"
    require(rows.dtype.name in ("f32", "f16"), op, "rows must be f32 or f16", rows)
    require(ids.dtype.name in ("i64", "i32"), op, "indices must be i64 or i32", ids)
    require(target.dtype.name in WRITABLE, op, f"the target must be one of {', '.join(WRITABLE)}", target)
    require(rows.ne[0] == target.ne[0], op, "rows and target must have equal ne[0]", rows, target)
    require(rows.ne[2:] == target.ne[2:], op, "rows and target must agree in dimensions 2 and 3", rows, target)
    require(rows.ne[1] == ids.ne[0], op, "there must be one index a row", rows, ids)
    fits = rows.ne[2] % ids.ne[1] == 0 and rows.ne[3] % ids.ne[2] == 0 and ids.ne[3] == 1
    require(fits, op, "indices [n, d2, d3] must divide dimensions 2 and 3 of the rows", rows, ids)
    require(target.has_contiguous_rows, op, "the target's rows must be contiguous", target)
    return Result(target.dtype, target.ne)


def _get_rows_work(node: Tensor) -> Work:
    source, ids = node.src[0], node.src[1]
    assert source is not None and ids is not None
    return Work(0, node.data_nbytes + ids.data_nbytes + ids.n_elements * source.dtype.row_size(source.ne[0]))


def _set_rows_work(node: Tensor) -> Work:
    rows, ids = node.src[0], node.src[1]
    assert rows is not None and ids is not None
    return Work(0, rows.data_nbytes + ids.data_nbytes + rows.n_rows * node.dtype.row_size(node.ne[0]))


_GET_TYPES = (
    "f32", "f16", "bf16", "i32", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K",
    "iq4_nl", "iq4_xs", "mxfp4", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0",
    "nvfp4",
)  # fmt: skip


@dataclass(frozen=True)
class _Axes:
    """n: elements a row; n_rows: of the table; n_ids: how many are taken or written, for reading also more than there

    are; batch: dimensions 2 and 3; ids_batch: the indices' own, None for the same; ids, rows: types."""

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
    """Elements of a row for a type: odd where it may be, else three blocks of 32 or two of 256."""
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


def _cases(op: str) -> Iterator[Case]:
    points, make = (_get_rows_axes(), _make_get) if op == "GET_ROWS" else (_set_rows_axes(), _make_set)
    for axes in dict.fromkeys(points):
        yield Case(op, asdict(axes), partial(make, axes=axes))


GET_ROWS = register(OpSpec("GET_ROWS", _infer_get_rows, partial(_cases, "GET_ROWS"), _get_rows_work, n_src=(2, 2)))
SET_ROWS = register(
    OpSpec("SET_ROWS", _infer_set_rows, partial(_cases, "SET_ROWS"), _set_rows_work, n_src=(3, 3), writes=2)
)


@checked(GraphError)
def get_rows(a: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Rows of `a` by index. a: [n, n_rows, d2, d3] any type; ids: i32 [n_ids, d2, d3]; result f32 [n, n_ids, d2, d3].

    An integer `a` keeps its type. An index outside 0..n_rows-1 is the caller's error: what its row then holds
    depends on the backend, but no other memory is read.
    """
    return build(GET_ROWS, a, ids, name=name)


@checked(GraphError)
def set_rows(rows: Tensor, ids: Tensor, target: Tensor, name: str = "") -> Tensor:
    """Writes row i of `rows` to row ids[i] of `target`, in its type; returns a view of `target`.

    rows: f32 or f16 [n, n_ids, d2, d3]; ids: i64 or i32 [n_ids, e2, e3] with e2, e3 dividing d2, d3;
    target: [n, n_rows, d2, d3], one of WRITABLE. !! Equal indices in one call leave either row; an index outside
    0..n_rows-1 writes nothing.
    """
    return build(SET_ROWS, rows, ids, target, name=name)
