"""Blocks of 32 values in ggml's quantized types that caches have, as kernels of both dialects ask for them.

ggml-common.h has the layouts: bytes d[2], then m[2] for the _1 types, qh[4] for q5, then the values.
"""

from __future__ import annotations

import triton


@triton.constexpr_function
def is_quantized(KIND):
    return KIND != "f32" and KIND != "f16" and KIND != "bf16"


@triton.constexpr_function
def words_a_block(KIND):
    """Words of values in a block of 32."""
    return 8 if KIND == "q8_0" else 4


@triton.constexpr_function
def halves_a_block(KIND):
    """Size of a block in units of 2 bytes."""
    if KIND == "q8_0":
        return 17
    elif KIND == "q4_1":
        return 10
    elif KIND == "q5_0":
        return 11
    elif KIND == "q5_1":
        return 12
    else:  # q4_0, iq4_nl
        return 9


@triton.constexpr_function
def values_at(KIND):
    """Where a block's values start, in units of 2 bytes."""
    if KIND == "q4_1":
        return 2
    elif KIND == "q5_0":
        return 3
    elif KIND == "q5_1":
        return 4
    else:
        return 1
