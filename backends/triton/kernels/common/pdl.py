"""Programmatic dependent launch in plain Triton: a launch may begin before the one before it has ended.

gdc_wait waits until that one, and all that it waited for, is complete and its writes can be seen; gdc_launch_dependents
lets the launch after this one begin, as soon as every program has come to it. gluon_pdl.py is the same for Gluon.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "take_turn"]


@triton.jit
def take_turn(PDL: tl.constexpr):
    """Both, one after the other, where launches may overlap."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
