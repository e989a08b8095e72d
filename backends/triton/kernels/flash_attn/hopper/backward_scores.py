"""What the kernels of keys and of queries have in common: scores to softmax weights, and gradients of scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from graphrt.backends.triton.kernels.common.constants import LOG2E, NEG_INF
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_work import LISTED
from graphrt.backends.triton.kernels.flash_attn.hopper.masks import kept_inside
from graphrt.backends.triton.kernels.flash_attn.hopper.rings import mma_layout
from graphrt.backends.triton.kernels.flash_attn.hopper.softcap import capped_with_slope


@gluon.jit
def weights_of(p, s, lse, mask, factor, masked: gl.constexpr, hides: gl.constexpr):
    """(weights, what bends the gradient) of raw scores s, f32 [64, n]; lse in log2 units, in the scores' shape or one
    that broadcasts to it. masked: there are mask values; hides: some may be -inf, which hides a score, NaN or not;
    factor: theirs. The bend is what a soft cap's slope makes of the weights, without one the weights."""
    shift = lse
    if masked:
        # Past the last query, and where nothing is seen, the mask may be 0, but lse is infinite.
        shift = lse - mask.to(gl.float32) * factor
    if p.spec.has_softcap:
        if hides:
            # A warp's largest score decides which form of the cap it takes. A hidden one must have no say: its key may
            # or may not have been cleared yet by the other warpgroup (backward_queries.py).
            s = gl.where(shift != -NEG_INF, s, 0.0)
        x, slope = capped_with_slope(p, s, -shift)
        w = gl.exp2(x)
        return w, w * slope
    else:
        x = s * (p.scale * LOG2E) - shift
        if hides:
            x = gl.where(shift != -NEG_INF, x, NEG_INF)
        w = gl.exp2(x)
        return w, w


@gluon.jit
def score_gradients(bent, d_w, ratio, delta, partial: gl.constexpr):
    """dS without the attention's scale, times its own factor (GradientWork.ratio; delta has it). Where the weight is 0
    it is 0, whatever V holds, in blocks where keys may be hidden."""
    d_s = bent * (d_w * ratio - delta)
    if partial:
        d_s = gl.where(bent == 0.0, 0.0, d_s)
    return d_s


@gluon.jit
def as_left(x, d: gl.constexpr):
    """x of 16 bits as the left operand of a product with d columns; the registers already lie as it wants them."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, mma_layout(d), 2), assert_trivial=True)


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr):
    """What consumer.packed() packed, f32 in the scores' registers."""
    cols: gl.constexpr = 2 * pairs.shape[1]
    low = pairs.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return gl.convert_layout(gl.join(low, high).reshape([pairs.shape[0], cols]), mma_layout(cols), assert_trivial=True)


@gluon.jit
def store_scores(p, stored, d_s, seq, head, key, query):
    """Begin to store gradients of scores, 16 bits [64 keys, n queries]. stored: (descriptor, the warpgroup's tile of
    shared memory that they go through)."""
    s_desc, tile = stored
    tma.store_wait(0)  # the one before has been read
    gl.thread_barrier()
    tile.reshape([tile.shape[2], tile.shape[3]]).store(d_s)
    fence_async_shared()
    gl.thread_barrier()
    block = p.scores_block(seq, head, query // LISTED)
    tma.async_copy_shared_to_global(s_desc, [0, block, key, query % LISTED], tile)


@gluon.jit
def store_rows(p_rows, first, n, acc, factor, d: gl.constexpr):
    """Store acc * factor, f32 [64, d], to rows first .. of n in all, side by side."""
    # Else the compiler makes all addresses before the loops, and has no registers left in them.
    row = kept_inside(first) + gl.arange(0, 64, gl.SliceLayout(1, mma_layout(d)))
    col = gl.arange(0, d, gl.SliceLayout(0, mma_layout(d)))
    gl.store(p_rows + (row * d)[:, None] + col[None, :], acc * factor, mask=(row < n)[:, None])
