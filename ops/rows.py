"""GET_ROWS and SET_ROWS: rows by index, dequantized on reading and quantized on writing."""

from __future__ import annotations

from graphrt.arguments import checked
from graphrt.dtypes import F32, WRITABLE
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, register, require
from graphrt.tensor import Tensor


def _infer_get_rows(params: None, table: Tensor, ids: Tensor) -> Result:
    require(ids.dtype.name == "i32", "GET_ROWS", "indices must be i32", ids)
    fits = table.ne[2] == ids.ne[1] and table.ne[3] == ids.ne[2] and ids.ne[3] == 1
    require(fits, "GET_ROWS", "indices [n, d2, d3] must match dimensions 2 and 3 of the source", table, ids)
    return Result(table.dtype if table.dtype.kind == "int" else F32, (table.ne[0], *ids.ne[:3]))


def _infer_set_rows(params: None, rows: Tensor, ids: Tensor, target: Tensor) -> Result:
    op = "SET_ROWS"
    whole = target.dtype.name == "i32"
    require(whole or rows.dtype.name in ("f32", "f16"), op, "rows must be f32 or f16", rows)
    require(not whole or rows.dtype.name == "i32", op, "rows must be i32 as the target is", rows, target)
    require(ids.dtype.name in ("i64", "i32"), op, "indices must be i64 or i32", ids)
    kinds = f"the target must be i32 or one of {', '.join(WRITABLE)}"
    require(whole or target.dtype.name in WRITABLE, op, kinds, target)
    require(rows.ne[0] == target.ne[0], op, "rows and target must have equal ne[0]", rows, target)
    require(rows.ne[2:] == target.ne[2:], op, "rows and target must agree in dimensions 2 and 3", rows, target)
    require(rows.ne[1] == ids.ne[0], op, "there must be one index a row", rows, ids)
    fits = rows.ne[2] % ids.ne[1] == 0 and rows.ne[3] % ids.ne[2] == 0 and ids.ne[3] == 1
    require(fits, op, "indices [n, d2, d3] must divide dimensions 2 and 3 of the rows", rows, ids)
    require(target.has_contiguous_rows, op, "the target's rows must be contiguous", target)
    return Result(target.dtype, target.ne)


def _get_rows_work(node: Tensor) -> Work:
    table, ids = node["table"], node["ids"]
    return Work(0, node.data_nbytes + ids.data_nbytes + ids.n_elements * table.dtype.row_size(table.ne[0]))


def _set_rows_work(node: Tensor) -> Work:
    rows, ids = node["rows"], node["ids"]
    return Work(0, rows.data_nbytes + ids.data_nbytes + rows.n_rows * node.dtype.row_size(node.ne[0]))


GET_ROWS = register(OpSpec("GET_ROWS", _infer_get_rows, _get_rows_work, ("table", "ids")))
SET_ROWS = register(OpSpec("SET_ROWS", _infer_set_rows, _set_rows_work, ("rows", "ids", "target"), writes="target"))


@checked(GraphError)
def get_rows(table: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Rows of `table` by index: result[:, i, x, y] = table[:, ids[i, x, y], x, y].

    table: [n, n_rows, d2, d3] any type; ids: i32 [n_ids, d2, d3]. The result is f32 [n, n_ids, d2, d3], dequantized;
    an integer `table` keeps its type. An index outside 0..n_rows-1 is the caller's error: what its row then holds
    depends on the backend, but no other memory is read. Source: ggml_get_rows. Raises GraphError for other types and
    shapes.
    """
    return build(GET_ROWS, table, ids, name=name)


@checked(GraphError)
def set_rows(rows: Tensor, ids: Tensor, target: Tensor, name: str = "") -> Tensor:
    """Writes rows by index into `target`, in its type: result[:, ids[i, x, y], x, y] = rows[:, i, x, y].

    rows: f32 or f16 [n, n_ids, d2, d3]; ids: i64 or i32 [n_ids, e2, e3], e2 and e3 dividing d2 and d3 (then x mod e2
    and y mod e3 in the formula); target: [n, n_rows, d2, d3], one of WRITABLE; or rows and target are both i32. The
    result is a view of `target`. !! Equal indices in one call leave either row; an index outside 0..n_rows-1 writes
    nothing. Source: ggml_set_rows, which takes no i32. Raises GraphError for other types and shapes.
    """
    return build(SET_ROWS, rows, ids, target, name=name)
