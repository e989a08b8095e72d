"""Memory and launches of dropout's bits (dropout_bits.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.dropout import dropout_arguments, dropout_calls
from graphrt.backends.triton.kernels.flash_attn.dropout_bits import TILE, TILES, WORDS, attention_dropout_bits
from graphrt.backends.triton.kernels.flash_attn.problem import Problem
from graphrt.backends.triton.launch import Launch, launch_options

#: Bytes that the bits of an attention may take in one order.
MOST_BYTES = 2**30


def _tiles(p: Problem) -> tuple[int, int, int]:
    """Tiles of keys and of queries, and heads of all sequences."""
    return triton.cdiv(p.n_kv, TILE), triton.cdiv(p.n_q, TILE), p.n_head * p.n_seq


def too_many(p: Problem) -> str | None:
    """A sentence where the bits of a problem's dropout would take too much memory."""
    n = 4 * WORDS * math.prod(_tiles(p))
    if p.dropout_p == 0.0 or n <= MOST_BYTES:
        return None
    return f"dropout's bits may take {MOST_BYTES:,} bytes, here they would take {n:,}"


class KeptBits:
    """The bits of a program's attentions. Those of one size lie in the same memory, one after the other: who finds
    another's there has its own drawn again. Who wants them by key too has them added to the launch that drew them."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], torch.Tensor] = {}
        self._drawn: dict[tuple[Any, ...], tuple[Any, Launch]] = {}

    def of(self, p: Problem, target: Target, both: bool) -> tuple[torch.Tensor, torch.Tensor | None, list[Step]]:
        """(bits by query, by key, the launch that draws them, unless they are there). both: by key too, else None."""
        tiles = _tiles(p)
        by_query = self._empty(tiles, False, target)
        by_key = self._empty(tiles, True, target) if both else None
        numbers = dropout_arguments(p.params)
        del numbers["inverse"]
        whose = (*numbers.values(), p.n_head)
        same, launch = self._drawn.get(tiles, (None, None))
        if launch is not None and same == whose:
            if both:
                launch.args |= {"p_by_key": by_key, "BY_KEY": True}
            return by_query, by_key, []
        n_kb, n_qb, n_heads = tiles
        args = {
            "p_by_query": by_query, "p_by_key": by_key if by_key is not None else by_query, "n_tiles": math.prod(tiles),
            "n_kb": n_kb, "n_qb": n_qb, "n_head": p.n_head, **numbers, "CALLS": dropout_calls(p.params), "BY_KEY": both,
            "PDL": target.has_pdl,
        }  # fmt: skip
        grid = (triton.cdiv(math.prod(tiles), TILES),)
        launch = Launch(attention_dropout_bits, grid, args, launch_options(target, 4))
        self._drawn[tiles] = whose, launch
        return by_query, by_key, [launch]

    def _empty(self, tiles: tuple[int, int, int], by_key: bool, target: Target) -> torch.Tensor:
        n = math.prod(tiles) * WORDS
        key = (*tiles, by_key)
        if key not in self._memory:
            self._memory[key] = torch.empty(n, dtype=torch.int32, device=target.device)
        return self._memory[key]
