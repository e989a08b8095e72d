"""Hopper's kernels of attention's gradients where a bias has one too, for the launcher: gradients of scores are made
once and lie in memory."""

from __future__ import annotations

import math

import torch
import triton

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.kernels.flash_attn.backward import plans
from graphrt.backends.triton.kernels.flash_attn.backward.problem import KINDS
from graphrt.backends.triton.kernels.flash_attn.backward.shared import Shared
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_bias_sum import attention_back_bias_sum
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_kernels import HopperGradient
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_launch import (
    keys_launch,
    room_for_scores,
    stored_launch,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_specs import N_WG, PLAN_QUERIES, STORED
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.launch import Launch, launch_options

#: Bytes that gradients of scores may take; attentions of one size have them in the same memory in turn.
MOST_BYTES = 2**30
#: Queries and keys that a program of attention_back_bias_sum takes.
QUERIES, KEYS = PLAN_QUERIES, 32


class HopperStored(HopperGradient):
    """backward_keys.py, which stores dS, backward_stored.py and backward_bias_sum.py, which read it."""

    name, makes = "hopper_stored", ("q", "k", "v", "attn_bias")
    file = "hopper/backward_stored.py"
    own = "keys"

    def serves(self) -> str | None:
        from graphrt.backends.triton.kernels.flash_attn.hopper import backward_specs
        worth = ("stored" in backward_specs.TRY and (self.p.params.softcap or self.dense)) or "allstored" in backward_specs.TRY
        if worth and {"q", "k"} <= {*self.of}:
            pass
        elif not {"k", "attn_bias"} <= {*self.of}:
            return "it makes the gradients of k and of an attn_bias together, they are not both wanted"
        if (reason := super().serves()) is not None:
            return reason
        if self.p.d[0] not in STORED:
            return f"heads must be of {', '.join(map(str, STORED))}, they are of {self.p.d[0]}"
        if self.p.params.softcap and "attn_bias" in self.of:
            return "a soft cap's gradients of scores are not those of the bias"
        n = 2 * math.prod(self._room)
        if n > MOST_BYTES:
            return f"gradients of scores may take {MOST_BYTES:,} bytes, here they would take {n:,}"
        return None

    @property
    def _room(self) -> tuple[int, int, int, int]:
        return room_for_scores(self.p.n_seq, self.p.n_head, self.p.n_q, self.p.n_kv)

    @property
    def tiles(self) -> str:
        c, queries = self.config, STORED[self.p.d[0]]
        return (
            f"{c.block_m} queries x {c.block_n} keys, which store gradients of scores, then {queries.block_m} x "
            f"{queries.block_n}, which read them; {N_WG} warpgroups multiply, a warp brings the rest by TMA"
        )

    def launches(self, shared: Shared) -> list[Step]:
        p = self.p
        x, steps = self._given(shared)
        room, _ = shared.once(
            ("scores", self._room, p.kind), lambda: (shared.empty(*self._room, kind=KINDS[p.kind]), [])
        )
        counts = columns = None
        if p.mask_t is not None:
            found, made = plans.columns(p, self.tiling, shared, self.dense)
            plan, _ = plans.mask_plan(p, self.tiling, shared, self.dense)
            counts, columns = found.counts, found.columns
            steps += made
        else:
            plan = None
        steps.append(keys_launch(x, counts, columns, self._result("k"), self._result("v"), room))
        if (dq := self._result("q")) is not None:
            of = (plan.counts, plan.blocks, plan.seen) if plan is not None else (None,) * 3
            steps.append(stored_launch(x, *of, dq, room))
        if "attn_bias" in self.of:
            steps.append(self._sum(room, plan, x.scales))
        return steps

    def _sum(self, room: torch.Tensor, plan: MaskPlan, scales: torch.Tensor) -> Launch:
        p, d_bias, t = self.p, self._result("attn_bias"), self.tiling
        assert d_bias is not None and plan.kinds is not None
        args = {
            "p_scores": room, "p_kinds": plan.kinds, "p_scales": scales, "p_result": d_bias, "n_q": p.n_q,
            "n_kv": p.n_kv, "n_head": p.n_head, "n_seq": p.n_seq, "b2": p.m2, "b3": p.m3,
            "kind_groups": t.mask_groups, "n_qt": t.n_qt, "n_blocks": t.n_blocks,
            "QUERIES": QUERIES, "KEYS": KEYS, "TILE": t.block_m, "BLOCK": t.block_n, "PDL": self.target.has_pdl,
        }  # fmt: skip
        grid = (triton.cdiv(p.n_q, QUERIES), triton.cdiv(p.n_kv, KEYS), p.m2 * p.m3)
        return Launch(attention_back_bias_sum, grid, args, launch_options(self.target, 4))
