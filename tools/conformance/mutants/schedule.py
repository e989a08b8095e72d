"""The schedule of the attention kernel under mutation: packed heads, tiles, stream-K ranges, parts and the fixup.

A tile is up to 64 rows: some tokens times the heads that share a KV head, token major. The work of all tiles, in KV
blocks, is cut into equal ranges, one a program. A program that finishes a tile which it also began stores it; one that
finishes what others began leaves an unnormalised part, one that stops inside a tile leaves a part in the fixup buffer,
and fixup() joins them. The sink joins once, where a tile is finished.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphrt.ops.key_panels import key_heads
from graphrt.tensor import Tensor
from graphrt.tools.conformance.mutants.memory import Floats, Index, Kernel, Place

Mask = npt.NDArray[np.bool_]

ROWS = 64


class Tile(NamedTuple):
    """Rows that run together: their sequence and KV head, and each row's query head and token."""

    seq: int
    kv_head: int
    heads: Index
    tokens: Index
    stored: Mask


class Part(NamedTuple):
    """Softmax under way: each row's maximum [R, 1], sum [R, 1] and numerator [R, D_v]."""

    top: Floats
    total: Floats
    acc: Floats


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def kv_block(n_kv: int) -> int:
    """Keys a block: about a quarter of them."""
    return min(1024, max(16, power_of_two(n_kv) // 4))


class StreamK(Kernel):
    """What attention is made of but for the arithmetic, which subclasses define."""

    #: What the fixup buffer holds before anything is written to it.
    scratch = np.float32("nan")

    def __init__(self, node: Tensor, place: Place) -> None:
        super().__init__(node, place)
        self.q, self.k = self.sources["q"], self.sources["k"]
        self.v, self.mask, self.sinks = (self.sources.get(name) for name in ("v", "mask", "sinks"))
        self.d_k, self.n_q, self.n_head, self.n_seq = self.q.t.ne
        self.n_kv, self.n_head_kv = self.k.t.ne[1], key_heads(self.k.t, self.d_k, node.params.k_layout)
        self.d_v = self.v.t.ne[0] if self.v is not None else 0
        self.gqa = self.n_head // self.n_head_kv
        self.packed = min(8, power_of_two(self.gqa))  # heads a tile; tokens a tile make up the rest
        self.tokens = min(ROWS // self.packed, power_of_two(self.n_q))
        self.block = kv_block(self.n_kv)
        self.iter_k = -(-self.n_kv // self.block)
        self.iter_j = -(-self.n_q // self.tokens)
        self.iter_z = -(-self.gqa // self.packed)
        self.n_tiles = self.iter_j * self.iter_z * self.n_head_kv * self.n_seq
        self.work = self.iter_k * self.n_tiles
        self.n_programs = min(self.work, 2 * self.n_tiles + 1)
        rows, d_v = self.packed * self.tokens, power_of_two(self.d_v) if self.d_v else 0
        self.fixup_top = np.full((self.n_programs, rows, 1), self.scratch, np.float32)
        self.fixup_total = np.full((self.n_programs, rows, 1), self.scratch, np.float32)
        self.fixup_acc = np.full((self.n_programs, rows, d_v), self.scratch, np.float32)
        self.unfinished: dict[int, tuple[int, Part]] = {}
        self._blocks: dict[tuple[int, ...], Floats] = {}

    def run(self) -> None:
        self._blocks.clear()
        self.unfinished.clear()
        with np.errstate(all="ignore"):
            for program in range(self.n_programs):
                self.program(program)
            for tile in self.unfinished:
                self.fixup(tile)

    # -- pieces: the schedule

    def first_work(self, program: int) -> int:
        """The first block of a program's range; the next program's is its end."""
        return program * self.work // self.n_programs

    def program(self, b: int) -> None:
        at, stop = self.first_work(b), self.first_work(b + 1)
        while at < stop:
            number, k0 = divmod(at, self.iter_k)
            k1 = min(self.iter_k, k0 + stop - at)
            tile, part = self.tile(number), self.process(self.tile(number), k0, k1)
            if self.adds_sink(k0, k1):
                part = self.with_sink(tile, part)
            if k1 < self.iter_k:
                self.leave_part(b, part)
            elif k0 > 0:
                self.unfinished[number] = b, part
            else:
                self.store(tile, part)
            at += k1 - k0

    def fixup(self, number: int) -> None:
        """Joins the parts of a tile, from the program that finished it back to the one that began it."""
        b, part = self.unfinished[number]
        tile = self.tile(number)
        while self.first_work(b) > number * self.iter_k:
            b -= 1
            part = self.merge(part, self.found_part(b))
        self.store(tile, self.at_fixup(tile, part))

    def at_fixup(self, tile: Tile, part: Part) -> Part:
        """What is left to do with a tile when all its parts are joined: nothing."""
        return part

    def leave_part(self, b: int, part: Part) -> None:
        self.fixup_top[b], self.fixup_total[b], self.fixup_acc[b] = part

    def found_part(self, b: int) -> Part:
        return Part(self.fixup_top[b], self.fixup_total[b], self.fixup_acc[b])

    def adds_sink(self, k0: int, k1: int) -> bool:
        """Whether the part of the blocks k0..k1 takes the sink: the one that ends its tile."""
        return k1 == self.iter_k

    # -- pieces: which rows and heads

    def tile(self, number: int) -> Tile:
        rest, j = divmod(number, self.iter_j)
        rest, z = divmod(rest, self.iter_z)
        seq, kv_head = divmod(rest, self.n_head_kv)
        row = np.arange(self.packed * self.tokens)
        tokens, in_group = j * self.tokens + row // self.packed, self.in_group(z, row % self.packed)
        stored = (in_group < self.gqa) & (tokens < self.n_q)
        heads = self.q_head(kv_head, np.where(stored, in_group, 0))
        return Tile(seq, kv_head, heads, np.where(stored, tokens, 0), stored)

    def in_group(self, z: int, c: Index) -> Index:
        """Column `c` of the z-th tile of a KV head as one of its query heads; past gqa: padding."""
        return z * self.packed + c

    def q_head(self, kv_head: int, in_group: Index) -> Index:
        return kv_head * self.gqa + in_group

    # -- defined by the kernel

    def process(self, tile: Tile, k0: int, k1: int) -> Part:
        raise NotImplementedError

    def merge(self, a: Part, b: Part) -> Part:
        raise NotImplementedError

    def with_sink(self, tile: Tile, part: Part) -> Part:
        raise NotImplementedError

    def store(self, tile: Tile, part: Part) -> None:
        raise NotImplementedError
