# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""CROSS_ENTROPY_LOSS and CROSS_ENTROPY_LOSS_BACK. A program has one row of logits, which it reads twice; the rows'
losses are added up by one program, always in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.activation import exp_f32
from graphrt.backends.triton.kernels.common.constants import NEG_INF
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.common.reduce import maximum
from graphrt.backends.triton.kernels.elementwise import Layout, Operand, row_offset
from graphrt.backends.triton.kernels.norm import norm_launch
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.tensor import Tensor

#: Elements of a row that a program takes at a time at most.
_MOST = 4096


@triton.jit
def _below(top):
    """What logits are reduced by: their largest, or 0 where all are -inf."""
    return tl.where(top == NEG_INF, 0.0, top)


@triton.jit
def _block(p_row, i_col, n0, step, BEYOND: tl.constexpr):
    """Elements of a row, BEYOND past its end."""
    return tl.load(p_row + i_col * step, mask=i_col < n0, other=BEYOND)


@triton.jit
def _sums(p_x, p_l, n0, x0, l0, BIG: tl.constexpr, COLS: tl.constexpr):
    """A row's largest logit, the sum of e^(logit - that), and the sum of its labels. Each lane keeps the top and the
    sums of what it has seen."""
    tops = tl.full([COLS], NEG_INF, tl.float32)
    sums = tl.zeros([COLS], tl.float32)
    labels = tl.zeros([COLS], tl.float32)
    for start in range(0, n0, COLS):
        i_col = start + tl.arange(0, COLS)
        if BIG:
            i_col = i_col.to(tl.int64)
        x = _block(p_x, i_col, n0, x0, NEG_INF)
        new = tl.maximum(tops, x, propagate_nan=tl.PropagateNan.ALL)
        sums = sums * exp_f32(tops - _below(new)) + exp_f32(x - _below(new))
        tops = new
        labels += _block(p_l, i_col, n0, l0, 0.0)
    top = maximum(tops, 0)
    total = tl.sum(sums * exp_f32(tops - _below(top)), 0)
    return top, total, tl.sum(labels, 0)


@accesses(reads="p_x p_l", writes="p_out")
@triton.jit(do_not_specialize=["n1", "n2", "x1", "x2", "x3", "l1", "l2", "l3", "n_rows"])
def row_losses(
    p_x, p_l, p_out, n0, n1, n2, x0, x1, x2, x3, l0, l1, l2, l3, n_rows,
    X_VEC: tl.constexpr, L_VEC: tl.constexpr, BIG: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = -sum(labels * ln softmax(logits)) / n_rows of one row a program. x0 to l3: strides of logits and
    labels."""
    take_turn(PDL)
    i_row = tl.program_id(0)
    if BIG:
        i_row = i_row.to(tl.int64)
    p_x += row_offset(i_row, n1, n2, x1, x2, x3, X_VEC)
    p_l += row_offset(i_row, n1, n2, l1, l2, l3, L_VEC)
    top, total, _ = _sums(p_x, p_l, n0, x0, l0, BIG, COLS)
    rest = tl.log(total)
    found = tl.zeros([COLS], tl.float32)
    for start in range(0, n0, COLS):
        i_col = start + tl.arange(0, COLS)
        if BIG:
            i_col = i_col.to(tl.int64)
        part = _block(p_l, i_col, n0, l0, 0.0) * ((_block(p_x, i_col, n0, x0, 0.0) - top) - rest)
        found += tl.where(i_col < n0, part, 0.0)
    tl.store(p_out + i_row, -tl.sum(found, 0) / n_rows)


@accesses(reads="p_d p_x p_l", writes="p_out")
@triton.jit(do_not_specialize=["n1", "n2", "x1", "x2", "x3", "l1", "l2", "l3", "n_rows"])
def loss_back(
    p_d, p_x, p_l, p_out, n0, n1, n2, x0, x1, x2, x3, l0, l1, l2, l3, n_rows,
    X_VEC: tl.constexpr, L_VEC: tl.constexpr, BIG: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = d * (softmax(logits) * sum(labels) - labels) / n_rows of one row a program; out may be the logits."""
    take_turn(PDL)
    i_row = tl.program_id(0)
    if BIG:
        i_row = i_row.to(tl.int64)
    p_x += row_offset(i_row, n1, n2, x1, x2, x3, X_VEC)
    p_l += row_offset(i_row, n1, n2, l1, l2, l3, L_VEC)
    top, total, labels = _sums(p_x, p_l, n0, x0, l0, BIG, COLS)
    share, factor = labels / total, tl.load(p_d) / n_rows
    for start in range(0, n0, COLS):
        i_col = start + tl.arange(0, COLS)
        if BIG:
            i_col = i_col.to(tl.int64)
        e = exp_f32(_block(p_x, i_col, n0, x0, 0.0) - top)
        out = factor * (e * share - _block(p_l, i_col, n0, l0, 0.0))
        tl.store(p_out + i_row * n0 + i_col, out, mask=i_col < n0)


def _row_launch(kernel: Any, node: Tensor, out: torch.Tensor, ctx: Context, given: dict[str, Any]) -> Launch:
    """One program for each row of logits. given: arguments beside those of logits and labels."""
    ne = node["logits"].ne
    x, labels = Operand.of(ctx.view(node["logits"])), Operand.of(ctx.view(node["labels"]))
    layout = Layout.of(ne, [x, labels], keep_rows=True)
    n0, n1, n2, _ = layout.ne
    (x0, x1, x2, x3), (l0, l1, l2, l3) = layout.strides
    cols = min(_MOST, triton.next_power_of_2(n0))
    args = given | {
        "p_x": x.data, "p_l": labels.data, "p_out": out, "n0": n0, "n1": n1, "n2": n2, "x0": x0, "x1": x1, "x2": x2,
        "x3": x3, "l0": l0, "l1": l1, "l2": l2, "l3": l3, "n_rows": ne[1] * ne[2] * ne[3], "X_VEC": layout.vec(0),
        "L_VEC": layout.vec(1), "BIG": layout.big, "COLS": cols, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return Launch(kernel, (layout.n_rows,), args, launch_options(ctx.target, max(1, min(8, cols // 512))))


def lower_loss(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """CROSS_ENTROPY_LOSS: the rows' losses, then their sum."""
    (node,) = nodes
    n_rows = node["logits"].n_rows
    each = ctx.scratch((n_rows,), torch.float32)
    rows = Operand(each, (n_rows, 1, 1, 1), (1, n_rows, n_rows, n_rows))
    total = norm_launch("SUM_ROWS", 0.0, rows.ne, rows, ctx.view(node).data, ctx)
    return [_row_launch(row_losses, node, each, ctx, {}), total]


def lower_loss_back(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """CROSS_ENTROPY_LOSS_BACK."""
    (node,) = nodes
    return [_row_launch(loss_back, node, ctx.view(node).data, ctx, {"p_d": ctx.view(node["d"]).data})]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "CROSS_ENTROPY_LOSS": lower_loss, "CROSS_ENTROPY_LOSS_BACK": lower_loss_back,
}  # fmt: skip
