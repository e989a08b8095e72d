"""The decode kernel (decode.py) for the launcher: its arguments and launches."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.kernels.flash_attn import portable
from graphrt.backends.triton.kernels.flash_attn.configs import Config as PortableConfig
from graphrt.backends.triton.kernels.flash_attn.decode import (
    flash_attn_decode,
    flash_attn_decode_append,
    flash_attn_decode_blocks,
)
from graphrt.backends.triton.kernels.flash_attn.decode_configs import (
    Config,
    config_for,
    in_runs,
    is_thin,
    owns_columns,
    programs_held,
    shared_bytes,
    thin_form,
    with_words,
)
from graphrt.backends.triton.kernels.flash_attn.kernel import AttentionKernel, Scratch, warps_text
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.kernels.flash_attn.problem import Problem
from graphrt.backends.triton.kernels.flash_attn.score_code import why_not
from graphrt.backends.triton.launch import Launch, launch_options

#: Parts are joined in the same launch if a tile's are at most so many bytes: one multiprocessor reads them all. (H200,
#: f16: 4 rows of 18 parts of D128, 37 KB, gain 0.7 us, 16 rows of them, 150 KB, lose 1.8 to 2.5. Config.join says for
#: which caches: way_sums lacks the registers over blocks, where it lost 2 to 4 us; decode_thin.py's loop has them.)
JOIN_BYTES = 96 << 10
#: The same in decode_thin.py's loop, whose many small programs leave more parts. (H200, 4 rows of f8: 11 parts, 23 KB,
#: gain 0.3 us, 51 parts lose 1.5. What is between was not measured; f16 gains up to here.)
THIN_JOIN_BYTES = 38 << 10
#: Read counts and runs of a plan that is old enough while the launch before still runs; off to compare.
PLAN_EARLY = True


def join_of(main: dict[str, Any], t: Any, config: Config) -> tuple[int, int]:
    """(rows, parts at a time) of the join within a launch of these arguments; (0, 0): fixup.py joins, or nobody need.

    t: the tiling. Powers of two, so that a thread holds at most Config.join values and each lane one of the row maxima.
    """
    most = min(main["splits"] or main["programs"] // t.n_tiles + 2, t.n_blocks)
    rows, d = 1 << (main["n_q"] * t.pack - 1).bit_length(), main["D_K"]
    if not main["RANGES"] or main["programs"] < t.n_tiles or not config.join:
        return 0, 0
    kinds = main["K_KIND"], main["V_KIND"]
    thin = is_thin(main["n_q"] * t.pack, *kinds)
    if not (thin or {*kinds} <= {"f16", "bf16"}):
        return 0, 0
    if rows * (d + 2) * most * 4 > (THIN_JOIN_BYTES if thin else JOIN_BYTES):
        return 0, 0
    return rows, max(32 // rows, min(1 << (most - 1).bit_length(), config.join * 32 * config.warps // (rows * d)))


def arguments(
    main: dict[str, Any],
    config: Config,
    runs: Any,
    counter: Any,
    join: tuple[int, int] = (0, 0),
    early: bool = False,
    in_runs: bool = False,
) -> dict[str, Any]:
    """The portable kernel's arguments (portable.py) as this kernel takes them.

    runs: the mask's (mask.py); counter: int32 [tiles], zeros; join: join_of's; early: the mask's plan was made before
    the launch that precedes this one; in_runs: decode_configs.in_runs's.
    """
    known = {
        **with_words(main), "D": main["D_K"], "STAGES": config.stages, "p_runs": runs, "p_counter": counter,
        "JOIN": join[0], "JOIN_PARTS": join[1], "PLAN_EARLY": early and PLAN_EARLY,
        "COLUMNS": owns_columns(main["D_K"], main["K_KIND"], main["V_KIND"]),
        "THIN": thin_form(main["n_q"] * main["PACK"], main["K_KIND"], main["V_KIND"], config), "IN_RUNS": in_runs,
    }  # fmt: skip
    return {name: known[name] for name in flash_attn_decode.arg_names}


def with_new_rows(appended: dict[str, Any]) -> dict[str, Any]:
    """AttentionKernel.appended as this kernel takes it: of blocks, one after the other, the caches by words."""
    if "new" not in appended:
        return appended
    new, caches = appended["new"], appended["caches"]
    return {
        "p_k": caches.k.view(torch.int32), "p_v": caches.v.view(torch.int32), "p_k_new": new.k, "p_v_new": new.v,
        "p_ids": new.ids, "k_head": new.k_head, "k_seq": new.k_seq, "v_head": new.v_head, "v_seq": new.v_seq,
        "n_cells": new.n_cells,
    }  # fmt: skip


def bounded(config: Config) -> dict[str, Any]:
    """The launch's option that bounds a thread's registers."""
    return {"maxnreg": config.registers} if config.registers else {}


class Decode(AttentionKernel[Problem, MaskPlan]):
    """decode.py: few query rows of a KV head, on NVIDIA's GPUs. join: join_of's, once launches() has been asked."""

    name = kernel = "decode"
    file = "decode.py"
    join = (0, 0)

    @cached_property
    def _found(self) -> Config | str:
        p = self.p
        tiles = p.n_seq * (p.n_head // p.gqa) // self.target.sm_count
        return config_for(p, p.n_q * p.gqa, tiles, self.target.has_pdl, in_runs(self.p))

    def serves(self) -> str | None:
        if (reason := self.p.portable_only or why_not(self.p.params)) is not None:
            return reason
        if isinstance(self._found, str):
            return self._found
        return None if portable.units_fit(self.tiling, self.choice.programs) else "programs times units pass 2^31"

    @cached_property
    def config(self) -> Config:
        assert isinstance(self._found, Config)
        return self._found

    @property
    def per_sm(self) -> int:
        return programs_held(self.config, self.shared, self.target.arch)

    @cached_property
    def _main(self) -> PortableConfig:
        """The portable kernel's config of the same tiles."""
        c = self.config
        return PortableConfig(c.block_m, c.block_n, c.warps, c.stages, per_sm=c.per_sm)

    def launches(self, plan: MaskPlan | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        part = scratch.part(self.choice.scratch_bytes)
        args = portable.main_arguments(self.p, self.tiling, self._main, self.choice, plan, part, self.target)
        self.join = join_of(args, self.tiling, self.config)
        fewer = tuple({"STAGES": n} for n in range(self.config.stages - 1, 0, -1))
        runs = plan.runs if plan is not None else args["p_counts"]
        counters = scratch.counters(self.tiling.n_tiles)
        known = arguments(args, self.config, runs, counters, self.join, plan_is_old, in_runs(self.p))
        options = launch_options(self.target, self.config.warps) | bounded(self.config)
        kernel = flash_attn_decode
        if self.appended is not None:
            kernel = flash_attn_decode_blocks if "new" in self.appended else flash_attn_decode_append
            known |= with_new_rows(self.appended)
            known = {name: known[name] for name in kernel.arg_names}
        main = Launch(kernel, (args["programs"],), known, options, fewer)
        if not self.shares_out or self.join[0] > 0:
            return [main]
        return [main, portable.fixup_launch(args, self.tiling, self.p, self.target)]

    @property
    def can_append(self) -> bool:  # type: ignore[override]
        """Rows of f16 and bf16 need no rounding to blocks; warps that own columns have no rows of their own."""
        k, v = self.p.k, self.p.v
        return {k.kind, v.kind} <= {"f16", "bf16"} and not owns_columns(k.d, k.kind, v.kind)

    @property
    def why_no_blocks(self) -> str | None:
        k, v = self.p.k.kind, self.p.v.kind
        return None if {k, v} <= {"q8_0", "q4_0"} else f"decode writes rows of q8_0 and q4_0, these are {k} and {v}"

    @property
    def workers(self) -> str:
        return warps_text(self.config.warps)

    @property
    def stages(self) -> int:
        return self._room[0]

    @property
    def shared(self) -> int:
        return self._room[1]

    @property
    def joined_by(self) -> str:
        return "kernel" if self.join[0] > 0 else super().joined_by

    @cached_property
    def _room(self) -> tuple[int, int]:
        """The stages that there is room for, and bytes of shared memory of a program. (A launch finds that out by
        itself.)"""
        p = self.p
        fewer = [replace(self.config, stages=n) for n in range(self.config.stages, 0, -1)]
        sizes = [shared_bytes(p.k.d, p.k.kind, p.v.kind, c) for c in fewer]
        fits = next((i for i, size in enumerate(sizes) if size <= self.target.shared_memory), len(fewer) - 1)
        return fewer[fits].stages, sizes[fits]
