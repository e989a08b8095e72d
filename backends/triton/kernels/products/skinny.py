"""Products of two f32 matrices one side of which is short, as adapters' and their gradients' are, on tensor cores.

What is long is read once and bounds the time; the vendor's product of f32 takes no tensor cores, and two to three times
as long. An element is the sum of two numbers that tensor cores take, of 11 bits each, and a product the sum of three of
theirs (tf32x3): as exact as f32's to the last bit or two. Sums over a long side are divided among programs and added up
in one order by `finish`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.products.adapters import n_parts
from graphrt.backends.triton.kernels.products.fusions import MAX_SHORT
from graphrt.backends.triton.kernels.products.half import Sums, finish_steps, memory_of
from graphrt.backends.triton.launch import Launch, launch_options

#: Rows of a program; elements of a sum that it multiplies at a time; columns at most, where the sums are short.
_ROWS, _DEPTH, _COLUMNS = 64, 64, 128


@accesses(reads="p_x p_w p_y", writes="p_out")
@triton.jit
def skinny(
    p_x, p_w, p_y, p_out, n_rows, n_cols, k, depth, x_row, x_k, w_k, w_col, out_part, out_row, out_col,
    HAS_Y: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[i, row, col] = y[row, col] + the sum over elements [i * depth, (i + 1) * depth) of x[row, e] w[e, col].

    All are f32 of any strides, y has out's, and may be out. Program (a, b, i): ROWS rows and COLS columns of part i.
    """
    take_turn(PDL)
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    first = tl.program_id(2) * depth
    last = tl.minimum(first + depth, k)
    in_rows, in_cols = rows < n_rows, cols < n_cols
    p_x += rows.to(tl.int64)[:, None] * x_row
    p_w += cols.to(tl.int64)[None, :] * w_col
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(first, last, DEPTH):
        e = start + tl.arange(0, DEPTH)
        wide, there = e.to(tl.int64), e < last
        x = tl.load(p_x + wide[None, :] * x_k, mask=in_rows[:, None] & there[None, :], other=0.0)
        w = tl.load(p_w + wide[:, None] * w_k, mask=there[:, None] & in_cols[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    at = rows.to(tl.int64)[:, None] * out_row + cols.to(tl.int64)[None, :] * out_col
    here = in_rows[:, None] & in_cols[None, :]
    if HAS_Y:
        total += tl.load(p_y + at, mask=here, other=0.0)
    tl.store(p_out + tl.program_id(2).to(tl.int64) * out_part + at, total, mask=here)


def skinny_steps(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, ctx: Context, y: torch.Tensor | None = None
) -> list[Step]:
    """out = x w, and y added if there is one. x: f32 [n, k], w: f32 [k, m], of any strides; out, y: f32 [n, m] without
    gaps, and y may be out; of n, k and m one is short (is_skinny)."""
    whole, given = out, y
    if x.shape[0] <= MAX_SHORT:  # long sides are rows: the same, turned
        x, w, out = w.t(), x.t(), out.t()
        y = None if y is None else y.t()
    (n, k), m = x.shape, w.shape[1]
    cols = min(_COLUMNS, max(16, triton.next_power_of_2(m)))
    tiles = triton.cdiv(n, _ROWS), triton.cdiv(m, cols)
    parts = n_parts(k, tiles[0] * tiles[1])
    step = min(_DEPTH, max(16, triton.next_power_of_2(k)))
    if parts > 1:
        memory = ctx.shared_scratch("parts of skinny sums", 4 * parts * whole.numel())
        sums = memory[: 4 * parts * whole.numel()].view(torch.float32).view(parts, *whole.shape)
    else:
        sums = whole[None]
    args = {
        "p_x": memory_of(x), "p_w": memory_of(w), "p_y": whole if given is None else given, "p_out": sums, "n_rows": n,
        "n_cols": m, "k": k, "depth": triton.cdiv(k, parts * step) * step, "x_row": x.stride(0), "x_k": x.stride(1),
        "w_k": w.stride(0), "w_col": w.stride(1), "out_part": whole.numel(), "out_row": out.stride(0),
        "out_col": out.stride(1), "HAS_Y": y is not None and parts == 1, "ROWS": _ROWS, "COLS": cols, "DEPTH": step,
        "PRECISION": "tf32x3" if ctx.target.is_nvidia else "ieee", "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    launch = Launch(skinny, (*tiles, parts), args, launch_options(ctx.target, 4))
    return [launch, *(finish_steps(Sums(sums), whole, residual=given) if parts > 1 else [])]
