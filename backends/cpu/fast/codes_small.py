"""Types with 32 or 64 values to a block."""

from __future__ import annotations

from graphrt.backends.cpu.fast.code_type import (
    SIXTEEN,
    Codes,
    byte_chunks,
    each,
    eights_of_32,
    half_pairs,
    halves,
    nibble_chunks,
    words_of,
)
from graphrt.backends.cpu.fast.ir import F32, I1, I8, I32, Fn, Val


def q4_0(f: Fn, p: Val, count: int) -> Codes:
    return Codes(nibble_chunks(f, p + 2, 18, count), halves(f, p, 18, count))


def q4_1(f: Fn, p: Val, count: int) -> Codes:
    return Codes(nibble_chunks(f, p + 4, 20, count), *half_pairs(f, p, 20, count))


def _five_bits(f: Fn, high: Val, low: Val, step: int, count: int) -> list[Val]:
    """Nibbles with a fifth bit each, in the order of nibble_chunks()."""
    words = words_of(f, high, step, count).bits(I8, 4 * count)
    chunks = []
    for order, nibble in zip(eights_of_32(count), nibble_chunks(f, low, step, count), strict=True):
        if count == SIXTEEN:  # a byte of bits for each code
            mine = f.vconst([1 << (value % 8) for value in order], I8)
            bits = (words.shuffle([value // 8 for value in order]) & mine).ne(0)
        else:
            bits = words.shuffle([value // 8 for value in order[::8]]).bits(I1, nibble.lanes)
        chunks.append(nibble | f.select(bits, f.zeros(I8, nibble.lanes) + 16, f.zeros(I8, nibble.lanes)))
    return chunks


def q5_0(f: Fn, p: Val, count: int) -> Codes:
    return Codes(_five_bits(f, p + 2, p + 6, 22, count), halves(f, p, 22, count))


def q5_1(f: Fn, p: Val, count: int) -> Codes:
    return Codes(_five_bits(f, p + 4, p + 8, 24, count), *half_pairs(f, p, 24, count))


def q8_0(f: Fn, p: Val, count: int) -> Codes:
    return Codes(byte_chunks(f, p + 2, 34, count), halves(f, p, 34, count))


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: Doubled values of four bits, plus FP4_ZERO.
FP4_ZERO = 12
FP4_CODES = tuple(FP4_ZERO + v for v in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))


def iq4_nl(f: Fn, p: Val, count: int) -> Codes:
    chunks = [f.lookup16(IQ4_VALUES, i) for i in nibble_chunks(f, p + 2, 18, count)]
    return Codes(chunks, halves(f, p, 18, count))


def mxfp4(f: Fn, p: Val, count: int) -> Codes:
    e = f.join([f.load(p + 17 * i, I8) for i in range(count)]).zext(I32)
    # half of 2^(e - 127), because the table holds doubled values; the two smallest are subnormal
    bits = f.select(e < 2, (e + 1) * 0x00200000, (e - 1) << 23)
    return Codes([f.lookup16(FP4_CODES, i) for i in nibble_chunks(f, p + 1, 17, count)], bits.as_bits(F32))


def nvfp4(f: Fn, p: Val, count: int) -> Codes:
    z = each(f, p + 4, 36, count, 32)
    e = f.join([f.load(p + 36 * i, I32) for i in range(count)]).bits(I8, 4 * count).zext(I32)
    # three bits of mantissa and four of exponent, in an f32 whose exponent is off by 120; half of that, as for mxfp4
    scale = ((e & 0x7F) << 20).as_bits(F32) * 2.0**119
    return Codes([f.lookup16(FP4_CODES, i) for i in (z & 15, z >> 4)], f.select(e.eq(0x7F), 0.0, scale))
