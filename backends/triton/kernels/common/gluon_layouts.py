"""Layouts of registers, and numbers along an axis of one, for Gluon kernels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def axis_layout(layout, rank, axis):
    """The layout of a vector along one axis of a tensor of that layout."""
    for i in reversed(range(rank)):
        if i != axis:
            layout = gl.SliceLayout(i, layout)
    return layout


@gluon.jit
def axis_index(LAYOUT: gl.constexpr, RANK: gl.constexpr, AXIS: gl.constexpr, N: gl.constexpr):
    """0 .. N - 1 along one axis of RANK, int32 [1, .., N, .., 1]."""
    x = gl.arange(0, N, layout=axis_layout(LAYOUT, RANK, AXIS))
    for i in gl.static_range(RANK):
        if i != AXIS:
            x = gl.expand_dims(x, i)
    return x
