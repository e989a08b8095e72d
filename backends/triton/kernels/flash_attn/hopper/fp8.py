"""Hopper's flash attention forward (half.py) whose products multiply 8-bit floats (e4m3), at twice the rate of f16.

K comes as it is cached. V must be read along the keys, so turned.py has laid it out anew, transposed. Queries are
rounded to e4m3 by a scale of their row's own, 448 over its largest element, which goes into the factor of its scores.
Softmax weights are rounded to e4m3 too; they are taken relative to the row's maximum over 2^HEADROOM, so that the
largest are near 2^HEADROOM and those below the largest number's 2^-17th part are the first to vanish. The denominator
adds them up before they are rounded.

Hopper's matrix units add products of 8-bit floats with about 14 bits, cut off and not rounded, and over thousands of
keys that would show. So no sum is left to them for more than one block: S is a sum over a head's 64 or 128 elements,
and each block's P V starts at 0 and is added to the accumulator in f32, by the multiply-add that rescales it.

P V of one block and S of the next are started together. While one warpgroup weighs its scores, the other's products
run. A thread has of 16 keys' weights those of keys 2t, 2t + 1, 2t + 8 and 2t + 9, where the product wants four
neighbours in a register; which key is which does not matter to a sum, and turned.py has V's keys in that order.
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
from graphrt.backends.triton.kernels.common.constants import LOG2E
from graphrt.backends.triton.kernels.flash_attn.hopper.consumer import fetch_mask, finish
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import hide, hide_past_end
from graphrt.backends.triton.kernels.flash_attn.hopper.queries import fetch_queries
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import (
    make_mask_ring,
    make_ring,
    mma_layout,
    tile_shared_layout,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.softmax import NO_MAX, row_maximum, settle, together
from graphrt.backends.triton.kernels.flash_attn.hopper.work import NUMBERS, Work

#: The largest number of e4m3.
LARGEST = gl.constexpr(448.0)


@gluon.constexpr_function
def mma8_layout(n):
    """Registers of one warpgroup's [64, n] accumulator, as mma_layout(n), of products of 8-bit operands."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 32])


@gluon.jit
def rounded_queries(q):
    """f32 [64, d] query rows as e4m3, and of each row what a code is multiplied by. A row's NaN stays one."""
    size = gl.max(gl.maximum(q, -q), 1)
    size = gl.maximum(size, 1e-30)
    return (q * (LARGEST / size)[:, None]).to(gl.float8e4nv), size * (1.0 / LARGEST)


@gluon.jit
def packed_weights(weights):
    """Softmax weights [64, n] as words of four e4m3, int32 [64, n / 4]: of each 16 keys, those of keys 2t, 2t + 1,
    2t + 8 and 2t + 9 are word t, as a thread has them."""
    rows: gl.constexpr = weights.shape[0]
    cols: gl.constexpr = weights.shape[1]
    even, odd = weights.reshape([rows, cols // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).split()
    a, c = even.split()
    b, d = odd.split()
    words = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }
        """,
        "=r,r,r,r,r",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return words.reshape([rows, cols // 4])


@gluon.jit
def as_operand8(p, words):
    """Packed softmax weights as the left operand of the second product; the registers already lie as it wants them."""
    layout: gl.constexpr = gl.DotOperandLayout(0, mma8_layout(p.spec.d), 4)
    a = words.to(gl.int8)
    b = (words >> 8).to(gl.int8)
    c = (words >> 16).to(gl.int8)
    d = (words >> 24).to(gl.int8)
    weights = gl.join(gl.join(a, c), gl.join(b, d)).reshape([words.shape[0], 4 * words.shape[1]])
    return gl.convert_layout(weights.to(gl.float8e4nv, bitcast=True), layout, assert_trivial=True)


@gluon.jit
def start_scores8(p, queries, k_ring, step):
    """Start S = Q K^T for the step-th block."""
    zero = gl.full([64, p.spec.block_n], 0.0, gl.float32, mma8_layout(p.spec.block_n))
    k_ring.wait_full(step)
    return warpgroup_mma(queries, k_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def start_values8(p, probs, v_ring, step):
    """Start P V for the step-th block, a sum of its own."""
    zero = gl.full([64, p.spec.d], 0.0, gl.float32, mma8_layout(p.spec.d))
    v_ring.wait_full(step)
    return warpgroup_mma(probs, v_ring.operand(step).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def plainly(s):
    """Scores in mma_layout, which has them where they are."""
    return gl.convert_layout(s, mma_layout(s.shape[1]), assert_trivial=True)


@gluon.jit
def added(p, acc, decay, more):
    """The accumulator, rescaled, and a block's sums."""
    layout: gl.constexpr = gl.SliceLayout(1, mma8_layout(p.spec.d))
    return acc * gl.convert_layout(decay, layout, assert_trivial=True)[:, None] + more


@gluon.constexpr_function
def lanes_layout():
    """Registers of [64, 4]: of each row of an accumulator what each of its four threads has added up."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[64, 4],
    )  # fmt: skip


@gluon.jit
def thread_sums(weights):
    """Each thread's sum of its weights of a row, [64, 4]."""
    rows: gl.constexpr = weights.shape[0]
    cols: gl.constexpr = weights.shape[1]
    sums = gl.sum(gl.sum(weights.reshape([rows, cols // 8, 4, 2]), 3), 1)
    return gl.convert_layout(sums, lanes_layout(), assert_trivial=True)


@gluon.jit
def softmax_step8(p, s, m, den, factor):
    """softmax.softmax_step for scores of s * factor, one for each row. The maximum that is kept is lower by the
    headroom, and den, [64, 4], has each thread's part of a row's sum: they are added up at the end of a tile."""
    m_new = together(gl.maximum(m, row_maximum(s) * factor - p.spec.headroom))
    weights = gl.exp2(s * factor[:, None] - m_new[:, None])
    decay = gl.exp2(m - m_new)
    by_row = gl.convert_layout(decay, gl.SliceLayout(1, lanes_layout()), assert_trivial=True)
    return weights, decay, m_new, den * by_row[:, None] + thread_sums(weights)


@gluon.jit
def weigh8(p, s, m, den, mask, block, factor, partial: gl.constexpr):
    """Scores of one block to softmax weights. factor: of each row, what makes scores of its products."""
    if partial and p.spec.has_mask:
        s = hide_past_end(p, s * factor[:, None] + mask.to(gl.float32), block)
        factor = gl.full([64], LOG2E, gl.float32, factor.type.layout)
    else:
        if partial:
            s = hide(p, s, block)
        factor = factor * LOG2E
    return softmax_step8(p, s, m, den, factor)


@gluon.jit
def advance8(p, rings, tile, factor, state, step, block, partial: gl.constexpr, wg: gl.constexpr):
    """One turn of the loop: start P V of the block before and S of block `step`, add the former to the accumulator,
    weigh the latter. state: accumulator, packed P, m, den, and what the accumulator is multiplied by before P V."""
    queries, k_ring, v_ring, mask_ring = rings
    seq, group, token, mask_step = tile
    acc, words, m, den, decay = state
    probs = as_operand8(p, words)
    more = start_values8(p, probs, v_ring, step - 1)
    scores = start_scores8(p, queries, k_ring, step)
    mask = 0
    if partial and p.spec.has_mask:
        mask = fetch_mask(p, mask_ring, seq, group, token, block, mask_step, wg)
    more, words = warpgroup_mma_wait(1, [more, words])
    v_ring.release(step - 1)
    acc = added(p, acc, decay, more)
    scores = warpgroup_mma_wait(0, [scores])
    k_ring.release(step)
    weights, next_decay, m, den = weigh8(p, plainly(scores), m, den, mask, block, factor, partial)
    if partial and p.spec.mask_stages > 0:
        den = settle(den)
        gl.thread_barrier()
        mask_ring.release(mask_step)
    return acc, packed_weights(weights), m, den, next_decay


@gluon.jit
def consume8(p, query_buffers, k_ring, v_ring, wg: gl.constexpr, mask_ring=None):
    """A consumer warpgroup: rows 64 * wg .. 64 * wg + 63 of every tile."""
    queries = query_buffers.index(wg)
    rings = (queries, k_ring, v_ring, mask_ring)
    row_layout: gl.constexpr = gl.SliceLayout(1, mma_layout(p.spec.block_n))
    step = 0
    mask_step = 0
    for turn in range(p.rounds()):
        seq, group, qt = p.tile(turn)
        token = p.first_token(seq, qt, wg)
        n_full, n_all, start = p.visits(seq, group, qt)
        codes, scale = rounded_queries(fetch_queries(p, (seq, group, qt), wg))
        queries.store(codes)
        factor = gl.convert_layout(scale, row_layout) * p.scale
        fence_async_shared()
        gl.thread_barrier()

        m = gl.full([64], NO_MAX, gl.float32, row_layout)
        den = gl.full([64, 4], 0.0, gl.float32, lanes_layout())
        acc = gl.full([64, p.spec.d], 0.0, gl.float32, mma8_layout(p.spec.d))
        tile = (seq, group, token, 0, mask_step, 0)
        scores = start_scores8(p, queries, k_ring, step)
        scores = plainly(warpgroup_mma_wait(0, [scores]))
        k_ring.release(step)
        if n_full > 0:
            weights, decay, m, den = weigh8(p, scores, m, den, 0, 0, factor, False)
        else:
            block = p.block(start, 0)
            mask = 0
            if p.spec.has_mask:
                mask = fetch_mask(p, mask_ring, seq, group, token, block, mask_step, wg)
            weights, decay, m, den = weigh8(p, scores, m, den, mask, block, factor, True)
            if p.spec.mask_stages > 0:
                den = settle(den)
                gl.thread_barrier()
                mask_ring.release(mask_step)
        state = (acc, packed_weights(weights), m, den, decay)

        for j in range(1, n_full):
            now = (seq, group, token, 0)
            state = advance8(p, rings, now, factor, state, step + j, 0, False, wg)
        for j in range(gl.maximum(n_full, 1), n_all):
            now = (seq, group, token, mask_step + j - n_full)
            state = advance8(p, rings, now, factor, state, step + j, p.block(start, j), True, wg)

        acc, words, m, den, decay = state
        probs = as_operand8(p, words)
        more = start_values8(p, probs, v_ring, step + n_all - 1)
        more, words = warpgroup_mma_wait(0, [more, words])
        v_ring.release(step + n_all - 1)
        acc = gl.convert_layout(added(p, acc, decay, more), mma_layout(p.spec.d), assert_trivial=True)
        total = gl.convert_layout(gl.sum(den, 1), row_layout, assert_trivial=True)
        finish(p, acc, m, total, tile, qt, wg)
        step += n_all
        mask_step += n_all - n_full


@gluon.jit
def fill_turned(ring, desc, seq, head, key, step):
    """Producer: copy all elements of a block's keys, `key` and on, as turned.py laid V out."""
    slot = step % ring.stages
    ring.wait_empty(step)
    full = ring.full.index(slot)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [seq, head, 0, key], full, ring.buffers.index(slot))


@gluon.jit
def produce8(p, k_desc, v_desc, k_ring, v_ring, mask_desc=None, mask_ring=None):
    """The producer warp, as half.py's: K one block ahead of V, the mask's blocks with K's."""
    from_ring: gl.constexpr = p.spec.mask_stages > 0
    step = 0
    mask_step = 0
    for turn in range(p.rounds()):
        seq, group, qt = p.tile(turn)
        kv_head = group * p.spec.pack // p.gqa
        n_full, n_all, start = p.visits(seq, group, qt)
        row = p.first_row(p.block(start, 0))
        for j in range(n_all):
            block = p.block(start, j)
            next_row = p.first_row(block)
            k_ring.fill(k_desc, seq, kv_head, next_row, step + j)
            if from_ring:
                if j >= n_full:
                    mask_seq = seq % p.mask_seqs
                    mask_head = (group * p.spec.pack) % p.mask_heads
                    token = p.first_token(seq, qt, 0)
                    mask_ring.fill(mask_desc, mask_seq, mask_head, token, block * p.spec.block_n, mask_step)
                    mask_step += 1
            if j > 0:
                fill_turned(v_ring, v_desc, seq, kv_head, row, step + j - 1)
            row = next_row
        fill_turned(v_ring, v_desc, seq, kv_head, row, step + n_all - 1)
        step += n_all


@accesses(reads="q k_desc v_desc mask counts blocks slopes sinks mask_desc", writes="out bad lse")
@gluon.jit(do_not_specialize=NUMBERS)
def hopper_fp8_attn(
    q, k_desc, v_desc, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
    sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
    n_seq, n_head, gqa, n_q, n_kv, section, spec: gl.constexpr, mask_desc=None,
):  # fmt: skip
    p = Work(
        spec, q, out, mask, counts, blocks, slopes, sinks, bad, lse, scale, softcap,
        sq_t, sq_h, sq_s, so_t, so_h, so_s, sm_t, sm_h, sm_s, mask_heads, mask_seqs, mask_groups,
        n_seq, n_head, gqa, n_q, n_kv, section,
    )  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = tile_shared_layout(dtype, 2, spec.d)
    query_buffers = gl.allocate_shared_memory(dtype, [spec.n_wg, 64, spec.d], layout)
    k_ring = make_ring(dtype, spec.d, spec.n_wg, spec)
    v_ring = make_ring(dtype, spec.block_n, spec.n_wg, spec, rows=spec.d)
    # Without a ring for the mask, K's stands in its place, unused.
    mask_ring = k_ring
    mask_source = k_desc
    if spec.mask_stages > 0:
        mask_ring = make_mask_ring(spec)
        mask_source = mask_desc
    # setmaxnreg moves registers from the producer to the consumers, see half.py.
    gl.warp_specialize(
        [
            (consume8, (p, query_buffers, k_ring, v_ring, 0, mask_ring)),
            (consume8, (p, query_buffers, k_ring, v_ring, 1, mask_ring)),
            (produce8, (p, k_desc, v_desc, k_ring, v_ring, mask_source, mask_ring)),
        ],
        [4, 1],
        [240, 24],
    )
