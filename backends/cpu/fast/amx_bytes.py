"""A quantized matrix times 5 to 8 vectors by a processor's tiles of bytes (AMX): y[t] = W x[t], 16 rows at a time.

A tile of weights has the codes of one run of 16 rows, less their zero. A tile of activations has the same run of all
tokens side by side: of x = 256 * high + low, both signed bytes, a column of high ones for each token, then a column of
low ones. One instruction gives all sums of the run, i32: a row of weights in each row, a column in each lane. They are
added to 16 sums in f32:

    sum[row] += sums of the run[row] * (scale[row] * step[column]) + offset[row] * (step * sum of x)[column]

So products, most of what rows alone cost (`integer.py`), are left to the tiles, and vectors do the same few
instructions for each row and run, whether there are 5 tokens or 8.

Activations are rounded in groups of 32 as `integer.py` rounds them. A group's record: its tile, the columns' steps,
those of high bytes times 256, and the columns' sums of x times their step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphrt.backends.cpu.fast.amx import SIDE, Tiles, amx_tiles
from graphrt.backends.cpu.fast.code_type import CodeType
from graphrt.backends.cpu.fast.codes import CODE_TYPES
from graphrt.backends.cpu.fast.integer import GROUP, block_ranges, round_group
from graphrt.backends.cpu.fast.ir import F16, F32, I8, I16, I32, LANES, Fn, Val, Var, widen
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.pool import LINE, Entry, Step

#: Types that take them: blocks of 32 that begin with an f16 scale, perhaps an f16 offset behind it. Others have more to
#: unpack for a run, or runs of 16, and are faster by rows.
TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl")
#: Activations of 16 bits take them; with 8 bits two threads of one core were slower by them (BENCHMARKS.md). The fewest
#: tokens that gain, and the most that find room.
BITS, FEWEST, MOST = 16, 5, 8
#: Blocks that are decoded together.
AT_ONCE = 4
#: Values of a row that are decoded before they are multiplied, at most.
PIECE = 640
#: Runs whose sums wait to be added up. Two more are on their way to memory.
RUNS, ON_THEIR_WAY = 8, 2
#: Rows that are added up together: their sums in f32 stay in registers.
ROWS = 8


@dataclass(frozen=True)
class Columns:
    """How activations lie. lanes: columns; width: bytes of a row of a tile of activations, and of one of sums; tile,
    record: bytes of a tile of activations, and of a group's record."""

    lanes: int = 2 * MOST
    width: int = 4 * lanes
    tile: int = GROUP * lanes
    record: int = tile + 2 * width

    def bytes(self, n: int) -> int:
        """Of rows of n values."""
        return n // GROUP * self.record


def columns_of(type_name: str, bits: int, n_tok: int) -> Columns | None:
    """How n_tok tokens lie for a type, None where rows multiply them."""
    fits = type_name in TYPES and bits == BITS and FEWEST <= n_tok <= MOST
    return Columns() if fits and amx_tiles() is not None else None


# activations


def _build_columns(f: Fn, c: Columns) -> None:
    dst, x, n_tok, n, x_nb = f.args("dst", "x", "n_tok", "n", "x_nb")
    columns = f.buffer(I8, LANES * GROUP)
    start, end = f.share(n // GROUP)
    with f.range(start, end) as group:
        record = dst + group * c.record
        with f.range(0, MOST) as t:
            row = x + f.min_int(t, n_tok - 1) * x_nb + group * (4 * GROUP)  # past the last token it is the last again
            step, *halves = round_group(f, BITS, *(f.load(row + 4 * i, F32, LANES) for i in (0, LANES)))
            for at, v in zip((0, LANES), halves, strict=True):
                f.store(columns + t * GROUP + at, ((v + 128) >> 8).trunc(I8))
                f.store(columns + (t + MOST) * GROUP + at, v.trunc(I8))
            steps = record + c.tile + t * 4
            sums = steps + c.width
            f.store(steps, step * 256.0)
            f.store(steps + 4 * MOST, step)
            f.store(sums, f.const(0.0, F32))
            f.store(sums + 4 * MOST, f.sum(halves[0] + halves[1]).to(F32) * step)
        rows = [widen(f.load(columns + GROUP * i, I32, GROUP // 4)) for i in range(c.lanes)]
        for k, row in enumerate(f.transpose(rows, GROUP // 4)):
            f.store(record + k * c.width, row)


@functools.cache
def columns_kernel(c: Columns) -> Kernel:
    return Kernel(f"columns_{BITS}", ("dst", "x", "n_tok", "n", "x_nb"), lambda f: _build_columns(f, c))


def round_columns(c: Columns, *, dst: int, x: int, n_tok: int, n: int, x_nb: int) -> Step:
    """Rows of activations as rounded columns. x: n_tok rows of n f32, x_nb bytes apart; dst: c.bytes(n)."""
    kernel = columns_kernel(c)
    args = kernel.pack(dst=dst, x=x, n_tok=n_tok, n=n, x_nb=x_nb)
    return Step([Entry(kernel, args)], n_tok * n * (4 + BITS // 8))


# weights


def _in_order(chunks: Sequence[Val], layout: Sequence[Sequence[int]]) -> list[Val]:
    """Codes of a unit in the order of values. chunks: one or two of one length."""
    flat = [value for indices in layout for value in indices]
    place = [flat.index(value) for value in range(len(flat))]
    first, *rest = chunks
    return [first.shuffle(place[at : at + first.lanes], *rest) for at in range(0, len(flat), first.lanes)]


@dataclass(frozen=True)
class _Decoded:
    """A piece of 16 rows in this thread's memory: codes of each row, `codes_nb` bytes apart, its runs' scales and
    offsets as f32, `scales_nb` bytes apart."""

    codes: Val
    scales: Val
    offsets: Val
    codes_nb: int = PIECE + LINE  # so that rows don't all begin in the same places of the nearest cache
    scales_nb: int = 4 * -(-PIECE // GROUP // LANES) * LANES


@dataclass(frozen=True)
class ByteTiles:
    """How rows of a type are multiplied: as `matvec.Rows`, but all tokens' columns are at the first x."""

    type_name: str
    columns: Columns
    by: Tiles

    @property
    def name(self) -> str:
        """For the names of kernels."""
        return f"{self.type_name}_{self.by.name}_bytes"

    @property
    def _type(self) -> CodeType:
        return replace(CODE_TYPES[self.type_name], at_once=AT_ONCE)

    def begin(self, f: Fn) -> None:
        """Sets registers up: four of sums, two of weights, two of activations."""
        width = self.columns.width
        self.by.begin(f, [(SIDE, width)] * 4 + [(SIDE, GROUP)] * 2 + [(GROUP // 4, width)] * 2)

    def end(self, f: Fn) -> None:
        self.by.end(f)

    def all_dots(
        self, f: Fn, rows: Val, w_nb: Val, count: Val, xs: Sequence[Val], n: Val, targets: Sequence[Val]
    ) -> None:
        """Writes the dots of up to 16 rows with token t to targets[t], f32 side by side."""
        c = self.columns
        sizes = [SIDE * nb for nb in (_Decoded.codes_nb, _Decoded.scales_nb, _Decoded.scales_nb)]
        codes, scales, offsets = (f.buffer(I8, size) for size in sizes)
        decoded = _Decoded(codes, scales, offsets)
        sums = f.buffer(I8, (RUNS + 2 * ON_THEIR_WAY) * SIDE * c.width)
        totals = [f.var(f.zeros(F32, c.lanes)) for _ in range(SIDE)]
        blocks, nb = n // GROUP, self._type.bytes * ROWS  # nb: of a block of the rows that are added up together
        n_pieces = (n + (PIECE - 1)) // PIECE
        piece = ((blocks + n_pieces - 1) // n_pieces + (AT_ONCE - 1)) // AT_ONCE * AT_ONCE
        with f.range(0, n_pieces) as k:
            first, stop = f.min_int(k * piece, blocks), f.min_int((k + 1) * piece, blocks)
            self._decode(f, rows, w_nb, count, first, stop, decoded)
            x = xs[0] + first * c.record
            with f.range(0, stop - first, RUNS) as r0:
                r1 = f.min_int(r0 + RUNS, stop - first)
                self._multiply(f, decoded, x, r0, r1, sums)
                for j in range(0, SIDE, ROWS):
                    ahead = rows + w_nb * (2 * SIDE + j) + first * nb
                    self._add(f, decoded, x, r0, r1, sums, range(j, j + ROWS), totals, ahead)
        turned = f.transpose([widen(total.v) for total in totals], c.lanes)
        for i, target in enumerate(targets):
            f.store(target, turned[i] + turned[MOST + i])

    def _decode(self, f: Fn, rows: Val, w_nb: Val, count: Val, first: Val, stop: Val, to: _Decoded) -> None:
        """Blocks from the first to before `stop` of up to 16 rows; rows past the last are the last again."""
        t = self._type
        with f.range(0, SIDE) as j:
            row = rows + f.min_int(j, count - 1) * w_nb
            for start, end, together in block_ranges(f, t, (stop - first) * t.size):
                with f.range(start, end, together) as block:
                    at = row + (first + block) * t.bytes
                    for line in range(0, t.bytes * together, LINE):
                        f.prefetch(at + (w_nb + line))  # of the next row
                    codes = _in_order(t.decode(f, at, together).chunks, t.layout(together))
                    target = to.codes + j * to.codes_nb + block * GROUP
                    for place, value in enumerate(codes):
                        f.store(target + place * value.lanes, value - t.zero if t.zero else value)
            with f.range(first, stop, LANES) as block:  # more blocks would be past the row's end
                inside = f.splat((stop - block).trunc(I32)) > f.vconst(range(LANES), I32)
                heads = f.gather(row + block * t.bytes, [t.bytes * i for i in range(LANES)], inside)
                at_run = j * to.scales_nb + (block - first) * 4
                f.store(to.scales + at_run, heads.trunc(I16).as_bits(F16).to(F32))
                if t.offsets:
                    f.store(to.offsets + at_run, (heads >> 16).trunc(I16).as_bits(F16).to(F32))

    def _multiply(self, f: Fn, w: _Decoded, x: Val, r0: Val, r1: Val, sums: Val) -> None:
        """The sums of runs r0 to before r1, from the place of ON_THEIR_WAY on, a tile after the other. What is stored
        is what was multiplied two runs before: nothing waits for a product."""
        by, c, size = self.by, self.columns, SIDE * self.columns.width
        with f.range(r0, r1, 4) as at:
            for i in range(4):
                run = f.min_int(at + i, r1 - 1)
                weights, activations = 4 + i % 2, 6 + i % 2
                by.zero(f, i)
                by.load(f, weights, w.codes + run * GROUP, w.codes_nb)
                by.load(f, activations, x + run * c.record, c.width)
                by.add_bytes(f, i, weights, activations)
                by.store(f, (i + ON_THEIR_WAY) % 4, sums + (at + i - r0) * size, c.width)
        made = (r1 - r0 + 3) // 4 * 4
        for i in range(ON_THEIR_WAY):
            by.store(f, (i + 4 - ON_THEIR_WAY) % 4, sums + (made + i) * size, c.width)

    def _add(
        self, f: Fn, w: _Decoded, x: Val, r0: Val, r1: Val, sums: Val, rows: range, totals: Sequence[Var],
        ahead: Val,
    ) -> None:  # fmt: skip
        """Adds what _multiply() made to the totals of some rows. ahead: what is asked for meanwhile, evenly: all of it
        while rows are decoded would be more than can be on its way from memory."""
        c, offsets = self.columns, self._type.offsets
        with f.range(r0, r1) as run:
            nb = self._type.bytes * ROWS
            for line in range(0, nb, LINE):
                f.prefetch(ahead + run * nb + line, far=True)
            record = x + run * c.record + c.tile
            step, x_sum = (f.load(record + c.width * i, F32, c.lanes) for i in range(2))
            at = sums + (run - r0 + ON_THEIR_WAY) * (SIDE * c.width)

            def of_row(j: int, values: Val, run: Val = run) -> Val:
                return f.splat(f.load(values + j * w.scales_nb + run * 4, F32), c.lanes)

            for j in rows:
                made = f.load(at + j * c.width, I32, c.lanes).to(F32)
                total = f.fma(made, of_row(j, w.scales) * step, totals[j].v)
                totals[j].v = f.fma(of_row(j, w.offsets), x_sum, total) if offsets else total


def byte_tiles(type_name: str, columns: Columns) -> ByteTiles:
    """By this machine's tiles."""
    by = amx_tiles()
    assert by is not None, "ask columns_of() first"
    return ByteTiles(type_name, columns, by)
