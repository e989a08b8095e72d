"""The gradients of K and V for Hopper (sm_90), in Gluon: ops/flash_attn_back.py has the formula.

A thread block owns 128 keys of a KV head of a sequence. One warp (the producer) brings K and V once, and then by TMA
blocks of Q and d_out of 16 bits, of each query head that shares the keys, with their lse and delta. Two warpgroups (the
consumers) have 64 of the keys each, and all sums of these in registers. For every block of queries:

    S^T = K Q^T, dW^T = V dO^T          (wgmma, both operands in shared memory)
    P^T = exp2(S^T scale - lse)
    dV += P^T dO                        (wgmma, P in registers, 16 bits)
    dS^T = P^T (dW^T - delta)
    dK += dS^T Q                        (wgmma, dS in registers, 16 bits)

While a product runs, the next weights or gradients are made; the other warpgroup fills what is left. Everything is
added up in one order: the same bits each time. lse is in log2 units and has no row of -inf, see backward_rows.py.

Where others want dS too (GradientSpec.stored), TMA stores dS^T, block by block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_rings import make_row_ring, make_turned_mask_ring
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_scores import (
    as_left,
    score_gradients,
    store_rows,
    store_scores,
    unpacked,
    weights_of,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_sight import sight_of_keys
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_work import LISTED, NUMBERS, GradientWork
from graphrt.backends.triton.kernels.flash_attn.hopper.consumer import as_operand, packed
from graphrt.backends.triton.kernels.flash_attn.hopper.dropout import dropped, dropped_pairs, kept_of_keys, reread
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import kept_inside
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_ring, mma_layout, tile_shared_layout


@gluon.jit
def produce_queries(p, k_desc, v_desc, q_desc, o_desc, mask_desc, tiles, rings):
    """The producer warp: K and V of the program's keys, then every step of queries."""
    k_tile, v_tile, here = tiles
    q_ring, o_ring, row_ring, mask_ring = rings
    seq, group, block = p.key_tile()
    key = block * p.spec.block_n
    mbarrier.expect(here.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [seq, group, key, 0], here.index(0), k_tile)
    tma.async_copy_global_to_shared(v_desc, [seq, group, key, 0], here.index(0), v_tile)
    steps: gl.constexpr = LISTED // p.spec.block_m
    done = 0
    masks = 0
    for turn in range(p.gqa):
        head = group * p.gqa + turn
        n_full, n_all, start = p.query_visits(seq, head, block)
        p_lse, behind = p.rows_of(seq, head)
        for i in range(n_all * steps):
            query = p.first_query(start, i)
            q_ring.fill(q_desc, seq, head, query, done + i)
            row_ring.fill(p_lse + query, behind, done + i)
            if p.spec.mask_stages > 0:
                if p.spec.dense or i >= n_full * steps:
                    mask_ring.fill(mask_desc, seq % p.mask_seqs, head % p.mask_heads, query, key, masks)
                    masks += 1
            o_ring.fill(o_desc, seq, head, query, done + i)
        done += n_all * steps
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def load_turned(p, seq, head, first_key, query):
    """[64 keys, block_m] mask values in the scores' registers; anything past the last key or query."""
    layout: gl.constexpr = mma_layout(p.spec.block_m)
    key = first_key + gl.arange(0, 64, gl.SliceLayout(1, layout))
    i = query + gl.arange(0, p.spec.block_m, gl.SliceLayout(0, layout))
    vec: gl.constexpr = p.spec.mask_vec
    base = p.mask + ((seq % p.mask_seqs).to(gl.int64) * p.sm_s + (head % p.mask_heads).to(gl.int64) * p.sm_h) * vec
    at = i.to(gl.int64) * (p.sm_t * vec)
    return gl.load(base + key[:, None] + at[None, :], mask=(key < p.n_kv)[:, None] & (i < p.n_q)[None, :], other=0.0)


@gluon.jit
def turned_mask(p, mask_ring, seq, head, key, query, step, part: gl.constexpr):
    """The mask's values of 64 keys and a step's queries, through the ring if there is one."""
    if p.spec.mask_stages > 0:
        return mask_ring.read(step, part)
    else:
        return load_turned(p, seq, head, key, query)


@gluon.jit
def add_step(
    p, tiles, rings, place, dk, dv, step, query, mask_step, partial: gl.constexpr, wg: gl.constexpr, stored=0
):  # fmt: skip
    """Add what a step's queries give to the sums of 64 keys. place: (sequence, head, first key,
    factor of the mask, GradientWork.ratio); of packed sequences the first is the position of the sequence's first
    query. stored: see store_scores(), where that is wanted."""
    masked: gl.constexpr = partial or p.spec.dense
    k, v = tiles
    q_ring, o_ring, row_ring, mask_ring = rings
    seq, head, key, factor, ratio = place
    d: gl.constexpr = p.spec.d
    zero = gl.full([64, p.spec.block_m], 0.0, gl.float32, mma_layout(p.spec.block_m))
    words = kept_of_keys(p, seq, head, query, key)
    q_ring.wait_full(step)
    s = warpgroup_mma(k, q_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    o_ring.wait_full(step)
    # Many queries, or a soft cap and a mask, leave too few registers for weights of 32 bits beside the products under
    # way; a mask of many queries, or of positions, or with what else takes some, too few for both products at once.
    cols: gl.constexpr = p.spec.block_m
    narrow: gl.constexpr = (p.spec.has_softcap and masked) or p.spec.has_dropout or p.spec.stored or p.spec.block_m > 64
    early: gl.constexpr = (
        p.spec.of_k
        and not p.spec.has_softcap
        and not (masked and (p.spec.has_dropout or p.spec.stored or p.spec.block_m > 64 or p.spec.packed))
    )
    d_w = s
    if early:
        d_w = warpgroup_mma(v, o_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    row_ring.wait_full(step)
    mask = 0
    if masked and not p.spec.packed:
        mask = turned_mask(p, mask_ring, seq, head, key, query, mask_step, wg)
    lse = row_ring.read(step, 0)
    s = warpgroup_mma_wait(1 if early else 0, [s])
    if masked and p.spec.packed:  # what positions say is made now, else it takes registers while the product runs
        mask = sight_of_keys(p, seq, key, kept_inside(query))
    w, bent = weights_of(p, s, lse[None, :], mask, factor, masked, partial)
    pairs = packed(w, k.dtype)
    if p.spec.has_dropout:
        left = as_operand(p, dropped_pairs(pairs, words, cols), k.dtype)
    else:
        left = as_operand(p, pairs, k.dtype)
    if narrow and p.spec.has_softcap:
        pairs = packed(bent, k.dtype)
    if p.spec.of_k and not early:
        d_w = warpgroup_mma(v, o_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    if p.spec.of_v:
        dv = warpgroup_mma(left, o_ring.operand(step), dv, is_async=True)
    if p.spec.of_k:
        delta = row_ring.read(step, 1)
        d_w = warpgroup_mma_wait(1 if p.spec.of_v else 0, [d_w])
        if narrow:
            bent = unpacked(pairs, k.dtype)
        if p.spec.has_dropout:
            d_w = dropped(d_w, reread(words), cols)
        d_s = score_gradients(bent, d_w, ratio, delta[None, :], partial).to(k.dtype)
        grads = as_left(d_s, d)
        if p.spec.stored:
            store_scores(p, stored, d_s, seq, head, key, query)
        dk = warpgroup_mma(grads, q_ring.operand(step), dk, is_async=True)
        dk, dv, left, grads = warpgroup_mma_wait(0, [dk, dv, left, grads])
    else:
        dv, left = warpgroup_mma_wait(0, [dv, left])
    gl.thread_barrier()
    q_ring.release(step)
    o_ring.release(step)
    row_ring.release(step)
    if masked and p.spec.mask_stages > 0:
        mask_ring.release(mask_step)
    return dk, dv


@gluon.jit
def add_up(p, tiles, rings, dk_out, dv_out, stored, wg: gl.constexpr):
    """A consumer warpgroup: the sums of 64 keys over all heads and queries. stored: see add_step()."""
    k_tile, v_tile, here = tiles
    d: gl.constexpr = p.spec.d
    k = k_tile.reshape([p.spec.block_n, d]).slice(64 * wg, 64, dim=0)
    v = v_tile.reshape([p.spec.block_n, d]).slice(64 * wg, 64, dim=0)
    seq, group, block = p.key_tile()
    key = block * p.spec.block_n + 64 * wg
    steps: gl.constexpr = LISTED // p.spec.block_m
    dk = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    dv = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    ratio = p.ratio()
    counts_queries: gl.constexpr = p.spec.has_dropout or p.spec.dense or p.spec.stored
    mbarrier.wait(here.index(0), 0)
    done = 0
    masks = 0
    for turn in range(p.gqa):
        head = group * p.gqa + turn
        n_full, n_all, start = p.query_visits(seq, head, block)
        place = (seq, head, key, p.mask_factor(head), ratio)
        unmasked = 0 if p.spec.dense else n_full * steps
        for i in range(n_full * steps):
            query = p.first_query(start, i) if counts_queries else 0
            dk, dv = add_step(p, (k, v), rings, place, dk, dv, done + i, query, masks + i, False, wg, stored)
        if p.spec.has_mask:
            for i in range(n_full * steps, n_all * steps):
                query = p.first_query(start, i)
                at = masks + i - unmasked
                dk, dv = add_step(p, (k, v), rings, place, dk, dv, done + i, query, at, True, wg, stored)
            masks += n_all * steps - unmasked
        done += n_all * steps
    first = (seq * (p.n_head // p.gqa) + group).to(gl.int64) * p.n_kv * d
    if p.spec.of_k:
        store_rows(dk_out + first, key, p.n_kv, dk, p.unscaled_scores(), d)
    if p.spec.of_v:
        store_rows(dv_out + first, key, p.n_kv, dv, p.unscaled_weights(), d)
    if p.spec.stored:
        tma.store_wait(0)


@accesses(
    reads="q_desc o_desc k_desc v_desc mask_desc rows mask counts blocks slopes scales kept", writes="dk dv s_desc"
)
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_attn_back_keys(
    q_desc, o_desc, k_desc, v_desc, mask_desc, s_desc, rows, mask, counts, blocks, slopes, scales, kept, dk, dv, scale,
    softcap, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head,
    inverse, spec: gl.constexpr,
):  # fmt: skip
    """dk, dv: f32 [n_seq, n_head_kv, n_kv, d], written, None for one that nobody asked for. s_desc: of dS^T of
    16 bits as room_for_scores() in backward_launch.py has it, times scales[1], None unless it is stored: of blocks that
    are visited."""
    p = GradientWork(
        spec, rows, mask, counts, blocks, None, slopes, scales, kept, scale, softcap, sm_t, sm_h, sm_s, mask_heads,
        mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head, inverse,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = tile_shared_layout(dtype, 4)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, spec.block_n, spec.d], layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, spec.block_n, spec.d], layout)
    here = make_barriers(1, 1)
    buffers: gl.constexpr = spec.of_queries
    q_ring = make_ring(dtype, spec.d, spec.n_wg, buffers)
    o_ring = make_ring(dtype, spec.d, spec.n_wg, buffers)
    row_ring = make_row_ring(spec, spec.n_wg)
    # Without a ring for the mask, that of Q stands in its place, unused, and its descriptor.
    mask_ring = q_ring
    mask_source = q_desc
    if spec.mask_stages > 0:
        mask_ring = make_turned_mask_ring(spec, spec.n_wg)
        mask_source = mask_desc
    tiles = (k_tile, v_tile, here)
    rings = (q_ring, o_ring, row_ring, mask_ring)
    # Without stores the mask's ring and descriptor stand in their place, unused.
    first = (mask_source, mask_ring)
    second = first
    if spec.stored:
        first = (s_desc, gl.allocate_shared_memory(dtype, [1, 1, 64, spec.block_m], layout))
        second = (s_desc, gl.allocate_shared_memory(dtype, [1, 1, 64, spec.block_m], layout))
    gl.warp_specialize(
        [
            (add_up, (p, tiles, rings, dk, dv, first, 0)),
            (add_up, (p, tiles, rings, dk, dv, second, 1)),
            (produce_queries, (p, k_desc, v_desc, q_desc, o_desc, mask_source, tiles, rings)),
        ],
        [4, 1],
        [240, 24],
    )
