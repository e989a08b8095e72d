"""The generator of dropout.py in torch, word for word."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrt.ops.dropout import philox, threshold


def _high(multiplier: int, word: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of a product of two 32-bit numbers: int64 has a sign, so it is taken in halves."""
    low, upper = word & 0xFFFF, word >> 16
    return (upper * multiplier + ((low * multiplier) >> 16)) >> 16


def keep(dropout_p: float, seed: int, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """Which weights are kept: bools of that shape, [n_seq, n_head, n_q, n_kv]."""
    n_seq, n_head, n_q, n_kv = shape
    blocks = torch.arange(-(-n_kv // 4))
    where = torch.arange(n_head)[None, :, None, None] + (torch.arange(n_seq)[:, None, None, None] << 16)
    words = philox((blocks, torch.arange(n_q)[:, None], where, torch.tensor(offset)), seed, _high)
    every = torch.stack([w.expand(n_seq, n_head, n_q, len(blocks)) for w in words], -1)
    return every.reshape(n_seq, n_head, n_q, -1)[..., :n_kv] >= threshold(dropout_p)
