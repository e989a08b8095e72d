"""GET_ROWS and SET_ROWS: rows by index, and rows rounded to a target's type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.common.float8 import float8_values, is_float8
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.dequantize import gather_rows
from graphrt.backends.triton.kernels.quantize import BLOCK, store_part, stored, writing_options
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.tensor import Tensor

#: Most elements of a row that one program takes.
_MOST = 1024


@accesses(reads="p_a p_ids", writes="p_out")
@triton.jit
def read_rows(
    p_a, p_ids, p_out, n, n1, n2, s0, s1, s2, s3, si0, si1, si2, KIND: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, part) copies SIZE elements of row ids[i], converted to the result's type.

    a: [n, rows, n2, n3] of the type KIND with strides s; ids: [n1, n2, n3] with strides si; out: contiguous [n, n1, n2,
    n3].
    """
    take_turn(PDL)
    row = tl.program_id(0)
    i1, i2, i3 = (row % n1).to(tl.int64), ((row // n1) % n2).to(tl.int64), (row // (n1 * n2)).to(tl.int64)
    wanted = tl.load(p_ids + i1 * si0 + i2 * si1 + i3 * si2).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    p_row = p_a + wanted * s1 + i2 * s2 + i3 * s3
    x = tl.load(p_row + i.to(tl.int64) * s0, mask=i < n)
    if is_float8(KIND):
        x = float8_values(x, KIND, 0)
    tl.store(p_out + row.to(tl.int64) * n + i, x.to(p_out.dtype.element_ty), mask=i < n)


@accesses(reads="p_rows p_ids", writes="p_out")
@triton.jit
def write_rows(
    p_rows, p_ids, p_out, n, n1, n2, s0, s1, s2, s3, si0, si1, si2, e1, e2, so1, so2, so3, n_out,
    KIND: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, part) rounds SIZE elements of row i and stores them in row ids[i] of out, or in row i without ids.

    rows: [n, n1, n2, n3] with strides s; ids: [n1, e1, e2], whose dimensions e1 and e2 divide n2 and n3; out: as
    quantize.stored() has it, with strides so. A row whose id is none of the n_out rows is left out.
    """
    take_turn(PDL)
    row = tl.program_id(0)
    i1, i2, i3 = (row % n1).to(tl.int64), ((row // n1) % n2).to(tl.int64), (row // (n1 * n2)).to(tl.int64)
    target = i1
    if p_ids is not None:
        target = tl.load(p_ids + i1 * si0 + (i2 % e1) * si1 + (i3 % e2) * si2).to(tl.int64)
    p_in = p_rows + i1 * s1 + i2 * s2 + i3 * s3
    if (target >= 0) & (target < n_out):
        store_part(p_in, s0, p_out + target * so1 + i2 * so2 + i3 * so3, tl.program_id(1), n, KIND, SIZE)


def _size(n: int) -> int:
    """Elements of a row of n that one program takes."""
    return max(BLOCK, min(_MOST, 1 << (n - 1).bit_length()))


def _warps(size: int) -> int:
    return max(1, min(4, size // 256))


def read_launch(a: View, ids: View, out: View, ctx: Context) -> Launch:
    """GET_ROWS of a plain type."""
    size = _size(a.ne[0])
    s0, s1, s2, s3 = a.strides
    args = {
        "p_a": a.data, "p_ids": ids.data, "p_out": out.data, "n": a.ne[0], "n1": ids.ne[0], "n2": ids.ne[1],
        "s0": s0, "s1": s1, "s2": s2, "s3": s3, "si0": ids.strides[0], "si1": ids.strides[1], "si2": ids.strides[2],
        "KIND": a.kind, "SIZE": size, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    grid = (ids.tensor.n_elements, -(-a.ne[0] // size))
    return Launch(read_rows, grid, args, launch_options(ctx.target, _warps(size)))


def write_launch(rows: torch.Tensor, ids: View | None, out: View, ctx: Context) -> Launch:
    """Writes rows, [n3, n2, n1, n] of any strides, into a tensor of a WRITABLE type with contiguous rows.

    ids: the rows' places as SET_ROWS has them, None: in order.
    """
    n3, n2, n1, n = rows.shape
    s3, s2, s1, s0 = rows.stride()
    memory, (so1, so2, so3) = stored(out)
    si, e = (ids.strides, ids.ne) if ids is not None else ((0,) * 4, (1,) * 4)
    size = _size(n)
    args: dict[str, Any] = {
        "p_rows": rows, "p_ids": ids.data if ids is not None else None, "p_out": memory, "n": n, "n1": n1, "n2": n2,
        "s0": s0, "s1": s1, "s2": s2, "s3": s3, "si0": si[0], "si1": si[1], "si2": si[2], "e1": e[1], "e2": e[2],
        "so1": so1, "so2": so2, "so3": so3, "n_out": out.ne[1] if ids is not None else n1,
        "KIND": out.kind, "SIZE": size, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return Launch(write_rows, (n1 * n2 * n3, -(-n // size)), args, writing_options(ctx.target, _warps(size), out.kind))


def lower_set_rows(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """SET_ROWS."""
    rows, ids, target = (nodes[0][name] for name in ("rows", "ids", "target"))
    return [write_launch(ctx.view(rows).torch(), ctx.view(ids), ctx.view(target), ctx)]


def lower_get_rows(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """GET_ROWS: packed rows are decoded where they lie."""
    node = nodes[0]
    table, ids, out = node["table"], ctx.view(node["ids"]), ctx.view(node)
    if not table.dtype.is_quantized:
        return [read_launch(ctx.view(table), ids, out, ctx)]
    packed, steps = ctx.packed(table)
    return [*steps, gather_rows(packed, ids.torch()[0], out.data)]


def block_rows(view: View) -> torch.Tensor:
    """The rows of a quantized tensor as bytes: uint8 [ne[3], ne[2], ne[1], row bytes]."""
    t = view.tensor
    return view.data.as_strided((*t.ne[:0:-1], t.dtype.row_size(t.ne[0])), (*view.strides[:0:-1], 1))


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "GET_ROWS": lower_get_rows, "SET_ROWS": lower_set_rows,
}  # fmt: skip
