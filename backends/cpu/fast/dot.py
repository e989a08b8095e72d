"""Sums of products of bytes: the one place where instruction sets differ.

A dot takes the codes of weights, a vector of n bytes, and as many activations, and gives n / 4 sums of i32: each lane
that of four neighbours' products. Activations have 16 bits, or 8 where one part is asked for, and lie in the form that
the instruction wants:

- bytes: of x = 256 * high + low, both signed, the high ones of a unit before the low ones, for vpdpbusd and sdot;
- words: 16-bit numbers, of each chunk those of even bytes before those of odd ones, for vpmaddwd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphrt.backends.cpu.fast.ir import I8, I16, I32, Fn, Host, Val


@dataclass(frozen=True, eq=False)
class Dot(ABC):
    """One instruction set's way. bias: what is added to signed codes, for instructions that want unsigned ones;
    columns: vectors that `prepared` makes."""

    name: str
    bias: int
    columns: ClassVar[int] = 1

    @abstractmethod
    def parts(self, bits: int) -> int:
        """Bytes that an activation takes when it is to have 8 or 16 bits."""

    def of_panels(self, bits: int) -> Dot:
        """What multiplies 16 rows at once."""
        return self

    @abstractmethod
    def chunks(self, f: Fn, ws: Sequence[Val], x: Val, ats: Sequence[int], unit: int, bits: int) -> Val:
        """The sums of some chunks, lane by lane together. ws: their codes; x: where their unit of `unit` activations
        begins; ats: each one's first byte."""

    @abstractmethod
    def start(self, f: Fn, bits: int, first: Val | None = None) -> list[Val]:
        """Sums of nothing but `first`, for 16 rows at once."""

    @abstractmethod
    def prepared(self, f: Fn, w: Val) -> list[Val]:
        """Four codes of each of 16 rows, i32 lanes, as panels keep them."""

    @abstractmethod
    def place(self, at: int, lane: int) -> int:
        """Bytes from a unit's first activation to that of lane `lane` of the chunk at `at`."""

    @abstractmethod
    def add(self, f: Fn, totals: list[Val], w: list[Val], x: Val, lanes: int, unit: int) -> list[Val]:
        """Adds the products of w, what `prepared` made as i32 lanes, with the four activations whose first is at x, in
        chunks of `lanes` bytes."""

    @abstractmethod
    def end(self, totals: list[Val]) -> Val:
        """The sums, i32 lanes."""

    @abstractmethod
    def store(self, f: Fn, x: Val, chunk: Val, at: int, unit: int, bits: int) -> None:
        """Writes a chunk of activations, i16 lanes, that begins at byte `at` of its unit of `unit` activations."""


@dataclass(frozen=True, eq=False)
class ByteDot(Dot):
    """By an instruction for bytes. symbols: LLVM's names of it by bytes; words: its operands are vectors of i32.

    panels: what 16 rows are multiplied by where activations have 16 bits: an instruction for pairs of words has as many
    products as two for bytes, but gives one sum, and takes signed codes.
    """

    symbols: dict[int, str]
    words: bool
    panels: WordDot | None = None

    def parts(self, bits: int) -> int:
        return bits // 8

    def of_panels(self, bits: int) -> Dot:
        return self.panels if self.panels is not None and bits == 16 else self

    def chunks(self, f: Fn, ws: Sequence[Val], x: Val, ats: Sequence[int], unit: int, bits: int) -> Val:
        # a sum for each part, so that neither waits for the other
        totals = [f.zeros(I32, ws[0].lanes // 4) for _ in range(bits // 8)]
        for w, at in zip(ws, ats, strict=True):
            for part, total in enumerate(totals):
                totals[part] = self._dot(f, total, w, f.load(x + self.place(at, 0) + part * unit, I8, w.lanes))
        return self.end(totals)

    def _dot(self, f: Fn, total: Val, w: Val, x: Val) -> Val:
        def part(at: int, n: int) -> Val:
            acc, pair = total.part(at // 4, n // 4), [v.part(at, n) for v in (w, x)]
            if self.words:
                pair = [v.bits(I32, n // 4) for v in pair]
            return f.intrinsic(self.symbols[n], acc.t, acc, *pair)

        return f.by_parts(self.symbols, w.lanes, part)

    def start(self, f: Fn, bits: int, first: Val | None = None) -> list[Val]:
        nothing = f.zeros(I32)
        return [nothing] * (bits // 8 - 1) + [nothing if first is None else first]

    def prepared(self, f: Fn, w: Val) -> list[Val]:
        return [w]

    def place(self, at: int, lane: int) -> int:
        return at + lane

    def add(self, f: Fn, totals: list[Val], w: list[Val], x: Val, lanes: int, unit: int) -> list[Val]:
        out = []
        for part, total in enumerate(totals):
            four = f.splat(f.load(x + part * unit, I32), total.lanes)
            n = 4 * total.lanes
            out.append(self._dot(f, total, w[0].bits(I8, n), four.bits(I8, n)))
        return out

    def end(self, totals: list[Val]) -> Val:
        return totals[0] if len(totals) == 1 else (totals[0] << 8) + totals[1]

    def store(self, f: Fn, x: Val, chunk: Val, at: int, unit: int, bits: int) -> None:
        if bits == 8:
            f.store(x + at, chunk.trunc(I8))
            return
        f.store(x + at, ((chunk + 128) >> 8).trunc(I8))
        f.store(x + unit + at, chunk.trunc(I8))  # less 256 where its highest bit is set: the part above has it


@dataclass(frozen=True, eq=False)
class WordDot(Dot):
    """By an instruction for pairs of 16-bit numbers. symbols: its names by bytes; none: by LLVM's plain arithmetic.
    adds: it adds to a sum."""

    symbols: dict[int, str]
    adds: bool = False
    columns: ClassVar[int] = 2

    def parts(self, bits: int) -> int:
        return 2

    def chunks(self, f: Fn, ws: Sequence[Val], x: Val, ats: Sequence[int], unit: int, bits: int) -> Val:
        total, n = None, ws[0].lanes // 2
        for w, at in zip(ws, ats, strict=True):
            pairs = w.bits(I16, n)
            even, odd = (pairs << 8).shift_sign(8), pairs.shift_sign(8)
            x_even, x_odd = (f.load(x + self.place(at, 0) + 2 * n * i, I16, n) for i in range(2))
            before = total if total is not None else f.zeros(I32, n // 2)
            total = self._dot(f, self._dot(f, before, even, x_even), odd, x_odd)
        assert total is not None
        return total

    def _dot(self, f: Fn, total: Val, w: Val, x: Val) -> Val:
        if not self.symbols:
            a, b = w.bits(I32, w.lanes // 2), x.bits(I32, w.lanes // 2)
            return total + ((a << 16).shift_sign(16) * (b << 16).shift_sign(16) + a.shift_sign(16) * b.shift_sign(16))

        def part(at: int, n: int) -> Val:
            before, a, b = total.part(at // 4, n // 4), w.part(at // 2, n // 2), x.part(at // 2, n // 2)
            if self.adds:
                return f.intrinsic(self.symbols[n], before.t, before, a.bits(I32, n // 4), b.bits(I32, n // 4))
            return before + f.intrinsic(self.symbols[n], before.t, a, b)

        return f.by_parts(self.symbols, 2 * w.lanes, part)

    def start(self, f: Fn, bits: int, first: Val | None = None) -> list[Val]:
        return [f.zeros(I32) if first is None else first]

    def prepared(self, f: Fn, w: Val) -> list[Val]:
        pairs = w.bits(I16, 2 * w.lanes)
        return [(pairs << 8).shift_sign(8), pairs.shift_sign(8)]

    def place(self, at: int, lane: int) -> int:
        return 2 * at + lane

    def add(self, f: Fn, totals: list[Val], w: list[Val], x: Val, lanes: int, unit: int) -> list[Val]:
        (total,) = totals
        for odd in range(2):
            pair = f.splat(f.load(x + odd * lanes, I32), total.lanes)
            n = 2 * total.lanes
            total = self._dot(f, total, w[odd].bits(I16, n), pair.bits(I16, n))
        return [total]

    def end(self, totals: list[Val]) -> Val:
        return totals[0]

    def store(self, f: Fn, x: Val, chunk: Val, at: int, unit: int, bits: int) -> None:
        for odd in range(2):
            f.store(x + 2 * at + odd * chunk.lanes, chunk.shuffle(range(odd, chunk.lanes, 2)))


_VPDPBUSD = {n: f"llvm.x86.avx512.vpdpbusd.{8 * n}" for n in (16, 32, 64)}
_VPDPWSSD = {n: f"llvm.x86.avx512.vpdpwssd.{8 * n}" for n in (16, 32, 64)}
_VPMADDWD = {16: "llvm.x86.sse2.pmadd.wd", 32: "llvm.x86.avx2.pmadd.wd", 64: "llvm.x86.avx512.pmaddw.d.512"}


def _up_to(symbols: dict[int, str], n: int) -> dict[int, str]:
    return {width: symbol for width, symbol in symbols.items() if width <= n}


VNNI512 = ByteDot("vnni512", 128, _VPDPBUSD, True, WordDot("words512", 0, _VPDPWSSD, True))
VNNI256 = ByteDot("vnni256", 128, _up_to(_VPDPBUSD, 32), True, WordDot("words256", 0, _up_to(_VPDPWSSD, 32), True))
MADD512 = WordDot("madd512", 0, _VPMADDWD)
MADD256 = WordDot("madd256", 0, _up_to(_VPMADDWD, 32))
SDOT = ByteDot("sdot", 0, {16: "llvm.aarch64.neon.sdot.v4i32.v16i8"}, False)
PORTABLE = WordDot("portable", 0, {})

#: The fastest first: what a machine must have for each.
CHOICES: tuple[tuple[Dot, Callable[[Host], bool]], ...] = (
    (VNNI512, lambda host: host.has("avx512vnni", "avx512vl", "avx512bw")),
    (VNNI256, lambda host: host.has("avxvnni", "avx2")),
    (MADD512, lambda host: host.has("avx512bw", "avx512vl")),
    (MADD256, lambda host: host.has("avx2")),
    (SDOT, lambda host: host.is_arm and host.has("dotprod")),
    (PORTABLE, lambda host: True),
)


def best_dot(host: Host) -> Dot:
    """The fastest that the machine has."""
    return next(dot for dot, has in CHOICES if has(host))
