"""FLASH_ATTN_EXT and FLASH_ATTN_LSE the way a GPU kernel computes them: online softmax over blocks of keys.

Masks are classed block by block, head sizes padded to powers of two, logits in base 2. The order of the work stands in
mutants_schedule.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from graphrt.backends.cpu.score import score_of, value_at
from graphrt.ops.key_panels import ROWS
from graphrt.tools.conformance.mutants.memory import Floats, Index, Operand
from graphrt.tools.conformance.mutants.schedule import Mask, Part, StreamK, Tile, power_of_two

NEG_INF = np.float32("-inf")
LOG2E = np.float64(math.log2(math.e))  # as a fused multiply-add of the exponent rounds once
HIDDEN, PARTIAL, FULL = "hidden", "partial", "full"


class Attention(StreamK):
    """The arithmetic of both ops."""

    op = "FLASH_ATTN_EXT"

    # -- pieces: which cells

    def mask_head(self, heads: Index) -> Index:
        assert self.mask is not None
        return heads % self.mask.t.ne[2]

    def mask_seq(self, seq: int) -> int:
        assert self.mask is not None
        return seq % self.mask.t.ne[3]

    def kv_end(self) -> int:
        """One past the last key that counts."""
        return self.n_kv

    # -- pieces: loads

    def inside(self, cols: Index, d: int) -> Mask:
        """Which columns of a head padded to a power of two are real."""
        return cols < d

    def load_q(self, tile: Tile) -> Floats:
        seq = np.asarray(tile.seq)
        return self.load_rows(self.q, self.start(self.q, tile.tokens, tile.heads, seq), self.d_k)

    def load_rows(self, x: Operand, starts: Index, d: int) -> Floats:
        padded = power_of_two(d)
        return np.where(self.inside(np.arange(padded), d), self.read(x, starts, padded), np.float32(0))

    def load_kv(self, x: Operand, tile: Tile, block: int) -> Floats:
        """A block of k or v with zeros past the last key; kept, as a cache would, for the tiles that read it too."""
        key = (int(x is self.v), tile.seq, tile.kv_head, block)
        if key not in self._blocks:
            cells = np.arange(block * self.block, (block + 1) * self.block)
            starts = self.start(x, cells, np.asarray(tile.kv_head), np.asarray(tile.seq))
            if x is self.k and self.p.k_layout != ROWS:
                rows = self.load_panels(x, tile, cells)
            else:
                rows = self.load_rows(x, starts, x.t.ne[0])
            self._blocks[key] = np.where(self.loaded(x, cells)[:, None], rows, np.float32(0))
        return self._blocks[key]

    def load_panels(self, x: Operand, tile: Tile, cells: Index) -> Floats:
        """Rows of keys in panels, padded as load_rows() does."""
        width = x.t.ne[0]
        rows = np.zeros((len(cells), power_of_two(self.d_k)), np.float32)
        for i in range(self.panels()):
            panel = np.asarray(self.first_panel(tile) + i)
            starts = self.start(x, np.minimum(cells, self.n_kv - 1), panel, np.asarray(tile.seq))
            rows[:, i * width : (i + 1) * width] = self.read(x, starts, width)
        return rows

    def panels(self) -> int:
        """Panels of a head."""
        return self.d_k // self.k.t.ne[0]

    def first_panel(self, tile: Tile) -> int:
        return tile.kv_head * (self.d_k // self.k.t.ne[0])

    def loaded(self, x: Operand, cells: Index) -> Mask:
        """Which cells of the last block are read."""
        return cells < self.n_kv

    def load_bias(self, tile: Tile, block: int) -> Floats:
        """The mask's values, 0 without one; -inf past the last key."""
        cells = np.arange(block * self.block, (block + 1) * self.block)
        bias = np.zeros((len(tile.heads), self.block), np.float32)
        if self.mask is not None:
            starts = self.start(self.mask, tile.tokens, self.mask_head(tile.heads), np.asarray(self.mask_seq(tile.seq)))
            bias = self.read(self.mask, starts + block * self.block * self.mask.t.nb[0], self.block)
        return np.where(cells < self.kv_end(), bias, NEG_INF)

    # -- pieces: a block of the mask is hidden (skipped), full (all zeros: not read again) or partial

    def block_class(self, tile: Tile, bias: Floats) -> str:
        looked_at = self.class_window(tile, bias)
        if self.is_hidden(looked_at):
            return HIDDEN
        return FULL if self.is_full(looked_at) else PARTIAL

    def class_window(self, tile: Tile, bias: Floats) -> Floats:
        return bias[tile.stored]

    def is_hidden(self, looked_at: Floats) -> bool:
        return bool((looked_at == NEG_INF).all())

    def is_full(self, looked_at: Floats) -> bool:
        return not looked_at.any()

    # -- pieces: arithmetic

    def process(self, tile: Tile, k0: int, k1: int) -> Part:
        """Online softmax over the blocks k0..k1."""
        q, slopes = self.load_q(tile), self.slopes(tile.heads)[:, None]
        top = np.full((len(tile.heads), 1), self.first_top())
        total = np.zeros_like(top)
        acc = np.zeros((len(tile.heads), self.fixup_acc.shape[2]), np.float32)
        for block in self.blocks(tile, k0, k1):
            bias = self.load_bias(tile, block)
            kind = self.block_class(tile, bias)
            if kind == HIDDEN:
                continue
            if kind == FULL:
                bias = np.zeros_like(bias)
            seen, self.at = self.seen(bias), (tile, block)
            dot = self.dot(q, self.load_kv(self.k, tile, block)) * self.scales("k_scale", tile.heads)
            score = self.score(dot, bias, slopes)
            score = self.hide(score, seen)
            new_top = np.maximum(top, score.max(axis=1, keepdims=True)).astype(np.float32)
            shift = self.shift(new_top)
            weights, alpha = np.exp2(score - shift).astype(np.float32), self.alpha(top, shift)
            total = total * alpha + weights.sum(axis=1, keepdims=True)
            if self.v is not None:
                used = self.values_used(seen, block)
                acc = self.kept(acc * alpha + self.weigh(weights, self.load_kv(self.v, tile, block), used))
            top = new_top
        return Part(top, total, acc)

    def blocks(self, tile: Tile, k0: int, k1: int) -> Iterable[int]:
        """The blocks that are looked at: all."""
        return range(k0, k1)

    def first_top(self) -> np.float32:
        """The running maximum before the first block."""
        return NEG_INF

    def dot(self, q: Floats, k: Floats) -> Floats:
        return q @ k.T

    def seen(self, bias: Floats) -> Mask:
        return np.asarray(bias != NEG_INF)

    def hide(self, score: Floats, seen: Mask) -> Floats:
        """-inf, whatever the cell held, where the mask hides it."""
        return np.where(seen, score, NEG_INF)

    def score(self, dot: Floats, bias: Floats, slopes: Floats) -> Floats:
        """The logits in base 2: scale, then softcap, then mask."""
        return self.biased(self.scored(self.capped(dot * self.scale())) * LOG2E, bias, slopes)

    def scales(self, name: str, heads: Index) -> Floats:
        """k_scale or v_scale for each row, 1 without: [rows, 1]."""
        x = self.sources.get(name)
        if x is None:
            return np.ones((len(heads), 1), np.float32)
        return self.read(x, np.asarray(x.base) + self.scale_number(x, heads) * x.t.nb[0], 1)

    def scale_number(self, x: Operand, heads: Index) -> Index:
        """Which of its values is a query head's."""
        return heads // (self.n_head // x.t.n_elements)

    def scaled_out(self, tile: Tile, rows: Floats) -> Floats:
        """A tile's rows as they are stored."""
        return rows * self.scales("v_scale", tile.heads) / np.float32(getattr(self.p, "out_scale", 1.0))

    def scored(self, s: Floats) -> Floats:
        """The score function, where there is one, of the block that is worked on."""
        function = score_of(self.p)
        if function is None:
            return s
        tile, block = self.at
        cells = np.arange(block * self.block, (block + 1) * self.block)
        symbols = self.positions(tile, cells) | {"s": s}
        found = value_at(function, {name: torch.as_tensor(x) for name, x in symbols.items()}, torch.float32)
        return found.expand(s.shape).numpy()

    def positions(self, tile: Tile, cells: Index) -> dict[str, Index]:
        """Of each score, its sequence, head, query and key."""
        b, h, i, j = tile.seq, tile.heads[:, None], tile.tokens[:, None], cells[None, :]
        return {"b": np.asarray(b), "h": h, "i": i, "j": j}

    def scale(self) -> np.float32:
        return np.float32(self.p.scale)

    def capped(self, s: Floats) -> Floats:
        cap = np.float32(self.p.softcap)
        return cap * np.tanh(s / cap) if cap else s

    def biased(self, s: Floats, bias: Floats, slopes: Floats) -> Floats:
        return s + slopes * bias * LOG2E

    def slopes(self, heads: Index) -> Floats:
        """ALiBi's slope of each head."""
        if self.p.max_bias == 0:
            return np.ones(len(heads), np.float32)
        n2 = self.slope_heads()
        low, high = 2.0 ** (-self.p.max_bias / n2), 2.0 ** (-self.p.max_bias / 2 / n2)
        slopes = np.where(heads < n2, low ** (heads + 1), high ** (2 * (heads - n2) + 1))
        return np.asarray(slopes, np.float32)

    def slope_heads(self) -> int:
        """How many heads the first series of slopes serves."""
        return 1 << (self.n_head.bit_length() - 1)

    def shift(self, top: Floats) -> Floats:
        """What is subtracted from logits: the maximum, 0 for a row that has seen nothing."""
        return np.where(top == NEG_INF, np.float32(0), top)

    def alpha(self, old_top: Floats, shift: Floats) -> Floats:
        """rescale() of what a row has when its maximum grows."""
        return self.rescale(old_top, shift)

    def rescale(self, old_top: Floats, shift: Floats) -> Floats:
        """The factor on sums that were taken relative to `old_top`."""
        return np.exp2(old_top - shift).astype(np.float32)

    def values_used(self, seen: Mask, block: int) -> Mask:
        """Which cells of v a row takes: those of the keys that it sees."""
        return seen

    def weigh(self, weights: Floats, v: Floats, seen: Mask) -> Floats:
        """weights @ v, where a weight of 0 on a hidden cell meets NaN without harm."""
        bad = ~np.isfinite(v)
        if not bad.any():
            return weights @ v
        out = weights @ np.where(bad, np.float32(0), v)
        return np.where(seen.astype(np.float32) @ bad.astype(np.float32) > 0, np.float32(np.nan), out)

    def kept(self, acc: Floats) -> Floats:
        """The accumulator as it is kept between blocks: float32."""
        return acc

    # -- pieces: parts, and the end of a tile

    def merge(self, a: Part, b: Part) -> Part:
        top = np.maximum(a.top, b.top)
        left, right = self.rescale(a.top, self.shift(top)), self.rescale(b.top, self.shift(top))
        return Part(top, a.total * left + b.total * right, a.acc * left + b.acc * right)

    def with_sink(self, tile: Tile, part: Part) -> Part:
        if self.sinks is None:
            return part
        sink = self.sink_logits(tile.heads)[:, None]
        top = np.maximum(part.top, sink).astype(np.float32)
        alpha = self.rescale(part.top, self.shift(top))
        return Part(top, part.total * alpha + np.exp2(sink - self.shift(top)), part.acc * alpha)

    def sink_logits(self, heads: Index) -> Floats:
        assert self.sinks is not None
        starts = np.asarray(self.sinks.base) + heads * self.sinks.t.nb[0]
        return self.read(self.sinks, starts, 1)[:, 0] * LOG2E

    def divided(self, part: Part) -> Floats:
        return np.where(part.total == 0, np.float32(0), part.acc / part.total)

    def store(self, tile: Tile, part: Part) -> None:
        rows = self.written(tile)
        if self.v is None:
            lse = self.lse(part)[rows]
            at = self.start(self.out, tile.tokens, np.asarray(tile.seq), np.asarray(0))
            self.write(self.out, (at + tile.heads * self.out.t.nb[0])[rows], lse)
            return
        stored = self.scaled_out(tile, self.divided(part))
        self.write(self.out, self.out_start(tile)[rows], stored[rows, : self.out_width()])

    def lse(self, part: Part) -> Floats:
        return (part.top + np.log2(part.total)) * np.float32(math.log(2))

    def written(self, tile: Tile) -> Mask:
        return tile.stored

    def out_start(self, tile: Tile) -> Index:
        return self.start(self.out, tile.heads, tile.tokens, np.asarray(tile.seq))

    def out_width(self) -> int:
        return self.d_v
