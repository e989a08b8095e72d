"""GGUF's block formats: one decoder for each type, shared by every kernel that reads weights or a cache.

A decoder reads one block at a byte address and returns its values as groups. A group is one or more vectors of 16
consecutive values that share a scale and an offset: value = q * scale + offset. Kernels that use a weight once may
keep the scale outside their sum; all others ask for the values (`Group.values`). Layouts: ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphrt.backends.cpu.fast.ir import F16, F32, I1, I8, I16, I32, LANES, Fn, Val


@dataclass(frozen=True)
class Group:
    """`values = q * scale + offset`, each q 16 consecutive f32; scale and offset: 16 equal lanes, or None (1 and 0)."""

    q: list[Val]
    scale: Val | None = None
    offset: Val | None = None

    def values(self, f: Fn) -> list[Val]:
        if self.scale is None:
            return self.q
        if self.offset is None:
            return [q * self.scale for q in self.q]
        return [f.fma(q, self.scale, self.offset) for q in self.q]


@dataclass(frozen=True)
class BlockType:
    """One storage type: `size` values in `bytes` bytes, and how to read a block of it."""

    name: str
    size: int
    bytes: int
    decode: Callable[[Fn, Val], list[Group]]

    def element(self, f: Fn, address: Val) -> Val:
        """One value of a plain type as f32."""
        return plain_load(f, address, self.name, 0)

    @property
    def is_plain(self) -> bool:
        return self.name in ("f32", "f16", "bf16")

    @property
    def value_bytes(self) -> int:
        """Bytes of one value of a plain type."""
        return self.bytes // self.size

    def vectors(self, f: Fn, address: Val) -> Iterator[tuple[int, Val]]:
        """(index of the first value, 16 values) over one block."""
        at = 0
        for group in self.decode(f, address):
            for v in group.values(f):
                yield at, v
                at += LANES


# helpers


def _half(f: Fn, p: Val) -> Val:
    """One f16 in 16 f32 lanes.

    Spread before it is converted: x86 converts whole registers, and junk in the unused lanes (a subnormal) takes a
    slow path of a hundred cycles.
    """
    return f.splat(f.load(p, I16)).as_bits(F16).to(F32)


def _bytes(f: Fn, p: Val, n: int = LANES) -> Val:
    """n unsigned bytes as i32 lanes."""
    return f.load(p, I8, n).zext(I32)


def _nibbles(f: Fn, p: Val) -> tuple[Val, Val]:
    """The low and the high halves of 16 bytes."""
    z = _bytes(f, p)
    return z & 15, z >> 4


def _bit_lanes(f: Fn, bits: Val, value: int) -> Val:
    """16 bits -> 16 lanes of `value` or 0."""
    return f.select(bits.bits(I1, LANES), f.zeros(I32) + value, f.zeros(I32))


def _words(f: Fn, p: Val, count: int) -> list[Val]:
    return [f.load(p + 4 * i, I32) for i in range(count)]


def _byte_lanes(f: Fn, words: list[Val]) -> Val:
    """4 words -> their 16 bytes as i8 lanes."""
    v = f.zeros(I32, 4)
    for i, w in enumerate(words):
        v = Val(f, f.b.insert_element(v.v, w.v, I32(i)))
    return v.bits(I8, LANES)


# plain types


def plain_load(f: Fn, p: Val, name: str, n: int) -> Val:
    """n values of a plain type as f32; n = 0 for one as a scalar."""
    if name == "bf16":
        return (f.load(p, I16, n).zext(I32) << 16).as_bits(F32)
    return f.load(p, F32 if name == "f32" else F16, n).to(F32)


def _plain(name: str, width: int) -> BlockType:
    """Plain rows are read in pieces of 64 values; the kernel takes what is left one by one."""

    def decode(f: Fn, p: Val) -> list[Group]:
        return [Group([plain_load(f, p + i * width, name, LANES)]) for i in range(0, 64, LANES)]

    return BlockType(name, 64, 64 * width, decode)


# 32 values to a block


def _q4_0(f: Fn, p: Val) -> list[Group]:
    lo, hi = _nibbles(f, p + 2)
    return [Group([(lo - 8).to(F32), (hi - 8).to(F32)], _half(f, p))]


def _scale_and_min(f: Fn, p: Val) -> tuple[Val, Val]:
    pair = f.load(p, F16, 2).to(F32)
    return pair.lane(0), pair.lane(1)


def _q4_1(f: Fn, p: Val) -> list[Group]:
    d, m = _scale_and_min(f, p)
    lo, hi = _nibbles(f, p + 4)
    return [Group([lo.to(F32), hi.to(F32)], d, m)]


def _five_bits(f: Fn, high: Val, low: Val) -> tuple[Val, Val]:
    lo, hi = _nibbles(f, low)
    return lo | _bit_lanes(f, f.load(high, I16), 16), hi | _bit_lanes(f, f.load(high + 2, I16), 16)


def _q5_0(f: Fn, p: Val) -> list[Group]:
    lo, hi = _five_bits(f, p + 2, p + 6)
    return [Group([(lo - 16).to(F32), (hi - 16).to(F32)], _half(f, p))]


def _q5_1(f: Fn, p: Val) -> list[Group]:
    d, m = _scale_and_min(f, p)
    lo, hi = _five_bits(f, p + 4, p + 8)
    return [Group([lo.to(F32), hi.to(F32)], d, m)]


def _q8_0(f: Fn, p: Val) -> list[Group]:
    return [Group([f.load(p + 2 + i, I8, LANES).sext(I32).to(F32) for i in (0, 16)], _half(f, p))]


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _table_nibbles(f: Fn, p: Val, table: tuple[int, ...]) -> list[Val]:
    z = f.load(p, I8, LANES)
    return [f.lookup16(table, i).sext(I32).to(F32) for i in (z & 15, z >> 4)]


def _iq4_nl(f: Fn, p: Val) -> list[Group]:
    return [Group(_table_nibbles(f, p + 2, IQ4_VALUES), _half(f, p))]


def _mxfp4(f: Fn, p: Val) -> list[Group]:
    e = f.load(p, I8).zext(I32)
    # half of 2^(e - 127), because the table holds doubled values; the two smallest are subnormal
    bits = f.select(e < 2, f.const(0x00200000, I32) << e, (e - 1) << 23)
    return [Group(_table_nibbles(f, p + 1, FP4_VALUES), f.splat(bits.as_bits(F32)))]


# 256 values to a block


def _k4_scales(f: Fn, p: Val) -> tuple[list[Val], list[Val]]:
    """q4_K's and q5_K's head: for 8 sub-blocks the scale and minus the min. 6-bit numbers packed in 12 bytes."""
    a, b, c = _words(f, p + 4, 3)
    low6, low4, high2 = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030
    words = [a & low6, (c & low4) | ((a >> 2) & high2), b & low6, ((c >> 4) & low4) | ((b >> 2) & high2)]
    d, m = _scale_and_min(f, p)
    both = d.shuffle([0] * 8 + [LANES] * 8, -m)
    scaled = _byte_lanes(f, words).zext(I32).to(F32) * both
    return [scaled.lane(i) for i in range(8)], [scaled.lane(8 + i) for i in range(8)]


def _q4_k(f: Fn, p: Val) -> list[Group]:
    scales, mins = _k4_scales(f, p)
    groups = []
    for i in range(4):
        a, b = _nibbles(f, p + 16 + 32 * i), _nibbles(f, p + 32 + 32 * i)
        for half in range(2):
            q = [a[half].to(F32), b[half].to(F32)]
            groups.append(Group(q, scales[2 * i + half], mins[2 * i + half]))
    return groups


def _q5_k(f: Fn, p: Val) -> list[Group]:
    scales, mins = _k4_scales(f, p)
    high = [_bytes(f, p + 16), _bytes(f, p + 32)]
    groups = []
    for i in range(4):
        low = [_nibbles(f, p + 48 + 32 * i), _nibbles(f, p + 64 + 32 * i)]
        for half in range(2):
            j = 2 * i + half
            q = [(n[half] | (((h >> j) & 1) << 4)).to(F32) for n, h in zip(low, high, strict=True)]
            groups.append(Group(q, scales[j], mins[j]))
    return groups


def _q6_k(f: Fn, p: Val) -> list[Group]:
    scales = f.load(p + 192, I8, LANES).sext(I32).to(F32) * _half(f, p + 208)
    groups = []
    for half in range(2):
        low = [_bytes(f, p + 64 * half + 16 * i) for i in range(4)]
        high = [_bytes(f, p + 128 + 32 * half + 16 * i) for i in range(2)]
        for i in range(8):  # 16 values each; the low 4 bits go through 64 bytes twice, the high 2 through 32 four times
            q = ((low[i % 4] >> (i // 4 * 4)) & 15) | (((high[i % 2] >> (i // 2 * 2)) & 3) << 4)
            groups.append(Group([(q - 32).to(F32)], scales.lane(8 * half + i)))
    return groups


def _q2_k(f: Fn, p: Val) -> list[Group]:
    d, m = _scale_and_min(f, p + 80)
    packed = _bytes(f, p)
    scales, mins = (packed & 15).to(F32) * d, (packed >> 4).to(F32) * -m
    groups = []
    for half in range(2):
        low = [_bytes(f, p + 16 + 32 * half + 16 * i) for i in range(2)]
        for i in range(8):
            q = (low[i % 2] >> (i // 2 * 2)) & 3
            groups.append(Group([q.to(F32)], scales.lane(8 * half + i), mins.lane(8 * half + i)))
    return groups


def _q3_k(f: Fn, p: Val) -> list[Group]:
    a, b, c = _words(f, p + 96, 3)
    low4, low2 = 0x0F0F0F0F, 0x03030303
    pairs = ((a, 0), (b, 2), (a >> 4, 4), (b >> 4, 6))
    packed = _byte_lanes(f, [(low & low4) | (((c >> shift) & low2) << 4) for low, shift in pairs])
    scales = (packed.zext(I32) - 32).to(F32) * _half(f, p + 108)
    high = [_bytes(f, p), _bytes(f, p + 16)]
    groups = []
    for half in range(2):
        low = [_bytes(f, p + 32 + 32 * half + 16 * i) for i in range(2)]
        for i in range(8):
            bit = 4 * half + i // 2
            # a set bit means that 4 is not subtracted
            q = ((low[i % 2] >> (i // 2 * 2)) & 3) + (((high[i % 2] >> bit) & 1) << 2) - 4
            groups.append(Group([q.to(F32)], scales.lane(8 * half + i)))
    return groups


def _iq4_xs(f: Fn, p: Val) -> list[Group]:
    d = _half(f, p)
    high, low = f.load(p + 2, I16).zext(I32), f.load(p + 4, I32)
    lanes = f.vconst(range(8), I32)
    scale_bits = ((f.splat(low, 8) >> lanes * 4) & 15) | (((f.splat(high, 8) >> lanes * 2) & 3) << 4)
    scales = (scale_bits - 32).to(F32) * d.part(0, 8)
    return [Group(_table_nibbles(f, p + 8 + 16 * i, IQ4_VALUES), scales.lane(i)) for i in range(8)]


_DECODERS = (
    ("q4_0", 32, 18, _q4_0),
    ("q4_1", 32, 20, _q4_1),
    ("q5_0", 32, 22, _q5_0),
    ("q5_1", 32, 24, _q5_1),
    ("q8_0", 32, 34, _q8_0),
    ("iq4_nl", 32, 18, _iq4_nl),
    ("mxfp4", 32, 17, _mxfp4),
    ("q2_K", 256, 84, _q2_k),
    ("q3_K", 256, 110, _q3_k),
    ("q4_K", 256, 144, _q4_k),
    ("q5_K", 256, 176, _q5_k),
    ("q6_K", 256, 210, _q6_k),
    ("iq4_xs", 256, 136, _iq4_xs),
)

#: Every type that the fast kernels read, by ggml's name.
TYPES: dict[str, BlockType] = {
    **{name: _plain(name, width) for name, width in (("f32", 4), ("f16", 2), ("bf16", 2))},
    **{name: BlockType(name, size, n_bytes, decode) for name, size, n_bytes, decode in _DECODERS},
}
