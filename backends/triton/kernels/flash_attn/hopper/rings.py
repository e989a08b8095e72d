"""The Hopper kernels' tiles in registers and shared memory, and the rings of buffers that they stream through."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers


@gluon.constexpr_function
def mma_layout(n):
    """Registers of one warpgroup's [64, n] accumulator."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def packed_layout(pack, n):
    """mma_layout(n) with the rows as [64 / pack, pack]."""
    low = pack.bit_length() - 1

    def row(bit):
        return [0, 1 << bit, 0] if bit < low else [1 << (bit - low), 0, 0]

    columns = [[0, 0, 1 << bit] for bit in range(n.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[columns[0], row(3), *columns[3:]],
        lane_bases=[columns[1], columns[2], row(0), row(1), row(2)],
        warp_bases=[row(4), row(5)],
        block_bases=[],
        shape=[64 // pack, pack, n],
    )


@gluon.constexpr_function
def tile_shared_layout(dtype, rank, cols=64):
    """Shared memory of an operand tile with rows of `cols` elements."""
    return gl.NVMMASharedLayout(min(128, cols * dtype.primitive_bitwidth // 8), dtype.primitive_bitwidth, rank)


@aggregate
class Ring:
    """`stages` buffers of [1, 1, block_n, cols]: columns `first` and on of blocks of K or V, filled by TMA or a
    producer's stores, emptied by every warpgroup that reads them."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    first: gl.constexpr
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, first, stages):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.first = gl.constexpr(first)
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def wait_empty(self, step):
        """Producer: wait until the step-th block's buffer is free."""
        # A fresh barrier counts as having completed the phase before its first, so the first round does not wait.
        mbarrier.wait(self.empty.index(step % self.stages), ((step // self.stages) & 1) ^ 1)

    @gluon.jit
    def fill(self, desc, seq, head, row, step):
        """Producer: copy the columns of the rows from `row` on into the step-th block's buffer, once that is free."""
        slot = step % self.stages
        self.wait_empty(step)
        full = self.full.index(slot)
        mbarrier.expect(full, desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [seq, head, row, self.first], full, self.buffers.index(slot))

    @gluon.jit
    def wait_full(self, step):
        """Reader: wait until the step-th block has arrived."""
        mbarrier.wait(self.full.index(step % self.stages), (step // self.stages) & 1)

    @gluon.jit
    def release(self, step):
        """Reader: this warpgroup no longer reads the step-th block."""
        mbarrier.arrive(self.empty.index(step % self.stages), count=1)

    @gluon.jit
    def operand(self, step):
        """The step-th block as [block_n, cols]."""
        tile = self.buffers.index(step % self.stages)
        return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def make_ring(
    dtype: gl.constexpr, cols: gl.constexpr, readers: gl.constexpr, spec: gl.constexpr, first: gl.constexpr = 0,
    rows: gl.constexpr = None,
):  # fmt: skip
    """A ring of `cols` columns from `first` on, that so many warpgroups read. rows: of a buffer, block_n by default."""
    height: gl.constexpr = spec.block_n if rows is None else rows
    layout: gl.constexpr = tile_shared_layout(dtype, 4, cols)
    buffers = gl.allocate_shared_memory(dtype, [spec.stages, 1, 1, height, cols], layout)
    full = make_barriers(spec.stages, 1)
    empty = make_barriers(spec.stages, readers)
    return Ring(buffers, full, empty, first, spec.stages)


@aggregate
class MaskRing:
    """Buffers of the mask's blocks: for each of `stages` and each warpgroup [1, 1, 64 / pack, block_n]."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    n_wg: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, stages, n_wg):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)
        self.n_wg = gl.constexpr(n_wg)

    @gluon.jit
    def fill(self, desc, seq, head, row, col, step):
        """Producer: copy every warpgroup's rows, `row` and on, of the columns from `col` on."""
        slot = step % self.stages
        mbarrier.wait(self.empty.index(slot), ((step // self.stages) & 1) ^ 1)
        full = self.full.index(slot)
        mbarrier.expect(full, desc.block_type.nbytes * self.n_wg)
        for wg in gl.static_range(self.n_wg):
            place = [seq, head, row + wg * desc.block_shape[2], col]
            tma.async_copy_global_to_shared(desc, place, full, self.buffers.index(slot * self.n_wg + wg))

    @gluon.jit
    def read(self, step, wg: gl.constexpr):
        """Consumer: the warpgroup's [64, block_n] mask values of the step-th block in the scores' registers."""
        slot = step % self.stages
        mbarrier.wait(self.full.index(slot), (step // self.stages) & 1)
        tile = self.buffers.index(slot * self.n_wg + wg)
        tokens: gl.constexpr = tile.shape[2]
        block_n: gl.constexpr = tile.shape[3]
        if tokens == 64:
            return tile.reshape([64, block_n]).load(mma_layout(block_n))
        else:
            packed: gl.constexpr = packed_layout(64 // tokens, block_n)
            rows = tile.reshape([tokens, 1, block_n]).load(packed)
            rows = gl.reshape(rows.broadcast_to([tokens, 64 // tokens, block_n]), [64, block_n])
            return gl.convert_layout(rows, mma_layout(block_n), assert_trivial=True)

    @gluon.jit
    def release(self, step):
        """Consumer: the warpgroup's threads have read the step-th block.

        They have met at a barrier after the use of what they read (`settle`): a barrier alone orders no load before
        what TMA writes, and where processes take turns on a GPU, some masks were read too late.
        """
        mbarrier.arrive(self.empty.index(step % self.stages), count=1)


@gluon.jit
def make_mask_ring(spec: gl.constexpr):
    layout: gl.constexpr = tile_shared_layout(gl.float16, 4)
    shape: gl.constexpr = [spec.mask_stages * spec.n_wg, 1, 1, 64 // spec.pack, spec.block_n]
    buffers = gl.allocate_shared_memory(gl.float16, shape, layout)
    full = make_barriers(spec.mask_stages, 1)
    empty = make_barriers(spec.mask_stages, spec.n_wg)
    return MaskRing(buffers, full, empty, spec.mask_stages, spec.n_wg)


@gluon.jit
def make_turns(spec: gl.constexpr, ring):
    """A barrier for each warpgroup that waits for its turn. Without turns the ring's barriers stand in their place,
    unused: see make_barriers."""
    if spec.pingpong:
        return make_barriers(spec.n_wg, 1)
    else:
        return ring.full
