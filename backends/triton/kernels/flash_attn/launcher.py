"""From nodes to launches: which kernel an attention gets, its configuration, schedule and scratch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphrt.backend import Place
from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn import chooser, portable
from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen
from graphrt.backends.triton.kernels.flash_attn.configs import Config, find_config
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan, MaskPlans
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.tensor import Tensor

#: A tile of so many k-blocks is done as soon as its parts would be joined.
SHORT = 8


class Launcher:
    """Makes the launches of a program's attentions. They run in order, so they share scratch and masks' plans.

    schedule: forces one. config: forces the portable kernel, with that configuration. chosen: what each node got, for
    those who ask why.
    """

    def __init__(
        self,
        target: Target,
        place: Callable[[Tensor], Place],
        schedule: str | None = None,
        config: Config | None = None,
    ) -> None:
        self.target = target
        self.place = place
        self.schedule = schedule
        self.config = config
        self.masks = MaskPlans(target.device)
        self.scratch = torch.empty(0, device=target.device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=target.device)
        self.chosen: dict[Tensor, Chosen] = {}
        #: int32 [1] for each prefill: how many of its tiles were done again since it was made.
        self.redone: list[torch.Tensor] = []

    def launches(self, nodes: Sequence[Tensor]) -> list[Step]:
        """The launches of FLASH_ATTN_EXT, FLASH_ATTN_LSE, or both of the same sources."""
        p = Problem(nodes, self.place)
        refused: dict[str, str] = {}
        steps = self._prefill(p, refused) if self.schedule in (None, "tile") and self.config is None else None
        if steps is None and self.config is None:
            steps = self._mla_shared_out(p, refused)
        return steps if steps is not None else self._shared_out(p, refused)

    def _note(self, p: Problem, chosen: Chosen) -> None:
        self.chosen.update(dict.fromkeys(p.nodes, chosen))

    def _shared_out(self, p: Problem, refused: dict[str, str]) -> list[Step]:
        """The decode kernel where it serves, else the portable one, and the fixup behind either."""
        decode = self._decode_config(p, refused)
        if self.config is not None:
            config = self.config
        elif decode is not None:
            config = Config(16, decode.block_n, decode.warps, decode.stages, per_sm=decode.per_sm)
        else:
            rows = p.n_q * p.gqa
            if not (p.k.aligned and p.v.aligned) and self.target.is_nvidia:
                rows = min(rows, 16)  # Triton 3.6 fails to compile Hopper's products with K read by halves
            config = find_config(self.target.arch, rows, (p.k.d, p.v.d), p.k.kind, p.v.kind, v_in_k=p.v_in_k)
        t = Tiling.of(p, config.block_m, config.block_n)
        choice = self._choose(p, t, config, self.schedule)
        ranges = choice.schedule != "tile"
        plan, steps = None, list[Step]()
        if p.mask_t is not None:
            plan, made = self.masks.plan(p, t, ranges and not t.uniform(True))
            steps += made
        early = plan is not None and not steps  # the launch that used the plan first comes between
        args = portable.main_arguments(p, t, config, choice, plan, self._part(choice.scratch_bytes), self.target)
        joined, shared, stages = False, None, 0
        if decode is not None and args["BIG"]:
            refused["decode"] = "programs times units pass 2^31"
            decode = None
        if decode is not None:
            launch = self._decode_launch(args, decode, t, plan, early)
            joined = launch.args["JOIN"] > 0
            stages, shared = self._decode_stages(p, decode)
        else:
            launch = portable.main_launch(args, config, self.target)
            stages = launch.args["STAGES"]
        steps.append(launch)
        if ranges and not joined:
            steps.append(portable.fixup_launch(args, t, p, self.target))
        join = "" if not ranges else "kernel" if joined else "fixup"
        kernel = "forward" if decode is None else "decode"
        workers = "1 warp" if config.warps == 1 else f"{config.warps} warps"
        self._note(p, Chosen(
            kernel, p, t, choice, decode or config, workers, stages, shared, choice.programs, join,
            False, refused
        ))  # fmt: skip
        return steps

    def _mla_shared_out(self, p: Problem, refused: dict[str, str]) -> list[Step] | None:
        """Hopper's kernel for MLA's shape with tiles shared out, and the fixup; None where it does not serve."""
        if self.target.arch != "sm_90":
            return None
        from graphrt.backends.triton.kernels.flash_attn import prefill

        kernel = prefill.find_shared_out(p, refused)
        if kernel is None:
            return None
        config = Config(kernel.config.block_m, kernel.config.block_n, 8, 1)
        t = Tiling.of(p, config.block_m, config.block_n, kernel.pack)
        choice = self._choose(p, t, config, self.schedule)
        if not portable.units_fit(t, choice.programs):
            refused[f"{kernel.name}, tiles shared out"] = "programs times units pass 2^31"
            return None
        ranges = choice.schedule != "tile"
        self._note(p, Chosen(
            kernel.name, p, t, choice, kernel.config, kernel.workers, kernel.config.stages, kernel.shared,
            choice.programs, "fixup" if ranges else "", False, refused
        ))  # fmt: skip
        # One program a tile is a split in one part: units are summed for that too.
        plan, steps = None, list[Step]()
        if p.mask_t is not None:
            plan, made = self.masks.plan(p, t, not t.uniform(True))
            steps += made
        args = portable.main_arguments(p, t, config, choice, plan, self._part(choice.scratch_bytes), self.target)
        steps.append(kernel.launch(p, plan, None, prefill.ranges_of(args)))
        if ranges:
            steps.append(portable.fixup_launch(args, t, p, self.target))
        return steps

    def _decode_config(self, p: Problem, refused: dict[str, str]) -> Any:
        """The decode kernel's config, None where that does not serve: it is NVIDIA's and can't be interpreted."""
        if not self.target.is_nvidia or self.config is not None:
            refused["decode"] = "it is NVIDIA's" if self.config is None else "the portable kernel's config is forced"
            return None
        from graphrt.backends.triton.kernels.flash_attn import decode_configs

        config = decode_configs.config_for(p, self.target.has_pdl, self.target.sm_count)
        if isinstance(config, str):
            refused["decode"] = config
            return None
        return config

    def _decode_stages(self, p: Problem, config: Any) -> tuple[int, int]:
        """The stages of the decode kernel that there is room for, and bytes of shared memory of a program. (A launch
        finds that out by itself.)"""
        from graphrt.backends.triton.kernels.flash_attn import decode_configs

        fewer = [replace(config, stages=n) for n in range(config.stages, 0, -1)]
        sizes = [decode_configs.shared_bytes(p.k.d, p.k.kind, p.v.kind, c) for c in fewer]
        fits = next((i for i, size in enumerate(sizes) if size <= self.target.shared_memory), len(fewer) - 1)
        return fewer[fits].stages, sizes[fits]

    def _decode_launch(
        self, args: dict[str, Any], config: Any, t: Tiling, plan: MaskPlan | None, early: bool
    ) -> Launch:
        from graphrt.backends.triton.kernels.flash_attn import decode, decode_configs

        fewer = tuple({"STAGES": n} for n in range(config.stages - 1, 0, -1))
        options = launch_options(self.target, config.warps)
        runs = plan.runs if plan is not None else args["p_counts"]
        join = decode_configs.join_of(args, t, config)
        known = decode_configs.arguments(args, config, runs, self._counters(t.n_tiles), join, early)
        return Launch(decode.flash_attn_decode, (args["programs"],), known, options, fewer)

    def _choose(self, p: Problem, t: Tiling, config: Config, force: str | None) -> chooser.Choice:
        # A group of heads is to the chooser one head with as many more query rows; a mask that all tiles share leaves
        # them of one length, as none does.
        has_mask = not t.uniform(p.mask_t is not None)
        problem = chooser.Problem(
            p.n_q * t.pack, p.n_kv, t.n_groups, p.n_head // p.gqa, p.n_seq, p.k.d, p.v.d, has_mask,
            t.block_m, t.block_n, d_v_stored=sum(p.v.parts),
        )  # fmt: skip
        return chooser.choose(problem, chooser.Device(self.target.sm_count, config.per_sm), force)

    def _part(self, nbytes: int) -> torch.Tensor:
        """Scratch for parts of tiles; fresh memory if what there is is too small (what was given out stays valid)."""
        if self.scratch.numel() * 4 < max(nbytes, 4):
            self.scratch = torch.full((max(1, -(-nbytes // 4)),), math.nan, device=self.target.device)
        return self.scratch

    def _counters(self, n: int) -> torch.Tensor:
        """One for each tile, 0 between launches; fresh ones if there are too few (what was given out stays valid)."""
        if self.counters.numel() < n:
            self.counters = torch.zeros(n, dtype=torch.int32, device=self.target.device)
        return self.counters

    def _prefill(self, p: Problem, refused: dict[str, str]) -> list[Step] | None:
        """Hopper's own kernels for many queries; None where none of them serves."""
        if self.target.arch != "sm_90":
            refused["hopper kernels"] = f"they are sm_90's, this is {self.target.arch}"
            return None
        # Gluon is imported where it is used: other GPUs' Triton may lack it.
        from graphrt.backends.triton.kernels.flash_attn import hopper_launch, prefill

        kernel = prefill.find(p, refused)
        if kernel is None:
            return None
        t = Tiling.of(p, kernel.config.block_m, kernel.config.block_n, kernel.pack)
        few = t.n_tiles < self.target.sm_count // 2 and t.n_blocks > SHORT
        if few and self.schedule is None:  # few long tiles: shared out, they are done sooner
            refused[kernel.name] = (
                f"{t.n_tiles} tiles of {t.n_blocks} k-blocks for {self.target.sm_count} multiprocessors: shared out, "
                f"they are done sooner"
            )
            return None
        again = Config(t.block_m, t.block_n, 8, 1)  # of the portable kernel over the same tiles, see below
        choice = self._choose(p, t, again, "tile")
        if self.schedule is None:
            enough = f"{t.n_tiles} tiles for {self.target.sm_count} multiprocessors, {t.n_blocks} k-blocks each at most"
            choice = replace(choice, reasons=(f"{enough}: enough, or short enough, not to be shared out",))
        programs = hopper_launch.programs_of(t.n_tiles, kernel.config.persistent, self.target.sm_count)
        self._note(p, Chosen(
            kernel.name, p, t, choice, kernel.config, kernel.workers, kernel.config.stages, kernel.shared,
            programs, "", True, refused
        ))  # fmt: skip
        plan, steps = self.masks.plan(p, t, False) if p.mask_t is not None else (None, [])
        bad = torch.zeros(t.n_tiles + 1, dtype=torch.int32, device=self.target.device)
        self.redone.append(bad[t.n_tiles :])
        # V may hold NaN in cells that the mask hides, and logits may be very large. The portable kernel, which reads no
        # hidden cell and subtracts before it scales, does those tiles again.
        args = portable.main_arguments(p, t, again, choice, plan, self._part(0), self.target)
        return [
            *steps,
            kernel.launch(p, plan, bad[: t.n_tiles]),
            portable.repair_launch(args, bad, again.warps, self.target),
        ]
