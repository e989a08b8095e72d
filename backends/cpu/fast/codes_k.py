"""Types with 256 values to a block whose codes are numbers."""

from __future__ import annotations

from graphrt.backends.cpu.fast.code_type import Codes, half, half_pairs, numbers, shift
from graphrt.backends.cpu.fast.codes_small import IQ4_VALUES
from graphrt.backends.cpu.fast.ir import F32, I8, I16, I32, Fn, Val, concat


def _k4_scales(f: Fn, p: Val) -> tuple[Val, Val]:
    """q4_K's and q5_K's head: for 8 sub-blocks the scale and minus the min. 6-bit numbers packed in 12 bytes."""
    head = f.load(p, I32, 4)  # two f16, then the words a, b and c
    low = (head.shuffle([1, 3, 2, 3]) >> f.vconst([0, 0, 0, 4], I32)) & f.vconst([0x3F3F3F3F, 0x0F0F0F0F] * 2, I32)
    high = (head.shuffle([1, 1, 2, 2]) >> 2) & f.vconst([0, 0x30303030] * 2, I32)
    both = numbers((low | high).bits(I8, 16))
    d, m = half_pairs(f, p, 0, 1)
    return both.part(0, 8) * d.lane(0, 8), both.part(8, 8) * -m.lane(0, 8)


def q4_k(f: Fn, p: Val, count: int) -> Codes:
    packed = [f.load(p + 16 + 64 * i, I8, 64) for i in range(2)]
    return Codes([v for z in packed for v in (z & 15, z >> 4)], *_k4_scales(f, p))


def q5_k(f: Fn, p: Val, count: int) -> Codes:
    bits = f.load(p + 16, I8, 32)
    high = concat([bits, bits >> 2])  # the second 32 bytes hold sub-blocks that are two further on
    chunks = []
    for pair in range(2):
        z = f.load(p + 48 + 64 * pair, I8, 64)
        chunks += [(z & 15) | (shift(high, 4 - 4 * pair) & 16), (z >> 4) | (shift(high, 3 - 4 * pair) & 16)]
    return Codes(chunks, *_k4_scales(f, p))


def q6_k(f: Fn, p: Val, count: int) -> Codes:
    chunks = []
    for i in range(2):
        low, bits = f.load(p + 64 * i, I8, 64), f.load(p + 128 + 32 * i, I8, 32)
        chunks.append((low & 15) | (concat([bits << 4, bits << 2]) & 0x30))
        chunks.append((low >> 4) | (concat([bits, bits >> 2]) & 0x30))
    return Codes(chunks, f.load(p + 192, I8, 16).sext(I32).to(F32) * half(f, p + 208, 16))


def q2_k(f: Fn, p: Val, count: int) -> Codes:
    z, packed = f.load(p + 16, I8, 64), f.load(p, I8, 16)
    d, m = half_pairs(f, p + 80, 0, 1)
    scales, mins = numbers(packed & 15) * d.lane(0), numbers(packed >> 4) * -m.lane(0)
    return Codes([(z >> 2 * i) & 3 for i in range(4)], scales, mins)


def q3_k(f: Fn, p: Val, count: int) -> Codes:
    bits, z = f.load(p, I8, 32), f.load(p + 32, I8, 64)
    high = concat([bits, bits >> 4])
    chunks = [((z >> 2 * i) & 3) | (shift(high, 2 - i) & 4) for i in range(4)]
    head = f.join([f.load(p + 96 + 4 * i, I32) for i in (0, 1, 2, 2)])
    low = (head.shuffle([0, 1, 0, 1]) >> f.vconst([0, 0, 4, 4], I32)) & 0x0F0F0F0F
    two = (head.shuffle([2] * 4) >> f.vconst([0, 2, 4, 6], I32)) & 0x03030303
    packed = (low | (two << 4)).bits(I8, 16)
    return Codes(chunks, (packed.zext(I32) - 32).to(F32) * half(f, p + 108, 16))


def iq4_xs(f: Fn, p: Val, count: int) -> Codes:
    chunks = []
    for part in range(2):
        z = f.load(p + 8 + 64 * part, I8, 64)
        chunks += [f.lookup16(IQ4_VALUES, i) for i in (z & 15, z >> 4)]
    high, low = f.load(p + 2, I16).zext(I32), f.load(p + 4, I32)
    lanes = f.vconst(range(8), I32)
    scale_bits = ((f.splat(low, 8) >> lanes * 4) & 15) | (((f.splat(high, 8) >> lanes * 2) & 3) << 4)
    return Codes(chunks, (scale_bits - 32).to(F32) * half(f, p, 8))


def tq2_0(f: Fn, p: Val, count: int) -> Codes:
    z = f.load(p, I8, 64)
    return Codes([(z >> 2 * i) & 3 for i in range(4)], half(f, p + 64, 8))


def tq1_0(f: Fn, p: Val, count: int) -> Codes:
    """Five digits of base 3 in a byte, as a fraction: the next one is what a product with 3 carries out of 8 bits."""
    digits = [[f.load(p + at, I8, n)] for at, n in ((0, 32), (32, 16), (48, 4))]
    for powers in digits:
        while len(powers) < 5:
            powers.append(powers[-1] + powers[-1] + powers[-1])
    a, b, last = digits
    parts = [concat(a[:2]), concat(a[2:4]), concat([a[4], concat(b[:2])])]
    parts.append(concat([concat(b[2:4]), concat([b[4], concat(last[:4])])]))
    return Codes([f.unsigned_at_least(v, 86) + f.unsigned_at_least(v, 171) for v in parts], half(f, p + 52, 8))
