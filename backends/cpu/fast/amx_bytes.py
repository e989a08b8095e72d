"""A quantized matrix times 2 to 8 vectors by a processor's tiles of bytes (AMX): y[t] = W x[t], 16 rows at a time.

A tile of weights has the codes of one run of 16 rows, less their zero. A tile of activations has the same run of all
tokens side by side: of x = 256 * high + low, both signed bytes, a column of high ones for each token, then a column of
low ones. One instruction gives all sums of the run, i32: a row of weights in each row, a column in each lane. They are
converted and added to 16 sums of f32:

    sum[row] += sums of the run[row] * (scale[row] * step[column]) + offset[row] * (step * sum of x)[column]

What rows alone cost (`integer.py`), products for each token, is left to the tiles; what is left to vectors is the same
for 1 token and for 8: few instructions for each row and run.

Activations are rounded in groups of 32 as `integer.py` rounds them. A group's record: its tile, the steps of all
columns, those of high bytes times 256, and for each of its runs the columns' sums of x times their step.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

from graphrt.backends.cpu.fast.amx import SIDE, Tiles, amx_tiles
from graphrt.backends.cpu.fast.code_type import CodeType
from graphrt.backends.cpu.fast.codes import CODE_TYPES
from graphrt.backends.cpu.fast.integer import GROUP, block_ranges, round_group
from graphrt.backends.cpu.fast.ir import F32, I8, I32, LANES, Fn, Val, widen
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.pool import LINE, Entry, Step

#: Values of a row that are decoded before they are multiplied: 16 rows and the tokens' tiles lie in the nearest cache.
PIECE = 1024
#: Bytes of a tile of sums.
SUMS = 1024
BATCH = int(os.environ.get('BATCH','20'))
AT_A_TIME = int(os.environ.get('ATATIME','8'))
MOST = 640
OFF = os.environ.get('OFF','')
#: Blocks of 32 that are decoded together.
AT_ONCE = int(os.environ.get('ATONCE','4'))


@dataclass(frozen=True)
class Columns:
    """How activations lie. parts: bytes of a value, 2 or 1; lanes: columns, 16 or 8, the same number for each part;
    sub: values of a run."""

    parts: int
    lanes: int
    sub: int

    @property
    def tokens(self) -> int:
        """How many find room."""
        return self.lanes // self.parts

    @property
    def runs(self) -> int:
        """Of a group."""
        return GROUP // self.sub

    @property
    def key(self) -> str:
        return f"{8 * self.parts}_{self.lanes}_{self.sub}"

    @property
    def steps(self) -> int:
        """Where a record has its steps."""
        return GROUP * self.lanes

    @property
    def record(self) -> int:
        """Bytes of a group's record."""
        return self.steps + (1 + self.runs) * 4 * self.lanes

    def bytes(self, n: int) -> int:
        """Of rows of n values."""
        return n // GROUP * self.record


def columns_of(type_name: str, bits: int, n_tok: int) -> Columns:
    """How n_tok tokens, 8 at most, lie for a type."""
    parts = bits // 8
    return Columns(parts, 8 if parts * n_tok <= 8 else 16, CODE_TYPES[type_name].sub)


# activations


def _build_columns(f: Fn, c: Columns) -> None:
    dst, x, n_tok, n, x_nb = f.args("dst", "x", "n_tok", "n", "x_nb")
    words = f.buffer(I32, LANES * 8)  # of each column the 8 words of a group
    start, end = f.share(n // GROUP)
    with f.range(start, end) as group:
        record = dst + group * c.record
        with f.range(0, c.tokens) as t:
            row = x + f.min_int(t, n_tok - 1) * x_nb + group * (4 * GROUP)
            step, lo, hi = round_group(f, 8 * c.parts, *(f.load(row + 4 * i, F32, LANES) for i in (0, LANES)))
            at = words + t * GROUP
            for i, v in enumerate((lo, hi)):
                if c.parts == 2:
                    f.store(at + LANES * i, ((v + 128) >> 8).trunc(I8))
                f.store(at + (c.parts - 1) * c.tokens * GROUP + LANES * i, v.trunc(I8))
            steps = record + c.steps + t * 4
            if c.parts == 2:
                f.store(steps, step * 256.0)
                f.store(steps + c.tokens * 4, step)
            else:
                f.store(steps, step)
            for run, values in enumerate([lo + hi] if c.runs == 1 else [lo, hi]):
                sums = steps + (run + 1) * (4 * c.lanes)
                f.store(sums, f.sum(values).to(F32) * step)
                if c.parts == 2:
                    f.store(sums + c.tokens * 4, f.const(0.0, F32))
        rows = [widen(f.load(words + GROUP * i, I32, 8)) for i in range(c.lanes)]
        rows += [f.zeros(I32)] * (LANES - c.lanes)
        for k, row in enumerate(f.transpose(rows, 8)):
            f.store(record + k * (4 * c.lanes), row.part(0, c.lanes))


@functools.cache
def columns_kernel(c: Columns) -> Kernel:
    return Kernel(f"columns_{c.key}", ("dst", "x", "n_tok", "n", "x_nb"), lambda f: _build_columns(f, c))


def round_columns(c: Columns, *, dst: int, x: int, n_tok: int, n: int, x_nb: int) -> Step:
    """Rounded rows of activations as columns. x: n_tok rows of n f32, x_nb bytes apart; dst: c.bytes(n)."""
    kernel = columns_kernel(c)
    args = kernel.pack(dst=dst, x=x, n_tok=n_tok, n=n, x_nb=x_nb)
    return Step([Entry(kernel, args)], n_tok * n * (4 + c.parts))


# weights


@dataclass(frozen=True)
class _Part:
    """Codes of some values: `length` consecutive ones from each of `starts` on, one after the other."""

    starts: tuple[int, ...]
    length: int
    codes: Val


def _parts(codes: Val, indices: Sequence[int]) -> list[_Part]:
    """A chunk's, whose parts have ascending starts."""
    firsts = [i for i, value in enumerate(indices) if not i or value != indices[i - 1] + 1]
    length = min(b - a for a, b in zip(firsts, [*firsts[1:], len(indices)]))
    starts = tuple(indices[::length])
    if list(starts) == sorted(starts):
        return [_Part(starts, length, codes)]
    half = len(indices) // 2
    return [part for at in (0, half) for part in _parts(codes.part(at, half), indices[at : at + half])]


def _joined(a: _Part, b: _Part) -> list[_Part]:
    """The values of two parts of which b's follow a's."""
    n, lanes = a.length, a.codes.lanes
    both = [place + i for at in range(0, lanes, n) for place in (at, lanes + at) for i in range(n)]
    size = min(64, 2 * lanes)
    out = []
    for at in range(0, 2 * lanes, size):
        starts = a.starts[at // (2 * n) : (at + size) // (2 * n)]
        out.append(_Part(starts, 2 * n, a.codes.shuffle(both[at : at + size], b.codes)))
    return out


def in_rows(chunks: Sequence[Val], layout: Sequence[Sequence[int]]) -> list[_Part]:
    """Codes in the order of values, as far as they are of one unit."""
    parts = [part for codes, indices in zip(chunks, layout, strict=True) for part in _parts(codes, indices)]
    while True:
        by_start = {part.starts: part for part in parts}
        for a in parts:
            b = by_start.get(tuple(start + a.length for start in a.starts))
            if len(a.starts) > 1 and b is not None and b.length == a.length:
                parts = [part for part in parts if part not in (a, b)] + _joined(a, b)
                break
        else:
            return parts


def _type(type_name: str) -> CodeType:
    t = CODE_TYPES[type_name]
    return t


def _decode(f: Fn, t: CodeType, count: int, blocks: Val, codes: Val, scales: Val, offsets: Val) -> None:
    """One unit of a row: its codes and its runs' scales and offsets."""
    decoded = t.decode(f, blocks, count)
    for part in in_rows(decoded.chunks, t.layout(count)):
        value = part.codes - t.zero if t.zero else part.codes
        whole = part.starts == tuple(range(part.starts[0], part.starts[0] + value.lanes, part.length))
        step = value.lanes if whole else part.length
        for at in range(0, value.lanes, step):
            f.store(codes + part.starts[at // part.length], value.part(at, step) if step < value.lanes else value)
    f.store(scales, decoded.scales)
    if decoded.offsets is not None:
        f.store(offsets, decoded.offsets)


@dataclass(frozen=True)
class ByteTiles:
    """How rows of a type are multiplied."""

    type_name: str
    columns: Columns
    by: Tiles

    @property
    def name(self) -> str:
        return f"{self.type_name}_{self.by.name}_{self.columns.key}"

    @property
    def type(self) -> CodeType:
        from dataclasses import replace
        t = CODE_TYPES[self.type_name]
        return replace(t, at_once=AT_ONCE) if t.size == GROUP else t

    def begin(self, f: Fn) -> None:
        sub, lanes = self.columns.sub, self.columns.lanes
        self.by.begin(f, [(SIDE, 4 * lanes)] * 4 + [(SIDE, sub)] * 2 + [(sub // 4, 4 * lanes)] * 2)

    def end(self, f: Fn) -> None:
        self.by.end(f)

    def all_dots(
        self, f: Fn, rows: Val, w_nb: Val, count: Val, xs: Sequence[Val], n: Val, targets: Sequence[Val]
    ) -> None:
        t, c, by = self.type, self.columns, self.by
        sub, width = c.sub, 4 * c.lanes
        most = max(MOST // t.size, 1) * t.size
        row_nb, scales_nb = most + LINE, most // sub * 4
        codes = f.buffer(I8, SIDE * row_nb)
        scales, offsets = (f.buffer(I8, SIDE * scales_nb) for _ in range(2))
        sums = f.buffer(I8, (BATCH + 5) * SIDE * width)
        totals = [f.var(f.zeros(F32, c.lanes)) for _ in range(SIDE)]
        x = xs[0]

        def record_of(run: Val) -> Val:
            return x + run // c.runs * c.record

        def multiply(first: Val, r0: Val, stop: Val) -> None:
            def one(i: int, at: Val) -> None:
                run = f.min_int(at + i, stop - 1)
                if 'z' not in OFF: by.zero(f, i)
                if 'a' not in OFF: by.load(f, 4 + i % 2, codes + run * sub, row_nb)
                if 'b' not in OFF: by.load(f, 6 + i % 2, record_of(first + run) + (first + run) % c.runs * (sub * c.lanes), width)
                if 't' not in OFF: by.add_bytes(f, i, 4 + i % 2, 6 + i % 2)
                if 's' not in OFF: by.store(f, (i + 2) % 4, sums + (at - r0 + i) * (SIDE * width), width)

            with f.range(r0, stop, 4) as at:
                for i in range(4):
                    one(i, at)
            done = (stop - r0 + 3) // 4 * 4
            for i in (2, 3):
                by.store(f, i, sums + (done + i - 2) * (SIDE * width), width)

        def add(first: Val, r0: Val, stop: Val, j0: int) -> None:
            with f.range(r0, stop) as run:
                record = record_of(first + run) + c.steps
                step = f.load(record, F32, c.lanes)
                x_sum = f.load(record + ((first + run) % c.runs + 1) * width, F32, c.lanes) if t.offsets else None
                at = sums + (run - r0 + 2) * (SIDE * width)
                for j in range(j0, j0 + AT_A_TIME):
                    total = totals[j]
                    value = f.load(at + j * width, I32, c.lanes).to(F32)
                    scale = f.splat(f.load(scales + j * scales_nb + run * 4, F32), c.lanes)
                    total.v = f.fma(value, scale * step, total.v)
                    if x_sum is not None:
                        offset = f.splat(f.load(offsets + j * scales_nb + run * 4, F32), c.lanes)
                        total.v = f.fma(offset, x_sum, total.v)

        blocks = n // t.size
        n_pieces = (n + (most - 1)) // most
        piece = (blocks + n_pieces - 1) // n_pieces
        unit = max(t.units)
        piece = (piece + (unit - 1)) // unit * unit
        with f.range(0, n_pieces) as i_piece:
            b0 = i_piece * piece
            b1 = f.min_int(b0 + piece, blocks)
            with f.range(0, SIDE) as j:
                row = rows + f.min_int(j, count - 1) * w_nb
                start = b0
                for together in t.units:
                    stop = b0 + (b1 - b0) // together * together
                    with f.range(start, stop, together) as block:
                        at = row + block * t.bytes
                        for line in range(0, t.bytes * together, LINE):
                            f.prefetch(at + (w_nb * SIDE + line))
                        value = (block - b0) * t.size
                        run_at = j * scales_nb + value // sub * 4
                        if 'd' not in OFF: _decode(f, t, together, at, codes + j * row_nb + value, scales + run_at, offsets + run_at)
                    start = stop
            runs, first = (b1 - b0) * t.size // sub, b0 * t.size // sub
            with f.range(0, runs, BATCH) as r0:
                stop = f.min_int(r0 + BATCH, runs)
                if 'm' not in OFF: multiply(first, r0, stop)
                for j0 in range(0, 0 if 'p' in OFF else SIDE, AT_A_TIME):
                    add(first, r0, stop, j0)
        turned = f.transpose([widen(total.v) for total in totals], c.lanes)
        for i, target in enumerate(targets):
            f.store(target, turned[i] + turned[c.tokens + i] if c.parts == 2 else turned[i])
