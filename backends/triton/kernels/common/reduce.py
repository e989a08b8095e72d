"""Reductions over an axis in which a NaN gives NaN (tl.max and tl.min leave it out), and what norms make of sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(x, AXIS: tl.constexpr):
    """The largest along an axis, NaN if there is one."""
    return tl.reduce(x, AXIS, _larger)


@triton.jit
def minimum(x, AXIS: tl.constexpr):
    """The least along an axis, NaN if there is one."""
    return tl.reduce(x, AXIS, _smaller)


@triton.jit
def over_rms(squares, n, eps):
    """What makes rows of n values with these sums of squares rows of unit root mean square."""
    return tl.div_rn(tl.full(squares.shape, 1.0, tl.float32), tl.sqrt_rn(squares / n + eps))
