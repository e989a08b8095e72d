"""Weights in f16 that are kept from run to run, where memory is given for it: a step of training multiplies with each
of them twice, and dequantizes an 8B in 5 ms each time (H200).

The weights of products of one x lie below each other, adapters' b as columns behind them and adapters' a as rows below,
so that the forward and the backward product read the same memory. Only constants are kept: no run changes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.backends.triton.context import Context
from graphrt.backends.triton.launch import Launch
from graphrt.env import KEEP_WEIGHTS
from graphrt.errors import BackendError
from graphrt.tensor import Tensor

#: Rows begin where lines of memory do: so many elements apart, or multiples.
LINE = 64
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, eq=False)
class Stack:
    """weights: in their order; memory: f16 [rows, pitch], of each weight its rows, then those of adapters; starts: the
    first row of each weight, and of the adapters."""

    weights: tuple[Tensor, ...]
    memory: torch.Tensor
    starts: tuple[int, ...]


class Once(Launch):
    """A launch whose result lasts: it runs the first time only."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch.kernel, launch.grid, launch.args, launch.options, launch.smaller)
        self._done = False

    def __call__(self) -> None:
        if not self._done:
            super().__call__()
            self._done = True


def kept(weights: Sequence[Tensor], n_more: int, ctx: Context) -> Stack | None:
    """Memory for weights [k, m_i] of one x, n_more columns beside them and as many rows below; None where they are no
    constants or there is not so much memory."""
    if not all(ctx.is_constant(w) and ctx.packed_in_place(w) is not None for w in weights):
        return None
    key = ("kept in f16", frozenset(weights))
    if key in ctx.shared:  # other products by the same weights: where parts of a forward are computed again
        found = kept_before(weights, n_more, ctx)
        return found if found is not None and found.weights == tuple(weights) else None
    starts = [0]
    for w in weights:
        starts.append(starts[-1] + w.ne[1])
    rows, pitch = starts[-1] + n_more, -(-(weights[0].ne[0] + n_more) // LINE) * LINE
    if 2 * rows * pitch > _left(ctx):
        return None
    ctx.shared["left for f16"] -= 2 * rows * pitch
    memory = ctx.scratch((rows, pitch), torch.float16)
    ctx.shared[key] = found = Stack(tuple(weights), memory, tuple(starts))
    return found


def kept_before(weights: Sequence[Tensor], n_more: int, ctx: Context) -> Stack | None:
    """Those that the forward's products keep, None if they don't, or not just these."""
    found: Any = ctx.shared.get(("kept in f16", frozenset(weights)))
    assert found is None or isinstance(found, Stack)
    return found if found is not None and found.memory.shape[0] == found.starts[-1] + n_more else None


def kept_nbytes(ctx: Context) -> int:
    """What all weights of a split that are kept so take."""
    return sum(found.memory.nbytes for found in ctx.shared.values() if isinstance(found, Stack))


def _left(ctx: Context) -> int:
    """Bytes that may still be kept."""
    if "left for f16" not in ctx.shared:
        ctx.shared["left for f16"] = _limit()
    return int(ctx.shared["left for f16"])


def _limit() -> int:
    """What GRAPHRT_KEEP_WEIGHTS says, else 0: the last bits of gradients must not depend on what happens to be free."""
    text = KEEP_WEIGHTS.get()
    if text is None:
        return 0
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([KMGT]?)", text.strip().upper())
    if found is None:
        raise BackendError(f"GRAPHRT_KEEP_WEIGHTS must be a number of bytes such as 16G, 0 for none, got {text[:40]!r}")
    return int(float(found[1]) * _UNITS[found[2]])
