"""Blocks of 32 values in ggml's quantized types that caches have, as kernels of both dialects ask for them.

ggml-common.h has the layouts: d as an f16, then a minimum as one or none, high bits of the codes, then the codes.
"""

from __future__ import annotations

import triton

from graphrt.backends.triton.kernels.common.float8 import is_float8
from graphrt.backends.triton.kernels.kinds import FACTS


@triton.constexpr_function
def is_quantized(KIND):
    return KIND in FACTS.value


@triton.constexpr_function
def words_a_block(KIND):
    """Words of values in a block of 32; of floats of 8 bits, which have no blocks, in 32 of them."""
    return 8 if is_float8(KIND) else FACTS.value[KIND].bits


@triton.constexpr_function
def halves_a_block(KIND):
    """Size of a block in units of 2 bytes."""
    return FACTS.value[KIND].block_bytes // 2


@triton.constexpr_function
def values_at(KIND):
    """Where a block's values start, in units of 2 bytes."""
    return FACTS.value[KIND].codes_at // 2
