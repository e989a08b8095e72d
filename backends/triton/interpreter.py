"""Mends Triton 3.6's interpreter: with numpy 2.4 and later `range(a, b)` over loaded numbers raises a TypeError.

numpy stopped turning arrays of one element into numbers; Triton after 3.6 does it by itself (its issue 9171).
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


interpreter._patch_lang_tensor = _patch_with_index
