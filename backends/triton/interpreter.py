"""Mends Triton 3.6's interpreter in two places.

With numpy 2.4 and later `range(a, b)` over loaded numbers raises a TypeError: numpy stopped turning arrays of one
element into numbers; Triton after 3.6 does it by itself (its issue 9171).

A minimum or maximum that is not told to propagate NaN is computed as one that is. Here it returns the other operand, as
min.f32 and max.f32 do on a GPU, so that tests see where a NaN gets lost. tl.max and tl.min over an axis do so already.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


interpreter._patch_lang_tensor = _patch_with_index


def _min_num(self: Any, lhs: Any, rhs: Any) -> Any:
    return self.binary_op(lhs, rhs, np.fmin)


def _max_num(self: Any, lhs: Any, rhs: Any) -> Any:
    return self.binary_op(lhs, rhs, np.fmax)


interpreter.InterpreterBuilder.create_minnumf = _min_num
interpreter.InterpreterBuilder.create_maxnumf = _max_num
