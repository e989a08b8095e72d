"""GGUF's quantized types: one row of features and one decoder for each.

    value = (code - zero) * scale + offset

All kernels that read quantized weights or caches are made from this table: integer products (`integer.py`) and f32
values (`blocks.py`). Layouts of the formats: ggml-common.h.
"""

from __future__ import annotations

from graphrt.backends.cpu.fast import codes_grid as grid
from graphrt.backends.cpu.fast import codes_k as k
from graphrt.backends.cpu.fast import codes_small as small
from graphrt.backends.cpu.fast.code_type import (
    CodeType,
    eights_of_32,
    halves_of_16,
    k_eights,
    k_fours,
    k_natural,
    k_pairs,
    k_twos,
)

#: By ggml's name: values and bytes of a block, values with one scale, the order of codes, and how they are read.
CODE_TYPES: dict[str, CodeType] = {
    t.name: t
    for t in (
        CodeType("q4_0", 32, 18, 32, eights_of_32, small.q4_0, zero=8, at_once=8, rows_at_once=16),
        CodeType("q4_1", 32, 20, 32, eights_of_32, small.q4_1, offsets=True, at_once=8, rows_at_once=16),
        CodeType("q5_0", 32, 22, 32, eights_of_32, small.q5_0, zero=16, at_once=8, rows_at_once=16),
        CodeType("q5_1", 32, 24, 32, eights_of_32, small.q5_1, offsets=True, at_once=8, rows_at_once=16),
        CodeType("q8_0", 32, 34, 32, eights_of_32, small.q8_0, signed=True, at_once=8, rows_at_once=16),
        CodeType("iq4_nl", 32, 18, 32, eights_of_32, small.iq4_nl, signed=True, at_once=8, rows_at_once=16),
        CodeType("mxfp4", 32, 17, 32, eights_of_32, small.mxfp4, zero=small.FP4_ZERO, at_once=8, rows_at_once=16),
        CodeType("q2_K", 256, 84, 16, k_fours, k.q2_k, offsets=True, largest=15 * 3),
        CodeType("q3_K", 256, 110, 16, k_fours, k.q3_k, zero=4, largest=32 * 4),
        CodeType("q4_K", 256, 144, 32, k_eights, k.q4_k, offsets=True, largest=63 * 15, rows_at_once=2),
        CodeType("q5_K", 256, 176, 32, k_eights, k.q5_k, offsets=True, largest=63 * 31, rows_at_once=2),
        CodeType("q6_K", 256, 210, 16, k_fours, k.q6_k, zero=32, largest=128 * 32),
        CodeType("iq4_xs", 256, 136, 32, k_eights, k.iq4_xs, signed=True, largest=32 * 127),
        CodeType("nvfp4", 64, 36, 16, halves_of_16, small.nvfp4, zero=small.FP4_ZERO, at_once=2),
        CodeType("tq1_0", 256, 54, 32, k.tq1_layout, k.tq1_0, zero=1, at_once=2),
        CodeType("tq2_0", 256, 66, 32, k_eights, k.tq2_0, zero=1),
        CodeType("iq2_xxs", 256, 66, 32, k_eights, grid.iq2_xxs, signed=True),
        CodeType("iq2_xs", 256, 74, 16, k_pairs, grid.iq2_xs, signed=True),
        CodeType("iq2_s", 256, 82, 16, k_natural, grid.iq2_s, signed=True),
        CodeType("iq3_xxs", 256, 98, 32, k_eights, grid.iq3_xxs, signed=True),
        CodeType("iq3_s", 256, 110, 32, k_natural, grid.iq3_s, signed=True, largest=31 * 15),
        CodeType("iq1_s", 256, 50, 32, k_twos, grid.iq1_s, offsets=True),
        CodeType("iq1_m", 256, 56, 16, k_twos, grid.iq1_m, zero=9),
    )
}
