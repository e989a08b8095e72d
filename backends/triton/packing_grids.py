"""Types whose codes are points of a grid: 8 or 4 values by a number, and signs. Their grids, and their bits as planes.

A grid becomes a table of codes, 16 bits a point, so that it takes few lines of the L1 cache: of points of 4 values code
i lies in bits 4i to 4i + 2; of points of 8 in bits 4i and 4i + 1, code 4 + i in the two bits above. With a sign a code
has 4 bits, which a codebook turns into values. Grids are those of the package gguf.

A group's planes hold, of its eights p of elements:
quants: byte p of the first word: the low 8 bits of the number of eight p's point, or of its first point of 4 values;
  of the second one's in the second word. Otherwise that has signs, in its bit 4i + p the one of value i of eight p.
high, scales: further bits of numbers, signs that are not in the quants, scales.
Where an eight has an even number of minus signs, the last one is not stored: bits from 28 on hold something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import gguf
import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Field:
    """Bits of a group: `bits` for each eight of elements, from bit `at` + `step` * p on, in the second word of the
    quants, in `high` or in `scales`."""

    plane: str
    at: int = 0
    bits: int = 1
    step: int = 1


@dataclass(frozen=True)
class Grid:
    """Codes as points. values: what gguf's points consist of, in the order of codes; size: values of a point.

    more: further bits of numbers of points, for points of 4 values first of all first ones. signs: where they lie, with
    `even` less every eighth; None: `sign` has one for all values of an eight.
    """

    values: tuple[int, ...]
    size: int = 8
    more: Field | None = None
    signs: Field | None = None
    even: bool = False
    sign: Field | None = None

    @property
    def sign_bit(self) -> int:
        """Which bit of a code is its sign."""
        return (len(self.values) - 1).bit_length()


@cache
def grid_table(kind: str, grid: Grid, device: str) -> torch.Tensor:
    """A point's codes by its number: uint16."""
    own = getattr(gguf.quants, kind.upper())
    own.init_grid()
    codes = np.searchsorted(grid.values, own.grid[0, 0]).astype(np.int64)
    at = np.arange(grid.size)
    table = (codes << (4 * (at % 4) + 2 * (at // 4))).sum(1)
    return torch.from_numpy(table.astype(np.uint16)).to(device)


_Bits = npt.NDArray[np.int64]


def _bytes(first: int, size: int) -> _Bits:
    """Bits of the 8 groups of a block, [8, ...], of so many bytes each from byte `first` of it on."""
    return (8 * first + np.arange(64 * size)).reshape(8, -1)


def _signs(bits: _Bits, even: bool = False) -> _Bits:
    """Signs [8, 28 or 32] of eights one after the other as they lie packed."""
    return bits.reshape(8, 4, 7 if even else 8).transpose(0, 2, 1).reshape(8, -1)


def _none(count: int) -> _Bits:
    """Bits that are nowhere in a block: zeros."""
    return np.full((8, count), -1, np.int64)


def _join(*parts: _Bits) -> _Bits:
    return np.concatenate(parts, 1)


def _iq2_xxs() -> dict[str, _Bits]:
    both = _bytes(2, 8)
    return {"quants": both[:, :32], "scales": _join(_signs(both[:, 32:60], True), both[:, 60:])}


def _iq2_xs() -> dict[str, _Bits]:
    number = _bytes(2, 8).reshape(8, 4, 16)
    low, ninth, signs = number[:, :, :8], number[:, :, 8], number[:, :, 9:]
    return {"quants": _join(low.reshape(8, 32), _signs(signs, True), ninth), "scales": _bytes(66, 1)}


def _iq2_s() -> dict[str, _Bits]:
    return {"quants": _join(_bytes(2, 4), _signs(_bytes(34, 4))), "scales": _join(_bytes(74, 1), _bytes(66, 1))}


def _firsts(bits: _Bits, width: int) -> _Bits:
    """Numbers of `width` bits of 8 points of 4 values: those of all eights' first points, then the others."""
    return bits.reshape(8, 4, 2, width).transpose(0, 2, 1, 3).reshape(8, -1)


def _iq3_xxs() -> dict[str, _Bits]:
    more = _bytes(66, 4)
    return {"quants": _firsts(_bytes(2, 8), 8), "scales": _join(_signs(more[:, :28], True), more[:, 28:])}


def _iq3_s() -> dict[str, _Bits]:
    nibbles = (8 * 106 + np.arange(32)).reshape(8, 4)
    scales = _join(nibbles, _none(4), _firsts(_bytes(66, 1), 1))
    return {"quants": _firsts(_bytes(2, 8), 8), "high": _signs(_bytes(74, 4)), "scales": scales}


def _iq1_s() -> dict[str, _Bits]:
    return {"quants": _bytes(2, 4), "scales": _bytes(34, 2)}


def _iq1_m() -> dict[str, _Bits]:
    """A block's f16 is the high nibbles of the four words that scales are in."""
    words = (8 * 48 + np.arange(64)).reshape(4, 16)
    scales = _join(words[:, :12].reshape(8, 6), _none(2))
    return {"quants": _bytes(0, 4), "high": _bytes(32, 2), "scales": scales, "supers": words[:, 12:]}


_ORDERS: dict[str, Callable[[], dict[str, _Bits]]] = {
    "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s, "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "iq1_s": _iq1_s,
    "iq1_m": _iq1_m,
}  # fmt: skip


@cache
def bit_orders(kind: str, device: str) -> dict[str, torch.Tensor]:
    """Of each plane the number of the bit in a raw block that each of its bits is, in order; the block's bits' number
    for one that it lacks. Supers are the first 16 bits but where they are said to be others."""
    orders = {"supers": np.arange(16)} | _ORDERS[kind]()
    nothing = 8 * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][1]
    named = {name: np.where(order < 0, nothing, order).reshape(-1) for name, order in orders.items()}
    return {name: torch.from_numpy(order.astype(np.int64)).to(device) for name, order in named.items()}
