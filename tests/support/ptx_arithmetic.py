"""What PTX instructions do to arrays: those that Gluon kernels write out (gluon_emulator.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphrt import float8
from graphrt.dtypes import dtype

E4M3 = dtype("f8_e4m3")


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]).astype(np.uint32)


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint32).view(np.float32)


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (x & 0xFFFF).astype(np.uint16).view(np.float16), (x >> 16).astype(np.uint16).view(np.float16)


def _joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return _bits(low.astype(np.float16)) | _bits(high.astype(np.float16)) << np.uint32(16)


def _pairwise(how: Callable[..., np.ndarray], *x: np.ndarray) -> np.ndarray:
    """An f16x2 instruction, computed in f64: one rounding."""
    lows, highs = zip(*(_halves(v) for v in x))
    return _joined(how(*(v.astype(np.float64) for v in lows)), how(*(v.astype(np.float64) for v in highs)))


def _single(how: Callable[..., np.ndarray], *x: np.ndarray) -> np.ndarray:
    """An f32 instruction, computed in f64: products are exact, sums nearly so."""
    return how(*(_f32(v).astype(np.float64) for v in x)).astype(np.float32).view(np.uint32)


def _codes(x: np.ndarray) -> np.ndarray:
    """The codes of e4m3 of f32 numbers, in 32 bits."""
    return float8.encode(_f32(x), E4M3).astype(np.uint32)


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    a, b, selector = np.broadcast_arrays(a, b, selector)
    source = np.stack([a, b], -1).view(np.uint8)
    which = selector[..., None] >> np.arange(0, 16, 4, dtype=np.uint32) & 0xF
    found = np.take_along_axis(source, which.astype(np.int64) & 7, -1)
    signs = np.where(found >= 0x80, 0xFF, 0).astype(np.uint8)
    return np.where(which < 8, found, signs).view(np.uint32)[..., 0]


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bit by bit: the bit of the table that a, b and c number, a's being worth 4."""
    found = np.zeros_like(a)
    for i in range(8):
        chosen = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        found |= np.where(table >> np.uint32(i) & 1, chosen, np.uint32(0))
    return found


_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "sub.f16x2": lambda a, b: _pairwise(np.subtract, a, b),
    "mul.f16x2": lambda a, b: _pairwise(np.multiply, a, b),
    "mul.rn.f16x2": lambda a, b: _pairwise(np.multiply, a, b),
    "fma.rn.f16x2": lambda a, b, c: _pairwise(lambda x, y, z: x * y + z, a, b, c),
    "cvt.rn.f16x2.e4m3x2": lambda a: _joined(*(float8.decode((a >> n & 0xFF).astype(np.uint8), E4M3) for n in (0, 8))),
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: _codes(b) | _codes(a) << np.uint32(8),
    "cvt.f32.f16": lambda a: _halves(a)[0].astype(np.float32).view(np.uint32),
    "div.rn.f32": lambda a, b: np.divide(_f32(a), _f32(b)).view(np.uint32),
    "mul.rn.f32": lambda a, b: _single(np.multiply, a, b),
    "fma.rn.f32": lambda a, b, c: _single(lambda x, y, z: x * y + z, a, b, c),
    "cvt.rn.f16x2.f32": lambda a, b: _joined(_f32(b), _f32(a)),
}


def run_ptx(asm: str, kinds: Sequence[Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What instructions leave in $0 .. of these types, for arrays in the operands after them. Registers: 32 bits."""
    registers = {f"${len(kinds) + i}": _bits(x) for i, x in enumerate(inputs)}
    shape = inputs[0].shape

    def value(name: str) -> np.ndarray:
        if name.startswith("{"):
            low, high = (registers[part.strip()] for part in name.strip("{}").split(","))
            return low | high << np.uint32(16)
        return registers[name] if name in registers else np.full(shape, int(name, 0), np.uint32)

    for line in (part.strip() for part in asm.strip().strip("{}").replace("\n", " ").split(";")):
        if not line or line.startswith("."):
            continue
        name, rest = line.split(None, 1)
        target, *sources = [x.strip() for x in re.split(r",(?![^{]*\})", rest)]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            found = _INSTRUCTIONS[name](*(value(s) for s in sources))
        if target.startswith("{"):
            for part, bits in zip(target.strip("{}").split(","), (found & 0xFFFF, found >> np.uint32(16))):
                registers[part.strip()] = bits
        else:
            registers[target] = found
    results = [registers[f"${i}"] for i in range(len(kinds))]
    return [
        r.astype(np.uint16).view(np.float16) if k is np.float16 else r.astype(np.uint32).view(k)
        for r, k in zip(results, kinds)
    ]
