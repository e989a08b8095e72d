"""Rows to one value, or to values that need the whole row: sums, softmax, the largest value's index, orders."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from graphrt.backends.cpu.fast.ir import F32, I32, I64, LANES, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.pool import Entry, Step

#: Pieces that a row is cut into where its largest value is looked for.
PIECES = 32
#: Most values of a row that is put in order: each is compared with each.
MAX_ORDERED = 1024
#: Less than the key of any value.
_NOTHING = -(2**63)


def _fold_row(f: Fn, n: Val, start: float, value: Callable[[Val, int], Val], op: Callable[[Val, Val], Val]) -> Val:
    """op over value(i, lanes) of a row of n values, as a scalar; start: what changes nothing."""
    whole = n // LANES * LANES
    lanes, rest = f.var(f.zeros() + start), f.var(f.zeros(n=1) + start)
    with f.range(0, whole, LANES) as i:
        lanes.v = op(lanes.v, value(i, LANES))
    with f.range(whole, n) as i:
        rest.v = op(rest.v, value(i, 1))
    return op(f.splat(f.fold(lanes.v, op), 1), rest.v)[0]


# sums


def _build_sum(f: Fn) -> None:
    y, x, n_rows, n, x_nb = f.args("y", "x", "n_rows", "n", "x_nb")
    start, stop = f.share(n_rows)
    with f.range(start, stop) as r:
        row = x + r * x_nb
        total = _fold_row(f, n, 0.0, lambda i, lanes: f.load(row + i * 4, F32, lanes), lambda a, b: a + b)
        f.store(y + r * 4, total)


@functools.cache
def sum_kernel() -> Kernel:
    return Kernel("sum_rows", ("y", "x", "n_rows", "n", "x_nb"), _build_sum)


def sum_rows(*, y: int, x: int, n_rows: int, n: int, x_nb: int) -> Step:
    """y[r] = the sum of x[r], n f32; rows of x are x_nb bytes apart, y's values lie side by side."""
    block = sum_kernel().pack(y=y, x=x, n_rows=n_rows, n=n, x_nb=x_nb)
    return Step([Entry(sum_kernel(), block)], n_rows * n * 4)


# softmax


def _build_soft_max(f: Fn) -> None:
    y, x, n_rows, n, x_nb, y_nb = f.args("y", "x", "n_rows", "n", "x_nb", "y_nb")
    (scale,) = f.args("scale")
    start, stop = f.share(n_rows)
    with f.range(start, stop) as r:
        row, out = x + r * x_nb, y + r * y_nb

        def logit(i: Val, lanes: int) -> Val:
            return f.load(row + i * 4, F32, lanes) * scale

        top = _fold_row(f, n, -math.inf, logit, f.max_or_nan)
        base = f.select(top.eq(-math.inf), 0.0, top)

        def weight(i: Val, lanes: int) -> Val:
            w = f.exp(logit(i, lanes) - base)
            f.store(out + i * 4, w)
            return w

        total = _fold_row(f, n, 0.0, weight, lambda a, b: a + b)
        inverse = f.select(total.eq(0.0), 0.0, 1.0 / total)
        f.elements(n, lambda i, lanes: f.store(out + i * 4, f.load(out + i * 4, F32, lanes) * inverse))


@functools.cache
def soft_max_kernel() -> Kernel:
    names = ("y", "x", "n_rows", "n", "x_nb", "y_nb")
    return Kernel("soft_max", names, _build_soft_max, floats=("scale",))


def soft_max(*, y: int, x: int, n_rows: int, n: int, x_nb: int, y_nb: int, scale: float) -> Step:
    """y[r] = exp(scale * x[r]) / its sum, over rows of n f32, nb bytes apart; 0 where all are -inf. y may be x where
    scale is 1."""
    block = soft_max_kernel().pack(y=y, x=x, n_rows=n_rows, n=n, x_nb=x_nb, y_nb=y_nb, scale=scale)
    return Step([Entry(soft_max_kernel(), block)], n_rows * n * 12)


# orders


def _key(f: Fn, x: Val) -> Val:
    """i32 lanes that are ordered as the f32 values are: both zeros alike, a NaN above all."""
    bits = (x + 0.0).as_bits(I32)
    key = bits ^ (bits.shift_sign(31) & 0x7FFFFFFF)
    return f.select(x.ne(x), f.splat(f.const(0x7FFFFFFF, I32), x.lanes), key)


def _ranked(key: Val, index: Val) -> Val:
    """A word that is larger for a larger key, and of equal keys for the lower index."""
    return (key.sext(I64) << 32) | (0x7FFFFFFF - index)


def _build_largest(f: Fn) -> None:
    found, x, n_rows, n, x_nb = f.args("found", "x", "n_rows", "n", "x_nb")
    length = (n + (PIECES * LANES - 1)) // (PIECES * LANES) * LANES
    start, stop = f.share(n_rows * PIECES)
    with f.range(start, stop) as item:
        row = x + item // PIECES * x_nb
        first = f.min_int(item % PIECES * length, n)
        last = f.min_int(first + length, n)
        whole = first + (last - first) // LANES * LANES
        best, where = f.var(f.zeros(I32) + -(2**31)), f.var(f.zeros(I32))
        lanes = f.vconst(range(LANES), I32)
        top = f.var(f.const(_NOTHING))
        with f.range(first, whole, LANES) as i:
            key = _key(f, f.load(row + i * 4, F32, LANES))
            better = key > best.v
            best.v = f.select(better, key, best.v)
            where.v = f.select(better, f.splat(i.trunc(I32)) + lanes, where.v)
        with f.if_(whole > first):
            top.v = f.fold(_ranked(best.v, where.v.sext(I64)), f.max_int)
        with f.range(whole, last) as i:
            top.v = f.max_int(top.v, _ranked(_key(f, f.load(row + i * 4, F32, 1))[0], i))
        f.store(found + item * 8, top.v)


def _build_chosen(f: Fn) -> None:
    out, found, n_rows = f.args("out", "found", "n_rows")
    start, stop = f.share(n_rows)
    with f.range(start, stop) as r:
        top = f.var(f.const(_NOTHING))
        with f.range(0, PIECES) as i:
            top.v = f.max_int(top.v, f.load(found + (r * PIECES + i) * 8, I64))
        f.store(out + r * 4, (0x7FFFFFFF - (top.v & 0x7FFFFFFF)).trunc(I32))


@functools.cache
def largest_kernel() -> Kernel:
    return Kernel("argmax_pieces", ("found", "x", "n_rows", "n", "x_nb"), _build_largest)


@functools.cache
def chosen_kernel() -> Kernel:
    return Kernel("argmax_rows", ("out", "found", "n_rows"), _build_chosen)


def argmax(*, out: int, x: int, found: int, n_rows: int, n: int, x_nb: int) -> list[Step]:
    """out[r] (i32) = the index of the largest of n f32, x_nb bytes between rows; the first of equals, and of NaN where
    there are any. found: memory for n_rows * PIECES words of 8 bytes. Two steps: pieces of rows, then rows."""
    pieces = largest_kernel().pack(found=found, x=x, n_rows=n_rows, n=n, x_nb=x_nb)
    rows = chosen_kernel().pack(out=out, found=found, n_rows=n_rows)
    entries = Entry(largest_kernel(), pieces), Entry(chosen_kernel(), rows)
    return [Step([entries[0]], n_rows * n * 4), Step([entries[1]], n_rows * PIECES * 8)]


def _build_order(f: Fn, descending: bool) -> None:
    out, x, n_rows, n, x_nb, k = f.args("out", "x", "n_rows", "n", "x_nb", "k")
    keys = f.buffer(I32, MAX_ORDERED)
    lanes, ones = f.vconst(range(LANES), I32), f.zeros(I32) + 1
    start, stop = f.share(n_rows)
    with f.range(start, stop) as r:
        row = x + r * x_nb
        with f.range(0, n, LANES) as i:
            f.store(keys + i * 4, f.zeros(I32) + -(2**31))  # those past the end: below all

        def put(i: Val, width: int) -> None:
            key = _key(f, f.load(row + i * 4, F32, width))
            f.store(keys + i * 4, key if descending else key ^ -1)

        f.elements(n, put)
        with f.range(0, n) as i:
            mine, index = f.splat(f.load(keys + i * 4, I32)), f.splat(i.trunc(I32))
            before = f.var(f.zeros(I32))
            with f.range(0, n, LANES) as j:
                key = f.load(keys + j * 4, I32, LANES)
                first = (f.splat(j.trunc(I32)) + lanes) < index
                before.v = before.v + f.select((key > mine) | (key.eq(mine) & first), ones, f.zeros(I32))
            rank = f.sum(before.v).sext(I64)
            with f.if_(rank < k):
                f.store(out + (r * k + rank) * 4, i.trunc(I32))


@functools.cache
def order_kernel(descending: bool) -> Kernel:
    return Kernel(
        f"order_{'down' if descending else 'up'}",
        ("out", "x", "n_rows", "n", "x_nb", "k"),
        lambda f: _build_order(f, descending),
    )


def order(*, out: int, x: int, n_rows: int, n: int, x_nb: int, k: int, descending: bool) -> Step:
    """out[r] (i32 [n_rows, k]) = the indices of the first k of n f32 in order, equal ones as they stand; a NaN counts
    as the largest. n: at most MAX_ORDERED; x_nb: bytes between rows."""
    if not 1 <= k <= n <= MAX_ORDERED:
        raise ValueError(f"rows of at most {MAX_ORDERED} values can be put in order, got {n} and k = {k}")
    kernel = order_kernel(descending)
    block = kernel.pack(out=out, x=x, n_rows=n_rows, n=n, x_nb=x_nb, k=k)
    return Step([Entry(kernel, block)], n_rows * n * (4 + n // 4))
