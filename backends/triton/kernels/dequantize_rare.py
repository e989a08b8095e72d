"""Quantized types that are not worth a packed form, as numbers: in torch operations on raw blocks.

Each type has a function from raw blocks, uint8 [n, bytes], to f32 values [n, ...] in order, in the order of operations
of gguf's dequantization, hence with its roundings. Grids and codebooks are gguf's own, copied to the device once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from graphrt.backends.triton.packing import split_bits
from graphrt.dtypes import dtype

#: Elements dequantized at a time: what bounds the temporary memory (some 30 bytes an element).
_SLICE = 1 << 22

#: Tables of a type on a device, by name; see prepare_rare.
Tables = dict[str, torch.Tensor]


def dequantize_rare(raw: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    """Raw blocks, uint8 [rows, row bytes], to out: f32 or f16 of rows * k elements, contiguous.

    Fit for a captured graph once the type's tables are on the device: the first call, or prepare_rare(), puts them
    there. Raises KeyError for a type that isn't in RARE_TYPES.
    """
    values_of, tables = _VALUES[kind], prepare_rare(kind, str(raw.device))
    rows, size = raw.shape[0], dtype(kind).type_size
    out = out.view(rows, raw.shape[1] // size * dtype(kind).block_size)
    step = max(1, _SLICE // out.shape[1])
    for first in range(0, rows, step):
        target = out[first : first + step]
        target.copy_(values_of(raw[first : first + step].reshape(-1, size), tables).reshape(target.shape))


@cache
def prepare_rare(kind: str, device: str) -> Tables:
    """A type's tables on a device. grid: f32 [n, 4 or 8]; signs: f32 [128, 8], of 8 values by 7 bits; codes, scales:

    f32 by number; powers: uint8 powers of 3."""
    quants = gguf.quants
    # Each type's class has what the type needs: a grid, or a table of values.
    own = getattr(quants, kind.upper())
    own.init_grid()
    made: dict[str, npt.NDArray[Any]] = {"powers": np.array([1, 3, 9, 27, 81], np.uint8)}
    if own.grid is not None:
        made["grid"] = own.grid[0, 0]
    if kind in ("iq2_xxs", "iq2_xs", "iq3_xxs"):
        bits = np.unpackbits(np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)[:, None], axis=1, bitorder="little")
        made["signs"] = 1 - 2 * bits.astype(np.float32)
    if kind == "nvfp4":
        made["codes"] = np.array(own.kvalues, np.float32)
        made["scales"] = own.ue4m3_to_fp32(np.arange(256, dtype=np.uint8)).astype(np.float32)
    return {name: torch.from_numpy(table.copy()).to(device) for name, table in made.items()}


def _f16(data: torch.Tensor) -> torch.Tensor:
    """Bytes [n, 2 * m] as f32 [n, m]."""
    return _compact(data).view(torch.float16).float()


def _words(data: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Little-endian bytes [n, m] as int32 words of int16 or int32, sign-extended: mask what is shifted to the right."""
    return _compact(data).view(kind).to(torch.int32)


def _compact(data: torch.Tensor) -> torch.Tensor:
    """A copy, hence aligned, which a span of one row that counts as contiguous need not be."""
    return data.clone(memory_format=torch.contiguous_format)


def _fields(words: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """The lowest `count` numbers of `width` bits in each int32 [...] -> [..., count]."""
    shifts = torch.arange(0, width * count, width, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts) & ((1 << width) - 1)


def _picked(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index.to(torch.int64)]


def _signs(data: torch.Tensor) -> torch.Tensor:
    """Bytes [n, m] as f32 [n, m, 8]: -1 where the bit is set, else 1."""
    return 1 - 2 * split_bits(data, 1, 1).view(*data.shape, 8).float()


def _scaled(d: torch.Tensor, values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """d [n, s] times values with signs, both [n, ..., 4 or 8] of s equal parts in order."""
    n, parts = d.shape
    return d[..., None] * values.reshape(n, parts, -1) * signs.reshape(n, parts, -1)


def _iq2_xxs(blocks: torch.Tensor, tables: Tables) -> torch.Tensor:
    index, more = blocks[:, 2:].reshape(-1, 8, 2, 4).unbind(2)
    more = _words(more, torch.int32)[..., 0]
    d = _f16(blocks[:, :2]) * (0.5 + (more >> 28 & 0xF).float()) * 0.25
    return _scaled(d, _picked(tables["grid"], index), _picked(tables["signs"], _fields(more, 7, 4)))


def _iq2_xs(blocks: torch.Tensor, tables: Tables) -> torch.Tensor:
    words = _words(blocks[:, 2:66], torch.int16)
    d = _f16(blocks[:, :2]) * (0.5 + split_bits(blocks[:, 66:], 4, 1).float()) * 0.25
    return _scaled(d, _picked(tables["grid"], words & 511), _picked(tables["signs"], words >> 9 & 127))


def _iq2_s(blocks: torch.Tensor, tables: Tables) -> torch.Tensor:
    index = blocks[:, 2:34].int() | split_bits(blocks[:, 66:74], 2, 1).int() << 8
    d = _f16(blocks[:, :2]) * (0.5 + split_bits(blocks[:, 74:], 4, 1).float()) * 0.25
    return _scaled(d, _picked(tables["grid"], index), _signs(blocks[:, 34:66]))


def _iq3_xxs(blocks: torch.Tensor, tables: Tables) -> torch.Tensor:
    more = _words(blocks[:, 66:], torch.int32)
    d = _f16(blocks[:, :2]) * (0.5 + (more >> 28 & 0xF).float()) * 0.5
    return _scaled(d, _picked(tables["grid"], blocks[:, 2:66]), _picked(tables["signs"], _fields(more, 7, 4)))


def _iq3_s(blocks: torch.Tensor, tables: Tables) -> torch.Tensor:
    index = blocks[:, 2:66].int() | split_bits(blocks[:, 66:74], 1, 1).int() << 8
    d = _f16(blocks[:, :2]) * (1 + 2 * split_bits(blocks[:, 106:], 4, 1)).float()
    return _scaled(d, _picked(tables["grid"], index), _signs(blocks[:, 74:106]))


def _iq1_s(blocks: torch.Tensor, tables: Tables) -> torch.Tensor:
    words = _words(blocks[:, 34:], torch.int16)
    index = blocks[:, 2:34].int() | _fields(words, 3, 4).flatten(1) << 8
    d = _f16(blocks[:, :2]) * (2 * (words >> 12 & 7) + 1).float()
    delta = 0.125 - 0.25 * (words >> 15 & 1).float()
    return d[..., None] * (_picked(tables["grid"], index).reshape(-1, 8, 32) + delta[..., None])


def _iq1_m(blocks: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Its f16 scale is spread over the high nibbles of four 16-bit words."""
    words = _words(blocks[:, 48:], torch.int16)
    nibbles = words >> 12 & 0xF
    bits = nibbles[:, 0] | nibbles[:, 1] << 4 | nibbles[:, 2] << 8 | nibbles[:, 3] << 12
    d = bits.to(torch.int16).view(torch.float16).float()[:, None] * (2 * _fields(words, 3, 4).flatten(1) + 1).float()
    more = split_bits(blocks[:, 32:48], 4, 1).int()
    grid = _picked(tables["grid"], blocks[:, :32].int() | (more & 7) << 8)
    delta = 0.125 - 0.25 * (more >> 3).float()
    return d[..., None] * (grid + delta[..., None]).view(-1, 16, 16)


def _tq1_0(blocks: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Five ternary digits a byte: multiplied by a power of 3 modulo 256, the next one is on top."""
    powers = tables["powers"][:, None]
    parts = [blocks[:, None, :32] * powers, blocks[:, None, 32:48] * powers, blocks[:, None, 48:52] * powers[:4]]
    digits = torch.cat([part.flatten(1) for part in parts], 1).int() * 3 >> 8
    return _f16(blocks[:, 52:]) * (digits - 1).float()


def _tq2_0(blocks: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Three values, of 2 bits; 3 stands for 2, as gguf has it."""
    return _f16(blocks[:, 64:]) * (split_bits(blocks[:, :64], 2, 32).float() - 1)


def _nvfp4(blocks: torch.Tensor, tables: Tables) -> torch.Tensor:
    codes = split_bits(blocks[:, 4:], 4, 8).view(-1, 4, 16)
    return _picked(tables["scales"], blocks[:, :4])[..., None] * _picked(tables["codes"], codes)


_VALUES: dict[str, Callable[[torch.Tensor, Tables], torch.Tensor]] = {
    "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s, "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "iq1_s": _iq1_s,
    "iq1_m": _iq1_m, "tq1_0": _tq1_0, "tq2_0": _tq2_0, "nvfp4": _nvfp4,
}  # fmt: skip

#: Names of the types that dequantize_rare takes: those that this version of gguf knows.
RARE_TYPES = tuple(kind for kind in _VALUES if hasattr(gguf.quants, kind.upper()))
