"""Sums of mma.py and wgmma.py on their way out: added up, times factors, with bias, gate and residual (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.gluon_activation import glu
from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index
from graphrt.backends.triton.kernels.products.gemm_small.layouts import sums_layout, sums_shared


@gluon.jit
def deliver(
    acc, p_out, p_factors, p_bias, p_residual, p_parts, p_counter, first_row, m, n, tile, i_split, n_splits,
    GLU: gl.constexpr, SPLIT: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """The warps' sums [WK, ROWS, TOKENS], added up in order, to hand_over()."""
    WK: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    TOKENS: gl.constexpr = acc.shape[2]
    L: gl.constexpr = sums_layout(WK, ROWS, TOKENS, gl.num_warps(), GLU != "")
    sums = gl.allocate_shared_memory(gl.float32, [WK, ROWS, TOKENS], sums_shared(WK, ROWS, TOKENS), acc)
    hand_over(
        gl.sum(sums.load(L), 0), p_out, p_factors, p_bias, p_residual, p_parts, p_counter, first_row, m, n, tile,
        i_split, n_splits, GLU, SPLIT, HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@gluon.jit
def hand_over(
    y, p_out, p_factors, p_bias, p_residual, p_parts, p_counter, first_row, m, n, tile, i_split, n_splits,
    GLU: gl.constexpr, SPLIT: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """A tile's sums [ROWS, TOKENS] to out [n, m]. With SPLIT the last of a tile's programs adds the parts of all.

    Whichever it is, it adds them in the same order.
    """
    ROWS: gl.constexpr = y.shape[0]
    TOKENS: gl.constexpr = y.shape[1]
    if SPLIT:
        L: gl.constexpr = y.type.layout
        at = axis_index(L, 2, 1, TOKENS) * ROWS + axis_index(L, 2, 0, ROWS)
        p_first = p_parts + (tile * n_splits).to(gl.int64) * (ROWS * TOKENS)
        gl.store(p_first + i_split * (ROWS * TOKENS) + at, y)
        # All threads' stores come before the count, and all reads of others' parts after it.
        gl.thread_barrier()
        done = gl.atomic_add(p_counter + tile, 1, sem="acq_rel", scope="gpu")
        if done == n_splits - 1:
            gl.store(p_counter + tile, 0)  # for the next launch; in this one nobody counts here any more
            y = gl.load(p_first + at, cache_modifier=".cg")  # past the L1 cache: others wrote it
            for i in range(1, n_splits):
                y += gl.load(p_first + i * (ROWS * TOKENS) + at, cache_modifier=".cg")
            write(y, p_out, p_factors, p_bias, p_residual, first_row, m, n, GLU, HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL)
    else:
        write(y, p_out, p_factors, p_bias, p_residual, first_row, m, n, GLU, HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL)


#: Parts of a tile in hand_over_shares(), at most: a bit of an int32 for each, above a byte that counts them.
MOST_SHARES = 23
#: Parts that are asked for before the first of them is added.
PARTS_AT_ONCE = gl.constexpr(8)
#: How often a program asks whether all parts are there, some tens of microseconds, before it leaves its share.
PATIENCE = gl.constexpr(100)


@gluon.jit
def hand_over_shares(
    y, p_out, p_factors, p_bias, p_residual, p_parts, p_counters, first_row, m, n, tile, i_split, n_splits,
    GLU: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """A tile's parts to out [n, m], by all of its programs: each waits until all parts are there, and adds up those of
    its share of the tokens, in order. One that has waited too long, since others can't run beside it, leaves its share
    to the program whose part comes last; so nobody waits for ever.

    y: a program's part [ROWS, TOKENS], four warps'; counters: int32 [tiles, 2], zeros. The first one's low byte counts
    parts that are there, the bits above it are programs that left (up to MOST_SHARES); the second one counts programs
    that are done.
    """
    ROWS: gl.constexpr = y.shape[0]
    TOKENS: gl.constexpr = y.shape[1]
    L: gl.constexpr = y.type.layout
    p_first = p_parts + (tile * n_splits).to(gl.int64) * (ROWS * TOKENS)
    gl.store(p_first + i_split * (ROWS * TOKENS) + axis_index(L, 2, 1, TOKENS) * ROWS + axis_index(L, 2, 0, ROWS), y)
    # All threads' stores come before the count, and all reads of others' parts after it.
    gl.thread_barrier()
    p_counter = p_counters + tile * 2
    state = gl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu") + 1
    own = gl.to_tensor(1) << i_split
    shares = own
    if (state & 255) == n_splits:
        shares = own | (state >> 8)
    else:
        asked_for = 0
        while ((state & 255) < n_splits) & (asked_for < PATIENCE):
            state = gl.atomic_add(p_counter, 0, sem="acquire", scope="gpu")
            asked_for += 1
        if (state & 255) < n_splits:
            state = gl.atomic_add(p_counter, own << 8, sem="acq_rel", scope="gpu")
            # If all parts have come in the meantime, who came last does not know of this.
            shares = gl.where((state & 255) < n_splits, 0, own)
    PAIR: gl.constexpr = GLU != ""
    R: gl.constexpr = ROWS // 2 if PAIR else ROWS
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [128 // R, R // 32], [1, 0])
    row = axis_index(LS, 2, 1, R)
    at_row = row // 8 * 16 + row % 8 if PAIR else row
    for piece in range(0, (gl.minimum(n, TOKENS) + 7) // 8):
        if ((shares >> (gl.to_tensor(piece) % n_splits)) & 1) == 1:
            token = piece * 8 + axis_index(LS, 2, 0, 8)
            at = token * ROWS + at_row
            factor, more = asked(
                first_row + row, token, p_factors, p_bias, p_residual, m, n, HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL
            )
            total = add_parts(p_first, at, n_splits, ROWS * TOKENS)
            if PAIR:
                up = add_parts(p_first, at + 8, n_splits, ROWS * TOKENS)
            else:
                up = total
            finish(total, up, factor, more, first_row + row, token, p_out, m, n, GLU)
    # Nobody looks at the counters any more when the last one comes here: they are zeros for the next launch.
    if gl.atomic_add(p_counter + 1, 1, sem="relaxed", scope="gpu") == n_splits - 1:
        gl.store(p_counter, 0)
        gl.store(p_counter + 1, 0)


@gluon.jit
def add_parts(p, at, n_parts, stride):
    """The sum of what n_parts parts have at `at`, in order. Past the L1 cache: others wrote them."""
    total = gl.load(p + at, cache_modifier=".cg")
    for first in range(1, n_parts, PARTS_AT_ONCE):
        more = ()
        for i in gl.static_range(PARTS_AT_ONCE):
            there = (at >= 0) & (first + i < n_parts)
            more = more + (gl.load(p + (first + i) * stride + at, mask=there, other=0.0, cache_modifier=".cg"),)
        for i in gl.static_range(PARTS_AT_ONCE):
            total += more[i]
    return total


@gluon.jit
def asked(
    row, token, p_factors, p_bias, p_residual, m, n,
    HAS_FACTORS: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """(tokens' factors, what is added to sums of rows and tokens): for what there is none of, 1 and 0."""
    factor = 1.0
    more = 0.0
    if HAS_FACTORS:
        factor = gl.load(p_factors + token, mask=token < n, other=0.0)
    if HAS_BIAS:
        more = gl.load(p_bias + row, mask=row < m, other=0.0)
    if HAS_RESIDUAL:
        more += gl.load(p_residual + (token * m + row), mask=(row < m) & (token < n), other=0.0)
    return factor, more


@gluon.jit
def finish(y, up, factor, more, row, token, p_out, m, n, GLU: gl.constexpr):
    """Sums of rows and tokens to out [n, m], with what asked() has of them; with a gate y is its sums and `up` those
    of its up."""
    y = y * factor
    if GLU != "":
        y = glu(y, up * factor, 0.0, 0.0, GLU)
    gl.store(p_out + (token * m + row), y + more, mask=(row < m) & (token < n))


@gluon.jit
def write(
    y, p_out, p_factors, p_bias, p_residual, first_row, m, n,
    GLU: gl.constexpr, HAS_FACTORS: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """A tile's sums [ROWS, TOKENS] to out [n, m], times the tokens' factors, with what is to be done to them."""
    ROWS: gl.constexpr = y.shape[0]
    TOKENS: gl.constexpr = y.shape[1]
    if GLU != "":
        R: gl.constexpr = ROWS // 2
        y, up = gl.split(gl.permute(gl.reshape(y, [ROWS // 16, 2, 8, TOKENS]), (0, 2, 3, 1)))
        y = gl.reshape(y, [R, TOKENS])
        up = gl.reshape(up, [R, TOKENS])
    else:
        R: gl.constexpr = ROWS
        up = y
    L: gl.constexpr = y.type.layout
    row = first_row + axis_index(L, 2, 0, R)
    token = axis_index(L, 2, 1, TOKENS)
    factor, more = asked(row, token, p_factors, p_bias, p_residual, m, n, HAS_FACTORS, HAS_BIAS, HAS_RESIDUAL)
    finish(y, up, factor, more, row, token, p_out, m, n, GLU)
