"""The gradients of K and V for Hopper (sm_90) from gradients of scores that lie in memory, in Gluon.

Where a bias has a gradient, the kernel of queries stores dS (backward_queries.py): what is added up over the heads that
share the bias is there then, and so is what the gradient of K is made of. A thread block owns 128 keys, as in
backward_keys.py, and for every block of queries makes three products where that one makes four:

    S^T = K Q^T                         (wgmma, both operands in shared memory)
    dK += dS^T Q                        (wgmma, dS as TMA brings it)
    P^T = exp2(S^T scale + bias - lse);  dV += P^T dO

Blocks that hide keys have dS in registers: the kernel of queries, whose blocks are smaller, may have left out some.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_keys import turned_mask
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_rings import (
    make_row_ring,
    make_turned_mask_ring,
    make_turned_ring,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_scores import as_left, store_rows, weights_of
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_work import LISTED, NUMBERS, GradientWork
from graphrt.backends.triton.kernels.flash_attn.hopper.consumer import as_operand, packed
from graphrt.backends.triton.kernels.flash_attn.hopper.dropout import dropped_pairs, kept_of_keys
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_ring, mma_layout, tile_shared_layout


@gluon.jit
def produce_stored(p, k_desc, q_desc, o_desc, mask_desc, s_desc, tiles, rings):
    """The producer warp: K of the program's keys, then every step of queries."""
    k_tile, here = tiles
    q_ring, o_ring, row_ring, mask_ring, s_ring = rings
    seq, group, block = p.key_tile()
    key = block * p.spec.block_n
    mbarrier.expect(here.index(0), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [seq, group, key, 0], here.index(0), k_tile)
    steps: gl.constexpr = LISTED // p.spec.block_m
    done = 0
    for turn in range(p.gqa):
        head = group * p.gqa + turn
        _n_full, n_all, start = p.query_visits(seq, head, block)
        p_lse, behind = p.rows_of(seq, head)
        for i in range(n_all * steps):
            query = p.first_query(start, i)
            q_ring.fill(q_desc, seq, head, query, done + i)
            row_ring.fill(p_lse + query, behind, done + i)
            if p.spec.mask_stages > 0:
                mask_ring.fill(mask_desc, seq % p.mask_seqs, head % p.mask_heads, query, key, done + i)
            s_ring.fill(s_desc, seq, head, query, key, done + i)
            o_ring.fill(o_desc, seq, head, query, done + i)
        done += n_all * steps
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def add_stored_step(p, k, rings, place, dk, dv, step, query, partial: gl.constexpr, wg: gl.constexpr):
    """Add what a step's queries give to the sums of 64 keys. place: (sequence, head, first key, factor of the mask);
    partial: some may be hidden."""
    q_ring, o_ring, row_ring, mask_ring, s_ring = rings
    seq, head, key, factor = place
    zero = gl.full([64, p.spec.block_m], 0.0, gl.float32, mma_layout(p.spec.block_m))
    words = kept_of_keys(p, seq, head, query, key)
    q_ring.wait_full(step)
    s = warpgroup_mma(k, q_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    s_ring.wait_full(step)
    if not partial:
        dk = warpgroup_mma(s_ring.operand(step, wg), q_ring.operand(step), dk, is_async=True)
    row_ring.wait_full(step)
    mask = turned_mask(p, mask_ring, seq, head, key, query, step, wg)
    lse = row_ring.read(step, 0)
    s = warpgroup_mma_wait(0 if partial else 1, [s])
    w, _bent = weights_of(p, s, lse[None, :], mask, factor, True, partial)
    pairs = packed(w, k.dtype)
    if p.spec.has_dropout:
        pairs = dropped_pairs(pairs, words, p.spec.block_m)
    left = as_operand(p, pairs, k.dtype)
    o_ring.wait_full(step)
    dv = warpgroup_mma(left, o_ring.operand(step), dv, is_async=True)
    if partial:
        d_s = s_ring.read(step, wg)
        grads = as_left(gl.where(w == 0.0, gl.full_like(d_s, 0.0), d_s), p.spec.d)
        dk = warpgroup_mma(grads, q_ring.operand(step), dk, is_async=True)
        dk, dv, left, grads = warpgroup_mma_wait(0, [dk, dv, left, grads])
    else:
        dk, dv, left = warpgroup_mma_wait(0, [dk, dv, left])
    gl.thread_barrier()
    q_ring.release(step)
    o_ring.release(step)
    row_ring.release(step)
    s_ring.release(step)
    if p.spec.mask_stages > 0:
        mask_ring.release(step)
    return dk, dv


@gluon.jit
def add_up_stored(p, tiles, rings, dk_out, dv_out, wg: gl.constexpr):
    """A consumer warpgroup: the sums of 64 keys over all heads and queries."""
    k_tile, here = tiles
    d: gl.constexpr = p.spec.d
    k = k_tile.reshape([p.spec.block_n, d]).slice(64 * wg, 64, dim=0)
    seq, group, block = p.key_tile()
    key = block * p.spec.block_n + 64 * wg
    steps: gl.constexpr = LISTED // p.spec.block_m
    dk = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    dv = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    mbarrier.wait(here.index(0), 0)
    done = 0
    for turn in range(p.gqa):
        head = group * p.gqa + turn
        n_full, n_all, start = p.query_visits(seq, head, block)
        place = (seq, head, key, p.mask_factor(head))
        for i in range(n_full * steps):
            query = p.first_query(start, i)
            dk, dv = add_stored_step(p, k, rings, place, dk, dv, done + i, query, False, wg)
        for i in range(n_full * steps, n_all * steps):
            query = p.first_query(start, i)
            dk, dv = add_stored_step(p, k, rings, place, dk, dv, done + i, query, True, wg)
        done += n_all * steps
    first = (seq * (p.n_head // p.gqa) + group).to(gl.int64) * p.n_kv * d
    if p.spec.of_k:
        store_rows(dk_out + first, key, p.n_kv, dk, p.unscaled_scores(), d)
    if p.spec.of_v:
        store_rows(dv_out + first, key, p.n_kv, dv, p.unscaled_weights(), d)


@accesses(reads="q_desc o_desc k_desc mask_desc s_desc rows mask counts blocks scales kept", writes="dk dv")
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_attn_back_stored(
    q_desc, o_desc, k_desc, mask_desc, s_desc, rows, mask, counts, blocks, scales, kept, dk, dv, scale, softcap,
    sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, inverse,
    spec: gl.constexpr,
):  # fmt: skip
    """dk, dv: f32 [n_seq, n_head_kv, n_kv, d], written, those that somebody asked for; s_desc: of dS, see
    hopper_attn_back_queries."""
    p = GradientWork(
        spec, rows, mask, counts, blocks, None, None, scales, kept, scale, softcap, sm_t, sm_h, sm_s, mask_heads,
        mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, inverse,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = tile_shared_layout(dtype, 4)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, spec.block_n, spec.d], layout)
    here = make_barriers(1, 1)
    buffers: gl.constexpr = spec.of_queries
    q_ring = make_ring(dtype, spec.d, spec.n_wg, buffers)
    o_ring = make_ring(dtype, spec.d, spec.n_wg, buffers)
    row_ring = make_row_ring(spec, spec.n_wg)
    s_ring = make_turned_ring(dtype, spec.stages, spec, spec.n_wg)
    # Without a ring for the mask, that of dS stands in its place, unused, and its descriptor.
    mask_ring = s_ring
    mask_source = s_desc
    if spec.mask_stages > 0:
        mask_ring = make_turned_mask_ring(spec, spec.n_wg)
        mask_source = mask_desc
    tiles = (k_tile, here)
    rings = (q_ring, o_ring, row_ring, mask_ring, s_ring)
    gl.warp_specialize(
        [
            (add_up_stored, (p, tiles, rings, dk, dv, 0)),
            (add_up_stored, (p, tiles, rings, dk, dv, 1)),
            (produce_stored, (p, k_desc, q_desc, o_desc, mask_source, s_desc, tiles, rings)),
        ],
        [4, 1],
        [240, 24],
    )
