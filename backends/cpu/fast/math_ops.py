"""Elementwise kernels: activations and gated units, arithmetic of two tensors, functions of one, copies."""

from __future__ import annotations

import functools

from graphrt.backends.cpu.fast.ir import F32, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.pool import Entry, Step

ACTIVATIONS = ("silu", "gelu", "relu")
UNARY = (*ACTIVATIONS, "gelu_quick", "sigmoid", "tanh", "scale", "clamp", "softcap", "sqr", "sqrt", "copy", "fill")
BINARY = ("add", "sub", "mul", "div", "swiglu_oai", *(f"{name}_glu" for name in ACTIVATIONS))

#: Rows are cut in pieces of so many values to be shared between threads.
_PIECE = 1024

#: How many rows there are along dimensions 1 to 3, and the bytes between them; one number is that of rows that lie
#: evenly.
Rows = int | tuple[int, int, int]


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


def _apply_unary(f: Fn, op: str, a: Val) -> Val:
    s0, s1 = f.args("s0", "s1")
    if op == "scale":
        return f.fma(a, s0, s1)
    if op == "clamp":
        return f.select(a < s0, s0, f.select(a > s1, s1, a))
    if op == "softcap":
        return f.tanh(a / s0) * s0
    if op == "gelu_quick":
        return a * f.sigmoid(a * 1.702)
    if op == "sqr":
        return a * a
    if op == "copy":
        return a
    plain = {"sigmoid": f.sigmoid, "tanh": f.tanh, "sqrt": f.sqrt}
    return plain[op](a) if op in plain else activation(f, op, a)


def _apply_binary(f: Fn, op: str, a: Val, b: Val) -> Val:
    if op == "swiglu_oai":
        s0, s1 = f.args("s0", "s1")
        gate, up = f.select(a > s1, s1, a), f.select(b > s1, s1, f.select(b < -s1, -s1, b))
        return gate * f.sigmoid(gate * s0) * (up + 1.0)
    plain = {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "div": lambda: a / b}
    return plain[op]() if op in plain else activation(f, op.removesuffix("_glu"), a) * b


def _build_map(f: Fn, op: str, one_each: bool) -> None:
    y, a, b, n, ne1, ne2, ne3 = f.args("y", "a", "b", "n", "ne1", "ne2", "ne3")
    per_row = (n + (_PIECE - 1)) // _PIECE
    start, stop = f.share(ne1 * ne2 * ne3 * per_row)
    with f.range(start, stop) as item:
        r, first = item // per_row, item % per_row * _PIECE
        where = r % ne1, r // ne1 % ne2, r // (ne1 * ne2)
        y_row, a_row, b_row = (
            base + sum(i * nb for i, nb in zip(where, f.args(*(f"{name}_nb{k}" for k in (1, 2, 3)))))
            for name, base in (("y", y), ("a", a), ("b", b))
        )
        offset = first * 4

        def one(i: Val, lanes: int) -> None:
            at = offset + i * 4
            if op == "fill":
                (value,) = f.args("s0")
                f.store(y_row + at, f.splat(value, lanes))
                return
            left = f.load(a_row + at, F32, lanes)
            if op in UNARY:
                f.store(y_row + at, _apply_unary(f, op, left))
                return
            right = f.splat(f.load(b_row, F32), lanes) if one_each else f.load(b_row + at, F32, lanes)
            f.store(y_row + at, _apply_binary(f, op, left, right))

        f.elements(f.min_int(n - first, _PIECE), one)


@functools.cache
def map_kernel(op: str, one_each: bool = False) -> Kernel:
    if op not in UNARY + BINARY:
        raise ValueError(f"an elementwise op must be one of {', '.join(UNARY + BINARY)}, got {op!r}")
    strides = tuple(f"{name}_nb{k}" for name in "yab" for k in (1, 2, 3))
    return Kernel(
        f"map_{op}{'_one' if one_each else ''}",
        ("y", "a", "b", "n", "ne1", "ne2", "ne3", *strides),
        lambda f: _build_map(f, op, one_each),
        floats=("s0", "s1"),
        optional=("b", "b_nb1", "b_nb2", "b_nb3", "s0", "s1"),
    )


def _each(rows: Rows, rest: int) -> tuple[int, int, int]:
    return (rows, rest, rest) if isinstance(rows, int) else rows


def elementwise(
    op: str,
    *,
    y: int,
    a: int,
    n_rows: Rows,
    n: int,
    y_nb: Rows,
    a_nb: Rows,
    b: int = 0,
    b_nb: Rows = 0,
    one_each: bool = False,
    s0: float = 0.0,
    s1: float = 0.0,
) -> Step:
    """y[r] = op(a[r], b[r]) over rows of n f32. b_nb = 0 repeats one row of b; one_each: a row of b is one value, for
    all of a's. y may be a or b.

    Of one: silu, gelu, relu, gelu_quick, sigmoid, tanh, sqr, sqrt; copy, of any 4 bytes; scale: a * s0 + s1; clamp: to
    s0 to s1; softcap: s0 * tanh(a / s0); fill: s0, and a is not read. Of two: add, sub, mul, div; silu_glu (or gelu,
    relu): silu(a) * b; swiglu_oai: with alpha s0 and limit s1 (graphrt.ops.unary.glu).
    """
    kernel = map_kernel(op, one_each)
    rows = _each(n_rows, 1)
    strides = {
        f"{name}_nb{k}": nb
        for name, each in (("y", y_nb), ("a", a_nb), ("b", b_nb))
        for k, nb in enumerate(_each(each, 0), 1)
    }
    block = kernel.pack(y=y, a=a, b=b, n=n, ne1=rows[0], ne2=rows[1], ne3=rows[2], s0=s0, s1=s1, **strides)
    return Step([Entry(kernel, block)], rows[0] * rows[1] * rows[2] * n * 12)
