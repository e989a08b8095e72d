"""What packing.py's Packing says of a packed type, as kernels ask for it while they are compiled."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.packing import PACKED_TYPES, packing_of

#: By type. A constexpr, because Triton counts those into the keys of the kernels that it keeps on disk.
FACTS = tl.constexpr(
    {
        kind: (p.bits, p.high_bits, p.offset, p.supers, p.has_min, p.codebook)
        for kind, p in ((kind, packing_of(kind)) for kind in PACKED_TYPES)
    }
)


@triton.constexpr_function
def code_bits(KIND):
    """Bits of a code in the quants; also the int32 words of a group's."""
    return FACTS.value[KIND][0]


@triton.constexpr_function
def high_bits(KIND):
    """Bits of a code in the plane of high bits."""
    return FACTS.value[KIND][1]


@triton.constexpr_function
def code_offset(KIND):
    """What codes are more than the value that the scale multiplies."""
    return FACTS.value[KIND][2]


@triton.constexpr_function
def has_supers(KIND):
    """Scales have a scale of their own."""
    return FACTS.value[KIND][3] > 0


@triton.constexpr_function
def pairs_of_supers(KIND):
    """A superblock's d and dmin fill an int32; otherwise two superblocks' d do."""
    return FACTS.value[KIND][3] == 2


@triton.constexpr_function
def has_min(KIND):
    """Something is added to, or taken off, scale * code."""
    return FACTS.value[KIND][4]


@triton.constexpr_function
def has_codebook(KIND):
    return FACTS.value[KIND][5] is not None


@triton.constexpr_function
def codebook_word(KIND, i, ADDED=0):
    """Values 4i to 4i + 3 of a codebook, each with ADDED, as the bytes of a number of 32 bits."""
    return sum(((FACTS.value[KIND][5][4 * i + j] + ADDED) & 255) << (8 * j) for j in range(4))


@triton.jit
def planes_from(p_quants, p_high, p_scales, p_supers, group, KIND: tl.constexpr):
    """A packed matrix's planes, in words of a group each, from a group on that begins a row.

    None for planes that the type lacks; what is returned for these is the scales again.
    """
    scales = p_scales + group
    high = scales
    if p_high is not None:
        high = p_high + group * high_bits(KIND)
    supers = scales
    if p_supers is not None:
        supers = p_supers + group // 8
    return p_quants + group * code_bits(KIND), high, scales, supers
