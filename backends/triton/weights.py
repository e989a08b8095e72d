"""Weights on the device: uploaded as they are in the file, and packed there where kernels want them so."""

from __future__ import annotations

import torch

from graphrt.backend import Bytes, Usage
from graphrt.backends.triton.device import ELSEWHERE
from graphrt.backends.triton.memory import TritonBuffer, empty, upload
from graphrt.backends.triton.packing import Packed, PackedBuffer, pack, packing_of, unpack
from graphrt.tensor import Tensor

#: Of a plan for a GPU elsewhere: weights up to so many bytes keep their values, which lowering may look at (norms).
LOOKED_AT = 1 << 20


def hold_weight(weight: Tensor, data: Bytes, device: str) -> TritonBuffer:
    """A buffer with a weight's bytes; packed for a matrix of a type that can be. Raises MemoryPlanError for no room."""
    if device == ELSEWHERE and weight.ne[1] == 1 and data.size <= LOOKED_AT:
        device = "cpu"
    raw = empty(data.size, Usage.WEIGHTS, device)
    upload(data, raw)
    kind, k = weight.dtype.name, weight.ne[0]
    if packing_of(kind) is None or k % weight.dtype.block_size or weight.ne[1] == 1:
        return TritonBuffer(raw, Usage.WEIGHTS)
    rows = weight.n_elements // k
    packed = Packed.empty(kind, rows, k, device)
    pack(raw.view(rows, -1), packed)
    return PackedBuffer(packed, Usage.WEIGHTS)


def unpacked(buffer: PackedBuffer) -> torch.Tensor:
    """uint8 [nbytes], the bytes as they were."""
    return unpack(buffer.packed).flatten()
