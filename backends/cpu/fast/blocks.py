"""Weights and caches of any type as f32: one reader for each, for kernels that compute in floats.

A decoder reads one block at a byte address and returns its values as groups. A group is one or more vectors of 16
consecutive values that share a scale and an offset: value = q * scale + offset. Kernels that use a weight once may
keep the scale outside their sum; all others ask for the values (`Group.values`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphrt.backends.cpu.fast.code_type import CodeType, blend
from graphrt.backends.cpu.fast.codes import CODE_TYPES
from graphrt.backends.cpu.fast.ir import F16, F32, I8, I16, I32, LANES, Fn, Val
from graphrt.dtypes import FLOATS8


@dataclass(frozen=True)
class Group:
    """`values = q * scale + offset`, each q 16 consecutive f32; scale and offset: 16 equal lanes, or None (1 and 0)."""

    q: list[Val]
    scale: Val | None = None
    offset: Val | None = None

    def values(self, f: Fn) -> list[Val]:
        if self.scale is None:
            return self.q
        if self.offset is None:
            return [q * self.scale for q in self.q]
        return [f.fma(q, self.scale, self.offset) for q in self.q]


@dataclass(frozen=True)
class BlockType:
    """One storage type: `size` values in `bytes` bytes, and how to read a block of it."""

    name: str
    size: int
    bytes: int
    decode: Callable[[Fn, Val], list[Group]]

    def element(self, f: Fn, address: Val) -> Val:
        """One value of a plain type as f32."""
        return plain_load(f, address, self.name, 0)

    @property
    def is_plain(self) -> bool:
        return self.name in _PLAIN_BYTES

    @property
    def value_bytes(self) -> int:
        """Bytes of one value of a plain type."""
        return self.bytes // self.size

    def vectors(self, f: Fn, address: Val) -> Iterator[tuple[int, Val]]:
        """(index of the first value, 16 values) over one block."""
        at = 0
        for group in self.decode(f, address):
            for v in group.values(f):
                yield at, v
                at += LANES


# plain types

#: Bytes of a value of each plain type.
_PLAIN_BYTES = {"f32": 4, "f16": 2, "bf16": 2, **dict.fromkeys(FLOATS8, 1)}


def _float8(f: Fn, codes: Val, name: str) -> Val:
    """Codes of a float of 8 bits as f32: an f16 of the same exponent and mantissa bits, times the biases' difference.
    Exact, small numbers too."""
    kind, codes = FLOATS8[name], codes.zext(I16)
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << (10 - kind.mantissa))
    x = bits.as_bits(F16).to(F32) * 2.0 ** (15 - kind.bias)
    return f.select((codes & 0x7F).eq(kind.nan), math.nan, x)


def plain_load(f: Fn, p: Val, name: str, n: int) -> Val:
    """n values of a plain type as f32; n = 0 for one as a scalar."""
    if name == "bf16":
        return (f.load(p, I16, n).zext(I32) << 16).as_bits(F32)
    if name in FLOATS8:
        return _float8(f, f.load(p, I8, n), name)
    return f.load(p, F32 if name == "f32" else F16, n).to(F32)


def _plain(name: str, width: int) -> BlockType:
    """Plain rows are read in pieces of 64 values; the kernel takes what is left one by one."""

    def decode(f: Fn, p: Val) -> list[Group]:
        return [Group([plain_load(f, p + i * width, name, LANES)]) for i in range(0, 64, LANES)]

    return BlockType(name, 64, 64 * width, decode)


# quantized types


def _from_codes(t: CodeType) -> BlockType:
    """A block as groups in the order of its values, made from its codes."""
    where = {value: (c, lane) for c, chunk in enumerate(t.layout(1)) for lane, value in enumerate(chunk)}

    def sixteen(codes: list[Val], first: int) -> Val:
        places = [where[first + i] for i in range(LANES)]
        found = {c: codes[c].shuffle([lane if at == c else 0 for at, lane in places]) for c, _ in places}
        bytes_ = blend([found[c] for c, _ in places])
        return ((bytes_.sext(I32) if t.signed else bytes_.zext(I32)) - t.zero).to(F32)

    def decode(f: Fn, p: Val) -> list[Group]:
        decoded = t.decode(f, p, 1)
        groups = []
        for run, first in enumerate(range(0, t.size, t.sub)):
            q = [sixteen(decoded.chunks, at) for at in range(first, first + t.sub, LANES)]
            offset = decoded.offsets.lane(run) if decoded.offsets is not None else None
            groups.append(Group(q, decoded.scales.lane(run), offset))
        return groups

    return BlockType(t.name, t.size, t.bytes, decode)


#: Every type that the fast kernels read, by ggml's name.
TYPES: dict[str, BlockType] = {
    **{name: _plain(name, width) for name, width in _PLAIN_BYTES.items()},
    **{name: _from_codes(t) for name, t in CODE_TYPES.items()},
}


def check_rows(n: int, *names: str) -> None:
    """Raises a ValueError unless rows of n values of these types are whole blocks."""
    for name in names:
        block = TYPES[name]
        if not block.is_plain and n % block.size:
            raise ValueError(f"a row of {name} must hold whole blocks of {block.size} values, got {n}")
