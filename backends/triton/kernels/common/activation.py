"""Activations and GLU in plain Triton, f32 to f32: what elementwise kernels and fused products all call.

A NaN among the arguments gives NaN, as in the CPU's reference, so that a broken tensor shows: tl.maximum and tl.minimum
return the other operand unless they are told to propagate NaN. gluon_activation.py is the same for Gluon.

QUICK: exponentials as the device has them, which lose as many bits as their arguments have before the point. For sums
of rounded products, where nobody could see the difference.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp_f32(x):
    """e^x within about 1 ulp. tl.exp loses as many bits as x has before the point."""
    x = clamped(x, -104.0, 89.0)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    # ln 2 in two parts: n times the first is exact.
    r = (x - n * 0.693359375) - n * -2.1219444005469057e-4
    # 2^n in two factors: n may be past the exponents of normal numbers.
    i = n.to(tl.int32)
    half = i >> 1
    scale = ((half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.exp2(r * 1.4426950408889634) * scale * ((i - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x): nothing overflows, and small results keep their digits."""
    e = exp_f32(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def tanh(x):
    """tanh(x): near 0 a polynomial, because 1 - e^-2x has few digits there."""
    e = exp_f32(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    t = x * x
    p = (((-0.006276390 * t + 0.021116216) * t - 0.053875137) * t + 0.133329242) * t - 0.333333313
    return tl.where(t < 0.36, x + x * (t * p), tl.where(x < 0.0, -far, far))


@triton.jit
def softplus(x):
    """ln(1 + e^x) = max(x, 0) + 2 artanh(s), s = e / (2 + e) with e = e^-|x|."""
    e = exp_f32(-tl.abs(x))
    s = e / (2.0 + e)
    z = s * s
    p = (((0.134337738 * z + 0.141169786) * z + 0.200038359) * z + 0.333333194) * z
    return relu(x) + 2.0 * (s + s * p)


@triton.jit
def relu(x):
    """max(x, 0); NaN of NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamped(x, low, high):
    """x limited to low..high; NaN of NaN."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    return tl.minimum(tl.maximum(x, low, propagate_nan=ALL), high, propagate_nan=ALL)


@triton.jit
def capped(x, high):
    """min(x, high); NaN of NaN."""
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def times_sigmoid(x, y, QUICK: tl.constexpr):
    """x * sigmoid(y)."""
    if QUICK:
        return x / (1.0 + tl.exp(-y))
    else:
        return x * sigmoid(y)


@triton.jit
def activation(x, KIND: tl.constexpr, QUICK: tl.constexpr):
    """A function of ops/unary.py's UNARY_KINDS. QUICK: of silu, gelu and gelu_quick."""
    if KIND == "silu":
        return times_sigmoid(x, x, QUICK)
    elif KIND == "gelu":  # (1 + tanh(u)) / 2 is sigmoid(2u), without the difference
        return times_sigmoid(x, 1.5957691216057308 * (x + 0.044715 * (x * x * x)), QUICK)
    elif KIND == "gelu_erf":
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif KIND == "gelu_quick":
        return times_sigmoid(x, 1.702 * x, QUICK)
    elif KIND == "relu":
        return relu(x)
    elif KIND == "tanh":
        return tanh(x)
    elif KIND == "sigmoid":
        return sigmoid(x)
    elif KIND == "exp":
        return exp_f32(x)
    else:
        tl.static_assert(KIND == "softplus")
        return softplus(x)


@triton.jit
def glu(gate, up, alpha, limit, KIND: tl.constexpr, QUICK: tl.constexpr):
    """A function of ops/unary.py's GLU_KINDS. alpha, limit: of swiglu_oai alone."""
    if KIND == "reglu":
        return relu(gate) * up
    elif KIND == "geglu":
        return activation(gate, "gelu", QUICK) * up
    elif KIND == "swiglu":
        return activation(gate, "silu", QUICK) * up
    else:
        tl.static_assert(KIND == "swiglu_oai")
        gate = capped(gate, limit)
        return times_sigmoid(gate, alpha * gate, QUICK) * (clamped(up, -limit, limit) + 1.0)
