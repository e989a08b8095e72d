"""Types with 256 values to a block whose codes are numbers."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.backends.cpu.fast.code_type import Codes, each, half, half_pairs, numbered, numbers, spread
from graphrt.backends.cpu.fast.codes_small import IQ4_VALUES
from graphrt.backends.cpu.fast.ir import F32, I8, I16, I32, I64, Fn, Val, concat


def _k4(f: Fn, p: Val, step: int, count: int, chunks: list[Val]) -> Codes:
    """With q4_K's and q5_K's heads, of blocks `step` bytes apart: for 8 sub-blocks the scale and minus the min. 6-bit
    numbers packed in 12 bytes."""
    heads, at = each(f, p, step, count, 16).bits(I32, 4 * count), range(0, 4 * count, 4)  # two f16, words a, b and c

    def lanes(scales: Sequence[int], mins: Sequence[int]) -> list[int]:
        return [i + j for those in (scales, mins) for i in at for j in those]

    shifts = f.vconst([0] * (2 * count) + [0, 4] * count, I32)
    low = (heads.shuffle(lanes((1, 3), (2, 3))) >> shifts) & f.vconst([0x3F3F3F3F, 0x0F0F0F0F] * (2 * count), I32)
    high = (heads.shuffle(lanes((1, 1), (2, 2))) >> 2) & f.vconst([0, 0x30303030] * (2 * count), I32)
    packed = (low | high).bits(I8, 16 * count)
    n, mins = (numbers(packed.part(i * 8 * count, 8 * count)) for i in range(2))
    d, m = (v.shuffle([i for i in range(count) for _ in range(8)]) for v in half_pairs(f, p, step, count))
    return Codes(chunks, n * d, mins * -m, (n, d.lane(0)))


#: What a block of 256 in runs of 16, or of 32, is made of: the half, the quarter of it, and of 16 which half of that.
_RUNS16 = [(run // 8, run % 8 // 2, run % 2) for run in range(16)]
_RUNS32 = [(run // 4, run % 4) for run in range(8)]


def _runs32(f: Fn, p: Val, step: int, count: int) -> list[Val]:
    """Of blocks with 128 bytes of which each 32 are two runs, in the order of k_eights(): where each chunk's bytes are,
    those of both runs of a pair twice. Of one block, 8 bytes of each run; of two, 4."""
    if count == 1:
        a, b = (f.load(p + 64 * i, I64, 8) for i in range(2))
        return [a.shuffle([4 * (run // 2) + j for run in range(8)], b) for j in range(4)]
    halves = []  # of each block the first 4 words of each 32 bytes, word by word, and the last 4
    for block in range(2):
        a, b = (f.load(p + (step * block + 64 * i), I32, 16) for i in range(2))
        halves.append([a.shuffle([8 * pair + 4 * i + j for j in range(4) for pair in range(4)], b) for i in range(2)])
    lanes = [16 * (run // 8) + run % 8 // 2 for run in range(16)]
    return [halves[0][j // 4].shuffle([lane + j % 4 * 4 for lane in lanes], halves[1][j // 4]) for j in range(8)]


def _k4_nibbles(f: Fn, p: Val, step: int, count: int) -> list[Val]:
    """q4_K's and q5_K's low bits: of each 32 bytes the low halves are a run, the high halves the next."""
    nibble = [4 * (run % 2) for run in range(8 * count)]
    return [spread(f, v, range(v.lanes), nibble, 15) for v in _runs32(f, p, step, count)]


def q4_k(f: Fn, p: Val, count: int) -> Codes:
    return _k4(f, p, 144, count, _k4_nibbles(f, p + 16, 144, count))


def q5_k(f: Fn, p: Val, count: int) -> Codes:
    runs = range(8 * count)
    bits = each(f, p + 16, 176, count, 32).bits(I64 if count == 1 else I32, 4 * count * count)
    lanes = [run // 8 * 8 for run in runs]  # of the bits, 32 bytes of each block: a bit for each run
    shifts = [run % 8 - 4 for run in runs]
    high = [spread(f, bits, [lane + j for lane in lanes], shifts, 16) for j in range(4 * count)]
    return _k4(f, p, 176, count, [a | b for a, b in zip(_k4_nibbles(f, p + 48, 176, count), high, strict=True)])


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
