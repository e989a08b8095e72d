"""GPU memory: buffers, the way of host bytes into them, and typed looks into them for kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from graphrt.backend import Buffer, Bytes, Comparison, Usage
from graphrt.bounds import span
from graphrt.dtypes import FLOATS8
from graphrt.errors import MemoryPlanError
from graphrt.tensor import Tensor

TORCH_TYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, **dict.fromkeys(FLOATS8, torch.uint8)
}  # fmt: skip
#: Bytes of pinned memory that hold what is on its way to the device, in so many pieces.
STAGE_BYTES, STAGE_PIECES = 64 * 2**20, 4


class Stage:
    """Pinned host memory that uploads pass through: the host goes on while the device copies.

    Pieces are used in turn; one that is used again waits for its last copy. Larger uploads take several.
    """

    def __init__(self) -> None:
        self.size = STAGE_BYTES // STAGE_PIECES
        self.pieces = [torch.empty(self.size, dtype=torch.uint8, pin_memory=True) for _ in range(STAGE_PIECES)]
        self.done: list[torch.cuda.Event | None] = [None] * STAGE_PIECES
        self.piece, self.used = 0, 0

    def upload(self, source: Bytes, target: torch.Tensor) -> None:
        """Queues a copy of host bytes into device memory; `source` may be reused on return."""
        for start in range(0, source.size, self.size):
            part = source[start : start + self.size]
            slot = self._room(part.size)
            slot.numpy()[:] = part
            target[start : start + part.size].copy_(slot, non_blocking=True)

    def _room(self, nbytes: int) -> torch.Tensor:
        if self.used + nbytes > self.size:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self.done[self.piece] = event
            self.piece, self.used = (self.piece + 1) % STAGE_PIECES, 0
            before = self.done[self.piece]
            if before is not None:
                before.synchronize()
        start, self.used = self.used, self.used + -(-nbytes // 64) * 64
        return self.pieces[self.piece][start : start + nbytes]


_stages: dict[torch.device, Stage] = {}


def upload(source: Bytes, target: torch.Tensor) -> None:
    """Copies host bytes to `target`, uint8 of the same size. The host may go on before the device has them."""
    flat = source.reshape(-1)
    if target.device.type != "cuda":
        target.copy_(torch.from_numpy(np.require(flat, requirements="W")))
        return
    stage = _stages.get(target.device)
    if stage is None:
        stage = _stages[target.device] = Stage()
    with torch.cuda.device(target.device):  # its events are of the stream that copies there
        stage.upload(flat, target)


class TritonBuffer(Buffer):
    """A span of device memory. memory: uint8 [nbytes], at one address for the buffer's life. Memory of a GPU that is
    only planned for takes all that is written and reads as zeros."""

    backend = "triton"

    def __init__(self, memory: torch.Tensor, usage: Usage) -> None:
        self.memory = memory
        self.nbytes = memory.numel()
        self.usage = usage

    def read(self, offset: int, nbytes: int) -> Bytes:
        if self.memory.is_meta:  # planned for a GPU elsewhere
            return np.zeros(nbytes, np.uint8)
        return self.memory[offset : offset + nbytes].cpu().numpy().copy()

    def read_later(self, offset: int, nbytes: int) -> Callable[[], Bytes]:
        source = self.memory[offset : offset + nbytes]
        if not source.is_cuda:
            return super().read_later(offset, nbytes)
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        host.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(source.device))

        def wait() -> Bytes:
            copied.synchronize()
            data: Bytes = host.numpy()
            return data

        return wait

    def comparison(self, offset: int, expected: Bytes) -> Comparison:
        if not self.memory.is_cuda:
            return super().comparison(offset, expected)
        return DeviceComparison(self, offset, expected)

    def write(self, offset: int, data: Bytes) -> None:
        upload(data, self.memory[offset : offset + data.size])

    @property
    def address(self) -> int | None:
        return None if self.memory.is_meta else self.memory.data_ptr()

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self.memory[target : target + nbytes].copy_(self.memory[source : source + nbytes])


class DeviceComparison(Comparison):
    """Compares on the device and keeps there how often bytes differed, and the last that did: no look waits."""

    def __init__(self, buffer: TritonBuffer, offset: int, expected: Bytes) -> None:
        super().__init__(buffer, offset, expected)
        width = next(w for w in (torch.int64, torch.int32, torch.int16, torch.uint8) if _fits(w, offset, expected.size))
        self._memory = buffer.memory[offset : offset + expected.size].view(width)
        self._right = torch.from_numpy(expected.copy()).to(self._memory.device).view(width)
        self._wrong = self._right.clone()
        self._count = torch.zeros((), dtype=torch.int64, device=self._memory.device)

    def look(self) -> None:
        differs = (self._memory != self._right).any()
        self._count += differs
        torch.where(differs, self._memory, self._wrong, out=self._wrong)

    def found(self) -> tuple[int, Bytes]:
        differing = int(self._count)
        self._count.zero_()
        return differing, self._wrong.view(torch.uint8).cpu().numpy() if differing else self._expected


def _fits(kind: torch.dtype, offset: int, nbytes: int) -> bool:
    return offset % kind.itemsize == 0 and nbytes % kind.itemsize == 0


def allocate(nbytes: int, usage: Usage, device: str) -> TritonBuffer:
    """A buffer of NaN (every byte 0xFF), or of zeros for state. Raises MemoryPlanError when there is no room."""
    return TritonBuffer(empty(nbytes, usage, device).fill_(0 if usage is Usage.STATE else 0xFF), usage)


def empty(nbytes: int, usage: Usage, device: str) -> torch.Tensor:
    """uint8 [nbytes] of anything. Raises MemoryPlanError when there is no room."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch reports lack of memory that way, on the CPU too
        raise MemoryPlanError(
            f"{usage.value} memory of {nbytes / 2**20:.0f} MiB can't be had on {device}; use a shorter context "
            f"(n_ctx), smaller batches (n_batch), or free memory that others hold"
        ) from error


def span_of(t: torch.Tensor) -> tuple[int, int, int]:
    """(storage, start, stop): the bytes of a storage from a tensor's first element to behind its last.

    The storage is told by its record in torch, not by its address: on torch's meta device it has none.
    """
    start = int(t.storage_offset()) * t.itemsize
    last = sum((int(n) - 1) * int(step) for n, step in zip(t.shape, t.stride()))
    return t.untyped_storage()._cdata, start, start + (last + 1) * t.itemsize if t.numel() else start


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors' memory has bytes in common, or may have."""
    (of_a, *spans_a), (of_b, *spans_b) = span_of(a), span_of(b)
    return of_a == of_b and max(spans_a[0], spans_b[0]) < min(spans_a[1], spans_b[1])


def elements(buffer: Buffer, offset: int, t: Tensor, kind: torch.dtype) -> torch.Tensor:
    """The memory of `t` from `offset` on as a flat torch tensor of `kind`, up to its last whole element."""
    assert isinstance(buffer, TritonBuffer)
    size = kind.itemsize
    start, stop = span(t, offset, buffer.nbytes)
    return buffer.memory[start : start + -(-(stop - start) // size) * size].view(kind)
