"""A quantized matrix times many vectors of rounded activations, 16 rows at a time: y[t] = W x[t].

The codes of 16 rows are unpacked once into a panel, four codes of each row side by side, so that one vector has four
values of all 16 rows. An instruction multiplies it with four activations of one token, and each lane sums up its own
row: nothing is shuffled, and scales are applied once for each run of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphrt.backends.cpu.fast.integer import Form, Unit, for_units, form_of
from graphrt.backends.cpu.fast.ir import F32, I32, I64, LANES, Fn, Val, Var, widen
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.matvec import check_rows
from graphrt.backends.cpu.fast.pool import LINE, Entry, Step

#: Tokens that a vector of codes is multiplied with before the next is loaded.
TOKENS = 4


def panel_bytes(form: Form, n: int) -> int:
    """What a thread needs for 16 rows of n values: codes, scales and offsets."""
    return LANES * n + 2 * (n // form.type.sub) * LANES * 4


@dataclass(frozen=True)
class Panel:
    """Where 16 rows lie unpacked. codes: 64 bytes for four codes; scales, offsets: 16 f32 for each run."""

    codes: Val
    scales: Val
    offsets: Val


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


def _unpack(f: Fn, form: Form, unit: Unit, rows: Val, last: Val, w_nb: Val, panel: Panel) -> None:
    """One unit of 16 rows, of which those past the last repeat it; run by run."""
    t = form.type
    size = t.size * unit.count
    codes, scales = f.buffer(F32, LANES * size // 4), f.buffer(F32, 2 * LANES * LANES)
    zero = t.zero + (form.dot.bias if t.signed else 0)
    with f.range(0, LANES) as j:
        blocks = rows + f.min_int(j, last) * w_nb + unit.block * t.bytes
        for line in range(0, t.bytes * unit.count, LINE):
            f.prefetch(blocks + (w_nb * LANES + line))  # of the 16 rows that follow
        decoded = t.decode(f, blocks, unit.count)
        at = 0
        for chunk in decoded.chunks:
            f.store(codes + j * size + at, form.biased(chunk))
            at += chunk.lanes
        offsets = decoded.offsets if decoded.offsets is not None else decoded.scales * -float(zero)
        f.store(scales + j * 64, widen(decoded.scales))
        f.store(scales + j * 64 + 1024, widen(offsets))
    target, words = panel.codes + unit.block * (t.size * LANES), _by_run(form, unit.count)
    where = {place: 64 * i for i, place in enumerate(place for run in words for place in run)}
    at = 0
    for chunk_layout in t.layout(unit.count):
        for i, column in enumerate(_columns(f, codes + at, size, len(chunk_layout) // 4)):
            f.store(target + where[_Place(at, len(chunk_layout), 4 * i)], column)
        at += len(chunk_layout)
    for source, dst in ((scales, panel.scales), (scales + 1024, panel.offsets)):
        for run, column in enumerate(_columns(f, source, 64, len(words))):
            f.store(dst + (unit.block * form.runs(1) + run) * 64, column)


def _segments(words: list[list[_Place]]) -> int:
    """Words that lie side by side in every run."""
    n = len(words[0])
    while any(run[i].lane + 4 != run[i + 1].lane for run in words for i in range(len(run) - 1) if (i + 1) % n):
        n //= 2
    return n


def _add_unit(f: Fn, form: Form, unit: Unit, panel: Panel, xs: Sequence[Val], sums: list[Var]) -> None:
    """One unit of 16 rows times some tokens: a run of values after the other."""
    t, dot, words = form.type, form.dot, _by_run(form, unit.count)
    size, runs, bits = t.size * unit.count, form.runs(unit.count), 8 * form.parts
    together, n_words = _segments(words), len(words[0])
    firsts = [dot.place(run[i].at, run[i].lane) for run in words for i in range(0, n_words, together)]
    places = f.table(f"places_{unit.count}", firsts, I64)
    source = panel.codes + unit.block * (t.size * LANES)
    with f.range(0, runs) as run:
        totals = [dot.start(f, bits) for _ in xs]
        for i in range(n_words):
            if i % together == 0:
                segment = f.load(places + (run * (n_words // together) + i // together) * 8, I64)
            w = dot.prepared(f, f.load(source + run * (64 * n_words) + 64 * i, I32, LANES))
            for k, x in enumerate(xs):
                at = x + unit.integers + segment + 4 * (i % together)
                totals[k] = dot.add(f, totals[k], w, at, words[0][0].lanes, size)
        at_run = (unit.block * form.runs(1) + run) * 64
        scale, offset = (f.load(p + at_run, F32, LANES) for p in (panel.scales, panel.offsets))
        for x, total, acc in zip(xs, totals, sums, strict=True):
            step, x_sum = (f.splat(f.load(x + unit.scales + run * 4 + 4 * runs * i, F32)) for i in range(2))
            acc.v = f.fma(offset, x_sum, f.fma(dot.end(total).to(F32) * step, scale, acc.v))


def dots(f: Fn, form: Form, panel: Panel, n: Val, xs: Sequence[Val]) -> list[Val]:
    """16 rows times each rounded row x: vectors with a lane a row."""
    sums = [f.var(f.zeros()) for _ in xs]
    for_units(f, form, n, lambda unit: _add_unit(f, form, unit, panel, xs, sums))
    return [total.v for total in sums]


def put_rows(f: Fn, total: Val, rows: Val, target: Val, added: Val, adds: Val) -> None:
    """Writes the first `rows` lanes to target, with what is at `added` where `adds` is not 0."""
    whole = f.buffer(F32, LANES)
    f.store(whole, total)

    def put(j: Val, lanes: int) -> None:
        value = f.var(f.load(whole + j * 4, F32, lanes if lanes > 1 else 0))
        with f.if_(adds.ne(0)):
            value.v = value.v + f.load(added + j * 4, F32, lanes if lanes > 1 else 0)
        f.store(target + j * 4, value.v)

    f.elements(rows, put)


#: put(found, write): write(t, lanes) for each token that is not there for the count alone.
PutEach = Callable[[list[Val], Callable[[Val, Val], None]], None]


def in_fours(f: Fn, first: Val, stop: Val, body: Callable[[list[Val], PutEach], None]) -> None:
    """body(tokens, put) for each four of first .. stop; the last is there several times where some are left over."""
    with f.range(first, stop, TOKENS) as start:
        these = [f.min_int(start + i, stop - 1) for i in range(TOKENS)]

        def put(found: list[Val], write: Callable[[Val, Val], None]) -> None:
            buffer = f.buffer(F32, LANES * TOKENS)
            for k, lanes in enumerate(found):
                f.store(buffer + k * (4 * LANES), lanes)
            with f.range(0, f.min_int(stop - start, TOKENS)) as i:
                write(start + i, f.load(buffer + i * (4 * LANES), F32, LANES))

        body(these, put)


def own_panel(f: Fn, form: Form, panels: Val, n: Val) -> Panel:
    """This thread's memory for 16 rows of n values, of those at `panels`."""
    runs = n // form.type.sub
    mine = panels + f.ith * (n * LANES + runs * (2 * LANES * 4))
    return Panel(mine, mine + n * LANES, mine + n * LANES + runs * (LANES * 4))


def unpack_rows(f: Fn, form: Form, n: Val, first: Val, rows: Val, w_nb: Val, panel: Panel) -> None:
    """`rows` rows of weights, at most 16, whose first is at `first`, into a panel."""
    for_units(f, form, n, lambda unit: _unpack(f, form, unit, first, rows - 1, w_nb, panel))


def _build(f: Fn, form: Form) -> None:
    w, w_nb, panels, n_panels, n_rows, n, n_tok = f.args("w", "w_nb", "panels", "n_panels", "n_rows", "n", "n_tok")
    y, x, res, y_nb, x_nb, res_nb = f.args("y", "x", "res", "y_nb", "x_nb", "res_nb")
    f.nth = f.min_int(f.nth, n_panels)  # further threads find no rows
    panel = own_panel(f, form, panels, n)
    start, stop = f.share(n_rows, LANES)
    with f.range(start, stop, LANES) as r0:
        rows = f.min_int(stop - r0, LANES)
        unpack_rows(f, form, n, w + r0 * w_nb, rows, w_nb, panel)

        def tokens(these: list[Val], put: PutEach) -> None:
            found = dots(f, form, panel, n, [x + t * x_nb for t in these])
            put(found, lambda t, lanes: put_rows(f, lanes, rows, y + t * y_nb + r0 * 4, res + t * res_nb + r0 * 4, res))

        in_fours(f, f.const(0), n_tok, tokens)


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
    form = form_of(type_name, bits)
    kernel = gemm_kernel(type_name, form)
    args = kernel.pack(
        y=y, w=w, x=x, res=res, panels=panels, n_panels=n_panels, n_rows=n_rows, n=n, n_tok=n_tok, w_nb=w_nb, x_nb=x_nb,
        y_nb=y_nb, res_nb=res_nb,
    )  # fmt: skip
    return Step([Entry(kernel, args)], n_rows * (w_nb + 4 * n_tok) * (1 + n_tok // 8))
