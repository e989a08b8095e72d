"""What the warpgroups of mla.py have between them: parts of K's columns, and messages from the scorer."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers

PART = gl.constexpr(128)  # columns of V of one product; an accumulator has two
REST = gl.constexpr(64)  # columns of K past those of V, and of a piece of Q
#: The order in which the scorer takes the parts: each accumulator's first one comes before both second ones.
READ_ORDER = gl.constexpr((0, 2, 1, 3))


@aggregate
class Channel:
    """One buffer from the scorer to both accumulators, and the barriers of its messages, counted from 0."""

    buffer: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, buffer, full, empty):
        self.buffer = buffer
        self.full = full
        self.empty = empty

    @gluon.jit
    def wait_empty(self, message):
        """Scorer: wait until both accumulators are done with the message before."""
        mbarrier.wait(self.empty.index(0), (message & 1) ^ 1)

    @gluon.jit
    def publish(self):
        """Scorer: the buffer's new contents are complete (every thread's stores: hence the barrier)."""
        gl.thread_barrier()
        mbarrier.arrive(self.full.index(0), count=1)

    @gluon.jit
    def wait_full(self, message):
        """Accumulator: wait for a message."""
        mbarrier.wait(self.full.index(0), message & 1)

    @gluon.jit
    def release(self):
        """Accumulator: this warpgroup no longer reads the message."""
        mbarrier.arrive(self.empty.index(0), count=1)


@gluon.jit
def make_channel(buffer):
    full = make_barriers(1, 1)
    empty = make_barriers(1, 2)
    return Channel(buffer, full, empty)
