# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""SOFT_MAX over ne[0]. Rows that fit are held in registers; longer ones are read twice, for sum and result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import Call, accesses
from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.common.activation import exp_f32
from graphrt.backends.triton.kernels.common.constants import NEG_INF
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.elementwise import MAX_OFFSET, row_offset
from graphrt.backends.triton.kernels.norm import MAX_ROW, rows_a_program, warps_for
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

#: What a pass over a long row takes at a time.
LONG_BLOCK = 4096


@triton.jit
def _mask_offset(i_row, n1, n2, m1, m2, m3, heads, sequences, VEC: tl.constexpr):
    """Where the mask's rows of the source's rows start. m1 to m3: multiples of VEC."""
    outer = i_row // n1
    at = (i_row % n1) * m1 + ((outer % n2) % heads) * m2 + ((outer // n2) % sequences) * m3
    return tl.multiple_of(at, VEC)


@triton.jit
def _below(top):
    """What logits are reduced by: their largest, or 0 where all are -inf."""
    return tl.where(top == NEG_INF, 0.0, top)


@triton.jit
def _inverse(total):
    """1 / total, 0 for the total of a row of -inf."""
    none = total == 0.0
    return tl.where(none, 0.0, tl.div_rn(tl.full([], 1.0, tl.float32), tl.where(none, 1.0, total)))


@accesses(reads="p_x p_mask p_slopes p_sinks", writes="p_out")
@triton.jit(
    do_not_specialize=[
        "n_rows", "n1", "n2", "x0", "x1", "x2", "x3", "m0", "m1", "m2", "m3", "heads", "sequences", "s_sinks", "scale",
    ]
)  # fmt: skip
def soft_max_rows(
    p_x, p_mask, p_slopes, p_sinks, p_out, n_rows, n0, n1, n2, x0, x1, x2, x3, m0, m1, m2, m3, heads, sequences,
    s_sinks, scale,
    X_UNIT: tl.constexpr, M_UNIT: tl.constexpr, X_VEC: tl.constexpr, M_VEC: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, BIG: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of n0 <= COLS elements a program. n1, n2: queries and heads, dimensions 1 and 2 of x and out.

    x0 to m3: strides of x and the mask in elements, x0 and m0 being 1 with X_UNIT and M_UNIT; X_VEC, M_VEC: what
    divides the others; heads, sequences: dimensions 2 and 3 of the mask, which repeat. p_slopes, p_sinks: f32 a head,
    sinks s_sinks apart. BIG: offsets need 64 bits.
    """
    take_turn(PDL)
    pid = tl.program_id(0)
    if BIG:
        pid = pid.to(tl.int64)
    i_row = pid * ROWS + tl.arange(0, ROWS)
    i_col = tl.arange(0, COLS)[None, :]
    m_row = i_row < n_rows
    m_load = m_row[:, None] & (i_col < n0)
    p_xs = p_x + row_offset(i_row, n1, n2, x1, x2, x3, X_VEC)[:, None]
    if X_UNIT:
        x = tl.load(p_xs + i_col, mask=m_load, other=NEG_INF)
    else:
        x = tl.load(p_xs + i_col.to(i_row.dtype) * x0, mask=m_load, other=NEG_INF)
    i_head = (i_row // n1) % n2
    x = x * scale
    if HAS_MASK:
        at = _mask_offset(i_row, n1, n2, m1, m2, m3, heads, sequences, M_VEC)[:, None]
        if M_UNIT:
            mask = tl.load(p_mask + at + i_col, mask=m_load, other=0.0).to(tl.float32)
        else:
            mask = tl.load(p_mask + at + i_col.to(i_row.dtype) * m0, mask=m_load, other=0.0).to(tl.float32)
        if HAS_SLOPES:
            mask = mask * tl.load(p_slopes + i_head, mask=m_row, other=0.0)[:, None]
        x = x + mask
    x = tl.where(m_load, x, NEG_INF)
    top = tl.max(x, 1)
    if HAS_SINKS:
        sink = tl.load(p_sinks + i_head * s_sinks, mask=m_row, other=NEG_INF)
        top = tl.maximum(top, sink)
    top = _below(top)
    e = exp_f32(x - top[:, None])  # exactly 0 of -inf
    total = tl.sum(e, 1)
    if HAS_SINKS:
        total += exp_f32(sink - top)
    tl.store(p_out + (i_row * n0)[:, None] + i_col, e * _inverse(total)[:, None], mask=m_load)


@triton.jit
def _logits(
    p_x, p_mask, i_col, n0, x0, m0, scale, slope, HAS_MASK: tl.constexpr, HAS_SLOPES: tl.constexpr
):  # fmt: skip
    """Logits of a block of a row, -inf past its end."""
    m_load = i_col < n0
    x = tl.load(p_x + i_col * x0, mask=m_load, other=0.0) * scale
    if HAS_MASK:
        mask = tl.load(p_mask + i_col * m0, mask=m_load, other=0.0).to(tl.float32)
        if HAS_SLOPES:
            mask = mask * slope
        x = x + mask
    return tl.where(m_load, x, NEG_INF)


@accesses(reads="p_x p_mask p_slopes p_sinks", writes="p_out")
@triton.jit(
    do_not_specialize=["n1", "n2", "x1", "x2", "x3", "m1", "m2", "m3", "heads", "sequences", "s_sinks", "scale"]
)
def soft_max_long_rows(
    p_x, p_mask, p_slopes, p_sinks, p_out, n0, n1, n2, x0, x1, x2, x3, m0, m1, m2, m3, heads, sequences, s_sinks,
    scale, X_VEC: tl.constexpr, M_VEC: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr, BIG: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for one row a program, of any length: each lane keeps the top and the sum of what it has seen."""
    take_turn(PDL)
    i_row = tl.program_id(0)
    if BIG:
        i_row = i_row.to(tl.int64)
    p_row = p_x + row_offset(i_row, n1, n2, x1, x2, x3, X_VEC)
    p_hide = p_mask
    if HAS_MASK:
        p_hide = p_mask + _mask_offset(i_row, n1, n2, m1, m2, m3, heads, sequences, M_VEC)
    i_head = (i_row // n1) % n2
    slope = 1.0
    if HAS_SLOPES:
        slope = tl.load(p_slopes + i_head)
    tops = tl.full([COLS], NEG_INF, tl.float32)
    sums = tl.zeros([COLS], tl.float32)
    for start in range(0, n0, COLS):
        i_col = start + tl.arange(0, COLS)
        if BIG:
            i_col = i_col.to(tl.int64)
        x = _logits(p_row, p_hide, i_col, n0, x0, m0, scale, slope, HAS_MASK, HAS_SLOPES)
        new = tl.maximum(tops, x, propagate_nan=tl.PropagateNan.ALL)
        sums = sums * exp_f32(tops - _below(new)) + exp_f32(x - _below(new))
        tops = new
    top = tl.max(tops, 0)
    if HAS_SINKS:
        sink = tl.load(p_sinks + i_head * s_sinks)
        top = tl.maximum(top, sink)
    top = _below(top)
    total = tl.sum(sums * exp_f32(tops - top), 0)
    if HAS_SINKS:
        total += exp_f32(sink - top)
    inverse = _inverse(total)
    for start in range(0, n0, COLS):
        i_col = start + tl.arange(0, COLS)
        if BIG:
            i_col = i_col.to(tl.int64)
        x = _logits(p_row, p_hide, i_col, n0, x0, m0, scale, slope, HAS_MASK, HAS_SLOPES)
        tl.store(p_out + i_row * n0 + i_col, exp_f32(x - top) * inverse, mask=i_col < n0)


def _vec(ne: Sequence[int], strides: Sequence[int]) -> int:
    """As Layout.vec(), of dimensions 1 to 3."""
    return 16 if all(n == 1 or s % 16 == 0 for n, s in zip(ne, strides)) else 1


def _reach(view: View) -> int:
    return sum((n - 1) * s for n, s in zip(view.ne, view.strides))


def _sinks(view: View, ctx: Context) -> tuple[torch.Tensor, int, list[Step]]:
    """Sinks as a flat tensor, their stride, and what copies them together where they have none."""
    long = [(n, s) for n, s in zip(view.ne, view.strides) if n > 1]
    if len(long) < 2:
        return view.data, long[0][1] if long else 1, []
    flat = ctx.scratch((view.tensor.n_elements,), torch.float32)
    target, source = flat.view(view.ne[::-1]), view.torch()

    return flat, 1, [Call("copy", partial(target.copy_, source), [source], [flat], helper=True)]


def lower_soft_max(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    node = nodes[0]
    t_mask, t_sinks = node["mask"], node["sinks"]
    x, out = ctx.view(node["a"]), ctx.view(node).data
    mask = None if t_mask is None else ctx.view(t_mask)
    sinks, s_sinks, steps = (x.data, 1, []) if t_sinks is None else _sinks(ctx.view(t_sinks), ctx)
    n0, n1, n2, n3 = node.ne
    bias = node.params.max_bias
    slopes = x.data
    if bias > 0.0:
        slopes = torch.tensor(alibi_slopes(n2, bias), dtype=torch.float32, device=ctx.target.device)
    (x0, x1, x2, x3), (m0, m1, m2, m3) = x.strides, x.strides if mask is None else mask.strides
    reach = max(_reach(x), 0 if mask is None else _reach(mask), node.n_elements)
    args: dict[str, Any] = {
        "p_x": x.data, "p_mask": x.data if mask is None else mask.data, "p_slopes": slopes, "p_sinks": sinks,
        "p_out": out, "n0": n0, "n1": n1, "n2": n2, "x0": x0, "x1": x1, "x2": x2, "x3": x3, "m0": m0, "m1": m1,
        "m2": m2, "m3": m3, "heads": 1 if mask is None else mask.ne[2], "sequences": 1 if mask is None else mask.ne[3],
        "s_sinks": s_sinks, "scale": node.params.scale, "HAS_MASK": mask is not None, "HAS_SLOPES": bias > 0.0,
        "HAS_SINKS": t_sinks is not None, "BIG": reach > MAX_OFFSET, "PDL": ctx.target.has_pdl,
        "X_VEC": _vec(x.ne[1:], x.strides[1:]),
        "M_VEC": 1 if mask is None else _vec(mask.ne[1:], mask.strides[1:]),
    }  # fmt: skip
    n_rows = n1 * n2 * n3
    if n0 > MAX_ROW:
        args |= {"COLS": LONG_BLOCK}
        return [*steps, Launch(soft_max_long_rows, (n_rows,), args, launch_options(ctx.target, 16))]
    rows, cols = rows_a_program(n0, n_rows, ctx.target.sm_count), triton.next_power_of_2(n0)
    args |= {
        "n_rows": n_rows, "X_UNIT": x0 == 1, "M_UNIT": m0 == 1, "ROWS": rows, "COLS": cols,
    }  # fmt: skip
    options = launch_options(ctx.target, warps_for(rows * cols))
    return [*steps, Launch(soft_max_rows, (triton.cdiv(n_rows, rows),), args, options)]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {"SOFT_MAX": lower_soft_max}
