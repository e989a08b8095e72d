"""Native steps for what works row by row: norms, softmax, sums, orders, rows read and written by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from graphrt.backends.cpu import fast
from graphrt.backends.cpu.lowering import Lowering, rows_of
from graphrt.fusion import Fusion, Nodes, is_row, scaled_by_row
from graphrt.program import Group
from graphrt.tensor import Tensor

#: The most steps that SET_ROWS becomes, one for each of dimension 3.
MAX_SETS = 8


class ScaledNorm(NamedTuple):
    """RMS_NORM or NORM, the MUL of it with one row of weights, and the ADD of that and of one row, or None."""

    norm: Tensor
    scaled: Tensor
    shifted: Tensor | None


def norm_mul(nodes: Nodes) -> Iterator[Group]:
    """RMS_NORM, then MUL with one row of weights."""
    for norm in nodes.of("RMS_NORM"):
        scaled = scaled_by_row(nodes, norm)
        if scaled is not None:
            yield Group([norm, scaled], kernel="norm_mul", captured=ScaledNorm(norm, scaled, None))


def layer_norm(nodes: Nodes) -> Iterator[Group]:
    """NORM, then MUL with one row of weights, and ADD of one row if that follows."""
    for norm in nodes.of("NORM"):
        scaled = scaled_by_row(nodes, norm)
        if scaled is None:
            continue
        total = nodes.only_reader(scaled)
        if total is not None and total.op == "ADD" and total["a"] is scaled and is_row(total["b"], scaled):
            yield Group([norm, scaled, total], kernel="layer_norm", captured=ScaledNorm(norm, scaled, total))
        else:
            yield Group([norm, scaled], kernel="layer_norm", captured=ScaledNorm(norm, scaled, None))


def norm_alone(low: Lowering, out: Tensor) -> Any | None:
    return _norm(low, out, out, None, None)


def lower_norm_mul(low: Lowering, found: ScaledNorm) -> Any | None:
    out, bias = found.scaled, None
    if found.shifted is not None:
        out, bias = found.shifted, found.shifted["b"]
    return _norm(low, found.norm, out, found.scaled["b"], bias)


def _norm(low: Lowering, norm: Tensor, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any | None:
    x = norm["a"]
    source, target = rows_of(x), rows_of(out)
    if source is None or target is None:
        return None
    common: dict[str, Any] = {
        "y": low.at(out), "x": low.at(x), "w": low.at(weight), "n_rows": source[0], "n": x.ne[0], "x_nb": source[1],
        "y_nb": target[1], "eps": norm.params.eps,
    }  # fmt: skip
    return [fast.rms_norm(**common) if norm.op == "RMS_NORM" else fast.layer_norm(**common, bias=low.at(bias))]


def soft_max(low: Lowering, out: Tensor) -> Any | None:
    x = out["a"]
    source, target = rows_of(x), rows_of(out)
    if source is None or target is None or out["mask"] is not None or out["sinks"] is not None:
        return None
    if out.params.scale != 1.0 and low.at(x) == low.at(out):
        return None  # a row is read again after its first values are written
    return [
        fast.soft_max(
            y=low.at(out), x=low.at(x), n_rows=source[0], n=x.ne[0], x_nb=source[1], y_nb=target[1],
            scale=out.params.scale,
        )
    ]  # fmt: skip


def sum_rows(low: Lowering, out: Tensor) -> Any | None:
    source = rows_of(out["a"])
    if source is None or not out.is_contiguous:
        return None
    return [fast.sum_rows(y=low.at(out), x=low.at(out["a"]), n_rows=source[0], n=out["a"].ne[0], x_nb=source[1])]


def argmax(low: Lowering, out: Tensor) -> Any | None:
    source = rows_of(out["a"])
    if source is None or not out.is_contiguous:
        return None
    found = low.temporary("largest of pieces", source[0], 2 * fast.PIECES).data_ptr()
    n = out["a"].ne[0]
    return fast.argmax(out=low.at(out), x=low.at(out["a"]), found=found, n_rows=source[0], n=n, x_nb=source[1])


def order(low: Lowering, out: Tensor) -> Any | None:
    """ARGSORT, and TOP_K as the first of those."""
    x = out["a"]
    source = rows_of(x)
    if source is None or not out.is_contiguous or x.ne[0] > fast.MAX_ORDERED:
        return None
    descending = out.op == "TOP_K" or out.params.descending
    return [
        fast.order(
            out=low.at(out), x=low.at(x), n_rows=source[0], n=x.ne[0], x_nb=source[1], k=out.ne[0],
            descending=descending,
        )
    ]  # fmt: skip


def _stride(t: Tensor, low: int, high: int) -> int | None:
    """Bytes between pieces of a tensor that dimensions `low` and `high` count, where all are equally far apart."""
    if t.ne[high] == 1:
        return t.nb[low]
    if t.ne[low] == 1:
        return t.nb[high]
    return t.nb[low] if t.nb[high] == t.nb[low] * t.ne[low] else None


def get_rows(low: Lowering, out: Tensor) -> Any | None:
    table, ids = out["table"], out["ids"]
    matrix_nb, ids_nb = _stride(table, 2, 3), _stride(ids, 1, 2)
    known = table.has_contiguous_rows and ids.has_contiguous_rows and out.is_contiguous
    kind = "f32" if table.dtype.name == "i32" else table.dtype.name  # its rows stay as they are, whatever they mean
    if not known or matrix_nb is None or ids_nb is None or kind not in fast.TYPES:
        return None
    return [
        fast.get_rows(
            kind, "i32", dst=low.at(out), w=low.at(table), idx=low.at(ids), n_rows=ids.n_elements,
            n=table.ne[0], w_nb=table.nb[1], dst_nb=4 * out.ne[0], n_src=table.ne[1], per_matrix=ids.ne[0],
            matrix_nb=matrix_nb, idx_nb=ids_nb,
        )
    ]  # fmt: skip


def set_rows(low: Lowering, out: Tensor) -> Any | None:
    rows, ids, target = out["rows"], out["ids"], out["target"]
    n_sets, n_rows, n_idx, row_nb = rows.ne[3], rows.ne[1] * rows.ne[2], ids.ne[0] * ids.ne[1], _stride(rows, 1, 2)
    known = target.dtype.name in fast.SET_ROWS_TYPES and ids.is_contiguous and n_sets <= MAX_SETS
    if not known or row_nb is None or rows.dtype.name != "f32" or not rows.has_contiguous_rows:
        return None
    return [
        fast.set_rows(
            target.dtype.name, ids.dtype.name, src=low.at(rows) + i * rows.nb[3],
            idx=low.at(ids) + i % ids.ne[2] * n_idx * ids.dtype.type_size, dst=low.at(target) + i * target.nb[3],
            n_rows=n_rows, n=rows.ne[0], src_nb=row_nb, dst_nb=target.nb[1], n_dst=target.ne[1], n_idx=n_idx,
            per_matrix=rows.ne[1], matrix_nb=target.nb[2],
        )
        for i in range(n_sets)
    ]  # fmt: skip


#: By op.
METHODS: dict[str, Callable[[Lowering, Tensor], Any | None]] = {
    "RMS_NORM": norm_alone, "NORM": norm_alone, "SOFT_MAX": soft_max, "SUM_ROWS": sum_rows, "ARGMAX": argmax,
    "ARGSORT": order, "TOP_K": order, "GET_ROWS": get_rows, "SET_ROWS": set_rows,
}  # fmt: skip

NORM_MUL = Fusion("norm_mul", norm_mul, lower_norm_mul)
LAYER_NORM = Fusion("layer_norm", layer_norm, lower_norm_mul)
