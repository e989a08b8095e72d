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
    if HAS_FACTORS:
        factor = gl.load(p_factors + token, mask=token < n, other=0.0)
        y = y * factor
        up = up * factor
    if GLU != "":
        y = glu(y, up, 0.0, 0.0, GLU)
    at = token * m + row
    stored = (row < m) & (token < n)
    if HAS_BIAS:
        y += gl.load(p_bias + row, mask=row < m, other=0.0)
    if HAS_RESIDUAL:
        y += gl.load(p_residual + at, mask=stored, other=0.0)
    gl.store(p_out + at, y, mask=stored)
