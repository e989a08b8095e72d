"""A quantized matrix times many vectors of rounded activations, 16 rows at a time: y[t] = W x[t].

The codes of 16 rows are unpacked once into a panel, four codes of each row side by side, or two and two as words, so
that one vector has values of all 16 rows. An instruction multiplies it with as many activations of one token, and each
lane sums up its own row: nothing is shuffled, and scales are applied once for each run of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphrt.backends.cpu.fast.blocks import check_rows
from graphrt.backends.cpu.fast.integer import GROUP, Form, Unit, block_ranges, panel_form_of, unit_at
from graphrt.backends.cpu.fast.ir import F32, I16, I32, I64, LANES, Fn, Val, Var, widen
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.pool import LINE, Entry, Step

#: Tokens that a vector of codes is multiplied with before the next is loaded.
TOKENS = 4
#: Values of each row in a panel: it stays in the nearest cache while all tokens pass by.
PIECE = 512


def piece_blocks(form: Form) -> int:
    """Blocks of a row that are unpacked at once."""
    return max(PIECE // form.type.size, form.type.at_once)


def panel_bytes(form: Form, n_tok: int) -> int:
    """What a thread needs for 16 rows: a piece's codes, scales and offsets, and the sums of each token."""
    return _codes_bytes(form) + 2 * _scales_bytes(form) + 4 * LANES * n_tok


def _codes_bytes(form: Form) -> int:
    return piece_blocks(form) * form.type.size * LANES * form.dot.columns


def _scales_bytes(form: Form) -> int:
    return form.runs(piece_blocks(form)) * LANES * 4


@dataclass(frozen=True)
class Panel:
    """Where a piece of 16 rows lies unpacked. codes: 64 bytes for four codes, 128 as words; scales, offsets: 16 f32 for
    each run; sums: 16 f32 for each token, of the pieces so far.

    Words may be codes times their runs' numbers (`Form.sum_values`): scales are one for each block then.
    """

    codes: Val
    scales: Val
    offsets: Val
    sums: Val


@dataclass(frozen=True)
class Piece:
    """Units of `count` blocks of a row of n values, from block `first` to `stop`."""

    n: Val
    first: Val
    stop: Val
    count: int

    def units(self, f: Fn, form: Form, body: Callable[[Unit, Val], None]) -> None:
        """body(unit, the number of its first block in the piece)."""
        with f.range(self.first, self.stop, self.count) as block:
            body(unit_at(form, self.n, block, self.count), block - self.first)


def for_pieces(f: Fn, form: Form, n: Val, body: Callable[[Piece], None]) -> None:
    """body(piece) for each piece of a row of n values."""
    step = piece_blocks(form)
    for first, stop, count in block_ranges(f, form.type, n):
        with f.range(first, stop, step) as block:
            body(Piece(n, block, f.min_int(block + step, stop), count))


def _columns(f: Fn, p: Val, stride: int, n: int) -> list[Val]:
    """n vectors of 32-bit words, at most 16, each the same word of 16 rows, `stride` bytes apart."""
    return f.transpose([widen(f.load(p + stride * row, I32, n)) for row in range(LANES)], n)


@dataclass(frozen=True)
class _Place:
    """A word of four codes: its chunk's first byte and length, and its first lane in it."""

    at: int
    lanes: int
    lane: int


def _by_run(form: Form, count: int) -> list[list[_Place]]:
    """The words of each run of values."""
    words: list[list[_Place]] = [[] for _ in range(form.runs(count))]
    at = 0
    for chunk in form.type.layout(count):
        for lane in range(0, len(chunk), 4):
            words[chunk[lane] // form.type.sub].append(_Place(at, len(chunk), lane))
        at += len(chunk)
    return words


def _unpack(f: Fn, form: Form, unit: Unit, place: Val, rows: Val, last: Val, w_nb: Val, panel: Panel) -> None:
    """One unit of 16 rows, of which those past the last repeat it; run by run. place: its first block in the piece."""
    t = form.type
    size = t.size * unit.count
    codes, scales, wholes = (f.buffer(F32, n) for n in (LANES * size // 4, 2 * LANES * LANES, LANES))
    columns, words = form.dot.columns, _by_run(form, unit.count)
    numbers: list[Val] | None = [] if form.sum_values else None  # of each run, for all rows
    with f.range(0, LANES) as j:
        blocks = rows + f.min_int(j, last) * w_nb + unit.block * t.bytes
        for line in range(0, t.bytes * unit.count, LINE):
            f.prefetch(blocks + (w_nb * LANES + line))  # of the 16 rows that follow
        decoded = t.decode(f, blocks, unit.count)
        at = 0
        for chunk in decoded.chunks:
            f.store(codes + j * size + at, form.panel_codes(chunk))
            at += chunk.lanes
        if numbers is None or decoded.numbers is None:
            f.store(scales + j * 64, widen(decoded.scales))
        else:
            f.store(scales + j * 64, widen(decoded.numbers[0]))
            f.store(wholes + j * 4, decoded.numbers[1][0])
        if decoded.offsets is not None:
            f.store(scales + j * 64 + 1024, widen(decoded.offsets))
    by_run = _columns(f, scales, 64, len(words))
    if numbers is not None:
        numbers += [_pairs_of(column) for column in by_run]
        by_run = [f.load(wholes, I32, LANES)]
    target = panel.codes + place * (t.size * LANES * columns)
    where = {spot: 64 * columns * i for i, spot in enumerate(spot for run in words for spot in run)}
    at = 0
    for layout in t.layout(unit.count):
        for i, column in enumerate(_columns(f, codes + at, size, len(layout) // 4)):
            for part, prepared in enumerate(form.dot.prepared(f, column)):
                value = prepared if not numbers else prepared * numbers[layout[4 * i] // t.sub]
                f.store(target + where[_Place(at, len(layout), 4 * i)] + 64 * part, value)
        at += len(layout)
    for i, column in enumerate(by_run):
        f.store(panel.scales + (place * form.runs(1) + i) * 64, column)
    if t.offsets:
        for i, column in enumerate(_columns(f, scales + 1024, 64, len(words))):
            f.store(panel.offsets + (place * form.runs(1) + i) * 64, column)


def _pairs_of(numbers: Val) -> Val:
    """Whole numbers as f32 lanes -> each twice, i16."""
    n = numbers.as_bits(F32).to_int(I32)
    return ((n & 0xFFFF) | (n << 16)).bits(I16, 2 * LANES)


def _segments(words: list[list[_Place]]) -> int:
    """Words that lie side by side in every run."""
    n = len(words[0])
    while any(run[i].lane + 4 != run[i + 1].lane for run in words for i in range(len(run) - 1) if (i + 1) % n):
        n //= 2
    return n


def _add_unit(f: Fn, form: Form, unit: Unit, place: Val, panel: Panel, xs: Sequence[Val], sums: list[Var]) -> None:
    """One unit of 16 rows times some tokens: a run of values after the other. place: its first block in the piece."""
    t, dot, words = form.type, form.dot, _by_run(form, unit.count)
    size, runs, bits = t.size * unit.count, form.runs(unit.count), 8 * form.parts
    together, n_words = _segments(words), len(words[0])
    firsts = [dot.place(run[i].at, run[i].lane) for run in words for i in range(0, n_words, together)]
    places = f.table(f"places_{unit.count}", firsts, I64)
    source = panel.codes + place * (t.size * LANES * dot.columns)
    per_step, whole = GROUP // t.sub, bool(form.sum_values)  # runs whose activations have the same step
    in_unit = [f.var(f.zeros()) for _ in xs] if whole else sums
    with f.range(0, runs, per_step) as first:
        values: list[Val | None] = [None for _ in xs]
        for run in (first + i for i in range(per_step)):
            at_run = (place * form.runs(1) + run) * 64
            of_run = unit.scales + (run * 4 + 4 * runs)
            if t.offsets:
                offset = f.load(panel.offsets + at_run, F32, LANES)
                for x, acc in zip(xs, sums, strict=True):
                    acc.v = f.fma(offset, f.splat(f.load(x + of_run, F32)), acc.v)
            scale = None if whole else f.load(panel.scales + at_run, F32, LANES)
            first_sums = [f.splat(f.load(x + of_run, I32)) if form.starts else None for x in xs]
            totals = [dot.start(f, bits, at_first) for at_first in first_sums]
            for i in range(n_words):
                if i % together == 0:
                    segment = f.load(places + (run * (n_words // together) + i // together) * 8, I64) + unit.integers
                codes = source + (run * n_words + i) * (64 * dot.columns)
                w = [f.load(codes + 64 * part, I32, LANES) for part in range(dot.columns)]
                for k, x in enumerate(xs):
                    at = x + segment + 4 * (i % together)
                    totals[k] = dot.add(f, totals[k], w, at, words[0][0].lanes, size)
                if i + 1 == n_words or (i + 1) * 4 == form.sum_values:
                    values = [
                        _plus(f, dot.end(total), scale, value) for total, value in zip(totals, values, strict=True)
                    ]
                    totals = [dot.start(f, bits) for _ in xs]
        for x, value, acc in zip(xs, values, in_unit, strict=True):
            assert value is not None
            acc.v = f.fma(value, f.splat(f.load(x + (unit.scales + first * 4), F32)), acc.v)
    if whole:
        scale = f.load(panel.scales + place * (form.runs(1) * 64), F32, LANES)
        for acc, part in zip(sums, in_unit, strict=True):
            acc.v = f.fma(part.v, scale, acc.v)


def _plus(f: Fn, total: Val, scale: Val | None, before: Val | None) -> Val:
    """before + total * scale, where they are there."""
    value = total.to(F32)
    if before is None:
        return value if scale is None else value * scale
    return value + before if scale is None else f.fma(value, scale, before)


def add_piece(f: Fn, form: Form, panel: Panel, piece: Piece, n_tok: Val, row_of: Callable[[Val], Val]) -> None:
    """Adds a piece's products to panel.sums. row_of(t): the rounded row of token t, of n_tok."""
    with f.range(0, n_tok, TOKENS) as start:
        # past the last token it is the last again, in whose place its sums are of no harm
        these = [f.min_int(start + i, n_tok - 1) for i in range(TOKENS)]
        kept, xs = [panel.sums + t * (4 * LANES) for t in these], [row_of(t) for t in these]
        sums = [f.var(f.select(piece.first.eq(0), f.zeros(), f.load(at, F32, LANES))) for at in kept]
        piece.units(f, form, lambda unit, place: _add_unit(f, form, unit, place, panel, xs, sums))
        for at, total in zip(kept, sums, strict=True):
            f.store(at, total.v)


def put_rows(f: Fn, sums: Val, rows: Val, target: Val, added: Val, adds: Val) -> None:
    """Writes the first `rows` of the sums to target, with what is at `added` where `adds` is not 0."""

    def put(j: Val, lanes: int) -> None:
        value = f.var(f.load(sums + j * 4, F32, lanes if lanes > 1 else 0))
        with f.if_(adds.ne(0)):
            value.v = value.v + f.load(added + j * 4, F32, lanes if lanes > 1 else 0)
        f.store(target + j * 4, value.v)

    f.elements(rows, put)


def own_panel(f: Fn, form: Form, panels: Val, n_tok: Val) -> Panel:
    """This thread's memory for 16 rows and n_tok tokens, of those at `panels`."""
    codes, scales = _codes_bytes(form), _scales_bytes(form)
    mine = panels + f.ith * (n_tok * (4 * LANES) + (codes + 2 * scales))
    return Panel(mine, mine + codes, mine + (codes + scales), mine + (codes + 2 * scales))


def multiply_rows(
    f: Fn, form: Form, panel: Panel, n: Val, first: Val, rows: Val, w_nb: Val, n_tok: Val, row_of: Callable[[Val], Val]
) -> None:
    """panel.sums: the products of `rows` rows of weights, at most 16, whose first is at `first`, with the rounded rows
    row_of(t) of n_tok tokens."""

    def one(piece: Piece) -> None:
        piece.units(f, form, lambda unit, place: _unpack(f, form, unit, place, first, rows - 1, w_nb, panel))
        add_piece(f, form, panel, piece, n_tok, row_of)

    for_pieces(f, form, n, one)


def _build(f: Fn, form: Form) -> None:
    w, w_nb, panels, n_panels, n_rows, n, n_tok = f.args("w", "w_nb", "panels", "n_panels", "n_rows", "n", "n_tok")
    y, x, res, y_nb, x_nb, res_nb = f.args("y", "x", "res", "y_nb", "x_nb", "res_nb")
    f.nth = f.min_int(f.nth, n_panels)  # further threads find no rows
    panel = own_panel(f, form, panels, n_tok)
    start, stop = f.share(n_rows, LANES)
    with f.range(start, stop, LANES) as r0:
        rows = f.min_int(stop - r0, LANES)
        multiply_rows(f, form, panel, n, w + r0 * w_nb, rows, w_nb, n_tok, lambda t: x + t * x_nb)
        with f.range(0, n_tok) as t:
            put_rows(f, panel.sums + t * (4 * LANES), rows, y + t * y_nb + r0 * 4, res + t * res_nb + r0 * 4, res)


def gemm_bytes(n_rows: int, w_nb: int, n_tok: int) -> int:
    """About what a product of n_rows rows, w_nb bytes apart, and n_tok tokens reads and writes: Step.bytes."""
    return n_rows * (w_nb + 4 * n_tok) * (1 + n_tok // 8)


@functools.cache
def gemm_kernel(type_name: str, form: Form) -> Kernel:
    return Kernel(
        f"gemm_{type_name}_{form.dot.name}_{8 * form.parts}",
        ("y", "w", "x", "res", "panels", "n_panels", "n_rows", "n", "n_tok", "w_nb", "x_nb", "y_nb", "res_nb"),
        lambda f: _build(f, form),
        optional=("res", "res_nb"),
    )


def gemm(
    type_name: str,
    *,
    y: int,
    w: int,
    x: int,
    panels: int,
    n_panels: int,
    n_rows: int,
    n: int,
    n_tok: int,
    w_nb: int,
    x_nb: int,
    y_nb: int,
    bits: int,
    res: int = 0,
    res_nb: int = 0,
) -> Step:
    """y[t, r] = dot(W[r], x[t]) (+ res[t, r]), for any number of tokens.

    w: n_rows rows of n values of `type_name`, w_nb bytes apart. x: n_tok rows that round_rows() rounded to `bits` (16
    or 8) for this type, y and res [n_tok, n_rows]: f32; x_nb, y_nb, res_nb: bytes between rows. res may be y itself.
    panels: n_panels times panel_bytes() of memory; so many threads may work.
    """
    check_rows(n, type_name)
    form = panel_form_of(type_name, bits)
    kernel = gemm_kernel(type_name, form)
    args = kernel.pack(
        y=y, w=w, x=x, res=res, panels=panels, n_panels=n_panels, n_rows=n_rows, n=n, n_tok=n_tok, w_nb=w_nb, x_nb=x_nb,
        y_nb=y_nb, res_nb=res_nb,
    )  # fmt: skip
    return Step([Entry(kernel, args)], gemm_bytes(n_rows, w_nb, n_tok))
