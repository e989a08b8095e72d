"""FLASH_ATTN_EXT. For few queries, here: online softmax over tiles of keys, K and V read in their cache format.

Up to 4 rows that share a K/V head go through the cache together, so that each key is read and decoded once for all of
them. A task is such a group; with too few tasks for the threads, the live part of the context is cut in `n_split`
ranges, whose partial results a second kernel merges, always in the same order. More queries: attention_many.py.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

from graphrt.backends.cpu.fast.attention_many import ROWS, many_kernel
from graphrt.backends.cpu.fast.attention_task import INTS, KV_TYPES, NEG_INF, TILE, Row, Shape, Task, segments_of
from graphrt.backends.cpu.fast.blocks import TYPES
from graphrt.backends.cpu.fast.ir import F16, F32, I1, I8, I16, I32, LANES, Fn, Val, Var, pieces, widen
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.matvec import MAX_TOKENS
from graphrt.backends.cpu.fast.pool import LINE, Entry, Step, max_threads

#: Rows of a cache that are no longer than this are asked for a tile ahead: rows of one head lie apart, with those of
#: other heads between, and the hardware looks ahead in one piece only.
MAX_ASKED = 512
MAX_ROWS = 4
#: Shortest cache that is worth cutting into ranges.
SPLIT_KEYS = 512


@dataclass(kw_only=True)
class RunningRow(Row):
    """A row with its running maximum and sum."""

    max: Var
    sum: Var


class FewQueries(Task):
    """Writes the code of one task: decode its number, walk the keys, finish."""

    def __init__(self, f: Fn, shape: Shape) -> None:
        super().__init__(f, shape)
        self.scores = f.buffer(F32, shape.rows * TILE)
        self.flags = f.buffer(I8, TILE)
        self.mask_tail = f.buffer(F16, LANES)
        self.own_acc = f.buffer(F32, shape.rows * shape.d_v)

    def running_row(self, group: Val, i: int | Val) -> RunningRow:
        """Row i of a group, as locate() has it, before its first key."""
        f = self.f
        return RunningRow(**vars(self.locate(group, i)), max=f.var(f.const(NEG_INF, F32)), sum=f.var(f.zeros(n=0)))

    # the part of the context that a split takes

    def key_range(self, rows: list[RunningRow], split: Val) -> tuple[Val, Val]:
        """[first, stop) in keys: the whole cache, or this split's share of the tiles that hold a live key."""
        f, n_kv = self.f, self.n_keys
        if not self.shape.split:
            return f.const(0), n_kv
        first, stop = f.var(f.const(0)), f.var((n_kv + (TILE - 1)) // TILE)
        if self.shape.masked:
            first.v, stop.v = stop.v, f.const(0)
            with f.range(0, n_kv, LANES) as at, f.if_(self._any_live([self.mask(row, at) for row in rows])):
                first.v = f.min_int(first.v, at // TILE)
                stop.v = at // TILE + 1
        tiles, n_split = f.max_int(stop.v - first.v, f.const(0)), self.arg["n_split"]
        start = first.v + tiles * split // n_split
        end = first.v + tiles * (split + 1) // n_split
        return start * TILE, f.min_int(end * TILE, n_kv)

    # masks and scores

    def mask(self, row: RunningRow, key: Val) -> Val:
        """The mask of 16 keys, -inf past the end of the cache."""
        f, n_kv = self.f, self.n_keys
        if not self.shape.masked:
            inside = f.splat(n_kv - key).trunc(I32) > f.vconst(range(LANES), I32)
            return f.select(inside, f.zeros(), NEG_INF)
        value = f.var(f.zeros(F16))
        with f.if_else(key + LANES <= n_kv) as (whole, end):
            with whole:
                value.v = f.load(row.mask + key * 2, F16, LANES)
            with end:
                f.store(self.mask_tail, f.zeros(I16) + 0xFC00)
                with f.range(key, n_kv) as i:
                    f.store(self.mask_tail + (i - key) * 2, f.load(row.mask + i * 2, I16))
                value.v = f.load(self.mask_tail, F16, LANES)
        return value.v.to(F32)

    def _any_live(self, masks: list[Val]) -> Val:
        alive = masks[0].ne(NEG_INF)
        for m in masks[1:]:
            alive = alive | m.ne(NEG_INF)
        return self.f.any_set(alive)

    def _dots(self, rows: list[RunningRow], k_base: Val, key: Val, at: Val) -> None:
        """q.k of all rows for 16 keys from `key` on, into the score buffer at tile position `at`."""
        f, a, shape = self.f, self.arg, self.shape
        n_keys = 16 // (1 << (shape.rows - 1).bit_length())  # keys x rows fill one vector of sums
        segments = segments_of(f, TYPES[shape.k_type], shape.d_k)
        first, last = self.row_of("k", k_base, key), self.n_keys - 1 - key
        with f.range(0, LANES, n_keys) as j:
            keys = [first + f.min_int(j + i, last) * a["k_nb1"] for i in range(n_keys)]
            for k in keys:
                self._ask_ahead(k, shape.k_type, shape.d_k, a["k_nb1"])
            sums = [[f.zeros() for _ in keys] for _ in rows]
            for segment in segments:
                columns = [segment.read(k) for k in keys]
                for piece, (start, lanes) in enumerate(segment.at):
                    for row, row_sums in zip(rows, sums, strict=True):
                        q = widen(f.load(row.q + 4 * start, F32, lanes))
                        for i, column in enumerate(columns):
                            row_sums[i] = f.fma(q, widen(column[piece]), row_sums[i])
            dots = f.sum_each([s for row_sums in sums for s in row_sums])
            for i in range(len(rows)):
                f.store(self._score(i, at + j), dots.part(i * n_keys, n_keys))

    def _ask_ahead(self, row: Val, kind: str, n: int, nb: Val) -> None:
        """Asks for the lines of the row of K or V that the next tile has where this one has `row`."""
        block = TYPES[kind]
        n_bytes = n // block.size * block.bytes
        for line in range(0, n_bytes if n_bytes <= MAX_ASKED else 0, LINE):
            self.f.prefetch(row + nb * TILE + line)

    def _score(self, row: int, position: Val) -> Val:
        return self.scores + (row * TILE * 4) + position * 4

    def _chunk(self, rows: list[RunningRow], k_base: Val, key: Val, at: Val, tile_max: list[Var]) -> None:
        """Scores of 16 keys: scaled, capped, masked; -inf where a row does not see the key."""
        f, shape = self.f, self.shape
        scale, cap = f.args("scale", "softcap")
        masks = [self.mask(row, key) for row in rows]
        with f.if_else(self._any_live(masks)) as (some, none):
            with some:
                self._dots(rows, k_base, key, at)
                for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
                    s = f.load(self._score(i, at), F32, LANES) * scale
                    if shape.softcap:
                        s = f.tanh(s / cap) * cap
                    # a select, not the sum alone: it also drops what a NaN in an unused cell made
                    s = f.select(mask.eq(NEG_INF), NEG_INF, f.fma(mask, row.slope, s))
                    f.store(self._score(i, at), s)
                    # NaN wins, so that one in a key that counts shows in the result
                    tile_max[i].v = f.max_or_nan(s, tile_max[i].v)
            with none:
                for i in range(len(rows)):
                    f.store(self._score(i, at), f.zeros() + NEG_INF)

    # softmax and values

    def _weights(self, rows: list[RunningRow], tile_max: list[Var]) -> list[Val]:
        """Scores -> softmax weights in place; updates max and sum. Returns what to scale earlier values by."""
        f = self.f
        shrink, bases = [], []
        for row, biggest in zip(rows, tile_max, strict=True):
            new = f.max_or_nan(f.fold(biggest.v, f.max_or_nan), row.max.v)
            base = f.select(new.eq(NEG_INF), 0.0, new)  # -inf minus -inf is NaN
            shrink.append(f.exp(f.splat(row.max.v - base))[0])
            bases.append(base)
            row.max.v = new
        totals = [f.var(f.zeros()) for _ in rows]
        with f.range(0, TILE, LANES) as at:
            used_by = []
            for i, (base, total) in enumerate(zip(bases, totals, strict=True)):
                p = f.exp(f.load(self._score(i, at), F32, LANES) - base)
                f.store(self._score(i, at), p)
                total.v = total.v + p
                used_by.append(p.ne(0.0))
            some, every = used_by[0], used_by[0]
            for used in used_by[1:]:
                some, every = some | used, every & used
            f.store(self.flags + at, some.zext(I8) + every.zext(I8))
        for row, total, factor in zip(rows, totals, shrink, strict=True):
            row.sum.v = f.fma(row.sum.v, factor, f.sum(total.v))
        return shrink

    def begin_values(self, v_base: Val, tile: Val, count: Val) -> None:
        """Before the values of a tile's `count` keys are added up."""

    def value_row(self, v_base: Val, tile: Val, j: Val) -> Val:
        """The address of the row of V of a tile's j-th key."""
        return self.row_of("v", v_base, tile + j)

    def _values(self, rows: list[RunningRow], v_base: Val, acc: Val, tile: Val, count: Val, shrink: list[Val]) -> None:
        """acc = acc * shrink + weights . V, a block of columns at a time so that its sums stay in registers."""
        f, shape = self.f, self.shape
        self.begin_values(v_base, tile, count)
        segments = segments_of(f, TYPES[shape.v_type], shape.d_v)
        per_segment = len(segments[0].at)
        at_once = max(1, LANES // shape.rows // per_segment)
        for first in range(0, len(segments), at_once):
            block = segments[first : first + at_once]
            columns = [piece for segment in block for piece in segment.at]

            def address(i: int, start: int) -> Val:
                return acc + 4 * (i * shape.d_v + start)

            sums = [
                [f.var(f.load(address(i, start), F32, lanes) * factor) for start, lanes in columns]
                for i, factor in enumerate(shrink)
            ]

            def accumulate(v: list[Val], i: int, position: Val, sums: list[list[Var]] = sums) -> None:
                p = f.load(self._score(i, position), F32)
                for total, x in zip(sums[i], v, strict=True):
                    total.v = f.fma(x, p, total.v)

            with f.range(0, count) as j:
                flag = f.load(self.flags + j, I8)
                with f.if_(flag.ne(0)):
                    row = self.value_row(v_base, tile, j)
                    if first == 0:
                        self._ask_ahead(row, shape.v_type, shape.d_v, self.arg["v_nb1"])
                    v = [x for segment in block for x in segment.read(row)]
                    if len(rows) == 1:
                        accumulate(v, 0, j)
                    else:
                        with f.if_else(flag.eq(2)) as (every, some):
                            with every:
                                for i in range(len(rows)):
                                    accumulate(v, i, j)
                            with some:  # 0 * NaN would reach a row that does not see this key
                                for i in range(len(rows)):
                                    with f.if_(f.load(self._score(i, j), F32).ne(0.0)):
                                        accumulate(v, i, j)
            for i, row_sums in enumerate(sums):
                for (start, _), total in zip(columns, row_sums, strict=True):
                    f.store(address(i, start), total.v)

    def walk(self, group: Val, split: Val, acc: Val) -> list[RunningRow]:
        """All keys of one task; leaves the weighted values, not yet divided by the sum, at `acc`."""
        f, shape = self.f, self.shape
        rows = [self.running_row(group, i) for i in range(shape.rows)]
        k_base, v_base = self.kv_rows(group)
        for start, lanes in pieces(shape.rows * shape.d_v):
            f.store(acc + 4 * start, f.zeros(F32, lanes))
        first, stop = self.key_range(rows, split)
        with f.range(first, stop, TILE) as tile:
            count = f.min_int(stop - tile, TILE)
            tile_max = [f.var(f.zeros() + NEG_INF) for _ in rows]
            with f.range(0, TILE, LANES) as at, f.if_else(at < count) as (inside, past):
                with inside:
                    self._chunk(rows, k_base, tile + at, at, tile_max)
                with past:
                    for i in range(len(rows)):
                        f.store(self._score(i, at), f.zeros() + NEG_INF)
            alive = f.const(0, I1)
            for biggest in tile_max:
                alive = alive | f.any_set(biggest.v.ne(NEG_INF))
            with f.if_(alive):
                shrink = self._weights(rows, tile_max)
                self._values(rows, v_base, acc, tile, count, shrink)
        return rows

    def finish(self, row: RunningRow, acc: Val) -> None:
        """Adds the sink to the sum and writes acc / sum; 0 where no key was seen."""
        f = self.f
        top = f.select(row.sink > row.max.v, row.sink, row.max.v)
        base = f.select(top.eq(NEG_INF), 0.0, top)
        shrink = f.exp(f.splat(row.max.v - base))[0]
        total = f.fma(row.sum.v, shrink, f.select(row.has_sink, f.exp(f.splat(row.sink - base))[0], 0.0))
        factor = f.select(total.eq(0.0), 0.0, shrink / total)
        for start, lanes in pieces(self.shape.d_v):
            f.store(row.out + 4 * start, f.load(acc + 4 * start, F32, lanes) * factor)


def build_walk(f: Fn, task: FewQueries) -> None:
    """The kernel that goes through the keys."""
    a, shape = task.arg, task.shape

    def one(t: Val, group: Val) -> None:
        rows = task.walk(group, t % a["n_split"], task.own_acc)
        for i, row in enumerate(rows):
            acc = task.own_acc + 4 * shape.d_v * i
            if not shape.split:
                task.finish(row, acc)
                continue
            partial = a["work"] + (t * shape.rows + i) * shape.partial_bytes
            f.store(partial, row.max.v)
            f.store(partial + 4, row.sum.v)
            for at, lanes in pieces(shape.d_v):
                f.store(partial + (64 + 4 * at), f.load(acc + 4 * at, F32, lanes))

    task.each_task(one, a["n_split"])


def build_merge(f: Fn, task: FewQueries) -> None:
    """The kernel that joins the results of a group's ranges of keys."""
    a, shape = task.arg, task.shape

    def one(t: Val, group: Val) -> None:
        with f.range(0, f.const(shape.rows)) as i:
            row, acc = task.running_row(group, i), task.own_acc

            def partial(split: Val) -> Val:
                return a["work"] + ((t * a["n_split"] + split) * shape.rows + i) * shape.partial_bytes

            with f.range(0, a["n_split"]) as split:
                row.max.v = f.max_or_nan(f.load(partial(split), F32), row.max.v)
            base = f.select(row.max.v.eq(NEG_INF), 0.0, row.max.v)
            for at, lanes in pieces(shape.d_v):
                f.store(acc + 4 * at, f.zeros(F32, lanes))
            with f.range(0, a["n_split"]) as split:
                source = partial(split)
                shrink = f.exp(f.splat(f.load(source, F32) - base))[0]
                row.sum.v = f.fma(f.load(source + 4, F32), shrink, row.sum.v)
                for at, lanes in pieces(shape.d_v):
                    v = f.load(source + (64 + 4 * at), F32, lanes)
                    f.store(acc + 4 * at, f.fma(v, shrink, f.load(acc + 4 * at, F32, lanes)))
            task.finish(row, acc)

    task.each_task(one, 1)


@functools.cache
def attention_kernels(shape: Shape) -> list[Kernel]:
    """The kernels of one shape, to run in order."""

    def kernel(name: str, build: Callable[[Fn, FewQueries], None]) -> Kernel:
        made = f"{name}_{shape.name}"
        return Kernel(made, INTS, lambda f: build(f, FewQueries(f, shape)), floats=("scale", "softcap"))

    return [kernel("attn", build_walk)] + ([kernel("attn_merge", build_merge)] if shape.split else [])


def flash_attn(
    k_type: str,
    v_type: str,
    *,
    d_k: int,
    d_v: int,
    n_q: int,
    n_kv: int,
    n_head: int,
    n_head_kv: int,
    n_seq: int,
    q: int,
    q_nb: tuple[int, int, int],
    k: int,
    k_nb: tuple[int, int, int],
    v: int,
    v_nb: tuple[int, int, int],
    out: int,
    out_nb: tuple[int, int, int],
    scale: float,
    mask: int = 0,
    mask_nb: tuple[int, int, int] = (0, 0, 0),
    mask_ne: tuple[int, int] = (1, 1),
    softcap: float = 0.0,
    sinks: int = 0,
    slopes: int = 0,
) -> Step:
    """FLASH_ATTN_EXT (design.md). Strides are bytes; the innermost dimension is contiguous.

    q [d_k, n_q, n_head, n_seq] f32; k [d_k, n_kv, n_head_kv, n_seq] and v [d_v, ...] of KV_TYPES; each with the strides
    (nb1, nb2, nb3) of its own dimensions. mask [n_kv, n_q, *mask_ne] f16 or 0; sinks and slopes (ALiBi): f32 [n_head]
    or 0. out [d_v, n_head, n_q, n_seq] f32, !! permuted; out_nb: bytes between heads, queries, sequences.
    Cost follows the keys that the mask leaves, not n_kv.
    """
    if n_head % n_head_kv:
        raise ValueError(f"n_head must be a multiple of n_head_kv, got {n_head} and {n_head_kv}")
    check_types((k_type, d_k), (v_type, d_v))
    gqa_ratio = n_head // n_head_kv
    rows, tasks, n_split = _cut(n_q, gqa_ratio, n_head_kv * n_seq, n_kv)
    shape = Shape(k_type, v_type, d_k, d_v, rows, mask != 0, softcap != 0.0, n_split > 1)
    work = (ctypes.c_char * (shape.partial_bytes * rows * tasks * n_split if shape.split else 1))()
    values = {
        "mask": mask, "mask_ne2": mask_ne[0], "mask_ne3": mask_ne[1], "sinks": sinks, "slopes": slopes, "q": q, "k": k,
        "v": v, "out": out, "n_q": n_q, "n_kv": n_kv, "n_head_kv": n_head_kv, "gqa_ratio": gqa_ratio, "n_seq": n_seq,
        "n_split": n_split, "work": ctypes.addressof(work), "scale": scale, "softcap": softcap,
    }  # fmt: skip
    for name, strides in (("q", q_nb), ("k", k_nb), ("v", v_nb), ("mask", mask_nb), ("out", out_nb)):
        values |= {f"{name}_nb{i}": stride for i, stride in enumerate(strides, 1)}
    kernels = [many_kernel(shape)] if rows == ROWS else attention_kernels(shape)
    row_bytes = cache_bytes((k_type, d_k), (v_type, d_v))
    return Step([Entry(kernel, kernel.pack(**values)) for kernel in kernels], n_kv * row_bytes * tasks, keep=(work,))


def check_types(*caches: tuple[str, int]) -> None:
    """Raises ValueError unless types can be read as rows of so many values."""
    for name, width in caches:
        if name not in KV_TYPES:
            raise ValueError(f"a cache must be one of {', '.join(KV_TYPES)}, got {name!r}")
        if not TYPES[name].is_plain and width % TYPES[name].size:
            raise ValueError(f"a row of {name} must hold whole blocks of {TYPES[name].size} values, got {width}")


def cache_bytes(*caches: tuple[str, int]) -> int:
    """Bytes of a key's rows of these types and widths."""
    return sum(n // TYPES[name].size * TYPES[name].bytes for name, n in caches)


def _cut(n_q: int, gqa_ratio: int, n_heads: int, n_kv: int) -> tuple[int, int, int]:
    """The rows of a task, how many tasks there are, and in how many ranges of keys each is cut. n_heads: K/V heads of
    all sequences."""
    n_rows = n_q * gqa_ratio
    if n_q > MAX_TOKENS:  # worth a tile of K and V decoded for many rows
        return ROWS, n_heads * -(-n_rows // ROWS), 1
    n_groups = -(-n_rows // MAX_ROWS)
    tasks, wanted = n_heads * n_groups, 2 * max_threads()
    cut = wanted > 2 and tasks < wanted and n_kv >= SPLIT_KEYS
    return -(-n_rows // n_groups), tasks, -(-wanted // tasks) if cut else 1
