"""Rings of the kernels of gradients: of rows of lse and delta, and of blocks of the mask or of gradients of scores,
which they read turned."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import mma_layout, tile_shared_layout

ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
THREADS = gl.constexpr(32)  # of the producer


@aggregate
class RowRing:
    """`stages` pairs of rows [block_m], f32: lse and delta of a step's queries."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, stages):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def fill(self, p_lse, behind, step):
        """Producer: copy the rows at p_lse, and those so far behind, into the step-th buffers, once they are free."""
        slot = step % self.stages
        mbarrier.wait(self.empty.index(slot), ((step // self.stages) & 1) ^ 1)
        n: gl.constexpr = self.buffers.shape[1]
        at = gl.arange(0, n, gl.BlockedLayout([n // THREADS], [THREADS], [1], [0]))
        async_copy.async_copy_global_to_shared(self.buffers.index(2 * slot), p_lse + at)
        async_copy.async_copy_global_to_shared(self.buffers.index(2 * slot + 1), p_lse + behind + at)
        async_copy.mbarrier_arrive(self.full.index(slot), increment_count=False)

    @gluon.jit
    def wait_full(self, step):
        """Consumer: wait until the step-th rows have arrived."""
        mbarrier.wait(self.full.index(step % self.stages), (step // self.stages) & 1)

    @gluon.jit
    def read(self, step, which: gl.constexpr):
        """Consumer: lse (0) or delta (1) of the step-th queries, for the columns of [64, block_m]."""
        row = self.buffers.index(2 * (step % self.stages) + which)
        return row.load(gl.SliceLayout(0, mma_layout(self.buffers.shape[1])))

    @gluon.jit
    def release(self, step):
        """Consumer: the warpgroup's threads have read the step-th rows and met since."""
        mbarrier.arrive(self.empty.index(step % self.stages), count=1)


@gluon.jit
def make_row_ring(spec: gl.constexpr, readers: gl.constexpr):
    buffers = gl.allocate_shared_memory(gl.float32, [2 * spec.stages, spec.block_m], ROW)
    full = make_barriers(spec.stages, THREADS)
    empty = make_barriers(spec.stages, readers)
    return RowRing(buffers, full, empty, spec.stages)


@aggregate
class TurnedRing:
    """Buffers of blocks that are read turned, the mask's say: for each of `stages` and each 64 columns
    [1, 1, rows, 64]; rows are queries in those of the mask, and columns keys."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    parts: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, stages, parts):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)
        self.parts = gl.constexpr(parts)

    @gluon.jit
    def fill(self, desc, seq, head, row, col, step):
        """Producer: copy the block from (row, col) on."""
        slot = step % self.stages
        mbarrier.wait(self.empty.index(slot), ((step // self.stages) & 1) ^ 1)
        full = self.full.index(slot)
        mbarrier.expect(full, desc.block_type.nbytes * self.parts)
        for i in gl.static_range(self.parts):
            place = [seq, head, row, col + i * 64]
            tma.async_copy_global_to_shared(desc, place, full, self.buffers.index(slot * self.parts + i))

    @gluon.jit
    def wait_full(self, step):
        """Consumer: wait until the step-th block has arrived."""
        mbarrier.wait(self.full.index(step % self.stages), (step // self.stages) & 1)

    @gluon.jit
    def operand(self, step, part: gl.constexpr):
        """64 columns of the step-th block, [64, rows]."""
        tile = self.buffers.index(step % self.stages * self.parts + part)
        return tile.reshape([tile.shape[2], 64]).permute((1, 0))

    @gluon.jit
    def read(self, step, part: gl.constexpr):
        """Consumer: these in the registers of scores."""
        self.wait_full(step)
        tile = self.operand(step, part)
        return tile.load(mma_layout(tile.shape[1]))

    @gluon.jit
    def release(self, step):
        """Consumer: the warpgroup's threads have read the step-th block and met since."""
        mbarrier.arrive(self.empty.index(step % self.stages), count=1)


@gluon.jit
def make_turned_ring(
    dtype: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, cols: gl.constexpr, readers: gl.constexpr
):  # fmt: skip
    """A ring of blocks of so many rows and columns."""
    parts: gl.constexpr = cols // 64
    layout: gl.constexpr = tile_shared_layout(dtype, 4)
    shape: gl.constexpr = [stages * parts, 1, 1, rows, 64]
    buffers = gl.allocate_shared_memory(dtype, shape, layout)
    full = make_barriers(stages, 1)
    empty = make_barriers(stages, readers)
    return TurnedRing(buffers, full, empty, stages, parts)


@gluon.jit
def make_turned_mask_ring(spec: gl.constexpr, readers: gl.constexpr):
    return make_turned_ring(gl.float16, spec.mask_stages, spec.block_m, spec.block_n, readers)
