"""The gradient of attention's bias for Hopper (sm_90), in Gluon: dT, summed over the heads and sequences that share it.

A thread block owns 128 queries and 128 keys of one bias, whose values stay in shared memory; two warpgroups (the
consumers) have 64 of the queries each, and their sums in registers. One warp (the producer) brings, for each sequence
and head in turn, Q and K of the tile and then d_out and V:

    S = Q K^T, dW = dO V^T;   P = exp2(S scale + bias - lse);   sum += P (dW - delta)

A bias is read as a mask is, see backward_kernels.py: -inf hides a score. Everything is added up in one order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import mask_tile
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_scores import score_gradients, weights_of
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_work import LISTED, NUMBERS, GradientWork
from graphrt.backends.triton.kernels.flash_attn.hopper.dropout import dropped, kept_of_queries
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import key_columns, load_mask
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import make_mask_ring, make_ring, mma_layout
from graphrt.backends.triton.kernels.flash_attn.mask import FULL


@gluon.jit
def bias_tile(p):
    """(bias, block of queries, block of keys) of a program."""
    i = gl.program_id(0)
    n_blocks = p.key_blocks()
    per_bias = n_blocks * p.query_blocks()
    rest = i % per_bias
    return i // per_bias, rest // n_blocks, rest % n_blocks


@gluon.jit
def sharer(p, bias, turn):
    """(sequence, head) of the turn-th of those that share a bias."""
    heads = p.n_head // p.mask_heads
    turn = gl.to_tensor(turn)
    head = bias % p.mask_heads + turn % heads * p.mask_heads
    return bias // p.mask_heads + turn // heads * p.mask_seqs, head


@gluon.jit
def sharers(p):
    """How many share one."""
    return p.n_head // p.mask_heads * (p.n_seq // p.mask_seqs)


@gluon.jit
def produce_pairs(p, q_desc, o_desc, k_desc, v_desc, mask_desc, rings):
    """The producer warp: the bias once, then each sharer's tiles."""
    row_ring, key_ring, mask_ring = rings
    bias, qt, block = bias_tile(p)
    query = qt * LISTED
    key = block * p.spec.block_n
    if p.spec.mask_stages > 0:
        mask_ring.fill(mask_desc, bias // p.mask_heads, bias % p.mask_heads, query, key, 0)
    for turn in range(sharers(p)):
        seq, head = sharer(p, bias, turn)
        group = head // p.gqa
        row_ring.fill(q_desc, seq, head, query, 2 * turn)
        key_ring.fill(k_desc, seq, group, key, 2 * turn)
        row_ring.fill(o_desc, seq, head, query, 2 * turn + 1)
        key_ring.fill(v_desc, seq, group, key, 2 * turn + 1)


@gluon.jit
def add_logits(p, rings, total, turn, place, hides: gl.constexpr, wg: gl.constexpr):
    """Add what the turn-th sharer gives to the sums of 64 queries. place: (bias, first query, block of keys,
    GradientWork.ratio); hides: the tile's bias may be -inf somewhere."""
    row_ring, key_ring, mask_ring = rings
    bias, query, block, ratio = place
    n: gl.constexpr = p.spec.block_n
    at = query + gl.arange(0, 64, gl.SliceLayout(1, mma_layout(n)))
    zero = gl.full([64, n], 0.0, gl.float32, mma_layout(n))
    seq, head = sharer(p, bias, turn)
    p_lse, behind = p.rows_of(seq, head)
    lse = gl.load(p_lse + at)
    delta = gl.load(p_lse + behind + at)
    words = kept_of_queries(p, seq, head, query, block * n)
    first = 2 * turn
    row_ring.wait_full(first)
    key_ring.wait_full(first)
    q = row_ring.operand(first).slice(64 * wg, 64, dim=0)
    s = warpgroup_mma(q, key_ring.operand(first).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    row_ring.release(first)
    key_ring.release(first)
    if p.spec.mask_stages > 0:
        mask = mask_ring.read(0, wg)
    else:
        mask = load_mask(p, seq, head, query, block)
    w, _bent = weights_of(p, s, lse[:, None], mask, p.mask_factor(head), True, hides)
    # Beside the sums and the bias there are no registers for both products at once.
    row_ring.wait_full(first + 1)
    key_ring.wait_full(first + 1)
    o = row_ring.operand(first + 1).slice(64 * wg, 64, dim=0)
    d_w = warpgroup_mma(o, key_ring.operand(first + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    d_w = warpgroup_mma_wait(0, [d_w])
    row_ring.release(first + 1)
    key_ring.release(first + 1)
    if p.spec.has_dropout:
        d_w = dropped(d_w, words, n)
    return total + score_gradients(w, d_w, ratio, delta[:, None], hides)


@gluon.jit
def add_up_logits(p, rings, d_bias, kinds, wg: gl.constexpr):
    """A consumer warpgroup: the sums of 64 queries and all keys of the tile."""
    n: gl.constexpr = p.spec.block_n
    bias, qt, block = bias_tile(p)
    query = qt * LISTED + 64 * wg
    at = query + gl.arange(0, 64, gl.SliceLayout(1, mma_layout(n)))
    place = (bias, query, block, p.ratio())
    total = gl.full([64, n], 0.0, gl.float32, mma_layout(n))
    tile = mask_tile(
        bias // p.mask_heads, bias % p.mask_heads, qt, p.query_blocks(), p.mask_groups, p.mask_seqs
    )  # fmt: skip
    n_all = sharers(p)
    n_plain = gl.where(gl.load(kinds + tile.to(gl.int64) * p.key_blocks() + block) == FULL, n_all, 0)
    for turn in range(n_plain):
        total = add_logits(p, rings, total, turn, place, False, wg)
    for turn in range(n_plain, n_all):
        total = add_logits(p, rings, total, turn, place, True, wg)
    key = key_columns(p, block)
    p_rows = d_bias + bias.to(gl.int64) * p.n_q * p.n_kv
    row = at.to(gl.int64) * p.n_kv
    inside = (at < p.n_q)[:, None] & (key < p.n_kv)[None, :]
    gl.store(p_rows + row[:, None] + key[None, :], total * (1.0 / gl.load(p.scales + 1)), mask=inside)


@accesses(reads="q_desc o_desc k_desc v_desc mask_desc rows mask kinds scales kept", writes="d_bias")
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_attn_back_bias(
    q_desc, o_desc, k_desc, v_desc, mask_desc, rows, mask, kinds, scales, kept, d_bias, scale, softcap, sm_t, sm_h,
    sm_s,
    mask_heads, mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head, inverse,
    spec: gl.constexpr,
):  # fmt: skip
    """d_bias: f32 [mask_seqs, mask_heads, n_q, n_kv], written. mask: the bias; kinds: int32,
    mask.py's of its tiles, DENSE. The others: see GradientWork."""
    p = GradientWork(
        spec, rows, mask, None, None, None, None, scales, kept, scale, softcap, sm_t, sm_h, sm_s, mask_heads,
        mask_seqs, mask_groups, n_seq, n_head, gqa, n_q, n_kv, section, first_head, inverse,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    row_ring = make_ring(dtype, spec.d, spec.n_wg, spec)
    key_ring = make_ring(dtype, spec.d, spec.n_wg, spec)
    # Without a ring for the bias, another one stands in its place, unused, and its descriptor.
    mask_ring = key_ring
    mask_source = k_desc
    if spec.mask_stages > 0:
        mask_ring = make_mask_ring(spec)
        mask_source = mask_desc
    rings = (row_ring, key_ring, mask_ring)
    gl.warp_specialize(
        [
            (add_up_logits, (p, rings, d_bias, kinds, 0)),
            (add_up_logits, (p, rings, d_bias, kinds, 1)),
            (produce_pairs, (p, q_desc, o_desc, k_desc, v_desc, mask_source, rings)),
        ],
        [4, 1],
        [240, 24],
    )
