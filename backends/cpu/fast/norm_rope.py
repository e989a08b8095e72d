"""RMS norm, alone or with the residual add before it, layer norm, and rotary position embedding."""

from __future__ import annotations

import functools
from collections.abc import Callable

from graphrt.backends.cpu.fast.ir import F32, F64, I32, I64, LANES, Fn, Val, pieces
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.pool import Entry, Step

# RMS norm


def _build_rms_norm(f: Fn, add: bool, weighted: bool) -> None:
    y, x, n_rows, n, x_nb, y_nb = f.args("y", "x", "n_rows", "n", "x_nb", "y_nb")
    (eps,) = f.args("eps")
    w, other, total, other_nb, total_nb = f.args("w", "other", "total", "other_nb", "total_nb")
    start, stop = f.share(n_rows)
    with f.range(start, stop) as r:
        row, out = x + r * x_nb, y + r * y_nb
        summed = total + r * total_nb if add else row

        # four sums: one would wait for its own last addition
        sums = [f.var(f.zeros()) for _ in range(4)]
        rest = f.var(f.zeros(n=0))

        def value(i: Val, lanes: int) -> Val:
            v = f.load(row + i * 4, F32, lanes)
            if add:
                v = v + f.load(other + r * other_nb + i * 4, F32, lanes)
                f.store(summed + i * 4, v)
            return v

        unrolled = n // (4 * LANES) * (4 * LANES)
        with f.range(0, unrolled, 4 * LANES) as i:
            for k, acc in enumerate(sums):
                v = value(i + k * LANES, LANES)
                acc.v = f.fma(v, v, acc.v)
        with f.range(unrolled, n) as i:
            v = value(i, 0)
            rest.v = f.fma(v, v, rest.v)
        square_sum = f.sum((sums[0].v + sums[1].v) + (sums[2].v + sums[3].v)) + rest.v
        scale = 1.0 / f.sqrt(square_sum / n.to(F32) + eps)

        def write(i: Val, lanes: int) -> None:
            v = f.load(summed + i * 4, F32, lanes) * scale
            f.store(out + i * 4, v * f.load(w + i * 4, F32, lanes) if weighted else v)

        f.elements(n, write)


@functools.cache
def rms_norm_kernel(add: bool, weighted: bool) -> Kernel:
    return Kernel(
        f"rms_norm_{'add_' if add else ''}{'w' if weighted else 'plain'}",
        ("y", "x", "w", "other", "total", "n_rows", "n", "x_nb", "y_nb", "other_nb", "total_nb"),
        lambda f: _build_rms_norm(f, add, weighted),
        floats=("eps",),
        optional=("w", "other", "total", "other_nb", "total_nb"),
    )


def rms_norm(*, y: int, x: int, n_rows: int, n: int, x_nb: int, y_nb: int, eps: float, w: int = 0) -> Step:
    """y[r] = x[r] / sqrt(mean(x[r]^2) + eps) (* w). All f32; w: n values, 0 for none. y may be x."""
    kernel = rms_norm_kernel(False, w != 0)
    block = kernel.pack(y=y, x=x, w=w, n_rows=n_rows, n=n, x_nb=x_nb, y_nb=y_nb, eps=eps)
    return Step([Entry(kernel, block)], n_rows * n * 8)


def add_rms_norm(
    *,
    y: int,
    total: int,
    x: int,
    other: int,
    n_rows: int,
    n: int,
    x_nb: int,
    other_nb: int,
    total_nb: int,
    y_nb: int,
    eps: float,
    w: int = 0,
) -> Step:
    """total[r] = x[r] + other[r], then y[r] = rms_norm(total[r]) (* w). total may be x or other; y none of them."""
    kernel = rms_norm_kernel(True, w != 0)
    block = kernel.pack(
        y=y, x=x, w=w, other=other, total=total, n_rows=n_rows, n=n,
        x_nb=x_nb, y_nb=y_nb, other_nb=other_nb, total_nb=total_nb, eps=eps,
    )  # fmt: skip
    return Step([Entry(kernel, block)], n_rows * n * 16)


# layer norm


def _build_layer_norm(f: Fn, weighted: bool, biased: bool) -> None:
    y, x, w, bias, n_rows, n, x_nb, y_nb = f.args("y", "x", "w", "bias", "n_rows", "n", "x_nb", "y_nb")
    (eps,) = f.args("eps")
    start, stop = f.share(n_rows)
    with f.range(start, stop) as r:
        row, out = x + r * x_nb, y + r * y_nb

        def total(value: Callable[[Val], Val]) -> Val:
            sums, rest = [f.var(f.zeros()) for _ in range(2)], f.var(f.zeros(n=1))
            unrolled = n // (2 * LANES) * (2 * LANES)
            with f.range(0, unrolled, 2 * LANES) as i:
                for k, acc in enumerate(sums):
                    acc.v = acc.v + value(f.load(row + (i + k * LANES) * 4, F32, LANES))
            with f.range(unrolled, n) as i:
                rest.v = rest.v + value(f.load(row + i * 4, F32, 1))
            return f.sum(sums[0].v + sums[1].v) + rest.v[0]

        def square(v: Val) -> Val:
            return (v - mean) * (v - mean)

        mean = total(lambda v: v) / n.to(F32)
        scale = 1.0 / f.sqrt(total(square) / n.to(F32) + eps)

        def write(i: Val, lanes: int) -> None:
            v = (f.load(row + i * 4, F32, lanes) - mean) * scale
            v = v * f.load(w + i * 4, F32, lanes) if weighted else v
            f.store(out + i * 4, v + f.load(bias + i * 4, F32, lanes) if biased else v)

        f.elements(n, write)


@functools.cache
def layer_norm_kernel(weighted: bool, biased: bool) -> Kernel:
    return Kernel(
        f"layer_norm{'_w' if weighted else ''}{'_b' if biased else ''}",
        ("y", "x", "w", "bias", "n_rows", "n", "x_nb", "y_nb"),
        lambda f: _build_layer_norm(f, weighted, biased),
        floats=("eps",),
        optional=("w", "bias"),
    )


def layer_norm(
    *, y: int, x: int, n_rows: int, n: int, x_nb: int, y_nb: int, eps: float, w: int = 0, bias: int = 0
) -> Step:
    """y[r] = (x[r] - mean) / sqrt(mean((x[r] - mean)^2) + eps) (* w) (+ bias). All f32; w, bias: n values, 0 for none.
    y may be x."""
    kernel = layer_norm_kernel(w != 0, bias != 0)
    block = kernel.pack(y=y, x=x, w=w, bias=bias, n_rows=n_rows, n=n, x_nb=x_nb, y_nb=y_nb, eps=eps)
    return Step([Entry(kernel, block)], n_rows * n * 8)


# rotary position embedding

_SIN = [1.58962301576546568060e-10, -2.50507477628578072866e-8, 2.75573136213857245213e-6, -1.98412698295895385996e-4,
        8.33333333332211858878e-3, -1.66666666666666307295e-1]  # fmt: skip
_COS = [-1.13585365213876817300e-11, 2.08757008419747316778e-9, -2.75573141792967388112e-7, 2.48015872888517045348e-5,
        -1.38888888888730564116e-3, 4.16666666666665929218e-2]  # fmt: skip
_HALF_PI = (1.57079632673412561417, 6.07710050650619224932e-11)  # pi/2 in two parts, the first with 33 bits


def _sin_cos(f: Fn, angle: Val) -> tuple[Val, Val]:
    """sine and cosine of f64 lanes, to about 1e-11 for |angle| < 1e8."""
    magic = 6755399441055744.0  # 1.5 * 2^52: the low bits of the sum are the rounded integer
    t = f.fma(angle, 0.6366197723675814, magic)
    n = t - magic
    r = f.fma(n, -_HALF_PI[1], f.fma(n, -_HALF_PI[0], angle))
    quadrant = t.as_bits(I64)
    z = r * r
    sin = f.fma(f.poly(z, _SIN) * z, r, r)
    cos = f.fma(f.poly(z, _COS) * z, z, f.fma(z, -0.5, 1.0))
    odd = (quadrant & 1).ne(0)
    s, c = f.select(odd, cos, sin), f.select(odd, sin, cos)
    # bit 1 of the quadrant is the sine's sign; bit 1 of the next quadrant the cosine's
    s = (s.as_bits(I64) ^ ((quadrant & 2) << 62)).as_bits(F64)
    c = (c.as_bits(I64) ^ (((quadrant + 1) & 2) << 62)).as_bits(F64)
    return s, c


def _build_rope(f: Fn, head_dim: int, n_dims: int, neox: bool) -> None:
    y, x, pos, freq, n_head, n_tok = f.args("y", "x", "pos", "freq", "n_head", "n_tok")
    x_nb1, x_nb2, y_nb1, y_nb2 = f.args("x_nb1", "x_nb2", "y_nb1", "y_nb2")
    (mscale,) = f.args("mscale")
    half = n_dims // 2
    cos_at, sin_at = f.buffer(F32, half), f.buffer(F32, half)
    # work is (token, head); a thread computes a token's angles once, when it comes to it
    start, stop = f.share(n_tok * n_head)
    done_tok = f.var(f.const(-1))
    with f.range(start, stop) as item:
        tok, head = item // n_head, item % n_head
        with f.if_(tok.ne(done_tok.v)):
            done_tok.v = tok
            p = f.load(pos + tok * 4, I32).to(F64)
            for at, lanes in pieces(half):
                s, c = _sin_cos(f, f.load(freq + 8 * at, F64, lanes) * f.splat(p, lanes))
                f.store(cos_at + 4 * at, c.to(F32) * mscale)
                f.store(sin_at + 4 * at, s.to(F32) * mscale)
        source, target = x + tok * x_nb2 + head * x_nb1, y + tok * y_nb2 + head * y_nb1
        for at, lanes in pieces(half):
            c, s = f.load(cos_at + 4 * at, F32, lanes), f.load(sin_at + 4 * at, F32, lanes)
            if neox:
                a, b = (f.load(source + 4 * (at + k * half), F32, lanes) for k in range(2))
            else:
                pairs = f.load(source + 8 * at, F32, 2 * lanes)
                a, b = (pairs.shuffle(range(k, 2 * lanes, 2)) for k in range(2))
            ra, rb = a * c - b * s, a * s + b * c
            if neox:
                f.store(target + 4 * at, ra)
                f.store(target + 4 * (at + half), rb)
            else:
                order = [i // 2 + (i % 2) * lanes for i in range(2 * lanes)]
                f.store(target + 8 * at, ra.shuffle(order, rb))
        with f.if_(source.ne(target)):
            for at, lanes in pieces(head_dim - n_dims):
                f.store(target + 4 * (n_dims + at), f.load(source + 4 * (n_dims + at), F32, lanes))


@functools.cache
def rope_kernel(head_dim: int, n_dims: int, neox: bool) -> Kernel:
    if n_dims % 2 or not 0 < n_dims <= head_dim:
        raise ValueError(f"n_dims must be even and at most the head's {head_dim} values, got {n_dims}")
    return Kernel(
        f"rope_{head_dim}_{n_dims}_{'neox' if neox else 'normal'}",
        ("y", "x", "pos", "freq", "n_head", "n_tok", "x_nb1", "x_nb2", "y_nb1", "y_nb2"),
        lambda f: _build_rope(f, head_dim, n_dims, neox),
        floats=("mscale",),
    )


def rope(
    *,
    y: int,
    x: int,
    pos: int,
    freq: int,
    head_dim: int,
    n_dims: int,
    neox: bool,
    n_head: int,
    n_tok: int,
    x_nb1: int,
    x_nb2: int,
    y_nb1: int,
    y_nb2: int,
    mscale: float = 1.0,
) -> Step:
    """Rotates x [n_tok, n_head, head_dim] into y by the angles pos[token] * freq[i]; y may be x.

    f32 with nb1 bytes between heads and nb2 between tokens; pos: int32 [n_tok]; freq: float64 [n_dims / 2], with
    frequency factors and YaRN already in it (f32 would be off by 1e-3 rad at position 32768); mscale multiplies cos
    and sin. neox pairs i with i + n_dims / 2, otherwise 2i with 2i + 1. Values past n_dims pass through.
    """
    kernel = rope_kernel(head_dim, n_dims, neox)
    block = kernel.pack(
        y=y, x=x, pos=pos, freq=freq, n_head=n_head, n_tok=n_tok,
        x_nb1=x_nb1, x_nb2=x_nb2, y_nb1=y_nb1, y_nb2=y_nb2, mscale=mscale,
    )  # fmt: skip
    return Step([Entry(kernel, block)], n_tok * n_head * head_dim * 8)
