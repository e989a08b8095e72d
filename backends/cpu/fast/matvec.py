"""Matrix times a few vectors, straight from GGUF's blocks: y[t] = W x[t] for 1 to 8 tokens, W read once.

x is f32, or rows that `integer.round_rows` made of it for the type of W.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphrt.backends.cpu.fast.amx_bytes import ByteTiles, Columns, byte_tiles
from graphrt.backends.cpu.fast.blocks import TYPES, BlockType, check_rows
from graphrt.backends.cpu.fast.integer import GROUP, Form, form_of, integer_dots, many_dots
from graphrt.backends.cpu.fast.ir import F32, LANES, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.math_ops import activation
from graphrt.backends.cpu.fast.pool import Entry, Step

MAX_TOKENS = 8
#: `bits` of activations that are not rounded.
F32_BITS = 32

#: Tokens in f32 that share one decoding of a row. A further group decodes it again, from the nearest cache: with more
#: sums in flight than this, registers and x's cache lines run out, which costs more.
TOKENS_AT_ONCE = 4
#: The same of rounded ones, by their bytes: more are taken in two halves, 16 rows of weights at a time.
ROUNDED_AT_ONCE = {1: 8, 2: 6}
#: And where 16 blocks of 32 are decoded together, which costs most.
ROUNDED_OF_32 = 8


@dataclass(frozen=True)
class Rows:
    """How rows of a type are multiplied. bits: 32 for x in f32, 16 or 8 for rounded rows."""

    type_name: str
    bits: int

    @property
    def name(self) -> str:
        """For the names of kernels."""
        if self.bits == F32_BITS:
            return self.type_name
        return f"{self.type_name}_{self._form.dot.name}_{8 * self._form.parts}"

    @property
    def _form(self) -> Form:
        return form_of(self.type_name, self.bits)

    @property
    def _at_once(self) -> int:
        """How many rounded rows share one decoding."""
        form = self._form
        return ROUNDED_OF_32 if form.type.size == GROUP else ROUNDED_AT_ONCE[form.parts]

    def dots(self, f: Fn, row: Val, xs: Sequence[Val], n: Val) -> list[Val]:
        """dot(row, x) for each x, in f32; n: values in a row."""
        if self.bits != F32_BITS:
            return integer_dots(f, self._form, row, xs, n)
        groups = [xs[i : i + TOKENS_AT_ONCE] for i in range(0, len(xs), TOKENS_AT_ONCE)]
        return [dot for group in groups for dot in _f32_dots(f, TYPES[self.type_name], row, group, n)]

    def all_dots(
        self, f: Fn, rows: Val, w_nb: Val, count: Val, xs: Sequence[Val], n: Val, targets: Sequence[Val]
    ) -> None:
        """Writes the dots of up to 16 rows with xs[t] to targets[t], f32 side by side."""
        if self.bits != F32_BITS and len(xs) > 1:
            half = -(-len(xs) // 2) if len(xs) > self._at_once else len(xs)
            for at in (0, half)[: -(-len(xs) // half)]:
                these = targets[at : at + half]
                put = functools.partial(_store, f, these)
                many_dots(f, self._form, rows, w_nb, count, xs[at : at + half], n, put)
            return
        with f.range(0, count) as j:
            for target, dot in zip(targets, self.dots(f, rows + j * w_nb, xs, n), strict=True):
                f.store(target + j * 4, dot)


#: How the rows of a matrix are multiplied.
Way = Rows | ByteTiles


def _way(type_name: str, bits: int, columns: Columns | None) -> Way:
    return Rows(type_name, bits) if columns is None else byte_tiles(type_name, columns)


def _store(f: Fn, targets: Sequence[Val], t: int, lanes: Val) -> None:
    f.store(targets[t], lanes)


def _f32_dots(f: Fn, block: BlockType, row: Val, xs: Sequence[Val], n: Val) -> list[Val]:
    """dot(row, x) for x in f32 of few tokens.

    One row at a time: rows side by side are faster in cache, but three times slower from memory, where only one
    stream in address order keeps the hardware prefetcher going.
    """
    # two sums for each dot hide the latency of the fused multiply-add
    sums = [[f.var(f.zeros()) for _ in range(2)] for _ in xs]
    n_blocks = n // block.size
    with f.range(0, n_blocks) as i:
        address, x_off = row + i * block.bytes, i * (block.size * 4)
        at = turn = 0
        for group in block.decode(f, address):
            # a weight used once need not be multiplied by its scale: the sum can be
            scale_sum = group.scale if len(xs) == 1 and group.offset is None else None
            values = group.values(f) if scale_sum is None else group.q
            for x, pair in zip(xs, sums, strict=True):
                x_values = [f.load(x + x_off + 4 * (at + LANES * k), F32, LANES) for k in range(len(values))]
                if scale_sum is not None:
                    part = values[0] * x_values[0]
                    for v, x_v in zip(values[1:], x_values[1:], strict=True):
                        part = f.fma(v, x_v, part)
                    pair[turn].v = f.fma(part, scale_sum, pair[turn].v)
                else:
                    for k, (v, x_v) in enumerate(zip(values, x_values, strict=True)):
                        acc = pair[(turn + k) % 2]
                        acc.v = f.fma(v, x_v, acc.v)
            at += LANES * len(values)
            turn ^= 1
    halves = [a.v + b.v for a, b in sums]
    totals = f.sum_each(halves) if len(halves) > 1 else None
    dots = [f.var(totals[t] if totals is not None else f.sum(halves[0])) for t in range(len(xs))]
    if block.is_plain:
        with f.range(n_blocks * block.size, n) as i:
            w = block.element(f, row + i * block.value_bytes)
            for x, dot in zip(xs, dots, strict=True):
                dot.v = f.fma(w, f.load(x + i * 4, F32), dot.v)
    return [d.v for d in dots]


def _build(
    f: Fn, matrices: Sequence[tuple[Way, str]], n_tok: int, finish: Callable[[int, Val, list[Val]], Val]
) -> None:
    """For each row r and token t: y[t, r] = finish(t, byte offset of r, [dot of each matrix]).

    matrices: how rows are multiplied, and what the arguments' names end in.

    16 rows of one matrix, then the same of the next: each stays a long stream in address order, `finish` works on full
    vectors, and y is written a cache line at a time (token by token it would hit lines that alias one another).
    """
    y, n_rows, n, y_nb = f.args("y", "n_rows", "n", "y_nb")
    dots = f.buffer(F32, LANES * n_tok * len(matrices))

    def slot(t: int, m: int) -> Val:
        return dots + 4 * LANES * (t * len(matrices) + m)

    tiles = next((rows for rows, _ in matrices if isinstance(rows, ByteTiles)), None)  # all set up the same
    if tiles is not None:
        tiles.begin(f)
    start, stop = f.share(n_rows, LANES)
    with f.range(start, stop, LANES) as r0:
        count = f.min_int(stop - r0, LANES)
        for m, (rows, suffix) in enumerate(matrices):
            w, x, w_nb, x_nb = f.args(*(name + suffix for name in ("w", "x", "w_nb", "x_nb")))
            xs = [x + x_nb * t for t in range(n_tok)]
            rows.all_dots(f, w + r0 * w_nb, w_nb, count, xs, n, [slot(t, m) for t in range(n_tok)])

        def write(i: Val, lanes: int) -> None:
            offset = (r0 + i) * 4
            for t in range(n_tok):
                values = [f.load(slot(t, m) + i * 4, F32, lanes) for m in range(len(matrices))]
                f.store(y + y_nb * t + offset, finish(t, offset, values))

        f.elements(count, write)
    if tiles is not None:
        tiles.end(f)


def _build_gemv(f: Fn, rows: Way, n_tok: int) -> None:
    res, res_nb = f.args("res", "res_nb")

    def add_residual(t: int, offset: Val, values: list[Val]) -> Val:
        total = f.var(values[0])
        with f.if_(res.ne(0)):
            total.v = total.v + f.load(res + res_nb * t + offset, F32, values[0].lanes)
        return total.v

    _build(f, [(rows, "")], n_tok, add_residual)


def _build_glu(f: Fn, gate: Way, up: Way, n_tok: int, act: str) -> None:
    matrices = [(gate, "_gate"), (up, "_up")]
    _build(f, matrices, n_tok, lambda _t, _offset, gu: activation(f, act, gu[0]) * gu[1])


@functools.cache
def _gemv_kernel(name: str, rows: Way, n_tok: int) -> Kernel:
    return Kernel(
        f"gemv_{name}_t{n_tok}",
        ("y", "w", "x", "res", "n_rows", "n", "w_nb", "x_nb", "y_nb", "res_nb"),
        lambda f: _build_gemv(f, rows, n_tok),
        optional=("res", "res_nb", "x_nb", "y_nb"),
    )


def gemv_kernel(rows: Way, n_tok: int) -> Kernel:
    return _gemv_kernel(rows.name, rows, n_tok)


@functools.cache
def _glu_gemv_kernel(name: str, gate: Way, up: Way, n_tok: int, act: str) -> Kernel:
    return Kernel(
        f"gemv_glu_{name}_t{n_tok}_{act}",
        (
            "y",
            "w_gate",
            "w_up",
            "x_gate",
            "x_up",
            "n_rows",
            "n",
            "w_nb_gate",
            "w_nb_up",
            "x_nb_gate",
            "x_nb_up",
            "y_nb",
        ),
        lambda f: _build_glu(f, gate, up, n_tok, act),
        optional=("x_nb_gate", "x_nb_up", "y_nb"),
    )


def _check(n: int, n_tok: int, *names: str) -> None:
    if not 1 <= n_tok <= MAX_TOKENS:
        raise ValueError(f"n_tok must be 1 to {MAX_TOKENS}, got {n_tok}; multiply matrices for more")
    check_rows(n, *names)


def gemv(
    type_name: str,
    *,
    y: int,
    w: int,
    x: int,
    n_rows: int,
    n: int,
    w_nb: int,
    n_tok: int = 1,
    x_nb: int = 0,
    y_nb: int = 0,
    res: int = 0,
    res_nb: int = 0,
    bits: int = F32_BITS,
    columns: Columns | None = None,
) -> Step:
    """y[t, r] = dot(W[r], x[t]) (+ res[t, r]).

    w: n_rows rows of n values of `type_name`, w_nb bytes apart. x [n_tok, n], y and res [n_tok, n_rows]: f32, rows
    x_nb, y_nb, res_nb bytes apart. res may be y itself; x may not be y. bits: 16 or 8 where x are rows that
    round_rows() rounded to so many for this type. columns: what columns_of() gave where x is what round_columns() made.
    """
    _check(n, n_tok, type_name)
    args = gemv_kernel(_way(type_name, bits, columns), n_tok)
    block = args.pack(y=y, w=w, x=x, res=res, n_rows=n_rows, n=n, w_nb=w_nb, x_nb=x_nb, y_nb=y_nb, res_nb=res_nb)
    return Step([Entry(args, block)], n_rows * w_nb)


def gemv_glu(
    gate_type: str,
    up_type: str,
    act: str,
    *,
    y: int,
    w_gate: int,
    w_up: int,
    x_gate: int,
    x_up: int,
    n_rows: int,
    n: int,
    w_nb_gate: int,
    w_nb_up: int,
    n_tok: int = 1,
    x_nb_gate: int = 0,
    x_nb_up: int = 0,
    y_nb: int = 0,
    bits: tuple[int, int] = (F32_BITS, F32_BITS),
    columns: tuple[Columns | None, Columns | None] = (None, None),
) -> Step:
    """y[t, r] = act(dot(Wg[r], x[t])) * dot(Wu[r], x[t]); act: "silu", "gelu" (tanh form) or "relu". As `gemv`.

    x_gate and x_up: the same rows, in the form that each matrix wants.
    """
    _check(n, n_tok, gate_type, up_type)
    gate, up = _way(gate_type, bits[0], columns[0]), _way(up_type, bits[1], columns[1])
    kernel = _glu_gemv_kernel(f"{gate.name}_{up.name}", gate, up, n_tok, act)
    block = kernel.pack(
        y=y, w_gate=w_gate, w_up=w_up, x_gate=x_gate, x_up=x_up, n_rows=n_rows, n=n, w_nb_gate=w_nb_gate,
        w_nb_up=w_nb_up, x_nb_gate=x_nb_gate, x_nb_up=x_nb_up, y_nb=y_nb,
    )  # fmt: skip
    return Step([Entry(kernel, block)], n_rows * (w_nb_gate + w_nb_up))
