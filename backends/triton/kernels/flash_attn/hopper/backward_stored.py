"""The gradient of Q for Hopper (sm_90) from gradients of scores that lie in memory, in Gluon.

Where a soft cap, ALiBi or a bias makes scores dear, the kernel of keys stores dS^T (backward_keys.py), and nobody makes
scores a second time for the gradient of Q. What a bias's gradient is summed up from is there too. A thread block owns
128 queries of a head: two warpgroups (the consumers) have 64 each, and their sums in registers. One warp (the producer)
brings blocks of K and of dS^T by TMA:

    dQ += (dS^T)^T K                    (wgmma, both operands in shared memory)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_queries import clear_hidden_keys
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_rings import make_turned_ring
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_scores import store_rows
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_work import LISTED, NUMBERS, GradientWork
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_ring, mma_layout


@gluon.jit
def produce_scores(p, k_desc, s_desc, rings):
    """The producer warp: blocks of K and of dS^T."""
    k_ring, s_ring = rings
    seq, head, qt = p.query_tile()
    _n_full, n_all, start = p.key_visits(seq, head, qt)
    for j in range(n_all):
        key = p.key_block(start, j) * p.spec.block_n
        s_ring.fill(s_desc, 0, p.scores_block(seq, head, qt), key, 0, j)
        k_ring.fill(k_desc, seq, head // p.gqa, key, j)


@gluon.jit
def add_product(rings, dq, step, wg: gl.constexpr):
    """Add what a block of keys, which has arrived, gives to the sum of 64 queries."""
    k_ring, s_ring = rings
    dq = warpgroup_mma(s_ring.operand(step, wg), k_ring.operand(step), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    k_ring.release(step)
    s_ring.release(step)
    return dq


@gluon.jit
def add_up_scores(p, rings, dq_out, wg: gl.constexpr):
    """A consumer warpgroup: the sum of 64 queries over all keys."""
    k_ring, s_ring = rings
    d: gl.constexpr = p.spec.d
    seq, head, qt = p.query_tile()
    n_full, n_all, start = p.key_visits(seq, head, qt)
    dq = gl.full([64, d], 0.0, gl.float32, mma_layout(d))
    for j in range(n_full):
        s_ring.wait_full(j)
        k_ring.wait_full(j)
        dq = add_product(rings, dq, j, wg)
    for j in range(n_full, n_all):
        s_ring.wait_full(j)
        k_ring.wait_full(j)
        if p.spec.has_mask:
            clear_hidden_keys(p, k_ring.operand(j), start, p.key_block(start, j))
        dq = add_product(rings, dq, j, wg)
    first = (seq * p.n_head + head).to(gl.int64) * p.n_q * d
    store_rows(dq_out + first, qt * LISTED + 64 * wg, p.n_q, dq, p.unscaled_scores(), d)


@accesses(reads="k_desc s_desc counts blocks seen scales", writes="dq")
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_attn_back_stored(
    k_desc, s_desc, counts, blocks, seen, scales, dq, scale, softcap, sm_t, sm_h, sm_s, mask_heads, mask_seqs,
    mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head, inverse, spec: gl.constexpr,
):  # fmt: skip
    """dq: f32 [n_seq, n_head, n_q, d], written; s_desc: of dS^T, see room_for_scores() in backward_launch.py; counts,
    blocks, seen: the mask's plan, None without a mask. The others: see GradientWork."""
    p = GradientWork(
        spec, None, None, counts, blocks, seen, None, scales, None, scale, softcap, sm_t, sm_h, sm_s, mask_heads,
        mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head, inverse,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    k_ring = make_ring(dtype, spec.d, spec.n_wg, spec)
    s_ring = make_turned_ring(dtype, spec.stages, spec.block_n, LISTED, spec.n_wg)
    rings = (k_ring, s_ring)
    gl.warp_specialize(
        [
            (add_up_scores, (p, rings, dq, 0)),
            (add_up_scores, (p, rings, dq, 1)),
            (produce_scores, (p, k_desc, s_desc, rings)),
        ],
        [4, 1],
        [240, 24],
    )
