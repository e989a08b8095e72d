"""Plans of varlen attentions: what the kernels of tile_list.py list, once a run of the graph for all layers alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.backends.triton.kernels.flash_attn.problem import Tiling
from graphrt.backends.triton.kernels.flash_attn.varlen.problem import VarlenProblem
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import RECORD, list_varlen_tiles, sum_varlen_units
from graphrt.backends.triton.launch import Launch

#: Query tiles that a program of list_varlen_tiles lists.
LISTED = 32


@dataclass(frozen=True, eq=False)
class VarlenPlan:
    """In device memory, int32; see tile_list.py: tiles [n_qt, RECORD], units [n_qt], unit_start [tiles + 2]."""

    tiles: torch.Tensor
    units: torch.Tensor
    unit_start: torch.Tensor


class VarlenPlans:
    """The plans of one program, by the tensors that tell lengths, what a query sees, and the tiling."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._plans: dict[tuple[object, ...], VarlenPlan] = {}

    def plan(self, p: VarlenProblem, t: Tiling, rounds_of: int = 0) -> tuple[VarlenPlan, list[Launch]]:
        """The plan of a problem, and the launches that make it if none before does. rounds_of: programs that take whole
        tiles in rounds before they share out the last ones, 0: they share out all."""
        key = (p.q_starts, p.kv, p.page > 0, p.n_q, p.n_kv, p.params.causal, p.params.window, p.params.max_bias > 0, t)
        key += (rounds_of,)
        if key in self._plans:
            return self._plans[key], []
        plan = self._plans[key] = VarlenPlan(
            self._zeros(t.n_qt, RECORD.value), self._zeros(t.n_qt), self._zeros(t.n_tiles + 2)
        )
        return plan, _launches(p, t, plan, rounds_of)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


def _launches(p: VarlenProblem, t: Tiling, plan: VarlenPlan, rounds_of: int) -> list[Launch]:
    args = {
        "p_q_starts": p.memory(p.q_starts, torch.int32), "p_kv": p.memory(p.kv, torch.int32), "p_tiles": plan.tiles,
        "p_units": plan.units, "n_seq": p.n_seq, "n_tokens": p.n_q, "most_keys": p.n_kv, "n_qt": t.n_qt,
        "window": p.params.window, "PAGED": p.page > 0, "PACK": t.pack, "BLOCK_M": t.block_m, "BLOCK_N": t.block_n,
        "CAUSAL": p.params.causal, "WINDOW": p.params.window > 0, "ALIBI": p.params.max_bias > 0,
        "CHUNK": min(1024, 1 << p.n_seq.bit_length()), "TILES": LISTED,
    }  # fmt: skip
    chunk = min(4096, 1 << (t.n_tiles - 1).bit_length())
    sums = {
        "p_units": plan.units, "p_unit_start": plan.unit_start, "n_tiles": t.n_tiles, "n_groups": t.n_groups,
        "rounds_of": rounds_of, "CHUNK": chunk,
    }  # fmt: skip
    return [Launch(list_varlen_tiles, (-(-t.n_qt // LISTED),), args), Launch(sum_varlen_units, (1,), sums)]
