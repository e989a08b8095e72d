"""Where a tensor's bytes lie in its memory: asked wherever a place becomes an address, once for each prepared graph."""

from __future__ import annotations

from graphrt.errors import MemoryPlanError
from graphrt.tensor import Tensor


def span(t: Tensor, offset: int, nbytes: int) -> tuple[int, int]:
    """(start, stop): the bytes that a tensor at `offset` takes of a memory of `nbytes` bytes, its gaps included.

    Kernels add strides to a bare address and can't look where it ends, and a slice of Python's takes what lies outside
    without a word. Raises MemoryPlanError for a negative offset or stride, a quantized row that is not in one piece,
    and for what ends behind the memory's end.
    """
    stop = offset + t.nbytes
    whole_blocks = not t.dtype.is_quantized or t.nb[0] == t.dtype.type_size
    if min(offset, *t.nb) < 0 or not whole_blocks or stop > nbytes:
        raise MemoryPlanError(
            f"a tensor must lie inside its memory of {nbytes} bytes, {t.name!r}, {t.describe()} with strides "
            f"{list(t.nb)}, takes bytes {offset} to {stop}; build it by its op, from a source that is large enough"
        )
    return offset, stop
