"""Kernels for products whose adapters are columns more: see trained.py."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.dequantize import group_values
from graphrt.backends.triton.kernels.products.half_kernels import larger, scaling


@accesses(reads="p_x p_a0 p_a1 p_a2", writes="p_sums")
@triton.jit
def ranks_of(
    p_x, p_a0, p_a1, p_a2, p_sums, n, k, depth,
    N: tl.constexpr, RANK: tl.constexpr, T: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums[i, part, t, r] = the sum over elements [part * depth, (part + 1) * depth) of x[t, e] a_i[r, e].

    Program (t, part): T tokens. x: f32 [n, k]; a0 to a2: f32 [RANK, k], of which N count."""
    take_turn(PDL)
    t, r, part = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, RANK), tl.program_id(1)
    first = part * depth
    last = tl.minimum(first + depth, k)
    p_x += t.to(tl.int64)[:, None] * k
    at = r.to(tl.int64)[None, :] * k
    total0 = tl.zeros([T, RANK], tl.float32)
    total1, total2 = total0, total0
    for start in range(first, last, D):
        e = start + tl.arange(0, D)
        there = e < last
        x = tl.load(p_x + e[None, :], mask=(t < n)[:, None] & there[None, :], other=0.0)
        a0 = tl.load(p_a0 + at + e[:, None], mask=there[:, None], other=0.0)
        total0 = tl.dot(x, a0, total0, input_precision=PRECISION)
        if N > 1:
            a1 = tl.load(p_a1 + at + e[:, None], mask=there[:, None], other=0.0)
            total1 = tl.dot(x, a1, total1, input_precision=PRECISION)
        if N > 2:
            a2 = tl.load(p_a2 + at + e[:, None], mask=there[:, None], other=0.0)
            total2 = tl.dot(x, a2, total2, input_precision=PRECISION)
    size = tl.num_programs(1).to(tl.int64) * n * RANK
    p_sums += (part.to(tl.int64) * n + t.to(tl.int64)[:, None]) * RANK + r[None, :]
    here = (t < n)[:, None]
    tl.store(p_sums, total0, mask=here)
    if N > 1:
        tl.store(p_sums + size, total1, mask=here)
    if N > 2:
        tl.store(p_sums + 2 * size, total2, mask=here)


@triton.jit
def _ranks(p_sums, p_u, row, i, n, scale, PARTS: tl.constexpr, RANK: tl.constexpr):
    """The parts of a row's sums with adapter i added up in order, scaled, and stored."""
    r = tl.arange(0, RANK)
    total = tl.zeros([RANK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(p_sums + (row + (i * PARTS + part) * n.to(tl.int64)) * RANK + r)
    total *= scale
    tl.store(p_u + row * RANK + r, total)
    return total


@triton.jit
def _most(x, most):
    return larger(tl.max(larger(tl.abs(x), tl.zeros_like(x)), 0), most)


@accesses(reads="p_x p_sums", writes="p_u0 p_u1 p_u2 p_out p_factors")
@triton.jit
def round_with_ranks(
    p_x, p_sums, p_u0, p_u1, p_u2, p_out, p_factors, n, k, pitch, scale,
    N: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): out = [x, u0, u1, u2] of a row in f16, rows `pitch` apart, and its factor.

    u_i: `scale` times ranks_of()'s sums, f32 [n, RANK], which are stored too; of them N count. x: f32 [n, k]."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    e, r = tl.arange(0, BLOCK), tl.arange(0, RANK)
    x = tl.load(p_x + row * k + e, mask=e < k, other=0.0)
    u0 = _ranks(p_sums, p_u0, row, 0, n, scale, PARTS, RANK)
    most = _most(u0, _most(x, 0.0))
    if N > 1:
        u1 = _ranks(p_sums, p_u1, row, 1, n, scale, PARTS, RANK)
        most = _most(u1, most)
    if N > 2:
        u2 = _ranks(p_sums, p_u2, row, 2, n, scale, PARTS, RANK)
        most = _most(u2, most)
    by, factor = scaling(most)
    p_out += row * pitch
    tl.store(p_out + e, (x * by).to(tl.float16), mask=e < k)
    tl.store(p_out + k + r, (u0 * by).to(tl.float16))
    if N > 1:
        tl.store(p_out + k + RANK + r, (u1 * by).to(tl.float16))
    if N > 2:
        tl.store(p_out + k + 2 * RANK + r, (u2 * by).to(tl.float16))
    tl.store(p_factors + row, factor)


@accesses(reads="p_d0 p_d1 p_d2 p_v0 p_v1 p_v2", writes="p_out p_factors")
@triton.jit
def round_several(
    p_d0, p_d1, p_d2, p_v0, p_v1, p_v2, p_out, p_factors, row0, row1, row2, m0, m1, m2, pitch,
    N: tl.constexpr, N_RANKS: tl.constexpr, RANK: tl.constexpr, BLOCK0: tl.constexpr, BLOCK1: tl.constexpr,
    BLOCK2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): out = [d0, d1, d2, v0, v1, v2] of a row in f16, rows `pitch` apart, and what its products are
    multiplied by.

    d_i: f32 [n, m_i], rows row_i apart, of which N count; v_i: f32 [n, RANK], of which N_RANKS count."""
    take_turn(PDL)
    row, r = tl.program_id(0).to(tl.int64), tl.arange(0, RANK)
    e0, e1, e2 = tl.arange(0, BLOCK0), tl.arange(0, BLOCK1), tl.arange(0, BLOCK2)
    d0 = tl.load(p_d0 + row * row0 + e0, mask=e0 < m0, other=0.0)
    v0 = tl.load(p_v0 + row * RANK + r)
    most = _most(v0, _most(d0, 0.0))
    if N > 1:
        d1 = tl.load(p_d1 + row * row1 + e1, mask=e1 < m1, other=0.0)
        most = _most(d1, most)
    if N > 2:
        d2 = tl.load(p_d2 + row * row2 + e2, mask=e2 < m2, other=0.0)
        most = _most(d2, most)
    if N_RANKS > 1:
        v1 = tl.load(p_v1 + row * RANK + r)
        most = _most(v1, most)
    if N_RANKS > 2:
        v2 = tl.load(p_v2 + row * RANK + r)
        most = _most(v2, most)
    by, factor = scaling(most)
    p_out += row * pitch
    tl.store(p_out + e0, (d0 * by).to(tl.float16), mask=e0 < m0)
    p_out += m0
    if N > 1:
        tl.store(p_out + e1, (d1 * by).to(tl.float16), mask=e1 < m1)
        p_out += m1
    if N > 2:
        tl.store(p_out + e2, (d2 * by).to(tl.float16), mask=e2 < m2)
        p_out += m2
    tl.store(p_out + r, (v0 * by).to(tl.float16))
    if N_RANKS > 1:
        tl.store(p_out + RANK + r, (v1 * by).to(tl.float16))
    if N_RANKS > 2:
        tl.store(p_out + 2 * RANK + r, (v2 * by).to(tl.float16))
    tl.store(p_factors + row, factor)


@accesses(reads="packed", writes="p_out", helper=True)
@triton.jit
def dequantize_lines(
    packed, p_out, n_groups, row_groups, pitch, KIND: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """dequantize_groups() with rows of row_groups groups of 32 that begin `pitch` apart. out: f16."""
    i = tl.program_id(0)
    first = i.to(tl.int64) * GROUPS
    n_live = tl.minimum(n_groups - first, GROUPS).to(tl.int32)
    low, high = group_values(packed, first, n_live, KIND, GROUPS)
    live = (tl.arange(0, GROUPS) < n_live)[:, None]
    group = i * GROUPS + tl.arange(0, GROUPS)
    at = (group // row_groups).to(tl.int64) * pitch + (group % row_groups) * 32
    p_group = p_out + at[:, None] + tl.arange(0, 16)[None, :]
    tl.store(p_group, low.to(tl.float16), mask=live)
    tl.store(p_group + 16, high.to(tl.float16), mask=live)


@accesses(reads="p_b", writes="p_out", helper=True)
@triton.jit
def copy_columns(
    p_b, p_out, n_rows, pitch, RANK: tl.constexpr, PLACE: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """N times RANK columns, f16, rows `pitch` apart: those from PLACE * RANK on are b, f32 [n_rows, RANK], the others
    0. Program (i): ROWS rows."""
    rows, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    here, own = (rows < n_rows)[:, None], (col // RANK == PLACE)[None, :]
    b = tl.load(p_b + rows.to(tl.int64)[:, None] * RANK + col[None, :] % RANK, mask=here & own, other=0.0)
    p_col = p_out + rows.to(tl.int64)[:, None] * pitch + col[None, :]
    tl.store(p_col, b.to(tl.float16), mask=here & (col < N * RANK)[None, :])


@triton.jit
def _copied(p_a, p_out, i, n, k, pitch):
    """Elements i of n of a matrix f32 [.., k], in f16 in rows `pitch` apart."""
    at = (i // k).to(tl.int64) * pitch + i % k
    tl.store(p_out + at, tl.load(p_a + i, mask=i < n, other=0.0).to(tl.float16), mask=i < n)


@accesses(reads="p_a0 p_a1 p_a2", writes="p_out", helper=True)
@triton.jit
def copy_rows(p_a0, p_a1, p_a2, p_out, n, k, pitch, BLOCK: tl.constexpr):
    """n elements of each of up to three matrices f32 [.., k], in f16 below each other, rows `pitch` apart.

    Program (i, j): BLOCK elements of a_j."""
    i, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    p_out += (j * (n // k)).to(tl.int64) * pitch
    if j == 0:
        _copied(p_a0, p_out, i, n, k, pitch)
    if j == 1:
        _copied(p_a1, p_out, i, n, k, pitch)
    if j == 2:
        _copied(p_a2, p_out, i, n, k, pitch)
