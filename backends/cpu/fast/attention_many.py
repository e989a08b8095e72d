"""FLASH_ATTN_EXT for many queries: 32 rows at a time as the lanes of two vectors, online softmax over tiles of keys.

Queries lie transposed, a tile of K and V is decoded to f32 once for the 32 rows, and each element of it is one number
for all lanes. So scores, weights and sums have a row in each lane, and nothing is added up across lanes. Tiles before
the first key and behind the last one that any of the rows sees are left out: a causal mask costs half, a sliding window
its width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from graphrt.backends.cpu.fast.attention_task import INTS, NEG_INF, TILE, Shape, Task, segments_of
from graphrt.backends.cpu.fast.blocks import TYPES
from graphrt.backends.cpu.fast.ir import F16, F32, I16, I64, LANES, Fn, Val, Var, pieces, widen
from graphrt.backends.cpu.fast.jit import Kernel

#: Rows of a task.
ROWS = 32
#: Keys whose scores, and columns of V whose sums, are in registers together, each with a vector for every 16 rows.
AT_ONCE = 8

_HALVES = range(0, ROWS, LANES)
_HIDDEN = -1024  # the bits of -inf in f16


class ManyQueries(Task):
    """Writes the code of one task. Buffers are [.., ROWS] where rows are lanes; widths in columns of V are whole
    multiples of AT_ONCE, what lies behind d_v is never written out."""

    def __init__(self, f: Fn, shape: Shape) -> None:
        super().__init__(f, shape)
        self.width = -(-shape.d_v // AT_ONCE) * AT_ONCE
        self.q_of, self.mask_of, self.out_of = (f.buffer(I64, ROWS) for _ in range(3))
        self.slopes, self.sinks, self.factors = (f.buffer(F32, ROWS) for _ in range(3))
        self.queries = f.buffer(F32, shape.d_k * ROWS)
        self.keys = f.buffer(F32, TILE * shape.d_k)
        self.values = f.buffer(F32, TILE * self.width)
        self.masks = f.buffer(F16, ROWS * TILE)
        self.seen = f.buffer(F32, TILE * ROWS)
        self.scores = f.buffer(F32, TILE * ROWS)
        self.acc = f.buffer(F32, self.width * ROWS)

    def run(self, group: Val) -> None:
        f = self.f
        self._begin(group)
        most = [f.var(f.zeros() + NEG_INF) for _ in _HALVES]
        total = [f.var(f.zeros()) for _ in _HALVES]
        k_base, v_base = self.kv_rows(group)
        first, stop = self.live(group)
        with f.range(first, stop, TILE) as tile, f.if_(self.masks_of(tile).ne(0)):
            self._decode("k", k_base, tile, self.keys, self.shape.d_k)
            self._dots()
            shrink = [self._weights(half, tile, most[i], total[i]) for i, half in enumerate(_HALVES)]
            strange = self._decode("v", v_base, tile, self.values, self.width)
            with f.if_else(strange) as (some, none):
                with some:
                    self._add_values(shrink, only_used=True)
                with none:
                    self._add_values(shrink, only_used=False)
        self._finish(most, total)

    # rows

    def lane(self, buffer: Val, row: Val, half: Val | int) -> Val:
        """The address of 16 lanes of a buffer's row."""
        return buffer + row * (4 * ROWS) + half * 4

    def clear_spare(self) -> None:
        """Zeros behind d_v, which no row of V writes: their products must be no slow denormal numbers."""
        f, d_v = self.f, self.shape.d_v
        for start, lanes in pieces(self.width - d_v):
            with f.range(0, TILE) as j:
                f.store(self.values + j * (4 * self.width) + 4 * (d_v + start), f.zeros(F32, lanes))

    def _begin(self, group: Val) -> None:
        """Where each row's data is; queries with rows and columns exchanged."""
        f, shape = self.f, self.shape
        with f.range(0, ROWS) as i:
            row = self.locate(group, i)
            for buffer, value in ((self.q_of, row.q), (self.mask_of, row.mask), (self.out_of, row.out)):
                f.store(buffer + i * 8, value)
            f.store(self.slopes + i * 4, row.slope)
            f.store(self.sinks + i * 4, row.sink)

        def exchange(at: Val, lanes: int) -> None:
            with f.range(0, ROWS, LANES) as half:
                addresses = [f.load(self.q_of + (half + i) * 8, I64) for i in range(LANES)]
                rows = [widen(f.load(q + at * 4, F32, lanes)) for q in addresses]
                for i, column in enumerate(f.transpose(rows, lanes)):
                    f.store(self.lane(self.queries, at + i, half), column)

        self._pieces(shape.d_k, exchange)
        with f.range(0, self.width * ROWS, LANES) as i:
            f.store(self.acc + i * 4, f.zeros())

    def _pieces(self, n: int, body: Callable[[Val, int], None]) -> None:
        """body(first value, lanes) over n values: a loop over whole vectors, then what is left."""
        f = self.f
        whole = n // LANES * LANES
        with f.range(0, whole, LANES) as at:
            body(at, LANES)
        for start, lanes in pieces(n - whole):
            body(f.const(whole + start), lanes)

    # masks

    def live(self, group: Val) -> tuple[Val, Val]:
        """[first, stop) of the keys that the rows may see, in steps of 32."""
        f, a, n_kv = self.f, self.arg, self.n_keys
        if not self.shape.masked:
            return f.const(0), n_kv
        first, stop = f.var(n_kv), f.var(f.const(0))
        shared = a["mask_ne2"].eq(1)  # all heads of a query have one mask
        step = f.select(shared, a["gqa_ratio"], f.const(1))
        n = f.select(shared, f.const(ROWS - 1) // a["gqa_ratio"] + 2, f.const(ROWS))
        whole = n_kv // 32 * 32
        with f.range(0, n) as i:
            mask = self.locate(group, f.min_int(i * step, f.const(ROWS - 1))).mask

            def note(key: Val, live: Val) -> None:
                first.v = f.select(live, f.min_int(first.v, key), first.v)
                stop.v = f.select(live, f.max_int(stop.v, key + 1), stop.v)

            with f.range(0, whole, 32) as key:
                live = f.any_set(f.load(mask + key * 2, I16, 32).ne(_HIDDEN))
                note(key, live)
                note(key + 31, live)
            with f.range(whole, n_kv) as key:
                note(key, f.load(mask + key * 2, I16).ne(_HIDDEN))
        return first.v, stop.v

    def masks_of(self, tile: Val) -> Val:
        """The tile's masks, rows as lanes, at `seen`. Not 0 when a row sees a key."""
        f, n_kv = self.f, self.n_keys
        if not self.shape.masked:
            return f.const(1)
        live = f.var(f.const(0))
        with f.range(0, ROWS) as row:
            source, target = f.load(self.mask_of + row * 8, I64) + tile * 2, self.masks + row * (2 * TILE)
            with f.if_else(tile + TILE <= n_kv) as (whole, end):
                with whole:
                    for start in range(0, TILE, 32):
                        some = f.load(source + 2 * start, I16, 32)
                        f.store(target + 2 * start, some)
                        live.v = live.v | f.any_set(some.ne(_HIDDEN)).zext(I64)
                with end:
                    for start in range(0, TILE, 32):
                        f.store(target + 2 * start, f.zeros(I16, 32) + _HIDDEN)
                    with f.range(0, n_kv - tile) as key:
                        one = f.load(source + key * 2, I16)
                        f.store(target + key * 2, one)
                        live.v = live.v | one.ne(_HIDDEN).zext(I64)
        with f.range(0, TILE, LANES) as block, f.range(0, ROWS, LANES) as half:
            first = self.masks + block * 2 + half * (2 * TILE)
            rows = [f.load(first + 2 * TILE * i, F16, LANES).to(F32) for i in range(LANES)]
            for i, column in enumerate(f.transpose(rows)):
                f.store(self.lane(self.seen, block + i, half), column)
        return live.v

    # products

    def _decode(self, side: str, base: Val, tile: Val, target: Val, width: int) -> Val:
        """The tile's rows of K or V as f32, `width` apart; keys past the end repeat the last. True where one of the
        numbers is not finite."""
        f = self.f
        kind, n = (self.shape.k_type, self.shape.d_k) if side == "k" else (self.shape.v_type, self.shape.d_v)
        strange = f.var(f.zeros())
        with f.range(0, TILE) as j:
            row = self.row_of(side, base, f.min_int(tile + j, self.n_keys - 1))
            for segment in segments_of(f, TYPES[kind], n):
                for (start, _), v in zip(segment.at, segment.read(row), strict=True):
                    f.store(target + j * (4 * width) + 4 * start, v)
                    strange.v = f.fma(widen(v), 0.0, strange.v)  # NaN from the first number that is not finite on
        return f.any_set(strange.v.ne(strange.v))

    def _dots(self) -> None:
        """q.k of all rows and the tile's keys, into `scores`."""
        f, d_k = self.f, self.shape.d_k
        with f.range(0, TILE, AT_ONCE) as key:
            sums = [[f.var(f.zeros()) for _ in _HALVES] for _ in range(AT_ONCE)]
            with f.range(0, d_k) as d:
                q = [f.load(self.lane(self.queries, d, half), F32, LANES) for half in _HALVES]
                for i, of_key in enumerate(sums):
                    k = f.splat(f.load(self.keys + key * (4 * d_k) + d * 4 + 4 * d_k * i, F32))
                    for q_half, dot in zip(q, of_key, strict=True):
                        dot.v = f.fma(k, q_half, dot.v)
            for i, of_key in enumerate(sums):
                for half, dot in zip(_HALVES, of_key, strict=True):
                    f.store(self.lane(self.scores, key + i, half), dot.v)

    def _weights(self, half: int, tile: Val, most: Var, total: Var) -> Val:
        """Scores of 16 rows -> softmax weights in place; updates the largest score and the sum of each row. Returns
        what to scale earlier values by."""
        f, shape, n_kv = self.f, self.shape, self.n_keys
        scale, cap = f.args("scale", "softcap")
        slope, biggest = f.load(self.slopes + 4 * half, F32, LANES), f.var(most.v)
        with f.range(0, TILE) as j:
            at = self.lane(self.scores, j, half)
            s = f.load(at, F32, LANES) * scale
            if shape.softcap:
                s = f.tanh(s / cap) * cap
            if shape.masked:
                mask = f.load(self.lane(self.seen, j, half), F32, LANES)
                # a select, not the sum alone: it also drops what a NaN in an unused cell made
                s = f.select(mask.eq(NEG_INF), NEG_INF, f.fma(mask, slope, s))
            else:
                s = f.select(tile + j < n_kv, s, NEG_INF)
            f.store(at, s)
            biggest.v = f.max_or_nan(s, biggest.v)  # NaN wins, so that one in a key that counts shows in the result
        new = biggest.v
        base = f.select(new.eq(NEG_INF), 0.0, new)  # -inf minus -inf is NaN
        shrink = f.exp(most.v - base)
        most.v = new
        added = f.var(f.zeros())
        with f.range(0, TILE) as j:
            at = self.lane(self.scores, j, half)
            p = f.exp(f.load(at, F32, LANES) - base)
            f.store(at, p)
            added.v = added.v + p
        total.v = f.fma(total.v, shrink, added.v)
        return shrink

    def _add_values(self, shrink: list[Val], *, only_used: bool) -> None:
        """acc = acc * shrink + weights . V. only_used: a row takes no values by a weight of 0, which of NaN and
        infinity would make NaN."""
        f = self.f
        with f.range(0, self.width, AT_ONCE) as column:
            places = [[self.lane(self.acc, column + c, half) for half in _HALVES] for c in range(AT_ONCE)]
            sums = [
                [f.var(f.load(at, F32, LANES) * factor) for at, factor in zip(pair, shrink, strict=True)]
                for pair in places
            ]
            with f.range(0, TILE) as j:
                weights = [f.load(self.lane(self.scores, j, half), F32, LANES) for half in _HALVES]
                for c, pair in enumerate(sums):
                    v = f.splat(f.load(self.values + j * (4 * self.width) + column * 4 + 4 * c, F32))
                    for p, total in zip(weights, pair, strict=True):
                        added = f.fma(v, p, total.v)
                        total.v = f.select(p.ne(0.0), added, total.v) if only_used else added
            for pair, at in zip(sums, places, strict=True):
                for total, place in zip(pair, at, strict=True):
                    f.store(place, total.v)

    def _finish(self, most: list[Var], total: list[Var]) -> None:
        """Adds the sinks to the sums and writes acc / sum; 0 where no key was seen."""
        f = self.f
        for half, biggest, of_rows in zip(_HALVES, most, total, strict=True):
            sink = f.load(self.sinks + 4 * half, F32, LANES)  # -inf where there are none, which adds nothing
            top = f.select(sink > biggest.v, sink, biggest.v)
            base = f.select(top.eq(NEG_INF), 0.0, top)
            shrink = f.exp(biggest.v - base)
            whole = f.fma(of_rows.v, shrink, f.exp(sink - base))
            f.store(self.factors + 4 * half, f.select(whole.eq(0.0), 0.0, shrink / whole))

        def write(at: Val, lanes: int) -> None:
            with f.range(0, ROWS, LANES) as half:
                factor = f.load(self.factors + half * 4, F32, LANES)
                columns = [f.load(self.lane(self.acc, at + i, half), F32, LANES) * factor for i in range(lanes)]
                columns += [f.zeros()] * (LANES - lanes)
                for i, row in enumerate(f.transpose(columns)):
                    f.store(f.load(self.out_of + (half + i) * 8, I64) + at * 4, row.part(0, lanes))

        self._pieces(self.shape.d_v, write)


def build(task: ManyQueries) -> None:
    """The kernel. Tasks go in turn, since later queries see more keys."""
    task.clear_spare()
    task.each_task(lambda _, group: task.run(group), 1, in_turn=True)


@functools.cache
def many_kernel(shape: Shape) -> Kernel:
    """The kernel of one shape; its rows are ROWS."""
    return Kernel(f"attn_many_{shape.name}", INTS, lambda f: build(ManyQueries(f, shape)), floats=("scale", "softcap"))
