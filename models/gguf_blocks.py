"""What lies inside the blocks of each GGML type, as far as byte order and damage are concerned.

Two uses: turn big-endian data into the machine's order, and find NaN or infinity in floats and block scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphrt.dtypes import DType

Bytes = NDArray[np.uint8]

#: Fields wider than a byte, and scales: type name -> (offset in the block, kind, count). Bytes not listed are bytes.
_FIELDS: dict[str, tuple[tuple[int, str, int], ...]] = {
    "f32": ((0, "f32", 1),),
    "f16": ((0, "f16", 1),),
    "bf16": ((0, "bf16", 1),),
    "f64": ((0, "f64", 1),),
    "i8": (),
    "i16": ((0, "i16", 1),),
    "i32": ((0, "i32", 1),),
    "i64": ((0, "i64", 1),),
    "q1_0": ((0, "f16", 1),),
    "q2_0": ((0, "f16", 1),),
    "q4_0": ((0, "f16", 1),),
    "q4_1": ((0, "f16", 2),),
    "q5_0": ((0, "f16", 1),),
    "q5_1": ((0, "f16", 2),),
    "q8_0": ((0, "f16", 1),),
    "q8_1": ((0, "f16", 2),),
    "q2_K": ((80, "f16", 2),),
    "q3_K": ((108, "f16", 1),),
    "q4_K": ((0, "f16", 2),),
    "q5_K": ((0, "f16", 2),),
    "q6_K": ((208, "f16", 1),),
    "q8_K": ((0, "f32", 1), (260, "i16", 16)),
    "iq1_s": ((0, "f16", 1), (34, "i16", 8)),
    "iq1_m": (),
    "iq2_xxs": ((0, "f16", 1),),
    "iq2_xs": ((0, "f16", 1), (2, "i16", 32)),
    "iq2_s": ((0, "f16", 1),),
    "iq3_xxs": ((0, "f16", 1),),
    "iq3_s": ((0, "f16", 1),),
    "iq4_nl": ((0, "f16", 1),),
    "iq4_xs": ((0, "f16", 1), (2, "i16", 1)),
    "tq1_0": ((52, "f16", 1),),
    "tq2_0": ((64, "f16", 1),),
    "mxfp4": ((0, "e8m0", 1),),
    "nvfp4": (),  # four UE4M3 scales, of which every byte is a number
}

#: ggml reads these types' bit fields at another width than it declares them. A big-endian file may hold them either
#: way, and nothing in the file says which.
_AMBIGUOUS = ("q5_0", "q5_1", "iq1_m", "iq2_xxs", "iq3_xxs")

_WIDTH = {"e8m0": 1, "f16": 2, "bf16": 2, "i16": 2, "f32": 4, "i32": 4, "f64": 8, "i64": 8}

#: Float kinds: unsigned type of that width, exponent bits, mantissa bits. All exponent bits set: Inf or NaN.
_FLOATS: dict[str, tuple[str, int, int]] = {
    "f16": ("u2", 0x7C00, 0x03FF),
    "bf16": ("u2", 0x7F80, 0x007F),
    "f32": ("u4", 0x7F800000, 0x007FFFFF),
    "f64": ("u8", 0x7FF0000000000000, 0x000FFFFFFFFFFFFF),
    "e8m0": ("u1", 0xFF, 0xFF),  # an exponent alone; 0xff is its NaN
}

_CHUNK_BYTES = 4 << 20  # of data looked at together, to keep the temporaries small


def can_swap(dtype: DType) -> bool:
    """Whether data of that type can be turned from one byte order to the other."""
    return dtype.name in _FIELDS and dtype.name not in _AMBIGUOUS


def swapped(data: Bytes, dtype: DType) -> Bytes:
    """A copy of whole blocks (1-D, bytes) in the other byte order. The type must pass can_swap."""
    out = data.copy()
    blocks = out.reshape(-1, dtype.type_size)
    for offset, kind, count in _FIELDS[dtype.name]:
        width = _WIDTH[kind]
        for start in range(offset, offset + width * count, width):
            blocks[:, start : start + width] = blocks[:, start : start + width][:, ::-1].copy()
    return out


def first_bad_block(data: Bytes, dtype: DType) -> tuple[int, str] | None:
    """The first block with a NaN or an infinity in a float or a scale: (its index, "NaN" or "Inf"), or None.

    data: whole blocks, 1-D, in the machine's byte order.
    """
    blocks = data.reshape(-1, dtype.type_size)
    step = max(1, _CHUNK_BYTES // dtype.type_size)
    for start in range(0, len(blocks), step):
        found = _bad_in_chunk(blocks[start : start + step], dtype)
        if found is not None:
            return start + found[0], found[1]
    return None


def _bad_in_chunk(blocks: Bytes, dtype: DType) -> tuple[int, str] | None:
    if dtype.name == "iq1_m":
        return _first_bad(_iq1_m_scales(blocks), "f16")
    bad = []
    for offset, kind, count in _FIELDS[dtype.name]:
        if kind in _FLOATS:
            end = offset + _WIDTH[kind] * count
            found = _first_bad(np.ascontiguousarray(blocks[:, offset:end]).view(_FLOATS[kind][0]), kind)
            bad += [found] if found else []
    return min(bad, default=None)


def _first_bad(bits: NDArray[Any], kind: str) -> tuple[int, str] | None:
    """bits: [n_blocks, count] raw floats of that kind, as unsigned integers."""
    _, exponent, mantissa = _FLOATS[kind]
    special = (bits & exponent) == exponent
    where = np.flatnonzero(special.any(axis=1))
    if not len(where):
        return None
    block = int(where[0])
    return block, "NaN" if bool((special[block] & ((bits[block] & mantissa) != 0)).any()) else "Inf"


def _iq1_m_scales(blocks: Bytes) -> NDArray[Any]:
    """iq1_m keeps its f16 scale in the top nibbles of four 16-bit words: [n_blocks, 1]."""
    words = np.ascontiguousarray(blocks[:, 48:56]).view("<u2")
    scale = (words[:, 0] >> 12) | ((words[:, 1] >> 8) & 0x00F0) | ((words[:, 2] >> 4) & 0x0F00) | (words[:, 3] & 0xF000)
    return scale[:, None]
