"""REPEAT_BACK, GET_ROWS_BACK, SET_ROWS_BACK and VIEW_BACK: gradients of what only moves elements, as sums of elements.

In all of them d is the gradient of a result, f32, and the op yields that of its source, f32. Sums are taken in one
order, so that equal inputs give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.dtypes import F32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, reduction_work, register, require
from graphrt.ops.elementwise import can_repeat
from graphrt.ops.view import ViewParams
from graphrt.tensor import Dims, Tensor, full_dims


@dataclass(frozen=True)
class RepeatBackParams:
    """ne: the shape of what was repeated."""

    ne: Dims


def _infer_repeat_back(params: RepeatBackParams, d: Tensor) -> Result:
    require(d.dtype.name == "f32", "REPEAT_BACK", "the gradient must be f32", d)
    fits = can_repeat(Tensor(F32, params.ne), d)
    require(fits, "REPEAT_BACK", f"{list(params.ne)} must divide the gradient along every dimension", d)
    return Result(F32, params.ne)


REPEAT_BACK = register(OpSpec("REPEAT_BACK", _infer_repeat_back, reduction_work(1), ("d",), params=RepeatBackParams))


@checked(GraphError)
def repeat_back(d: Tensor, *ne: int, name: str = "") -> Tensor:
    """Adds up what repeat() made copies of: result[i, j, ...] = the sum of d[i + r ne[0], j + s ne[1], ...].

    d: f32 of any strides; ne: one to four numbers that divide d's, the shape of the result, f32. Source:
    ggml_repeat_back. Raises GraphError for other types and shapes.
    """
    return build(REPEAT_BACK, d, params=RepeatBackParams(full_dims(ne)), name=name)


@dataclass(frozen=True)
class GetRowsBackParams:
    """n_rows: how many rows the table has."""

    n_rows: int


def _infer_get_rows_back(params: GetRowsBackParams, d: Tensor, ids: Tensor) -> Result:
    op = "GET_ROWS_BACK"
    require(d.dtype.name == "f32", op, "the gradient must be f32", d)
    require(ids.dtype.name == "i32", op, "indices must be i32", ids)
    fits = d.ne[1:] == ids.ne[:3] and ids.ne[3] == 1
    require(fits, op, "indices [n, d2, d3] must match dimensions 1 to 3 of the gradient", d, ids)
    require(params.n_rows >= 1, op, f"n_rows must be at least 1, got {params.n_rows}")
    return Result(F32, (d.ne[0], params.n_rows, *d.ne[2:]))


GET_ROWS_BACK = register(
    OpSpec("GET_ROWS_BACK", _infer_get_rows_back, reduction_work(1), ("d", "ids"), params=GetRowsBackParams)
)


@checked(GraphError)
def get_rows_back(d: Tensor, ids: Tensor, n_rows: int, name: str = "") -> Tensor:
    """The gradient of the table of get_rows(): result[:, r, x, y] = the sum of d[:, i, x, y] with ids[i, x, y] = r.

    d: f32 [n, n_ids, d2, d3]; ids: i32 [n_ids, d2, d3]; n_rows: how many rows the table has. The result is f32 [n,
    n_rows, d2, d3], 0 in rows that nobody read. An index outside 0..n_rows-1 adds nothing. Source: ggml_get_rows_back.
    Raises GraphError for other types and shapes.
    """
    return build(GET_ROWS_BACK, d, ids, params=GetRowsBackParams(int(n_rows)), name=name)


def _infer_set_rows_back(params: None, d: Tensor, ids: Tensor) -> Result:
    op = "SET_ROWS_BACK"
    require(d.dtype.name == "f32", op, "the gradient must be f32", d)
    require(ids.dtype.name in ("i64", "i32"), op, "indices must be i64 or i32", ids)
    fits = d.ne[2] % ids.ne[1] == 0 and d.ne[3] % ids.ne[2] == 0 and ids.ne[3] == 1
    require(fits, op, "indices [n, d2, d3] must divide dimensions 2 and 3 of the gradient", d, ids)
    return Result(F32, (d.ne[0], ids.ne[0], *d.ne[2:]))


SET_ROWS_BACK = register(OpSpec("SET_ROWS_BACK", _infer_set_rows_back, reduction_work(0), ("d", "ids")))


@checked(GraphError)
def set_rows_back(d: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """The gradient of the rows that set_rows() wrote: result[:, i, x, y] = d[:, ids[i, x mod e2, y mod e3], x, y].

    d: f32 [n, n_rows, d2, d3]; ids: i64 or i32 [n_ids, e2, e3], e2 and e3 dividing d2 and d3. The result is f32 [n,
    n_ids, d2, d3], 0 for an index outside, whose row was not written. Source: the derivative of ggml_set_rows, for
    which ggml has no op. Raises GraphError for other types and shapes.
    """
    return build(SET_ROWS_BACK, d, ids, name=name)


@dataclass(frozen=True)
class ViewBackParams:
    """ne, nb: shape and byte strides of what was looked at, its elements taken for 4 bytes; view_ne, view_nb, offs: the
    view's shape, its strides of dimensions 1 to 3 and its offset, in the same bytes."""

    ne: Dims
    nb: Dims
    view_ne: Dims
    view_nb: tuple[int, int, int]
    offs: int


def _infer_view_back(params: ViewBackParams, d: Tensor) -> Result:
    op = "VIEW_BACK"
    require(d.dtype.name == "f32", op, "the gradient must be f32", d)
    require(d.ne == params.view_ne, op, f"the gradient must have the view's shape {list(params.view_ne)}", d)
    strides = (*params.nb, *params.view_nb, params.offs)
    sane = min(strides) >= 0 and all(n % 4 == 0 for n in strides)
    require(sane, op, f"strides and offset must be multiples of 4 bytes, not negative, got {params}")
    source = Tensor(F32, params.ne, nb=params.nb)
    require(not source.overlaps_itself, op, f"the source must have memory of its own for each element, got {params}")
    seen = Tensor(F32, d.ne, nb=(params.nb[0], *params.view_nb)).nbytes + params.offs
    require(seen <= source.nbytes, op, f"the view must end inside its source, got {params}")
    return Result(F32, params.ne)


VIEW_BACK = register(OpSpec("VIEW_BACK", _infer_view_back, reduction_work(1), ("d",), params=ViewBackParams))


@checked(GraphError)
def view_back(d: Tensor, like: Tensor, view: ViewParams, name: str = "") -> Tensor:
    """The gradient of what a view() looks at: result[j] = the sum of d[i] over the elements i of the view that are j.

    d: f32 in the view's shape; like: a tensor of a plain type in the source's shape and with its strides, whose values
    are not read; view: the view's ViewParams. The result is f32 in the shape of `like`, 0 where nothing looks. Source:
    the derivative of ggml_view_4d, where ggml has ggml_acc for contiguous sources alone. Raises GraphError for other
    types and shapes, and for a source whose elements share memory.
    """
    size = like.dtype.type_size
    require(not like.dtype.is_quantized, "VIEW_BACK", "the source must have a plain type", like)
    n0, n1, n2, n3 = (max(n // size * 4, 1) for n in like.nb)
    strides = (view.nb[0] // size * 4, view.nb[1] // size * 4, view.nb[2] // size * 4)
    params = ViewBackParams(like.ne, (n0, n1, n2, n3), view.ne, strides, view.offs // size * 4)
    return build(VIEW_BACK, d, params=params, name=name)
