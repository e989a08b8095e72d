"""What decoders of block formats give, and what they are made of.

    value = (code - zero) * scale + offset

A decoder reads consecutive blocks and returns the codes as vectors of bytes, in whatever order is cheapest (a layout
says which value each byte is), and a scale, perhaps an offset too, for each run of `sub` values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graphrt.backends.cpu.fast.ir import F16, F32, I8, I16, I32, I64, LANES, Fn, Val, concat


@dataclass(frozen=True)
class Codes:
    """Decoded blocks. chunks: i8 vectors; scales, offsets: f32 vectors with a lane for each run of `sub` values.

    numbers: where scales are whole numbers times one scale of the block, these numbers as f32, and that scale in 16
    lanes.
    """

    chunks: list[Val]
    scales: Val
    offsets: Val | None = None
    numbers: tuple[Val, Val] | None = None


@dataclass(frozen=True)
class CodeType:
    """One quantized type: blocks of `size` values in `bytes` bytes.

    sub: consecutive values with one scale. layout(count): for each chunk of `count` blocks the index of the value that
    each byte is. decode(f, address, count): so many blocks. zero: the code of the value `offset`. signed: codes are
    -128 to 127, else 0 to 127. offsets: runs have offsets, else 0. at_once: blocks that are best decoded together, 1 or
    a power of two. rows_at_once: the same where rows are multiplied with few tokens, 0 for no other number: as many
    blocks as have 16 runs, a lane of sums for each. largest: where scales are whole numbers times one scale of the
    block (of a type with at_once 1), the largest product of such a number and a code less its zero; else 0.
    """

    name: str
    size: int
    bytes: int
    sub: int
    layout: Callable[[int], list[list[int]]]
    decode: Callable[[Fn, Val, int], Codes]
    zero: int = 0
    signed: bool = False
    offsets: bool = False
    at_once: int = 1
    largest: int = 0
    rows_at_once: int = 0

    @property
    def of_rows(self) -> CodeType:
        """As rows are multiplied with few tokens."""
        return replace(self, at_once=self.rows_at_once, rows_at_once=0) if self.rows_at_once else self

    @property
    def units(self) -> list[int]:
        """How many blocks are decoded together: as many as are best, then of those that are left two, then one."""
        return sorted({self.at_once, min(self.at_once, 2), 1}, reverse=True)


# layouts

#: Blocks of 32 that lie in eights, and in fours.
EIGHT, SIXTEEN = 8, 16


def eights_of_32(count: int) -> list[list[int]]:
    """Of 8 blocks of 32 the first 8 values of each, then the second 8, and so on: lanes have the same scales in all
    chunks. Of 16 blocks the first 4 of each, and so on: a lane has a block. Of fewer blocks the first 16 values of
    each, then the others; of 2 these are one chunk."""
    if count >= EIGHT:
        n = 64 // count
        return [[32 * b + n * part + i for b in range(count) for i in range(n)] for part in range(32 // n)]
    halves = [[32 * b + 16 * half + i for b in range(count) for i in range(16)] for half in range(2)]
    return [halves[0] + halves[1]] if count == 2 else halves


def halves_of_16(count: int) -> list[list[int]]:
    """The first 8 of each 16 values, then the others."""
    return [[16 * run + 8 * half + i for run in range(4 * count) for i in range(8)] for half in range(2)]


def k_natural(count: int) -> list[list[int]]:
    """Blocks of 256 in the order of values."""
    return [list(range(at, at + 64)) for at in range(0, 256, 64)]


def k_eights(count: int) -> list[list[int]]:
    """Of 256 values the first 8 of each 32, then the second 8, and so on: lanes have the same scales in all chunks. Of
    two blocks the first 4, and so on."""
    n = 8 // count
    return [[32 * run + n * part + i for run in range(8 * count) for i in range(n)] for part in range(4 * count)]


def k_fours(count: int) -> list[list[int]]:
    """Of 256 values the first 4 of each 16, then the second 4, and so on."""
    return [[16 * run + 4 * part + i for run in range(16) for i in range(4)] for part in range(4)]


def k_pairs(count: int) -> list[list[int]]:
    """Of each half of 256 values the first 8 of each 16, then the others."""
    return [
        [at + 16 * run + 8 * part + i for run in range(8) for i in range(8)] for at in (0, 128) for part in range(2)
    ]


def k_twos(count: int) -> list[list[int]]:
    """Of 256 values the first 2 of each 8, then the second 2, and so on: a lane of 4 bytes lies in one run of 16."""
    return [[8 * i + 2 * part + j for i in range(32) for j in range(2)] for part in range(4)]


# helpers


def each(f: Fn, p: Val, step: int, count: int, n: int) -> Val:
    """n bytes of each of `count` blocks, `step` bytes apart."""
    return concat([f.load(p + step * i, I8, n) for i in range(count)])


def halves(f: Fn, p: Val, step: int, count: int) -> Val:
    """One f16 of each of `count` blocks as f32 lanes."""
    if count == 1:
        return half(f, p, 1)
    return f.join([f.load(p + step * i, I16) for i in range(count)]).as_bits(F16).to(F32)


def half(f: Fn, p: Val, n: int) -> Val:
    """One f16 in n f32 lanes.

    Spread before it is converted: x86 converts whole registers, and junk in the unused lanes (a subnormal) takes a
    slow path of a hundred cycles.
    """
    return f.splat(f.load(p, I16)).as_bits(F16).to(F32).part(0, n)


def words_of(f: Fn, p: Val, step: int, count: int) -> Val:
    """Four bytes of each of `count` blocks as i32 lanes."""
    return f.join([f.load(p + step * i, I32) for i in range(count)])


def half_pairs(f: Fn, p: Val, step: int, count: int) -> tuple[Val, Val]:
    """Two f16 of each block as two vectors of f32."""
    spread = words_of(f, p, step, count) if count > 1 else f.splat(f.load(p, I32), 4)
    both = spread.bits(F16, 2 * spread.lanes).to(F32)
    return both.shuffle(range(0, 2 * count, 2)), both.shuffle(range(1, 2 * count, 2))


def blend(lanes: Sequence[Val]) -> Val:
    """Lane i of the i-th of these vectors."""
    sources = list(dict.fromkeys(lanes))
    out = sources[0]
    for source in sources[1:]:
        out = out.shuffle([i + (out.lanes if v is source else 0) for i, v in enumerate(lanes)], source)
    return out


def spread(f: Fn, v: Val, lanes: Sequence[int], shifts: Sequence[int], mask: int, other: Val | None = None) -> Val:
    """Lanes of v, and of `other` behind them, each shifted to the right (to the left: by a negative number) by its own
    number of bits, as bytes of which the bits of `mask` are kept. Bits that cross into another byte must not be kept.
    """
    width = {I32: 32, I64: 64}[v.t.element]
    v = v.shuffle(lanes, other)
    left = min(shifts) < 0
    amounts = f.vconst([-s % width if left else s for s in shifts], v.t.element)
    v = f.call("llvm.fshl", v, v, amounts) if left else v >> amounts
    return v.bits(I8, v.lanes * width // 8) & mask


def numbers(bytes_: Val) -> Val:
    return bytes_.zext(I32).to(F32)


def numbered(chunks: list[Val], n: Val, whole: Val) -> Codes:
    """Codes whose scales are the numbers n times `whole`, 16 equal lanes."""
    return Codes(chunks, n * whole.part(0, n.lanes), None, (n, whole))


def eights(f: Fn, p: Val, step: int) -> list[Val]:
    """Of 16 bytes of each of 8 blocks, `step` bytes apart, the first 8, and the others."""
    a, b = (each(f, p + at * step, step, EIGHT // 2, 16).bits(I64, EIGHT) for at in (0, EIGHT // 2))
    return [a.shuffle(range(i, 2 * EIGHT, 2), b).bits(I8, 8 * EIGHT) for i in range(2)]


def fours(f: Fn, ps: Sequence[Val]) -> list[Val]:
    """Of 16 bytes at each of 16 places the first 4 of each, then the second 4, and so on."""
    rows = [concat([f.load(p, I32, 4) for p in ps[i::4]]) for i in range(4)]  # a quarter of a vector has places i..i+3
    for n in (1, 2):
        low = [4 * (i // 4) + j for i in range(0, LANES, 4) for j in ((0, 16, 1, 17) if n == 1 else (0, 1, 16, 17))]
        high = [lane + 2 for lane in low]
        rows = [rows[i].shuffle(lanes, rows[i + 1]) for i in (0, 2) for lanes in (low, high)]
        if n == 1:
            rows = [rows[0], rows[2], rows[1], rows[3]]
    return [row.bits(I8, 4 * LANES) for row in rows]


def byte_chunks(f: Fn, p: Val, step: int, count: int) -> list[Val]:
    """32 bytes of each of `count` blocks, in the order of eights_of_32()."""
    if count == SIXTEEN:
        return [chunk for at in (0, 16) for chunk in fours(f, [p + (at + step * i) for i in range(count)])]
    if count == EIGHT:
        return [chunk for at in (0, 16) for chunk in eights(f, p + at, step)]
    return _halves([each(f, p + at, step, count, 16) for at in (0, 16)], count)


def nibble_chunks(f: Fn, p: Val, step: int, count: int) -> list[Val]:
    """16 bytes of each of `count` blocks as 32 values, in the order of eights_of_32()."""
    if count == SIXTEEN:
        zs = fours(f, [p + step * i for i in range(count)])
    else:
        zs = eights(f, p, step) if count == EIGHT else [each(f, p, step, count, 16)]
    return _halves([*(z & 15 for z in zs), *(z >> 4 for z in zs)], count)


def _halves(chunks: list[Val], count: int) -> list[Val]:
    return [concat(chunks)] if count == 2 else chunks
