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

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.flash_attn.hopper.consumer import consume
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import (
    make_mask_ring,
    make_ring,
    make_turns,
    tile_shared_layout,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.work import NUMBERS, Work


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
        block = p.block(start, 0)
        row = p.first_row(block)
        k_ring.fill(k_desc, seq, kv_head, row, step)
        if from_ring:
            mask_seq = seq % p.mask_seqs
            mask_head = (group * p.spec.pack) % p.mask_heads
            token = p.first_token(seq, qt, 0)
            if n_full == 0:
                mask_ring.fill(mask_desc, mask_seq, mask_head, token, block * p.spec.block_n, mask_step)
                mask_step += 1
        for j in range(1, n_all):
            block = p.block(start, j)
            next_row = p.first_row(block)
            k_ring.fill(k_desc, seq, kv_head, next_row, step + j)
            if from_ring:
                if j >= n_full:
                    mask_ring.fill(mask_desc, mask_seq, mask_head, token, block * p.spec.block_n, mask_step)
                    mask_step += 1
            v_ring.fill(v_desc, seq, kv_head, row, step + j - 1)
            row = next_row
        v_ring.fill(v_desc, seq, kv_head, row, step + n_all - 1)
        step += n_all


@accesses(reads="q k_desc v_desc mask counts blocks slopes sinks mask_desc kept score", writes="out bad lse")
@gluon.jit(do_not_specialize=(*NUMBERS, "inverse"))
def hopper_flash_attn(
    q, k_desc, v_desc, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
    sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
    n_seq, n_head, gqa, n_q, n_kv, section, spec: gl.constexpr, mask_desc=None, kept=None, inverse=1.0, score=None,
):  # fmt: skip
    p = Work(
        spec, q, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
        sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
        n_seq, n_head, gqa, n_q, n_kv, section, kept=kept, inverse=inverse, score=score,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    query_buffers = gl.allocate_shared_memory(dtype, [spec.n_wg, 64, spec.d], tile_shared_layout(dtype, 2))
    k_ring = make_ring(dtype, spec.d, spec.n_wg, spec)
    v_ring = make_ring(dtype, spec.d, spec.n_wg, spec)
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
