"""Planted bugs of decoding quantized blocks, for every kernel that reads them: name, what is wrong, types, pieces."""

from __future__ import annotations

import numpy as np

from graphrt.tools.conformance.mutants.memory import Kernel
from graphrt.tools.conformance.mutants.pieces import Pieces

_NIBBLES = ("q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")

BLOCK_BUGS: list[tuple[str, str, tuple[str, ...], Pieces]] = [
    ("nibble_order", "low and high nibbles alternate", _NIBBLES,
     {"nibbles": lambda k, packed: np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)}),
    ("next_scale", "a block is scaled by the next one's scale", (*_NIBBLES, "q8_0"),
     {"block_scale": lambda k, raw: Kernel.block_scale(k, np.roll(raw, -1, axis=-2))}),
    ("min_ignored", "a block's minimum is not added", ("q4_1", "q5_1"),
     {"block_min": lambda k, raw: np.zeros((*raw.shape[:-1], 1), np.float32)}),
    ("fifth_bit_lost", "the fifth bit of q5 is dropped", ("q5_0", "q5_1"),
     {"fifth_bits": lambda k, packed: np.zeros((*packed.shape[:-1], 32), np.uint8)}),
    ("fifth_bit_order", "the fifth bits are taken from the most significant down", ("q5_0", "q5_1"),
     {"fifth_bits": lambda k, packed: np.unpackbits(packed, axis=-1)}),
    ("zero_point", "the zero of a code is off by one", ("q4_0", "q5_0"),
     {"zero_point": lambda k, dt: Kernel.zero_point(k, dt) - np.float32(1)}),
]  # fmt: skip
