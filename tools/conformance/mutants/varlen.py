"""FLASH_ATTN_VARLEN and FLASH_ATTN_VARLEN_LSE the way a GPU kernel computes them: a list of tiles made on the device,
k-blocks found by the block table, what a row sees by positions, tiles in two parts that are joined.

Attention's arithmetic has its bugs in table.py; here are those of places and lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from graphrt.backends.cpu.score import score_of, value_at
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tools.conformance.mutants.memory import Floats, Index, Kernel, Operand
from graphrt.tools.conformance.mutants.schedule import Mask

BLOCK, TOKENS = 32, 8
NEG_INF = np.float32("-inf")
Sums = tuple[Floats, Floats, Floats]


class Varlen(Kernel):
    """Tiles of TOKENS queries of one sequence and head against blocks of BLOCK keys."""

    op = "FLASH_ATTN_VARLEN"

    def run(self) -> None:
        s = self.sources
        self.q, self.k, self.v, self.table, self.mask = s["q"], s["k"], s.get("v"), s.get("block_table"), s.get("mask")
        self.n_seq, self.n_tokens = s["q_starts"].t.ne[0] - 1, self.q.t.ne[1]
        self.n_head, self.gqa = self.q.t.ne[2], self.q.t.ne[2] // self.k.t.ne[2]
        self.page = self.k.t.ne[1]
        for seq, first, n in self.tiles():
            length = self.length(seq) if seq < self.n_seq else 0
            for head in range(self.n_head):
                self.tile(seq, first, n, length, head)

    # -- pieces: sequences

    def number(self, name: str, i: int) -> int:
        """The i-th of the starts or lengths."""
        x = self.sources[name]
        return int(self.read_ints(x, np.asarray(x.base + 4 * i)))

    def start_of(self, seq: int) -> int:
        """The first query of a sequence, n_seq: of nobody's; one past the last of all."""
        return self.number("q_starts", seq) if seq <= self.n_seq else self.n_tokens

    def tiles(self) -> Iterator[tuple[int, int, int]]:
        """(sequence, first query in it, its queries) of every tile; nobody's last."""
        for seq in range(self.sequences()):
            n = self.start_of(seq + 1) - self.start_of(seq)
            for first in range(0, n, TOKENS):
                yield seq, first, n

    def sequences(self) -> int:
        return self.n_seq + 1

    def length(self, seq: int) -> int:
        if self.table is None:
            return self.number("k_starts", seq + 1) - self.number("k_starts", seq)
        return self.number("lengths", seq)

    # -- pieces: what sequences share

    def groups(self) -> list[tuple[int, int, int]]:
        """(first sequence, sequences, shared keys) of each group that shares any; none where positions count too."""
        if "prefixes" not in self.sources or self.p.window or self.p.max_bias or self.p.score:
            return []
        n = 3 * self.sources["prefixes"].t.ne[1]
        found = [[self.number("prefixes", i + j) for j in range(3)] for i in range(0, n, 3)]
        return [(first, count, pages * self.page) for first, count, pages in found if pages > 0]

    def group_of(self, seq: int) -> tuple[int, int]:
        """(the sequence whose table is read for shared keys, how many there are) of a sequence."""
        found = [(first, keys) for first, count, keys in self.groups() if self.is_member(seq, first, count)]
        return found[0] if found else (seq, 0)

    def is_member(self, seq: int, first: int, count: int) -> bool:
        return first <= seq < first + count

    def own_start(self, start: int, shared: int) -> int:
        """The first key that a tile visits by itself."""
        return max(start, shared)

    def shared_end(self, shared: int) -> int:
        """One past the last key that is visited for all of a group."""
        return shared

    def join(self, shared: Sums, own: Sums) -> Sums:
        return self.merge(shared, own)

    # -- pieces: what a row sees

    def position(self, i: Index, n: int, length: int) -> Index:
        return length - n + i

    def end_key(self, last: int, length: int) -> int:
        """One past the last key that a tile whose last position is `last` sees."""
        return max(0, min(length, last + 1)) if self.p.causal else length

    def first_key(self, first: int, end: int) -> int:
        return min(max(0, first - self.p.window + 1), end) if self.p.window else 0

    def seen(self, position: Index, key: Index, length: int) -> Mask:
        """bool [queries, keys]."""
        seen: Mask = np.broadcast_to(key < length, (len(position), len(key)))
        if self.p.causal:
            seen = seen & self.before(key, position)
        return seen & self.near(key, position) if self.p.window else seen

    def before(self, key: Index, position: Index) -> Mask:
        return np.asarray(key <= position[:, None])

    def near(self, key: Index, position: Index) -> Mask:
        return np.asarray(key > position[:, None] - self.p.window)

    def distance(self, key: Index, position: Index) -> Index:
        return np.asarray(np.abs(key - position[:, None]))

    # -- pieces: an explicit mask

    def mask_row(self, tokens: Index, first: int) -> Index:
        """The rows of queries, the first of which is their sequence's."""
        return tokens

    def column0(self, n: int, length: int) -> int:
        """The key of the mask's first column."""
        return length - n if self.p.mask_new else 0

    def column(self, key: Index, column0: int) -> Index:
        return key - column0

    def has_column(self, column: Index) -> Mask:
        """Which columns there are."""
        assert self.mask is not None
        return (column >= 0) & (column < self.mask.t.ne[0])

    def without_column(self) -> np.float32:
        """What is added to a key that has none."""
        return np.float32(0)

    def matrix(self, head: int) -> int:
        assert self.mask is not None
        return head % self.mask.t.ne[2]

    def read_mask(self, seen: Mask) -> Mask:
        """Of which queries and keys it is read."""
        return seen

    def added(self, tokens: Index, first: int, head: int, key: Index, column0: int, seen: Mask) -> Floats:
        """What the mask has for each query and key; 0 where none sees the other."""
        out: Floats = np.zeros(seen.shape, np.float32)
        if self.mask is None:
            return out
        column = np.broadcast_to(self.column(key, column0), seen.shape)
        there = self.has_column(column) & self.read_mask(seen)
        row = np.broadcast_to(self.mask_row(tokens, first)[:, None], seen.shape)
        at = self.mask.base + row * self.mask.t.nb[1] + self.matrix(head) * self.mask.t.nb[2] + column * 2
        out[~self.has_column(column)] = self.without_column()
        if there.any():
            out[there] = self.read(self.mask, at[there], 1)[:, 0]
        return out

    def mask_slope(self, head: int) -> np.float32:
        return np.float32(alibi_slopes(self.n_head, self.p.max_bias)[head])

    def shown(self, seen: Mask) -> Mask:
        """The keys of a block that are read: those that some query sees."""
        return np.asarray(seen.any(0))

    def visited(self, blocks: list[int], tokens: Index) -> list[int]:
        """Of a tile's k-blocks those that are worked on."""
        return blocks

    # -- pieces: where keys lie

    def page_of(self, seq: int, key: Index) -> Index:
        assert self.table is not None
        return self.entry(seq, key // self.page)

    def entry(self, seq: int, block: Index) -> Index:
        assert self.table is not None
        return self.read_ints(self.table, self.table.base + seq * self.table.t.nb[1] + block * 4)

    def slot_of(self, key: Index) -> Index:
        return key % self.page

    def key_rows(self, x: Operand, seq: int, kv_head: int, key: Index) -> Index:
        """The addresses of keys' rows."""
        if self.table is None:
            return self.start(x, self.packed_row(seq, key), np.asarray(kv_head), np.asarray(0))
        return self.start(x, self.slot_of(key), np.asarray(kv_head), self.page_of(seq, key))

    def packed_row(self, seq: int, key: Index) -> Index:
        return np.asarray(self.number("k_starts", seq) + key)

    def loaded(self, key: Index, first: int, end: int) -> Mask:
        """Which keys of a block are read; others are zeros."""
        return (key >= first) & (key < end)

    def load(self, x: Operand, seq: int, kv_head: int, key: Index, read: Mask) -> Floats:
        rows = np.zeros((len(key), x.t.ne[0]), np.float32)
        if read.any():
            rows[read] = self.read(x, self.key_rows(x, seq, kv_head, key[read]), x.t.ne[0])
        return rows

    # -- pieces: a tile

    def tile(self, seq: int, first: int, n: int, length: int, head: int) -> None:
        i = np.arange(first, min(first + TOKENS, n))
        position = self.position(i, n, length)
        end = self.end_key(int(position[-1]), length)
        start = self.first_key(int(position[0]), end)
        whose, shared = self.group_of(seq) if seq < self.n_seq else (seq, 0)
        start = self.own_start(start, shared) if shared else start
        blocks = list(self.blocks(start, end))
        tokens = self.start_of(seq) + i
        q = self.read(self.q, self.start(self.q, tokens, np.asarray(head), np.asarray(0)), self.q.t.ne[0])
        half, of = len(blocks) // 2, (tokens, self.start_of(seq), self.column0(n, length))
        parts = [
            self.process(seq, head, q, position, length, (start, end), part, of)
            for part in (blocks[:half], blocks[half:])
        ]
        sums = self.merge(*parts)
        if shared:
            span = (0, self.shared_end(shared))
            behind = position * 0 + shared  # all of it is before every query
            sums = self.join(self.process(whose, head, q, behind, span[1], span, list(self.blocks(*span)), of), sums)
        self.finish(seq, tokens, head, sums)

    def blocks(self, start: int, end: int) -> range:
        """The k-blocks that a tile visits."""
        return range(start // BLOCK, -(-end // BLOCK))

    def process(
        self, seq: int, head: int, q: Floats, position: Index, length: int, span: tuple[int, int], blocks: list[int],
        of: tuple[Index, int, int],
    ) -> Sums:  # fmt: skip
        """(row maxima, sums of weights, weighted sums of V) of some blocks. of: the queries, the first of their
        sequence, the key of the mask's first column."""
        width = self.v.t.ne[0] if self.v is not None else 0
        top: Floats = np.full(len(q), NEG_INF)
        total: Floats = np.zeros(len(q), np.float32)
        acc: Floats = np.zeros((len(q), width), np.float32)
        kv_head = self.kv_head(head)
        tokens, first, column0 = of
        for block in self.visited(blocks, tokens):
            key = block * BLOCK + np.arange(BLOCK)
            read = self.loaded(key, *span)
            seen = self.seen(position, key, length) & (key >= span[0])
            added = self.added(tokens, first, head, key, column0, seen)
            if self.mask is not None:
                seen = seen & (added != NEG_INF)
                read = np.asarray(read & self.shown(seen))
            s: Floats = q @ self.load(self.k, seq, kv_head, key, read).T * np.float32(self.p.scale)
            if self.p.softcap:
                s = np.float32(self.p.softcap) * np.tanh(s / np.float32(self.p.softcap))
            s = self.scored(s, seq, head, position, key)
            if self.p.max_bias:
                slope = np.float32(alibi_slopes(self.n_head, self.p.max_bias)[head])
                s = s - slope * self.distance(key, position).astype(np.float32)
            if self.mask is not None:
                s = s + self.mask_slope(head) * np.where(seen, added, np.float32(0))
            s = np.where(seen, s, NEG_INF).astype(np.float32)
            new = np.maximum(top, s.max(1))
            safe = np.where(new == NEG_INF, np.float32(0), new)
            weights, shrink = np.exp(s - safe[:, None]).astype(np.float32), np.exp(top - safe)
            total = total * shrink + weights.sum(1)
            if self.v is not None:
                acc = acc * shrink[:, None] + weights @ self.load(self.v, seq, kv_head, key, read)
            top = new
        return top, total, acc

    def scored(self, s: Floats, seq: int, head: int, position: Index, key: Index) -> Floats:
        """The score function, where there is one."""
        function = score_of(self.p)
        if function is None:
            return s
        symbols = self.symbols(seq, head, position, key) | {"s": s}
        found = value_at(function, {name: torch.as_tensor(x) for name, x in symbols.items()}, torch.float32)
        return found.expand(s.shape).numpy()

    def symbols(self, seq: int, head: int, position: Index, key: Index) -> dict[str, Index]:
        """Of each score, its sequence, head, and the positions of query and key."""
        return {"b": np.asarray(seq), "h": np.asarray(head), "i": position[:, None], "j": key[None, :]}

    def kv_head(self, head: int) -> int:
        return head // self.gqa

    def merge(self, a: Sums, b: Sums) -> Sums:
        top = np.maximum(a[0], b[0])
        safe = np.where(top == NEG_INF, np.float32(0), top)
        left, right = np.exp(a[0] - safe), np.exp(b[0] - safe)
        return top, a[1] * left + b[1] * right, a[2] * left[:, None] + b[2] * right[:, None]

    def has_sink(self, seq: int) -> bool:
        return "sinks" in self.sources and seq < self.n_seq

    def finish(self, seq: int, tokens: Index, head: int, sums: Sums) -> None:
        top, total, acc = sums
        if self.has_sink(seq):
            x = self.sources["sinks"]
            sink = self.read(x, np.asarray(x.base + head * 4), 1)[0]
            new = np.maximum(top, sink)
            shrink = np.exp(top - new)
            top, total, acc = new, total * shrink + np.exp(sink - new), acc * shrink[:, None]
        if self.v is None:
            with np.errstate(divide="ignore"):
                lse = np.where(total == 0, NEG_INF, np.where(total == 0, 0, top) + np.log(total))
            starts = self.start(self.out, tokens, np.asarray(0), np.asarray(0)) + head * 4
            self.write(self.out, starts, lse[:, None].astype(np.float32))
            return
        out = np.where(total == 0, np.float32(0), 1 / np.where(total == 0, 1, total))[:, None] * acc
        self.write(self.out, self.out_rows(tokens, head), out.astype(np.float32))

    def out_rows(self, tokens: Index, head: int) -> Index:
        return self.start(self.out, np.asarray(head), tokens, np.asarray(0))
