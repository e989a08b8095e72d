"""Products of many tokens, the plain way: weights as an f16 matrix in scratch, then the vendor's own product.

A matrix is dequantized anew in each run: of many tokens that is a small part, and the memory of one matrix serves all.
Several matrices, each with tokens of its own, are dequantized and multiplied together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from graphrt.backends.triton.accesses import Call
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.dequantize import dequantize
from graphrt.backends.triton.packing import Packed

#: Bytes of dequantized weights at a time; larger matrices are multiplied in slices of rows, more of them in turns.
SCRATCH = 256 << 20
#: Slices end at multiples of so many rows, whole tiles of a product: where they don't, results of all slices but the
#: first lie at addresses that no wide store takes, and the vendor falls back on kernels for such.
WHOLE = 256


def multiply(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """out = x w^T with sums in f32. x: [n, k], w: [m, k], both f16, bf16 or f32; out: f32 [n, m]."""
    if x.dtype is torch.float32:
        torch.mm(x, w.t(), out=out)
    elif x.is_cuda and torch.version.cuda:
        torch.mm(x, w.t(), torch.float32, out=out)
    else:  # a product of f16 into f32 is CUDA's alone
        torch.mm(x.float(), w.t().float(), out=out)


def multiply_each(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """multiply() of x [count, n, k] and w [count, m, k], matrix by matrix, to out [count, n, m].

    Matrices and rows of x and out may lie anywhere, so that a token's results for all matrices can be side by side.
    """
    w = w.transpose(1, 2)
    if x.dtype is torch.float32:
        torch.bmm(x, w, out=out)
    elif x.is_cuda and torch.version.cuda:
        torch.bmm(x, w, torch.float32, out=out)
    else:
        torch.bmm(x.float(), w.float(), out=out)


def multiply_as(kind: torch.dtype, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """The same with w of another type, made `kind` first."""
    multiply(x, w.to(kind), out)


def multiply_as_step(kind: torch.dtype, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> Step:
    return Call("multiply_as", partial(multiply_as, kind, x, w, out), [x, w], [out])


def multiply_step(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> Step:
    return Call("multiply", partial(multiply, x, w, out), [x, w], [out])


def packed_steps(packed: Packed, first: int, m: int, x: torch.Tensor, out: torch.Tensor, ctx: Context) -> list[Step]:
    """Rows first to first + m - 1 of a packed matrix times x, f16 [n, k], to out, f32 [n, m]."""
    steps: list[Step] = []
    for a, b in slices(m, packed.k):
        w = scratch(b - a, packed.k, ctx)
        steps += [dequantize(packed.part(first + a, first + b), w), multiply_step(x, w, out[:, a:b])]
    return steps


def packed_each_steps(packed: Packed, m: int, x: torch.Tensor, out: torch.Tensor, ctx: Context) -> list[Step]:
    """Packed matrices of m rows each, one after the other, times x, f16 [count, n, k], to out, f32 [count, n, m]."""
    steps: list[Step] = []
    for matrices, rows in _pieces(x.shape[0], m, packed.k):
        first = matrices.start * m + rows.start
        w = scratch(_size(matrices) * _size(rows), packed.k, ctx)
        steps.append(dequantize(packed.part(first, first + w.shape[0]), w))
        steps.append(_each_step(x, w, out, matrices, rows))
    return steps


def _each_step(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, matrices: slice, rows: slice) -> Step:
    """The product with some rows of some matrices: w [matrices * rows, k]."""
    each = w.view(_size(matrices), _size(rows), -1)
    return multiply_each_step(x[matrices], each, out[matrices, :, rows])


def multiply_each_step(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> Step:
    return Call("multiply_each", partial(multiply_each, x, w, out), [x, w], [out])


def _size(part: slice) -> int:
    return int(part.stop - part.start)


def _pieces(count: int, m: int, k: int) -> Iterator[tuple[slice, slice]]:
    """Which matrices, and which rows of each, are dequantized at a time: some whole ones, or slices of a large one."""
    at_once = SCRATCH // (2 * k * m)
    if at_once:
        yield from ((slice(i, min(i + at_once, count)), slice(0, m)) for i in range(0, count, at_once))
    else:
        yield from ((slice(i, i + 1), slice(a, b)) for i in range(count) for a, b in slices(m, k))


def slices(m: int, k: int) -> Iterator[tuple[int, int]]:
    """Which of m rows of k elements are dequantized at a time: the first and the end of each slice, which are as equal
    as whole tiles let them be."""
    most = max(1, SCRATCH // (2 * k))
    equal = -(-m // -(-m // most))
    step = min(-(-equal // WHOLE) * WHOLE, most - most % WHOLE or most)
    for first in range(0, m, step):
        yield first, min(first + step, m)


def scratch(rows: int, k: int, ctx: Context) -> torch.Tensor:
    """f16 [rows, k], the same memory for all products of a split."""
    nbytes = 2 * rows * k
    return ctx.shared_scratch("weights in f16", nbytes)[:nbytes].view(torch.float16).view(rows, k)
