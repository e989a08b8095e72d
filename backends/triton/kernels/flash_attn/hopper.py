"""Flash attention forward for Hopper (sm_90), written in Gluon with explicit warp specialization.

One thread block owns one tile at a time: 64 * N_WG query rows of one head of one sequence. One warp (the producer)
copies blocks of K and V through TMA into two rings of shared-memory buffers; N_WG warpgroups (the consumers) each hold
64 of the query rows and run, for every block j that the tile visits,

    S_j = Q K_j^T          (wgmma, both operands in shared memory, f32 scores in registers)
    P_j = softmax step     (online: running row maximum m and denominator den, in log2 units)
    O  += P_j V_j          (wgmma, P in registers)

The loop is skewed by one block: S_j is started first, then O += P_{j-1} V_{j-1}, and the softmax of block j runs while
the second product is still in flight. With `pingpong` the warpgroups also take turns at starting their products, so
that the softmax of one falls on the products of another.

Everything that is exponentiated is in log2 units (scores * log2(e)); masked scores are -inf and the running maximum
starts at a finite, very small number, so that -inf minus -inf never arises.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# Odd polynomials for tanh(x): where |x| <= SHORT_RANGE to 2.7e-6, where |x| <= LONG_RANGE to 1.1e-6. Both keep falling
# below, to minus infinity.
SHORT_RANGE = gl.constexpr(0.45)
SHORT_TANH = gl.constexpr((0.99995852, -0.33165442, 0.11609694))
LONG_RANGE = gl.constexpr(0.9)
LONG_TANH = gl.constexpr((0.999986742, -0.332987063, 0.130767856, -0.045938528, 0.00984349093))
# Their tanh at the end of their range, and so many log2 units below a row's maximum what they have wrong further down
# is less than f16's rounding of a weight: the short one's error is still small where its range ends.
SHORT_LAST, SHORT_BELOW = gl.constexpr(0.42189901), gl.constexpr(13.8)
LONG_LAST, LONG_BELOW = gl.constexpr(0.7162978701990245), gl.constexpr(24.0)
# Which form of the soft cap a warp takes, see cap_level.
SHORT, LONG, EXACT = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# Below every score that a finite f16 product can give, and finite: see the module's docstring.
NO_MAX = gl.constexpr(-1.0e30)
# Up to this |maximum| in log2 units, half a unit of its last place (3e-5) is nothing beside f16's rounding of a weight.
EXACT_TO = gl.constexpr(512.0)

WG_ROWS = 64  # the M of one wgmma instruction: query rows of one consumer warpgroup
MAX_SHARED_BYTES = 232448  # of one thread block on sm_90
LARGE_CAP = 28.0  # soft caps from here on: see cap_level
L2_SECTION_BYTES = 32 << 20  # K and V of the heads that run side by side should stay within this much of the L2 cache


@dataclass(frozen=True)
class Config:
    """How the work is cut up; every field is a compile-time constant of the kernel.

    block_n: keys of one block (64 or 128).
    stages: buffers in each of the K and V rings.
    n_wg: consumer warpgroups (2 or 3).
    pingpong: the warpgroups take turns at issuing their products.
    persistent: one program per multiprocessor walks several tiles, and the producer runs ahead into the next one.
    """

    block_n: int
    stages: int
    n_wg: int = 2
    pingpong: bool = False
    persistent: bool = True

    @property
    def block_m(self) -> int:
        """Query rows of one tile."""
        return WG_ROWS * self.n_wg


@dataclass(frozen=True)
class Spec:
    """The kernel's compile-time choices: the configuration and which of the optional features are on."""

    d: int
    block_n: int
    stages: int
    n_wg: int
    pingpong: bool
    persistent: bool
    reversed_order: bool
    q_vec: int  # strides of q and out come in units of this many elements (4 or 1), which lets loads be 16 bytes wide
    has_mask: bool
    mask_vec: int  # the same for the mask's strides (8 or 1)
    has_softcap: bool
    has_alibi: bool
    has_sinks: bool
    has_bad: bool
    has_lse: bool
    # Quantized types whose order of elements (see slot_elements) the columns of the query tile and of the output have.
    k_kind: str = ""
    v_kind: str = ""
    pack: int = 1  # heads whose rows share a tile: row r is token r // pack of head r % pack (1, 2, 4 or 8)
    mask_stages: int = 0  # buffers of the ring through which TMA brings the mask; 0: consumers load it themselves
    # A row's largest score alone tells which form of the soft cap serves (see cap_level); False: the least does too.
    large_cap: bool = False


#: By head size. The fastest of those tried on an H100; see BENCHMARKS.md.
DEFAULTS: dict[int, Config] = {
    64: Config(block_n=128, stages=2, n_wg=2, pingpong=True),
    128: Config(block_n=128, stages=2, n_wg=2, persistent=False),
    256: Config(block_n=64, stages=2, n_wg=2, persistent=False),
}
#: Fewer queries than this leave most of a tile empty.
MIN_QUERIES = 48


def config_for(p: Any) -> Config | None:
    """The config for a problem (problem.py's Problem), None if this kernel does not serve it."""
    k, v = p.k_t, p.v_t
    if p.out is None or v is None or k.dtype is not v.dtype or k.dtype.name not in ("f16", "bf16"):
        return None
    if k.ne[0] != v.ne[0] or k.ne[0] not in DEFAULTS or p.n_q < MIN_QUERIES or p.params.scale < 0:
        return None
    # TMA takes addresses and strides of whole 16 bytes.
    if any(n % 16 for t in (k, v) for n in (*t.nb[1:], p.place(t)[1])):
        return None
    return DEFAULTS[k.ne[0]]


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
def query_layout(d):
    """Registers of a [64, d] f32 tile of q as it is loaded: 16 bytes a thread, whole rows by consecutive threads."""
    lanes = min(32, d // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def tile_shared_layout(dtype, rank):
    """Shared memory of a 16-bit operand tile whose rows hold at least 128 bytes."""
    return gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, rank)


@aggregate
class Ring:
    """`stages` buffers of [1, 1, block_n, d], filled by TMA and emptied by every consumer warpgroup."""

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
    def fill(self, desc, seq, head, row, step):
        """Producer: copy [block_n, d] rows from `row` on into the buffer of the step-th block, once that is free."""
        slot = step % self.stages
        # A fresh barrier counts as having completed the phase before its first, so the first round does not wait.
        mbarrier.wait(self.empty.index(slot), ((step // self.stages) & 1) ^ 1)
        full = self.full.index(slot)
        mbarrier.expect(full, desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [seq, head, row, 0], full, self.buffers.index(slot))

    @gluon.jit
    def wait_full(self, step):
        """Consumer: wait until the step-th block has arrived."""
        mbarrier.wait(self.full.index(step % self.stages), (step // self.stages) & 1)

    @gluon.jit
    def release(self, step):
        """Consumer: this warpgroup no longer reads the step-th block."""
        mbarrier.arrive(self.empty.index(step % self.stages), count=1)

    @gluon.jit
    def operand(self, step):
        """The step-th block as [block_n, d]."""
        tile = self.buffers.index(step % self.stages)
        return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def make_ring(dtype: gl.constexpr, spec: gl.constexpr):
    layout: gl.constexpr = tile_shared_layout(dtype, 4)
    buffers = gl.allocate_shared_memory(dtype, [spec.stages, 1, 1, spec.block_n, spec.d], layout)
    full = make_barriers(spec.stages, 1)
    empty = make_barriers(spec.stages, spec.n_wg)
    return Ring(buffers, full, empty, spec.stages)


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
        """Consumer: the warpgroup's threads, which have met at a barrier, have read the step-th block."""
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
def make_barriers(number: gl.constexpr, arrivals: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


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
    class_heads: gl.tensor
    n_seq: gl.tensor
    n_head: gl.tensor
    gqa: gl.tensor
    n_q: gl.tensor
    n_kv: gl.tensor
    section: gl.tensor
    spec: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, *arguments):
        """The kernels' arguments in their order, without K and V."""
        (
            self.q, self.out, mask, counts, blocks, slopes, sinks, bad, lse, self.scale, self.softcap,
            self.sq_t, self.sq_h, self.sq_s, self.so_t, self.so_h, self.so_s, self.sm_t, self.sm_h, self.sm_s,
            self.mask_heads, self.mask_seqs, self.class_heads, self.n_seq, self.n_head, self.gqa,
            self.n_q, self.n_kv, self.section, spec,
        ) = arguments  # fmt: skip
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
        """Query tiles of one group of heads (of one head, where they are not packed)."""
        return gl.cdiv(self.n_q * self.spec.pack, 64 * self.spec.n_wg)

    @gluon.jit
    def groups(self):
        """Groups of heads that share tiles."""
        return self.n_head // self.spec.pack

    @gluon.jit
    def first_token(self, qt, wg: gl.constexpr):
        """The token of a warpgroup's first row."""
        return (qt * self.spec.n_wg + wg) * (64 // self.spec.pack)

    @gluon.jit
    def rounds(self):
        """How many tiles this program takes."""
        if not self.spec.persistent:
            return 1
        tiles = self.query_tiles() * self.groups() * self.n_seq
        width = gl.num_programs(0)
        whole = tiles // width
        return whole + (self.place(whole) < tiles - whole * width).to(gl.int32)

    @gluon.jit
    def place(self, turn):
        """This program's place among the tiles of one round. Every other round runs backwards: tiles are ordered by
        length, and a program that got the longest of one round gets the shortest of the next."""
        pid = gl.program_id(0)
        return gl.where((turn & 1) == 1, gl.num_programs(0) - 1 - pid, pid)

    @gluon.jit
    def tile(self, turn):
        """Sequence, group of heads and query tile of this program's turn-th tile.

        Heads are cut into sections whose K and V fit the L2 cache; within a section the tiles of one query position are
        neighbours, and with a mask the last positions, which under a causal mask are the longest, come first.
        """
        n_qt = self.query_tiles()
        rank = turn * gl.num_programs(0) + self.place(turn)
        part = rank // (n_qt * self.section)
        first = part * self.section
        rest = rank - first * n_qt
        width = gl.minimum(self.section, self.n_seq * self.groups() - first)
        row = rest // width
        index = first + rest - row * width
        seq = index // self.groups()
        qt = row
        if self.spec.reversed_order:
            qt = n_qt - 1 - row
        return seq, index - seq * self.groups(), qt

    @gluon.jit
    def visits(self, seq, head, qt):
        """How many blocks the tile visits without and with mask work, and where its list of blocks starts."""
        if self.spec.has_mask:
            mt = ((seq % self.mask_seqs) * self.class_heads + head % self.class_heads) * self.query_tiles() + qt
            n_full = gl.load(self.counts + 2 * mt)
            # A tile without any block still runs one, the first listed or block 0: its mask hides every score.
            n_all = gl.maximum(n_full + gl.load(self.counts + 2 * mt + 1), 1)
            start = mt.to(gl.int64) * gl.cdiv(self.n_kv, self.spec.block_n)
        else:
            n_full = self.n_kv // self.spec.block_n
            n_all = gl.cdiv(self.n_kv, self.spec.block_n)
            start = gl.to_tensor(0).to(gl.int64)
        return n_full, n_all, start

    @gluon.jit
    def block(self, start, j):
        """Index of the j-th block that a tile visits. The list's tail past its counts is never used as an address."""
        if self.spec.has_mask:
            index = gl.load(self.blocks + start + j)
            return gl.minimum(gl.maximum(index, 0), gl.cdiv(self.n_kv, self.spec.block_n) - 1)
        return j


@gluon.jit
def produce(p, k_desc, v_desc, k_ring, v_ring, mask_desc=None, mask_ring=None):
    """The producer warp: stream the blocks of every tile, K one block ahead of V as the consumers use them, and the
    mask's blocks, where they come through a ring, with K's."""
    from_ring: gl.constexpr = p.spec.mask_stages > 0
    step = 0
    mask_step = 0
    for turn in range(p.rounds()):
        seq, group, qt = p.tile(turn)
        kv_head = group * p.spec.pack // p.gqa
        n_full, n_all, start = p.visits(seq, group, qt)
        row = p.block(start, 0) * p.spec.block_n
        k_ring.fill(k_desc, seq, kv_head, row, step)
        if from_ring:
            mask_seq = seq % p.mask_seqs
            mask_head = (group * p.spec.pack) % p.mask_heads
            token = p.first_token(qt, 0)
            if n_full == 0:
                mask_ring.fill(mask_desc, mask_seq, mask_head, token, row, mask_step)
                mask_step += 1
        for j in range(1, n_all):
            next_row = p.block(start, j) * p.spec.block_n
            k_ring.fill(k_desc, seq, kv_head, next_row, step + j)
            if from_ring:
                if j >= n_full:
                    mask_ring.fill(mask_desc, mask_seq, mask_head, token, next_row, mask_step)
                    mask_step += 1
            v_ring.fill(v_desc, seq, kv_head, row, step + j - 1)
            row = next_row
        v_ring.fill(v_desc, seq, kv_head, row, step + n_all - 1)
        step += n_all


@gluon.jit
def slot_elements(i_slot, KIND: gl.constexpr):
    """Which element of a row each slot of a tile holds: rows of quantized blocks are unpacked in the order of their
    bytes, by pairs of blocks that start on a 4-byte word (see hopper_quant.py). i_slot: int32, any shape."""
    if KIND == "":
        return i_slot
    i_block = i_slot // 32
    i = i_slot % 32
    # The first two values of a pair's first block share a word with its scale; they come last.
    turn = gl.where(i_block % 2 == 0, 2, 0)
    if KIND == "q8_0":
        element = i_block * 32 + (i + turn) % 32
    else:  # of a word's four bytes first the low halves, then the high ones
        i_byte = i // 8 * 4 + i % 4
        element = i_block * 32 + (i_byte + turn) % 16 + i // 4 % 2 * 16
    # Pairs stay pairs, which one load or store may take.
    return gl.max_contiguous(gl.multiple_of(element, 2), 2)


@gluon.jit
def fetch_queries(p, turn, wg: gl.constexpr):
    """A warpgroup's [64, d] f32 query rows of this program's turn-th tile; rows past n_q are 0."""
    seq, group, qt = p.tile(turn)
    head = group * p.spec.pack
    token = p.first_token(qt, wg)
    vec: gl.constexpr = p.spec.q_vec
    layout: gl.constexpr = query_layout(p.spec.d)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    kind: gl.constexpr = p.spec.k_kind
    cols = slot_elements(gl.arange(0, p.spec.d, gl.SliceLayout(0, layout)), kind)
    base = p.q + (seq.to(gl.int64) * p.sq_s + head.to(gl.int64) * p.sq_h + token.to(gl.int64) * p.sq_t) * vec
    places = rows // p.spec.pack * (p.sq_t * vec) + rows % p.spec.pack * (p.sq_h * vec)
    offsets = places[:, None] + cols[None, :]
    return gl.load(base + offsets, mask=(token + rows // p.spec.pack < p.n_q)[:, None], other=0.0)


@gluon.jit
def load_mask(p, seq, group, token, block):
    """[64, block_n] mask values in the scores' registers; -inf past n_q, anything past n_kv."""
    layout: gl.constexpr = mma_layout(p.spec.block_n)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = block * p.spec.block_n + gl.arange(0, p.spec.block_n, gl.SliceLayout(0, layout))
    inside = cols < p.n_kv
    if p.spec.mask_vec > 1:
        # Rows start at multiples of 16 bytes, so the pair of an odd last column is readable: ask by pairs, and each
        # thread's two neighbouring columns become one 4-byte load.
        inside = cols // 2 * 2 < p.n_kv
    vec: gl.constexpr = p.spec.mask_vec
    head = group * p.spec.pack
    base = p.mask + ((seq % p.mask_seqs).to(gl.int64) * p.sm_s + token.to(gl.int64) * p.sm_t) * vec
    places = rows // p.spec.pack * (p.sm_t * vec)
    if p.spec.pack == 1:
        base += (head % p.mask_heads).to(gl.int64) * p.sm_h * vec
    else:
        places += (head + rows % p.spec.pack) % p.mask_heads * (p.sm_h * vec)
    keep = (token + rows // p.spec.pack < p.n_q)[:, None] & inside[None, :]
    return gl.load(base + places[:, None] + cols[None, :], mask=keep, other=float("-inf"))


@gluon.jit
def kept_inside(x):
    """Returns x, a number, and keeps what needs it inside the branch where this stands: the compiler would compute and
    select for every block, to be rid of the branch."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hide_past_end(p, s, block):
    """Scores with -inf past n_kv, which only the last block reaches."""
    if (block + 1) * p.spec.block_n > p.n_kv:
        end = kept_inside(p.n_kv)
        cols = block * p.spec.block_n + gl.arange(0, p.spec.block_n, gl.SliceLayout(0, mma_layout(p.spec.block_n)))
        s = gl.where((cols < end)[None, :], s, float("-inf"))
    return s


@gluon.jit
def reciprocal(x):
    """1 / x, one instruction: within an ulp, and 0 for infinity."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def together(m):
    """Returns m, row maxima not below NO_MAX, with each of a thread's two rows made to need the other.

    Left alone, the assembler finishes the exponentials of one row before it starts on the maximum of the other, and
    waits for the two chains of dependent maxima and shuffles in turn.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 low;
        min.f32 low, $3, 0fF149F2CA;
        max.f32 $0, $2, low;
        min.f32 low, $2, 0fF149F2CA;
        max.f32 $1, $3, low;
        }""",
        "=&r,=&r,r,r",
        [m],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def settle(den):
    """Returns den, a row sum of softmax weights, and keeps the assembler from moving a later wait above what den needs.

    wgmma waits have no operands, so that the assembler would lift the wait for O += P V to right before the softmax
    that is to run beside it. It keeps barrier operations in order, hence one that needs den and, den not being
    negative, never happens.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        .reg .f32 both;
        .reg .u32 nowhere;
        add.f32 both, $2, $3;
        setp.lt.f32 never, both, 0fBF800000;
        mov.u32 nowhere, 0;
        @never mbarrier.arrive.shared::cta.b64 _, [nowhere];
        mov.b32 $0, $2;
        mov.b32 $1, $3;
        }""",
        "=r,=r,r,r",
        [den],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.constexpr_function
def capped_lines(form, result, score, shift, constants):
    """PTX for result = a raw score soft-capped + shift. constants: scale / softcap, softcap in the wanted units, and
    the coefficients of the short form, into which both are multiplied."""
    ratio, cap, *first = constants
    if form == SHORT:
        return [
            f"mul.f32 a, {score}, {score};",
            f"fma.rn.f32 b, a, {first[2]}, {first[1]};",
            f"fma.rn.f32 b, a, b, {first[0]};",
            f"fma.rn.f32 {result}, {score}, b, {shift};",
        ]
    lines = [f"mul.f32 x, {score}, {ratio};"]
    if form == LONG:
        last, *others = reversed(LONG_TANH.value)
        lines += ["mul.f32 a, x, x;", f"mov.f32 b, {last};", *(f"fma.rn.f32 b, a, b, {c};" for c in others)]
        lines += ["mul.f32 x, x, b;"]
    else:  # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both ends, where exp2 is 0 or infinite
        lines += [f"mul.f32 x, x, {2.0 * LOG2E.value};", "ex2.approx.ftz.f32 x, x;", "add.f32 x, x, 1.0;"]
        lines += ["rcp.approx.ftz.f32 x, x;", "fma.rn.f32 x, x, -2.0, 1.0;"]
    return [*lines, f"fma.rn.f32 {result}, x, {cap}, {shift};"]


@gluon.constexpr_function
def by_level(level, make, aside=()):
    """PTX that runs make(form) of the form that `level`, the same for a whole warp, says. aside: PTX that none of them
    runs into; it ends where they end."""
    lines = ["{", ".reg .pred p, never;", ".reg .f32 a, b, x;"]
    lines += [f"setp.ne.s32 p, {level}, 0;", "@p bra.uni FAR;", *make(SHORT), "bra.uni DONE;", "FAR:"]
    lines += [f"setp.ne.s32 p, {level}, 1;", "@p bra.uni FARTHER;", *make(LONG), "bra.uni DONE;", "FARTHER:"]
    return "\n".join([*lines, *make(EXACT), "bra.uni DONE;", *aside, "DONE:", "}"])


@gluon.constexpr_function
def capped_asm(n):
    """PTX of `capped` for n elements. Operands: the results, then n of each argument."""

    def lines(form):
        constants = [f"${n * i}" for i in range(4, 9)]
        return [x for k in range(n) for x in capped_lines(form, f"${k}", f"${n + k}", f"${2 * n + k}", constants)]

    return by_level(f"${3 * n}", lines)


@gluon.constexpr_function
def capped_weights_asm(n):
    """PTX of `capped_weights` for n pairs. Operands: low, high and total, then n of each argument.

    The special function unit takes longest: it should be busy from the first pairs on, while the multiply-adds of the
    next ones run. The assembler would put most of those first. It moves nothing past a branch behind which what is to
    be moved is used on both sides; so there are branches, never taken, to places that use it (and give NaN).
    """
    chunk = 4
    constants = [f"${n * i}" for i in range(7, 12)]

    def exponents(form, pairs):
        shift = [f"${5 * n + k}" for k in range(n)]
        both = [(n * half + k, n * (3 + half) + k, k) for k in pairs for half in (0, 1)]
        return [x for to, score, k in both for x in capped_lines(form, f"${to}", f"${score}", shift[k], constants)]

    def lines(form):
        chunks = [list(range(at, min(at + chunk, n))) for at in range(0, n, chunk)]
        found, aside = exponents(form, chunks[0]), []
        name = "NEVER_SHORT" if form == SHORT else "NEVER_LONG"
        for i, pairs in enumerate(chunks):
            before = chunks[i - 1] if i > 0 else []
            if form != EXACT and before:
                found += [f"setp.gt.f32 never, ${pairs[-1]}, 1.0e30;", f"@never bra.uni {name}_{i};"]
                aside += [f"{name}_{i}:", "mov.f32 x, 0f7F800000;"]
                aside += [f"mul.f32 x, x, ${half + k};" for k in before for half in (0, n)] + ["bra.uni NEVER;"]
            for k in pairs:
                found += [f"ex2.approx.ftz.f32 ${k}, ${k};", f"ex2.approx.ftz.f32 ${n + k}, ${n + k};"]
            found += exponents(form, chunks[i + 1]) if i + 1 < len(chunks) else []
            found += [f"add.f32 ${2 * n + k}, ${k}, ${n + k};" for k in before]
        return [*found, *(f"add.f32 ${2 * n + k}, ${k}, ${n + k};" for k in chunks[-1]), "bra.uni DONE;", *aside]

    return by_level(f"${6 * n}", lines, ["NEVER:", *(f"mov.f32 ${k}, x;" for k in range(3 * n))])


@gluon.constexpr_function
def asm_operands(outputs, inputs):
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@gluon.jit
def cap_constants(p, unit: gl.constexpr):
    """What capped_lines takes, for capped scores in units of 1 / unit."""
    ratio = p.scale / p.softcap
    cap = p.softcap * unit
    square = ratio * ratio
    first = cap * ratio
    return ratio, cap, SHORT_TANH[0] * first, SHORT_TANH[1] * first * square, SHORT_TANH[2] * first * (square * square)


@gluon.jit
def capped(p, s, shift, level, unit: gl.constexpr, pack: gl.constexpr):
    """Raw scores soft-capped, times unit, plus shift. level: see cap_level."""
    ratio, cap, c0, c1, c2 = cap_constants(p, unit)
    source: gl.constexpr = capped_asm(pack)
    return gl.inline_asm_elementwise(
        source,
        asm_operands(pack, 8 * pack),
        [s, shift, level, ratio, cap, c0, c1, c2],
        dtype=gl.float32,
        is_pure=True,
        pack=pack,
    )


@gluon.jit
def capped_weights(p, s, m, level):
    """(low, high, total): 2 to the power of soft-capped scores less m, of even and of odd columns, and low + high. In
    one piece, since the assembler does not mix what lies on two sides of a branch."""
    rows: gl.constexpr = s.shape[0]
    cols: gl.constexpr = s.shape[1]
    low, high = s.reshape([rows, cols // 2, 2]).split()
    row_layout: gl.constexpr = gl.SliceLayout(1, low.type.layout)
    m = gl.convert_layout(m, row_layout, assert_trivial=True)
    level = gl.convert_layout(level, row_layout, assert_trivial=True)
    ratio, cap, c0, c1, c2 = cap_constants(p, LOG2E)
    n: gl.constexpr = cols // 4
    source: gl.constexpr = capped_weights_asm(n)
    return gl.inline_asm_elementwise(
        source,
        asm_operands(3 * n, 9 * n),
        [low, high, -m[:, None], level[:, None], ratio, cap, c0, c1, c2],
        dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=n,
    )


@gluon.jit
def largest_of_warp(x):
    """The largest of an int32 [64] of row values, for each warp that of its own rows."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 both;
        max.s32 both, $2, $3;
        redux.sync.max.s32 $0, both, 0xffffffff;
        mov.b32 $1, $0;
        }""",
        "=&r,=&r,r,r",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def cap_level(p, s, m, top, both_sides: gl.constexpr):
    """Which form of the soft cap serves for a block's raw scores, by warps.

    A polynomial does not above its range; below, it gives too little, which does no harm where that is negligible
    beside the row's maximum: `m` of the blocks before in log2 units, or `top` of this one's raw scores. both_sides:
    only where nothing lies below its range; m and top are of no use.
    """
    reach = p.softcap / p.scale
    short = reach * SHORT_RANGE
    # Past this the highest coefficient nears the smallest numbers.
    short = gl.where(short < 4000.0, short, -1.0)
    long = reach * LONG_RANGE
    if both_sides:
        largest = row_size(s)
        level = gl.where(largest <= short, SHORT, gl.where(largest <= long, LONG, EXACT))
    else:
        # |tanh(x)| <= |x|: a negative maximum is at least this when capped.
        least = gl.maximum(m, top * (p.scale * LOG2E))
        is_short = (top <= short) & (least >= floor_of(p, SHORT_BELOW, SHORT_LAST))
        is_long = (top <= long) & (least >= floor_of(p, LONG_BELOW, LONG_LAST))
        level = gl.where(is_short, SHORT, gl.where(is_long, LONG, EXACT))
    return largest_of_warp(level)


@gluon.jit
def floor_of(p, below: gl.constexpr, last: gl.constexpr):
    """The least row maximum, not positive, beside which a polynomial's errors below its range are negligible."""
    floor = below - p.softcap * (LOG2E * last)
    return gl.where(floor <= 0.0, floor, -NO_MAX)


@gluon.jit
def hide(p, s, block):
    """Without a mask: make scores past n_kv -inf."""
    layout: gl.constexpr = mma_layout(p.spec.block_n)
    cols = block * p.spec.block_n + gl.arange(0, p.spec.block_n, gl.SliceLayout(0, layout))
    return gl.where((cols < p.n_kv)[None, :], s, float("-inf"))


@gluon.jit
def halve(s, rows: gl.constexpr, cols: gl.constexpr):
    """The elementwise maximum of the left and the right half of the columns, which a thread holds both of."""
    left, right = s.reshape([rows, 2, cols // 2]).permute((0, 2, 1)).split()
    return gl.maximum(left, right)


@gluon.jit
def row_maximum(s):
    """Maximum of each row. By halves, as most of it is then independent work, where a reduction is one long chain."""
    rows: gl.constexpr = s.shape[0]
    cols: gl.constexpr = s.shape[1]
    quarter = halve(halve(s, rows, cols), rows, cols // 2)
    return gl.convert_layout(gl.max(quarter, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def row_size(s):
    """Largest absolute value of each row, in as many instructions as the maximum."""
    rows: gl.constexpr = s.shape[0]
    cols: gl.constexpr = s.shape[1]
    left, right = s.reshape([rows, 2, cols // 2]).permute((0, 2, 1)).split()
    sizes = gl.inline_asm_elementwise(
        "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; max.f32 $0, a, b; }",
        "=r,r,r",
        [left, right],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return gl.convert_layout(row_maximum(sizes), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def softmax_step(p, s, m, den, factor, by_row: gl.constexpr = False):
    """One online-softmax step: the weights of this block, and the running maximum, sum and the rescaling of what was
    summed before. Scores are s * factor, a number or (by_row) one for each row."""
    m_new = together(gl.maximum(m, row_maximum(s) * factor))
    if by_row:
        s = s * factor[:, None]
    else:
        s = s * factor
    weights = gl.exp2(s - m_new[:, None])
    decay = gl.exp2(m - m_new)
    return weights, decay, m_new, den * decay + gl.sum(weights, 1)


@gluon.jit
def slope_of(p, group, layout: gl.constexpr):
    """What the mask of a tile is multiplied by in log2 units, and the scores' scale divided by it; with packed heads
    under ALiBi one of each for every row."""
    if p.spec.has_alibi:
        slope = row_values(p, p.slopes, group, layout) * LOG2E
        return slope, p.scale * LOG2E / slope
    else:
        return gl.to_tensor(1.0) * LOG2E, p.scale


@gluon.jit
def capped_scores(p, s, bias, at_once: gl.constexpr):
    """Raw scores soft-capped, plus bias. at_once: elements of a thread between two branches."""
    if p.spec.k_kind == "":
        return capped(p, s, bias, cap_level(p, s, 0.0, 0.0, True)[:, None], 1.0, at_once)
    else:
        # Beside producers that unpack K and V, consumers have too few registers for more than the exact form.
        e = gl.exp2(s * (p.scale / p.softcap * (2.0 * LOG2E)))
        return p.softcap - (2.0 * p.softcap) * reciprocal(e + 1.0) + bias


@gluon.jit
def weigh(p, s, m, den, mask, block, slope, partial: gl.constexpr):
    """Scores of one block to softmax weights. slope: see slope_of."""
    if partial and p.spec.has_mask:
        by_row: gl.constexpr = p.spec.has_alibi and p.spec.pack > 1
        slope, ratio = slope
        bias = mask.to(gl.float32)
        if p.spec.has_softcap:
            if p.spec.has_alibi:
                bias = bias * ((slope[:, None] if by_row else slope) * LN2)
            # By few at a time, since all of a bias in f32 takes too many registers.
            at_once: gl.constexpr = 4 if p.spec.has_alibi else 16
            s = hide_past_end(p, capped_scores(p, s, bias, at_once), block)
            weights, decay, m, den = softmax_step(p, s, m, den, LOG2E)
        else:
            # In units of the slope, so that scale, mask and maximum take two fused multiply-adds.
            s = hide_past_end(p, s * (ratio[:, None] if by_row else ratio) + bias, block)
            weights, decay, m, den = softmax_step(p, s, m, den, slope, by_row)
    elif p.spec.has_softcap and (partial or p.spec.k_kind != ""):
        s = capped_scores(p, s, 0.0, 8)
        if partial:
            s = hide(p, s, block)
        weights, decay, m, den = softmax_step(p, s, m, den, LOG2E)
    elif partial:
        weights, decay, m, den = softmax_step(p, hide(p, s * (p.scale * LOG2E), block), m, den, 1.0)
    elif p.spec.has_softcap:
        # The cap keeps the order, so that the maximum can be found first and is the only one to be capped twice.
        top = row_maximum(s)
        level = cap_level(p, s, m, top, not p.spec.large_cap)
        m_new = gl.maximum(m, capped(p, top, 0.0, level, LOG2E, 2))
        low, high, total = capped_weights(p, s, m_new, level)
        weights = gl.join(low, high).reshape([s.shape[0], s.shape[1]])
        weights = gl.convert_layout(weights, s.type.layout, assert_trivial=True)
        decay = gl.exp2(m - m_new)
        m = m_new
        den = den * decay + gl.convert_layout(gl.sum(total, 1), m.type.layout, assert_trivial=True)
    else:
        # The scale goes into the subtraction of the maximum (one fused multiply-add).
        weights, decay, m, den = softmax_step(p, s, m, den, p.scale * LOG2E)
    return weights, decay, m, den


@gluon.jit
def packed(weights, dtype: gl.constexpr):
    """Softmax weights in 16 bits, neighbouring columns in one int32: what a loop carries as 16-bit numbers would be
    moved from register to register each turn."""
    rows: gl.constexpr = weights.shape[0]
    cols: gl.constexpr = weights.shape[1]
    low, high = weights.reshape([rows, cols // 2, 2]).split()
    source: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if dtype == gl.float16 else "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(source, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_operand(p, pairs, dtype: gl.constexpr):
    """Packed softmax weights as the left operand of the second product; the registers already lie as it wants them."""
    layout: gl.constexpr = gl.DotOperandLayout(0, mma_layout(p.spec.d), 2)
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    weights = gl.join(low, high).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(weights, layout, assert_trivial=True)


@gluon.jit
def rescale(p, acc, decay):
    """Multiply the accumulator's rows."""
    layout: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.d))
    return acc * gl.convert_layout(decay, layout, assert_trivial=True)[:, None]


@gluon.jit
def start_scores(p, queries, k_ring, step):
    """Start S = Q K^T for the step-th block."""
    zero = gl.full([64, p.spec.block_n], 0.0, gl.float32, mma_layout(p.spec.block_n))
    k_ring.wait_full(step)
    return warpgroup_mma(queries, k_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def fetch_mask(p, mask_ring, seq, group, token, block, step, wg: gl.constexpr):
    """[64, block_n] mask values in the scores' registers, for the step-th block of the mask's ring, if there is one."""
    if p.spec.mask_stages == 0:
        return load_mask(p, seq, group, token, block)
    else:
        return mask_ring.read(step, wg)


@gluon.jit
def row_values(p, values, group, layout: gl.constexpr):
    """Of a value for each head, those of a tile's rows; one for all if heads are not packed."""
    if p.spec.pack == 1:
        return gl.load(values + group)
    else:
        return gl.load(values + group * p.spec.pack + gl.arange(0, 64, layout) % p.spec.pack)


@gluon.jit
def advance(
    p,
    queries,
    k_ring,
    v_ring,
    turns,
    mask_ring,
    tile,
    slope,
    acc,
    pairs,
    m,
    den,
    step,
    block,
    partial: gl.constexpr,
    wg: gl.constexpr,
):
    """One turn of the skewed loop: start S of block `step` and O += P V of the block before, then do the softmax of
    block `step` while the latter runs. Returns the accumulator, the new P, m and l."""
    seq, group, token, taken, mask_step = tile
    if p.spec.pingpong:
        # Warpgroup 0 opens; each later turn is handed on by the neighbour once both of its products are issued.
        first: gl.constexpr = 1 if wg == 0 else 0
        mbarrier.wait(turns.index(wg), (taken & 1) ^ first)
    probs = as_operand(p, pairs, queries.dtype)
    scores = start_scores(p, queries, k_ring, step)
    v_ring.wait_full(step - 1)
    acc = warpgroup_mma(probs, v_ring.operand(step - 1), acc, is_async=True)
    if p.spec.pingpong:
        mbarrier.arrive(turns.index((wg + 1) % p.spec.n_wg), count=1)
    mask = 0
    if partial and p.spec.has_mask:
        mask = fetch_mask(p, mask_ring, seq, group, token, block, mask_step, wg)
    scores = warpgroup_mma_wait(1, [scores])
    from_ring: gl.constexpr = partial and p.spec.mask_stages > 0
    if from_ring:
        gl.thread_barrier()
    k_ring.release(step)
    if from_ring:
        mask_ring.release(mask_step)
    weights, decay, m, den = weigh(p, scores, m, den, mask, block, slope, partial)
    den = settle(den)
    acc, probs = warpgroup_mma_wait(0, [acc, probs])
    v_ring.release(step - 1)
    return rescale(p, acc, decay), packed(weights, queries.dtype), m, den


@gluon.jit
def finish(p, acc, m, den, tile, qt, wg: gl.constexpr):
    """Divide by the denominator (the sink's share included) and store the rows, their LSE and the tile's flag."""
    seq, group, token, taken, mask_step = tile
    head = group * p.spec.pack
    acc_rows: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.d))
    m = gl.convert_layout(m, acc_rows, assert_trivial=True)
    den = gl.convert_layout(den, acc_rows, assert_trivial=True)
    # One multiply-add scales a score and subtracts the maximum; with large ones its rounding shows in the weight of the
    # largest, which should be 1. Such tiles are done again, exactly.
    far = (gl.maximum(m, -m) > EXACT_TO) & (m > NO_MAX)
    factor = gl.full([64], 1.0, gl.float32, acc_rows)
    if p.spec.has_sinks:
        sink = row_values(p, p.sinks, group, acc_rows) * LOG2E
        m_new = gl.maximum(m, sink)
        factor = gl.exp2(m - m_new)
        den = den * factor + gl.exp2(sink - m_new)
        m = m_new
    rows = gl.arange(0, 64, acc_rows)
    kind: gl.constexpr = p.spec.v_kind
    cols = slot_elements(gl.arange(0, p.spec.d, gl.SliceLayout(0, mma_layout(p.spec.d))), kind)
    place = rows // p.spec.pack
    lane = rows % p.spec.pack
    stored = token + place < p.n_q
    values = gl.where((den == 0.0)[:, None], 0.0, acc * (factor / den)[:, None])
    vec: gl.constexpr = p.spec.q_vec
    base = p.out + (seq.to(gl.int64) * p.so_s + head.to(gl.int64) * p.so_h + token.to(gl.int64) * p.so_t) * vec
    places = place * (p.so_t * vec) + lane * (p.so_h * vec)
    gl.store(base + places[:, None] + cols[None, :], values, mask=stored[:, None])
    if p.spec.has_lse:
        at = p.lse + (seq.to(gl.int64) * p.n_q + token + place) * p.n_head + head + lane
        gl.store(at, (m + gl.log2(den)) * LN2, mask=stored)
    if p.spec.has_bad:
        # 0 * x is 0 for every finite x and NaN otherwise.
        spoilt = gl.where(stored & (far | (gl.sum(values * 0.0, 1) != 0.0)), 1, 0)
        store_flag(p, gl.max(spoilt, 0), (seq * p.groups() + group) * p.query_tiles() + qt, wg)


@gluon.jit
def store_flag(p, flag, tile, wg: gl.constexpr):
    """Each warpgroup owns a part of the tile's int32, so that neither atomics nor a cleared array are needed."""
    if p.spec.n_wg == 2:
        gl.store(p.bad.to(gl.pointer_type(gl.int16), bitcast=True) + 2 * tile + wg, flag.to(gl.int16))
    elif wg == 0:
        gl.store(p.bad.to(gl.pointer_type(gl.int16), bitcast=True) + 2 * tile, flag.to(gl.int16))
    else:
        gl.store(p.bad.to(gl.pointer_type(gl.int8), bitcast=True) + 4 * tile + wg + 1, flag.to(gl.int8))


@gluon.jit
def consume(p, query_buffers, k_ring, v_ring, turns, wg: gl.constexpr, mask_ring=None):
    """A consumer warpgroup: rows 64 * wg .. 64 * wg + 63 of every tile."""
    dtype: gl.constexpr = query_buffers.dtype
    queries = query_buffers.index(wg)
    row_layout: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.block_n))
    # The next tile's queries are fetched into registers while the last product of a tile runs, if they fit beside it.
    # (A permuted tile's addresses would take as many again.)
    ahead: gl.constexpr = p.spec.persistent and p.spec.d * (p.spec.n_wg - 1) <= 128 and p.spec.k_kind == ""
    step = 0
    taken = 0
    mask_step = 0
    rounds = p.rounds()
    if ahead:
        fetched = fetch_queries(p, 0, wg)
    for turn in range(rounds):
        seq, group, qt = p.tile(turn)
        token = p.first_token(qt, wg)
        if not ahead:
            fetched = fetch_queries(p, turn, wg)
        n_full, n_all, start = p.visits(seq, group, qt)
        slope = slope_of(p, group, row_layout)

        queries.store(fetched.to(dtype))
        fence_async_shared()
        gl.thread_barrier()

        m = gl.full([64], NO_MAX, gl.float32, row_layout)
        den = gl.full([64], 0.0, gl.float32, row_layout)
        acc = gl.full([64, p.spec.d], 0.0, gl.float32, mma_layout(p.spec.d))
        tile = (seq, group, token, taken, mask_step)
        scores = start_scores(p, queries, k_ring, step)
        scores = warpgroup_mma_wait(0, [scores])
        k_ring.release(step)
        if n_full > 0:
            weights, decay, m, den = weigh(p, scores, m, den, 0, 0, slope, False)
        else:
            block = p.block(start, 0)
            mask = 0
            if p.spec.has_mask:
                mask = fetch_mask(p, mask_ring, seq, group, token, block, mask_step, wg)
            if p.spec.mask_stages > 0:
                gl.thread_barrier()
                mask_ring.release(mask_step)
            weights, decay, m, den = weigh(p, scores, m, den, mask, block, slope, True)
        pairs = packed(weights, dtype)

        for j in range(1, n_full):
            tile = (seq, group, token, taken + j - 1, 0)
            acc, pairs, m, den = advance(
                p, queries, k_ring, v_ring, turns, mask_ring, tile, slope, acc, pairs, m, den, step + j, 0, False, wg
            )
        for j in range(gl.maximum(n_full, 1), n_all):
            tile = (seq, group, token, taken + j - 1, mask_step + j - n_full)
            acc, pairs, m, den = advance(
                p,
                queries,
                k_ring,
                v_ring,
                turns,
                mask_ring,
                tile,
                slope,
                acc,
                pairs,
                m,
                den,
                step + j,
                p.block(start, j),
                True,
                wg,
            )

        probs = as_operand(p, pairs, dtype)
        v_ring.wait_full(step + n_all - 1)
        acc = warpgroup_mma(probs, v_ring.operand(step + n_all - 1), acc, is_async=True)
        if ahead:
            fetched = fetch_queries(p, gl.minimum(turn + 1, rounds - 1), wg)
        acc, probs = warpgroup_mma_wait(0, [acc, probs])
        v_ring.release(step + n_all - 1)
        finish(p, acc, m, den, tile, qt, wg)
        step += n_all
        taken += n_all - 1
        mask_step += n_all - n_full


INTEGER_ARGUMENTS = (
    "sq_t",
    "sq_h",
    "sq_s",
    "so_t",
    "so_h",
    "so_s",
    "sm_t",
    "sm_h",
    "sm_s",
    "mask_heads",
    "mask_seqs",
    "class_heads",
    "n_seq",
    "n_head",
    "gqa",
    "n_q",
    "n_kv",
    "section",
)


@gluon.jit(do_not_specialize=("scale", "softcap", *INTEGER_ARGUMENTS))
def hopper_flash_attn_kernel(
    q, k_desc, v_desc, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
    sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, class_heads,
    n_seq, n_head, gqa, n_q, n_kv, section, spec: gl.constexpr, mask_desc=None,
):  # fmt: skip
    p = Problem(
        q, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
        sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, class_heads,
        n_seq, n_head, gqa, n_q, n_kv, section, spec,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    query_buffers = gl.allocate_shared_memory(dtype, [spec.n_wg, 64, spec.d], tile_shared_layout(dtype, 2))
    k_ring = make_ring(dtype, spec)
    v_ring = make_ring(dtype, spec)
    turns = make_barriers(spec.n_wg, 1)
    # Without a ring for the mask, K's stands in its place, unused.
    mask_ring = k_ring
    mask_source = k_desc
    if spec.mask_stages > 0:
        mask_ring = make_mask_ring(spec)
        mask_source = mask_desc
    # setmaxnreg moves registers from the producer's warpgroup to the consumers; the first consumer, the default
    # partition, takes what the others leave of the 64 Ki registers.
    if spec.n_wg == 2:
        gl.warp_specialize(
            [
                (consume, (p, query_buffers, k_ring, v_ring, turns, 0, mask_ring)),
                (consume, (p, query_buffers, k_ring, v_ring, turns, 1, mask_ring)),
                (produce, (p, k_desc, v_desc, k_ring, v_ring, mask_source, mask_ring)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (p, query_buffers, k_ring, v_ring, turns, 0, mask_ring)),
                (consume, (p, query_buffers, k_ring, v_ring, turns, 1, mask_ring)),
                (consume, (p, query_buffers, k_ring, v_ring, turns, 2, mask_ring)),
                (produce, (p, k_desc, v_desc, k_ring, v_ring, mask_source, mask_ring)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def shared_bytes(d: int, config: Config) -> int:
    """Shared memory of one program: the queries, both rings, and some room for barriers and the compiler's own use."""
    return 2 * d * (config.block_m + 2 * config.stages * config.block_n) + 1024


def registers_at_start(config: Config) -> int:
    """Registers of a thread at launch, before setmaxnreg: an even share of the file, the producer's group included."""
    return 65536 // (128 * (config.n_wg + 1)) // 8 * 8


def strides_in(unit: int, tensor: torch.Tensor, dims: tuple[int, ...]) -> list[int]:
    """Strides of some dimensions in units of `unit` elements; a dimension of size 1 has none."""
    return [tensor.stride(i) // unit if tensor.shape[i] > 1 else 0 for i in dims]


def aligned(tensor: torch.Tensor, unit: int) -> bool:
    """Whether every row of `unit` elements along the last dimension starts at a multiple of its own size."""
    rows = range(tensor.dim() - 1)
    return tensor.data_ptr() % (unit * tensor.element_size()) == 0 and all(
        tensor.shape[i] == 1 or tensor.stride(i) % unit == 0 for i in rows
    )


def box_descriptor(tensor: torch.Tensor, rows: int, cols: int, idle: int) -> TensorDescriptor:
    """TMA descriptor of a 16-bit tensor [n0, n1, n2, n3] in boxes of [1, 1, rows, cols]; what lies outside reads as 0.

    idle: the stride of a dimension of size 1. It means nothing, but TMA wants whole 16 bytes there too.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    shape = list(tensor.shape)
    strides = [tensor.stride(i) if shape[i] > 1 else idle for i in range(3)] + [1]
    return TensorDescriptor(tensor, shape, strides, [1, 1, rows, cols], layout)


def mask_fits_ring(mask: torch.Tensor, pack: int) -> bool:
    """Whether TMA can bring the mask: rows of whole 16 bytes, and the heads of a tile share them."""
    return aligned(mask, 8) and mask.stride(3) == 1 and (pack == 1 or mask.shape[1] == 1)


def mask_ring_stages(d: int, config: Config, pack: int) -> int:
    """Buffers of the mask's ring that fit beside the rest, at most two."""
    left = MAX_SHARED_BYTES - shared_bytes(d, config)
    return min(2, left // (2 * config.block_m // pack * config.block_n))


def side_by_side(kv_head_bytes: int, per_kv_head: int, most: int, ordered: bool) -> int:
    """How many groups of heads run at the same time: those of one kv head where tiles are equally long, else as many as
    keep K and V (of kv_head_bytes) within the L2 cache, so that there are enough tiles of one length to go round."""
    if not ordered:
        return per_kv_head
    return min(most, per_kv_head * max(1, L2_SECTION_BYTES // kv_head_bytes))


def launch_integers(
    q: torch.Tensor,
    out: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    class_heads: int,
    gqa: int,
    n_kv: int,
    section: int,
) -> tuple[int, int, list[int]]:
    """(q_vec, mask_vec, integers): units of strides, see Spec, and the kernels' INTEGER_ARGUMENTS in their order."""
    n_seq, n_head, n_q, _ = q.shape
    q_vec = 4 if aligned(q, 4) and aligned(out, 4) else 1
    mask_vec, mask_strides, mask_dims = 1, [0, 0, 0], [1, 1]
    if mask is not None:
        mask_vec = 8 if aligned(mask, 8) else 1
        mask_strides, mask_dims = strides_in(mask_vec, mask, (2, 1, 0)), [mask.shape[1], mask.shape[0]]
    strides = [*strides_in(q_vec, q, (2, 1, 0)), *strides_in(q_vec, out, (1, 2, 0)), *mask_strides]
    return q_vec, mask_vec, [*strides, *mask_dims, class_heads, n_seq, n_head, gqa, n_q, n_kv, section]


def hopper_flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bad: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: Config | None = None,
    pack: int = 1,
    mask_stages: int | None = None,
) -> None:
    """out = softmax(scale * q k^T (soft-capped) + slope * mask) v, for every sequence and head.

    q: f32 [n_seq, n_head, n_q, d], any strides but the last, which is 1; d is 64, 128 or 256.
    k, v: f16 or bf16 [n_seq, n_head_kv, n_kv, d], strides of whole 16 bytes. Head h reads kv head
      h // (n_head / n_head_kv).
    out: f32 [n_seq, n_q, n_head, d], written; any strides but the last.
    scale: not negative. softcap: 0 for none.
    mask: f16 [m3, m2, n_q, n_kv], last stride 1; sequence s and head h use mask[s % m3, h % m2]. -inf hides a key
      (see `bad` for scores of NaN). With it come the classes of its blocks of (config.block_m, config.block_n), for
      each of the m3 * MG * ceil(n_q / block_m) query tiles, MG being m2 or 1: counts int32 [tiles, 2], how many key
      blocks hold only zeros (full) and how many are visited besides (partial); blocks int32 [tiles,
      ceil(n_kv / block_n)], their indices, the full ones first. A block that reaches past n_kv is never full.
    slopes: f32 [n_head], ALiBi factors of the mask. sinks: f32 [n_head], a score that joins each row's denominator.
    bad: int32 [n_seq * n_head * ceil(n_q / block_m)], written: 0, or not 0 where a tile should be
      done again: its output holds NaN or infinity (K and V may hold such values in rows that the mask hides; the
      softmax and the products here let them through), or its logits are so large that their rounding shows.
    lse: f32 [n_seq, n_q, n_head] contiguous, written: the natural logarithm of each row's denominator.
    pack: heads whose rows share a tile (see Spec), a divisor of n_head / n_head_kv among 1, 2, 4, 8. The tiles of the
      mask's classes and of `bad` are then those of n_head / pack groups with n_q * pack rows: MG is 1 or n_head / pack.
    mask_stages: of the mask's ring, 0 for none; by default as many as fit (at most 2) where mask_fits_ring.
    A row whose keys are all hidden gives 0.
    """
    n_seq, n_head, n_q, d = q.shape
    n_kv = k.shape[2]
    config = config or DEFAULTS[d]
    if k.shape != v.shape or k.dtype != v.dtype or k.dtype not in (torch.float16, torch.bfloat16) or k.shape[3] != d:
        raise ValueError(f"k and v must share a 16-bit type and a shape: {k.dtype} {k.shape} and {v.dtype} {v.shape}")
    if pack not in (1, 2, 4, 8) or n_head // k.shape[1] % pack:
        raise ValueError(f"{n_head // k.shape[1]} query heads of a kv head cannot be packed by {pack}")
    if scale < 0:
        raise ValueError(f"scale must not be negative, got {scale}")
    if shared_bytes(d, config) > MAX_SHARED_BYTES:
        raise ValueError(f"{config} needs {shared_bytes(d, config)} bytes of shared memory at d = {d}")
    tiles_of_group = triton.cdiv(n_q * pack, config.block_m)
    groups = n_head // pack
    class_heads = 1
    if mask is not None:
        assert counts is not None and blocks is not None, "a mask comes with the classes of its blocks"
        class_heads = counts.shape[0] // (mask.shape[0] * tiles_of_group)
        if mask_stages is None:
            mask_stages = mask_ring_stages(d, config, pack) if mask_fits_ring(mask, pack) else 0
    ordered = mask is not None
    gqa = n_head // k.shape[1]
    section = side_by_side(4 * d * n_kv, gqa, n_seq * n_head, ordered) // pack
    q_vec, mask_vec, integers = launch_integers(
        q, out, mask, class_heads=class_heads, gqa=gqa, n_kv=n_kv, section=section
    )
    tiles = tiles_of_group * groups * n_seq
    mask_stages = mask_stages or 0
    spec = Spec(
        d=d,
        block_n=config.block_n,
        stages=config.stages,
        n_wg=config.n_wg,
        pingpong=config.pingpong,
        persistent=config.persistent,
        reversed_order=ordered,
        q_vec=q_vec,
        has_mask=mask is not None,
        mask_vec=mask_vec,
        has_softcap=softcap != 0.0,
        has_alibi=slopes is not None,
        has_sinks=sinks is not None,
        has_bad=bad is not None,
        has_lse=lse is not None,
        pack=pack,
        mask_stages=mask_stages,
        large_cap=softcap >= LARGE_CAP,
    )
    programs = min(tiles, multiprocessors(q.device)) if config.persistent else tiles
    hopper_flash_attn_kernel[(programs,)](
        q,
        box_descriptor(k, config.block_n, d, idle=d),
        box_descriptor(v, config.block_n, d, idle=d),
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
        spec,
        box_descriptor(mask, WG_ROWS // pack, config.block_n, idle=8) if mask is not None and mask_stages else None,
        num_warps=4,
        maxnreg=registers_at_start(config),
    )


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
