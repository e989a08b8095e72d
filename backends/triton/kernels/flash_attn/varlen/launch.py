"""The portable varlen kernel (attend.py) for the launcher, and what all varlen kernels are to it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn import chooser, portable
from graphrt.backends.triton.kernels.flash_attn.chooser import Choice
from graphrt.backends.triton.kernels.flash_attn.configs import Config
from graphrt.backends.triton.kernels.flash_attn.kernel import AttentionKernel, Scratch, warps_text
from graphrt.backends.triton.kernels.flash_attn.problem import Tiling
from graphrt.backends.triton.kernels.flash_attn.score_code import function_of, numbers_of
from graphrt.backends.triton.kernels.flash_attn.varlen.attend import flash_attn_varlen
from graphrt.backends.triton.kernels.flash_attn.varlen.plan import VarlenPlan
from graphrt.backends.triton.kernels.flash_attn.varlen.problem import VarlenProblem
from graphrt.ops.soft_max import alibi_slopes


class VarlenKernel(AttentionKernel[VarlenProblem, VarlenPlan]):
    """A kernel over the device's list of tiles (tile_list.py).

    few_rows: the most query rows of a KV head of a sequence that it is for, 0: any number; rounds: its programs take
    the first tiles whole; turn: the k-blocks that a program could visit in the time in which it goes on from one tile
    to the next, with what its neighbours lose; more: as many as a listed tile counts for that.
    """

    few_rows: ClassVar[int] = 0
    rounds: ClassVar[bool] = False
    turn: ClassVar[int] = 2
    more: ClassVar[int] = 0

    @property
    def sharing(self) -> int:
        """Programs that share listed tiles, 0: each tile has its own."""
        return self.choice.programs if self.choice.schedule == "stream_k" else 0

    @property
    def too_many_units(self) -> str | None:
        """Why a kernel that reckons in 32 bits does not serve, None if it does."""
        most = replace(self.tiling, n_blocks=self.tiling.n_blocks + self.more)
        return None if portable.units_fit(most, self.choice.programs) else "programs times units pass 2^31"

    @cached_property
    def tiling(self) -> Tiling:
        return self.p.tiling(self.config.block_m, self.config.block_n)

    def _choose(self, force: str | None) -> Choice:
        p, t = self.p, self.tiling
        problem = chooser.Problem(
            t.n_qt * t.block_m, p.n_kv, t.n_groups, p.n_head // p.gqa, 1, p.k.d, p.v.d, True, t.block_m, t.block_n,
            d_v_stored=sum(p.v.parts), ragged=True,
        )  # fmt: skip
        return chooser.choose(problem, chooser.Device(self.target.sm_count, self.per_sm), force)


class VarlenForward(VarlenKernel):
    """varlen/attend.py. config: given, or None for the one of configs.py's table."""

    name = kernel = "varlen"
    file = "varlen/attend.py"

    def __init__(
        self, p: VarlenProblem, target: Target, force: str | None = None, config: Config | None = None
    ) -> None:
        super().__init__(p, target, force)
        self.given = config

    def serves(self) -> str | None:
        return None

    @cached_property
    def config(self) -> Config:
        found = self.given or portable.config_for(self.p, self.p.mean_queries * self.p.gqa, self.target)
        # The places of a mask's values take the registers that 4 warps have left of large tiles.
        more = self.p.explicit_t is not None and self.given is None and found.block_m > 16 and self.target.is_nvidia
        return replace(found, warps=max(found.warps, 8)) if more else found

    @property
    def per_sm(self) -> int:
        return self.config.per_sm

    def _choose(self, force: str | None) -> Choice:
        """Packed sequences that attend to themselves have the more tiles the longer they are: where there are many,
        none is much of the work, and a multiprocessor holds more programs than the chooser reckons with."""
        at_once, tiles = self.target.sm_count * self.per_sm, self.tiling.n_tiles
        if force is not None or self.p.kv is not self.p.q_starts or tiles < chooser.MANY_WAVES * at_once:
            return super()._choose(force)
        why = (
            f"up to {tiles} tiles of sequences that attend to themselves: a program each, the longest is little of all",
        )
        return replace(super()._choose("tile"), reasons=why)

    def launches(self, plan: VarlenPlan | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        assert plan is not None
        part = scratch.part(self.choice.scratch_bytes)
        args = main_arguments(self.p, self.tiling, self.config, self.choice, plan, part, self.target)
        main = portable.main_launch(args, self.config, self.target, flash_attn_varlen)
        return [main, portable.fixup_launch(args, self.tiling, self.p, self.target)] if self.shares_out else [main]

    @property
    def workers(self) -> str:
        return warps_text(self.config.warps)

    @property
    def stages(self) -> int:
        return portable.stages_of(self.p, self.config)


def main_arguments(
    p: VarlenProblem, t: Tiling, config: Config, choice: Choice, plan: VarlenPlan, part: torch.Tensor, target: Target
) -> dict[str, Any]:
    """The arguments of attend.py's flash_attn_varlen and of the fixup, by name. part: of choice.scratch_bytes."""
    k, v, params, table, mask = p.k, p.v, p.params, p.table_t, p.explicit_t
    none = torch.zeros(1, dtype=torch.int32, device=target.device)  # for what is absent: nothing reads it
    absent = none.view(torch.float32)
    return {
        "p_q": p.memory(p.q_t, torch.float32), "p_k": k.data, "p_v": v.data,
        "p_mask": p.memory(mask, torch.float16) if mask is not None else absent.view(torch.float16),
        "p_sinks": p.memory(p.sinks_t, torch.float32) if p.sinks_t is not None else absent,
        "p_slopes": torch.tensor(alibi_slopes(p.n_head, params.max_bias), device=target.device),
        "p_score": numbers_of(params, target.device), "SCORE": function_of(params),
        "p_out": p.memory(p.out, torch.float32) if p.out is not None else absent,
        "p_lse": p.memory(p.lse, torch.float32) if p.lse is not None else absent,
        "p_tiles": plan.tiles, "p_unit_start": plan.unit_start, "p_counts": plan.units, "p_part": part,
        "p_table": p.memory(table, torch.int32) if table is not None else none,
        **dict(zip(("sq_t", "sq_h"), (n // 4 for n in p.q_t.nb[1:3]))),
        **dict(zip(("sk_n", "sk_h", "sk_p"), k.strides)), **dict(zip(("sv_n", "sv_h", "sv_p"), v.strides)),
        **dict(zip(("sm_t", "sm_h"), (n // 2 for n in mask.nb[1:3]) if mask is not None else (0, 0))),
        "m2": mask.ne[2] if mask is not None else 1, "n_columns": mask.ne[0] if mask is not None else 0,
        "MASK": ("new" if params.mask_new else "keys") if mask is not None else "",
        "s_table": table.nb[1] // 4 if table is not None else 0, "max_blocks": table.ne[0] if table is not None else 1,
        "n_q": p.n_q, "n_head": p.n_head, "gqa": p.gqa, "n_groups": t.n_groups, "n_qt": t.n_qt, "n_blocks": t.n_blocks,
        "n_tiles": t.n_tiles, "n_seq": p.n_seq, "n_pages": p.k_t.ne[3], "window": params.window,
        "programs": choice.programs, "splits": 0 if choice.schedule == "stream_k" else choice.splits,
        **portable.scaling(params), "softcap": params.softcap, "has_sinks": int(p.sinks_t is not None),
        "has_lse": int(p.lse is not None), "PAGE": p.page, "CAUSAL": params.causal, "WINDOW": params.window > 0,
        "ALIBI": params.max_bias > 0, "HAS_MASK": True, "UNIFORM": False, "VARLEN": True,
        **portable.constants(p, t, config, choice, target),
    }  # fmt: skip
