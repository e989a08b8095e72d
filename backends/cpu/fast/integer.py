"""Products of quantized rows with activations rounded to integers: the codes are multiplied as they are.

For each run of values with one scale the sum is

    scale * step * (sum of code * x - zero * sum of x) + offset * step * sum of x        (x: integers)

Activations are rounded in groups of 32 to multiples of a step: max|x| / 32639 for 16 bits, max|x| / 127 for 8. A group
with NaN or infinity has no finite step, which makes the result NaN; one of values under 2**-110 counts as zeros.

A rounded row of n values has its integers, unit by unit, and then for each unit the steps and the sums of its runs in
f32. A unit is the blocks that are decoded together; blocks that are left over are units of one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphrt.backends.cpu.fast.code_type import CodeType
from graphrt.backends.cpu.fast.codes import CODE_TYPES
from graphrt.backends.cpu.fast.dot import Dot, best_dot
from graphrt.backends.cpu.fast.ir import F32, I32, LANES, Fn, Val, Var, widen
from graphrt.backends.cpu.fast.jit import Kernel, host
from graphrt.backends.cpu.fast.pool import LINE, Entry, Step

#: Values that share a step.
GROUP = 32
#: The largest integer by bits. Of 16 it is the largest whose high byte, rounded to nearest, is no more than 127.
LARGEST = {16: 127.0 * 256 + 127.0, 8: 127.0}
SMALLEST = 2.0**-110
#: How many bytes ahead of its reading a row is asked for. The hardware looks ahead too, but not past the end of a page
#: of 4 KiB, and a page is read in 0.3 us.
AHEAD = 4096


@dataclass(frozen=True)
class Form:
    """How activations are rounded and lie for one type of weights. bits: 8 or 16; types of one `key` share them."""

    type: CodeType
    dot: Dot
    bits: int

    @property
    def parts(self) -> int:
        """Bytes of an integer."""
        return self.dot.parts(self.bits)

    @property
    def key(self) -> str:
        t = self.type
        return f"{t.layout.__name__}_{t.at_once}_{t.sub}_{self.dot.name}_{8 * self.parts}"

    def runs(self, count: int) -> int:
        """Scales of `count` blocks."""
        return self.type.size * count // self.type.sub

    def biased(self, codes: Val) -> Val:
        """Codes as the instruction takes them."""
        return codes ^ -self.dot.bias if self.type.signed and self.dot.bias else codes

    def row_bytes(self, n: int) -> int:
        """Of a rounded row of n values."""
        return -(-(n * self.parts + 8 * n // self.type.sub) // 64) * 64


def form_of(type_name: str, bits: int) -> Form:
    """How this machine rounds activations for a type."""
    return Form(CODE_TYPES[type_name], best_dot(host()), bits)


@dataclass(frozen=True)
class Unit:
    """`count` blocks of a row: where they are in it, in blocks, and their integers and scales in a rounded row."""

    count: int
    block: Val
    integers: Val
    scales: Val


def for_units(f: Fn, form: Form, n: Val, body: Callable[[Unit], None], shared: bool = False) -> None:
    """body(unit) for each unit of a row of n values; shared: for this thread's."""
    blocks = n // form.type.size
    whole = blocks // form.type.at_once * form.type.at_once
    for first, stop, count in ((f.const(0), whole, form.type.at_once), (whole, blocks, 1)):
        if first is whole and form.type.at_once == 1:
            return  # nothing is left over
        units = (stop - first) // count
        start, end = f.share(units) if shared else (f.const(0), units)
        size = form.type.size
        integers, scales = first * (size * form.parts), n * form.parts + first * (8 * form.runs(1))
        with f.range(start, end) as u:
            offset = integers + u * (size * form.parts * count), scales + u * (8 * form.runs(count))
            body(Unit(count, first + u * count, *offset))


# rounding


def _round_group(f: Fn, bits: int, lo: Val, hi: Val) -> tuple[Val, Val, Val]:
    """32 values -> their step, and their integers as two vectors of i32."""
    biggest = f.fold(f.max_or_nan(f.abs(lo), f.abs(hi)), f.max_or_nan)
    small = biggest < SMALLEST
    step = f.select(small, 0.0, biggest / LARGEST[bits])
    inverse = f.select(small, 0.0, LARGEST[bits] / biggest)
    finite = f.splat(biggest < float("inf"))
    lo, hi = (f.call("llvm.rint", f.select(finite, v * inverse, 0.0)).to_int(I32) for v in (lo, hi))
    return step, lo, hi


def _neighbours(indices: Sequence[int]) -> list[tuple[int, int]]:
    """(start, lanes) of pieces of a chunk that are consecutive values of one vector of 16."""
    pieces = []
    at = 0
    while at < len(indices):
        size = 1
        while at + size < len(indices) and indices[at + size] == indices[at] + size and indices[at + size] % LANES:
            size += 1
        pieces.append((at, size))
        at += size
    return pieces


def _round_unit(f: Fn, form: Form, unit: Unit, x: Val, dst: Val) -> None:
    t, size = form.type, form.type.size * unit.count
    bits = 8 * form.parts
    codes: list[Val] = []
    sums: list[Val] = []
    steps: list[Val] = []
    for at in range(0, size, GROUP):
        values = [f.load(x + unit.block * (4 * t.size) + 4 * (at + i), F32, LANES) for i in (0, LANES)]
        step, *pair = _round_group(f, bits, *values)
        codes += pair
        for run in [pair[0] + pair[1]] if t.sub == GROUP else pair:
            steps.append(step)
            sums.append(f.sum(run).to(F32) * step)
    scales = dst + unit.scales
    f.store(scales, f.join(steps))
    f.store(scales + 4 * len(steps), f.join(sums))
    at = 0
    for chunk in t.layout(unit.count):
        for lane, lanes in _neighbours(chunk):
            value = chunk[lane]
            run = codes[value // LANES].part(value % LANES, lanes)
            form.dot.store(f, dst + unit.integers, run, at, lane, len(chunk), size, bits)
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
    # two sums for each dot hide the latency of the fused multiply-add
    sums = [[f.var(f.zeros()) for _ in range(2 if len(xs) == 1 else 1)] for _ in xs]
    offsets = [f.var(f.zeros(F32, form.runs(form.type.at_once))) for _ in xs]
    for_units(f, form, n, lambda unit: _add_unit(f, form, unit, row, xs, sums, offsets))
    t = form.type
    zero = t.zero + (form.dot.bias if t.signed else 0)
    totals = []
    for pair, offset in zip(sums, offsets, strict=True):
        total, rest = pair[0].v + pair[1].v if len(pair) > 1 else pair[0].v, widen(offset.v)
        totals.append(total + rest if t.offsets else f.fma(rest, -float(zero), total))
    if len(xs) == 1:
        return [f.sum(totals[0])]
    together = f.sum_each(totals)
    return [together[t] for t in range(len(xs))]


def _add_unit(
    f: Fn, form: Form, unit: Unit, row: Val, xs: Sequence[Val], sums: list[list[Var]], offsets: list[Var]
) -> None:
    t = form.type
    blocks = row + unit.block * t.bytes
    for line in range(0, t.bytes * unit.count, LINE):
        f.prefetch(blocks + (AHEAD + line))
    decoded = t.decode(f, blocks, unit.count)
    runs, size = form.runs(unit.count), t.size * unit.count
    weighted = decoded.offsets if decoded.offsets is not None else decoded.scales
    scales = []
    for x, offset in zip(xs, offsets, strict=True):
        steps, x_sums = (f.load(x + unit.scales + 4 * runs * i, F32, runs) for i in range(2))
        scales.append(decoded.scales * steps)
        lanes = offset.t.count
        offset.v = f.fma(widen(weighted, lanes), widen(x_sums, lanes), offset.v)
    at, chunks = 0, list[tuple[list[int], int, Val]]()  # the runs of a chunk's lanes, its first byte, its codes
    for codes, indices in zip(decoded.chunks, t.layout(unit.count), strict=True):
        chunks.append(([index // t.sub for index in indices[::4]], at, form.biased(codes)))
        at += len(indices)
    for i, (lanes, group) in enumerate(itertools.groupby(chunks, lambda chunk: chunk[0])):
        _, ats, ws = zip(*group)  # chunks whose lanes have the same scales are summed up as integers
        for x, scale, acc in zip(xs, scales, sums, strict=True):
            dot = form.dot.chunks(f, ws, x + unit.integers, ats, size, 8 * form.parts)
            total = acc[i % len(acc)]
            if dot.lanes == LANES:
                total.v = f.fma(dot.to(F32), scale.shuffle(lanes), total.v)
            else:
                total.v = total.v + widen(dot.to(F32) * scale.shuffle(lanes))
