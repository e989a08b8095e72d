"""Which tiles there are and which see each other, on the device: of a mask, and of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.kernels.flash_attn.backward.lists import list_seeing_tiles, rank_blocks
from graphrt.backends.triton.kernels.flash_attn.backward.problem import BackProblem
from graphrt.backends.triton.kernels.flash_attn.backward.shared import Shared
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan, MaskPlans
from graphrt.backends.triton.kernels.flash_attn.problem import Tiling
from graphrt.backends.triton.kernels.flash_attn.varlen.plan import LISTED
from graphrt.backends.triton.kernels.flash_attn.varlen.problem import MOST
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import RECORD, list_varlen_tiles
from graphrt.backends.triton.launch import Launch


@dataclass(frozen=True, eq=False)
class Columns:
    """Of tiles of keys, see lists.py: counts [masks, n_blocks, 2], columns [masks, n_blocks, n_qt], int32."""

    counts: torch.Tensor
    columns: torch.Tensor


def mask_plan(p: BackProblem, t: Tiling, shared: Shared, dense: bool = False) -> tuple[MaskPlan, list[Step]]:
    """Which k-blocks each tile of queries sees. t: with one head a tile; dense: see MaskPlans.plan()."""
    masks = shared.once(("masks",), lambda: (MaskPlans(shared.target.device), []))[0]
    plan, launches = masks.plan(p, t, False, dense)
    return plan, list(launches)


def columns(p: BackProblem, t: Tiling, shared: Shared, dense: bool = False) -> tuple[Columns, list[Step]]:
    """Which tiles of queries see each k-block. dense: see MaskPlans.plan()."""
    plan, steps = mask_plan(p, t, shared, dense)
    masks = t.n_mask_tiles // t.n_qt

    def make() -> tuple[Columns, list[Step]]:
        made = Columns(_zeros(shared, masks, t.n_blocks, 2), _zeros(shared, masks, t.n_blocks, t.n_qt))
        args = {
            "p_class": plan.kinds, "p_counts": made.counts, "p_columns": made.columns, "n_qt": t.n_qt,
            "n_blocks": t.n_blocks, "CHUNK": min(1024, triton.next_power_of_2(t.n_qt)),
        }  # fmt: skip
        return made, [Launch(list_seeing_tiles, (t.n_blocks, masks), args)]

    found, made = shared.once(("columns", p.mask_t, t, dense), make)
    return found, steps + made


def ranks(p: BackProblem, t: Tiling, shared: Shared) -> tuple[torch.Tensor, list[Step]]:
    """int32 [mask tiles, n_blocks]: how many k-blocks before it a tile of queries sees."""
    plan, steps = mask_plan(p, t, shared)

    def make() -> tuple[torch.Tensor, list[Step]]:
        made = _zeros(shared, t.n_mask_tiles, t.n_blocks)
        args = {
            "p_class": plan.kinds, "p_ranks": made, "n_blocks": t.n_blocks,
            "CHUNK": min(1024, triton.next_power_of_2(t.n_blocks)),
        }  # fmt: skip
        return made, [Launch(rank_blocks, (t.n_mask_tiles,), args)]

    found, made = shared.once(("ranks", p.mask_t, t), make)
    return found, steps + made


def packed_tiles(p: BackProblem, block: int, of_keys: bool, shared: Shared) -> tuple[torch.Tensor, list[Step]]:
    """Tiles of `block` queries, or keys, of packed sequences: int32 [as many as there may be, RECORD], tile_list.py's
    records, those of keys with queries and keys the other way round."""
    assert p.q_starts is not None and p.k_starts is not None
    own, other = (p.k_starts, p.q_starts) if of_keys else (p.q_starts, p.k_starts)
    n_own, n_other = (p.n_kv, p.n_q) if of_keys else (p.n_q, p.n_kv)
    n_tiles = min(n_own, n_own // block + p.n_seq + 1)

    def make() -> tuple[torch.Tensor, list[Step]]:
        made = _zeros(shared, n_tiles, RECORD.value)
        args = {
            "p_q_starts": p.memory(own, torch.int32), "p_kv": p.memory(other, torch.int32),
            "p_prefixes": p.memory(own, torch.int32), "p_tiles": made, "p_units": _zeros(shared, n_tiles),
            "n_seq": p.n_seq, "n_prefixes": 0, "n_tokens": n_own, "most_keys": n_other, "n_qt": n_tiles, "window": 0,
            "gqa": 1, "more": 0, "least_rows": 0, "most_rows": MOST, "PAGE": 0, "PACK": 1, "BLOCK_M": block,
            "BLOCK_N": 32, "CAUSAL": False, "WINDOW": False, "ALIBI": False, "PREFIX": False, "SKIPS": False,
            "CHUNK": min(1024, 1 << p.n_seq.bit_length()), "TILES": LISTED,
        }  # fmt: skip
        return made, [Launch(list_varlen_tiles, (triton.cdiv(n_tiles, LISTED),), args)]

    return shared.once(("tiles", own, other, block, of_keys), make)


def _zeros(shared: Shared, *shape: int) -> torch.Tensor:
    # Zeros, because kernels may read (not use) entries past a list's end.
    return torch.zeros(shape, dtype=torch.int32, device=shared.target.device)
