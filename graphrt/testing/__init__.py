"""Conformance cases and what judges them: shared by the tests, the conformance tool and third-party backends.

A case is data: an op, its axes as a printable string, and a function that builds its node from inputs. The inputs are
a function of (case, seed, input name) alone, on every machine.
"""

from graphrt.testing.blocks import AnyArray, dequantize, quantize, random_blocks
from graphrt.testing.case import Case, Inputs, all_cases, grid, register_cases
from graphrt.testing.masks import BlockMask, CausalMask, GgmlMask, GgmlSparseMask, Hiding, LengthMask, MaskValues
from graphrt.testing.metric import nmse
from graphrt.testing.padding import Packed, generate_qkv, generate_random_padding_mask
from graphrt.testing.values import (
    Distinct,
    Given,
    Init,
    Islands,
    Normal,
    Positions,
    Rows,
    Spoiled,
    Uniform,
)

__all__ = [
    "AnyArray",
    "BlockMask",
    "Case",
    "CausalMask",
    "Distinct",
    "GgmlMask",
    "GgmlSparseMask",
    "Given",
    "Hiding",
    "Init",
    "Inputs",
    "Islands",
    "LengthMask",
    "MaskValues",
    "Normal",
    "Packed",
    "Positions",
    "Rows",
    "Spoiled",
    "Uniform",
    "all_cases",
    "dequantize",
    "generate_qkv",
    "generate_random_padding_mask",
    "grid",
    "nmse",
    "quantize",
    "random_blocks",
    "register_cases",
]
