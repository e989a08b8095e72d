# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""RMS_NORM_BACK and SOFT_MAX_BACK over ne[0], whose rows are made of two rows and two sums over them.

A row is held in registers, several short ones by one program; what is longer is read again for the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.common.reduce import over_rms
from graphrt.backends.triton.kernels.elementwise import Layout, Operand, row_offset
from graphrt.backends.triton.kernels.norm import LONG_BLOCK, MAX_ROW, rows_a_program, warps_for
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.tensor import Tensor


@triton.jit
def _factors(along, squares, n0, x, KIND: tl.constexpr):
    """What a row's d and its sum with the other row are multiplied with: along is sum(d * a), squares sum(a * a).

    RMS_NORM_BACK, x being eps: r and r^2 * mean(d * a) * r; SOFT_MAX_BACK, x being the scale: the scale and sum(d * w).
    """
    if KIND == "RMS_NORM_BACK":
        r = over_rms(squares, n0, x)
        return r, along / (squares + n0 * x) * r
    else:
        return tl.zeros_like(along) + x, along


@triton.jit
def _result(d, a, first, second, KIND: tl.constexpr):
    """r * d - a * (r^3 mean(d a)); scale * w * (d - sum(d w))."""
    if KIND == "RMS_NORM_BACK":
        return d * first - a * second
    else:
        return first * a * (d - second)


@accesses(reads="p_d p_a", writes="p_out")
@triton.jit(do_not_specialize=["n_rows", "n1", "n2", "d0", "d1", "d2", "d3", "a0", "a1", "a2", "a3", "x"])
def rows_back(
    p_d, p_a, p_out, n_rows, n0, n1, n2, d0, d1, d2, d3, a0, a1, a2, a3, x,
    KIND: tl.constexpr, D_UNIT: tl.constexpr, A_UNIT: tl.constexpr, D_VEC: tl.constexpr, A_VEC: tl.constexpr,
    BIG: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of n0 <= COLS elements a program, out without gaps; out may be d.

    Row numbers run over dimensions 1 to 3 (n1, n2); d0 to a3: strides in elements, d0 and a0 being 1 with D_UNIT and
    A_UNIT; D_VEC, A_VEC: what divides the others; x: the norm's eps or the scale. BIG: offsets need 64 bits.
    """
    take_turn(PDL)
    pid = tl.program_id(0)
    if BIG:
        pid = pid.to(tl.int64)
    i_row = pid * ROWS + tl.arange(0, ROWS)
    i_col = tl.arange(0, COLS)[None, :]
    m_load = (i_row < n_rows)[:, None] & (i_col < n0)
    p_ds = p_d + row_offset(i_row, n1, n2, d1, d2, d3, D_VEC)[:, None]
    p_as = p_a + row_offset(i_row, n1, n2, a1, a2, a3, A_VEC)[:, None]
    if D_UNIT:
        d = tl.load(p_ds + i_col, mask=m_load, other=0.0)
    else:
        d = tl.load(p_ds + i_col.to(i_row.dtype) * d0, mask=m_load, other=0.0)
    if A_UNIT:
        a = tl.load(p_as + i_col, mask=m_load, other=0.0)
    else:
        a = tl.load(p_as + i_col.to(i_row.dtype) * a0, mask=m_load, other=0.0)
    first, second = _factors(tl.sum(d * a, 1), tl.sum(a * a, 1), n0, x, KIND)
    out = _result(d, a, first[:, None], second[:, None], KIND)
    tl.store(p_out + (i_row * n0)[:, None] + i_col, out, mask=m_load)


@accesses(reads="p_d p_a", writes="p_out")
@triton.jit(do_not_specialize=["n1", "n2", "d1", "d2", "d3", "a1", "a2", "a3", "x"])
def long_rows_back(
    p_d, p_a, p_out, n0, n1, n2, d0, d1, d2, d3, a0, a1, a2, a3, x,
    KIND: tl.constexpr, D_VEC: tl.constexpr, A_VEC: tl.constexpr, BIG: tl.constexpr, COLS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The same for one row a program, of any length."""
    take_turn(PDL)
    i_row = tl.program_id(0)
    if BIG:
        i_row = i_row.to(tl.int64)
    p_ds = p_d + row_offset(i_row, n1, n2, d1, d2, d3, D_VEC)
    p_as = p_a + row_offset(i_row, n1, n2, a1, a2, a3, A_VEC)
    along = tl.zeros([COLS], tl.float32)
    squares = tl.zeros([COLS], tl.float32)
    for start in range(0, n0, COLS):
        i_col = start + tl.arange(0, COLS)
        if BIG:
            i_col = i_col.to(tl.int64)
        d = tl.load(p_ds + i_col * d0, mask=i_col < n0, other=0.0)
        a = tl.load(p_as + i_col * a0, mask=i_col < n0, other=0.0)
        along += d * a
        squares += a * a
    first, second = _factors(tl.sum(along, 0), tl.sum(squares, 0), n0, x, KIND)
    for start in range(0, n0, COLS):
        i_col = start + tl.arange(0, COLS)
        if BIG:
            i_col = i_col.to(tl.int64)
        d = tl.load(p_ds + i_col * d0, mask=i_col < n0, other=0.0)
        a = tl.load(p_as + i_col * a0, mask=i_col < n0, other=0.0)
        tl.store(p_out + i_row * n0 + i_col, _result(d, a, first, second, KIND), mask=i_col < n0)


def lower_rows_back(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """RMS_NORM_BACK, SOFT_MAX_BACK."""
    (node,) = nodes
    d, a = (Operand.of(ctx.view(t)) for t in node.sources())
    layout = Layout.of(node.ne, [d, a], keep_rows=True)
    n0, n1, n2, _ = layout.ne
    (d0, d1, d2, d3), (a0, a1, a2, a3) = layout.strides
    args: dict[str, Any] = {
        "p_d": d.data, "p_a": a.data, "p_out": ctx.view(node).data, "n0": n0, "n1": n1, "n2": n2, "d0": d0, "d1": d1,
        "d2": d2, "d3": d3, "a0": a0, "a1": a1, "a2": a2, "a3": a3,
        "x": node.params.eps if node.op == "RMS_NORM_BACK" else node.params.scale, "KIND": node.op,
        "D_VEC": layout.vec(0), "A_VEC": layout.vec(1), "BIG": layout.big, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    if n0 > MAX_ROW:
        return [Launch(long_rows_back, (layout.n_rows,), args | {"COLS": LONG_BLOCK}, launch_options(ctx.target, 16))]
    rows, cols = rows_a_program(n0, layout.n_rows, ctx.target.sm_count), triton.next_power_of_2(n0)
    args |= {"n_rows": layout.n_rows, "D_UNIT": d0 == 1, "A_UNIT": a0 == 1, "ROWS": rows, "COLS": cols}
    programs = triton.cdiv(layout.n_rows, rows)
    return [Launch(rows_back, (programs,), args, launch_options(ctx.target, warps_for(rows * cols)))]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = dict.fromkeys(
    ("RMS_NORM_BACK", "SOFT_MAX_BACK"), lower_rows_back
)
