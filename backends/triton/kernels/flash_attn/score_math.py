# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""What the kernels' form of a score function calls (score_code.py), and how an attention calls that."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common import activation
from graphrt.backends.triton.kernels.common.constants import LN2, LOG2E


@triton.jit
def tanh(x, ACCURATE: tl.constexpr):
    """To the last bit, or as good as f16 products deserve."""
    if ACCURATE:
        return activation.tanh(x)
    else:
        return 1.0 - 2.0 / (1.0 + tl.exp2(2.0 * LOG2E * x))


@triton.jit
def floor_div(a, b):
    """a // b rounded down; Triton's rounds to 0. b over 0."""
    rest = a % b
    return a // b - (rest < 0).to(tl.int32)


@triton.jit
def floor_mod(a, b):
    """What floor_div leaves, 0 to b - 1."""
    rest = a % b
    return tl.where(rest < 0, rest + b, rest)


@triton.jit
def look_up(p, at, FROM: tl.constexpr, SIZE: tl.constexpr):
    """The at-th of SIZE numbers behind p + FROM; the first and the last beyond their ends."""
    return tl.load(p + (FROM + tl.minimum(tl.maximum(at, 0), SIZE - 1)))


@triton.jit
def scored(s, factor, i_seq, head, query, key, p_score, SCORE: tl.constexpr, ACCURATE: tl.constexpr):
    """Scores after the score function, in units of log2. factor: brings s to log2; i_seq, head, query, key: of each
    score, along its axes."""
    return SCORE(s * (factor * LN2), i_seq, head, query, key, p_score, ACCURATE) * LOG2E
