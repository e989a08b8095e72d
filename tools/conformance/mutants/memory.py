"""How the kernels under mutation reach memory: byte addresses from strides, elements and blocks decoded by hand.

Every method of a kernel is a piece that a mutant may replace by another one, see mutants_table.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gguf
import numpy as np
import numpy.typing as npt

from graphrt import float8
from graphrt.backend import Buffer, Bytes
from graphrt.backends.cpu.memory import CpuBuffer
from graphrt.dtypes import DType
from graphrt.host import host_type
from graphrt.tensor import Tensor

Floats = npt.NDArray[np.floating[Any]]
Index = npt.NDArray[np.int64]
Place = Callable[[Tensor], tuple[Buffer, int]]

#: The values of IQ4_NL's sixteen codes.
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
#: First byte of the packed low bits of a block, for the types that unpack() knows itself.
_CODES_AT = {"q4_0": 2, "q4_1": 4, "q5_0": 6, "q5_1": 8, "iq4_nl": 2}


class Operand:
    """A tensor in memory. memory: the whole buffer; base: the address of its first element."""

    def __init__(self, t: Tensor, place: Place) -> None:
        buffer, self.base = place(t)
        assert isinstance(buffer, CpuBuffer)
        self.t = t
        self.memory: Bytes = buffer.memory.numpy()

    def elements(self) -> npt.NDArray[Any]:
        """The buffer as an array of the tensor's plain type."""
        kind = host_type(self.t.dtype)
        return self.memory[: self.memory.size // kind.itemsize * kind.itemsize].view(kind)


class Kernel:
    """One node bound to memory. run() computes it; what the subclasses define are its pieces."""

    op: ClassVar[str]

    def __init__(self, node: Tensor, place: Place) -> None:
        self.node = node
        self.p: Any = node.params
        self.sources = {name: Operand(s, place) for name, s in node.sources_by_name().items()}
        self.out = Operand(node, place)

    def run(self) -> None:
        raise NotImplementedError

    # -- pieces: addresses

    def start(self, x: Operand, i1: Index, i2: Index, i3: Index) -> Index:
        """The byte address of the row (i1, i2, i3)."""
        nb = x.t.nb
        return np.asarray(x.base + i1 * nb[1] + i2 * nb[2] + i3 * nb[3], np.int64)

    def element(self, address: Index, size: int) -> Index:
        """The number of the element at a byte address."""
        return address // size

    # -- pieces: values

    def read(self, x: Operand, starts: Index, n: int) -> Floats:
        """The first `n` values of the rows that begin at `starts`: float32 [..., n]. Past the memory: its end."""
        dt = x.t.dtype
        if dt.is_quantized:
            n_blocks = -(-n // dt.block_size)
            at = starts[..., None, None] + (np.arange(n_blocks) * dt.type_size)[:, None] + np.arange(dt.type_size)
            values = self.unpack(dt, np.take(x.memory, self.element(at, 1), mode="clip"))
            return values.reshape(*starts.shape, -1)[..., :n]
        at = self.element(starts[..., None] + np.arange(n) * x.t.nb[0], dt.type_size)
        raw = np.take(x.elements(), at, mode="clip")
        if dt.is_float8:
            return float8.decode(raw, dt).astype(np.float32)
        if dt.name == "bf16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(raw, np.float32)

    def codes8(self, values: Floats, dt: DType) -> Bytes:
        """The codes of floats of 8 bits: the nearest number, at most the largest one."""
        return float8.encode(values, dt)

    def read_ints(self, x: Operand, at: Index) -> Index:
        """Integers at byte addresses."""
        return np.asarray(np.take(x.elements(), self.element(at, x.t.dtype.type_size), mode="clip"), np.int64)

    def write(self, x: Operand, starts: Index, values: Floats) -> None:
        """Stores rows of a float type."""
        rows: npt.NDArray[Any] = self.codes8(values, x.t.dtype) if x.t.dtype.is_float8 else values
        at = self.element(starts[..., None] + np.arange(values.shape[-1]) * x.t.nb[0], x.t.dtype.type_size)
        x.elements()[at] = rows

    # -- pieces: blocks, uint8 [..., bytes a block]

    def unpack(self, dt: DType, raw: Bytes) -> Floats:
        """The values of blocks: [..., block_size]."""
        if dt.name == "q8_0":
            return self.block_scale(raw) * raw[..., 2:].view(np.int8).astype(np.float32)
        if dt.name not in _CODES_AT:
            return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(dt.id)), np.float32)
        at = _CODES_AT[dt.name]
        codes = self.nibbles(raw[..., at : at + 16])
        if dt.name == "iq4_nl":
            return self.block_scale(raw) * _IQ4_NL[codes]
        if dt.name.startswith("q5"):
            codes = codes + self.fifth_bits(raw[..., at - 4 : at]) * 16
        if dt.name.endswith("_1"):
            return self.block_scale(raw) * codes + self.block_min(raw)
        return self.block_scale(raw) * (codes - self.zero_point(dt))

    def zero_point(self, dt: DType) -> np.float32:
        """The code that means 0 in a type without a minimum."""
        return np.float32(8 if dt.name == "q4_0" else 16)

    def block_scale(self, raw: Bytes) -> Floats:
        """The f16 in a block's first two bytes: [..., 1]."""
        return np.ascontiguousarray(raw[..., :2]).view(np.float16).astype(np.float32)

    def block_min(self, raw: Bytes) -> Floats:
        """The f16 after the scale: [..., 1]."""
        return np.ascontiguousarray(raw[..., 2:4]).view(np.float16).astype(np.float32)

    def nibbles(self, packed: Bytes) -> npt.NDArray[np.uint8]:
        """Sixteen low nibbles, then sixteen high ones."""
        return np.concatenate((packed & 15, packed >> 4), axis=-1)

    def fifth_bits(self, packed: Bytes) -> Bytes:
        """32 bits of four bytes, the least significant first."""
        return np.unpackbits(packed, axis=-1, bitorder="little")


def last_dims(x: Operand) -> tuple[Index, Index, Index]:
    """i3, i2, i1 of every row, shaped to broadcast against each other."""
    _, n1, n2, n3 = x.t.ne
    return np.arange(n3)[:, None, None], np.arange(n2)[None, :, None], np.arange(n1)[None, None, :]
