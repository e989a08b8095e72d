"""TMA's addition to memory: an instruction that Triton 3.6 has and its Gluon has no name for."""

from collections.abc import Sequence
from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin


@builtin
def async_add_shared_to_global(tensor_desc: Any, coord: Sequence[Any], src: Any, _semantic: Any = None) -> None:
    """Begins to add a tile of f32 in shared memory to the elements at coord of what a descriptor describes, each by an
    atomic addition; what lies outside is left out. tma.store_wait() waits until the tile has been read."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)
