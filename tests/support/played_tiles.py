"""AMX's tiles played in memory, for machines without: what else a kernel does runs as it is."""

from __future__ import annotations

from graphrt.backends.cpu.fast.amx import TILE, Tiles
from graphrt.backends.cpu.fast.ir import F32, I8, I32, Fn, Val


class PlayedTiles(Tiles):
    """Eight registers on the stack, which hold NaN until they are loaded. Numbers too small to be normal count as 0, as
    the processor has it."""

    name = "played"

    def begin(self, f: Fn) -> None:
        self.registers = f.buffer(I8, 8 * TILE)
        self._poison(f)

    def _poison(self, f: Fn) -> None:
        with f.range(0, 8 * TILE, 64) as at:
            f.store(self.registers + at, f.zeros(I32) - 1)

    def _copy(self, f: Fn, target: Val, source: Val) -> None:
        with f.range(0, TILE, 64) as at:
            f.store(target + at, f.load(source + at, I32, 16))

    def load(self, f: Fn, tile: int, at: Val) -> None:
        self._copy(f, self.registers + tile * TILE, at)

    def store(self, f: Fn, tile: int, at: Val) -> None:
        self._copy(f, at, self.registers + tile * TILE)

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
