"""What the kernels of FLASH_ATTN_EXT share: their arguments, where a row's data lies, how K and V are read.

A row is a (query, head) pair. A group is as many rows as a kernel takes at once, all of one sequence and K/V head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from graphrt.backends.cpu.fast.blocks import TYPES, BlockType, plain_load
from graphrt.backends.cpu.fast.ir import F32, LANES, Fn, Val, pieces
from graphrt.dtypes import CACHES

NEG_INF = -math.inf

#: Types of K and V.
KV_TYPES = tuple(t for t in CACHES if t in TYPES)

#: Keys in a tile: one rescaling of the sums for so many keys.
TILE = 64

INTS = (
    "q", "q_nb1", "q_nb2", "q_nb3", "k", "k_nb1", "k_nb2", "k_nb3", "v", "v_nb1", "v_nb2", "v_nb3",
    "mask", "mask_nb1", "mask_nb2", "mask_nb3", "mask_ne2", "mask_ne3", "sinks", "slopes",
    "out", "out_nb1", "out_nb2", "out_nb3", "n_q", "n_kv", "n_head_kv", "gqa_ratio", "n_seq", "n_split", "work",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """All that the code of a kernel depends on. rows: how many (query, head) rows share a pass over the cache; alibi,
    paged, explicit: attention_varlen.py's alone."""

    k_type: str
    v_type: str
    d_k: int
    d_v: int
    rows: int
    masked: bool
    softcap: bool
    split: bool
    alibi: bool = False
    paged: bool = False
    explicit: bool = False

    @property
    def name(self) -> str:
        known = (("m", self.masked), ("c", self.softcap), ("s", self.split), ("a", self.alibi), ("p", self.paged),
                 ("e", self.explicit))  # fmt: skip
        flags = "".join(c for c, on in known if on)
        return f"{self.k_type}_{self.v_type}_{self.d_k}_{self.d_v}_r{self.rows}{flags}"

    @property
    def partial_bytes(self) -> int:
        """One row's partial result: max, sum, padding to 64 bytes, then d_v values."""
        return 64 + 4 * self.d_v


@dataclass(frozen=True)
class Segment:
    """A stretch of a K or V row: `read(row address)` gives vectors of f32 for (first value, lanes) in `at`."""

    at: tuple[tuple[int, int], ...]
    read: Callable[[Val], list[Val]]


def segments_of(f: Fn, block: BlockType, n: int) -> list[Segment]:
    if block.is_plain:

        def plain(start: int, lanes: int) -> Segment:
            width = block.value_bytes
            return Segment(((start, lanes),), lambda row: [plain_load(f, row + start * width, block.name, lanes)])

        return [plain(start, lanes) for start, lanes in pieces(n)]

    def quantized(i: int) -> Segment:
        at = tuple((i * block.size + k, LANES) for k in range(0, block.size, LANES))
        return Segment(at, lambda row: [v for _, v in block.vectors(f, row + i * block.bytes)])

    return [quantized(i) for i in range(n // block.size)]


@dataclass
class Row:
    """One (query, head) row of a task: where its data is. mask: where its mask is, or of attention_varlen.py's kernels
    its query's position, and explicit where its mask is."""

    q: Val
    mask: Val
    slope: Val
    sink: Val
    has_sink: Val
    out: Val
    explicit: Val | None = None


class Task:
    """Where the data of a kernel's groups lies. Kernels add what they do with it.

    n_keys: of a group's sequence; ints: the kernel's arguments.
    """

    ints: ClassVar[tuple[str, ...]] = INTS

    def __init__(self, f: Fn, shape: Shape) -> None:
        self.f, self.shape = f, shape
        self.arg = dict(zip(self.ints, f.args(*self.ints), strict=True))
        a = self.arg
        self.n_rows = a["n_q"] * a["gqa_ratio"]
        self.n_groups = (self.n_rows + (shape.rows - 1)) // shape.rows
        self.n_keys = a["n_kv"]

    def each_task(self, body: Callable[[Val, Val], None], n_parts: Val | int, *, in_turn: bool = False) -> None:
        """body(number of the task, group) for this thread's tasks: n_parts of each group, one after the other. in_turn:
        every so many-th task is a thread's, else they are a stretch of all."""
        f, a = self.f, self.arg
        n_tasks = a["n_seq"] * a["n_head_kv"] * self.n_groups * n_parts
        if in_turn:
            with f.range(0, (n_tasks - f.ith + f.nth - 1) // f.nth) as i:
                task = i * f.nth + f.ith
                body(task, task // n_parts)
        else:
            start, stop = f.share(n_tasks)
            with f.range(start, stop) as task:
                body(task, task // n_parts)

    def row_of(self, side: str, base: Val, key: Val) -> Val:
        """The address of a key's row of K or V ("k", "v"). base: kv_rows()'s. The rows of the 16 keys from a multiple
        of 16 on lie one stride apart."""
        return base + key * self.arg[f"{side}_nb1"]

    def locate(self, group: Val, i: int | Val) -> Row:
        """Row i of a group (a number that counts seq, head_kv, group). Past the last row, the last row again."""
        f, a = self.f, self.arg
        seq_head, in_head = group // self.n_groups, group % self.n_groups
        seq, head_kv = seq_head // a["n_head_kv"], seq_head % a["n_head_kv"]
        r = f.min_int(in_head * self.shape.rows + i, self.n_rows - 1)
        i_q, head = r // a["gqa_ratio"], head_kv * a["gqa_ratio"] + r % a["gqa_ratio"]
        mask = f.const(0)
        if self.shape.masked:
            mask = a["mask"] + i_q * a["mask_nb1"] + head % a["mask_ne2"] * a["mask_nb2"]
            mask = mask + seq % a["mask_ne3"] * a["mask_nb3"]
        return self.row(i_q, head, seq, mask)

    def row(self, i_q: Val, head: Val, seq: Val, mask: Val) -> Row:
        """The row of a query and a head."""
        f, a = self.f, self.arg
        slope, sink = f.var(f.const(1.0, F32)), f.var(f.const(NEG_INF, F32))
        has_sink = a["sinks"].ne(0)
        with f.if_(a["slopes"].ne(0)):
            slope.v = f.load(a["slopes"] + head * 4, F32)
        with f.if_(has_sink):
            sink.v = f.load(a["sinks"] + head * 4, F32)
        return Row(
            q=a["q"] + i_q * a["q_nb1"] + head * a["q_nb2"] + seq * a["q_nb3"],
            mask=mask,
            slope=slope.v,
            sink=sink.v,
            has_sink=has_sink,
            out=a["out"] + head * a["out_nb1"] + i_q * a["out_nb2"] + seq * a["out_nb3"],
        )

    def kv_rows(self, group: Val) -> tuple[Val, Val]:
        a = self.arg
        seq_head = group // self.n_groups
        seq, head = seq_head // a["n_head_kv"], seq_head % a["n_head_kv"]
        return a["k"] + head * a["k_nb2"] + seq * a["k_nb3"], a["v"] + head * a["v_nb2"] + seq * a["v_nb3"]
