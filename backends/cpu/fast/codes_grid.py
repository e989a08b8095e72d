"""Types whose codes are points of a grid: 8 or 4 values by the number of a point, and a sign for each value.

The grids are those of the package gguf.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import gguf

from graphrt.backends.cpu.fast.code_type import Codes, half, numbered
from graphrt.backends.cpu.fast.ir import F32, I1, I8, I16, I32, I64, Fn, Val


@functools.cache
def _points(name: str) -> tuple[int, ...]:
    """A grid's points as words, the first value lowest."""
    grid = gguf.quants.__dict__[name]
    grid.init_grid()
    rows = grid.grid.astype("int64")[0, 0]
    return tuple(sum(int(v) << 8 * i for i, v in enumerate(row)) for row in rows)


def _chunks(f: Fn, name: str, numbers: Sequence[Val], signs: Val) -> list[Val]:
    """64 values at a time. numbers: of points, i64; signs: the bits of all values, i64 lanes."""
    table, word = f.table(name, _points(name), I64 if len(numbers) == 32 else I32), 256 // len(numbers)
    found = [f.load(table + n * word, I64 if word == 8 else I32) for n in numbers]
    per_chunk = 64 // word
    chunks = []
    for i in range(4):
        codes = f.join(found[i * per_chunk : (i + 1) * per_chunk]).bits(I8, 64)
        chunks.append(f.select(signs[i].bits(I1, 64), 0 - codes, codes))
    return chunks


def _seven(f: Fn, words: Val) -> Val:
    """Words with four times 7 signs -> 8 signs in each byte: their number is even."""
    masks = (0x7F, 0x7F00, 0x7F0000, 0x7F000000)
    spread = words & masks[0]
    for i, mask in enumerate(masks[1:], 1):
        spread = spread | ((words << i) & mask)
    return _even(f, spread.bits(I8, 4 * words.lanes))


def _even(f: Fn, seven: Val) -> Val:
    """Seven bits in bytes -> eight, of which an even number is set; as i64 lanes."""
    return (seven | (f.call("llvm.ctpop", seven) << 7)).bits(I64, seven.lanes // 8)


def _bytes(f: Fn, p: Val, n: int) -> list[Val]:
    return [f.load(p + i, I8).zext(I64) for i in range(n)]


def _nibble_scales(f: Fn, p: Val, n: int) -> Val:
    """2n numbers from n bytes, the low halves first."""
    z = f.load(p, I8, n)
    both = (z & 15).shuffle([i // 2 + n * (i % 2) for i in range(2 * n)], z >> 4)
    return both.zext(I32).to(F32)


def iq2_xxs(f: Fn, p: Val, count: int) -> Codes:
    words = f.load(p + 2, I32, 16).shuffle(range(1, 16, 2))
    numbers = [n for i in range(8) for n in _bytes(f, p + 2 + 8 * i, 4)]
    scales = ((words >> 28).to(F32) + 0.5) * (half(f, p, 8) * 0.25)
    return Codes(_chunks(f, "IQ2_XXS", numbers, _seven(f, words)), scales)


def iq2_xs(f: Fn, p: Val, count: int) -> Codes:
    numbers = [(f.load(p + 2 + 2 * i, I16) & 511).zext(I64) for i in range(32)]
    signs = _even(f, (f.load(p + 2, I16, 32) >> 9).trunc(I8))
    scales = (_nibble_scales(f, p + 66, 8) + 0.5) * (half(f, p, 16) * 0.25)
    return Codes(_chunks(f, "IQ2_XS", numbers, signs), scales)


def iq2_s(f: Fn, p: Val, count: int) -> Codes:
    high = f.load(p + 66, I8, 8).shuffle([i // 4 for i in range(32)]).zext(I16)
    two = (high << f.vconst([8, 6, 4, 2] * 8, I16)) & 0x300
    numbers = two | f.load(p + 2, I8, 32).zext(I16)
    scales = (_nibble_scales(f, p + 74, 8) + 0.5) * (half(f, p, 16) * 0.25)
    return Codes(_chunks(f, "IQ2_S", _lanes(f, numbers), f.load(p + 34, I64, 4)), scales)


def _lanes(f: Fn, numbers: Val) -> list[Val]:
    """16-bit lanes as numbers, four out of each word: through memory they would wait for a store."""
    words = numbers.bits(I64, numbers.lanes // 4)
    return [(words[i] >> 16 * k) & 0xFFFF for i in range(words.lanes) for k in range(4)]


def iq3_xxs(f: Fn, p: Val, count: int) -> Codes:
    words = f.load(p + 66, I32, 8)
    scales = ((words >> 28).to(F32) + 0.5) * (half(f, p, 8) * 0.5)
    return Codes(_chunks(f, "IQ3_XXS", _bytes(f, p + 2, 64), _seven(f, words)), scales)


def iq3_s(f: Fn, p: Val, count: int) -> Codes:
    bits = f.load(p + 66, I64).bits(I1, 64)
    ninth = f.select(bits, f.zeros(I16, 64) + 256, f.zeros(I16, 64))
    numbers = ninth | f.load(p + 2, I8, 64).zext(I16)
    chunks = _chunks(f, "IQ3_S", _lanes(f, numbers), f.load(p + 74, I64, 4))
    return numbered(chunks, _nibble_scales(f, p + 106, 4) * 2.0 + 1.0, half(f, p, 16))
