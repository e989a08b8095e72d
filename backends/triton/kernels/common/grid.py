"""Points of a grid (packing_grids.py) as codes of 4 bits and as the bytes that products take, in plain Triton.

Of 32 weights a lane reads 4 points of eight values or 8 of four from the table, which stays in the L1 cache. Beside
these loads it takes some 55 instructions for the former (4 to find a point, 2 to spread its codes, 2 for its signs, 3
to look its values up, 9 for signs that make a number even) and some 90 for the latter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common.codebook import of_nibbles
from graphrt.backends.triton.kernels.kinds import (
    has_even_signs,
    number_bits,
    points_of_four,
    shared_sign,
    sign_bit,
    sign_mask,
    signs_plane,
)


@triton.jit
def _in_plane(second, high, scales, PLANE: tl.constexpr):
    """A group's word in the plane of that name; second: the one of the quants."""
    if PLANE == "quants":
        return second
    elif PLANE == "high":
        return high.to(tl.int32)
    else:
        return scales.to(tl.int32)


@triton.jit
def signs_of(second, high, scales, KIND: tl.constexpr):
    """A group's signs: bit 4i + p is set where value i of eight p is negative. Nothing where they have one together."""
    if signs_plane(KIND) == "":
        return second
    word = _in_plane(second, high, scales, signs_plane(KIND))
    if has_even_signs(KIND):
        word = word & 0x0FFFFFFF
        odd = word ^ (word >> 16)
        odd = odd ^ (odd >> 8)
        odd = odd ^ (odd >> 4)
        word = word | (odd << 28)
    return word


@triton.jit
def point_codes(p_grid, first, second, high, scales, signs, p, KIND: tl.constexpr):
    """Codes of elements 8p to 8p + 7 of a group, bits 4i and on those of element 8p + i.

    first, second: words of the quants (second is anything where there is one); p: a number or a tensor.
    """
    PLANE: tl.constexpr = number_bits(KIND)[0]
    AT: tl.constexpr = number_bits(KIND)[1]
    BITS: tl.constexpr = number_bits(KIND)[2]
    STEP: tl.constexpr = number_bits(KIND)[3]
    number = (first >> (8 * p)) & 255
    if points_of_four(KIND):
        other = (second >> (8 * p)) & 255
        if PLANE != "":
            more = _in_plane(second, high, scales, PLANE)
            number = number | (((more >> (AT + p)) & 1) << 8)
            other = other | (((more >> (AT + 4 + p)) & 1) << 8)
        codes = tl.load(p_grid + number).to(tl.int32) | (tl.load(p_grid + other).to(tl.int32) << 16)
    else:
        if PLANE != "":
            more = _in_plane(second, high, scales, PLANE)
            number = number | (((more >> (AT + STEP * p)) & ((1 << BITS) - 1)) << 8)
        codes = tl.load(p_grid + number).to(tl.int32)
        codes = (codes | (codes << 14)) & 0x33333333
    if signs_plane(KIND) != "":
        return codes | (((signs >> p) << sign_bit(KIND)) & sign_mask(KIND))
    else:
        SIGN_PLANE: tl.constexpr = shared_sign(KIND)[0]
        SIGN_AT: tl.constexpr = shared_sign(KIND)[1]
        SIGN_STEP: tl.constexpr = shared_sign(KIND)[2]
        bit = _in_plane(second, high, scales, SIGN_PLANE) >> (SIGN_AT + SIGN_STEP * p)
        return codes | ((0 - (bit & 1)) & sign_mask(KIND))


@triton.jit
def grid_words(p_grid, first, second, high, scales, KIND: tl.constexpr, SHIFT: tl.constexpr, PTX: tl.constexpr):
    """A group's 32 values in order as the bytes of eight words. SHIFT: as codebook.of_nibbles() has it."""
    signs = signs_of(second, high, scales, KIND)
    w0, w1 = of_nibbles(point_codes(p_grid, first, second, high, scales, signs, 0, KIND), KIND, SHIFT, PTX)
    w2, w3 = of_nibbles(point_codes(p_grid, first, second, high, scales, signs, 1, KIND), KIND, SHIFT, PTX)
    w4, w5 = of_nibbles(point_codes(p_grid, first, second, high, scales, signs, 2, KIND), KIND, SHIFT, PTX)
    w6, w7 = of_nibbles(point_codes(p_grid, first, second, high, scales, signs, 3, KIND), KIND, SHIFT, PTX)
    return w0, w1, w2, w3, w4, w5, w6, w7
