"""What adapters add to products, in two launches for all products of one x: y + b (gates * (a x)).

a x is a matrix of few columns, the adapters' ranks, whose sums are long: `adapter_down` divides each by k among
programs, and `adapter_up` adds these parts up in one order before it multiplies with b. Products are in tf32, whose
range is that of f32, sums in f32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.products.fusions import MAX_ADAPTED, AdaptedOfOne, adapters
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.fusion import Fusion

#: Tokens of a program, elements of x that it multiplies at a time, rows of b, and columns of ranks at most.
_TOKENS, _DEPTH, _ROWS, _RANKS = 16, 128, 64, 32
#: Parts of a sum at most, each of so many elements at least; programs that are wanted.
_MOST_PARTS, _LEAST_DEPTH, _PROGRAMS = 16, 256, 256


@triton.jit
def _down(p_x, p_a, p_sums, n, k, first, last, r, RANK: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
          R: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """sums[t, r] of elements [first, last) of x."""
    t, i_r = tl.program_id(0) * T + tl.arange(0, T), r * R + tl.arange(0, R)
    total = tl.zeros([T, R], tl.float32)
    for start in range(first, last, D):
        d = start + tl.arange(0, D)
        x = tl.load(
            p_x + t.to(tl.int64)[:, None] * k + d[None, :], mask=(t < n)[:, None] & (d < last)[None, :], other=0.0
        )
        a = tl.load(p_a + i_r.to(tl.int64)[:, None] * k + d[None, :], mask=(d < last)[None, :], other=0.0)
        total = tl.dot(x, tl.trans(a), total, input_precision=PRECISION)
    tl.store(p_sums + t.to(tl.int64)[:, None] * RANK + i_r[None, :], total, mask=(t < n)[:, None])


@accesses(reads="p_x p_a0 p_a1 p_a2", writes="p_sums")
@triton.jit
def adapter_down(
    p_x, p_a0, p_a1, p_a2, p_sums, n, k, depth,
    RANK: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, (matrix, r), part) makes parts of T tokens' sums with R of a matrix's rows.

    x: f32 [n, k]; a0 to a2: f32 [RANK, k], of which N count; sums: f32 [N, PARTS, n, RANK], each of `depth`
    elements."""
    take_turn(PDL)
    matrix, r = tl.program_id(1) // (RANK // R), tl.program_id(1) % (RANK // R)
    part = tl.program_id(2)
    first = part * depth
    last = tl.minimum(first + depth, k)
    p_own = p_sums + (matrix * PARTS + part).to(tl.int64) * n * RANK
    if matrix == 0:
        _down(p_x, p_a0, p_own, n, k, first, last, r, RANK, T, D, R, PRECISION)
    if N > 1 and matrix == 1:
        _down(p_x, p_a1, p_own, n, k, first, last, r, RANK, T, D, R, PRECISION)
    if N > 2 and matrix == 2:
        _down(p_x, p_a2, p_own, n, k, first, last, r, RANK, T, D, R, PRECISION)


@triton.jit
def _up(p_sums, p_gates, p_b, p_y, p_out, n, m, i_m, MATRIX: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
        EACH: tl.constexpr, T: tl.constexpr, M: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """out[t, m] = y + b (gates * sums) of one matrix."""
    t, rows = tl.program_id(0) * T + tl.arange(0, T), i_m * M + tl.arange(0, M)
    here, wide = (t < n)[:, None], t.to(tl.int64)[:, None]
    parts = (MATRIX * PARTS + tl.arange(0, PARTS)).to(tl.int64)[:, None, None] * n
    total = tl.zeros([T, M], tl.float32)
    for r in tl.static_range(0, RANK, R):
        i_r = r + tl.arange(0, R)
        sums = tl.load(p_sums + (parts + t[None, :, None]) * RANK + i_r[None, None, :], mask=here[None], other=0.0)
        gates = tl.load(p_gates + wide * (RANK if EACH else 0) + i_r[None, :], mask=here, other=0.0)
        b = tl.load(p_b + rows.to(tl.int64)[:, None] * RANK + i_r[None, :], mask=(rows < m)[:, None], other=0.0)
        total = tl.dot(tl.sum(sums, 0) * gates, tl.trans(b), total, input_precision=PRECISION)
    there = here & (rows < m)[None, :]
    y = tl.load(p_y + wide * m + rows[None, :], mask=there, other=0.0)
    tl.store(p_out + wide * m + rows[None, :], y + total, mask=there)


@accesses(reads="p_sums p_gates p_b0 p_b1 p_b2 p_y0 p_y1 p_y2", writes="p_out0 p_out1 p_out2")
@triton.jit
def adapter_up(
    p_sums, p_gates, p_b0, p_b1, p_b2, p_y0, p_y1, p_y2, p_out0, p_out1, p_out2, n, m0, m1, m2,
    RANK: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    R: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) makes M of the rows of T tokens' results, of the first matrix's, then of the others'.

    sums: as adapter_down leaves them; gates: f32 [n, RANK], or [RANK] for all tokens without EACH; b0 to b2: f32 [m,
    RANK], of which N count; y, out: f32 [n, m], which may be the same memory."""
    take_turn(PDL)
    j, n0, n1 = tl.program_id(1), tl.cdiv(m0, M), tl.cdiv(m1, M)
    if j < n0:
        _up(p_sums, p_gates, p_b0, p_y0, p_out0, n, m0, j, 0, RANK, PARTS, EACH, T, M, R, PRECISION)
    if N > 1 and (j >= n0) & (j < n0 + n1):
        _up(p_sums, p_gates, p_b1, p_y1, p_out1, n, m1, j - n0, 1, RANK, PARTS, EACH, T, M, R, PRECISION)
    if N > 2 and j >= n0 + n1:
        _up(p_sums, p_gates, p_b2, p_y2, p_out2, n, m2, j - n0 - n1, 2, RANK, PARTS, EACH, T, M, R, PRECISION)


def n_parts(k: int, programs: int) -> int:
    """Into how many parts sums of k elements are divided where there are so many programs without: a power of two."""
    parts = 1
    while 2 * parts <= _MOST_PARTS and k >= 2 * parts * _LEAST_DEPTH and programs * parts < _PROGRAMS:
        parts *= 2
    return parts


def lower_adapters(found: AdaptedOfOne, ctx: Context) -> list[Step]:
    """What adapters add to up to three products of one x."""
    parts, first = found.parts, found.parts[0]
    x, gates = first.down["x"], first.scaled["b"]
    (k, n), rank, count = x.ne[:2], first.down.ne[0], len(found.parts)
    ranks = min(_RANKS, rank & -rank)
    tiles = -(-n // _TOKENS)
    divided = n_parts(k, tiles * count * (rank // ranks))
    depth = -(-k // divided // _DEPTH) * _DEPTH
    size = count * divided * n * rank
    sums = ctx.shared_scratch("parts of adapters' sums", 4 * size)[: 4 * size].view(torch.float32)
    shared = {
        "p_sums": sums, "n": n, "RANK": rank, "N": count, "PARTS": divided, "T": _TOKENS, "R": ranks,
        "PRECISION": "tf32" if ctx.target.is_nvidia else "ieee", "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    # where there are fewer, the first one stands for what is not read
    three = [*parts, *[first] * (MAX_ADAPTED - count)]
    down = shared | {"p_x": ctx.view(x).data, "k": k, "depth": depth, "D": _DEPTH}
    up = shared | {"p_gates": ctx.view(gates).data, "EACH": gates.ne == first.down.ne, "M": _ROWS}
    for i, part in enumerate(three):
        down[f"p_a{i}"] = ctx.view(part.down["weights"]).data
        up[f"p_b{i}"], up[f"m{i}"] = ctx.view(part.up["weights"]).data, part.out.ne[0]
        up[f"p_y{i}"], up[f"p_out{i}"] = ctx.view(part.y).data, ctx.view(part.out).data
    rows = sum(-(-part.out.ne[0] // _ROWS) for part in parts)
    options = launch_options(ctx.target, 4)
    return [
        Launch(adapter_down, (tiles, count * (rank // ranks), divided), down, options),
        Launch(adapter_up, (tiles, rows), up, options),
    ]


ADAPTERS = Fusion("adapters", adapters, lower_adapters)
