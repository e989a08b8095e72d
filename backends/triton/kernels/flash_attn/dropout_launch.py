"""Memory and launches of dropout's bits (dropout_bits.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.dropout import dropout_arguments
from graphrt.backends.triton.kernels.flash_attn.dropout_bits import TILE, attention_dropout_bits
from graphrt.backends.triton.kernels.flash_attn.problem import Problem
from graphrt.backends.triton.launch import Launch, launch_options

#: Bytes that the bits of an attention may take in one order.
MOST_BYTES = 2**30
_WORDS = TILE * TILE // 32


def _tiles(p: Problem) -> tuple[int, int, int]:
    """Tiles of keys and of queries, and heads of all sequences."""
    return triton.cdiv(p.n_kv, TILE), triton.cdiv(p.n_q, TILE), p.n_head * p.n_seq


def too_many(p: Problem) -> str | None:
    """A sentence where the bits of a problem's dropout would take too much memory."""
    n = 4 * _WORDS * math.prod(_tiles(p))
    if p.dropout_p == 0.0 or n <= MOST_BYTES:
        return None
    return f"dropout's bits may take {MOST_BYTES:,} bytes, here they would take {n:,}"


class KeptBits:
    """The bits of a program's attentions. Those of one size lie in the same memory, one after the other: who finds
    another's there has its own drawn again."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], torch.Tensor] = {}
        self._whose: dict[tuple[Any, ...], Any] = {}

    def of(self, p: Problem, target: Target, both: bool) -> tuple[torch.Tensor, torch.Tensor | None, list[Step]]:
        """(bits by query, by key, the launch that draws them, unless they are there). both: by key too, else None."""
        tiles = _tiles(p)
        by_query = self._empty(tiles, False, target)
        by_key = self._empty(tiles, True, target) if both else None
        numbers = dropout_arguments(p.params)
        del numbers["inverse"]
        whose = (*numbers.values(), p.n_head, both)
        if self._whose.get(tiles) == whose:
            return by_query, by_key, []
        self._whose[tiles] = whose
        args = {
            "p_by_query": by_query, "p_by_key": by_key if by_key is not None else by_query, "n_head": p.n_head,
            **numbers, "BY_KEY": both, "PDL": target.has_pdl,
        }  # fmt: skip
        return by_query, by_key, [Launch(attention_dropout_bits, tiles, args, launch_options(target, 4))]

    def _empty(self, tiles: tuple[int, int, int], by_key: bool, target: Target) -> torch.Tensor:
        n = math.prod(tiles) * _WORDS
        key = (*tiles, by_key)
        if key not in self._memory:
            self._memory[key] = torch.empty(n, dtype=torch.int32, device=target.device)
        return self._memory[key]
