"""Derivatives of the functions in activation.py, f32 to f32."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common.activation import exp_f32, sigmoid


@triton.jit
def _of_times_sigmoid(x, y, slope):
    """Of x sigmoid(y), y having the derivative `slope`. 1 - sigmoid(y) is sigmoid(-y), without the difference."""
    s = sigmoid(y)
    return s + x * s * sigmoid(-y) * slope


@triton.jit
def derivative(x, KIND: tl.constexpr):
    """Of a function of ops/unary.py's UNARY_KINDS, at x. relu has 0 at 0, and at NaN, as the CPU's reference has it."""
    if KIND == "silu":
        return _of_times_sigmoid(x, x, 1.0)
    elif KIND == "gelu":
        y = 1.5957691216057308 * (x + 0.044715 * (x * x * x))
        return _of_times_sigmoid(x, y, 1.5957691216057308 * (1.0 + 0.134145 * (x * x)))
    elif KIND == "gelu_erf":
        density = exp_f32(-0.5 * (x * x)) * 0.3989422804014327
        return 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476)) + x * density
    elif KIND == "gelu_quick":
        return _of_times_sigmoid(x, 1.702 * x, 1.702)
    elif KIND == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    elif KIND == "tanh":
        return 4.0 * sigmoid(2.0 * x) * sigmoid(-2.0 * x)
    elif KIND == "sigmoid":
        return sigmoid(x) * sigmoid(-x)
    elif KIND == "exp":
        return exp_f32(x)
    else:
        tl.static_assert(KIND == "softplus")
        return sigmoid(x)
