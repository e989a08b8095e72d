# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""NORM, RMS_NORM, L2_NORM and SUM_ROWS over ne[0]; RMS_NORM with the weights, and a residual, that follow it.

A row is held in registers, several short ones by one program; what is longer is read again for each pass over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import PLAIN_TYPES, Context, Step
from graphrt.backends.triton.kernels.common.bits import stored_as
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.common.reduce import over_rms
from graphrt.backends.triton.kernels.elementwise import (
    Dims,
    Layout,
    Operand,
    elementwise_launch,
    row_offset,
)
from graphrt.backends.triton.kernels.norm_fusions import ScaledNorm
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.fusion import added_to
from graphrt.tensor import Tensor

#: Elements of the longest row that is held in registers, and what a pass over a longer one takes at a time.
MAX_ROW, LONG_BLOCK = 16384, 8192
#: Elements that one program has of short rows.
SHORT_BLOCK = 1024


@triton.jit
def _factor(total, n0, eps, KIND: tl.constexpr):
    """What a row is multiplied with. total: the sum of its squares, f32 of any shape."""
    if KIND == "L2_NORM":
        root = tl.maximum(tl.sqrt_rn(total), eps, propagate_nan=tl.PropagateNan.ALL)
        return tl.div_rn(tl.full([], 1.0, tl.float32), root)
    else:
        return over_rms(total, n0, eps)


@accesses(reads="p_x p_weight p_residual", writes="p_out", early_if={"EARLY": "p_weight"})
@triton.jit(do_not_specialize=["n_rows", "n1", "n2", "x0", "x1", "x2", "x3", "r0", "r1", "r2", "r3", "eps"])
def norm_rows(
    p_x, p_weight, p_residual, p_out, n_rows, n0, n1, n2, x0, x1, x2, x3, r0, r1, r2, r3, eps,
    KIND: tl.constexpr, X_UNIT: tl.constexpr, R_UNIT: tl.constexpr, X_VEC: tl.constexpr, R_VEC: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EARLY: tl.constexpr, BIG: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = norm(x[row]) * weight + residual[row] for ROWS rows of n0 <= COLS elements; SUM_ROWS: out[row] = sum.

    Row numbers run over dimensions 1 to 3 (n1, n2); x0 to r3: strides in elements, x0 and r0 being 1 with X_UNIT and
    R_UNIT; X_VEC, R_VEC: what divides the others. weight: n0 f32, read before what other kernels wrote if EARLY. BIG:
    offsets need 64 bits.
    """
    pid = tl.program_id(0)
    if BIG:
        pid = pid.to(tl.int64)
    i_row = pid * ROWS + tl.arange(0, ROWS)
    i_col = tl.arange(0, COLS)[None, :]
    m_row = i_row < n_rows
    m_load = m_row[:, None] & (i_col < n0)
    if HAS_WEIGHT and EARLY:
        weight = tl.load(p_weight + i_col, mask=i_col < n0, other=0.0)
    take_turn(PDL)
    p_xs = p_x + row_offset(i_row, n1, n2, x1, x2, x3, X_VEC)[:, None]
    if X_UNIT:
        x = tl.load(p_xs + i_col, mask=m_load, other=0.0)
    else:
        x = tl.load(p_xs + i_col.to(i_row.dtype) * x0, mask=m_load, other=0.0)
    if HAS_RESIDUAL:  # asked for before the sums are there, so that there is one wait for memory and not two
        p_rs = p_residual + row_offset(i_row, n1, n2, r1, r2, r3, R_VEC)[:, None]
        if R_UNIT:
            residual = tl.load(p_rs + i_col, mask=m_load, other=0.0).to(tl.float32)
        else:
            residual = tl.load(p_rs + i_col.to(i_row.dtype) * r0, mask=m_load, other=0.0).to(tl.float32)
    if HAS_WEIGHT and not EARLY:
        weight = tl.load(p_weight + i_col, mask=i_col < n0, other=0.0)
    if KIND == "SUM_ROWS":
        tl.store(p_out + i_row, tl.sum(x, 1), mask=m_row)
    else:
        if KIND == "NORM":
            x = tl.where(m_load, x - (tl.sum(x, 1) / n0)[:, None], 0.0)
        out = x * _factor(tl.sum(x * x, 1), n0, eps, KIND)[:, None]
        if HAS_WEIGHT:
            out = out * weight
        if HAS_RESIDUAL:
            out = out + residual
        out = stored_as(out, p_out.dtype.element_ty)
        tl.store(p_out + (i_row * n0)[:, None] + i_col, out, mask=m_load)


@triton.jit
def _sum_over(p_x, x0, n0, mean, SQUARES: tl.constexpr, BIG: tl.constexpr, COLS: tl.constexpr):
    """The sum of a row's elements less `mean`, or of the squares of that."""
    total = tl.zeros([COLS], tl.float32)
    for start in range(0, n0, COLS):
        i_col = start + tl.arange(0, COLS)
        if BIG:
            i_col = i_col.to(tl.int64)
        x = tl.load(p_x + i_col * x0, mask=i_col < n0, other=0.0)
        d = tl.where(i_col < n0, x - mean, 0.0)
        total += d * d if SQUARES else d
    return tl.sum(total, 0)


@accesses(reads="p_x p_weight p_residual", writes="p_out")
@triton.jit(do_not_specialize=["n1", "n2", "x1", "x2", "x3", "r1", "r2", "r3", "eps"])
def norm_long_rows(
    p_x, p_weight, p_residual, p_out, n0, n1, n2, x0, x1, x2, x3, r0, r1, r2, r3, eps,
    KIND: tl.constexpr, X_VEC: tl.constexpr, R_VEC: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BIG: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for one row a program, of any length."""
    take_turn(PDL)
    i_row = tl.program_id(0)
    if BIG:
        i_row = i_row.to(tl.int64)
    p_row = p_x + row_offset(i_row, n1, n2, x1, x2, x3, X_VEC)
    if KIND == "SUM_ROWS":
        tl.store(p_out + i_row, _sum_over(p_row, x0, n0, 0.0, False, BIG, COLS))
    else:
        mean = 0.0
        if KIND == "NORM":
            mean = _sum_over(p_row, x0, n0, 0.0, False, BIG, COLS) / n0
        factor = _factor(_sum_over(p_row, x0, n0, mean, True, BIG, COLS), n0, eps, KIND)
        p_res = p_residual + row_offset(i_row, n1, n2, r1, r2, r3, R_VEC)
        for start in range(0, n0, COLS):
            i_col = start + tl.arange(0, COLS)
            if BIG:
                i_col = i_col.to(tl.int64)
            m_load = i_col < n0
            out = (tl.load(p_row + i_col * x0, mask=m_load, other=0.0) - mean) * factor
            if HAS_WEIGHT:
                out = out * tl.load(p_weight + i_col, mask=m_load, other=0.0)
            if HAS_RESIDUAL:
                out = out + tl.load(p_res + i_col * r0, mask=m_load, other=0.0).to(tl.float32)
            tl.store(p_out + i_row * n0 + i_col, stored_as(out, p_out.dtype.element_ty), mask=m_load)


def rows_a_program(n0: int, n_rows: int, sm_count: int) -> int:
    """How many short rows one program has: no more than spread over the whole GPU."""
    share = triton.next_power_of_2(triton.cdiv(n_rows, sm_count))
    return max(1, min(SHORT_BLOCK // int(triton.next_power_of_2(n0)), int(share)))


def warps_for(elements: int) -> int:
    """Warps of a program that holds so many elements in registers: 8 a thread, more where there are 16 warps."""
    return max(1, min(16, elements // 256))


def norm_launch(
    kind: str,
    eps: float,
    ne: Dims,
    x: Operand,
    out: torch.Tensor,
    ctx: Context,
    weight: torch.Tensor | None = None,
    residual: Operand | None = None,
    early: bool = False,
) -> Launch:
    """out = norm(x) * weight + residual, x being f32 [ne]. kind: the op's name.

    out: flat, without gaps, f32 where there is no residual; may be x's memory. weight: ne[0] f32, early: no kernel
    writes it; residual: of x's size, repeated elements have strides of 0.
    """
    layout = Layout.of(ne, [x] if residual is None else [x, residual], keep_rows=True)
    assert not layout.repeats
    n0, n1, n2, _ = layout.ne
    (x0, x1, x2, x3), (r0, r1, r2, r3) = layout.strides[0], layout.strides[-1]
    args: dict[str, Any] = {
        "p_x": x.data, "p_weight": x.data if weight is None else weight,
        "p_residual": x.data if residual is None else residual.data, "p_out": out,
        "n0": n0, "n1": n1, "n2": n2, "x0": x0, "x1": x1, "x2": x2, "x3": x3, "r0": r0, "r1": r1, "r2": r2, "r3": r3,
        "eps": eps, "KIND": kind, "HAS_WEIGHT": weight is not None, "HAS_RESIDUAL": residual is not None,
        "X_VEC": layout.vec(0), "R_VEC": layout.vec(-1), "BIG": layout.big, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    if n0 > MAX_ROW:
        args |= {"COLS": LONG_BLOCK}
        return Launch(norm_long_rows, (layout.n_rows,), args, launch_options(ctx.target, 16))
    rows, cols = rows_a_program(n0, layout.n_rows, ctx.target.sm_count), triton.next_power_of_2(n0)
    args |= {
        "n_rows": layout.n_rows, "X_UNIT": x0 == 1, "R_UNIT": r0 == 1, "EARLY": early,
        "ROWS": rows, "COLS": cols,
    }  # fmt: skip
    programs = triton.cdiv(layout.n_rows, rows)
    return Launch(norm_rows, (programs,), args, launch_options(ctx.target, warps_for(rows * cols)))


def lower_norm(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """NORM, RMS_NORM, L2_NORM, SUM_ROWS."""
    node = nodes[0]
    source = node["a"]
    eps = 0.0 if node.params is None else node.params.eps
    x = Operand.of(ctx.view(source))
    return [norm_launch(node.op, eps, source.ne, x, ctx.view(node).data, ctx)]


def _is_row(t: Tensor, n: int) -> bool:
    return t.dtype.name == "f32" and t.ne == (n, 1, 1, 1) and (n == 1 or t.nb[0] == t.dtype.type_size)


def lower_scaled_norm(found: ScaledNorm, ctx: Context) -> list[Step]:
    """A norm, MUL, and ADD if there is one: one launch where MUL's other source is a row. Only the last is stored."""
    norm, mul, add = found
    source, weight = norm["a"], added_to(norm, mul)
    residual = None if add is None else added_to(mul, add)
    x = Operand.of(ctx.view(source))
    out = ctx.view(mul if add is None else add).data
    if not _is_row(weight, source.ne[0]) or mul.ne != norm.ne:
        return _lower_apart(norm, mul, add, ctx)
    early, row = ctx.is_constant(weight), ctx.view(weight).data
    kind, eps = norm.op, norm.params.eps
    if residual is None:
        return [norm_launch(kind, eps, norm.ne, x, out, ctx, row, early=early)]
    if any(n not in (1, full) for n, full in zip(residual.ne, norm.ne)) or add is None or add.ne != norm.ne:
        return _lower_apart(norm, mul, add, ctx)
    return [norm_launch(kind, eps, norm.ne, x, out, ctx, row, Operand.of(ctx.view(residual)), early)]


def _lower_apart(norm: Tensor, mul: Tensor, add: Tensor | None, ctx: Context) -> list[Step]:
    """The same as a launch a node, for what a row of weights is not, with scratch between them."""
    done: dict[Tensor, Operand] = {}
    between = ctx.scratch((norm.n_elements,), torch.float32)
    done[norm] = Operand(between, norm.ne, _contiguous(norm.ne))
    steps: list[Step] = [norm_launch(norm.op, norm.params.eps, norm.ne, Operand.of(ctx.view(norm["a"])), between, ctx)]
    for node in (mul, add):
        if node is None:
            continue
        last = node is (mul if add is None else add)
        out = ctx.view(node).data if last else ctx.scratch((node.n_elements,), PLAIN_TYPES[node.dtype.name])
        a, b = (done[t] if t in done else Operand.of(ctx.view(t)) for t in node.sources())
        steps.append(elementwise_launch(node.op, node.ne, a, b, out, ctx.target))
        done[node] = Operand(out, node.ne, _contiguous(node.ne))
    return steps


def _contiguous(ne: Dims) -> Dims:
    return 1, ne[0], ne[0] * ne[1], ne[0] * ne[1] * ne[2]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = dict.fromkeys(
    ("NORM", "RMS_NORM", "L2_NORM", "SUM_ROWS"), lower_norm
)
