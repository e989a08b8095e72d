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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.kernels.common.constants import LN2, LOG2E
from graphrt.backends.triton.kernels.flash_attn.hopper_rings import (
    make_mask_ring,
    make_ring,
    make_turns,
    mma_layout,
    tile_shared_layout,
)
from graphrt.backends.triton.kernels.flash_attn.hopper_softcap import cap_level, capped, capped_scores, capped_weights
from graphrt.backends.triton.kernels.flash_attn.hopper_softmax import (
    NO_MAX,
    row_maximum,
    settle,
    softmax_step,
)

# Up to this |maximum| in log2 units, half a unit of its last place (3e-5) is nothing beside f16's rounding of a weight.
EXACT_TO = gl.constexpr(512.0)


@gluon.constexpr_function
def query_layout(d):
    """Registers of a [64, d] f32 tile of q as it is loaded: 16 bytes a thread, whole rows by consecutive threads."""
    lanes = min(32, d // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])


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
def hide(p, s, block):
    """Without a mask: make scores past n_kv -inf."""
    layout: gl.constexpr = mma_layout(p.spec.block_n)
    cols = block * p.spec.block_n + gl.arange(0, p.spec.block_n, gl.SliceLayout(0, layout))
    return gl.where((cols < p.n_kv)[None, :], s, float("-inf"))


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
    k_ring.release(step)
    weights, decay, m, den = weigh(p, scores, m, den, mask, block, slope, partial)
    den = settle(den)
    acc, probs = warpgroup_mma_wait(0, [acc, probs])
    if partial and p.spec.mask_stages > 0:
        gl.thread_barrier()
        mask_ring.release(mask_step)
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
            weights, decay, m, den = weigh(p, scores, m, den, mask, block, slope, True)
            if p.spec.mask_stages > 0:
                den = settle(den)
                gl.thread_barrier()
                mask_ring.release(mask_step)
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
    turns = make_turns(spec, k_ring)
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
