"""Types with 256 values to a block whose codes are numbers."""

from __future__ import annotations

from graphrt.backends.cpu.fast.code_type import Codes, each, half, half_pairs, numbered, numbers, spread
from graphrt.backends.cpu.fast.codes_small import IQ4_VALUES
from graphrt.backends.cpu.fast.ir import F32, I8, I16, I32, I64, Fn, Val, concat


def _k4(f: Fn, p: Val, chunks: list[Val]) -> Codes:
    """With q4_K's and q5_K's head: for 8 sub-blocks the scale and minus the min. 6-bit numbers packed in 12 bytes."""
    head = f.load(p, I32, 4)  # two f16, then the words a, b and c
    low = (head.shuffle([1, 3, 2, 3]) >> f.vconst([0, 0, 0, 4], I32)) & f.vconst([0x3F3F3F3F, 0x0F0F0F0F] * 2, I32)
    high = (head.shuffle([1, 1, 2, 2]) >> 2) & f.vconst([0, 0x30303030] * 2, I32)
    both = numbers((low | high).bits(I8, 16))
    d, m = half_pairs(f, p, 0, 1)
    n = both.part(0, 8)
    return Codes(chunks, n * d.lane(0, 8), both.part(8, 8) * -m.lane(0, 8), (n, d.lane(0)))


#: What a block of 256 in runs of 16, or of 32, is made of: the half, the quarter of it, and of 16 which half of that.
_RUNS16 = [(run // 8, run % 8 // 2, run % 2) for run in range(16)]
_RUNS32 = [(run // 4, run % 4) for run in range(8)]


def _k4_nibbles(f: Fn, p: Val) -> list[Val]:
    """q4_K's and q5_K's low bits: of each 32 bytes the low halves are a run, the high halves the next."""
    a, b = (f.load(p + 64 * i, I64, 8) for i in range(2))
    nibble = [4 * (run % 2) for run in range(8)]
    return [spread(f, a, [4 * (run // 2) + j for run in range(8)], nibble, 15, b) for j in range(4)]


def q4_k(f: Fn, p: Val, count: int) -> Codes:
    return _k4(f, p, _k4_nibbles(f, p + 16))


def q5_k(f: Fn, p: Val, count: int) -> Codes:
    bits = f.load(p + 16, I64, 4)
    high = [spread(f, bits, [j] * 8, [run - 4 for run in range(8)], 16) for j in range(4)]
    return _k4(f, p, [a | b for a, b in zip(_k4_nibbles(f, p + 48), high, strict=True)])


def q6_k(f: Fn, p: Val, count: int) -> Codes:
    a, b, bits = (f.load(p + 64 * i, I32, 16) for i in range(3))
    chunks = []
    for j in range(4):
        low_lanes = [16 * half + 8 * (quarter % 2) + 4 * side + j for half, quarter, side in _RUNS16]
        low = spread(f, a, low_lanes, [4 * (quarter // 2) for _, quarter, _ in _RUNS16], 15, b)
        high_lanes = [8 * half + 4 * side + j for half, _, side in _RUNS16]
        chunks.append(low | spread(f, bits, high_lanes, [2 * quarter - 4 for _, quarter, _ in _RUNS16], 0x30))
    return numbered(chunks, f.load(p + 192, I8, 16).sext(I32).to(F32), half(f, p + 208, 16))


def _two_bits(f: Fn, p: Val) -> list[Val]:
    """q2_K's and q3_K's low bits: each 32 bytes are 128 values, 32 in each two bits."""
    z, shifts = f.load(p, I32, 16), [2 * quarter for _, quarter, _ in _RUNS16]
    return [spread(f, z, [8 * half + 4 * side + j for half, _, side in _RUNS16], shifts, 3) for j in range(4)]


def q2_k(f: Fn, p: Val, count: int) -> Codes:
    packed = f.load(p, I8, 16)
    d, m = half_pairs(f, p + 80, 0, 1)
    n, mins = numbers(packed & 15), numbers(packed >> 4) * -m.lane(0)
    return Codes(_two_bits(f, p + 16), n * d.lane(0), mins, (n, d.lane(0)))


def q3_k(f: Fn, p: Val, count: int) -> Codes:
    bits, shifts = f.load(p, I32, 8), [4 * half + quarter - 2 for half, quarter, _ in _RUNS16]
    high = [spread(f, bits, [4 * side + j for _, _, side in _RUNS16], shifts, 4) for j in range(4)]
    head = f.join([f.load(p + 96 + 4 * i, I32) for i in (0, 1, 2, 2)])
    low = (head.shuffle([0, 1, 0, 1]) >> f.vconst([0, 0, 4, 4], I32)) & 0x0F0F0F0F
    two = (head.shuffle([2] * 4) >> f.vconst([0, 2, 4, 6], I32)) & 0x03030303
    packed = (low | (two << 4)).bits(I8, 16)
    chunks = [a | b for a, b in zip(_two_bits(f, p + 32), high, strict=True)]
    return numbered(chunks, (packed.zext(I32) - 32).to(F32), half(f, p + 108, 16))


def iq4_xs(f: Fn, p: Val, count: int) -> Codes:
    a, b = (f.load(p + 8 + 64 * i, I64, 8) for i in range(2))
    packed = [a.shuffle(range(i, 16, 2), b).bits(I8, 64) for i in range(2)]
    chunks = [f.lookup16(IQ4_VALUES, i) for i in (*(z & 15 for z in packed), *(z >> 4 for z in packed))]
    high, low = f.load(p + 2, I16).zext(I32), f.load(p + 4, I32)
    lanes = f.vconst(range(8), I32)
    scale_bits = ((f.splat(low, 8) >> lanes * 4) & 15) | (((f.splat(high, 8) >> lanes * 2) & 3) << 4)
    return numbered(chunks, (scale_bits - 32).to(F32), half(f, p, 16))


def tq2_0(f: Fn, p: Val, count: int) -> Codes:
    z, shifts = f.load(p, I64, 8), [2 * quarter for _, quarter in _RUNS32]
    chunks = [spread(f, z, [4 * half + j for half, _ in _RUNS32], shifts, 3) for j in range(4)]
    return Codes(chunks, half(f, p + 64, 8))


def tq1_layout(count: int) -> list[list[int]]:
    """Of each block the first 160 values by their digit; of the others two digits of 16 bytes each together, the last
    of these with the four digits of the last bytes."""
    blocks = range(0, 256 * count, 256)
    first = [[b + 32 * d + i for b in blocks for i in range(32)] for d in range(5)]
    then = [[b + 160 + 16 * d + i for b in blocks for i in range(16)] for d in range(5)]
    last = [b + 240 + 4 * d + i for d in range(4) for b in blocks for i in range(4)]
    return [*first, then[0] + then[1], then[2] + then[3], then[4] + last]


def _digits(f: Fn, v: Val) -> Val:
    """Of bytes as fractions the first digit of base 3: what a product with 3 carries out of 8 bits."""
    one = f.zeros(I8, v.lanes) + 1
    parts = (f.call("llvm.usub.sat", v, f.zeros(I8, v.lanes) + below) for below in (85, 170))
    a, b = (f.call("llvm.umin", part, one) for part in parts)
    return a + b


def tq1_0(f: Fn, p: Val, count: int) -> Codes:
    """Five digits of base 3 in a byte, as a fraction: tripled, the next one is its first."""
    powers = []
    for at, n, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        v = [each(f, p + at, 54, count, n)]
        while len(v) < digits:
            v.append(v[-1] + v[-1] + v[-1])
        powers.append(v)
    a, b, last = powers
    chunks = [_digits(f, v) for v in (*a, concat(b[:2]), concat(b[2:4]), concat([b[4], concat(last)]))]
    return Codes(chunks, concat([half(f, p + 52 + 54 * i, 8) for i in range(count)]))
