# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""REPEAT_BACK, GET_ROWS_BACK, SET_ROWS_BACK and VIEW_BACK. Who writes an element adds up all that goes there, in one
order and without atomics: equal inputs give equal bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import Call, accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.ops.movement_back import ViewBackParams
from graphrt.tensor import Tensor

#: Elements that a program of sum_repeats looks at at a time, and most results that it has of them.
_BLOCK, _RESULTS = 2048, 64
#: Indices that a program looks through at a time, and most elements of a row that it takes.
_IDS, _MOST = 1024, 1024


@accesses(reads="p_d", writes="p_out")
@triton.jit
def sum_repeats(
    p_d, p_out, total, n_repeats, n0, n1, n2, n3, r0, r1, r2, d0, d1, d2, d3,
    REPEATS: tl.constexpr, RESULTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RESULTS elements of out [n0, n1, n2, n3] a program: each the sum of its n_repeats copies in d.

    r0 to r2: how many copies there are along dimensions 0 to 2; d0 to d3: d's strides in elements; total: of out.
    """
    take_turn(PDL)
    i = tl.program_id(0).to(tl.int64) * RESULTS + tl.arange(0, RESULTS)
    i1, i2, i3 = i // n0 % n1, i // n0 // n1 % n2, i // n0 // n1 // n2
    own = (i % n0) * d0 + i1 * d1 + i2 * d2 + i3 * d3
    sums = tl.zeros([REPEATS, RESULTS], tl.float32)
    for start in range(0, n_repeats, REPEATS):
        copy = (start + tl.arange(0, REPEATS)).to(tl.int64)
        at = (copy % r0) * n0 * d0 + (copy // r0 % r1) * n1 * d1
        at += (copy // r0 // r1 % r2) * n2 * d2 + (copy // r0 // r1 // r2) * n3 * d3
        live = (copy < n_repeats)[:, None] & (i < total)[None, :]
        sums += tl.load(p_d + at[:, None] + own[None, :], mask=live, other=0.0)
    tl.store(p_out + i, tl.sum(sums, 0), mask=i < total)


@accesses(reads="p_d p_ids", writes="p_out")
@triton.jit
def sum_rows_by_id(
    p_d, p_ids, p_out, n, n_rows, n_ids, n2, d0, d1, d2, d3, si0, si1, si2,
    IDS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part, matrix): SIZE elements of one row of out [n, n_rows, n2, n3], the sum of the rows of d whose
    index it is, in order. d: [n, n_ids, n2, n3] with strides d0 to d3; ids: [n_ids, n2, n3] with strides si0 to si2.
    """
    take_turn(PDL)
    row, matrix = tl.program_id(0), tl.program_id(2)
    i2, i3 = (matrix % n2).to(tl.int64), (matrix // n2).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    p_ids += i2 * si1 + i3 * si2
    p_d += i2 * d2 + i3 * d3
    total = tl.zeros([SIZE], tl.float32)
    for start in range(0, n_ids, IDS):
        place = start + tl.arange(0, IDS)
        ids = tl.load(p_ids + place.to(tl.int64) * si0, mask=place < n_ids, other=-1)
        left = tl.where((ids == row) & (place < n_ids), place, n_ids)
        first = tl.min(left, 0)
        while first < n_ids:
            total += tl.load(p_d + first.to(tl.int64) * d1 + i.to(tl.int64) * d0, mask=i < n, other=0.0)
            left = tl.where(left == first, n_ids, left)
            first = tl.min(left, 0)
    at = (matrix.to(tl.int64) * n_rows + row) * n + i
    tl.store(p_out + at, total, mask=i < n)


@accesses(reads="p_d p_ids", writes="p_out")
@triton.jit
def rows_by_id(
    p_d, p_ids, p_out, n, n_ids, n_rows, n2, e1, e2, d0, d1, d2, d3, si0, si1, si2,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): SIZE elements of row ids[i] of d, 0 where that is none of its n_rows rows.

    d: [n, n_rows, n2, n3] with strides d0 to d3; ids: [n_ids, e1, e2], whose dimensions e1 and e2 divide n2 and n3;
    out: [n, n_ids, n2, n3].
    """
    take_turn(PDL)
    row = tl.program_id(0)
    i1, i2, i3 = (row % n_ids).to(tl.int64), (row // n_ids % n2).to(tl.int64), (row // n_ids // n2).to(tl.int64)
    source = tl.load(p_ids + i1 * si0 + (i2 % e1) * si1 + (i3 % e2) * si2).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    live = (i < n) & (source >= 0) & (source < n_rows)
    d = tl.load(p_d + source * d1 + i2 * d2 + i3 * d3 + i.to(tl.int64) * d0, mask=live, other=0.0)
    tl.store(p_out + row.to(tl.int64) * n + i, d, mask=i < n)


def _size(n: int) -> int:
    """Elements of a row of n that one program takes."""
    return max(32, min(_MOST, 1 << (n - 1).bit_length()))


def lower_repeat_back(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """REPEAT_BACK."""
    (node,) = nodes
    d = ctx.view(node["d"])
    copies = [big // small for big, small in zip(d.ne, node.ne)]
    results = min(_RESULTS, triton.next_power_of_2(node.n_elements))
    n_repeats = node["d"].n_elements // node.n_elements
    args: dict[str, Any] = {
        "p_d": d.data, "p_out": ctx.view(node).data, "total": node.n_elements, "n_repeats": n_repeats,
        **dict(zip(("n0", "n1", "n2", "n3"), node.ne)), **dict(zip(("r0", "r1", "r2"), copies)),
        **dict(zip(("d0", "d1", "d2", "d3"), d.strides)), "RESULTS": results,
        "REPEATS": min(_BLOCK // results, triton.next_power_of_2(n_repeats)), "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return [Launch(sum_repeats, (triton.cdiv(node.n_elements, results),), args, launch_options(ctx.target, 4))]


def lower_get_rows_back(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """GET_ROWS_BACK."""
    (node,) = nodes
    d, ids = ctx.view(node["d"]), ctx.view(node["ids"])
    n, n_rows, n2, n3 = node.ne
    n_ids = d.ne[1]
    size = _size(n)
    args: dict[str, Any] = {
        "p_d": d.data, "p_ids": ids.data, "p_out": ctx.view(node).data, "n": n, "n_rows": n_rows, "n_ids": n_ids,
        "n2": n2, **dict(zip(("d0", "d1", "d2", "d3"), d.strides)), **dict(zip(("si0", "si1", "si2"), ids.strides)),
        "IDS": min(_IDS, triton.next_power_of_2(n_ids)), "SIZE": size, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    grid = (n_rows, triton.cdiv(n, size), n2 * n3)
    return [Launch(sum_rows_by_id, grid, args, launch_options(ctx.target, max(1, min(4, size // 256))))]


def lower_set_rows_back(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """SET_ROWS_BACK."""
    (node,) = nodes
    d, ids = ctx.view(node["d"]), ctx.view(node["ids"])
    n, n_ids, n2, n3 = node.ne
    size = _size(n)
    args: dict[str, Any] = {
        "p_d": d.data, "p_ids": ids.data, "p_out": ctx.view(node).data, "n": n, "n_ids": n_ids, "n_rows": d.ne[1],
        "n2": n2, "e1": ids.ne[1], "e2": ids.ne[2], **dict(zip(("d0", "d1", "d2", "d3"), d.strides)),
        **dict(zip(("si0", "si1", "si2"), ids.strides)), "SIZE": size, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    grid = (n_ids * n2 * n3, triton.cdiv(n, size))
    return [Launch(rows_by_id, grid, args, launch_options(ctx.target, max(1, min(4, size // 256))))]


# ---- views ----


def disjoint_parts(ne: Sequence[int], strides: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """A view cut into parts whose elements all lie in different places, in a fixed order: of each dimension all places,
    or every so many-th. ne, strides: of the view, in elements, the same dimension first; slices are in that order."""
    order = sorted(range(len(ne)), key=lambda i: strides[i])
    counts, reach = [1] * len(ne), 1
    for i in order:
        if ne[i] > 1:
            apart = -(-reach // strides[i]) if strides[i] else ne[i]  # so many steps on, inner elements don't reach
            counts[i] = min(apart, ne[i])
            reach += (ne[i] - 1) * strides[i]
    parts: list[tuple[slice, ...]] = [()]
    for n in counts:
        parts = [(*part, slice(k, None, n)) for part in parts for k in range(n)]
    return iter(parts)


def _add_view(d: torch.Tensor, memory: torch.Tensor, out: torch.Tensor, p: ViewBackParams) -> None:
    """out = what each of its places gets of the view's elements. memory: room for the source as its strides say."""
    memory.zero_()
    strides = (p.nb[0] // 4, *(n // 4 for n in p.view_nb))
    seen = memory.as_strided(p.view_ne[::-1], strides[::-1], memory.storage_offset() + p.offs // 4)
    parts = list(disjoint_parts(p.view_ne, strides))
    for part in parts:
        if len(parts) == 1:
            seen.copy_(d)
        else:
            seen[part[::-1]] += d[part[::-1]]
    source = memory.as_strided(p.ne[::-1], [n // 4 for n in p.nb[::-1]], memory.storage_offset())
    if source.data_ptr() != out.data_ptr():
        out.copy_(source)


def lower_view_back(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """VIEW_BACK: in the result's own memory where the source had no gaps, else beside it."""
    (node,) = nodes
    p = node.params
    d, view = ctx.view(node["d"]).torch(), ctx.view(node)
    size = 1 + sum((n - 1) * (step // 4) for n, step in zip(p.ne, p.nb))
    even = Tensor("f32", p.ne, nb=p.nb).is_contiguous
    memory = view.data if even else ctx.shared_scratch("source of a view", 4 * size)[: 4 * size].view(torch.float32)
    out = view.torch()
    return [Call("add_view", partial(_add_view, d, memory, out, p), [d], [memory, out])]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "REPEAT_BACK": lower_repeat_back, "GET_ROWS_BACK": lower_get_rows_back, "SET_ROWS_BACK": lower_set_rows_back,
    "VIEW_BACK": lower_view_back,
}  # fmt: skip
