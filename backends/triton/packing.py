"""Quantized matrices as planes: codes, scales and scales of scales apart, so that kernels load them wide and aligned.

A row's elements are taken in groups of 32. For group g of a row, with codes c[0..31]:
quants: int32 words; byte b of word i of 4-bit codes holds c[4i + b] in its low nibble and c[16 + 4i + b] in its high
  one; of 8-bit codes it holds c[4i + b]; of 2-bit codes byte b of word j holds, from its low bits on, c[8j + b],
  c[16 + 8j + b], c[8j + 4 + b], c[16 + 8j + 4 + b].
high: further bits of the codes. One bit: bit 2i of byte b belongs to c[4i + b], the next to c[16 + 4i + b]. Two bits:
  as 2-bit codes.
scales, supers: see Packing.
A packed matrix holds the bits of the raw blocks and no others: unpack() gives back every byte, of NaN scales too. Only
of tq1_0, whose digits of base 3 lie as tq2_0's codes (2 bits where the file has 1.6), it holds the digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import gguf
import torch

from graphrt.backend import Buffer, Bytes, Comparison, Usage
from graphrt.backends.triton.memory import TritonBuffer, empty, upload
from graphrt.backends.triton.packing_digits import digits, of_digits
from graphrt.backends.triton.packing_grids import Field, Grid, bit_orders, grid_table
from graphrt.dtypes import dtype
from graphrt.printing import count_text

#: Elements of a group.
GROUP = 32
#: Elements packed at a time: what bounds the temporary memory (some 5 bytes an element).
_SLICE = 1 << 24
#: Where planes begin in a packed matrix's memory, in bytes.
_ALIGNMENT = 256


@dataclass(frozen=True)
class ScaleForm:
    """How the scales of groups are stored; kernels/common/scales.py and gluon_scales.py decode them by its name.

    dtype, count: `scales` is [rows, k / 32, count] of that type; supers: `supers` is f16 [rows, k / 256, supers], 0:
    there are none; has_min: a minimum is subtracted from, or added to, scale * code; halves: each half of a group has a
    scale of its own. at, width, power: see _odd(), which alone uses them.
    """

    name: str
    dtype: torch.dtype
    count: int
    supers: int = 0
    has_min: bool = False
    halves: bool = False
    at: tuple[int, int] = (0, 0)
    width: int = 4
    power: int = 0


#: d.
F16_SCALE = ScaleForm("f16", torch.float16, 1)
#: d and m: a value is d * code + m.
F16_MIN = ScaleForm("f16_min", torch.float16, 2, has_min=True)
#: An exponent e: 2^(e - 127), or 2^(e - 128) for a codebook of doubled values.
E8M0 = ScaleForm("e8m0", torch.uint8, 1)
#: d * scale.
I8 = ScaleForm("i8", torch.int8, 1, supers=1)
I8_HALVES = ScaleForm("i8_halves", torch.int8, 2, supers=1, halves=True)
#: A 6-bit scale and a 6-bit min: d * scale * code - dmin * min.
U6_MIN = ScaleForm("u6_min", torch.uint8, 2, supers=2, has_min=True)
#: The same of half groups, in a byte each: scale | min << 4.
U4_MIN_HALVES = ScaleForm("u4_min_halves", torch.uint8, 2, supers=2, has_min=True, halves=True)
#: A number of e4m3 without a sign; half of it, for a codebook of doubled values.
UE4M3_HALVES = ScaleForm("ue4m3_halves", torch.uint8, 2, halves=True)
#: d of 256 elements and nothing else.
D = ScaleForm("d", torch.uint8, 0, supers=1)


def _odd(count: int, first: int, second: int, power: int, width: int = 4) -> ScaleForm:
    """d * (2 * number + 1) * 2^power: numbers of `width` bits, of the halves from bits `first` and `second` on of a
    group's `count` bytes, among which others may lie."""
    return ScaleForm("odd", torch.uint8, count, 1, halves=first != second, at=(first, second), width=width, power=power)


@dataclass(frozen=True)
class Packing:
    """How a type is packed: its features, which kernels ask for instead of its name.

    A value is scale * (code - offset), or what `scale` says where that has mins. bits: of a code in `quants`;
    high_bits: of a code in `high`, above those; signed: codes are int8; codebook: values that codes stand for (int8),
    None: the code itself; grid: codes are what a table has by numbers of `bits` (packing_grids.py), None: they lie in
    the planes. high_type: of `high`'s elements.
    """

    kind: str
    bits: int
    high_bits: int
    scale: ScaleForm
    offset: int = 0
    signed: bool = False
    codebook: tuple[int, ...] | None = None
    grid: Grid | None = None
    high_type: torch.dtype = torch.int32

    @property
    def scale_type(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def scales(self) -> int:
        """Elements of a group in `scales`."""
        return self.scale.count

    @property
    def supers(self) -> int:
        """Elements of a superblock in `supers`."""
        return self.scale.supers

    @property
    def words(self) -> int:
        """int32 words of a group's `quants`."""
        return self.bits * GROUP // 32

    @property
    def high_words(self) -> int:
        """Elements of a group in `high`."""
        return self.high_bits * GROUP // 32

    @property
    def has_min(self) -> bool:
        return self.scale.has_min


_IQ4 = tuple(gguf.quants.IQ4_NL.kvalues)
#: Twice e2m1's values. (gguf has them too, but not in every version that will do for the rest.)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _with_signs(*values: int) -> tuple[int, ...]:
    """A codebook of values and then the same less than zero; of four, a code's fourth bit says nothing."""
    both = values + tuple(-v for v in values)
    return both * (16 // len(both))


_IQ2 = _with_signs(8, 25, 43, 0)
_IQ2_XXS_GRID = Grid(_IQ2[:3], signs=Field("scales"), even=True)
_IQ2_XS_GRID = Grid(_IQ2[:3], more=Field("quants", 28), signs=Field("quants"), even=True)
_IQ2_S_GRID = Grid(_IQ2[:3], more=Field("scales", 8, 2, 2), signs=Field("quants"))
_IQ3_XXS = _with_signs(4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_XXS_GRID = Grid(_IQ3_XXS[:8], 4, signs=Field("scales"), even=True)
_IQ3_S = _with_signs(1, 3, 5, 7, 9, 11, 13, 15)
_IQ3_S_GRID = Grid(_IQ3_S[:8], 4, more=Field("scales", 8), signs=Field("high"))
#: Eight times -1, 0 and 1, each moved by 1, or with a minus sign by -1.
_IQ1 = (-7, 1, 9, 0, -9, -1, 7, 0) * 2
_IQ1_S_GRID = Grid((-1, 0, 1), more=Field("scales", 0, 3, 3), sign=Field("scales", 15, step=0))
_IQ1_M_GRID = Grid((-1, 0, 1), more=Field("high", 0, 3, 4), sign=Field("high", 3, step=4))

_PACKINGS = {
    p.kind: p
    for p in (
        Packing("q4_0", 4, 0, F16_SCALE, offset=8),
        Packing("q4_1", 4, 0, F16_MIN),
        Packing("q5_0", 4, 1, F16_SCALE, offset=16),
        Packing("q5_1", 4, 1, F16_MIN),
        Packing("q8_0", 8, 0, F16_SCALE, signed=True),
        Packing("q2_K", 2, 0, U4_MIN_HALVES),
        Packing("q3_K", 2, 1, I8_HALVES, offset=4),
        Packing("q4_K", 4, 0, U6_MIN),
        Packing("q5_K", 4, 1, U6_MIN),
        Packing("q6_K", 4, 2, I8_HALVES, offset=32),
        Packing("iq4_nl", 4, 0, F16_SCALE, codebook=_IQ4),
        Packing("iq4_xs", 4, 0, I8, codebook=_IQ4),
        Packing("mxfp4", 4, 0, E8M0, codebook=E2M1),
        Packing("nvfp4", 4, 0, UE4M3_HALVES, codebook=E2M1),
        Packing("tq2_0", 2, 0, D, offset=1),
        Packing("tq1_0", 2, 0, D, offset=1),
        Packing("iq2_xxs", 1, 0, _odd(4, 28, 28, -3), codebook=_IQ2, grid=_IQ2_XXS_GRID),
        Packing("iq2_xs", 2, 0, _odd(1, 0, 4, -3), codebook=_IQ2, grid=_IQ2_XS_GRID),
        Packing("iq2_s", 2, 0, _odd(2, 0, 4, -3), codebook=_IQ2, grid=_IQ2_S_GRID),
        Packing("iq3_xxs", 2, 0, _odd(4, 28, 28, -2), codebook=_IQ3_XXS, grid=_IQ3_XXS_GRID),
        Packing("iq3_s", 2, 1, _odd(2, 0, 0, 0), codebook=_IQ3_S, grid=_IQ3_S_GRID),
        Packing("iq1_s", 1, 0, _odd(2, 12, 12, -3, 3), codebook=_IQ1, grid=_IQ1_S_GRID),
        Packing("iq1_m", 1, 1, _odd(1, 0, 3, -3, 3), codebook=_IQ1, grid=_IQ1_M_GRID, high_type=torch.int16),
    )
}

#: Names of the types that can be packed.
PACKED_TYPES = tuple(_PACKINGS)


def packing_of(kind: str) -> Packing | None:
    """The packing of the type of that name, None for a type that is not packed."""
    return _PACKINGS.get(kind)


@dataclass(frozen=True, eq=False)
class Packed:
    """A quantized matrix of `rows` rows of k elements. The planes are views of `memory`, uint8, each 256-byte aligned.

    quants: int32 [rows, k/32, words]; high: int32 [rows, k/32, high_words] or None; scales: [rows, k/32, scales];
    supers: f16 [rows, k/256, supers] or None.
    """

    kind: str
    rows: int
    k: int
    quants: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    supers: torch.Tensor | None
    memory: torch.Tensor

    @classmethod
    def empty(cls, kind: str, rows: int, k: int, device: str | torch.device) -> Packed:
        """Memory for a matrix, filled with 0xFF: NaN scales.

        Raises GraphError when k isn't whole blocks, MemoryPlanError when there is no room.
        """
        packing = _PACKINGS[kind]
        dtype(kind).row_size(k)
        groups = k // GROUP
        blocks = k // 256
        shapes = {
            "quants": (torch.int32, (rows, groups, packing.words)),
            "high": (packing.high_type, (rows, groups, packing.high_words)),
            "scales": (packing.scale_type, (rows, groups, packing.scales)),
            "supers": (torch.float16, (rows, blocks, packing.supers)),
        }
        sizes = {name: math.prod(shape) * kind.itemsize for name, (kind, shape) in shapes.items()}
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name], end = end, end + -(-size // _ALIGNMENT) * _ALIGNMENT
        memory = empty(end, Usage.WEIGHTS, str(device)).fill_(0xFF)
        planes = {
            name: memory[starts[name] : starts[name] + sizes[name]].view(kind).view(shape)
            for name, (kind, shape) in shapes.items()
        }
        high = planes["high"] if packing.high_bits else None
        supers = planes["supers"] if packing.supers else None
        return cls(kind, rows, k, planes["quants"], high, planes["scales"], supers, memory)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with the gaps between planes."""
        return self.memory.numel()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of raw blocks."""
        return dtype(self.kind).row_size(self.k)

    def words(self, plane: torch.Tensor) -> torch.Tensor:
        """A plane as int32, with the gap behind it where its last word is not whole."""
        start = plane.data_ptr() - self.memory.data_ptr()
        assert start % 4 == 0
        return self.memory[start : start + -(-plane.nbytes // 4) * 4].view(torch.int32)

    def planes(self) -> Planes:
        """The planes as one argument of kernels: scales and supers as integers as wide as what a group, or 256
        elements, have of them."""
        return Planes(self.quants, self.high, whole_plane(self.scales), whole_plane(self.supers), self.grid)

    def word_planes(self) -> Planes:
        """planes() with scales and supers as int32, however many groups' a word has."""
        scales = self.words(self.scales) if self.scales.numel() else None
        supers = None if self.supers is None else self.words(self.supers)
        return self.planes()._replace(scales=scales, supers=supers)

    @property
    def grid(self) -> torch.Tensor | None:
        """The type's grid_table(), which all matrices on a device share; None for types without one."""
        found = _PACKINGS[self.kind].grid
        return None if found is None else grid_table(self.kind, found, str(self.memory.device))

    def part(self, first: int, last: int) -> Packed:
        """Rows first to last - 1, in the same memory."""
        high = None if self.high is None else self.high[first:last]
        supers = None if self.supers is None else self.supers[first:last]
        quants, scales = self.quants[first:last], self.scales[first:last]
        return Packed(self.kind, last - first, self.k, quants, high, scales, supers, self.memory)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Planes(NamedTuple):
    """A packed matrix as kernels take it; None for planes that its type lacks. In a kernel the fields are pointers."""

    quants: torch.Tensor | None
    high: torch.Tensor | None
    scales: torch.Tensor | None
    supers: torch.Tensor | None
    grid: torch.Tensor | None


#: Packed.planes() of no matrix.
NO_PLANES = Planes(None, None, None, None, None)


def whole_plane(plane: torch.Tensor | None) -> torch.Tensor | None:
    """A plane viewed so that all it has of a group, or of a block, is one integer."""
    if plane is None or plane.shape[-1] == 0:
        return None
    return plane.view(_INTEGERS[plane.shape[-1] * plane.element_size()])


@dataclass(frozen=True)
class _Bits:
    """Codes in a raw block: from byte `start` on, `size` bytes, each of several codes of `bits` bits.

    The codes of `lanes` neighbouring bytes follow one another: first all from their lowest bits, then from the next.
    """

    start: int
    size: int
    bits: int
    lanes: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class _Raw:
    """Where a raw block has what: codes, scales and supers, these two as (first byte, size)."""

    low: _Bits
    scales: tuple[int, int]
    high: _Bits | None = None
    supers: tuple[int, int] = (0, 0)


_RAW = {
    "q4_0": _Raw(_Bits(2, 16, 4, 16), (0, 2)),
    "q4_1": _Raw(_Bits(4, 16, 4, 16), (0, 4)),
    "q5_0": _Raw(_Bits(6, 16, 4, 16), (0, 2), _Bits(2, 4, 1, 1)),
    "q5_1": _Raw(_Bits(8, 16, 4, 16), (0, 4), _Bits(4, 4, 1, 1)),
    "q8_0": _Raw(_Bits(2, 32, 8, 1), (0, 2)),
    "q2_K": _Raw(_Bits(16, 64, 2, 32), (0, 16), None, (80, 4)),
    "q3_K": _Raw(_Bits(32, 64, 2, 32), (96, 12), _Bits(0, 32, 1, 32), (108, 2)),
    "q4_K": _Raw(_Bits(16, 128, 4, 32), (4, 12), None, (0, 4)),
    "q5_K": _Raw(_Bits(48, 128, 4, 32), (4, 12), _Bits(16, 32, 1, 32), (0, 4)),
    "q6_K": _Raw(_Bits(0, 128, 4, 64), (192, 16), _Bits(128, 64, 2, 32), (208, 2)),
    "iq4_nl": _Raw(_Bits(2, 16, 4, 16), (0, 2)),
    "iq4_xs": _Raw(_Bits(8, 128, 4, 16), (2, 6), None, (0, 2)),
    "mxfp4": _Raw(_Bits(1, 16, 4, 16), (0, 1)),
    "nvfp4": _Raw(_Bits(4, 32, 4, 8), (0, 4)),
    "tq1_0": _Raw(_Bits(0, 52, 8, 1), (0, 0), None, (52, 2)),
    "tq2_0": _Raw(_Bits(0, 64, 2, 32), (0, 0), None, (64, 2)),
}


def codes_at(kind: str) -> int:
    """The first byte of the codes in a raw block; 0 for codes of a grid, which are not contiguous."""
    return _RAW[kind].low.start if kind in _RAW else 0


def pack(blocks: torch.Tensor, into: Packed) -> None:
    """Raw blocks, uint8 [rows, row bytes], into a packed matrix on the same device. Fit for a captured graph."""
    for first, last in _slices(into.rows, into.k):
        _pack_rows(blocks[first:last], into.part(first, last))


def unpack(packed: Packed) -> torch.Tensor:
    """The raw blocks again: uint8 [rows, row bytes], byte for byte what pack() was given.

    Of tq1_0 those that quantizers write, where several bytes mean the same digits.
    """
    blocks = torch.empty((packed.rows, packed.row_bytes), dtype=torch.uint8, device=packed.memory.device)
    for first, last in _slices(packed.rows, packed.k):
        _unpack_rows(packed.part(first, last), blocks[first:last])
    return blocks


def _slices(rows: int, k: int) -> Iterator[tuple[int, int]]:
    step = max(1, _SLICE // k)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _pack_rows(blocks: torch.Tensor, into: Packed) -> None:
    packing, dt = _PACKINGS[into.kind], dtype(into.kind)
    blocks = blocks.reshape(into.rows, into.k // dt.block_size, dt.type_size)
    if packing.grid is not None:
        _pack_bits(blocks, into)
        return
    raw = _RAW[into.kind]
    codes = _codes(blocks, raw.low)
    _copy(into.quants, _to_plane(digits(codes) if into.kind == "tq1_0" else codes, packing.bits))
    if into.high is not None and raw.high is not None:
        _copy(into.high, _to_plane(_codes(blocks, raw.high), packing.high_bits))
    scales = blocks[..., _span(raw.scales)]
    if into.kind in _SCALES:
        scales = _SCALES[into.kind][0](scales)
    _copy(into.scales, scales)
    if into.supers is not None:
        _copy(into.supers, blocks[..., _span(raw.supers)])


def _unpack_rows(packed: Packed, blocks: torch.Tensor) -> None:
    packing, dt = _PACKINGS[packed.kind], dtype(packed.kind)
    shape = (packed.rows, packed.k // dt.block_size)
    blocks = blocks.view(*shape, dt.type_size)
    if packing.grid is not None:
        _unpack_bits(packed, blocks)
        return
    raw = _RAW[packed.kind]

    def put(span: slice, data: torch.Tensor) -> None:
        blocks[..., span] = data.reshape(*shape, span.stop - span.start)

    codes = _from_plane(packed.quants, packing.bits).view(*shape, -1)
    put(raw.low.span, _merged(of_digits(codes) if packed.kind == "tq1_0" else codes, raw.low))
    if packed.high is not None and raw.high is not None:
        put(raw.high.span, _merged(_from_plane(packed.high, packing.high_bits).view(*shape, -1), raw.high))
    scales = packed.scales.view(torch.uint8).reshape(*shape, -1)
    put(_span(raw.scales), _SCALES[packed.kind][1](scales) if packed.kind in _SCALES else scales)
    if packed.supers is not None:
        put(_span(raw.supers), packed.supers.view(torch.uint8))


def _pack_bits(blocks: torch.Tensor, into: Packed) -> None:
    """Raw blocks [rows, blocks, bytes] whose bits go to the planes in other orders."""
    bits = split_bits(blocks, 1, 1)
    bits = torch.cat([bits, torch.zeros_like(bits[..., :1])], -1)
    for name, order in bit_orders(into.kind, str(blocks.device)).items():
        _copy(getattr(into, name), merge_bits(bits[..., order], 1, 1))


def _unpack_bits(packed: Packed, blocks: torch.Tensor) -> None:
    shape = blocks.shape[:2]
    bits = torch.empty((*shape, 8 * blocks.shape[2] + 1), dtype=torch.uint8, device=blocks.device)
    for name, order in bit_orders(packed.kind, str(blocks.device)).items():
        plane = getattr(packed, name).view(torch.uint8).reshape(*shape, -1)
        bits[..., order] = split_bits(plane, 1, 1)
    blocks.copy_(merge_bits(bits[..., :-1], 1, 1))


def _span(part: tuple[int, int]) -> slice:
    return slice(part[0], part[0] + part[1])


def _copy(plane: torch.Tensor, data: torch.Tensor) -> None:
    """Bytes into a plane of any type: as bytes, since a NaN may lose its bits as a number."""
    plane = plane.view(torch.uint8)
    plane.copy_(data.reshape(plane.shape))


def _codes(blocks: torch.Tensor, where: _Bits) -> torch.Tensor:
    """The codes of raw blocks, in the elements' order: uint8 [rows, blocks, codes a block]."""
    return split_bits(blocks[..., where.span], where.bits, where.lanes)


def _merged(codes: torch.Tensor, where: _Bits) -> torch.Tensor:
    return merge_bits(codes, where.bits, where.lanes)


def _to_plane(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in order as the bytes of a plane. Two halves of 16 in order become 4 + 4 of both in turn."""
    if bits == 8:
        return codes
    return merge_bits(codes.reshape(*codes.shape[:-1], -1, 2, 4, 4).transpose(-3, -2).flatten(-4), bits, 4)


def _from_plane(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of a plane [rows, groups, words], in order: uint8 [rows, codes]."""
    codes = plane.view(torch.uint8).flatten(1)
    if bits == 8:
        return codes
    codes = split_bits(codes, bits, 4)
    return codes.view(codes.shape[0], -1, 4, 2, 4).transpose(-3, -2).flatten(1)


def split_bits(data: torch.Tensor, bits: int, lanes: int) -> torch.Tensor:
    """Bytes [..., n] as codes, uint8 [..., n * 8 / bits]: for every `lanes` bytes first their lowest bits' codes."""
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    data = data.reshape(*data.shape[:-1], -1, 1, lanes)
    return ((data >> shifts[:, None]) & ((1 << bits) - 1)).flatten(-3)


def merge_bits(codes: torch.Tensor, bits: int, lanes: int) -> torch.Tensor:
    """Inverse of split_bits."""
    if bits == 8:
        return codes
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits, lanes)
    data = parts[..., 0, :].clone()
    for i in range(1, 8 // bits):
        data |= parts[..., i, :] << (bits * i)
    return data.flatten(-2)


def _k4_scales(raw: torch.Tensor) -> torch.Tensor:
    """q4_K's and q5_K's 12 bytes [..., 12] as 8 pairs of 6-bit scale and min: uint8 [..., 16]."""
    scale, low_min, nibbles = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    first = torch.stack([scale & 0x3F, low_min & 0x3F], -1)
    second = torch.stack([nibbles & 0xF | scale >> 6 << 4, nibbles >> 4 | low_min >> 6 << 4], -1)
    return torch.cat([first, second], -2).flatten(-2)


def _k4_raw(pairs: torch.Tensor) -> torch.Tensor:
    first, second = pairs.reshape(*pairs.shape[:-1], 2, 4, 2).unbind(-3)
    low = first | second >> 4 << 6
    nibbles = second[..., 0] & 0xF | second[..., 1] << 4
    return torch.cat([low[..., 0], low[..., 1], nibbles], -1)


def _q3_scales(raw: torch.Tensor) -> torch.Tensor:
    """q3_K's 12 bytes [..., 12] as the bits of 16 int8, each the 6-bit number less 32."""
    return (split_bits(raw[..., :8], 4, 8) | split_bits(raw[..., 8:], 2, 4) << 4) - 32


def _q3_raw(scales: torch.Tensor) -> torch.Tensor:
    codes = scales + 32
    return torch.cat([merge_bits(codes & 0xF, 4, 8), merge_bits(codes >> 4, 2, 4)], -1)


def _iq4_scales(raw: torch.Tensor) -> torch.Tensor:
    """iq4_xs' 6 bytes [..., 6] (16 bits of high bits, 8 nibbles) as the bits of 8 int8, each the number less 32."""
    return (split_bits(raw[..., 2:], 4, 1) | split_bits(raw[..., :2], 2, 1) << 4) - 32


def _iq4_raw(scales: torch.Tensor) -> torch.Tensor:
    codes = scales + 32
    return torch.cat([merge_bits(codes >> 4, 2, 1), merge_bits(codes & 0xF, 4, 1)], -1)


_Map = Callable[[torch.Tensor], torch.Tensor]
#: Types whose raw blocks don't have a scale a byte: from raw bytes, and back.
_SCALES: dict[str, tuple[_Map, _Map]] = {
    "q3_K": (_q3_scales, _q3_raw),
    "q4_K": (_k4_scales, _k4_raw),
    "q5_K": (_k4_scales, _k4_raw),
    "iq4_xs": (_iq4_scales, _iq4_raw),
}


class PackedBuffer(TritonBuffer):
    """Memory of one packed matrix that reads and writes as if it held the raw blocks. nbytes: of these."""

    def __init__(self, packed: Packed, usage: Usage) -> None:
        super().__init__(packed.memory, usage)
        self.packed = packed
        self.nbytes = packed.rows * packed.row_bytes

    @property
    def footprint(self) -> int:
        return self.packed.nbytes

    @property
    def layout(self) -> str:
        """What planes it has."""
        p = _PACKINGS[self.packed.kind]
        if p.grid is not None:
            return "points of a grid and signs, float16 of 256"
        parts = [f"{p.bits}-bit codes"]
        parts += [count_text(p.high_bits, "high bit")] if p.high_bits else []
        kind = str(p.scale_type).removeprefix("torch.")
        parts += [f"{p.scales} {kind} scale{'s' * (p.scales > 1)} of 32 elements"] if p.scales else []
        parts += [f"{p.supers} float16 of 256"] if p.supers else []
        return ", ".join(parts)

    def read(self, offset: int, nbytes: int) -> Bytes:
        if self.memory.is_meta:
            return super().read(offset, nbytes)
        first, last = self._rows(offset, nbytes)
        skip = offset - first * self.packed.row_bytes
        found: Bytes = unpack(self.packed.part(first, last)).flatten()[skip : skip + nbytes].cpu().numpy().copy()
        return found

    def read_later(self, offset: int, nbytes: int) -> Callable[[], Bytes]:
        return Buffer.read_later(self, offset, nbytes)

    def comparison(self, offset: int, expected: Bytes) -> Comparison:
        return Buffer.comparison(self, offset, expected)

    def write(self, offset: int, data: Bytes) -> None:
        """Whole rows at their place. Part of a row keeps the rest of it."""
        data = data.reshape(-1)
        row_bytes = self.packed.row_bytes
        first, last = self._rows(offset, data.size)
        skip = offset - first * row_bytes
        for a, b in _slices(last - first, self.packed.k):
            part = self.packed.part(first + a, first + b)
            begin, end = max(a * row_bytes, skip), min(b * row_bytes, skip + data.size)
            whole = end - begin == (b - a) * row_bytes
            device = self.memory.device
            rows = torch.empty((b - a, row_bytes), dtype=torch.uint8, device=device) if whole else unpack(part)
            upload(data[begin - skip : end - skip], rows.view(-1)[begin - a * row_bytes : end - a * row_bytes])
            pack(rows, part)

    def _rows(self, offset: int, nbytes: int) -> tuple[int, int]:
        """The rows that a span of raw bytes touches."""
        row_bytes = self.packed.row_bytes
        return offset // row_bytes, -(-(offset + nbytes) // row_bytes)
