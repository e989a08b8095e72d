"""Host memory: buffers, and torch looks at the tensors that lie in them."""

from __future__ import annotations

import mmap

import numpy as np
import torch

from graphrt.backend import Buffer, Bytes, Usage
from graphrt.bounds import span
from graphrt.dtypes import DType
from graphrt.errors import MemoryPlanError
from graphrt.tensor import Tensor

TORCH_TYPES: dict[str, torch.dtype] = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip


def torch_type(dt: DType) -> torch.dtype:
    """torch's type of a plain type; uint8, the bytes of its blocks, for a quantized one, and the codes of a float of 8
    bits."""
    return TORCH_TYPES.get(dt.name, torch.uint8)


class CpuBuffer(Buffer):
    """A span of host memory. memory: uint8 [nbytes], at one address for the buffer's life."""

    backend = "cpu"

    def __init__(self, memory: torch.Tensor, usage: Usage) -> None:
        self.memory = memory
        self._bytes: Bytes = memory.numpy()
        self.nbytes = memory.numel()
        self.usage = usage

    def read(self, offset: int, nbytes: int) -> Bytes:
        return self._bytes[offset : offset + nbytes].copy()

    def write(self, offset: int, data: Bytes) -> None:
        self._bytes[offset : offset + data.size] = data.reshape(-1)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self._bytes[target : target + nbytes] = self._bytes[source : source + nbytes]

    @property
    def address(self) -> int | None:
        return self.memory.data_ptr() or None

    def host_view(self) -> Bytes:
        return self._bytes


#: From so many bytes on memory comes from the system itself. The C library would keep what is given back, in pieces
#: that the next session's buffers don't fit into: a process that made one session after the other grew by each.
MAPPED_BYTES = 1 << 18


def allocate(nbytes: int, usage: Usage) -> CpuBuffer:
    """A buffer of NaN (every byte 0xFF), 64-byte aligned, so that reading what nobody wrote shows.

    State starts as zeros, as llama.cpp's caches do; its pages take memory when they are first written. Raises
    MemoryPlanError when the system refuses.
    """
    try:
        memory = zeros(nbytes)
    except (RuntimeError, OSError, OverflowError) as error:  # torch reports lack of memory as RuntimeError
        raise MemoryPlanError(
            f"{usage.value} memory of {nbytes / 2**20:.0f} MiB can't be had on the CPU; use a shorter context (n_ctx) "
            f"or smaller batches (n_batch)"
        ) from error
    return CpuBuffer(memory if usage is Usage.STATE else memory.fill_(0xFF), usage)


def zeros(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of zeros, 64-byte aligned, whose memory goes back to the system with the tensor if it is large.
    Raises OSError or RuntimeError when the system refuses."""
    if nbytes < MAPPED_BYTES:
        return torch.zeros(nbytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def wrap(data: Bytes) -> CpuBuffer:
    """A weights buffer over memory that somebody else holds (a mapped file)."""
    return CpuBuffer(torch.from_numpy(np.asarray(data)), Usage.WEIGHTS)


def strided(memory: torch.Tensor, offset: int, t: Tensor) -> torch.Tensor:
    """The elements of `t` at `offset` bytes of `memory` in torch's shape; a quantized row as uint8 bytes.

    Raises MemoryPlanError when they are not all inside.
    """
    start, stop = span(t, offset, memory.numel())
    if t.dtype.is_quantized:
        return memory[start:stop].as_strided((*t.shape[:3], t.dtype.row_size(t.ne[0])), (*t.nb[:0:-1], 1))
    kind = torch_type(t.dtype)
    size = t.dtype.type_size
    return memory[start:stop].view(kind).as_strided(t.shape, [stride // size for stride in t.nb[::-1]])
