"""Types whose codes are points of a grid: 8 or 4 values by the number of a point.

iq2 and iq3 have a sign for each value; of iq1 an eighth is added to, or taken from, the values of one point or four.
The grids are those of the package gguf.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import gguf

from graphrt.backends.cpu.fast.code_type import Codes, half, k_eights, k_pairs, numbered
from graphrt.backends.cpu.fast.ir import F16, F32, I1, I8, I16, I32, I64, Fn, Val


@functools.cache
def _points(name: str) -> tuple[int, ...]:
    """A grid's points as words, the first value lowest."""
    grid = gguf.quants.__dict__[name]
    grid.init_grid()
    rows = grid.grid.astype("int64")[0, 0]
    return tuple(sum(int(v) << 8 * i for i, v in enumerate(row)) for row in rows)


def _eights(sub: int) -> list[int]:
    """The groups of 8 values in the order of codes, `k_eights` or `k_pairs` with `sub` values to a scale."""
    return [i // 8 for chunk in (k_eights if sub == 32 else k_pairs)(1) for i in chunk[::8]]


def _chunks(f: Fn, name: str, numbers: Sequence[Val], signs: Val) -> list[Val]:
    """In the order of codes. numbers: of points, i64; signs: bits, 64 in each of four i64 lanes."""
    a_point, t = (8, I64) if len(numbers) == 32 else (4, I32)
    table, a_chunk = f.table(name, _points(name), t), 64 // a_point
    found = [f.load(table + n * a_point, t) for n in numbers]
    chunks = []
    for i in range(4):
        codes = f.join(found[i * a_chunk : (i + 1) * a_chunk]).bits(I8, 64)
        chunks.append(f.select(signs[i].bits(I1, 64), 0 - codes, codes))
    return chunks


def _in_order(signs: Val, sub: int) -> Val:
    """32 bytes of signs in the order of codes, as four words."""
    return signs.shuffle(_eights(sub)).bits(I64, 4)


def _seven(f: Fn, words: Val) -> Val:
    """Words with four times 7 signs -> 8 signs in each byte: their number is even."""
    masks = (0x7F, 0x7F00, 0x7F0000, 0x7F000000)
    spread = words & masks[0]
    for i, mask in enumerate(masks[1:], 1):
        spread = spread | ((words << i) & mask)
    return _even(f, spread.bits(I8, 4 * words.lanes))


def _even(f: Fn, seven: Val) -> Val:
    """Seven bits in bytes -> eight, of which an even number is set."""
    return seven | (f.call("llvm.ctpop", seven) << 7)


def _bytes(f: Fn, p: Val, places: Sequence[int]) -> list[Val]:
    return [f.load(p + i, I8).zext(I64) for i in places]


def _nibble_scales(f: Fn, p: Val, n: int) -> Val:
    """2n numbers from n bytes, the low halves first."""
    z = f.load(p, I8, n)
    both = (z & 15).shuffle([i // 2 + n * (i % 2) for i in range(2 * n)], z >> 4)
    return both.zext(I32).to(F32)


def iq2_xxs(f: Fn, p: Val, count: int) -> Codes:
    words = f.load(p + 2, I32, 16).shuffle(range(1, 16, 2))
    numbers = _bytes(f, p + 2, [8 * (i // 4) + i % 4 for i in _eights(32)])
    scales = ((words >> 28).to(F32) + 0.5) * (half(f, p, 8) * 0.25)
    return Codes(_chunks(f, "IQ2_XXS", numbers, _in_order(_seven(f, words), 32)), scales)


def iq2_xs(f: Fn, p: Val, count: int) -> Codes:
    numbers = [(f.load(p + 2 + 2 * i, I16) & 511).zext(I64) for i in _eights(16)]
    signs = _even(f, (f.load(p + 2, I16, 32) >> 9).trunc(I8))
    scales = (_nibble_scales(f, p + 66, 8) + 0.5) * (half(f, p, 16) * 0.25)
    return Codes(_chunks(f, "IQ2_XS", numbers, _in_order(signs, 16)), scales)


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
    words, order = f.load(p + 66, I32, 8), [2 * i + half for i in _eights(32) for half in range(2)]
    scales = ((words >> 28).to(F32) + 0.5) * (half(f, p, 8) * 0.5)
    return Codes(_chunks(f, "IQ3_XXS", _bytes(f, p + 2, order), _in_order(_seven(f, words), 32)), scales)


def iq3_s(f: Fn, p: Val, count: int) -> Codes:
    bits = f.load(p + 66, I64).bits(I1, 64)
    ninth = f.select(bits, f.zeros(I16, 64) + 256, f.zeros(I16, 64))
    numbers = ninth | f.load(p + 2, I8, 64).zext(I16)
    chunks = _chunks(f, "IQ3_S", _lanes(f, numbers), f.load(p + 74, I64, 4))
    return numbered(chunks, _nibble_scales(f, p + 106, 4) * 2.0 + 1.0, half(f, p, 16))


@functools.cache
def _threes() -> tuple[int, ...]:
    """iq1's points, 8 values of -1, 0 and 1: one more of each in 2 bits, the even values in the low byte.

    In 4 KiB they stay in the nearest cache; as bytes they would not.
    """
    gguf.quants.IQ1_S.init_grid()
    rows = gguf.quants.IQ1_S.grid[0, 0].astype("int64") + 1
    return tuple(sum(int(v) << (8 * (i % 2) + i // 2 * 2) for i, v in enumerate(row)) for row in rows)


def _by_twos(f: Fn, numbers: Val, bit: int) -> list[Val]:
    """Codes of iq1 in the order of `k_twos`: i16 lanes of two values, at this bit of a byte. numbers: 32 lanes."""
    table = f.table("IQ1", _threes(), I16)
    points = f.join([f.load(table + n * 2, I16) for n in _lanes(f, numbers)])
    moved = [points >> right if right > 0 else points << -right for right in (2 * k - bit for k in range(4))]
    return [v & (0x0303 << bit) for v in moved]


def iq1_s(f: Fn, p: Val, count: int) -> Codes:
    # of 32 values: three high bits of each point's number, three of the scale, and which of -1/8 and 1/8 is added
    runs = f.load(p + 34, I16, 8)
    high = ((runs.shuffle([i // 4 for i in range(32)]) >> f.vconst([0, 3, 6, 9] * 8, I16)) & 7) << 8
    chunks = _by_twos(f, high | f.load(p + 2, I8, 32).zext(I16), 0)
    scales = (((runs >> 12) & 7).zext(I32).to(F32) * 2.0 + 1.0) * half(f, p, 8)
    offsets = scales * f.select(runs < 0, f.zeros(F32, 8) - 1.125, f.zeros(F32, 8) - 0.875)
    return Codes([c.bits(I8, 64) for c in chunks], scales, offsets)


def iq1_m(f: Fn, p: Val, count: int) -> Codes:
    # of 8 values: three high bits of the point's number, and which of -1/8 and 1/8 is added
    bytes_ = f.load(p + 32, I8, 16)
    of_points = bytes_.shuffle([i // 2 + 16 * (i % 2) for i in range(32)], bytes_ >> 4).zext(I16)
    chunks = _by_twos(f, ((of_points & 7) << 8) | f.load(p, I8, 32).zext(I16), 3)
    added = f.select((of_points & 8).eq(0), f.zeros(I16, 32) + 0x0202, f.zeros(I16, 32))
    # four times four scales of 3 bits; the bits above are an f16 in four parts, put together by a product
    word = f.load(p + 48, I64)
    d = (((word >> 12) & 0x000F000F000F000F) * 0x0001001001001000) >> 48
    three = f.splat(word, 4).bits(I16, 16).shuffle([i // 4 for i in range(16)]) >> f.vconst([0, 3, 6, 9] * 4, I16)
    scale = f.splat(d.trunc(I16)).as_bits(F16).to(F32) * 0.125
    scales = ((three & 7).zext(I32).to(F32) * 2.0 + 1.0) * scale
    return Codes([(c + added).bits(I8, 64) for c in chunks], scales)
