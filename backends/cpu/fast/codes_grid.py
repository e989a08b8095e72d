"""Types whose codes are points of a grid: 8 or 4 values by the number of a point.

iq2 and iq3 have a sign for each value, iq1 has one of two shifts for a few points. The grids are those of the package
gguf.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import gguf

from graphrt.backends.cpu.fast.code_type import Codes, half
from graphrt.backends.cpu.fast.ir import F16, F32, I1, I8, I16, I32, I64, Fn, Val


@functools.cache
def _points(name: str, times: int = 1) -> tuple[int, ...]:
    """A grid's points, multiplied, as signed words, the first value lowest."""
    grid = gguf.quants.__dict__[name]
    grid.init_grid()
    rows = (grid.grid[0, 0] * times).astype("int8")
    return tuple(int.from_bytes(row.tobytes(), "little", signed=True) for row in rows)


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
    scales = (_nibble_scales(f, p + 106, 4) * 2.0 + 1.0) * half(f, p, 8)
    return Codes(_chunks(f, "IQ3_S", _lanes(f, numbers), f.load(p + 74, I64, 4)), scales)


def _shifted(f: Fn, numbers: Val, shifts: Val) -> list[Val]:
    """iq1's codes, eight times a value: 8 times a point's -1, 0 or 1, and the point's shift. numbers, shifts: 32 lanes."""
    table = f.table("IQ1_S", _points("IQ1_S", 8), I64)
    found = [f.load(table + n * 8, I64) for n in _lanes(f, numbers)]
    chunks = []
    for i in range(0, 32, 8):
        points = f.join(found[i : i + 8]).bits(I8, 64)
        chunks.append(points + shifts.shuffle([i + j // 8 for j in range(64)]))
    return chunks


def iq1_s(f: Fn, p: Val, count: int) -> Codes:
    # of 32 values: three high bits of each point's number, three of the scale, and whether the shift is -1 or 1
    runs = f.load(p + 34, I16, 8)
    of_points = runs.shuffle([i // 4 for i in range(32)])
    high = ((of_points >> f.vconst([0, 3, 6, 9] * 8, I16)) & 7) << 8
    shifts = (of_points.shift_sign(15) | 1).trunc(I8)
    scales = (((runs >> 12) & 7).zext(I32).to(F32) * 2.0 + 1.0) * (half(f, p, 8) * 0.125)
    return Codes(_shifted(f, high | f.load(p + 2, I8, 32).zext(I16), shifts), scales)


def iq1_m(f: Fn, p: Val, count: int) -> Codes:
    # of 8 values: three high bits of the point's number, and whether the shift is -1 or 1
    bytes_ = f.load(p + 32, I8, 16)
    of_points = (bytes_ & 15).shuffle([i // 2 + 16 * (i % 2) for i in range(32)], bytes_ >> 4)
    high = (of_points & 7).zext(I16) << 8
    shifts = ((of_points << 4).shift_sign(7)) | 1
    # four times four scales of 3 bits; the bits above are an f16 in four parts
    word = f.load(p + 48, I64)
    d = (word >> 12) & 0xF | (word >> 24) & 0xF0 | (word >> 36) & 0xF00 | (word >> 48) & 0xF000
    three = f.splat(word, 4).bits(I16, 16).shuffle([i // 4 for i in range(16)]) >> f.vconst([0, 3, 6, 9] * 4, I16)
    scale = f.splat(d.trunc(I16)).as_bits(F16).to(F32) * 0.125
    scales = ((three & 7).zext(I32).to(F32) * 2.0 + 1.0) * scale
    return Codes(_shifted(f, high | f.load(p, I8, 32).zext(I16), shifts), scales)
