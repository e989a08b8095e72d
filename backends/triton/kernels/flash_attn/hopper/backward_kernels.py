"""Hopper's kernels of attention's gradients for the launcher: which problems each serves, and its launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn import dropout_launch, score_code
from graphrt.backends.triton.kernels.flash_attn.backward import plans
from graphrt.backends.triton.kernels.flash_attn.backward.kernel import BackKernel
from graphrt.backends.triton.kernels.flash_attn.backward.problem import BackProblem
from graphrt.backends.triton.kernels.flash_attn.backward.shared import Halves, Rows, Shared
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_launch import (
    Given,
    bias_launch,
    keys_launch,
    queries_launch,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_rows import WEIGHT_BITS, attention_back_lse
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_specs import (
    BIAS,
    KEYS,
    N_WG,
    PLAN_QUERIES,
    GradientConfig,
    config_of,
    crowded,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.launch import as_torch
from graphrt.backends.triton.kernels.flash_attn.problem import Tiling, with_bias_as_mask
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

#: Fewer queries or keys than this leave most of a tile empty.
MIN_ROWS = 48
#: Queries that a program of attention_back_lse takes.
LSE_ROWS = 128


class HopperGradient(BackKernel):
    """What both have. own: what its programs own, for config_of()."""

    forms = ("split",)
    own: ClassVar[str]

    def __init__(self, p: BackProblem, of: Sequence[str], target: Target) -> None:
        super().__init__(with_bias_as_mask(p), of, target)

    def serves(self) -> str | None:
        p, (d_k, d_v) = self.p, self.p.d
        v = p.v_t
        assert v is not None
        if p.is_packed:
            return "it takes no packed sequences"
        if p.bias_t is not None:
            beside = "one beside a mask" if p.mask_t is not None else f"one of {p.bias_t.dtype.name}"
            return f"it adds an attn_bias of f16 where there is no mask, here it is {beside}"
        if (reason := dropout_launch.too_many(p) or score_code.why_not(p.params)) is not None:
            return reason
        if p.k_t.dtype is not v.dtype or p.kind not in ("f16", "bf16"):
            return f"K and V must both be f16 or both bf16, they are {p.k_t.dtype.name} and {v.dtype.name}"
        if d_k != d_v or d_k not in KEYS:
            return f"heads must be of {', '.join(map(str, KEYS))}, they are of {d_k} and {d_v}"
        if min(p.n_q, p.n_kv) < MIN_ROWS:
            return f"it takes {MIN_ROWS} queries and keys or more, here {p.n_q} and {p.n_kv}"
        if p.params.scale <= 0:
            return f"the scale must be positive, it is {p.params.scale:g}"
        return "addresses and strides of K and V must be whole 16 bytes" if self._unaligned(p.k_t, v) else None

    def _unaligned(self, *sources: Tensor) -> bool:
        """TMA takes addresses and strides of whole 16 bytes."""
        return any(n % 16 for t in sources for n in (*t.nb[1:], self.p.place(t)[1]))

    @cached_property
    def config(self) -> GradientConfig:
        return config_of(self.own, self.p.d[0], crowded(self.own, self.p.params.softcap, self.p.dropout_p))

    @cached_property
    def tiling(self) -> Tiling:
        """Of a mask's plan."""
        return Tiling.of(self.p, PLAN_QUERIES, self.config.block_n, 1)

    def _given(self, shared: Shared) -> tuple[Given, list[Step]]:
        """What both are given, and the launches that make it."""
        p = self.p
        rows, steps = shared.rows(p)
        halves, made = shared.halves(p)
        lse, last = self._lse(rows, shared)
        slopes = mask = None
        if p.mask_t is not None:
            mask = as_torch(p.mask_t, p.memory(p.mask_t, torch.float16))
            if p.params.max_bias > 0:
                slopes = torch.tensor(alibi_slopes(p.n_head, p.params.max_bias), device=self.target.device)
        assert p.v_t is not None
        k, v = as_torch(p.k_t, p.k.data), as_torch(p.v_t, p.v.data)
        q, d_out = self._half(halves)
        kept, drawn = None, list[Step]()
        if p.dropout_p > 0.0:
            by_query, by_key, drawn = shared.kept.of(p, self.target, True)
            assert by_key is not None
            kept = by_key, by_query
        x = Given(
            q, d_out, k, v, lse, rows.scales, mask, slopes, float(p.params.scale), float(p.params.softcap), kept,
            1.0 / (1.0 - p.dropout_p),
        )  # fmt: skip
        return x, [*steps, *made, *last, *drawn]

    def _half(self, halves: Halves) -> tuple[torch.Tensor, torch.Tensor]:
        """Q and d_out as tensors of torch's."""
        shape = (self.p.n_seq, self.p.n_head, self.p.n_q, self.p.d[0])
        return halves.q.view(shape), halves.d_out.view(shape)

    def _lse(self, rows: Rows, shared: Shared) -> tuple[torch.Tensor, list[Step]]:
        """See backward_rows.py."""
        p, target = self.p, self.target
        programs = -(-p.n_q // LSE_ROWS)

        def make() -> tuple[torch.Tensor, list[Step]]:
            made = shared.empty(p.n_seq, p.n_head, 2, -(-p.n_q // PLAN_QUERIES) * PLAN_QUERIES)
            args = {
                "p_lse": p.f32(p.lse_t), "p_delta": rows.delta, "p_scales": rows.scales, "p_rows": made, "n_q": p.n_q,
                "n_head": p.n_head, **dict(zip(("ol_h", "ol_t", "ol_s"), p.strides(p.lse_t))),
                "BITS": WEIGHT_BITS if p.kind == "f16" else 0, "ROWS": LSE_ROWS, "PADDED": PLAN_QUERIES,
                "PDL": target.has_pdl,
            }  # fmt: skip
            return made, [Launch(attention_back_lse, (programs, p.n_head, p.n_seq), args, launch_options(target, 4))]

        return shared.once(("lse", p.lse_t, p.d_out_t, p.out_t, p.d_lse_t, p.v_t, p.kind), make)

    def _result(self, of: str) -> torch.Tensor | None:
        """A gradient's memory in torch's shape, None for one that nobody wants."""
        if of not in self.of:
            return None
        node = self.p.of[of]
        return as_torch(node, self.p.f32(node))


class HopperKeys(HopperGradient):
    """backward_keys.py and backward_wide.py."""

    name, makes = "hopper_keys", ("k", "v")
    file = "hopper/backward_keys.py"
    own = "keys"

    @property
    def tiles(self) -> str:
        c = self.config
        who = "one adds up of V, one of K" if c.wide else f"{c.block_n // N_WG} keys each"
        tile = f"{c.block_m} queries x {c.block_n} keys"
        return f"{tile}, {N_WG} warpgroups multiply ({who}), a warp brings Q and d_out by TMA"

    def launches(self, shared: Shared) -> list[Step]:
        x, steps = self._given(shared)
        counts = blocks = None
        if self.p.mask_t is not None:
            found, made = plans.columns(self.p, self.tiling, shared)
            counts, blocks = found.counts, found.columns
            steps += made
        return [*steps, keys_launch(x, counts, blocks, self._result("k"), self._result("v"))]


class HopperQueries(HopperGradient):
    """backward_queries.py."""

    name, makes = "hopper_queries", ("q",)
    file = "hopper/backward_queries.py"
    own = "queries"

    @property
    def tiles(self) -> str:
        c = self.config
        return f"{c.block_m} queries x {c.block_n} keys, {N_WG} warpgroups multiply, a warp brings K and V by TMA"

    def launches(self, shared: Shared) -> list[Step]:
        x, steps = self._given(shared)
        counts = blocks = seen = None
        if self.p.mask_t is not None:
            plan, made = plans.mask_plan(self.p, self.tiling, shared)
            counts, blocks, seen = plan.counts, plan.blocks, plan.seen
            steps += made
        dq = self._result("q")
        assert dq is not None
        return [*steps, queries_launch(x, counts, blocks, seen, dq)]


class HopperBias(HopperGradient):
    """backward_bias.py."""

    name, makes = "hopper_bias", ("attn_bias",)
    file = "hopper/backward_bias.py"
    own = "bias"

    def serves(self) -> str | None:
        reason = super().serves()
        if reason is None and self.p.d[0] not in BIAS:
            reason = f"heads must be of {', '.join(map(str, BIAS))}, they are of {self.p.d[0]}"
        return reason

    @property
    def tiles(self) -> str:
        c = self.config
        return f"{c.block_m} queries x {c.block_n} keys, {N_WG} warpgroups multiply, a warp brings all by TMA"

    def launches(self, shared: Shared) -> list[Step]:
        x, steps = self._given(shared)
        d_bias = self._result("attn_bias")
        assert d_bias is not None
        return [*steps, bias_launch(x, d_bias)]
