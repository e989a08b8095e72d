"""All three gradients of attention in one launch for Hopper (sm_90), in Gluon: five products of a pair of blocks, where
backward_keys.py and backward_queries.py make seven.

A thread block owns 128 keys of a KV head of a sequence, as in backward_keys.py: two warpgroups have 64 of them each,
and the sums for K and V in registers. What the block's keys give to the gradient of Q needs dS of both warpgroups. Each
writes its own, as it lies in its registers, to shared memory, and a step later makes half of the columns:

    dQ = (dS^T)^T K                     (wgmma, both operands in shared memory)

so that nobody waits for the other one. TMA adds the result to
memory, in f32, where it meets other blocks in any order: the last bits differ from run to run.
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
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_keys import produce_queries, turned_mask
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_rings import make_row_ring, make_turned_mask_ring
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_scores import (
    as_left,
    score_gradients,
    store_rows,
    unpacked,
    weights_of,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_work import LISTED, NUMBERS, GradientWork
from graphrt.backends.triton.kernels.flash_attn.hopper.consumer import as_operand, packed
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import kept_inside
from graphrt.backends.triton.kernels.flash_attn.hopper.reduce_add import async_add_shared_to_global
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_ring, mma_layout, tile_shared_layout


@gluon.jit
def clear_odd_keys(p, k):
    """(whether some of 64 keys hold what is not finite, which of them, as rows of scores). Those elements become 0: 0
    times them would be NaN, for queries that do not see the key. k: [64, d] in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.block_m))
    values = k.load(layout).to(gl.float32)
    finite = gl.abs(values) < float("inf")
    count = gl.sum(gl.where(finite, 0, 1), 1)
    some = gl.sum(count, 0) > 0
    if some:
        k.store(gl.where(finite, values, 0.0).to(k.dtype))
        fence_async_shared()
    gl.thread_barrier()
    return some, gl.convert_layout(count, rows)


@gluon.jit
def odd_scores(s, odd):
    """Scores that are NaN where the key holds what is not finite. odd: clear_odd_keys's."""
    some, count = odd
    if some:
        s = gl.where((count > 0)[:, None], float("nan"), s)
    return s


@gluon.jit
def none_past_keys(p, w, key):
    """Weights of 64 keys from `key` on with 0 past the last one, which only the last block reaches."""
    if key + 64 > p.n_kv:
        end = kept_inside(p.n_kv)
        at = key + gl.arange(0, 64, gl.SliceLayout(1, mma_layout(p.spec.block_m)))
        w = gl.where((at < end)[:, None], w, 0.0)
    return w


@gluon.jit
def start_queries(p, exchange, step, wg: gl.constexpr):
    """Begin the product for the queries of the step before: [block_m, d / 2] of the warpgroup's columns."""
    all_keys, buffers, _full, _out = exchange
    half: gl.constexpr = p.spec.d // 2
    grads = buffers.index((step + 2) % 3).permute((1, 0))
    # Else the compiler makes the descriptors of all pieces before the loop, and has no registers for them.
    at = kept_inside(gl.to_tensor(0))
    keys = all_keys.index(at).reshape([p.spec.block_n, p.spec.d]).slice(half * wg, half, dim=1)
    zero = gl.full([p.spec.block_m, half], 0.0, gl.float32, mma_layout(half))
    return warpgroup_mma(grads, keys, zero, use_acc=False, is_async=True)


@gluon.jit
def add_queries(p, dq_desc, exchange, dq, place, wg: gl.constexpr):
    """Add what start_queries() made to memory. place: (sequence, head, first query)."""
    _all_keys, _buffers, _full, out = exchange
    seq, head, query = place
    half: gl.constexpr = p.spec.d // 2
    tma.store_wait(0)  # the one before has been read
    gl.thread_barrier()
    out.reshape([p.spec.block_m, half]).store(dq)
    fence_async_shared()
    gl.thread_barrier()
    async_add_shared_to_global(dq_desc, [seq, head, query, half * wg], out)


@gluon.jit
def give_gradients(exchange, grads, step, wg: gl.constexpr):
    """Give a step's dS^T of the warpgroup's 64 keys, 16 bits, to both, once both have given those of the step before.
    That also says that the buffer is free: the other one had made use of it, three steps ago, before it gave these."""
    _all_keys, buffers, full, _out = exchange
    mbarrier.wait(full.index((step + 2) % 3), (step // 3) & 1)
    slot = step % 3
    buffers.index(slot).slice(64 * wg, 64, dim=0).store(grads)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def add_fused_step(
    p, dq_desc, tiles, rings, exchange, place, dk, dv, step, query, before, mask_step, partial: gl.constexpr,
    wg: gl.constexpr,
):  # fmt: skip
    """backward_keys.py's add_step with the product for queries of the step before among its own. place: (sequence,
    head, first key, factor of the mask, GradientWork.ratio, factor of dQ, odd keys); before: (head, first query) of the
    step before."""
    k_tile, v_tile, _here = tiles
    q_ring, o_ring, row_ring, mask_ring = rings
    seq, head, key, factor, ratio, of_queries, odd = place
    d: gl.constexpr = p.spec.d
    k = k_tile.reshape([p.spec.block_n, d]).slice(64 * wg, 64, dim=0)
    v = v_tile.reshape([p.spec.block_n, d]).slice(64 * wg, 64, dim=0)
    zero = gl.full([64, p.spec.block_m], 0.0, gl.float32, mma_layout(p.spec.block_m))
    q_ring.wait_full(step)
    s = warpgroup_mma(k, q_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    o_ring.wait_full(step)
    d_w = s
    if not partial:  # a mask leaves too few registers for both at once
        d_w = warpgroup_mma(v, o_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    row_ring.wait_full(step)
    mask = 0
    if partial:
        mask = turned_mask(p, mask_ring, seq, head, key, query, mask_step, wg)
    lse = row_ring.read(step, 0)
    s = warpgroup_mma_wait(0 if partial else 1, [s])
    if p.spec.has_mask:
        s = odd_scores(s, odd)
    w, bent = weights_of(p, s, lse[None, :], mask, factor, partial, partial)
    w = none_past_keys(p, w, key)
    pairs = packed(w, k.dtype)
    left = as_operand(p, pairs, k.dtype)
    if partial:
        d_w = warpgroup_mma(v, o_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)
    dv = warpgroup_mma(left, o_ring.operand(step), dv, is_async=True)
    delta = row_ring.read(step, 1)
    d_w = warpgroup_mma_wait(1, [d_w])
    d_s = score_gradients(unpacked(pairs, k.dtype), d_w, ratio, delta[None, :], partial).to(k.dtype)
    grads = as_left(d_s, d)
    give_gradients(exchange, d_s, step, wg)
    dq = start_queries(p, exchange, step, wg)
    dk = warpgroup_mma(grads, q_ring.operand(step), dk, is_async=True)
    dq, dv, left = warpgroup_mma_wait(1, [dq, dv, left])
    add_queries(p, dq_desc, exchange, dq * of_queries, (seq, before[0], before[1]), wg)
    dk, grads = warpgroup_mma_wait(0, [dk, grads])
    gl.thread_barrier()
    q_ring.release(step)
    o_ring.release(step)
    row_ring.release(step)
    if partial and p.spec.mask_stages > 0:
        mask_ring.release(mask_step)
    return dk, dv


@gluon.jit
def add_up_all(p, dq_desc, tiles, rings, exchange, dk_out, dv_out, wg: gl.constexpr):
    """A consumer warpgroup: the sums of 64 keys over all heads and queries, and half of the columns of what all of the
    block's keys give to these queries."""
    k_tile, _v_tile, here = tiles
    _all_keys, buffers, full, _out = exchange
    d: gl.constexpr = p.spec.d
    seq, group, block = p.key_tile()
    key = block * p.spec.block_n + 64 * wg
    steps: gl.constexpr = LISTED // p.spec.block_m
    dk = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    dv = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    ratio = p.ratio()
    of_queries = p.unscaled_scores()
    mbarrier.wait(here.index(0), 0)
    odd = 0
    if p.spec.has_mask:
        odd = clear_odd_keys(p, k_tile.reshape([p.spec.block_n, d]).slice(64 * wg, 64, dim=0))
    # The first step adds zeros to its own queries, as if of a step before.
    empty = gl.full([64, p.spec.block_m], 0.0, gl.float32, mma_layout(p.spec.block_m))
    buffers.index(2).slice(64 * wg, 64, dim=0).store(empty.to(k_tile.dtype))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full.index(2), count=1)
    done = 0
    masks = 0
    last_head = group * p.gqa
    last_query = last_head * 0
    for turn in range(p.gqa):
        head = group * p.gqa + turn
        n_full, n_all, start = p.query_visits(seq, head, block)
        place = (seq, head, key, p.mask_factor(head), ratio, of_queries, odd)
        for i in range(n_full * steps):
            query = p.first_query(start, i)
            dk, dv = add_fused_step(
                p, dq_desc, tiles, rings, exchange, place, dk, dv, done + i, query, (last_head, last_query), 0,
                False, wg,
            )  # fmt: skip
            last_head = head
            last_query = query
        if p.spec.has_mask:
            for i in range(n_full * steps, n_all * steps):
                query = p.first_query(start, i)
                at = masks + i - n_full * steps
                dk, dv = add_fused_step(
                    p, dq_desc, tiles, rings, exchange, place, dk, dv, done + i, query, (last_head, last_query), at,
                    True, wg,
                )  # fmt: skip
                last_head = head
                last_query = query
            masks += (n_all - n_full) * steps
        done += n_all * steps
    mbarrier.wait(full.index((done + 2) % 3), (done // 3) & 1)
    dq = start_queries(p, exchange, done, wg)
    dq = warpgroup_mma_wait(0, [dq])
    add_queries(p, dq_desc, exchange, dq * of_queries, (seq, last_head, last_query), wg)
    first = (seq * (p.n_head // p.gqa) + group).to(gl.int64) * p.n_kv * d
    if p.spec.of_k:
        store_rows(dk_out + first, key, p.n_kv, dk, of_queries, d)
    if p.spec.of_v:
        store_rows(dv_out + first, key, p.n_kv, dv, p.unscaled_weights(), d)
    tma.store_wait(0)


@accesses(
    reads="q_desc o_desc k_desc v_desc mask_desc rows mask counts blocks slopes scales dq_desc", writes="dq_desc dk dv"
)
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_attn_back_fused(
    q_desc, o_desc, k_desc, v_desc, mask_desc, dq_desc, rows, mask, counts, blocks, slopes, scales, kept, dk, dv, scale,
    softcap, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head,
    inverse, spec: gl.constexpr,
):  # fmt: skip
    """dq_desc: of f32 [n_seq, n_head, n_q, d], added to; dk, dv: f32 [n_seq, n_head_kv, n_kv, d], written, those that
    somebody asked for."""
    p = GradientWork(
        spec, rows, mask, counts, blocks, None, slopes, scales, kept, scale, softcap, sm_t, sm_h, sm_s, mask_heads,
        mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head, inverse,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = tile_shared_layout(dtype, 4)
    all_keys = gl.allocate_shared_memory(dtype, [1, 1, 1, spec.block_n, spec.d], layout)
    k_tile = all_keys.index(0)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, spec.block_n, spec.d], layout)
    here = make_barriers(1, 1)
    buffers: gl.constexpr = spec.of_queries
    q_ring = make_ring(dtype, spec.d, spec.n_wg, buffers)
    o_ring = make_ring(dtype, spec.d, spec.n_wg, buffers)
    row_ring = make_row_ring(spec, spec.n_wg)
    grads_layout: gl.constexpr = tile_shared_layout(dtype, 2)
    grads = gl.allocate_shared_memory(dtype, [3, spec.block_n, spec.block_m], grads_layout)
    full = make_barriers(3, spec.n_wg)
    first = gl.allocate_shared_memory(gl.float32, [1, 1, spec.block_m, spec.d // 2], dq_desc.layout)
    second = gl.allocate_shared_memory(gl.float32, [1, 1, spec.block_m, spec.d // 2], dq_desc.layout)
    # Without a ring for the mask, that of Q stands in its place, unused, and its descriptor.
    mask_ring = q_ring
    mask_source = q_desc
    if spec.mask_stages > 0:
        mask_ring = make_turned_mask_ring(spec, spec.n_wg)
        mask_source = mask_desc
    tiles = (k_tile, v_tile, here)
    rings = (q_ring, o_ring, row_ring, mask_ring)
    gl.warp_specialize(
        [
            (add_up_all, (p, dq_desc, tiles, rings, (all_keys, grads, full, first), dk, dv, 0)),
            (add_up_all, (p, dq_desc, tiles, rings, (all_keys, grads, full, second), dk, dv, 1)),
            (produce_queries, (p, k_desc, v_desc, q_desc, o_desc, mask_source, tiles, rings)),
        ],
        [4, 1],
        [240, 24],
    )
