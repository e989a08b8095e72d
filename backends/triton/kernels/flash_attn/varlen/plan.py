"""Plans of varlen attentions: what the kernels of tile_list.py list, once a run of the graph for all layers alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.backends.triton.kernels.flash_attn.problem import Tiling
from graphrt.backends.triton.kernels.flash_attn.varlen.prefix import no_prefix
from graphrt.backends.triton.kernels.flash_attn.varlen.problem import OWN, SHARED, VarlenProblem
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import RECORD, list_varlen_tiles, sum_varlen_units
from graphrt.backends.triton.launch import Launch

#: Query tiles that a program of list_varlen_tiles lists.
LISTED = 32
#: Rows that a program of no_prefix has.
ROWS = 1024


@dataclass(frozen=True, eq=False)
class VarlenPlan:
    """In device memory, int32; see tile_list.py: tiles [n_qt, RECORD], units [n_qt], unit_start [tiles + 3]."""

    tiles: torch.Tensor
    units: torch.Tensor
    unit_start: torch.Tensor


class VarlenPlans:
    """The plans of one program, by the tensors that tell lengths, what a query sees, and the tiling."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._plans: dict[tuple[object, ...], VarlenPlan] = {}
        self._prefix_lse: dict[tuple[object, ...], torch.Tensor] = {}
        self._cleared: set[int] = set()

    def plan(
        self, p: VarlenProblem, t: Tiling, programs: int = 0, rounds: bool = False, turn: int = 0, more: int = 0
    ) -> tuple[VarlenPlan, list[Launch]]:
        """The plan of a problem, and the launches that make it if none before does. programs: that share tiles, 0: each
        tile has its own; rounds, turn: see tile_list.py's sum_varlen_units; more: units of a tile beside those of
        its k-blocks."""
        key = (
            p.q_starts, p.kv, p.page, p.prefixes, p.part, p.n_q, p.n_kv, p.params.causal, p.params.window,
            p.params.max_bias > 0, t, p.gqa, programs, rounds, turn, more,
        )  # fmt: skip
        made = self._clear(p)
        if key in self._plans:
            return self._plans[key], made
        plan = self._plans[key] = VarlenPlan(
            self._zeros(t.n_qt, RECORD.value), self._zeros(t.n_qt), self._zeros(t.n_tiles + 3)
        )
        return plan, [*made, *_launches(p, t, plan, programs, rounds, turn, more)]

    def prefix_lse(self, p: VarlenProblem, n_rows: int) -> torch.Tensor:
        """f32 [n_rows] for the logs of denominators over shared keys, of all layers whose rows are in the same groups:
        rows that are in none hold -inf from the launch on that plan() gives."""
        key = (p.q_starts, p.prefixes, n_rows)
        if key not in self._prefix_lse:
            self._prefix_lse[key] = torch.zeros(n_rows, dtype=torch.float32, device=self.device)
        return self._prefix_lse[key]

    def _clear(self, p: VarlenProblem) -> list[Launch]:
        """The launch behind prefix_lse, once a run."""
        if p.part.keys != SHARED or p.lse is None:
            return []
        lse = p.memory(p.lse, torch.float32)
        if lse.data_ptr() in self._cleared:
            return []
        self._cleared.add(lse.data_ptr())
        n = lse.numel()
        return [Launch(no_prefix, (-(-n // ROWS),), {"p_lse": lse, "n_rows": n, "ROWS": ROWS})]

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


def _launches(
    p: VarlenProblem, t: Tiling, plan: VarlenPlan, programs: int, rounds: bool, turn: int, more: int
) -> list[Launch]:  # fmt: skip
    shares = p.part.keys in (SHARED, OWN) and p.prefixes is not None
    groups = p.prefixes if shares and p.prefixes is not None else p.q_starts  # for what is absent any memory will do
    args = {
        "p_q_starts": p.memory(p.q_starts, torch.int32), "p_kv": p.memory(p.kv, torch.int32),
        "p_prefixes": p.memory(groups, torch.int32), "p_tiles": plan.tiles,
        "p_units": plan.units, "n_seq": p.n_seq, "n_prefixes": groups.ne[1] if shares else 0, "n_tokens": p.n_q,
        "most_keys": p.n_kv, "n_qt": t.n_qt, "window": p.params.window, "gqa": p.gqa, "more": more,
        "least_rows": p.part.least_rows, "most_rows": p.part.most_rows, "PAGE": p.page, "PACK": t.pack,
        "BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "CAUSAL": p.params.causal, "WINDOW": p.params.window > 0,
        "ALIBI": p.params.max_bias > 0, "PREFIX": p.part.keys == SHARED, "SKIPS": p.part.keys == OWN,
        "CHUNK": min(1024, 1 << p.n_lists.bit_length()), "TILES": LISTED,
    }  # fmt: skip
    chunk = min(4096, 1 << (t.n_tiles - 1).bit_length())
    sums = {
        "p_units": plan.units, "p_unit_start": plan.unit_start, "n_tiles": t.n_tiles, "n_groups": t.n_groups,
        "programs": programs, "turn": turn, "more": more, "ROUNDS": rounds, "CHUNK": chunk,
    }  # fmt: skip
    return [Launch(list_varlen_tiles, (-(-t.n_qt // LISTED),), args), Launch(sum_varlen_units, (1,), sums)]
