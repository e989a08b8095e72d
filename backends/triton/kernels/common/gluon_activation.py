"""activation.py's GLU for Gluon kernels, the QUICK form: every line the same, and tested equal."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan, constexpr

#: A NaN operand gives NaN, where gl.maximum and gl.minimum would return the other one.
ALL = constexpr(PropagateNan.ALL)


@gluon.jit
def relu(x):
    """max(x, 0); NaN of NaN."""
    return gl.maximum(x, 0.0, propagate_nan=ALL)


@gluon.jit
def clamped(x, low, high):
    """x limited to low..high; NaN of NaN."""
    return gl.minimum(gl.maximum(x, low, propagate_nan=ALL), high, propagate_nan=ALL)


@gluon.jit
def capped(x, high):
    """min(x, high); NaN of NaN."""
    return gl.minimum(x, high, propagate_nan=ALL)


@gluon.jit
def times_sigmoid(x, y):
    """x * sigmoid(y)."""
    return x / (1.0 + gl.exp(-y))


@gluon.jit
def glu(gate, up, alpha, limit, KIND: gl.constexpr):
    """A function of ops/unary.py's GLU_KINDS. alpha, limit: of swiglu_oai alone."""
    if KIND == "reglu":
        return relu(gate) * up
    elif KIND == "geglu":
        return times_sigmoid(gate, 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))) * up
    elif KIND == "swiglu":
        return times_sigmoid(gate, gate) * up
    else:
        gl.static_assert(KIND == "swiglu_oai")
        gate = capped(gate, limit)
        return times_sigmoid(gate, alpha * gate) * (clamped(up, -limit, limit) + 1.0)
