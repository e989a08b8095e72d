"""The varlen decode kernel (attend_decode.py) for the launcher: which problems it serves, and its launches."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.kernels.flash_attn import portable, score_code
from graphrt.backends.triton.kernels.flash_attn.configs import Config as PortableConfig
from graphrt.backends.triton.kernels.flash_attn.decode_configs import (
    Config,
    config_for,
    owns_columns,
    programs_held,
    shared_bytes,
    with_words,
)
from graphrt.backends.triton.kernels.flash_attn.decode_launch import PLAN_EARLY
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import ROWS
from graphrt.backends.triton.kernels.flash_attn.kernel import Scratch, warps_text
from graphrt.backends.triton.kernels.flash_attn.varlen.attend_decode import flash_attn_varlen_decode
from graphrt.backends.triton.kernels.flash_attn.varlen.launch import VarlenKernel, main_arguments
from graphrt.backends.triton.kernels.flash_attn.varlen.plan import VarlenPlan
from graphrt.backends.triton.launch import Launch, launch_options

#: Tiles for each multiprocessor from which on it holds two programs of heads of 128, with a block of f16 or bf16 in
#: flight each, instead of one with three: one goes on to its next tile beside the other (H100: 64 sequences of 250
#: keys 30.1 us, 34.3 before; of 3 to 12,400, 2,100 on average, 207.8, 210).
MANY = 3


class VarlenDecode(VarlenKernel):
    """varlen/attend_decode.py: sequences that have few queries each, on NVIDIA's GPUs."""

    name = kernel = "varlen_decode"
    file = "varlen/attend_decode.py"
    few_rows = ROWS.value
    more = 2

    @cached_property
    def _found(self) -> Config | str:
        p = self.p
        if not p.k.aligned or not p.v.aligned:
            return "quantized rows must be whole 4 bytes apart"
        found = config_for(p, p.mean_queries * p.gqa, 1, self.target.has_pdl, has_thin=False)
        many = p.n_lists * (p.n_head // p.gqa) >= MANY * self.target.sm_count
        if isinstance(found, Config) and many and p.k.d == 128 and {p.k.kind, p.v.kind} <= {"f16", "bf16"}:
            return replace(found, stages=1, per_sm=2)
        return found

    def serves(self) -> str | None:
        if isinstance(self._found, str):
            return self._found
        return self.p.why_portable or score_code.why_not(self.p.params) or self.too_many_units

    @cached_property
    def config(self) -> Config:
        assert isinstance(self._found, Config)
        return self._found

    @property
    def per_sm(self) -> int:
        return programs_held(self.config, self.shared, self.target.arch)

    def launches(self, plan: VarlenPlan | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        assert plan is not None
        c, p = self.config, self.p
        same = PortableConfig(c.block_m, c.block_n, c.warps, c.stages, per_sm=c.per_sm)
        part = scratch.part(self.choice.scratch_bytes)
        args = main_arguments(p, self.tiling, same, self.choice, plan, part, self.target)
        words = [word for word in ("causal", "window", "alibi") if args[word.upper()]]
        known = {
            **with_words(args), "D": p.k.d, "STAGES": self.stages, "COLUMNS": owns_columns(p.k.d, p.k.kind, p.v.kind),
            "SEES": " ".join(["position", *words]), "PLAN_EARLY": plan_is_old and PLAN_EARLY,
        }  # fmt: skip
        given = {name: known[name] for name in flash_attn_varlen_decode.arg_names}
        fewer = tuple({"STAGES": n} for n in range(self.stages - 1, 0, -1))
        options = launch_options(self.target, c.warps)
        main = Launch(flash_attn_varlen_decode, (self.choice.programs,), given, options, fewer)
        return [main, portable.fixup_launch(args, self.tiling, p, self.target)] if self.shares_out else [main]

    @property
    def workers(self) -> str:
        return warps_text(self.config.warps)

    @property
    def stages(self) -> int:
        return self._room[0]

    @property
    def shared(self) -> int:
        return self._room[1]

    @cached_property
    def _room(self) -> tuple[int, int]:
        """The stages that there is room for, and bytes of shared memory of a program."""
        k, v = self.p.k, self.p.v
        fewer = [replace(self.config, stages=n) for n in range(self.config.stages, 0, -1)]
        sizes = [shared_bytes(k.d, k.kind, v.kind, c) for c in fewer]
        fits = next((i for i, size in enumerate(sizes) if size <= self.target.shared_memory), len(fewer) - 1)
        return fewer[fits].stages, sizes[fits]
