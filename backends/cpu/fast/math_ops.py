"""Elementwise kernels: activations and gated units, add, multiply, scale, and argmax."""

from __future__ import annotations

import functools
import math

from graphrt.backends.cpu.fast.ir import F32, I32, I64, LANES, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.pool import Entry, Step

ACTIVATIONS = ("silu", "gelu", "relu")
UNARY = (*ACTIVATIONS, "scale", "softcap")
BINARY = ("add", "mul", "swiglu_oai", *(f"{name}_glu" for name in ACTIVATIONS))

#: Rows are cut in pieces of so many values to be shared between threads.
_PIECE = 1024


def activation(f: Fn, name: str, x: Val) -> Val:
    """silu, gelu (ggml's tanh form) or relu of a vector. NaN stays NaN."""
    if name == "silu":
        return x * f.sigmoid(x)
    if name == "gelu":
        # 0.5 (1 + tanh(u)) is sigmoid(2u)
        return x * f.sigmoid(x * 1.5957691216057308 * f.fma(x * x, 0.044715, 1.0))
    if name == "relu":
        return f.select(x < 0.0, 0.0, x)
    raise ValueError(f"an activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")


def _apply(f: Fn, op: str, a: Val, b: Val | None) -> Val:
    s0, s1 = f.args("s0", "s1")
    if op == "scale":
        return f.fma(a, s0, s1)
    if op == "softcap":
        return f.tanh(a / s0) * s0
    if b is None:
        return activation(f, op, a)
    if op == "add":
        return a + b
    if op == "swiglu_oai":
        gate, up = f.select(a > s1, s1, a), f.select(b > s1, s1, f.select(b < -s1, -s1, b))
        return gate * f.sigmoid(gate * s0) * (up + 1.0)
    return a * b if op == "mul" else activation(f, op.removesuffix("_glu"), a) * b


def _build_map(f: Fn, op: str) -> None:
    y, a, b, n_rows, n, y_nb, a_nb, b_nb = f.args("y", "a", "b", "n_rows", "n", "y_nb", "a_nb", "b_nb")
    per_row = (n + (_PIECE - 1)) // _PIECE
    start, stop = f.share(n_rows * per_row)
    with f.range(start, stop) as item:
        r, first = item // per_row, item % per_row * _PIECE
        offset = first * 4

        def one(i: Val, lanes: int) -> None:
            at = offset + i * 4
            left = f.load(a + r * a_nb + at, F32, lanes)
            right = f.load(b + r * b_nb + at, F32, lanes) if op in BINARY else None
            f.store(y + r * y_nb + at, _apply(f, op, left, right))

        f.elements(f.min_int(n - first, _PIECE), one)


@functools.cache
def map_kernel(op: str) -> Kernel:
    if op not in UNARY + BINARY:
        raise ValueError(f"an elementwise op must be one of {', '.join(UNARY + BINARY)}, got {op!r}")
    return Kernel(
        f"map_{op}",
        ("y", "a", "b", "n_rows", "n", "y_nb", "a_nb", "b_nb"),
        lambda f: _build_map(f, op),
        floats=("s0", "s1"),
        optional=("b", "b_nb", "s0", "s1"),
    )


def elementwise(
    op: str,
    *,
    y: int,
    a: int,
    n_rows: int,
    n: int,
    y_nb: int,
    a_nb: int,
    b: int = 0,
    b_nb: int = 0,
    s0: float = 0.0,
    s1: float = 0.0,
) -> Step:
    """y[r] = op(a[r], b[r]) over n_rows rows of n f32, nb bytes apart; b_nb = 0 repeats one row of b. y may be a or b.

    silu, gelu, relu; scale: a * s0 + s1; softcap: s0 * tanh(a / s0); add; mul; silu_glu (or gelu, relu): silu(a) * b;
    swiglu_oai: with alpha s0 and limit s1 (graphrt.ops.unary.glu).
    """
    kernel = map_kernel(op)
    block = kernel.pack(y=y, a=a, b=b, n_rows=n_rows, n=n, y_nb=y_nb, a_nb=a_nb, b_nb=b_nb, s0=s0, s1=s1)
    values = n_rows * n
    return Step([Entry(kernel, block)], values * 12)


# argmax


def _build_argmax(f: Fn) -> None:
    out, x, n_rows, n, x_nb = f.args("out", "x", "n_rows", "n", "x_nb")
    start, stop = f.share(n_rows)
    with f.range(start, stop) as r:
        row = x + r * x_nb
        best = [f.var(f.zeros() - math.inf) for _ in range(2)]
        where = [f.var(f.zeros(I32)) for _ in range(2)]
        lanes = f.vconst(range(LANES), I32)
        whole = n // (2 * LANES) * (2 * LANES)
        with f.range(0, whole, 2 * LANES) as i:
            for k in range(2):
                v = f.load(row + (i + k * LANES) * 4, F32, LANES)
                bigger = v > best[k].v  # false for NaN
                best[k].v = f.select(bigger, v, best[k].v)
                where[k].v = f.select(bigger, f.splat((i + k * LANES).trunc(I32)) + lanes, where[k].v)
        top, at = f.var(f.const(-math.inf, F32)), f.var(f.zeros(I32, 0))

        def offer(value: Val, index: Val) -> None:
            # the lowest index among equals; lanes are not visited in order of their indices
            tie = value.eq(top.v) & (index < at.v)
            better = (value > top.v) | tie
            top.v, at.v = f.select(better, value, top.v), f.select(better, index, at.v)

        for k in range(2):
            values, indices = best[k].v, where[k].v
            for lane in range(LANES):
                offer(values[lane], indices[lane])
        with f.range(whole, n) as i:
            offer(f.load(row + i * 4, F32), i.trunc(I32))
        f.store(out + r * 8, at.v.sext(I64))


@functools.cache
def argmax_kernel() -> Kernel:
    return Kernel("argmax", ("out", "x", "n_rows", "n", "x_nb"), _build_argmax)


def argmax(*, out: int, x: int, n_rows: int, n: int, x_nb: int) -> Step:
    """out[r] (int64) = index of the largest of n f32; the first of equals. NaN is never chosen; 0 if all are NaN."""
    kernel = argmax_kernel()
    block = kernel.pack(out=out, x=x, n_rows=n_rows, n=n, x_nb=x_nb)
    return Step([Entry(kernel, block)], n_rows * n * 4)
