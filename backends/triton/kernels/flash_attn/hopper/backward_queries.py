"""The gradient of Q for Hopper (sm_90), in Gluon: ops/flash_attn_back.py has the formula.

A thread block owns 128 queries of a head of a sequence: two warpgroups (the consumers) have 64 each, and their sums in
registers. One warp (the producer) brings Q and d_out of 16 bits once, and then blocks of K and V by TMA. For every
block of keys:

    S = Q K^T, dW = dO V^T              (wgmma, both operands in shared memory)
    P = exp2(S scale - lse);  dS = P (dW - delta)
    dQ += dS K                          (wgmma, dS in registers, 16 bits)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_scores import (
    as_left,
    score_gradients,
    store_rows,
    weights_of,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_sight import clear_unseen_keys, sight_of_queries
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_work import LISTED, NUMBERS, GradientWork
from graphrt.backends.triton.kernels.flash_attn.hopper.dropout import dropped, kept_of_queries
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import kept_inside, key_columns, load_mask
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import (
    make_mask_ring,
    make_ring,
    mma_layout,
    tile_shared_layout,
)


@gluon.jit
def produce_keys(p, q_desc, o_desc, k_desc, v_desc, mask_desc, tiles, rings):
    """The producer warp: Q and d_out of the program's queries, then every block of keys."""
    q_tile, o_tile, here = tiles
    k_ring, v_ring, mask_ring = rings
    seq, head, qt = p.query_tile()
    query = qt * LISTED
    mbarrier.expect(here.index(0), q_desc.block_type.nbytes + o_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [seq, head, query, 0], here.index(0), q_tile.index(0))
    tma.async_copy_global_to_shared(o_desc, [seq, head, query, 0], here.index(0), o_tile.index(0))
    n_full, n_all, start = p.key_visits(seq, head, qt)
    group = head // p.gqa
    for j in range(n_all):
        key = p.key_block(start, j) * p.spec.block_n
        k_ring.fill(k_desc, seq, group, key, j)
        if p.spec.mask_stages > 0:
            unmasked = 0 if p.spec.dense else n_full
            if j >= unmasked:
                mask_ring.fill(mask_desc, seq % p.mask_seqs, head % p.mask_heads, query, key, j - unmasked)
        v_ring.fill(v_desc, seq, group, key, j)


@gluon.jit
def clear_hidden_keys(p, tile, start, block):
    """Rows of K of a block, its keys that no query of the tile sees, become 0: 0 times the NaN that they may hold would
    be NaN. tile: [block_n, d]; both warpgroups do so, and write the same."""
    words: gl.constexpr = p.spec.block_n // 32
    p_seen = p.seen + (start + block) * words
    some = gl.load(p_seen)
    for i in gl.static_range(1, words):
        some = some & gl.load(p_seen + i)
    if some != -1:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        n: gl.constexpr = 16
        for i in gl.static_range(p.spec.block_n // n):
            key = i * n + gl.arange(0, n, gl.SliceLayout(1, layout))
            seen = (gl.load(p_seen + i * n // 32) >> (key & 31)) & 1
            part = tile.slice(i * n, n, dim=0)
            values = part.load(layout)
            part.store(gl.where((seen != 0)[:, None], values, gl.full_like(values, 0.0)))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def none_past_end(p, w, block):
    """Weights with 0 past the last key, which only the last block reaches."""
    if (block + 1) * p.spec.block_n > p.n_kv:
        end = kept_inside(p.n_kv)
        w = gl.where((key_columns(p, block) < end)[None, :], w, 0.0)
    return w


@gluon.jit
def own_rows(p, tiles, wg: gl.constexpr):
    """A warpgroup's [64, d] of Q and of d_out."""
    q_tile, o_tile, here = tiles
    d: gl.constexpr = p.spec.d
    at = 0
    if d > 128:  # else the compiler makes the descriptors of all pieces before the loop, and has no registers for them
        at = kept_inside(gl.to_tensor(0))
    q = q_tile.index(at).reshape([LISTED, d]).slice(64 * wg, 64, dim=0)
    o = o_tile.index(at).reshape([LISTED, d]).slice(64 * wg, 64, dim=0)
    return q, o


@gluon.jit
def add_block(p, tiles, rings, place, dq, step, block, mask_step, partial: gl.constexpr, wg: gl.constexpr):
    """Add what a block of keys gives to the sum of 64 queries. place: (sequence, head, first query, lse, delta, factor
    of the mask, GradientWork.ratio, list; of packed sequences what PackedWork.visits() says)."""
    q, o = own_rows(p, tiles, wg)
    k_ring, v_ring, mask_ring = rings
    seq, head, query, lse, delta, factor, ratio, start = place
    d: gl.constexpr = p.spec.d
    hides: gl.constexpr = partial and (p.spec.has_mask or p.spec.packed)
    masked: gl.constexpr = hides or p.spec.dense
    zero = gl.full([64, p.spec.block_n], 0.0, gl.float32, mma_layout(p.spec.block_n))
    words = kept_of_queries(p, seq, head, query, block * p.spec.block_n)
    k_ring.wait_full(step)
    s = warpgroup_mma(q, k_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    v_ring.wait_full(step)
    # A mask or a soft cap takes so many registers that its weights are made first; of 64 keys, both.
    crowds: gl.constexpr = masked + p.spec.has_softcap
    early: gl.constexpr = crowds <= (p.spec.block_n == 64 and not p.spec.packed) and d <= 128
    d_w = s
    if early:
        d_w = warpgroup_mma(o, v_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    mask = 0
    if masked and not p.spec.packed:
        if p.spec.mask_stages > 0:
            mask = mask_ring.read(mask_step, wg)
        else:
            mask = load_mask(p, seq, head, query, block)
    s = warpgroup_mma_wait(1 if early else 0, [s])
    if masked and p.spec.packed:  # what positions say is made now, else it takes registers while the product runs
        mask = sight_of_queries(p, start, kept_inside(query), block)
    _w, bent = weights_of(p, s, lse[:, None], mask, factor, masked, hides)
    if partial and not p.spec.packed:
        bent = none_past_end(p, bent, block)
    if not early:
        d_w = warpgroup_mma(o, v_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    d_w = warpgroup_mma_wait(0, [d_w])
    v_ring.release(step)
    if p.spec.has_dropout:
        d_w = dropped(d_w, words, p.spec.block_n)
    grads = as_left(score_gradients(bent, d_w, ratio, delta[:, None], partial).to(q.dtype), d)
    if hides:
        if p.spec.packed:
            clear_unseen_keys(p, k_ring.operand(step), start, block)
        else:
            clear_hidden_keys(p, k_ring.operand(step), start, block)
    dq = warpgroup_mma(grads, k_ring.operand(step), dq, is_async=True)
    dq, grads = warpgroup_mma_wait(0, [dq, grads])
    gl.thread_barrier()
    k_ring.release(step)
    if masked and p.spec.mask_stages > 0:
        mask_ring.release(mask_step)
    return dq


@gluon.jit
def add_up_queries(p, tiles, rings, dq_out, wg: gl.constexpr):
    """A consumer warpgroup: the sum of 64 queries over all keys."""
    q_tile, o_tile, here = tiles
    d: gl.constexpr = p.spec.d
    rows: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.block_n))
    seq, head, qt = p.query_tile()
    query = qt * LISTED + 64 * wg
    p_lse, behind = p.rows_of(seq, head)
    at = query + gl.arange(0, 64, rows)
    lse = gl.load(p_lse + at)
    delta = gl.load(p_lse + behind + at)
    n_full, n_all, start = p.key_visits(seq, head, qt)
    place = (seq, head, query, lse, delta, p.mask_factor(head), p.ratio(), start)
    dq = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    mbarrier.wait(here.index(0), 0)
    unmasked = 0 if p.spec.dense else n_full
    for j in range(n_full):
        block = p.key_block(start, j) if p.spec.has_dropout or p.spec.dense else 0
        dq = add_block(p, tiles, rings, place, dq, j, block, j, False, wg)
    for j in range(n_full, n_all):
        block = p.key_block(start, j)
        dq = add_block(p, tiles, rings, place, dq, j, block, j - unmasked, True, wg)
    first = (seq * p.n_head + head).to(gl.int64) * p.n_q * d
    store_rows(dq_out + first, query, p.n_q, dq, p.unscaled_scores(), d)


@accesses(reads="q_desc o_desc k_desc v_desc mask_desc rows mask counts blocks seen slopes scales kept", writes="dq")
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_attn_back_queries(
    q_desc, o_desc, k_desc, v_desc, mask_desc, rows, mask, counts, blocks, seen, slopes, scales, kept, dq, scale,
    softcap,
    sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head, inverse,
    spec: gl.constexpr,
):  # fmt: skip
    """dq: f32 [n_seq, n_head, n_q, d], written."""
    p = GradientWork(
        spec, rows, mask, counts, blocks, seen, slopes, scales, kept, scale, softcap, sm_t, sm_h, sm_s, mask_heads,
        mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head, inverse,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = tile_shared_layout(dtype, 4)
    q_tile = gl.allocate_shared_memory(dtype, [1, 1, 1, LISTED, spec.d], layout)
    o_tile = gl.allocate_shared_memory(dtype, [1, 1, 1, LISTED, spec.d], layout)
    here = make_barriers(1, 1)
    k_ring = make_ring(dtype, spec.d, spec.n_wg, spec)
    buffers: gl.constexpr = spec.of_values
    v_ring = make_ring(dtype, spec.d, spec.n_wg, buffers)
    # Without a ring for the mask, that of K stands in its place, unused, and its descriptor.
    mask_ring = k_ring
    mask_source = k_desc
    if spec.mask_stages > 0:
        mask_ring = make_mask_ring(spec)
        mask_source = mask_desc
    tiles = (q_tile, o_tile, here)
    rings = (k_ring, v_ring, mask_ring)
    gl.warp_specialize(
        [
            (add_up_queries, (p, tiles, rings, dq, 0)),
            (add_up_queries, (p, tiles, rings, dq, 1)),
            (produce_keys, (p, q_desc, o_desc, k_desc, v_desc, mask_source, tiles, rings)),
        ],
        [4, 1],
        [240, 24],
    )
