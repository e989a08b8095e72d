"""What packing.py's Packing says of a packed type, as kernels ask for it while they are compiled."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from graphrt.backends.triton.packing import E2M1, PACKED_TYPES, Planes, codes_at, packing_of
from graphrt.backends.triton.packing_grids import Grid
from graphrt.dtypes import dtype


class Facts(NamedTuple):
    """A Packing's features as numbers and words. scale_bytes: that a group has in the plane of scales; numbers: of
    scales of the form "odd" the bits where the halves' begin, their width, and the power of two that they count.
    block_bytes, codes_at: of the raw blocks, their size and where in them the codes begin (of grids: 0)."""

    bits: int
    high_bits: int
    offset: int
    signed: bool
    codebook: tuple[int, ...] | None
    scale: str
    scale_bytes: int
    supers: int
    has_min: bool
    half_scales: bool
    numbers: tuple[int, int, int, int]
    grid: Grid | None
    block_bytes: int
    codes_at: int


def _facts_of(kind: str) -> Facts:
    p = packing_of(kind)
    assert p is not None
    s = p.scale
    return Facts(
        p.bits, p.high_bits, p.offset, p.signed, p.codebook, s.name, s.count * s.dtype.itemsize, s.supers, s.has_min,
        s.halves, (*s.at, s.width, s.power), p.grid, dtype(kind).type_size, codes_at(kind),
    )  # fmt: skip


#: By type. A constexpr, because Triton counts those into the keys of the kernels that it keeps on disk.
FACTS = tl.constexpr({kind: _facts_of(kind) for kind in PACKED_TYPES})
#: Values of e2m1, doubled.
E2M1_VALUES = tl.constexpr(E2M1)


# ---- codes ----


@triton.constexpr_function
def code_bits(KIND):
    """Bits of a code in the quants; also the int32 words of a group's."""
    return FACTS.value[KIND].bits


@triton.constexpr_function
def high_bits(KIND):
    """Bits of a code in the plane of high bits."""
    return FACTS.value[KIND].high_bits


@triton.constexpr_function
def code_offset(KIND):
    """Zero point: value = scale * (code - offset)."""
    return FACTS.value[KIND].offset


@triton.constexpr_function
def has_codebook(KIND):
    """Codes are looked up."""
    return FACTS.value[KIND].codebook is not None


@triton.constexpr_function
def is_signed(KIND):
    """Codes are int8 once a codebook, if any, was asked."""
    return FACTS.value[KIND].signed or FACTS.value[KIND].codebook is not None


@triton.constexpr_function
def is_e2m1(KIND):
    """Codes are numbers of 4 bits: a sign, two bits of an exponent and one of a mantissa."""
    return FACTS.value[KIND].codebook == E2M1_VALUES.value


@triton.constexpr_function
def has_plain_nibbles(KIND):
    """A code is a nibble and nothing else: it may be multiplied where it lies in its byte."""
    return FACTS.value[KIND].bits == 4 and FACTS.value[KIND].high_bits == 0 and FACTS.value[KIND].codebook is None


@triton.constexpr_function
def codebook_shift(KIND):
    """What makes a codebook's values codes from 0 to 127, which are cheaper to look up; 0 where nothing does, or where
    the codebook is so small that it makes no difference."""
    book = FACTS.value[KIND].codebook
    return -min(book) if book is not None and max(book) - min(book) < 128 and not has_small_codebook(KIND) else 0


@triton.constexpr_function
def has_small_codebook(KIND):
    """Three bits of a code say all."""
    book = FACTS.value[KIND].codebook
    return book is not None and book[:8] == book[8:]


@triton.constexpr_function
def codebook_word(KIND, i, ADDED=0):
    """Values 4i to 4i + 3 of a codebook, each with ADDED, as the bytes of a number of 32 bits."""
    return sum(((FACTS.value[KIND].codebook[4 * i + j] + ADDED) & 255) << (8 * j) for j in range(4))


@triton.constexpr_function
def codebook_half(KIND, half):
    """Values 8 * half to 8 * half + 7 of a codebook as the bytes of an int64."""
    values = bytes(v & 255 for v in FACTS.value[KIND].codebook[8 * half : 8 * half + 8])
    return int.from_bytes(values, "little", signed=True)


# ---- grids ----


@triton.constexpr_function
def has_grid(KIND):
    """Codes are in a table, by numbers and with signs."""
    return FACTS.value[KIND].grid is not None


@triton.constexpr_function
def points_of_four(KIND):
    """A point of the grid has four values, otherwise eight."""
    return FACTS.value[KIND].grid.size == 4


@triton.constexpr_function
def number_bits(KIND):
    """What of a point's number lies apart: (plane, first bit, bits, bits from one to the next); plane "": nothing."""
    more = FACTS.value[KIND].grid.more
    return ("", 0, 0, 0) if more is None else (more.plane, more.at, more.bits, more.step)


@triton.constexpr_function
def signs_plane(KIND):
    """Where an eight's values have signs of their own; "": they have one together."""
    signs = FACTS.value[KIND].grid.signs
    return "" if signs is None else signs.plane


@triton.constexpr_function
def has_even_signs(KIND):
    """Every eighth sign is what makes the number of minus signs even."""
    return FACTS.value[KIND].grid.even


@triton.constexpr_function
def shared_sign(KIND):
    """An eight's only sign: (plane, first bit, bits from one to the next)."""
    sign = FACTS.value[KIND].grid.sign
    return sign.plane, sign.at, sign.step


@triton.constexpr_function
def sign_mask(KIND):
    """Eight codes' bits of the sign, as an int32."""
    mask = 0x11111111 << FACTS.value[KIND].grid.sign_bit
    return mask - (1 << 32) if mask >= 1 << 31 else mask


@triton.constexpr_function
def sign_bit(KIND):
    """Which bit of a code is its sign."""
    return FACTS.value[KIND].grid.sign_bit


# ---- scales ----


@triton.constexpr_function
def scale_form(KIND):
    """The name of packing.py's ScaleForm."""
    return FACTS.value[KIND].scale


@triton.constexpr_function
def scale_bytes(KIND):
    """Bytes that a group has in the plane of scales."""
    return FACTS.value[KIND].scale_bytes


@triton.constexpr_function
def has_scales(KIND):
    """There is a plane of scales."""
    return FACTS.value[KIND].scale_bytes > 0


@triton.constexpr_function
def number_at(KIND, half):
    """The bit from which on a half's number of scales of the form "odd" lies."""
    return FACTS.value[KIND].numbers[half]


@triton.constexpr_function
def number_width(KIND):
    """Bits of such a number."""
    return FACTS.value[KIND].numbers[2]


@triton.constexpr_function
def number_power(KIND):
    """What twice such a number and one is multiplied by."""
    return 2.0 ** FACTS.value[KIND].numbers[3]


@triton.constexpr_function
def has_f16_scales(KIND):
    """A weight is an f16 times a code, plus another f16: one f16 instruction rounds it once."""
    return FACTS.value[KIND].scale in ("f16", "f16_min")


@triton.constexpr_function
def has_half_scales(KIND):
    """The halves of a group have scales of their own."""
    return FACTS.value[KIND].half_scales


@triton.constexpr_function
def has_supers(KIND):
    """Scales have a scale of their own."""
    return FACTS.value[KIND].supers > 0


@triton.constexpr_function
def pairs_of_supers(KIND):
    """A superblock's d and dmin fill an int32; otherwise two superblocks' d do."""
    return FACTS.value[KIND].supers == 2


@triton.constexpr_function
def has_min(KIND):
    """Something is added to, or taken off, scale * code."""
    return FACTS.value[KIND].has_min


@triton.jit
def planes_from(packed, group, KIND: tl.constexpr):
    """A packed matrix's Planes, in words of a group each, from a group on that begins a row. Planes that the type lacks
    are the quants again: what a function returns can't hold None."""
    quants = packed.quants + group * code_bits(KIND)
    high = quants
    if packed.high is not None:
        high = packed.high + group * high_bits(KIND)
    scales = quants
    if packed.scales is not None:
        scales = packed.scales + group
    supers = quants
    if packed.supers is not None:
        supers = packed.supers + group // 8
    grid = quants
    if packed.grid is not None:
        grid = packed.grid
    return Planes(quants, high, scales, supers, grid)
