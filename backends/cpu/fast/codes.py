"""GGUF's block formats as integer codes: one row of features and one decoder for each type.

    value = (code - zero) * scale + offset

A decoder reads consecutive blocks and returns the codes as vectors of bytes, in whatever order is cheapest (a layout
says which value each byte is), and a scale, perhaps an offset too, for each run of `sub` values. All kernels that read
quantized weights or caches are made from this table: integer products (`integer.py`) and f32 values (`blocks.py`).
Layouts of the formats: ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphrt.backends.cpu.fast.ir import F16, F32, I1, I8, I16, I32, Fn, Val, concat


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


def k_quarters(count: int) -> list[list[int]]:
    """Each 32 bytes are 128 values, 32 in each two bits."""
    return [[128 * half + 32 * pair + i for half in range(2) for i in range(32)] for pair in range(4)]


# helpers


def _each(f: Fn, p: Val, step: int, count: int, n: int) -> Val:
    """n bytes of each of `count` blocks, `step` bytes apart."""
    return concat([f.load(p + step * i, I8, n) for i in range(count)])


def _halves(f: Fn, p: Val, step: int, count: int) -> Val:
    """One f16 of each of `count` blocks as f32 lanes."""
    if count == 1:
        return _half(f, p, 1)
    return f.join([f.load(p + step * i, I16) for i in range(count)]).as_bits(F16).to(F32)


def _half(f: Fn, p: Val, n: int) -> Val:
    """One f16 in n f32 lanes.

    Spread before it is converted: x86 converts whole registers, and junk in the unused lanes (a subnormal) takes a
    slow path of a hundred cycles.
    """
    return f.splat(f.load(p, I16)).as_bits(F16).to(F32).part(0, n)


def _half_pairs(f: Fn, p: Val, step: int, count: int) -> tuple[Val, Val]:
    """Two f16 of each block as two vectors of f32."""
    words = [f.load(p + step * i, I32) for i in range(count)]
    spread = f.join(words) if count > 1 else f.splat(words[0], 4)
    both = spread.bits(F16, 2 * spread.lanes).to(F32)
    return both.shuffle(range(0, 2 * count, 2)), both.shuffle(range(1, 2 * count, 2))


def _numbers(bytes_: Val) -> Val:
    return bytes_.zext(I32).to(F32)


def _shift(v: Val, by: int) -> Val:
    """To the left, or to the right for a negative number."""
    return v << by if by >= 0 else v >> -by


# 32 values to a block


def _nibble_chunks(f: Fn, p: Val, step: int, count: int) -> list[Val]:
    z = _each(f, p, step, count, 16)
    return [z & 15, z >> 4]


def _q4_0(f: Fn, p: Val, count: int) -> Codes:
    return Codes(_nibble_chunks(f, p + 2, 18, count), _halves(f, p, 18, count))


def _q4_1(f: Fn, p: Val, count: int) -> Codes:
    return Codes(_nibble_chunks(f, p + 4, 20, count), *_half_pairs(f, p, 20, count))


def _five_bits(f: Fn, high: Val, low: Val, step: int, count: int) -> list[Val]:
    """Nibbles with a fifth bit each, of which 16 lie together."""
    chunks = []
    for at, nibble in zip((0, 2), _nibble_chunks(f, low, step, count), strict=True):
        bits = f.join([f.load(high + at + step * i, I16) for i in range(count)]).bits(I1, 16 * count)
        chunks.append(nibble | f.select(bits, f.zeros(I8, 16 * count) + 16, f.zeros(I8, 16 * count)))
    return chunks


def _q5_0(f: Fn, p: Val, count: int) -> Codes:
    return Codes(_five_bits(f, p + 2, p + 6, 22, count), _halves(f, p, 22, count))


def _q5_1(f: Fn, p: Val, count: int) -> Codes:
    return Codes(_five_bits(f, p + 4, p + 8, 24, count), *_half_pairs(f, p, 24, count))


def _q8_0(f: Fn, p: Val, count: int) -> Codes:
    blocks = [f.load(p + 2 + 34 * i, I8, 32) for i in range(count)]
    return Codes([concat(blocks[i : i + 2]) for i in range(0, count, 2)], _halves(f, p, 34, count))


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _iq4_nl(f: Fn, p: Val, count: int) -> Codes:
    chunks = [f.lookup16(IQ4_VALUES, i) for i in _nibble_chunks(f, p + 2, 18, count)]
    return Codes(chunks, _halves(f, p, 18, count))


def _mxfp4(f: Fn, p: Val, count: int) -> Codes:
    e = f.join([f.load(p + 17 * i, I8) for i in range(count)]).zext(I32)
    # half of 2^(e - 127), because the table holds doubled values; the two smallest are subnormal
    bits = f.select(e < 2, (e + 1) * 0x00200000, (e - 1) << 23)
    return Codes([f.lookup16(FP4_VALUES, i) for i in _nibble_chunks(f, p + 1, 17, count)], bits.as_bits(F32))


# 256 values to a block


def _k4_scales(f: Fn, p: Val) -> tuple[Val, Val]:
    """q4_K's and q5_K's head: for 8 sub-blocks the scale and minus the min. 6-bit numbers packed in 12 bytes."""
    head = f.load(p, I32, 4)  # two f16, then the words a, b and c
    low = (head.shuffle([1, 3, 2, 3]) >> f.vconst([0, 0, 0, 4], I32)) & f.vconst([0x3F3F3F3F, 0x0F0F0F0F] * 2, I32)
    high = (head.shuffle([1, 1, 2, 2]) >> 2) & f.vconst([0, 0x30303030] * 2, I32)
    numbers = _numbers((low | high).bits(I8, 16))
    d, m = _half_pairs(f, p, 0, 1)
    return numbers.part(0, 8) * d.lane(0, 8), numbers.part(8, 8) * -m.lane(0, 8)


def _q4_k(f: Fn, p: Val, count: int) -> Codes:
    packed = [f.load(p + 16 + 64 * i, I8, 64) for i in range(2)]
    return Codes([v for z in packed for v in (z & 15, z >> 4)], *_k4_scales(f, p))


def _q5_k(f: Fn, p: Val, count: int) -> Codes:
    bits = f.load(p + 16, I8, 32)
    high = concat([bits, bits >> 2])  # the second 32 bytes hold sub-blocks that are two further on
    chunks = []
    for pair in range(2):
        z = f.load(p + 48 + 64 * pair, I8, 64)
        chunks += [(z & 15) | (_shift(high, 4 - 4 * pair) & 16), (z >> 4) | (_shift(high, 3 - 4 * pair) & 16)]
    return Codes(chunks, *_k4_scales(f, p))


def _q6_k(f: Fn, p: Val, count: int) -> Codes:
    chunks = []
    for half in range(2):
        low, bits = f.load(p + 64 * half, I8, 64), f.load(p + 128 + 32 * half, I8, 32)
        chunks.append((low & 15) | (concat([bits << 4, bits << 2]) & 0x30))
        chunks.append((low >> 4) | (concat([bits, bits >> 2]) & 0x30))
    return Codes(chunks, f.load(p + 192, I8, 16).sext(I32).to(F32) * _half(f, p + 208, 16))


def _q2_k(f: Fn, p: Val, count: int) -> Codes:
    z, packed = f.load(p + 16, I8, 64), f.load(p, I8, 16)
    d, m = _half_pairs(f, p + 80, 0, 1)
    scales, mins = _numbers(packed & 15) * d.lane(0), _numbers(packed >> 4) * -m.lane(0)
    return Codes([(z >> 2 * i) & 3 for i in range(4)], scales, mins)


def _q3_k(f: Fn, p: Val, count: int) -> Codes:
    bits, z = f.load(p, I8, 32), f.load(p + 32, I8, 64)
    high = concat([bits, bits >> 4])
    chunks = [((z >> 2 * i) & 3) | (_shift(high, 2 - i) & 4) for i in range(4)]
    head = f.join([f.load(p + 96 + 4 * i, I32) for i in (0, 1, 2, 2)])
    low = (head.shuffle([0, 1, 0, 1]) >> f.vconst([0, 0, 4, 4], I32)) & 0x0F0F0F0F
    two = (head.shuffle([2] * 4) >> f.vconst([0, 2, 4, 6], I32)) & 0x03030303
    packed = (low | (two << 4)).bits(I8, 16)
    return Codes(chunks, (packed.zext(I32) - 32).to(F32) * _half(f, p + 108, 16))


def _iq4_xs(f: Fn, p: Val, count: int) -> Codes:
    chunks = []
    for part in range(2):
        z = f.load(p + 8 + 64 * part, I8, 64)
        chunks += [f.lookup16(IQ4_VALUES, i) for i in (z & 15, z >> 4)]
    high, low = f.load(p + 2, I16).zext(I32), f.load(p + 4, I32)
    lanes = f.vconst(range(8), I32)
    scale_bits = ((f.splat(low, 8) >> lanes * 4) & 15) | (((f.splat(high, 8) >> lanes * 2) & 3) << 4)
    return Codes(chunks, (scale_bits - 32).to(F32) * _half(f, p, 8))


CODE_TYPES: dict[str, CodeType] = {
    t.name: t
    for t in (
        CodeType("q4_0", 32, 18, 32, nibbles, _q4_0, zero=8, at_once=4),
        CodeType("q4_1", 32, 20, 32, nibbles, _q4_1, offsets=True, at_once=4),
        CodeType("q5_0", 32, 22, 32, nibbles, _q5_0, zero=16, at_once=4),
        CodeType("q5_1", 32, 24, 32, nibbles, _q5_1, offsets=True, at_once=4),
        CodeType("q8_0", 32, 34, 32, natural, _q8_0, signed=True, at_once=4),
        CodeType("iq4_nl", 32, 18, 32, nibbles, _iq4_nl, signed=True, at_once=4),
        CodeType("mxfp4", 32, 17, 32, nibbles, _mxfp4, signed=True, at_once=4),
        CodeType("q2_K", 256, 84, 16, k_quarters, _q2_k, offsets=True),
        CodeType("q3_K", 256, 110, 16, k_quarters, _q3_k, zero=4),
        CodeType("q4_K", 256, 144, 32, k_nibbles, _q4_k, offsets=True),
        CodeType("q5_K", 256, 176, 32, k_nibbles, _q5_k, offsets=True),
        CodeType("q6_K", 256, 210, 16, k_natural, _q6_k, zero=32),
        CodeType("iq4_xs", 256, 136, 32, k_sixteens, _iq4_xs, signed=True),
    )
}
