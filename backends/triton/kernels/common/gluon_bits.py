"""bits.py for Gluon kernels, as far as they need it: tested equal."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def f16_low(word):
    """The f16 in the low 16 bits of an integer."""
    return word.to(gl.int16).to(gl.float16, bitcast=True)
