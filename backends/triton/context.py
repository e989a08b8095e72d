"""What lowering needs: tensors as kernels see them, and the parts of a compiled split that its steps share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphrt.backend import Place, Usage
from graphrt.backends.triton.accesses import Call
from graphrt.backends.triton.accesses import Step as Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.backends.triton.packing import Packed, PackedBuffer, pack, packing_of
from graphrt.backends.triton.weights import unpacked
from graphrt.bounds import span
from graphrt.program import Choice
from graphrt.tensor import Tensor

PLAIN_TYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class View:
    """A tensor in device memory.

    data: flat, from the tensor's first element to its last; of its own type, uint8 for a quantized one and for floats
    of 8 bits; strides: of ne[0] to ne[3], in elements of `data` (ne[0]'s of a quantized tensor: bytes a block).
    """

    tensor: Tensor
    data: torch.Tensor
    strides: tuple[int, int, int, int]

    @property
    def ne(self) -> tuple[int, int, int, int]:
        return self.tensor.ne

    @property
    def kind(self) -> str:
        """The type's name."""
        return self.tensor.dtype.name

    def torch(self) -> torch.Tensor:
        """A plain tensor as torch has it: shape `ne` reversed, the same memory."""
        return self.data.as_strided(self.ne[::-1], self.strides[::-1])


def _pack_again(blocks: torch.Tensor, packed: Packed) -> None:
    """Raw blocks, uint8 [..., row bytes], into a packed matrix."""
    pack(blocks.reshape(packed.rows, packed.row_bytes), packed)


class Context:
    """One split while it is compiled.

    place: where tensors lie; target: the device; exact: no form that rounds activations to 8 bits; plan: which kernel
    makes each product and how what they read is stored, decided before the first launch (products/plan.py, whose
    plan_of() gives it with its type); shared: what steps of several nodes have in common, by a key of its maker's
    (tables of rotations); choices: what a lowering has decided, by its group's first node.
    """

    def __init__(self, place: Callable[[Tensor], Place], target: Target, exact: bool) -> None:
        self.place = place
        self.target = target
        self.exact = exact
        self.plan: object = None
        self.shared: dict[Any, Any] = {}
        self.choices: dict[Tensor, Choice] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def view(self, t: Tensor) -> View:
        """A tensor with a plain or quantized layout in memory. A packed weight is unpacked into memory of its own."""
        buffer, offset = self.place(t)
        assert isinstance(buffer, TritonBuffer)
        memory = unpacked(buffer) if isinstance(buffer, PackedBuffer) else buffer.memory
        kind = PLAIN_TYPES.get(t.dtype.name, torch.uint8)
        size = kind.itemsize
        start, stop = span(t, offset, memory.numel())
        data = memory[start : start + (stop - start) // size * size].view(kind)
        nb0, nb1, nb2, nb3 = (n // size for n in t.nb)
        return View(t, data, (nb0, nb1, nb2, nb3))

    def is_constant(self, t: Tensor) -> bool:
        """No kernel of a run writes it."""
        buffer, _ = self.place(t)
        return isinstance(buffer, TritonBuffer) and buffer.usage is Usage.WEIGHTS

    def packed_in_place(self, t: Tensor) -> Packed | None:
        """A tensor of packed weights, or of whole rows of them, as it lies; None for what lies otherwise."""
        buffer, offset = self.place(t)
        if isinstance(buffer, PackedBuffer):
            start, _ = span(t, offset, buffer.nbytes)
            first, rest = divmod(start, buffer.packed.row_bytes)
            if rest == 0 and t.is_contiguous and t.ne[0] == buffer.packed.k:  # whole rows of it are rows of the planes
                return buffer.packed.part(first, first + t.n_rows)
        return None

    def packed(self, t: Tensor) -> tuple[Packed, list[Step]]:
        """A quantized tensor [k, m, ...] in packed form, and the steps that make it so (none for packed weights).

        For what is not packed once and for all a run packs it anew, into memory of its own.
        """
        found = self.packed_in_place(t)
        if found is not None:
            return found, []
        view = self.view(t)
        packing = packing_of(t.dtype.name)
        assert packing is not None, t.dtype.name
        k, rows = t.ne[0], t.ne[1] * t.ne[2] * t.ne[3]
        packed = Packed.empty(t.dtype.name, rows, k, self.target.device)
        row_bytes = t.dtype.row_size(k)
        blocks = view.data.as_strided((t.ne[3], t.ne[2], t.ne[1], row_bytes), (*view.strides[:0:-1], 1))
        return packed, [Call("pack", partial(_pack_again, blocks, packed), [blocks], [packed.memory])]

    def scratch(self, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        """Device memory for steps of one split, alive as long as they are."""
        return torch.empty(shape, dtype=kind, device=self.target.device)

    def shared_scratch(self, name: str, nbytes: int) -> torch.Tensor:
        """uint8, at least so many bytes: one memory a name, for what each step fills anew before it reads it."""
        found = self._scratch.get(name)
        if found is None or found.numel() < nbytes:
            found = self._scratch[name] = self.scratch((nbytes,), torch.uint8)
        return found
