"""Hopper's kernels of attention's gradients where scores are dear or a bias has a gradient too, for the launcher:
gradients of scores are made once and lie in memory."""

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
        if "k" not in self.of or not ("attn_bias" in self.of or ("q" in self.of and self._pays)):
            return (
                "it makes gradients of k together with an attn_bias's, or with q's where a soft cap, ALiBi or a bias "
                "makes scores dear; they are not wanted"
            )
        if (reason := super().serves()) is not None:
            return reason
        if self.p.d[0] not in STORED:
            return f"heads must be of {', '.join(map(str, STORED))}, they are of {self.p.d[0]}"
        if self.p.params.softcap and "attn_bias" in self.of:
            return "a soft cap's gradients of scores are not those of the bias"
        if (heads := self._heads_at_once) == 0 or ("attn_bias" in self.of and heads < self._n_heads):
            n = (self._n_heads if heads else 1) * self._head_bytes
            return f"gradients of scores may take {MOST_BYTES:,} bytes, here they would take {n:,}"
        return None

    @property
    def _pays(self) -> bool:
        """Whether it takes longer to make gradients of scores twice than to store and read them."""
        return self.p.params.softcap != 0.0 or self.dense

    @property
    def _n_heads(self) -> int:
        """KV heads of all sequences."""
        return self.p.n_seq * self.p.n_head // self.p.gqa

    @property
    def _head_bytes(self) -> int:
        """What gradients of scores of a KV head's heads take."""
        p = self.p
        return 2 * math.prod(room_for_scores(p.gqa, p.n_q, p.n_kv))

    @property
    def _heads_at_once(self) -> int:
        """Of so many KV heads gradients of scores lie in memory at a time, equally many where that can be."""
        at_most = MOST_BYTES // self._head_bytes
        return 0 if at_most == 0 else -(-self._n_heads // -(-self._n_heads // at_most))

    @property
    def tiles(self) -> str:
        c, queries = self.config, STORED[self.p.d[0]]
        return (
            f"{c.block_m} queries x {c.block_n} keys, which store gradients of scores, then {queries.block_m} x "
            f"{queries.block_n}, which read them; {N_WG} warpgroups multiply, a warp brings the rest by TMA"
        )

    def launches(self, shared: Shared) -> list[Step]:
        x, steps = self._given(shared)
        p, at_once = self.p, self._heads_at_once
        size = room_for_scores(at_once * p.gqa, p.n_q, p.n_kv)
        room, _ = shared.once(("scores", size, p.kind), lambda: (shared.empty(*size, kind=KINDS[p.kind]), []))
        plan = counts = columns = None
        if p.mask_t is not None:
            found, made = plans.columns(p, self.tiling, shared, self.dense)
            plan, _ = plans.mask_plan(p, self.tiling, shared, self.dense)
            counts, columns = found.counts, found.columns
            steps += made
        dq, dk, dv = map(self._result, "qkv")
        for first in range(0, self._n_heads, at_once):
            heads = range(first, min(first + at_once, self._n_heads))
            steps.append(keys_launch(x, counts, columns, dk, dv, room, heads))
            if dq is not None:
                steps.append(stored_launch(x, plan, dq, room, heads))
        if plan is not None and "attn_bias" in self.of:
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
