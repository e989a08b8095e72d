"""FLASH_ATTN_VARLEN: the kernels of attention.py and attention_many.py over sequences of any length.

What is theirs alone: which sequence a task belongs to, where a key's row lies (in a page, by the block table), and what
a row sees, by positions. Sequences of few queries and of more are two kernels' work; each passes the other's over.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import ClassVar

from graphrt.backends.cpu.fast.attention import (
    MAX_ROWS,
    SPLIT_KEYS,
    FewQueries,
    RunningRow,
    build_merge,
    build_walk,
    cache_bytes,
    check_types,
)
from graphrt.backends.cpu.fast.attention_many import ROWS, ManyQueries
from graphrt.backends.cpu.fast.attention_many import build as build_many
from graphrt.backends.cpu.fast.attention_task import INTS, NEG_INF, TILE, Row, Shape, Task
from graphrt.backends.cpu.fast.ir import F16, F32, I16, I32, I64, LANES, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.matvec import MAX_TOKENS
from graphrt.backends.cpu.fast.pool import Entry, Step, max_threads

#: More than any distance of a query and a key.
FAR = 1 << 30
#: Beside the other kernels' arguments. n_q: tokens of all sequences; n_kv: the most keys of one; kv: lengths or starts
#: of packed keys; page_bits: log2 of a page's tokens; window: FAR for none; ahead: how far behind its own position a
#: query sees, 0 or FAR; mask_ne0: columns of an explicit mask, mask_new: 1 if they are a sequence's new tokens.
VARLEN_INTS = (*INTS, "q_starts", "kv", "table", "table_nb", "page_bits", "n_pages", "window", "ahead", "mask_ne0",
               "mask_new")  # fmt: skip


class Sequences(Task):
    """Tasks of sequences of any length. serves: whether so many queries are this kernel's work."""

    ints: ClassVar[tuple[str, ...]] = VARLEN_INTS
    serves: Callable[[Val], Val]

    def each_task(self, body: Callable[[Val, Val], None], n_parts: Val | int, *, in_turn: bool = False) -> None:
        """Tasks of one sequence after the other, and of the queries of nobody, as of a sequence without keys; every so
        many-th is a thread's."""
        f, a = self.f, self.arg
        before = f.var(f.const(0))
        with f.range(0, a["n_seq"] + 1) as seq:
            self._enter(seq)
            n_tasks = a["n_head_kv"] * self.n_groups * n_parts
            first = (f.ith + f.nth - before.v % f.nth) % f.nth
            with f.range(0, (f.max_int(n_tasks - first, 0) + f.nth - 1) // f.nth) as i:
                task = first + i * f.nth
                body(before.v + task, task // n_parts)
            before.v = before.v + n_tasks

    def _enter(self, seq: Val) -> None:
        """Sets what holds for all tasks of a sequence; for queries of nobody seq is n_seq."""
        f, a = self.f, self.arg
        is_last = seq.eq(a["n_seq"])
        self.seq = f.min_int(seq, a["n_seq"] - 1)
        self.first_query = self._start("q_starts", seq, a["n_q"])
        end = f.select(is_last, a["n_q"], self._start("q_starts", f.min_int(seq + 1, a["n_seq"]), a["n_q"]))
        n = f.max_int(end - self.first_query, 0)
        n = f.select(self.serves(n), n, f.const(0))
        if self.shape.paged:
            length = f.load(a["kv"] + self.seq * 4, I32).sext(I64)
            self.first_key = f.const(0)
        else:
            self.first_key = self._start("kv", self.seq, a["n_kv"])
            length = self._start("kv", self.seq + 1, a["n_kv"]) - self.first_key
        length = f.min_int(f.max_int(length, 0), a["n_kv"])
        self.n_keys = f.select(is_last, f.const(0), length)
        self.behind = self.n_keys - n
        self.n_rows = n * a["gqa_ratio"]
        self.n_groups = (self.n_rows + (self.shape.rows - 1)) // self.shape.rows

    def _start(self, name: str, i: Val, most: Val) -> Val:
        """The i-th of the starts, within 0 .. most."""
        f = self.f
        return f.min_int(f.max_int(f.load(self.arg[name] + i * 4, I32).sext(I64), 0), most)

    def locate(self, group: Val, i: int | Val) -> Row:
        """As the other kernels', of the sequence's groups; a row's mask is its position."""
        f, a = self.f, self.arg
        head_kv, in_head = group // self.n_groups, group % self.n_groups
        r = f.min_int(in_head * self.shape.rows + i, self.n_rows - 1)
        i_q, head = r // a["gqa_ratio"], head_kv * a["gqa_ratio"] + r % a["gqa_ratio"]
        row = self.row(i_q + self.first_query, head, f.const(0), self.behind + i_q)
        if self.shape.explicit:
            of_query = a["mask"] + (i_q + self.first_query) * a["mask_nb1"]
            row.explicit = of_query + head % a["mask_ne2"] * a["mask_nb2"]
        return row

    def kv_rows(self, group: Val) -> tuple[Val, Val]:
        a = self.arg
        head = group // self.n_groups
        k, v = (a[x] + head * a[f"{x}_nb2"] + self.first_key * a[f"{x}_nb1"] for x in ("k", "v"))
        return k, v

    def row_of(self, side: str, base: Val, key: Val) -> Val:
        """A page that is not there is some other one."""
        f, a = self.f, self.arg
        if not self.shape.paged:
            return super().row_of(side, base, key)
        block = key >> a["page_bits"]
        number = f.load(a["table"] + self.seq * a["table_nb"] + block * 4, I32).sext(I64)
        number = f.min_int(f.max_int(number, 0), a["n_pages"] - 1)
        return base + number * a[f"{side}_nb3"] + (key - (block << a["page_bits"])) * a[f"{side}_nb1"]

    def seen_keys(self, first: Val, last: Val) -> tuple[Val, Val]:
        """[first, stop) of the keys that rows at positions first .. last see."""
        f, a = self.f, self.arg
        stop = f.max_int(f.min_int(last + 1 + a["ahead"], self.n_keys), 0)
        return f.min_int(f.max_int(first - a["window"] + 1, 0), stop), stop

    def add_explicit(self, row: Val, key: Val, target: Val) -> None:
        """What a row of the mask has for 16 keys from `key` on, f16, to memory that holds zeros; keys without a column
        and such that there are not are left out."""
        f, a = self.f, self.arg
        first = key - f.select(a["mask_new"].ne(0), self.behind, f.const(0))
        low = f.max_int(f.const(0) - first, 0)
        high = f.min_int(f.min_int(a["mask_ne0"] - first, self.n_keys - key), LANES)
        with f.if_else((high - low).eq(LANES)) as (whole, part):
            with whole:
                f.store(target, f.load(row + first * 2, I16, LANES))
            with part:
                f.store(target, f.zeros(I16))
                with f.range(low, f.max_int(high, low)) as i:
                    f.store(target + i * 2, f.load(row + (first + i) * 2, I16))

    def with_explicit(self, bias: Val, added: Val) -> Val:
        """bias() with what the mask adds, f32 [16]; what is hidden stays so, whatever the mask has there."""
        return self.f.select(bias.eq(NEG_INF), NEG_INF, bias + added)

    def bias(self, position: Val, key: Val) -> Val:
        """What is added to logits, f32 [16]: -inf for a key that is not seen, else 0, or minus the distance with ALiBi.
        position, key: i32 [16]."""
        f, a = self.f, self.arg
        window, ahead, length = (f.splat(x.trunc(I32)) for x in (a["window"], a["ahead"], self.n_keys))
        behind = position - key
        seen = (behind < window) & (f.zeros(I32) - behind <= ahead) & (key < length)
        return f.select(seen, -f.abs(behind.to(F32)) if self.shape.alibi else f.zeros(), NEG_INF)


class _Few(Sequences, FewQueries):
    def __init__(self, f: Fn, shape: Shape) -> None:
        super().__init__(f, shape)
        self.value_rows = f.buffer(I64, TILE)

    def serves(self, n: Val) -> Val:
        return n <= MAX_TOKENS

    def key_range(self, rows: list[RunningRow], split: Val) -> tuple[Val, Val]:
        f, n_split = self.f, self.arg["n_split"]
        first, stop = self.seen_keys(rows[0].mask, rows[-1].mask)
        at = first // TILE
        tiles = f.max_int((stop + (TILE - 1)) // TILE - at, 0)
        start, end = at + tiles * split // n_split, at + tiles * (split + 1) // n_split
        return start * TILE, f.min_int(end * TILE, stop)

    def mask(self, row: Row, key: Val) -> Val:
        f = self.f
        keys = f.splat(key.trunc(I32)) + f.vconst(range(LANES), I32)
        bias = self.bias(f.splat(row.mask.trunc(I32)), keys)
        if row.explicit is None:
            return bias
        self.add_explicit(row.explicit, key, self.mask_tail)
        return self.with_explicit(bias, f.load(self.mask_tail, F16, LANES).to(F32))

    def begin_values(self, v_base: Val, tile: Val, count: Val) -> None:
        """A key's page is looked up once, not once for every few columns."""
        f = self.f
        with f.range(0, count) as j:
            f.store(self.value_rows + j * 8, self.row_of("v", v_base, tile + j))

    def value_row(self, v_base: Val, tile: Val, j: Val) -> Val:
        return self.f.load(self.value_rows + j * 8, I64)


class _Many(Sequences, ManyQueries):
    def __init__(self, f: Fn, shape: Shape) -> None:
        super().__init__(f, shape)
        self.explicit_of = f.buffer(I64, ROWS)

    def serves(self, n: Val) -> Val:
        return n > MAX_TOKENS

    def live(self, group: Val) -> tuple[Val, Val]:
        if self.shape.explicit:
            f = self.f
            with f.range(0, ROWS) as i:
                row = self.locate(group, i)
                assert row.explicit is not None
                f.store(self.explicit_of + i * 8, row.explicit)
        return self.seen_keys(self.locate(group, 0).mask, self.locate(group, ROWS - 1).mask)

    def masks_of(self, tile: Val) -> Val:
        f = self.f
        with f.range(0, ROWS, LANES) as half:
            position = f.load(self.mask_of + half * 8, I64, LANES).trunc(I32)
            with f.range(0, TILE) as j:
                f.store(self.lane(self.seen, j, half), self.bias(position, f.splat((tile + j).trunc(I32))))
        if self.shape.explicit:
            self._add_explicits(tile)
        return f.const(1)

    def _add_explicits(self, tile: Val) -> None:
        """To the tile's masks, by 16 rows and 16 keys."""
        f = self.f
        with f.range(0, ROWS) as row, f.range(0, TILE, LANES) as at:
            target = self.masks + row * (2 * TILE) + at * 2
            self.add_explicit(f.load(self.explicit_of + row * 8, I64), tile + at, target)
        with f.range(0, TILE, LANES) as at, f.range(0, ROWS, LANES) as half:
            first = self.masks + at * 2 + half * (2 * TILE)
            rows = [f.load(first + 2 * TILE * i, F16, LANES).to(F32) for i in range(LANES)]
            for i, added in enumerate(f.transpose(rows)):
                place = self.lane(self.seen, at + i, half)
                f.store(place, self.with_explicit(f.load(place, F32, LANES), added))


@functools.cache
def _kernels(few: Shape, many: Shape | None) -> list[Kernel]:
    def kernel(name: str, shape: Shape, build: Callable[[Fn], None]) -> Kernel:
        return Kernel(f"{name}_{shape.name}", VARLEN_INTS, build, floats=("scale", "softcap"))

    found = [kernel("attn_varlen", few, lambda f: build_walk(f, _Few(f, few)))]
    if few.split:
        found.append(kernel("attn_varlen_merge", few, lambda f: build_merge(f, _Few(f, few))))
    if many is not None:
        found.append(kernel("attn_varlen_many", many, lambda f: build_many(_Many(f, many))))
    return found


def flash_attn_varlen(
    k_type: str, v_type: str, *, d_k: int, d_v: int, n_tokens: int, most_keys: int, n_head: int, n_head_kv: int,
    n_seq: int, q: int, q_nb: tuple[int, int], k: int, k_nb: tuple[int, int, int], v: int, v_nb: tuple[int, int, int],
    out: int, out_nb: tuple[int, int], q_starts: int, kv: int, scale: float, page: int = 0, n_pages: int = 1,
    table: int = 0, table_nb: int = 0, causal: bool = True, window: int = 0, softcap: float = 0.0, sinks: int = 0,
    slopes: int = 0, mask: int = 0, mask_nb: tuple[int, int] = (0, 0), mask_ne: tuple[int, int] = (0, 1),
    mask_new: bool = False,
) -> Step:  # fmt: skip
    """FLASH_ATTN_VARLEN (ops/flash_attn_varlen.py). Strides are bytes; the innermost dimension is contiguous.

    q [d_k, n_tokens, n_head] f32, q_nb: between tokens and heads; k [d_k, page, n_head_kv, n_pages], or page 0 for
    [d_k, n_keys, n_head_kv], and v [d_v, ...] of KV_TYPES, with the strides of their other dimensions; out [d_v,
    n_head, n_tokens] f32. q_starts i32 [n_seq + 1]; kv: lengths i32 [n_seq], or of packed keys the starts i32 [n_seq +
    1]; table: rows of i32 pages, table_nb apart; most_keys: of a sequence. Cost follows what is there, not the bounds.
    mask: f16 [n_columns, n_tokens, m2] or 0 for none, mask_nb: between tokens and matrices; mask_ne: (n_columns, m2).
    """
    check_types((k_type, d_k), (v_type, d_v))
    gqa_ratio = n_head // n_head_kv
    n_rows = min(-(-n_tokens // n_seq), MAX_TOKENS) * gqa_ratio
    rows = -(-n_rows // -(-n_rows // MAX_ROWS))
    most_groups = (n_tokens * gqa_ratio // rows + n_seq + 1) * n_head_kv
    tasks, wanted = min(n_seq, n_tokens) * -(-n_rows // rows) * n_head_kv, 2 * max_threads()
    n_split = -(-wanted // tasks) if wanted > 2 and tasks < wanted and most_keys >= SPLIT_KEYS else 1
    few = Shape(k_type, v_type, d_k, d_v, rows, True, softcap != 0, n_split > 1, slopes != 0, page > 0, mask != 0)
    many = Shape(k_type, v_type, d_k, d_v, ROWS, True, softcap != 0, False, slopes != 0, page > 0, mask != 0)
    work = (ctypes.c_char * (few.partial_bytes * rows * most_groups * n_split if few.split else 1))()
    values = {
        "q": q, "k": k, "v": v, "out": out, "n_q": n_tokens, "n_kv": most_keys, "n_head_kv": n_head_kv,
        "gqa_ratio": gqa_ratio, "n_seq": n_seq, "n_split": n_split, "work": ctypes.addressof(work), "scale": scale,
        "softcap": softcap, "sinks": sinks, "slopes": slopes, "q_starts": q_starts, "kv": kv, "table": table,
        "table_nb": table_nb, "page_bits": max(page, 1).bit_length() - 1, "n_pages": n_pages,
        "window": min(window or FAR, FAR), "ahead": 0 if causal else FAR,
    }  # fmt: skip
    values |= {"mask": mask, "mask_nb1": mask_nb[0], "mask_nb2": mask_nb[1], "mask_nb3": 0, "mask_ne0": mask_ne[0]}
    values |= {"mask_ne2": mask_ne[1], "mask_ne3": 1, "mask_new": int(mask_new)}
    for name, strides in (("q", (*q_nb, 0)), ("k", k_nb), ("v", v_nb), ("out", (*out_nb, 0))):
        values |= {f"{name}_nb{i}": stride for i, stride in enumerate(strides, 1)}
    kernels = _kernels(few, many if n_tokens > MAX_TOKENS else None)
    most_bytes = n_seq * most_keys * cache_bytes((k_type, d_k), (v_type, d_v)) * n_head_kv
    return Step([Entry(kernel, kernel.pack(**values)) for kernel in kernels], most_bytes, keep=(work,))
