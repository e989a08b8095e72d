"""Rings of buffers that TMA fills from pages: hopper/rings.py for k-blocks that lie in several places."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import tile_shared_layout

#: Columns of a box: 128 bytes, which TMA swizzles. Boxes of such columns one after the other are a wide operand.
PANEL = gl.constexpr(64)


@gluon.constexpr_function
def rows_of_box(page, block_n):
    """Rows that lie side by side for sure: a page's, or all of a k-block. page: 0 for packed keys."""
    return min(page, block_n) if page > 0 else block_n


@aggregate
class PageRing:
    """`stages` buffers of [block_n, cols]: columns `first` and on of k-blocks of K or V, box by box.

    boxes: [stages * panels * pieces, 1, 1, rows, PANEL], of a buffer first all pieces of a panel; operands: the same
    memory as [stages, block_n, cols].
    """

    boxes: gl.shared_memory_descriptor
    operands: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    first: gl.constexpr
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, boxes, operands, full, empty, first, stages):
        self.boxes = boxes
        self.operands = operands
        self.full = full
        self.empty = empty
        self.first = gl.constexpr(first)
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def fill(self, p, desc, seq, kv_head, block, step):
        """Producer: copy a k-block's columns into the step-th buffer, once that is free. desc: of pages [n_pages,
        n_head_kv, page, D] in boxes; seq, block: see VarlenWork.place."""
        rows: gl.constexpr = self.boxes.shape[3]
        pieces: gl.constexpr = self.operands.shape[1] // rows
        panels: gl.constexpr = self.operands.shape[2] // PANEL
        slot = step % self.stages
        # Where the pieces lie is asked for before the wait.
        places = ()
        for i in gl.static_range(pieces):
            places = places + (p.place(seq, block, i * rows),)
        mbarrier.wait(self.empty.index(slot), ((step // self.stages) & 1) ^ 1)
        full = self.full.index(slot)
        mbarrier.expect(full, desc.block_type.nbytes * (pieces * panels))
        for i in gl.static_range(pieces):
            page, row = places[i]
            for panel in gl.static_range(panels):
                box = self.boxes.index((slot * panels + panel) * pieces + i)
                at = [page, kv_head, row, self.first + panel * PANEL]
                tma.async_copy_global_to_shared(desc, at, full, box)

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
        return self.operands.index(step % self.stages)


@gluon.jit
def make_page_ring(
    dtype: gl.constexpr, cols: gl.constexpr, readers: gl.constexpr, spec: gl.constexpr, first: gl.constexpr = 0
):
    """A ring of `cols` columns from `first` on, that so many warpgroups read."""
    rows: gl.constexpr = rows_of_box(spec.page, spec.block_n)
    number: gl.constexpr = spec.stages * (spec.block_n // rows) * (cols // PANEL)
    boxes = gl.allocate_shared_memory(dtype, [number, 1, 1, rows, PANEL], tile_shared_layout(dtype, 4))
    layout: gl.constexpr = tile_shared_layout(dtype, 2)
    operands = boxes._reinterpret(dtype, [spec.stages, spec.block_n, cols], layout)
    full = make_barriers(spec.stages, 1)
    empty = make_barriers(spec.stages, readers)
    return PageRing(boxes, operands, full, empty, first, spec.stages)
