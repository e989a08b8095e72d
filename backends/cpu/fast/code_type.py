"""What decoders of block formats give, and what they are made of.

    value = (code - zero) * scale + offset

A decoder reads consecutive blocks and returns the codes as vectors of bytes, in whatever order is cheapest (a layout
says which value each byte is), and a scale, perhaps an offset too, for each run of `sub` values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphrt.backends.cpu.fast.ir import F16, F32, I8, I16, I32, Fn, Val, concat


@dataclass(frozen=True)
class Codes:
    """Decoded blocks. chunks: i8 vectors; scales, offsets: f32 vectors with a lane for each run of `sub` values."""

    chunks: list[Val]
    scales: Val
    offsets: Val | None = None


@dataclass(frozen=True)
class CodeType:
    """One quantized type: blocks of `size` values in `bytes` bytes.

    sub: consecutive values with one scale. layout(count): for each chunk of `count` blocks the index of the value that
    each byte is. decode(f, address, count): so many blocks. zero: the code of the value `offset`. signed: codes are
    -128 to 127, else 0 to 127. offsets: runs have offsets, else 0. at_once: blocks that are best decoded together, 1 or
    a power of two.
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


# layouts


def natural(count: int) -> list[list[int]]:
    """Blocks of 32 bytes in the order of values."""
    width = min(64, 32 * count)
    return [list(range(at, at + width)) for at in range(0, 32 * count, width)]


def nibbles(count: int) -> list[list[int]]:
    """The low halves of 16 bytes are a block's first 16 values, the high halves the others."""
    return [[32 * b + 16 * high + i for b in range(count) for i in range(16)] for high in range(2)]


def k_natural(count: int) -> list[list[int]]:
    """Blocks of 256 in the order of values."""
    return [list(range(at, at + 64)) for at in range(0, 256, 64)]


def k_nibbles(count: int) -> list[list[int]]:
    """The low halves of 32 bytes are 32 values, the high halves the 32 that follow."""
    return [
        [128 * pair + 64 * b + 32 * high + i for b in range(2) for i in range(32)]
        for pair in range(2)
        for high in range(2)
    ]


def k_sixteens(count: int) -> list[list[int]]:
    """As `nibbles`, eight times in a block of 256."""
    return [[128 * part + i for i in chunk] for part in range(2) for chunk in nibbles(4)]


def eights(count: int) -> list[list[int]]:
    """The low halves of 8 bytes are 8 values, the high halves the 8 that follow."""
    return [[16 * run + 8 * high + i for run in range(4 * count) for i in range(8)] for high in range(2)]


def k_quarters(count: int) -> list[list[int]]:
    """Each 32 bytes are 128 values, 32 in each two bits."""
    return [[128 * half + 32 * pair + i for half in range(2) for i in range(32)] for pair in range(4)]


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


def half_pairs(f: Fn, p: Val, step: int, count: int) -> tuple[Val, Val]:
    """Two f16 of each block as two vectors of f32."""
    words = [f.load(p + step * i, I32) for i in range(count)]
    spread = f.join(words) if count > 1 else f.splat(words[0], 4)
    both = spread.bits(F16, 2 * spread.lanes).to(F32)
    return both.shuffle(range(0, 2 * count, 2)), both.shuffle(range(1, 2 * count, 2))


def numbers(bytes_: Val) -> Val:
    return bytes_.zext(I32).to(F32)


def shift(v: Val, by: int) -> Val:
    """To the left, or to the right for a negative number."""
    return v << by if by >= 0 else v >> -by


def nibble_chunks(f: Fn, p: Val, step: int, count: int) -> list[Val]:
    z = each(f, p, step, count, 16)
    return [z & 15, z >> 4]
