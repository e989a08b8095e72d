"""AMX's tiles played in memory, for machines without: what else a kernel does runs as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphrt.backends.cpu.fast.amx import SIDE, TILE, Tiles
from graphrt.backends.cpu.fast.ir import F32, I8, I32, Fn, Val


class PlayedTiles(Tiles):
    """Eight registers on the stack, which hold NaN until they are loaded. Numbers too small to be normal count as 0, as
    the processor has it."""

    name = "played"

    def begin(self, f: Fn, shapes: Sequence[tuple[int, int]] = ((SIDE, 64),) * 8) -> None:
        self.registers, self.shapes = f.buffer(I8, 8 * TILE), shapes
        self._poison(f)

    def _poison(self, f: Fn) -> None:
        with f.range(0, 8 * TILE, 64) as at:
            f.store(self.registers + at, f.zeros(I32) - 1)

    def _rows(self, f: Fn, tile: int, at: Val, stride: int) -> Iterator[tuple[Val, Val, int]]:
        """Of each of its rows where it is in the register, where in memory, and its words."""
        rows, width = self.shapes[tile]
        for row in range(rows):
            yield self.registers + (tile * TILE + row * 64), at + row * stride, width // 4

    def load(self, f: Fn, tile: int, at: Val, stride: int = 64) -> None:
        self.zero(f, tile)
        for register, memory, words in self._rows(f, tile, at, stride):
            f.store(register, f.load(memory, I32, words))

    def store(self, f: Fn, tile: int, at: Val, stride: int = 64) -> None:
        for register, memory, words in self._rows(f, tile, at, stride):
            f.store(memory, f.load(register, I32, words))

    def zero(self, f: Fn, tile: int) -> None:
        with f.range(0, TILE, 64) as at:
            f.store(self.registers + tile * TILE + at, f.zeros(I32))

    def add_bytes(self, f: Fn, total: int, a: int, b: int) -> None:
        with f.range(0, self.shapes[a][0] * 64, 64) as row:
            sums = f.var(f.load(self.registers + total * TILE + row, I32, 16))
            with f.range(0, self.shapes[a][1] // 4) as k:
                left = f.splat(f.load(self.registers + a * TILE + row + k * 4, I32))
                right = f.load(self.registers + b * TILE + k * 64, I32, 16)
                for up in (24, 16, 8, 0):
                    x, y = ((v << up).shift_sign(24) for v in (left, right))
                    sums.v = sums.v + x * y
            f.store(self.registers + total * TILE + row, sums.v)

    def add(self, f: Fn, total: int, a: int, b: int) -> None:
        with f.range(0, TILE, 64) as row:
            sums = f.var(f.load(self.registers + total * TILE + row, F32, 16))
            with f.range(0, 16) as k:
                left = f.splat(f.load(self.registers + a * TILE + row + k * 4, I32))
                right = f.load(self.registers + b * TILE + k * 64, I32, 16)
                for pair in ((left << 16, right << 16), (left & 0xFFFF0000, right & 0xFFFF0000)):
                    x, y = (_normal(f, v.as_bits(F32)) for v in pair)
                    sums.v = f.fma(x, y, sums.v)
            f.store(self.registers + total * TILE + row, sums.v)

    def end(self, f: Fn) -> None:
        self._poison(f)


def _normal(f: Fn, v: Val) -> Val:
    return f.select(f.abs(v) < 2.0**-126, 0.0, v)
