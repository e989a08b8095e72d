# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""score_math.py's functions for Gluon kernels, as good as f16 products deserve."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.constants import LOG2E
from graphrt.backends.triton.kernels.flash_attn.hopper.softmax import reciprocal


@gluon.jit
def tanh(x):
    """1 at both ends, where exp2 is 0 or infinite; off by an ulp of 1."""
    return 1.0 - 2.0 * reciprocal(1.0 + gl.exp2(x * (2.0 * LOG2E)))


@gluon.jit
def sigmoid(x):
    return reciprocal(1.0 + gl.exp2(x * -LOG2E))


@gluon.jit
def floor_div(a, b):
    """a // b rounded down; Gluon's rounds to 0. b over 0."""
    return a // b - (a % b < 0).to(gl.int32)


@gluon.jit
def floor_mod(a, b):
    """What floor_div leaves, 0 to b - 1."""
    rest = a % b
    return gl.where(rest < 0, rest + b, rest)


@gluon.jit
def look_up(p, at, FROM: gl.constexpr, SIZE: gl.constexpr):
    """The at-th of SIZE numbers behind p + FROM; the first and the last beyond their ends."""
    return gl.load(p + (FROM + gl.minimum(gl.maximum(at, 0), SIZE - 1)))
