"""GPU memory: buffers, and typed looks into them for kernels."""

from __future__ import annotations

import numpy as np
import torch

from graphrt.backend import Buffer, Bytes, Usage
from graphrt.errors import MemoryPlanError
from graphrt.tensor import Tensor

TORCH_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class TritonBuffer(Buffer):
    """A span of device memory. memory: uint8 [nbytes], at one address for the buffer's life."""

    backend = "triton"

    def __init__(self, memory: torch.Tensor, usage: Usage) -> None:
        self.memory = memory
        self.nbytes = memory.numel()
        self.usage = usage

    def read(self, offset: int, nbytes: int) -> Bytes:
        return self.memory[offset : offset + nbytes].cpu().numpy().copy()

    def write(self, offset: int, data: Bytes) -> None:
        source = torch.from_numpy(np.require(data.reshape(-1), requirements="W"))
        self.memory[offset : offset + data.size].copy_(source)


def allocate(nbytes: int, usage: Usage, device: str) -> TritonBuffer:
    """A buffer of NaN (every byte 0xFF), or of zeros for state. Raises MemoryPlanError when there is no room."""
    try:
        fill = 0 if usage is Usage.STATE else 0xFF
        return TritonBuffer(torch.full((nbytes,), fill, dtype=torch.uint8, device=device), usage)
    except RuntimeError as error:  # torch reports lack of memory that way, on the CPU too
        raise MemoryPlanError(
            f"{usage.value} memory of {nbytes / 2**20:.0f} MiB can't be had on {device}; use a shorter context (-c), "
            f"smaller batches (-b), or free memory that others hold"
        ) from error


def elements(buffer: Buffer, offset: int, t: Tensor, kind: torch.dtype) -> torch.Tensor:
    """The memory of `t` from `offset` on as a flat torch tensor of `kind`, up to its last whole element."""
    assert isinstance(buffer, TritonBuffer)
    size = kind.itemsize
    return buffer.memory[offset : offset + -(-t.nbytes // size) * size].view(kind)
