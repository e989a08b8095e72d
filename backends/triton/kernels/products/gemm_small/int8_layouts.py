"""Layouts of int8.py: plain Python, run when a kernel is compiled.

Tensors of a step are [WK, M, N, 4, 8, 4]: WK warps along k, M times 16 rows of weights, N times 8 tokens, four groups
of 32 elements, and a warp's lanes, 4g + t at [g, t]. PTX's mma.m16n8k32 of bytes wants of its operands, in lane 4g + t,
words t and 4 + t of row g and of row g + 8, and of token g; of its sums it has there rows g and g + 8 of tokens 2t and
2t + 1. A group of weights in shared memory has word t for the lane that wants it: no value changes its lane.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.gluon_layouts import log2
from graphrt.backends.triton.kernels.products.gemm_small.layouts import bits


@gluon.constexpr_function
def unit_layout(WK, WR, M, N):
    """[WK, M, N, 4, 8, 4] as above: groups, tokens and what WR warps leave of the rows are in a thread's registers."""
    regs = bits(3, 0, 2, 6) + bits(2, 0, log2(N), 6) + bits(1, log2(WR), log2(M), 6)
    warps = bits(1, 0, log2(WR), 6) + bits(0, 0, log2(WK), 6)
    return gl.DistributedLinearLayout(regs, bits(5, 0, 2, 6) + bits(4, 0, 3, 6), warps, [], [WK, M, N, 4, 8, 4])


@gluon.constexpr_function
def weights_unit(WK, WR, M, N):
    """unit_layout() without its axis of tokens: words of weights."""
    return gl.SliceLayout(2, unit_layout(WK, WR, M, N))


@gluon.constexpr_function
def scales_unit(WK, WR, M, N):
    """unit_layout() without tokens and t: what a row has in a group."""
    return gl.SliceLayout(2, gl.SliceLayout(5, unit_layout(WK, WR, M, N)))


@gluon.constexpr_function
def x_unit(WK, WR, M, N):
    """unit_layout() without its axis of rows: words of activations."""
    return gl.SliceLayout(1, unit_layout(WK, WR, M, N))


@gluon.constexpr_function
def x_scales_unit(WK, WR, M, N):
    """unit_layout() without rows and g: what a token has in a group."""
    return gl.SliceLayout(1, gl.SliceLayout(4, unit_layout(WK, WR, M, N)))


@gluon.constexpr_function
def x_words_layout(WK, WR, TOKENS):
    """[WK, TOKENS, 4, 8]: lane 4g + t has words t and 4 + t of all groups of token g of each 8."""
    regs = bits(3, 2, 3, 4) + bits(2, 0, 2, 4) + bits(1, 3, log2(TOKENS), 4)
    lanes = bits(3, 0, 2, 4) + bits(1, 0, 3, 4)
    warps = [[0, 0, 0, 0]] * log2(WR) + bits(0, 0, log2(WK), 4)
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [WK, TOKENS, 4, 8])


@gluon.constexpr_function
def x_numbers_layout(WK, WR, TOKENS, V):
    """[WK, TOKENS, 4 * V]: lane 4g + t has all numbers of tokens 2t and 2t + 1 of each 8."""
    regs = bits(2, 0, 2 + log2(V), 3) + bits(1, 0, 1, 3) + bits(1, 3, log2(TOKENS), 3)
    lanes = bits(1, 1, 3, 3) + [[0, 0, 0]] * 3
    warps = [[0, 0, 0]] * log2(WR) + bits(0, 0, log2(WK), 3)
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [WK, TOKENS, 4 * V])
