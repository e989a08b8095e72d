"""Plans of masks: what the kernels of mask.py find, once a run of the graph for all layers that share a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.backends.triton.kernels.flash_attn.mask import classify_blocks, list_blocks, sum_units
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling
from graphrt.backends.triton.launch import Launch
from graphrt.tensor import Tensor


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """A plan in device memory, int32; see mask.py.

    counts [mask tiles, 2], blocks [mask tiles, n_blocks], seen [mask tiles, n_blocks, block_n / 32], unit_start
    [tiles + 1], runs [mask tiles, 2]; kinds [mask tiles, n_blocks], of which the lists were made.
    """

    counts: torch.Tensor
    blocks: torch.Tensor
    seen: torch.Tensor
    unit_start: torch.Tensor
    runs: torch.Tensor
    kinds: torch.Tensor | None = None


class MaskPlans:
    """The plans of one program, by mask and tiling."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._plans: dict[tuple[Tensor, Tiling, bool], MaskPlan] = {}
        self._summed: set[tuple[Tensor, Tiling, bool]] = set()

    def plan(self, p: Problem, tiling: Tiling, needs_sums: bool, dense: bool = False) -> tuple[MaskPlan, list[Launch]]:
        """The plan of a problem's mask, and the launches that make it if none before does. needs_sums: unit_start;
        dense: full blocks hide nothing, but may add something."""
        assert p.mask_t is not None
        key = (p.mask_t, tiling, dense)
        launches: list[Launch] = []
        if key not in self._plans:
            self._plans[key] = self._empty(tiling)
            launches += _classify(p, tiling, self._plans[key], dense)
        if needs_sums and key not in self._summed:
            self._summed.add(key)
            launches.append(_sum(p, tiling, self._plans[key]))
        return self._plans[key], launches

    def _empty(self, t: Tiling) -> MaskPlan:
        zeros = self._zeros
        return MaskPlan(
            zeros(t.n_mask_tiles, 2), zeros(t.n_mask_tiles, t.n_blocks),
            zeros(t.n_mask_tiles, t.n_blocks, t.block_n // 32), zeros(t.n_tiles + 1),
            zeros(t.n_mask_tiles, 2), zeros(t.n_mask_tiles, t.n_blocks),
        )  # fmt: skip

    def _zeros(self, *shape: int) -> torch.Tensor:
        # Zeros, because kernels may read (not use) entries past a list's end.
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


def _classify(p: Problem, t: Tiling, plan: MaskPlan, dense: bool) -> list[Launch]:
    mask = p.mask_t
    assert mask is not None
    per_head = p.m2 > 1
    most = t.block_m if per_head else min(p.n_q, (t.block_m - 1) // t.pack + 1 + (t.block_m % t.pack > 0))
    at = (*mask.nb[1:], p.place(mask)[1])
    unit = next(n for n in (8, 2, 1) if p.n_kv % n == 0 and all(x % (2 * n) == 0 for x in at))
    # A program is one warp (all rows of a column are a thread's own) that has 16 KB of the mask in flight, 64 or 128
    # registers a thread; with few rows it has fewer, so that there are enough programs.
    rows = min(32 if unit > 1 else 8, 1 << (most - 1).bit_length())
    columns = min(1024, 8192 // (rows if unit > 1 else 4 * rows))
    chunk = max(1, min(1 << (t.n_blocks - 1).bit_length(), columns // t.block_n))
    args = {
        "p_mask": p.memory(mask, torch.int16 if unit == 1 else torch.int32), "p_class": plan.kinds, "p_seen": plan.seen,
        **dict(zip(("sm_t", "sm_h", "sm_s"), (n // (2 * unit) for n in mask.nb[1:]))), "n_q": p.n_q, "n_kv": p.n_kv,
        "m2": p.m2, "heads_packed": t.pack, "mask_groups": t.mask_groups, "n_qt": t.n_qt, "n_blocks": t.n_blocks,
        "PER_HEAD": per_head, "BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "ROWS": rows, "CHUNK": chunk, "UNIT": unit,
        "DENSE": dense,
    }  # fmt: skip
    step = min(1024, 1 << (t.n_blocks - 1).bit_length())
    lists = {
        "p_class": plan.kinds, "p_counts": plan.counts, "p_blocks": plan.blocks, "p_runs": plan.runs,
        "n_blocks": t.n_blocks, "CHUNK": step,
    }  # fmt: skip
    return [
        Launch(classify_blocks, (t.n_mask_tiles, -(-t.n_blocks // chunk)), args, {"num_warps": 1}),
        Launch(list_blocks, (t.n_mask_tiles,), lists),
    ]


def _sum(p: Problem, t: Tiling, plan: MaskPlan) -> Launch:
    args = {
        "p_counts": plan.counts, "p_unit_start": plan.unit_start, "n_tiles": t.n_tiles, "n_qt": t.n_qt,
        "n_groups": t.n_groups, "mask_groups": t.mask_groups, "m3": p.m3, "CHUNK": 1024,
    }  # fmt: skip
    return Launch(sum_units, (1,), args)
