"""Flash attention for Hopper (sm_90) of MLA's shape: rows of K hold 576 numbers, V is the first 512 of each.

A tile is 64 query rows: of one sequence, `pack` heads that share a KV head, the heads of a query next to each other
(problem.py's Tiling). Its f32 output [64, 512] takes half of the register file, so the work on a block of keys is
split by what it is, not by query rows:

    scorer        one warpgroup; S_j = Q K_j^T (both operands in shared memory), the online softmax, P_j in 16 bits
    accumulators  two warpgroups; each O[:, half] += P_j V_j[:, half], 256 columns, P_j and V_j in shared memory
    producer      one warp; K_j by TMA, in five parts: columns 0..127, .., 384..511 (V) and 512..575

A part is freed, and its buffer filled anew, as soon as its last reader is done: each accumulator has two of the parts,
one product each. (One product of 256 columns does not compile: ptxas wants more registers for it than the 128 that 512
threads start with.) While the accumulators multiply with block j, the scorer is at block j + 1.

Why so. A wgmma of [64, 16] x [16, n] takes n / 2 cycles, and reads 2 KB (its left operand, unless in registers) and
32 n bytes of shared memory at 128 bytes a cycle. For 64 rows and 64 keys that is, in cycles,

                                       tensor cores          shared memory, TMA's writes (576) included
    scores once, this form             1152 + 1024 = 2176    1152 + 512 + 256 + 576 + 64 = 2560
    scores by both warpgroups          2304 + 1024 = 3328    2304 + 512 + 576            = 3392
    scores of 32 keys by each          1152 + 1024 = 2176    1728 + 512 + 256 + 576 + 64 = 3136
    two consumers that swap P          1152 + 1024 = 2176    1152 + 512 + 64 + 576 + 64  = 2368

Two consumers, each scoring every other block, need the running maximum from each other on the way, and the registers
of a score tile beside 128 for the output; here one warpgroup owns all of the softmax, and the accumulators get by
without any of it. What both have in common decides the rest: shared memory holds two blocks of 64 keys, so a block's
time in it (arrival, scores, softmax, output, about 4000 cycles) bounds the rate at one block per half of that. Starting
S_{j+1} ahead of the softmax of S_j would keep blocks for longer, which is why the scorer does not. Blocks of 32 keys
are bound by reading Q: 24 cycles of shared memory for 16 of the tensor cores.

Shared out (RANGES, for decode and few tiles): a program has a range of units, as stream_k.py says, and puts its part of
a tile into scratch for fixup.py. Rows past the real ones are padding: they cost shared memory's and the tensor cores'
time (2560 cycles a block), of which there is more than enough while a block takes 5700 cycles to arrive (72 KB, 132
multiprocessors, 3 TB/s). Here nothing is done again by another kernel: keys that the mask hides from all rows are made
0 in shared memory, and maxima are subtracted before they are scaled, as in forward.py.

Units and conventions are hopper.py's: log2 units, hidden scores -inf, a finite start of the running maximum.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.constants import LN2, LOG2E
from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.common.gluon_pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.flash_attn.gluon_ranges import find_tile, quotient, tile_units
from graphrt.backends.triton.kernels.flash_attn.hopper_launch import (
    MAX_SHARED_BYTES,
    box_descriptor,
    launch_integers,
    multiprocessors,
    programs_of,
    side_by_side,
)
from graphrt.backends.triton.kernels.flash_attn.hopper_rings import mma_layout
from graphrt.backends.triton.kernels.flash_attn.hopper_softmax import NO_MAX, reciprocal, row_maximum

D_K, D_V = 576, 512
BLOCK_M = 64  # query rows of a tile
PART = gl.constexpr(128)  # columns of V of one product; an accumulator has two
REST = gl.constexpr(64)  # columns of K past those of V
#: Fewer query rows of a KV head than this leave most of a tile empty.
MIN_ROWS = 64


@dataclass(frozen=True)
class Config:
    """How the work is cut up; every field is a compile-time constant of the kernel.

    block_n: keys of one block (32 or 64). stages: blocks in shared memory.
    persistent: one program per multiprocessor walks several tiles; the scorer starts on the next one while the
      accumulators store the last.
    early_decay: the accumulators learn of a block's row factors before its weights are ready.
    """

    block_n: int = 64
    stages: int = 2
    persistent: bool = True
    early_decay: bool = True

    @property
    def block_m(self) -> int:
        """Query rows of one tile."""
        return BLOCK_M


#: The one believed best; see BENCHMARKS.md.
DEFAULT = Config()
#: For work that is shared out.
SHARED_OUT = Config()


@dataclass(frozen=True, eq=False)
class Ranges:
    """How work is shared out: forward.py's arguments of these names. seen, unit_start: None where nothing reads them.

    uniform: all tiles have as many units; pdl: launched as a dependent of the kernel before. Programs times units must
    fit 32 bits.
    """

    part: torch.Tensor
    programs: int
    splits: int
    seen: torch.Tensor | None
    unit_start: torch.Tensor | None
    uniform: bool
    pdl: bool


@dataclass(frozen=True)
class Spec:
    """The kernel's compile-time choices: the configuration and which of the optional features are on."""

    block_n: int
    stages: int
    persistent: bool
    early_decay: bool
    pack: int
    reversed_order: bool
    q_vec: int  # strides of q and out come in units of this many elements (4 or 1), which lets loads be 16 bytes wide
    mask_vec: int  # the same for the mask's strides (8 or 1)
    has_mask: bool
    has_softcap: bool
    has_alibi: bool
    has_sinks: bool
    has_bad: bool
    has_lse: bool
    ranges: bool = False
    uniform: bool = True
    pdl: bool = False
    rows: int = 64  # of queries that are loaded, of a tile's 64


def config_for(p: Any) -> Config | str:
    """The config for a problem (problem.py's Problem), else a reason why this kernel does not serve it."""
    reason = _why_not(p)
    if reason is None and p.n_q * p.gqa < MIN_ROWS:
        reason = f"it takes {MIN_ROWS} query rows of a KV head or more, here {p.n_q * p.gqa}"
    return reason or DEFAULT


def shared_out_config_for(p: Any) -> Config | str:
    """The same for its form that shares tiles out."""
    reason = _why_not(p)
    if reason is None and p.params.scale == 0:
        reason = "the scale must be positive, it is 0"
    return reason or SHARED_OUT


def _why_not(p: Any) -> str | None:
    k = p.k_t
    if p.out is None or p.v_t is None:
        return "the log-sum-exp alone is the portable kernel's"
    if p.k.d != D_K or p.v.d != D_V:
        return f"heads must be of {D_K} and {D_V}, they are of {p.k.d} and {p.v.d}"
    if not p.v_in_k or k.dtype.name not in ("f16", "bf16"):
        return "V must be the first columns of K's rows, in f16 or bf16"
    if p.params.scale < 0:
        return f"the scale must not be negative, it is {p.params.scale:g}"
    # TMA takes addresses and strides of whole 16 bytes.
    if any(n % 16 for n in (*k.nb[1:], p.place(k)[1])):
        return "addresses and strides of K must be whole 16 bytes"
    return None


@gluon.constexpr_function
def operand_layout(dtype, cols, rank):
    """Shared memory of a 16-bit operand tile with rows of `cols` elements."""
    return gl.NVMMASharedLayout(min(128, cols * dtype.primitive_bitwidth // 8), dtype.primitive_bitwidth, rank)


@gluon.constexpr_function
def query_layout():
    """Registers of a [64, 64] f32 piece of q as it is loaded: 16 bytes a thread, two whole rows a warp."""
    return gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])


@aggregate
class Columns:
    """`stages` buffers of [1, 1, block_n, cols]: some columns of K's blocks, filled by TMA, emptied by one warpgroup.

    The last to read the columns of a block frees them: of V's that is their accumulator, because P_j comes after S_j;
    of the rest it is the scorer.
    """

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
    def fill(self, desc, seq, head, row, step):
        """Producer: copy the columns of the rows from `row` on into the step-th block's buffer, once that is free."""
        slot = step % self.stages
        # A fresh barrier counts as having completed the phase before its first, so the first round does not wait.
        mbarrier.wait(self.empty.index(slot), ((step // self.stages) & 1) ^ 1)
        full = self.full.index(slot)
        mbarrier.expect(full, desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [seq, head, row, self.first], full, self.buffers.index(slot))

    @gluon.jit
    def wait_full(self, step):
        """Wait until the step-th block's columns have arrived."""
        mbarrier.wait(self.full.index(step % self.stages), (step // self.stages) & 1)

    @gluon.jit
    def release(self, step):
        """This warpgroup, the last one, no longer reads the step-th block's columns."""
        mbarrier.arrive(self.empty.index(step % self.stages), count=1)

    @gluon.jit
    def operand(self, step):
        """The step-th block's columns as [block_n, cols]."""
        tile = self.buffers.index(step % self.stages)
        return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def make_columns(dtype: gl.constexpr, first: gl.constexpr, cols: gl.constexpr, spec: gl.constexpr):
    layout: gl.constexpr = operand_layout(dtype, cols, 4)
    buffers = gl.allocate_shared_memory(dtype, [spec.stages, 1, 1, spec.block_n, cols], layout)
    full = make_barriers(spec.stages, 1)
    empty = make_barriers(spec.stages, 1)
    return Columns(buffers, full, empty, first, spec.stages)


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


@aggregate
class Problem:
    """The kernel's run-time arguments. Strides are in elements (see Spec for their units); unused pointers are None."""

    q: gl.tensor
    out: gl.tensor
    mask: gl.tensor | gl.constexpr
    counts: gl.tensor | gl.constexpr
    blocks: gl.tensor | gl.constexpr
    slopes: gl.tensor | gl.constexpr
    sinks: gl.tensor | gl.constexpr
    bad: gl.tensor | gl.constexpr
    lse: gl.tensor | gl.constexpr
    scale: gl.tensor
    softcap: gl.tensor
    sq_t: gl.tensor
    sq_h: gl.tensor
    sq_s: gl.tensor
    so_t: gl.tensor
    so_h: gl.tensor
    so_s: gl.tensor
    sm_t: gl.tensor
    sm_h: gl.tensor
    sm_s: gl.tensor
    mask_heads: gl.tensor
    mask_seqs: gl.tensor
    mask_groups: gl.tensor
    n_seq: gl.tensor
    n_head: gl.tensor
    gqa: gl.tensor
    n_q: gl.tensor
    n_kv: gl.tensor
    section: gl.tensor
    part: gl.tensor | gl.constexpr
    seen: gl.tensor | gl.constexpr
    unit_start: gl.tensor | gl.constexpr
    splits: gl.tensor
    first_tile: gl.tensor
    first_unit: gl.tensor
    stop_unit: gl.tensor
    turns: gl.tensor
    spec: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, *arguments):
        """The kernel's arguments in its order, without the descriptors."""
        (
            self.q, self.out, mask, counts, blocks, slopes, sinks, bad, lse, self.scale, self.softcap,
            self.sq_t, self.sq_h, self.sq_s, self.so_t, self.so_h, self.so_s, self.sm_t, self.sm_h, self.sm_s,
            self.mask_heads, self.mask_seqs, self.mask_groups, self.n_seq, self.n_head, self.gqa,
            self.n_q, self.n_kv, self.section, part, seen, unit_start, self.splits, self.first_tile, self.first_unit,
            self.stop_unit, self.turns, spec,
        ) = arguments  # fmt: skip
        self.part = gl.constexpr(None) if part is None else part
        self.seen = gl.constexpr(None) if seen is None else seen
        self.unit_start = gl.constexpr(None) if unit_start is None else unit_start
        self.mask = gl.constexpr(None) if mask is None else mask
        self.counts = gl.constexpr(None) if counts is None else counts
        self.blocks = gl.constexpr(None) if blocks is None else blocks
        self.slopes = gl.constexpr(None) if slopes is None else slopes
        self.sinks = gl.constexpr(None) if sinks is None else sinks
        self.bad = gl.constexpr(None) if bad is None else bad
        self.lse = gl.constexpr(None) if lse is None else lse
        self.spec = gl.constexpr(spec)

    @gluon.jit
    def query_tiles(self):
        """Tiles of one group of heads."""
        return gl.cdiv(self.n_q * self.spec.pack, 64)

    @gluon.jit
    def groups(self):
        """Groups of heads of one sequence."""
        return self.n_head // self.spec.pack

    @gluon.jit
    def key_blocks(self):
        """Blocks of keys if a mask hides none."""
        return gl.cdiv(self.n_kv, self.spec.block_n)

    @gluon.jit
    def rounds(self):
        """How many tiles this program takes."""
        if self.spec.ranges:
            return self.turns
        if not self.spec.persistent:
            return 1
        tiles = self.query_tiles() * self.groups() * self.n_seq
        width = gl.num_programs(0)
        whole = tiles // width
        return whole + (self.place(whole) < tiles - whole * width).to(gl.int32)

    @gluon.jit
    def place(self, turn):
        """This program's place among the tiles of one round; every other round runs backwards, because tiles are
        ordered by length."""
        pid = gl.program_id(0)
        return gl.where((turn & 1) == 1, gl.num_programs(0) - 1 - pid, pid)

    @gluon.jit
    def tile(self, turn):
        """Sequence, group of heads and query tile of this program's turn-th tile.

        Groups are cut into sections whose K fits the L2 cache; within a section the tiles of one query position are
        neighbours, and with a mask the last positions, which under a causal mask are the longest, come first.
        """
        n_qt = self.query_tiles()
        n_groups = self.groups()
        if self.spec.ranges:
            i = self.first_tile + turn
            i_head = i // n_qt
            i_seq = i_head // n_groups
            return i_seq, i_head - i_seq * n_groups, i - i_head * n_qt
        rank = turn * gl.num_programs(0) + self.place(turn)
        part = rank // (n_qt * self.section)
        first = part * self.section
        rest = rank - first * n_qt
        width = gl.minimum(self.section, self.n_seq * n_groups - first)
        row = rest // width
        index = first + rest - row * width
        seq = index // n_groups
        qt = row
        if self.spec.reversed_order:
            qt = n_qt - 1 - row
        return seq, index - seq * n_groups, qt

    @gluon.jit
    def visits(self, seq, group, qt):
        """How many blocks the tile visits without and with mask work, and where its list of blocks starts."""
        if self.spec.has_mask:
            mt = ((seq % self.mask_seqs) * self.mask_groups + group % self.mask_groups) * self.query_tiles() + qt
            n_full = gl.load(self.counts + 2 * mt)
            n_all = n_full + gl.load(self.counts + 2 * mt + 1)
            start = mt.to(gl.int64) * self.key_blocks()
        else:
            n_full = self.n_kv // self.spec.block_n
            n_all = self.key_blocks()
            start = gl.to_tensor(0).to(gl.int64)
        return n_full, n_all, start

    @gluon.jit
    def segment(self, turn, n_all):
        """Of this program's turn-th tile: its blocks' first and end, whether that is all of it, its part's slot."""
        start, n_units = tile_units(
            self.first_tile + turn, self.counts, self.key_blocks(), self.spec.has_mask, self.unit_start,
            self.spec.uniform,
        )  # fmt: skip
        low = gl.maximum(self.first_unit - start, 0)
        high = gl.minimum(self.stop_unit - start, n_units)
        finishes = high == n_units
        slot = gl.program_id(0)
        if self.splits == 0:
            slot = 2 * slot + gl.where(finishes, 0, 1)
        return low, gl.minimum(high, n_all), (low == 0) & finishes, slot

    @gluon.jit
    def slot_memory(self, slot):
        """A slot of scratch: acc [64, 512], m [64], l [64]."""
        return self.part + slot.to(gl.int64) * (64 * (4 * PART + 2))

    @gluon.jit
    def block(self, start, j):
        """Index of the j-th block that a tile visits. The list's tail past its counts is never used as an address."""
        if self.spec.has_mask:
            last = self.key_blocks() - 1
            index = gl.load(self.blocks + start + gl.minimum(j, last))
            return gl.minimum(gl.maximum(index, 0), last)
        return j

    @gluon.jit
    def rows(self, group, qt, layout: gl.constexpr):
        """Query and head of each of the tile's 64 rows."""
        row = qt * 64 + gl.arange(0, 64, layout)
        token = row // self.spec.pack
        return token, group * self.spec.pack + (row - token * self.spec.pack)


@gluon.jit
def produce(p, part_desc, rest_desc, part0, part1, part2, part3, rest):
    """The producer warp: stream the blocks of every tile, the parts in the order in which the scorer takes them."""
    step = 0
    for turn in range(p.rounds()):
        seq, group, qt = p.tile(turn)
        kv_head = group * p.spec.pack // p.gqa
        n_full, n_all, start = p.visits(seq, group, qt)
        low = 0
        high = n_all
        if p.spec.ranges:
            low, high, _whole, _slot = p.segment(turn, n_all)
        block = p.block(start, low)
        for j in range(low, high):
            row = block * p.spec.block_n
            block = p.block(start, j + 1)  # ahead of the waits
            rest.fill(rest_desc, seq, kv_head, row, step + j - low)
            part0.fill(part_desc, seq, kv_head, row, step + j - low)
            part2.fill(part_desc, seq, kv_head, row, step + j - low)
            part1.fill(part_desc, seq, kv_head, row, step + j - low)
            part3.fill(part_desc, seq, kv_head, row, step + j - low)
        step += high - low
    if p.spec.pdl:
        gdc_launch_dependents()


@gluon.jit
def fetch_queries(p, seq, group, qt, piece: gl.constexpr):
    """The piece-th 64 columns of a tile's query rows, f32 [64, 64]; rows past n_q are 0."""
    layout: gl.constexpr = query_layout()
    token, head = p.rows(group, qt, gl.SliceLayout(1, layout))
    cols = piece * REST + gl.arange(0, REST, gl.SliceLayout(0, layout))
    offsets = (token.to(gl.int64) * p.sq_t + head.to(gl.int64) * p.sq_h) * p.spec.q_vec
    base = p.q + seq.to(gl.int64) * p.sq_s * p.spec.q_vec
    return gl.load(base + offsets[:, None] + cols[None, :], mask=(token < p.n_q)[:, None], other=0.0)


@gluon.jit
def load_queries(p, seq, group, qt, q_pieces, q_rest):
    """Queries of a tile to shared memory, 16 bits wide, two pieces of 64 columns at a time."""
    dtype: gl.constexpr = q_rest.dtype
    for i in gl.static_range(4):
        a = fetch_queries(p, seq, group, qt, 2 * i)
        b = fetch_queries(p, seq, group, qt, 2 * i + 1)
        q_pieces.index(2 * i).store(a.to(dtype))
        q_pieces.index(2 * i + 1).store(b.to(dtype))
    q_rest.store(fetch_queries(p, seq, group, qt, 8).to(dtype))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def fetch_rows(p, seq, group, qt, piece: gl.constexpr):
    """The piece-th 64 columns of a tile's first query rows, 16 bits wide [rows, 64]."""
    layout: gl.constexpr = query_layout()
    row = qt * 64 + gl.arange(0, p.spec.rows, gl.SliceLayout(1, layout))
    token = row // p.spec.pack
    head = group * p.spec.pack + (row - token * p.spec.pack)
    cols = piece * REST + gl.arange(0, REST, gl.SliceLayout(0, layout))
    offsets = (token.to(gl.int64) * p.sq_t + head.to(gl.int64) * p.sq_h) * p.spec.q_vec
    base = p.q + seq.to(gl.int64) * p.sq_s * p.spec.q_vec
    return gl.load(base + offsets[:, None] + cols[None, :], mask=(token < p.n_q)[:, None], other=0.0)


@gluon.jit
def clear_queries(p, q_pieces, q_rest):
    """The rows that load_few_queries leaves out."""
    zeros = gl.full([64, REST], 0.0, gl.float32, query_layout()).to(q_rest.dtype)
    for i in gl.static_range(8):
        q_pieces.index(i).store(zeros)
    q_rest.store(zeros)


@gluon.jit
def load_few_queries(p, seq, group, qt, q_pieces, q_rest):
    """The first rows of a tile to shared memory, with one wait for all: load_queries has no registers for that."""
    a = fetch_rows(p, seq, group, qt, 0)
    b = fetch_rows(p, seq, group, qt, 1)
    c = fetch_rows(p, seq, group, qt, 2)
    d = fetch_rows(p, seq, group, qt, 3)
    e = fetch_rows(p, seq, group, qt, 4)
    f = fetch_rows(p, seq, group, qt, 5)
    g = fetch_rows(p, seq, group, qt, 6)
    h = fetch_rows(p, seq, group, qt, 7)
    i = fetch_rows(p, seq, group, qt, 8)
    store_rows(p, q_pieces.index(0), a)
    store_rows(p, q_pieces.index(1), b)
    store_rows(p, q_pieces.index(2), c)
    store_rows(p, q_pieces.index(3), d)
    store_rows(p, q_pieces.index(4), e)
    store_rows(p, q_pieces.index(5), f)
    store_rows(p, q_pieces.index(6), g)
    store_rows(p, q_pieces.index(7), h)
    store_rows(p, q_rest, i)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_rows(p, tile, values):
    tile.slice(0, p.spec.rows, 0).store(values.to(tile.dtype))


@gluon.jit
def clear_hidden(p, columns, bits0, bits1, step):
    """Rows of a block's columns whose bits are not set become 0: 0 times the NaN that they may hold would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    key = gl.arange(0, p.spec.block_n, gl.SliceLayout(1, layout))
    seen = ((gl.where(key < 32, bits0, bits1) >> (key & 31)) & 1) != 0
    tile = columns.operand(step)
    values = tile.load(layout)
    tile.store(gl.where(seen[:, None], values, gl.full_like(values, 0.0)))


@gluon.jit
def load_mask(p, seq, group, qt, block):
    """[64, block_n] f16 mask values in the scores' registers; -inf past n_q and n_kv."""
    layout: gl.constexpr = mma_layout(p.spec.block_n)
    token, head = p.rows(group, qt, gl.SliceLayout(1, layout))
    cols = block * p.spec.block_n + gl.arange(0, p.spec.block_n, gl.SliceLayout(0, layout))
    inside = cols < p.n_kv
    if p.spec.mask_vec > 1:
        # Rows start at multiples of 16 bytes, so the pair of an odd last column is readable: ask by pairs, and each
        # thread's two neighbouring columns become one 4-byte load.
        inside = cols // 2 * 2 < p.n_kv
    rows = token.to(gl.int64) * p.sm_t + (head % p.mask_heads).to(gl.int64) * p.sm_h
    base = p.mask + (seq % p.mask_seqs).to(gl.int64) * p.sm_s * p.spec.mask_vec
    keep = (token < p.n_q)[:, None] & inside[None, :]
    return gl.load(base + (rows * p.spec.mask_vec)[:, None] + cols[None, :], mask=keep, other=float("-inf"))


@gluon.jit
def to_log2_units(p, s):
    """Scale (and soft-cap) raw scores, times log2(e)."""
    if p.spec.has_softcap:
        # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both ends, where exp2 is 0 or inf.
        e = gl.exp2(s * (p.scale / p.softcap * (2.0 * LOG2E)))
        cap = p.softcap * LOG2E
        return cap - (2.0 * cap) * reciprocal(e + 1.0)
    return s * (p.scale * LOG2E)


@gluon.jit
def hide(p, s, mask, block, slope, unit):
    """Add the mask (times each row's slope) to scores and make the hidden ones -inf, NaN or not. unit: of the scores,
    over log2 units."""
    layout: gl.constexpr = mma_layout(p.spec.block_n)
    cols = block * p.spec.block_n + gl.arange(0, p.spec.block_n, gl.SliceLayout(0, layout))
    inside = (cols < p.n_kv)[None, :]
    if p.spec.has_mask:
        bias = mask.to(gl.float32)
        if p.spec.has_alibi:
            s = gl.where(inside & (bias != float("-inf")), s + bias * (slope * unit)[:, None], float("-inf"))
        else:
            s = gl.where(inside & (bias != float("-inf")), s + bias * (LOG2E * unit), float("-inf"))
    else:
        s = gl.where(inside, s, float("-inf"))
    return s


@gluon.jit
def multiply_part(q_parts, part: gl.constexpr, columns, s, step):
    """Start adding a part's share of the scores."""
    columns.wait_full(step)
    return warpgroup_mma(q_parts.index(part), columns.operand(step).permute((1, 0)), s, is_async=True)


@gluon.jit
def start_scores(p, q_parts, q_rest, part0, part1, part2, part3, rest, step):
    """Start S = Q K^T for the step-th block, f32 [64, block_n], part by part as they arrive."""
    s = gl.full([64, p.spec.block_n], 0.0, gl.float32, mma_layout(p.spec.block_n))
    rest.wait_full(step)
    s = warpgroup_mma(q_rest, rest.operand(step).permute((1, 0)), s, use_acc=False, is_async=True)
    s = multiply_part(q_parts, 0, part0, s, step)
    s = multiply_part(q_parts, 2, part2, s, step)
    s = multiply_part(q_parts, 1, part1, s, step)
    return multiply_part(q_parts, 3, part3, s, step)


@gluon.jit
def attend(
    p, q_parts, q_rest, part0, part1, part2, part3, rest, weights, factors, seq, group, qt, start, j, slope, m, den,
    step, message, partial: gl.constexpr,
):  # fmt: skip
    """One block in the scorer: its scores, the factors on what was summed before, its weights. Returns m and den."""
    s = start_scores(p, q_parts, q_rest, part0, part1, part2, part3, rest, step)
    block = 0
    mask = 0
    if partial:
        block = p.block(start, j)
        if p.spec.has_mask:
            mask = load_mask(p, seq, group, qt, block)
    factors.wait_empty(message)  # long since: the accumulators copy them to registers
    s = warpgroup_mma_wait(0, [s])
    rest.release(step)
    if p.spec.ranges:
        return weigh_exactly(
            p, s, part0, part1, part2, part3, weights, factors, start, block, mask, slope, m, den, step, partial
        )  # fmt: skip
    if partial:
        s = hide(p, to_log2_units(p, s), mask, block, slope, 1.0)
        unit = 1.0
    elif p.spec.has_softcap:
        s = to_log2_units(p, s)
        unit = 1.0
    else:
        # The scale goes into the subtraction of the maximum (one fused multiply-add).
        unit = p.scale * LOG2E
    m_new = gl.maximum(m, row_maximum(s) * unit)
    decay = gl.exp2(m - m_new)
    factors.buffer.store(decay)
    if p.spec.early_decay:
        factors.publish()
    w = gl.exp2(s * unit - m_new[:, None])
    den = den * decay + gl.sum(w, 1)
    weights.wait_empty(step)
    weights.buffer.store(w.to(weights.buffer.dtype))
    fence_async_shared()
    weights.publish()
    if not p.spec.early_decay:
        # The barrier in between also covered these stores.
        mbarrier.arrive(factors.full.index(0), count=1)
    return m_new, den


@gluon.jit
def weigh_exactly(
    p, s, part0, part1, part2, part3, weights, factors, start, block, mask, slope, m, den, step, partial: gl.constexpr
):  # fmt: skip
    """What follows the scores where work is shared out. s and m in units of the scores, as forward.py has them."""
    unit = score_unit(p)
    if p.spec.has_softcap:
        s = to_log2_units(p, s)
    if partial:
        s = hide(p, s, mask, block, slope, 1.0 / unit)
    m_new = gl.maximum(m, row_maximum(s))
    decay = gl.exp2((m - m_new) * unit)
    factors.buffer.store(decay)
    factors.publish()
    w = gl.exp2((s - m_new[:, None]) * unit)
    den = den * decay + gl.sum(w, 1)
    if partial and p.spec.has_mask:
        words: gl.constexpr = p.spec.block_n // 32
        at = p.seen + (start + block) * words
        bits0 = gl.load(at)
        bits1 = gl.load(at + words - 1)
        if (bits0 & bits1) != -1:
            clear_hidden(p, part0, bits0, bits1, step)
            clear_hidden(p, part1, bits0, bits1, step)
            clear_hidden(p, part2, bits0, bits1, step)
            clear_hidden(p, part3, bits0, bits1, step)
    weights.wait_empty(step)
    weights.buffer.store(w.to(weights.buffer.dtype))
    fence_async_shared()
    weights.publish()
    return m_new, den


@gluon.jit
def score_unit(p):
    """Log2 units of a score as weigh_exactly has it."""
    if p.spec.has_softcap:
        return 1.0
    return p.scale * LOG2E


@gluon.jit
def score(p, q_pieces, q_rest, part0, part1, part2, part3, rest, weights, factors):
    """The scorer. Of each tile it sends n_all weights, and n_all + 1 factors of rows, the last one for the output."""
    layout: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.block_n))
    # Swizzled rows of 128 bytes lie in panels of 64 columns, one after the other: two pieces are one operand.
    operands: gl.constexpr = operand_layout(q_rest.dtype, PART, 2)
    q_parts = q_pieces._reinterpret(q_rest.dtype, [4, 64, PART], operands)
    step = 0
    message = 0
    if p.spec.rows < 64:
        clear_queries(p, q_pieces, q_rest)
    for turn in range(p.rounds()):
        seq, group, qt = p.tile(turn)
        n_full, n_all, start = p.visits(seq, group, qt)
        low = 0
        first_partial = n_full
        if p.spec.ranges:
            low, n_all, whole, slot = p.segment(turn, n_all)
            n_full = gl.minimum(n_full, n_all)
            first_partial = gl.maximum(n_full, low)
        token, head = p.rows(group, qt, layout)
        slope = 0.0
        if p.spec.has_alibi:
            slope = gl.load(p.slopes + head) * LOG2E
        if p.spec.rows < 64:
            load_few_queries(p, seq, group, qt, q_pieces, q_rest)
        else:
            load_queries(p, seq, group, qt, q_pieces, q_rest)
        m = gl.full([64], NO_MAX, gl.float32, layout)
        den = gl.full([64], 0.0, gl.float32, layout)
        for j in range(low, n_full):
            m, den = attend(
                p, q_parts, q_rest, part0, part1, part2, part3, rest, weights, factors, seq, group, qt, start, j,
                slope, m, den, step + j - low, message + j - low, False,
            )  # fmt: skip
        for j in range(first_partial, n_all):
            m, den = attend(
                p, q_parts, q_rest, part0, part1, part2, part3, rest, weights, factors, seq, group, qt, start, j,
                slope, m, den, step + j - low, message + j - low, True,
            )  # fmt: skip
        step += n_all - low
        message += n_all - low

        if p.spec.ranges:
            m = m * score_unit(p)
            if not whole:
                p_slot = p.slot_memory(slot) + 4 * PART * 64 + gl.arange(0, 64, layout)
                gl.store(p_slot, gl.where(den == 0.0, float("-inf"), m), mask=token < p.n_q)
                gl.store(p_slot + 64, den, mask=token < p.n_q)
        shrink = gl.full([64], 1.0, gl.float32, layout)
        if p.spec.has_sinks:
            sink = gl.load(p.sinks + head) * LOG2E
            m_new = gl.maximum(m, sink)
            shrink = gl.exp2(m - m_new)
            den = den * shrink + gl.exp2(sink - m_new)
            m = m_new
        factors.wait_empty(message)
        factors.buffer.store(gl.where(den == 0.0, 0.0, shrink / den))
        factors.publish()
        message += 1
        if p.spec.has_lse:
            at = p.lse + (seq.to(gl.int64) * p.n_q + token) * p.n_head + head
            stored = token < p.n_q
            if p.spec.ranges:
                stored = stored & whole
            gl.store(at, (m + gl.log2(den)) * LN2, mask=stored)


@gluon.jit
def accumulate(p, first, second, weights, factors, half: gl.constexpr):
    """An accumulator: columns 256 * half .. 256 * half + 255 of the output, from two parts of V with those columns."""
    rows: gl.constexpr = gl.SliceLayout(1, mma_layout(PART))
    step = 0
    message = 0
    for turn in range(p.rounds()):
        seq, group, qt = p.tile(turn)
        n_full, n_all, start = p.visits(seq, group, qt)
        low = 0
        if p.spec.ranges:
            low, n_all, whole, slot = p.segment(turn, n_all)
        acc0 = gl.full([64, PART], 0.0, gl.float32, mma_layout(PART))
        acc1 = gl.full([64, PART], 0.0, gl.float32, mma_layout(PART))
        for j in range(low, n_all):
            factors.wait_full(message + j - low)
            decay = factors.buffer.load(rows)
            gl.thread_barrier()
            factors.release()
            acc0 = acc0 * decay[:, None]
            acc1 = acc1 * decay[:, None]
            weights.wait_full(step + j - low)
            first.wait_full(step + j - low)
            acc0 = warpgroup_mma(weights.buffer, first.operand(step + j - low), acc0, is_async=True)
            second.wait_full(step + j - low)
            acc1 = warpgroup_mma(weights.buffer, second.operand(step + j - low), acc1, is_async=True)
            acc0 = warpgroup_mma_wait(1, [acc0])
            gl.thread_barrier()
            first.release(step + j - low)
            acc1 = warpgroup_mma_wait(0, [acc1])
            gl.thread_barrier()
            weights.release()
            second.release(step + j - low)
        factors.wait_full(message + n_all - low)
        factor = factors.buffer.load(rows)
        gl.thread_barrier()
        factors.release()
        if p.spec.ranges:
            if whole:
                finish(p, acc0, factor, seq, group, qt, 2 * half)
                finish(p, acc1, factor, seq, group, qt, 2 * half + 1)
            else:
                store_part(p, acc0, slot, group, qt, 2 * half)
                store_part(p, acc1, slot, group, qt, 2 * half + 1)
        else:
            bad = finish(p, acc0, factor, seq, group, qt, 2 * half)
            bad = gl.maximum(bad, finish(p, acc1, factor, seq, group, qt, 2 * half + 1))
        if p.spec.has_bad:
            # Each accumulator owns half of the tile's int32, so that neither atomics nor a cleared array are needed.
            tile = (seq * p.groups() + group) * p.query_tiles() + qt
            flags = p.bad.to(gl.pointer_type(gl.int16), bitcast=True)
            gl.store(flags + 2 * tile + half, gl.max(bad, 0).to(gl.int16))
        step += n_all - low
        message += n_all - low + 1


@gluon.jit
def finish(p, acc, factor, seq, group, qt, part: gl.constexpr):
    """Store a quarter of a tile, times each row's factor (0: a row without keys). Returns int32 [64], 1 for each row
    that holds NaN or infinity."""
    layout: gl.constexpr = mma_layout(PART)
    token, head = p.rows(group, qt, gl.SliceLayout(1, layout))
    cols = part * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
    stored = token < p.n_q
    values = gl.where((factor == 0.0)[:, None], 0.0, acc * factor[:, None])
    offsets = (token.to(gl.int64) * p.so_t + head.to(gl.int64) * p.so_h) * p.spec.q_vec
    base = p.out + seq.to(gl.int64) * p.so_s * p.spec.q_vec
    gl.store(base + offsets[:, None] + cols[None, :], values, mask=stored[:, None])
    # 0 * x is 0 for every finite x and NaN otherwise.
    return gl.where(stored & (gl.sum(values * 0.0, 1) != 0.0), 1, 0)


@gluon.jit
def store_part(p, acc, slot, group, qt, part: gl.constexpr):
    """Store a quarter of a tile's sums, as they are, into a slot."""
    layout: gl.constexpr = mma_layout(PART)
    token, _head = p.rows(group, qt, gl.SliceLayout(1, layout))
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = part * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
    at = p.slot_memory(slot) + (row * (4 * PART))[:, None] + cols[None, :]
    gl.store(at, acc, mask=(token < p.n_q)[:, None])


@gluon.jit
def program_range(counts, n_blocks, unit_start, programs, splits, n_tiles, spec: gl.constexpr):
    """(first tile, first unit, end, tiles) of this program, as ranges.py has it in 32 bits."""
    pid = gl.program_id(0)
    if splits > 0:
        tile = quotient(pid, splits)
        part = pid - tile * splits
        start, n = tile_units(tile, counts, n_blocks, spec.has_mask, unit_start, spec.uniform)
        unit = start + quotient(part * n, splits)
        stop = start + quotient((part + 1) * n, splits)
        last = tile
    else:
        if spec.uniform:
            total, n = tile_units(n_tiles, counts, n_blocks, spec.has_mask, unit_start, True)
        else:
            total = gl.load(unit_start + n_tiles)
        unit = quotient(pid * total, programs)
        stop = quotient((pid + 1) * total, programs)
        if spec.uniform:
            tile = quotient(unit, n)
            last = quotient(gl.maximum(stop, 1) - 1, n)
        else:
            tile = find_tile(unit, unit_start, n_tiles)
            last = find_tile(gl.maximum(stop, 1) - 1, unit_start, n_tiles)
    return tile, unit, stop, gl.where(unit < stop, last - tile + 1, 0)


INTEGER_ARGUMENTS = (
    "sq_t", "sq_h", "sq_s", "so_t", "so_h", "so_s", "sm_t", "sm_h", "sm_s", "mask_heads", "mask_seqs", "mask_groups",
    "n_seq", "n_head", "gqa", "n_q", "n_kv", "section", "programs", "splits", "n_tiles",
)  # fmt: skip


@accesses(reads="q part_desc rest_desc mask counts blocks slopes sinks seen unit_start", writes="out bad lse part")
@gluon.jit(do_not_specialize=("scale", "softcap", *INTEGER_ARGUMENTS))
def hopper_mla_attn_kernel(
    q, part_desc, rest_desc, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
    sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
    n_seq, n_head, gqa, n_q, n_kv, section, programs, splits, n_tiles, part, seen, unit_start, spec: gl.constexpr,
):  # fmt: skip
    if spec.pdl:
        gdc_wait()
    first_tile = n_tiles
    first_unit = n_tiles
    stop_unit = n_tiles
    turns = n_tiles
    if spec.ranges:
        first_tile, first_unit, stop_unit, turns = program_range(
            counts, gl.cdiv(n_kv, spec.block_n), unit_start, programs, splits, n_tiles, spec
        )  # fmt: skip
    p = Problem(
        q, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
        sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
        n_seq, n_head, gqa, n_q, n_kv, section, part, seen, unit_start, splits, first_tile, first_unit, stop_unit,
        turns, spec,
    )  # fmt: skip
    dtype: gl.constexpr = part_desc.dtype
    q_pieces = gl.allocate_shared_memory(dtype, [8, 64, REST], operand_layout(dtype, REST, 2))
    q_rest = gl.allocate_shared_memory(dtype, [64, REST], operand_layout(dtype, REST, 2))
    part0 = make_columns(dtype, 0, PART, spec)
    part1 = make_columns(dtype, PART, PART, spec)
    part2 = make_columns(dtype, 2 * PART, PART, spec)
    part3 = make_columns(dtype, 3 * PART, PART, spec)
    rest = make_columns(dtype, 4 * PART, REST, spec)
    weights = make_channel(gl.allocate_shared_memory(dtype, [64, spec.block_n], operand_layout(dtype, spec.block_n, 2)))
    factors = make_channel(gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0])))
    # setmaxnreg moves registers from the producer's warpgroup to the accumulators; the scorer, the default partition,
    # takes what the others leave of the 64 Ki registers: 512 a lane, less 2 * 168 and 24.
    gl.warp_specialize(
        [
            (score, (p, q_pieces, q_rest, part0, part1, part2, part3, rest, weights, factors)),
            (accumulate, (p, part0, part1, weights, factors, 0)),
            (accumulate, (p, part2, part3, weights, factors, 1)),
            (produce, (p, part_desc, rest_desc, part0, part1, part2, part3, rest)),
        ],
        [4, 4, 1],
        [168, 168, 24],
    )


def shared_bytes(config: Config) -> int:
    """Shared memory of one program: queries, blocks of K, weights, and room for barriers and the compiler's own use."""
    return 2 * (D_K * (BLOCK_M + config.stages * config.block_n) + BLOCK_M * config.block_n) + 2048


def hopper_mla_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    pack: int,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bad: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: Config | None = None,
    ranges: Ranges | None = None,
) -> None:
    """out = softmax(scale * q k^T (soft-capped) + slope * mask) v, v = k[..., :512], for every sequence and head.

    q: f32 [n_seq, n_head, n_q, 576], any strides but the last, which is 1.
    k: f16 or bf16 [n_seq, n_head_kv, n_kv, 576], strides of whole 16 bytes. Head h reads kv head
      h // (n_head / n_head_kv).
    out: f32 [n_seq, n_q, n_head, 512], written; any strides but the last.
    scale: not negative. softcap: 0 for none.
    pack: heads whose rows share a tile, a divisor of n_head / n_head_kv up to 64. Tiles are those of
      Tiling.of(problem, 64, config.block_n, pack).
    mask: f16 [m3, m2, n_q, n_kv], last stride 1; sequence s and head h use mask[s % m3, h % m2]. -inf hides a key,
      whatever its score. With it come the classes of its blocks, for each of the m3 * mask_groups * n_qt mask tiles:
      counts int32 [mask tiles, 2], how many key blocks hold only zeros (full) and how many are visited besides
      (partial); blocks int32 [mask tiles, ceil(n_kv / block_n)], their indices, the full ones first. A block that
      reaches past n_kv is never full.
    slopes: f32 [n_head], ALiBi factors of the mask. sinks: f32 [n_head], a score that joins each row's denominator.
    bad: int32 [n_seq * (n_head / pack) * n_qt], written: 0, or not 0 where a tile's output holds NaN or infinity.
      (V may hold such values in rows that the mask hides; the products here let them through.)
    lse: f32 [n_seq, n_q, n_head] contiguous, written: the natural logarithm of each row's denominator.
    ranges: shares the tiles out; then counts etc. are the plan's of mask.py with block_m 64, bad is None, and fixup.py
      has to follow if several programs share a tile.
    A row whose keys are all hidden gives 0.
    """
    n_seq, n_head, n_q, d = q.shape
    n_head_kv, n_kv = k.shape[1:3]
    config = config or DEFAULT
    gqa = n_head // n_head_kv
    if k.dtype not in (torch.float16, torch.bfloat16) or d != D_K or k.shape[3] != D_K or out.shape[3] != D_V:
        raise ValueError(f"q {q.shape}, k {k.dtype} {k.shape} and out {out.shape} are not of MLA's shape")
    if scale < 0:
        raise ValueError(f"scale must not be negative, got {scale}")
    if not 1 <= pack <= BLOCK_M or gqa % pack:
        raise ValueError(f"pack must divide the {gqa} heads of a KV head and be at most {BLOCK_M}, got {pack}")
    if shared_bytes(config) > MAX_SHARED_BYTES:
        raise ValueError(f"{config} needs {shared_bytes(config)} bytes of shared memory")
    n_groups = n_head // pack
    n_qt = triton.cdiv(n_q * pack, BLOCK_M)
    mask_groups = 1
    if mask is not None:
        assert counts is not None and blocks is not None, "a mask comes with the classes of its blocks"
        mask_groups = 1 if mask.shape[1] == 1 else n_groups
    ordered = mask is not None
    section = side_by_side(2 * D_K * max(1, n_kv), gqa // pack, n_seq * n_groups, ordered)
    q_vec, mask_vec, integers = launch_integers(
        q, out, mask, class_heads=mask_groups, gqa=gqa, n_kv=n_kv, section=section
    )
    tiles = n_qt * n_groups * n_seq
    spec = Spec(
        block_n=config.block_n,
        stages=config.stages,
        persistent=config.persistent,
        early_decay=config.early_decay,
        pack=pack,
        reversed_order=ordered,
        q_vec=q_vec,
        mask_vec=mask_vec,
        has_mask=mask is not None,
        has_softcap=softcap != 0.0,
        has_alibi=slopes is not None,
        has_sinks=sinks is not None,
        has_bad=bad is not None,
        has_lse=lse is not None,
        ranges=ranges is not None,
        uniform=ranges is None or ranges.uniform,
        pdl=ranges is not None and ranges.pdl,
        rows=16 if ranges is not None and n_q * pack <= 16 else 64,
    )
    if ranges is not None:
        programs = ranges.programs
    else:
        programs = programs_of(tiles, config.persistent, multiprocessors(q.device))
    integers += [programs, ranges.splits if ranges is not None else 0, tiles]
    hopper_mla_attn_kernel[(programs,)](
        q,
        box_descriptor(k, config.block_n, PART.value, idle=D_K),
        box_descriptor(k, config.block_n, REST.value, idle=D_K),
        out,
        mask,
        counts,
        blocks,
        slopes,
        sinks,
        bad,
        lse,
        float(scale),
        float(softcap),
        *integers,
        ranges.part if ranges is not None else None,
        ranges.seen if ranges is not None else None,
        ranges.unit_start if ranges is not None else None,
        spec,
        num_warps=4,
        maxnreg=128,  # of the 512 threads at the start, before setmaxnreg: an even share
        **({"launch_pdl": True} if spec.pdl else {}),
    )
