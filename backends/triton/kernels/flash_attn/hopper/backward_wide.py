"""The gradients of K and V of wide heads for Hopper (sm_90), in Gluon: backward_keys.py for sums that fill a
warpgroup's registers.

A thread block owns 64 keys of a KV head of a sequence. Of its two consumer warpgroups one makes the weights and adds up
the gradient of V, the other makes the gradients of the scores from these weights, which it gets in 16 bits through
shared memory, and adds up that of K:

    first:   S^T = K Q^T;  P^T = exp2(S^T scale - lse), to the second;  dV += P^T dO
    second:  dW^T = V dO^T;  dS^T = P^T (dW^T - delta);  dK += dS^T Q
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.gluon_barriers import make_barriers
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_keys import produce_queries, turned_mask
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_rings import make_row_ring, make_turned_mask_ring
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_scores import (
    as_left,
    score_gradients,
    store_rows,
    weights_of,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_work import LISTED, NUMBERS, GradientWork
from graphrt.backends.triton.kernels.flash_attn.hopper.dropout import dropped, kept_of_keys
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_ring, mma_layout, tile_shared_layout


@aggregate
class WeightRing:
    """`stages` buffers of weights [64, block_m], 16 bits, from one warpgroup to another."""

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
    def give(self, w, step):
        """The first warpgroup: the step-th weights, once there is room for them."""
        slot = step % self.stages
        mbarrier.wait(self.empty.index(slot), ((step // self.stages) & 1) ^ 1)
        self.buffers.index(slot).store(w)
        gl.thread_barrier()
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def take(self, step):
        """The second: the step-th weights in the scores' registers."""
        slot = step % self.stages
        mbarrier.wait(self.full.index(slot), (step // self.stages) & 1)
        return self.buffers.index(slot).load(mma_layout(self.buffers.shape[2]))

    @gluon.jit
    def release(self, step):
        """The second: its threads have read the step-th weights and met since."""
        mbarrier.arrive(self.empty.index(step % self.stages), count=1)


@gluon.jit
def make_weight_ring(dtype: gl.constexpr, spec: gl.constexpr):
    layout: gl.constexpr = tile_shared_layout(dtype, 2)
    buffers = gl.allocate_shared_memory(dtype, [spec.stages, spec.block_n, spec.block_m], layout)
    return WeightRing(buffers, make_barriers(spec.stages, 1), make_barriers(spec.stages, 1), spec.stages)


@gluon.jit
def weigh_step(p, k, rings, place, dv, step, query, mask_step, partial: gl.constexpr):
    """The first warpgroup's part of a step. place: (sequence, head, first key, factor of the mask)."""
    q_ring, o_ring, row_ring, mask_ring, weight_ring = rings
    seq, head, key, factor = place
    masked: gl.constexpr = partial or p.spec.dense
    zero = gl.full([64, p.spec.block_m], 0.0, gl.float32, mma_layout(p.spec.block_m))
    words = kept_of_keys(p, seq, head, query, key)
    q_ring.wait_full(step)
    s = warpgroup_mma(k, q_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    row_ring.wait_full(step)
    lse = row_ring.read(step, 0)
    mask = 0
    if masked:
        mask = turned_mask(p, mask_ring, seq, head, key, query, mask_step, 0)
    s = warpgroup_mma_wait(0, [s])
    w, bent = weights_of(p, s, lse[None, :], mask, factor, masked, partial)
    if p.spec.of_v:
        if p.spec.has_dropout:
            left = as_left(dropped(w, words, p.spec.block_m).to(k.dtype), p.spec.d)
        else:
            left = as_left(w.to(k.dtype), p.spec.d)
        o_ring.wait_full(step)
        dv = warpgroup_mma(left, o_ring.operand(step), dv, is_async=True)
    if p.spec.of_k:
        weight_ring.give((bent if p.spec.has_softcap else w).to(k.dtype), step)
    else:
        gl.thread_barrier()
    q_ring.release(step)
    row_ring.release(step)
    if masked and p.spec.mask_stages > 0:
        mask_ring.release(mask_step)
    if p.spec.of_v:
        dv, left = warpgroup_mma_wait(0, [dv, left])
        o_ring.release(step)
    return dv


@gluon.jit
def weigh(p, tiles, rings, dv_out):
    """The first warpgroup: the weights of all heads and queries, and the sum for V."""
    k_tile, v_tile, here = tiles
    d: gl.constexpr = p.spec.d
    k = k_tile.reshape([p.spec.block_n, d])
    seq, group, block = p.key_tile()
    key = block * p.spec.block_n
    steps: gl.constexpr = LISTED // p.spec.block_m
    dv = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    mbarrier.wait(here.index(0), 0)
    done = 0
    masks = 0
    for turn in range(p.gqa):
        head = group * p.gqa + turn
        n_full, n_all, start = p.query_visits(seq, head, block)
        place = (seq, head, key, p.mask_factor(head))
        unmasked = 0 if p.spec.dense else n_full * steps
        for i in range(n_full * steps):
            query = p.first_query(start, i) if p.spec.has_dropout or p.spec.dense else 0
            dv = weigh_step(p, k, rings, place, dv, done + i, query, masks + i, False)
        if p.spec.has_mask:
            for i in range(n_full * steps, n_all * steps):
                query = p.first_query(start, i)
                dv = weigh_step(p, k, rings, place, dv, done + i, query, masks + i - unmasked, True)
            masks += n_all * steps - unmasked
        done += n_all * steps
    if p.spec.of_v:
        first = (seq * (p.n_head // p.gqa) + group).to(gl.int64) * p.n_kv * d
        store_rows(dv_out + first, key, p.n_kv, dv, p.unscaled_weights(), d)


@gluon.jit
def add_keys_step(p, v, rings, dk, step, ratio, words):
    """The second warpgroup's part of a step. words: dropout's bits."""
    q_ring, o_ring, row_ring, mask_ring, weight_ring = rings
    zero = gl.full([64, p.spec.block_m], 0.0, gl.float32, mma_layout(p.spec.block_m))
    o_ring.wait_full(step)
    d_w = warpgroup_mma(v, o_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    row_ring.wait_full(step)
    delta = row_ring.read(step, 1)
    d_w = warpgroup_mma_wait(0, [d_w])
    if p.spec.has_dropout:
        d_w = dropped(d_w, words, p.spec.block_m)
    w = weight_ring.take(step).to(gl.float32)
    d_s = score_gradients(w, d_w, ratio, delta[None, :], p.spec.has_mask)
    grads = as_left(d_s.to(v.dtype), p.spec.d)
    q_ring.wait_full(step)
    dk = warpgroup_mma(grads, q_ring.operand(step), dk, is_async=True)
    gl.thread_barrier()
    o_ring.release(step)
    row_ring.release(step)
    weight_ring.release(step)
    dk, grads = warpgroup_mma_wait(0, [dk, grads])
    q_ring.release(step)
    return dk


@gluon.jit
def add_keys(p, tiles, rings, dk_out):
    """The second warpgroup: the gradients of the scores of all heads and queries, and the sum for K."""
    if p.spec.of_k:
        k_tile, v_tile, here = tiles
        d: gl.constexpr = p.spec.d
        v = v_tile.reshape([p.spec.block_n, d])
        seq, group, block = p.key_tile()
        steps: gl.constexpr = LISTED // p.spec.block_m
        dk = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
        ratio = p.ratio()
        mbarrier.wait(here.index(0), 0)
        end = 0
        if p.spec.has_dropout:
            for turn in range(p.gqa):
                head = group * p.gqa + turn
                n_full, n_all, start = p.query_visits(seq, head, block)
                for i in range(n_all * steps):
                    words = kept_of_keys(p, seq, head, p.first_query(start, i), block * p.spec.block_n)
                    dk = add_keys_step(p, v, rings, dk, end + i, ratio, words)
                end += n_all * steps
        else:
            for turn in range(p.gqa):
                n_full, n_all, start = p.query_visits(seq, group * p.gqa + turn, block)
                end += n_all * steps
            for step in range(end):
                dk = add_keys_step(p, v, rings, dk, step, ratio, 0)
        first = (seq * (p.n_head // p.gqa) + group).to(gl.int64) * p.n_kv * d
        store_rows(dk_out + first, block * p.spec.block_n, p.n_kv, dk, p.unscaled_scores(), d)


@accesses(reads="q_desc o_desc k_desc v_desc mask_desc rows mask counts blocks slopes scales kept", writes="dk dv")
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_attn_back_wide(
    q_desc, o_desc, k_desc, v_desc, mask_desc, rows, mask, counts, blocks, slopes, scales, kept, dk, dv, scale,
    softcap,
    sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head, inverse,
    spec: gl.constexpr,
):  # fmt: skip
    """As hopper_attn_back_keys."""
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
    readers: gl.constexpr = 1 + spec.of_k
    q_ring = make_ring(dtype, spec.d, readers, buffers)
    o_ring = make_ring(dtype, spec.d, spec.of_v + spec.of_k, buffers)
    row_ring = make_row_ring(spec, readers)
    weight_ring = make_weight_ring(dtype, spec)
    # Without a ring for the mask, that of Q stands in its place, unused, and its descriptor.
    mask_ring = q_ring
    mask_source = q_desc
    if spec.mask_stages > 0:
        mask_ring = make_turned_mask_ring(spec, 1)
        mask_source = mask_desc
    tiles = (k_tile, v_tile, here)
    rings = (q_ring, o_ring, row_ring, mask_ring)
    all_rings = (q_ring, o_ring, row_ring, mask_ring, weight_ring)
    gl.warp_specialize(
        [
            (weigh, (p, tiles, all_rings, dv)),
            (add_keys, (p, tiles, all_rings, dk)),
            (produce_queries, (p, k_desc, v_desc, q_desc, o_desc, mask_source, tiles, rings)),
        ],
        [4, 1],
        [240, 24],
    )
