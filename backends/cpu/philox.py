"""The generator of dropout.py in torch, word for word."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrt.ops.dropout import KEYS, bit_of, kept_words


def _high(multiplier: int, word: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of a product of two 32-bit numbers: int64 has a sign, so it is taken in halves."""
    low, upper = word & 0xFFFF, word >> 16
    return (upper * multiplier + ((low * multiplier) >> 16)) >> 16


def keep(dropout_p: float, seed: int, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """Which weights are kept: bools of that shape, [n_seq, n_head, n_q, n_kv]."""
    n_seq, n_head, n_q, n_kv = shape
    where = torch.arange(n_head)[:, None, None] + (torch.arange(n_seq)[:, None, None, None] << 16)
    place = torch.arange(-(-n_kv // KEYS) * 4), torch.arange(n_q)[:, None], where, torch.tensor(offset)
    words: torch.Tensor = kept_words(dropout_p, seed, place, _high)
    word, bit = bit_of(torch.arange(n_kv))
    return torch.ne(words[..., word] >> bit & 1, 0)
