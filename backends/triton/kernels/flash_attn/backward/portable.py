"""The portable kernels of attention's gradients (queries.py, keys.py, bias.py, deltas.py's sinks): their launches."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import triton.language as tl

from graphrt.backends.triton.accesses import Call, Step
from graphrt.backends.triton.device import interpreting
from graphrt.backends.triton.kernels.flash_attn.backward import plans
from graphrt.backends.triton.kernels.flash_attn.backward.bias import attention_back_bias
from graphrt.backends.triton.kernels.flash_attn.backward.configs import (
    FUSED_K,
    FUSED_Q,
    KEYS,
    QUERIES,
    BackConfig,
    back_config,
)
from graphrt.backends.triton.kernels.flash_attn.backward.deltas import attention_back_sinks
from graphrt.backends.triton.kernels.flash_attn.backward.kernel import BackKernel
from graphrt.backends.triton.kernels.flash_attn.backward.keys import attention_back_keys
from graphrt.backends.triton.kernels.flash_attn.backward.pieces import BackSpec, Given, Steps
from graphrt.backends.triton.kernels.flash_attn.backward.problem import KINDS, BackProblem
from graphrt.backends.triton.kernels.flash_attn.backward.queries import attention_back_queries
from graphrt.backends.triton.kernels.flash_attn.backward.shared import Shared
from graphrt.backends.triton.kernels.flash_attn.dropout import dropout_arguments, dropout_calls
from graphrt.backends.triton.kernels.flash_attn.kernel import warps_text
from graphrt.backends.triton.kernels.flash_attn.problem import Tiling, split_head
from graphrt.backends.triton.kernels.flash_attn.score_code import function_of, numbers_of
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.ops.soft_max import alibi_slopes

#: Rows that a step of attention_back_sinks takes.
SINK_ROWS = 1024
#: Head sizes up to which a program can have several sums.
LONGEST = 256
DOTS = {"f16": tl.float16, "bf16": tl.bfloat16, "f32": tl.float32}
#: Triton 3.6 multiplies second parts of fewer columns wrongly on Hopper, see problem.py's operand().
LEAST_PART = 64


class Portable(BackKernel):
    """What kernels of tiles have in common. owner: of configs.py."""

    owner: ClassVar[str]

    def serves(self) -> str | None:
        return None

    @cached_property
    def _score(self) -> Any:
        return function_of(self.p.params, slope=True)

    @cached_property
    def config(self) -> BackConfig:
        p, found = self.p, back_config(self.target.arch, self.owner, self.p.d, self.p.kind)
        # What is added to logits or left out takes registers that sums of 128 keys leave none of.
        crowded = (
            p.bias_t is not None or p.dropout_p > 0 or p.params.softcap > 0 or p.is_packed or self._score is not None
        )
        return replace(found, block_n=64) if crowded and self.owner == KEYS and found.block_n > 64 else found

    @cached_property
    def tiling(self) -> Tiling:
        return Tiling.of(self.p, self.config.block_m, self.config.block_n, 1)

    @property
    def tiles(self) -> str:
        c = self.config
        owned = "its own" if c.keep == "keep" else "its own again each time"
        return f"{c.block_m} queries x {c.block_n} keys, {warps_text(c.warps)}; a program reads {owned}"

    @cached_property
    def spec(self) -> BackSpec:
        p, c, params = self.p, self.config, self.p.params
        (dk0, dk1), (dv0, dv1) = (split_head(d, LEAST_PART if d > LEAST_PART else 16) for d in p.d)
        bf16_as_f32 = interpreting() and p.kind == "bf16"  # which Triton's interpreter gets wrong
        reach = max(p.strides(p.q_t)[1], p.strides(p.d_out_t)[2], p.k.strides[0], p.v.strides[0])
        return BackSpec(
            d_k=p.d[0], d_v=p.d[1], dk0=dk0, dk1=dk1, dv0=dv0, dv1=dv1, block_m=c.block_m, block_n=c.block_n,
            dot=tl.float32 if bf16_as_f32 else DOTS[p.kind], precision="ieee", has_mask=p.mask_t is not None,
            has_bias=p.bias_t is not None, softcap=params.softcap > 0, dropout=dropout_calls(params),
            packed=p.is_packed,
            causal=getattr(params, "causal", False), window=getattr(params, "window", 0) > 0,
            alibi=params.max_bias > 0, wide=reach * max(c.block_m, c.block_n) >= 2**31, ptx=self.target.is_nvidia,
            pdl=self.target.has_pdl, keep=c.keep == "keep", makes_q="q" in self.of, makes_k="k" in self.of,
            makes_v="v" in self.of, stages=c.stages, score=self._score,
        )  # fmt: skip

    def _given(self, shared: Shared, lists: dict[str, torch.Tensor]) -> tuple[dict[str, Any], list[Step]]:
        """The arguments of a kernel of tiles, and the launches of what they name. lists: those of the owner."""
        p, t = self.p, self.tiling
        rows, steps = shared.rows(p)
        halves, made = shared.halves(p)
        none = shared.once(("none",), lambda: (_zeros(shared, 1), []))[0]
        mask, bias = p.mask_t, p.bias_t
        any_of = dict.fromkeys(("counts", "blocks", "seen", "column_counts", "columns", "ranks", "tiles"), none) | lists
        x = Given(
            q=halves.q, k=p.k.data, v=p.v.data, d_out=halves.d_out, lse=p.f32(p.lse_t), delta=rows.delta,
            mask=p.memory(mask, torch.float16) if mask is not None else none.view(torch.float16),
            bias=p.memory(bias, KINDS[bias.dtype.name]) if bias is not None else none.view(torch.float32),
            slopes=torch.tensor(alibi_slopes(p.n_head, p.params.max_bias), device=self.target.device),
            scales=rows.scales, score=numbers_of(p.params, self.target.device), **any_of,
        )  # fmt: skip
        mask_steps = p.strides(mask)[1:] if mask is not None else (0, 0, 0)
        bias_steps = p.strides(bias)[1:] if bias is not None else (0, 0, 0)
        st = Steps(
            *halves.q_strides, *p.k.strides, *p.v.strides, *halves.d_strides, *p.strides(p.lse_t)[:3], *mask_steps,
            *bias_steps,
        )  # fmt: skip
        return {
            "x": x, "st": st, "n_q": p.n_q, "n_kv": p.n_kv, "n_head": p.n_head, "gqa": p.gqa,
            "n_qt": p.n_seq + 1 if p.is_packed else t.n_qt, "n_blocks": t.n_blocks, "m2": p.m2, "m3": p.m3,
            "mask_groups": t.mask_groups, "b2": p.b2, "b3": p.b3, "window": getattr(p.params, "window", 0),
            "scale": p.params.scale, "softcap": p.params.softcap, **dropout_arguments(p.params), "spec": self.spec,
        }, steps + made  # fmt: skip

    def _results(self) -> dict[str, torch.Tensor]:
        """Memory of the gradients of q, k and v; any for those that are not made."""
        p = self.p
        return {f"p_d{of}": p.f32(p.of[of] if of in self.of else p.lse_t) for of in "qkv"}

    def _launch(self, kernel: Any, grid: tuple[int, ...], args: dict[str, Any]) -> Launch:
        fewer = tuple({"spec": replace(self.spec, stages=n)} for n in range(self.config.stages - 1, 0, -1))
        return Launch(kernel, grid, args, launch_options(self.target, self.config.warps), fewer)


class Queries(Portable):
    """queries.py."""

    file = "backward/queries.py"

    def launches(self, shared: Shared) -> list[Step]:
        p, t, lists, made = self.p, self.tiling, {}, list[Step]()
        n_tiles = t.n_qt
        if p.mask_t is not None:
            plan, made = plans.mask_plan(p, t, shared)
            lists = {"counts": plan.counts, "blocks": plan.blocks, "seen": plan.seen}
        elif p.is_packed:
            lists["tiles"], made = plans.packed_tiles(p, self.config.block_m, False, shared)
            n_tiles = lists["tiles"].shape[0]
        args, steps = self._given(shared, lists)
        added = [p.f32(p.of[of]) for of in self.of if of != "q"]
        launch = self._launch(attention_back_queries, (n_tiles, p.n_head, p.n_batch), args | self._results())
        return [*steps, *made, *zeroed(added), launch]


class Keys(Portable):
    """keys.py."""

    file = "backward/keys.py"

    def launches(self, shared: Shared) -> list[Step]:
        p, t, lists, made = self.p, self.tiling, {}, list[Step]()
        n_tiles, zeros = t.n_blocks, []
        if p.mask_t is not None:
            found, made = plans.columns(p, t, shared)
            lists = {"column_counts": found.counts, "columns": found.columns}
            if "q" in self.of:
                lists["ranks"], more = plans.ranks(p, t, shared)
                made += more
        elif p.is_packed:
            lists["tiles"], made = plans.packed_tiles(p, self.config.block_n, True, shared)
            n_tiles = lists["tiles"].shape[0]
        args, steps = self._given(shared, lists)
        turns = args["x"].scales
        if "q" in self.of:
            per_head = p.n_q // self.config.block_m + p.n_seq + 1 if p.is_packed else t.n_qt
            turns = _zeros(shared, p.n_batch * p.n_head * per_head)
            zeros = [turns, p.f32(p.of["q"])]
        args |= {**self._results(), "p_turns": turns}
        grid = (n_tiles, p.n_head // p.gqa, p.n_batch)
        return [*steps, *made, *zeroed(zeros), self._launch(attention_back_keys, grid, args)]


class SplitQ(Queries):
    name, owner, makes = "queries", QUERIES, ("q",)


class SplitKV(Keys):
    """Of long heads k and v apart: together their sums take more registers than there are."""

    name, owner, makes = "keys", KEYS, ("k", "v")

    def launches(self, shared: Shared) -> list[Step]:
        if len(self.of) < 2 or max(self.p.d) <= LONGEST:
            return super().launches(shared)
        each = (SplitKV(self.p, (of,), self.target) for of in self.of)
        return [step for kernel in each for step in kernel.launches(shared)]


class FusedQ(Queries):
    name, owner, makes, forms = "fused-q", FUSED_Q, ("q", "k", "v"), ("fused-q",)

    def serves(self) -> str | None:
        return _too_long(self.p)

    @property
    def unordered(self) -> tuple[str, ...]:
        return tuple(of for of in self.of if of != "q")


class FusedK(Keys):
    name, owner, makes, forms = "fused-k", FUSED_K, ("q", "k", "v"), ("fused-k",)

    def serves(self) -> str | None:
        return _too_long(self.p)


class Bias(Portable):
    """bias.py, with the tiles of queries.py, half as wide: it keeps a tile's sums beside two products."""

    name, owner, makes, file = "bias", QUERIES, ("attn_bias",), "backward/bias.py"

    @cached_property
    def config(self) -> BackConfig:
        found = back_config(self.target.arch, self.owner, self.p.d, self.p.kind)
        return replace(found, block_n=max(32, found.block_n // 2))

    def launches(self, shared: Shared) -> list[Step]:
        p, t, made = self.p, self.tiling, list[Step]()
        args, steps = self._given(shared, {})
        kinds = args["x"].counts
        if p.mask_t is not None:
            plan, made = plans.mask_plan(p, t, shared)
            assert plan.kinds is not None
            kinds = plan.kinds
        args |= {"p_class": kinds, "p_result": p.f32(p.of["attn_bias"]), "n_seq": p.n_seq}
        grid = (t.n_blocks, t.n_qt, p.b2 * p.b3)
        return [*steps, *made, self._launch(attention_back_bias, grid, args)]


class Sinks(BackKernel):
    """deltas.py's attention_back_sinks."""

    name, makes, file = "sinks", ("sinks",), "backward/deltas.py"

    def serves(self) -> str | None:
        return None

    @property
    def config(self) -> int:
        return SINK_ROWS

    @property
    def tiles(self) -> str:
        return f"a program a head, {SINK_ROWS} rows at a time"

    def launches(self, shared: Shared) -> list[Step]:
        p, target = self.p, self.target
        assert p.sinks_t is not None
        rows, steps = shared.rows(p)
        # f32 [n_head] in one dimension or another, whose stride is the smallest of those over one element
        stride = next((step for step, n in zip(p.strides(p.sinks_t), p.sinks_t.ne) if n > 1), 1)
        starts = p.memory(p.q_starts, torch.int32) if p.q_starts is not None else rows.scales
        args = {
            "p_lse": p.f32(p.lse_t), "p_delta": rows.delta, "p_sinks": p.f32(p.sinks_t), "p_starts": starts,
            "p_result": p.f32(p.of["sinks"]), "n_q": p.n_q, "n_head": p.n_head, "n_batch": p.n_batch,
            "n_seq": p.n_seq, **dict(zip(("ol_h", "ol_t", "ol_s"), p.strides(p.lse_t))), "s_sinks": stride,
            "ROWS": SINK_ROWS, "PACKED": p.is_packed, "PDL": target.has_pdl,
        }  # fmt: skip
        return [*steps, Launch(attention_back_sinks, (p.n_head,), args, launch_options(target, 4))]


def _too_long(p: BackProblem) -> str | None:
    longest = max(p.d)
    return f"all three sums of heads over {LONGEST} take more registers than there are, here {longest}" if (
        longest > LONGEST
    ) else None  # fmt: skip


def _zeros(shared: Shared, n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32, device=shared.target.device)


def zeroed(memories: list[torch.Tensor]) -> list[Step]:
    """The step that makes them zeros."""
    return [Call("zeros", partial(_zero, memories), [], memories, helper=True)] if memories else []


def _zero(memories: list[torch.Tensor]) -> None:
    for memory in memories:
        memory.zero_()
