"""Products of quantized rows with activations rounded to integers: the codes are multiplied as they are.

For each run of values with one scale the sum is

    scale * step * (sum of code * x - zero * sum of x) + offset * step * sum of x        (x: integers)

Activations are rounded in groups of 32 to multiples of a step: max|x| / 32639 for 16 bits, max|x| / 127 for 8. A group
with NaN or infinity has no finite step, which makes the result NaN; one of values under 2**-110 counts as zeros.

A rounded row of n values has its integers, unit by unit, and then for each unit the steps and the sums of its runs in
f32. A unit is the blocks that are decoded together; blocks that are left over are units of one. Where codes of panels
have a zero, there is -zero * sum of x (i32) instead of a run's sum: sums of products start with it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphrt.backends.cpu.fast.code_type import CodeType, blend
from graphrt.backends.cpu.fast.codes import CODE_TYPES
from graphrt.backends.cpu.fast.dot import Dot, best_dot
from graphrt.backends.cpu.fast.ir import F32, I16, I32, LANES, Fn, Val, Var, concat, widen
from graphrt.backends.cpu.fast.jit import Kernel, host
from graphrt.backends.cpu.fast.pool import LINE, Entry, Step

#: Values that share a step.
GROUP = 32
#: The largest integer by bits. Of 16 it is the largest whose high byte, rounded to nearest, is no more than 127.
LARGEST = {16: 127.0 * 256 + 127.0, 8: 127.0}
SMALLEST = 2.0**-110
#: Rows whose pieces are multiplied in turn with the pieces of activations that lie in the nearest cache.
AT_ONCE = 8
#: How many bytes ahead of its reading a row is asked for. The hardware looks ahead too, but not past the end of a page
#: of 4 KiB, and a page is read in 0.3 us.
AHEAD = 8192
#: Bytes ahead that are asked for from the second cache into the nearest.
SOON = 512
#: Of activations about as much as stays in the nearest cache while rows of weights pass by. A row that is longer by no
#: more than this is still one piece: rows then follow one another in address order, which memory likes.
PIECE_BYTES, SPARE_BYTES = 12 * 1024, 4 * 1024


@dataclass(frozen=True)
class Form:
    """How activations are rounded and lie for a type of weights; types of one `key` share them. bits: 8 or 16; panels:
    for panels of 16 rows."""

    type: CodeType
    dot: Dot
    bits: int
    panels: bool = False

    @property
    def parts(self) -> int:
        """Bytes of an integer."""
        return self.dot.parts(self.bits)

    @property
    def key(self) -> str:
        t = self.type
        start = f"_from_{self.zero}" if self.starts else ""
        return f"{t.layout.__name__}_{t.at_once}_{t.sub}_{self.dot.name}_{8 * self.parts}{start}"

    def runs(self, count: int) -> int:
        """Scales of `count` blocks."""
        return self.type.size * count // self.type.sub

    def biased(self, codes: Val) -> Val:
        """Codes as the instruction takes them."""
        return codes ^ -self.dot.bias if self.type.signed and self.dot.bias else codes

    @property
    def zero(self) -> int:
        """The code of the value `offset`, as the instruction takes codes."""
        return self.type.zero + (self.dot.bias if self.type.signed else 0)

    @property
    def starts(self) -> bool:
        """Rounded rows have where sums start, not sums of x."""
        return self.panels and self.dot.bias != 0 and self.zero != 0

    def panel_codes(self, codes: Val) -> Val:
        """Codes as panels have them: without their zero, where the instruction takes signed ones."""
        return self.biased(codes) if self.dot.bias or not self.type.zero else codes - self.type.zero

    @property
    def sum_values(self) -> int:
        """How many products with codes times their runs' numbers an i32 holds, 32 or 16; 0 where panels have codes."""
        if not self.type.largest or self.dot.columns == 1:
            return 0
        return next(n for n in (32, 16) if self.type.largest * LARGEST[16] * n < 2**31)

    def row_bytes(self, n: int) -> int:
        """Of a rounded row of n values: an odd number of cache lines, so that rows don't push each other out."""
        return (-(-(n * self.parts + 8 * n // self.type.sub) // LINE) | 1) * LINE


def form_of(type_name: str, bits: int) -> Form:
    """How this machine rounds activations for a type."""
    return Form(CODE_TYPES[type_name].of_rows, best_dot(host()), bits)


def panel_form_of(type_name: str, bits: int) -> Form:
    """How it rounds them for panels of 16 rows."""
    return Form(CODE_TYPES[type_name], best_dot(host()).of_panels(bits), bits, True)


@dataclass(frozen=True)
class Unit:
    """`count` blocks of a row: where they are in it, in blocks, and their integers and scales in a rounded row."""

    count: int
    block: Val
    integers: Val
    scales: Val


def for_units(f: Fn, form: Form, n: Val, body: Callable[[Unit], None], shared: bool = False) -> None:
    """body(unit) for each unit of a row of n values; shared: for this thread's."""
    for first, stop, count in block_ranges(f, form.type, n):
        units = (stop - first) // count
        start, end = f.share(units) if shared else (f.const(0), units)
        with f.range(start, end) as u:
            body(unit_at(form, n, first + u * count, count))


def block_ranges(f: Fn, t: CodeType, n: Val) -> list[tuple[Val, Val, int]]:
    """Of a row of n values: blocks from the first to before the second are units of so many, the largest first."""
    blocks, start, ranges = n // t.size, f.const(0), []
    for together in t.units:
        stop = blocks // together * together
        ranges.append((start, stop, together))
        start = stop
    return ranges


def unit_at(form: Form, n: Val, block: Val, count: int) -> Unit:
    """The unit of `count` blocks that begins at `block` of a row of n values."""
    size = form.type.size * form.parts
    return Unit(count, block, block * size, n * form.parts + block * (8 * form.runs(1)))


# rounding


def round_group(f: Fn, bits: int, lo: Val, hi: Val) -> tuple[Val, Val, Val]:
    """32 values -> their step, and their integers as two vectors of i32."""
    biggest = f.fold(f.max_or_nan(f.abs(lo), f.abs(hi)), f.max_or_nan)
    small = biggest < SMALLEST
    step = f.select(small, 0.0, biggest / LARGEST[bits])
    inverse = f.select(small, 0.0, LARGEST[bits] / biggest)
    finite = f.splat(biggest < float("inf"))
    lo, hi = (f.call("llvm.rint", f.select(finite, v * inverse, 0.0)).to_int(I32) for v in (lo, hi))
    return step, lo, hi


def in_order(values: Sequence[Val], indices: Sequence[int]) -> Val:
    """The values of these indices, a multiple of 16 of them. values: 16 lanes each."""
    parts = []
    for at in range(0, len(indices), LANES):
        places = [divmod(i, LANES) for i in indices[at : at + LANES]]
        found = {k: values[k].shuffle([lane if of == k else 0 for of, lane in places]) for k, _ in places}
        parts.append(blend([found[k] for k, _ in places]))
    return concat(parts)


def _round_unit(f: Fn, form: Form, unit: Unit, x: Val, dst: Val) -> None:
    t, size = form.type, form.type.size * unit.count
    bits = 8 * form.parts
    codes: list[Val] = []
    sums: list[Val] = []
    steps: list[Val] = []
    for at in range(0, size, GROUP):
        values = [f.load(x + unit.block * (4 * t.size) + 4 * (at + i), F32, LANES) for i in (0, LANES)]
        step, *pair = round_group(f, bits, *values)
        codes += [v.trunc(I16) for v in pair]
        for run in [pair[0] + pair[1]] if t.sub == GROUP else pair:
            steps.append(step)
            total = f.sum(run)
            sums.append((total * -form.zero).as_bits(F32) if form.starts else total.to(F32) * step)
    scales = dst + unit.scales
    f.store(scales, f.join(steps))
    f.store(scales + 4 * len(steps), f.join(sums))
    at = 0
    for chunk in t.layout(unit.count):
        form.dot.store(f, dst + unit.integers, in_order(codes, chunk), at, size, bits)
        at += len(chunk)


def _build_rounding(f: Fn, form: Form) -> None:
    dst, x, n_rows, n, x_nb, dst_nb = f.args("dst", "x", "n_rows", "n", "x_nb", "dst_nb")
    with f.range(0, n_rows) as r:
        row, target = x + r * x_nb, dst + r * dst_nb
        for_units(f, form, n, lambda unit: _round_unit(f, form, unit, row, target), shared=True)


@functools.cache
def rounding_kernel(key: str, form: Form) -> Kernel:
    names = ("dst", "x", "n_rows", "n", "x_nb", "dst_nb")
    return Kernel(f"round_{key}", names, lambda f: _build_rounding(f, form))


def round_rows(form: Form, *, dst: int, x: int, n_rows: int, n: int, x_nb: int) -> Step:
    """dst[r] = x[r], rounded for `form`. x: n_rows rows of n f32, x_nb bytes apart; dst: rows of form.row_bytes(n)."""
    kernel = rounding_kernel(form.key, form)
    dst_nb = form.row_bytes(n)
    args = kernel.pack(dst=dst, x=x, n_rows=n_rows, n=n, x_nb=x_nb, dst_nb=dst_nb)
    return Step([Entry(kernel, args)], n_rows * (4 * n + dst_nb))


# products


def integer_dots(f: Fn, form: Form, row: Val, xs: Sequence[Val], n: Val) -> list[Val]:
    """dot(row, x) for each rounded row x, in f32; n: values in a row."""
    sums = [f.var(f.zeros()) for _ in xs]
    for_units(f, form, n, lambda unit: _add_unit(f, form, unit, row, xs, sums, f.const(AHEAD)))
    if len(xs) == 1:
        return [f.sum(sums[0].v)]
    together = f.sum_each([total.v for total in sums])
    return [together[t] for t in range(len(xs))]


def many_dots(
    f: Fn, form: Form, rows: Val, w_nb: Val, count: Val, xs: Sequence[Val], n: Val, put: Callable[[int, Val], None]
) -> None:
    """put(t, lanes): the products of up to 16 rows with xs[t], f32 with a lane each; those past `count` are anything.

    Columns are taken piece by piece: the pieces of all x stay in the nearest cache while some rows pass by. Sums wait
    in memory.
    """
    t, vector, n_x = form.type, 4 * LANES, len(xs)
    kept = f.buffer(F32, LANES * LANES * n_x)
    (_, whole, together), *rest = block_ranges(f, form.type, n)
    n_pieces = f.max_int((whole * (n_x * form.parts * t.size) + (PIECE_BYTES - 1 - SPARE_BYTES)) // PIECE_BYTES, 1)
    piece = (whole // together + n_pieces - 1) // n_pieces * together
    with f.range(0, count, AT_ONCE) as j0, f.range(0, n_pieces) as i, f.range(0, AT_ONCE) as of_group:
        # rows past the last are the last again, in whose place their sums are of no harm
        j, start, is_last = f.min_int(j0 + of_group, count - 1), i * piece, (i + 1).eq(n_pieces)
        row, mine = rows + j * w_nb, kept + (j0 + of_group) * (n_x * vector)
        sums = [f.var(f.select(start.eq(0), f.zeros(), _kept(f, mine, k))) for k in range(n_x)]
        # what comes next: the row's next piece, and after the last one the row so many further on
        ahead = f.select(is_last, w_nb * AT_ONCE - i * piece * t.bytes, piece * t.bytes)
        # blocks that fill no unit are of the last piece
        left = [(first, f.select(is_last, stop, first), units) for first, stop, units in rest]
        for first, stop, units in [(start, f.min_int(start + piece, whole), together), *left]:
            with f.range(first, stop, units) as block:
                _add_unit(f, form, unit_at(form, n, block, units), row, xs, sums, ahead)
        for k, total in enumerate(sums):
            f.store(mine + k * vector, total.v)
    for k in range(n_x):
        put(k, f.sum_each([_kept(f, kept + j * (n_x * vector), k) for j in range(LANES)]))


def _kept(f: Fn, row: Val, k: int) -> Val:
    return f.load(row + k * (4 * LANES), F32, LANES)


def _add_unit(f: Fn, form: Form, unit: Unit, row: Val, xs: Sequence[Val], sums: Sequence[Var], ahead: Val) -> None:
    """Adds a unit's products to 16 sums for each x, whose sum is the dot. What lies `ahead` bytes further is asked for,
    and what comes soon once more."""
    t = form.type
    blocks = row + unit.block * t.bytes
    for line in range(0, t.bytes * unit.count, LINE):
        f.prefetch(blocks + (ahead + line), far=True)
        f.prefetch(blocks + (SOON + line))
    decoded = t.decode(f, blocks, unit.count)
    runs, size = form.runs(unit.count), t.size * unit.count
    # what sums of x are multiplied with: offsets, or what a run's codes have too much
    too_much = decoded.scales if form.starts else decoded.scales * -float(form.zero)
    weighted = decoded.offsets if decoded.offsets is not None else too_much
    at, chunks = 0, list[tuple[list[int], int, Val]]()  # the runs of a chunk's lanes, its first byte, its codes
    for codes, indices in zip(decoded.chunks, t.layout(unit.count), strict=True):
        chunks.append(([index // t.sub for index in indices[::4]], at, form.biased(codes)))
        at += len(indices)
    for x, total in zip(xs, sums, strict=True):
        steps, x_sums = (f.load(x + unit.scales + 4 * runs * i, F32, runs) for i in range(2))
        if form.starts:
            x_sums = x_sums.as_bits(I32).to(F32) * steps
        if t.offsets or form.zero:
            total.v = f.fma(widen(weighted), widen(x_sums), total.v)
        scale = decoded.scales * steps
        for of_lanes, group in itertools.groupby(chunks, lambda chunk: chunk[0]):
            _, ats, ws = zip(*group)  # chunks whose lanes have the same scales are summed up as integers
            dot = form.dot.chunks(f, ws, x + unit.integers, ats, size, 8 * form.parts)
            if dot.lanes == LANES:
                total.v = f.fma(dot.to(F32), scale.shuffle(of_lanes), total.v)
            else:
                total.v = total.v + widen(dot.to(F32) * scale.shuffle(of_lanes))
