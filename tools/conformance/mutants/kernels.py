"""MUL_MAT, ROPE, RMS_NORM, SET_ROWS and SOFT_MAX the way GPU kernels compute them, in pieces that mutants replace."""

from __future__ import annotations

import math

import gguf
import numpy as np
import numpy.typing as npt

from graphrt.dtypes import DType
from graphrt.ops.rope import yarn_ramp
from graphrt.tensor import Tensor
from graphrt.tools.conformance.mutants.memory import Floats, Index, Kernel, Operand, last_dims

BLOCK_K = 128
BLOCK = 256


class BlockSums(Kernel):
    """What MUL_MAT and MUL_MAT_ID share: blocks of K, decoded as they come, summed in float32."""

    def sums(self, a: Operand, starts_a: Index, b: Operand, starts_b: Index) -> Floats:
        """Rows of b times rows of a, given where they start: f32 [rows of b, rows of a]."""
        width = max(BLOCK_K, a.t.dtype.block_size)
        acc = np.zeros((len(starts_b), len(starts_a)), np.float32)
        for k in range(0, self.k_end(a.t.ne[0], width), width):
            count = min(width, a.t.ne[0] - k)
            weights = self.read(a, starts_a + a.t.nb[0] * (k // a.t.dtype.block_size), count)
            acc = self.kept(acc + self.read(b, starts_b + k * b.t.nb[0], count) @ weights.T)
        return acc

    def rows(self, m: int) -> Index:
        """The rows of `a` that are computed."""
        return np.arange(m)

    def k_end(self, k: int, width: int) -> int:
        return k

    def kept(self, acc: Floats) -> Floats:
        """The accumulator as it is kept between blocks: float32."""
        return acc


class MulMat(BlockSums):
    """A matrix of `b` after the other."""

    op = "MUL_MAT"

    def run(self) -> None:
        a, b = self.sources["weights"], self.sources["x"]
        for i3 in range(b.t.ne[3]):
            for i2 in range(b.t.ne[2]):
                j3, j2 = self.batch(i3, b.t.ne[3], a.t.ne[3]), self.batch(i2, b.t.ne[2], a.t.ne[2])
                self.matrix(a, b, (j2, j3), (i2, i3))

    def matrix(self, a: Operand, b: Operand, at_a: tuple[int, int], at_b: tuple[int, int]) -> None:
        m, n = self.rows(a.t.ne[1]), np.arange(b.t.ne[1])
        starts_a = self.start(a, m, np.asarray(at_a[0]), np.asarray(at_a[1]))
        starts_b = self.start(b, n, np.asarray(at_b[0]), np.asarray(at_b[1]))
        starts = self.start(self.out, n, np.asarray(at_b[0]), np.asarray(at_b[1]))
        self.write(self.out, starts, self.sums(a, starts_a, b, starts_b))

    def batch(self, i: int, n_b: int, n_a: int) -> int:
        """The matrix of `a` that serves matrix `i` of `b`: consecutive ones share."""
        return i // (n_b // n_a)


class Rope(Kernel):
    """Angles in float64, the rotation in float32."""

    op = "ROPE"

    def run(self) -> None:
        a, positions, n_dims = self.sources["a"], self.sources["positions"], self.p.n_dims
        i3, i2, i1 = last_dims(a)
        values = self.read(a, self.start(a, i1, i2, i3), a.t.ne[0])
        token = self.position(self.read_ints(positions, positions.base + np.arange(a.t.ne[2]) * positions.t.nb[0]))
        angle = self.angle(token, self.frequencies())
        magnitude = self.magnitude()
        cos, sin = ((f(angle) * magnitude).astype(np.float32)[None, :, None, :] for f in (np.cos, np.sin))
        first, second = self.pairs()
        x, y = values[..., first], values[..., second]
        out = self.passed(values)
        out[..., first], out[..., second] = self.turn(x, y, cos, sin)
        out[..., n_dims:] = self.tail(values, cos, sin)[..., n_dims:]
        self.write(self.out, self.start(self.out, i1, i2, i3), out)

    def position(self, token: Index) -> Index:
        return token

    def angle(self, token: Index, theta: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[tokens, pairs]."""
        return token[:, None] * theta

    def frequencies(self) -> npt.NDArray[np.float64]:
        """The angle of each pair at position 1."""
        p, i = self.p, np.arange(self.p.n_dims // 2)
        theta = p.freq_base ** self.exponent(i) / self.factors(len(i))
        if p.ext_factor == 0:
            return np.asarray(theta * p.freq_scale)
        ramp = self.ramp()
        return np.asarray(theta * (p.freq_scale * (1 - ramp) + ramp))

    def exponent(self, pair: Index) -> npt.NDArray[np.float64]:
        return np.asarray(-2.0 * pair / self.p.n_dims)

    def factors(self, n: int) -> npt.NDArray[np.float64]:
        x = self.sources.get("factors")
        return np.ones(n) if x is None else self.read(x, np.asarray(x.base), n).astype(np.float64)

    def ramp(self) -> npt.NDArray[np.float64]:
        """How far each pair keeps its own frequency."""
        return np.array(yarn_ramp(self.p))

    def magnitude(self) -> float:
        p = self.p
        return float(p.attn_factor) * (1.0 if p.ext_factor == 0 else 1.0 + 0.1 * math.log(1.0 / p.freq_scale))

    def pairs(self) -> tuple[slice, slice]:
        """Where the first and the second of each pair stand."""
        n = self.p.n_dims
        return (slice(0, n, 2), slice(1, n, 2)) if self.p.mode == "normal" else (slice(0, n // 2), slice(n // 2, n))

    def passed(self, values: Floats) -> Floats:
        return values.copy()

    def turn(self, x: Floats, y: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
        return x * cos - y * sin, x * sin + y * cos

    def tail(self, values: Floats, cos: Floats, sin: Floats) -> Floats:
        """The dimensions past n_dims pass through."""
        return values


class RmsNorm(Kernel):
    """Sums over blocks of columns, then one pass that scales."""

    op = "RMS_NORM"

    def run(self) -> None:
        a = self.sources["a"]
        i3, i2, i1 = last_dims(a)
        values = self.read(a, self.start(a, i1, i2, i3), a.t.ne[0])
        energy = np.zeros((*values.shape[:-1], 1), np.float32)
        for start in self.blocks(a.t.ne[0]):
            block = values[..., start : start + BLOCK]
            energy = energy + self.energy(block).sum(axis=-1, keepdims=True)
        self.write(self.out, self.start(self.out, i1, i2, i3), values * self.factor(energy, a.t.ne[0]))

    def blocks(self, n: int) -> range:
        return range(0, n, BLOCK)

    def energy(self, x: Floats) -> Floats:
        return x * x

    def factor(self, energy: Floats, n: int) -> Floats:
        return np.asarray(1 / np.sqrt(energy / np.float32(n) + np.float32(self.p.eps)))


class SetRows(Kernel):
    """Each row encoded and copied to where its index says."""

    op = "SET_ROWS"

    def run(self) -> None:
        rows, ids = self.sources["rows"], self.sources["ids"]
        i3, i2, i1 = last_dims(rows)
        at = np.broadcast_to(self.id_address(ids, i1, i2, i3), np.broadcast_shapes(i1.shape, i2.shape, i3.shape))
        target = self.index(self.read_ints(ids, at))
        values = self.read(rows, self.start(rows, i1, i2, i3), rows.t.ne[0])
        stored = self.encode(values, self.out.t.dtype)[..., : self.row_bytes()]
        starts = self.start(self.out, target, i2, i3)
        inside = (starts >= 0) & (starts + stored.shape[-1] <= self.out.memory.size) & self.done(i1)
        self.out.memory[starts[inside][:, None] + np.arange(stored.shape[-1])] = stored[inside]

    def id_address(self, ids: Operand, i1: Index, i2: Index, i3: Index) -> Index:
        nb, ne = ids.t.nb, ids.t.ne
        return np.asarray(ids.base + i1 * nb[0] + self.id_batch(i2, ne[1]) * nb[1] + self.id_batch(i3, ne[2]) * nb[2])

    def id_batch(self, i: Index, n: int) -> Index:
        """Which of the index's `n` batches serves batch `i` of the rows."""
        return i % n

    def index(self, ids: Index) -> Index:
        return ids

    def done(self, i1: Index) -> npt.NDArray[np.bool_]:
        """Which rows are copied: all."""
        return i1 >= 0

    def row_bytes(self) -> int:
        return self.out.t.dtype.row_size(self.out.t.ne[0])

    def encode(self, values: Floats, dt: DType) -> npt.NDArray[np.uint8]:
        if dt.name in ("f32", "f16"):
            kind = np.dtype(np.float32 if dt.name == "f32" else np.float16)
            return np.ascontiguousarray(values.astype(kind)).view(np.uint8)
        raw: npt.NDArray[np.uint8] = gguf.quants.quantize(values, gguf.GGMLQuantizationType(dt.id))
        return np.ascontiguousarray(raw).view(np.uint8)


class SoftMax(Kernel):
    """Blocks of columns: a pass for the maximum and the sum, and one that divides."""

    op = "SOFT_MAX"

    def run(self) -> None:
        a, mask, sinks = self.sources["a"], self.sources.get("mask"), self.sources.get("sinks")
        i3, i2, i1 = last_dims(a)
        s = self.read(a, self.start(a, i1, i2, i3), a.t.ne[0]) * self.scale()
        heads = np.arange(a.t.ne[2])
        with np.errstate(all="ignore"):
            if mask is not None:
                starts = self.start(mask, i1, self.mask_head(i2, mask.t), i3 % mask.t.ne[3])
                s = s + self.slopes(heads, a.t.ne[2])[None, :, None, None] * self.read(mask, starts, a.t.ne[0])
            top = self.top(s)
            sink = None
            if sinks is not None:
                starts = sinks.base + heads * sinks.t.nb[0]
                sink = self.sink(self.read(sinks, starts, 1).reshape(1, -1, 1, 1))
                top = np.maximum(top, sink)
            shift = np.where(np.isneginf(top), self.empty_top(), top)
            weights = np.exp(s - shift)
            total = self.summed(weights).sum(axis=-1, keepdims=True)
            total = total if sink is None else total + np.exp(sink - shift)
            out = np.where(total == 0, self.empty(a.t.ne[0]), weights / total)
        self.write(self.out, self.start(self.out, i1, i2, i3), out)

    def scale(self) -> np.float32:
        return np.float32(self.p.scale)

    def mask_head(self, head: Index, mask: Tensor) -> Index:
        return head % mask.ne[2]

    def slopes(self, heads: Index, n_head: int) -> Floats:
        if self.p.max_bias == 0:
            return np.ones(len(heads), np.float32)
        n2 = 1 << (n_head.bit_length() - 1)
        low, high = 2.0 ** (-self.p.max_bias / n2), 2.0 ** (-self.p.max_bias / 2 / n2)
        slopes = np.where(heads < n2, low ** (heads + 1), high ** (2 * (heads - n2) + 1))
        return np.asarray(slopes, np.float32)

    def top(self, s: Floats) -> Floats:
        return np.asarray(s.max(axis=-1, keepdims=True))

    def sink(self, sink: Floats) -> Floats:
        return sink

    def summed(self, weights: Floats) -> Floats:
        return weights

    def empty_top(self) -> np.float32:
        return np.float32(0)

    def empty(self, n: int) -> np.float32:
        """What a row that has seen nothing holds."""
        return np.float32(0)
