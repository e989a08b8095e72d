"""mbarriers of kernels with warps of their own for copies."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def make_barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """`number` barriers, each complete after so many arrivals.

    All of them must be used: a barrier's memory stays a barrier's until it is invalidated (PTX ISA, mbarrier), but
    Triton gives it to another buffer as soon as nothing uses the barrier any more. When processes share a GPU, a switch
    between them then writes the barrier over what lies there (docs/mbarrier_reuse.cu).
    tests/support/aot_barriers.py looks for it.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers
