"""The portable kernel (forward.py), which serves every shape on every GPU, and its fixup: their launches."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.chooser import Choice
from graphrt.backends.triton.kernels.flash_attn.configs import Config, find_config
from graphrt.backends.triton.kernels.flash_attn.dropout import dropout_arguments, dropout_calls
from graphrt.backends.triton.kernels.flash_attn.fixup import flash_attn_fixup
from graphrt.backends.triton.kernels.flash_attn.forward import flash_attn
from graphrt.backends.triton.kernels.flash_attn.kernel import AttentionKernel, Scratch, warps_text
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling
from graphrt.backends.triton.kernels.flash_attn.score_code import function_of, numbers_of
from graphrt.backends.triton.kernels.flash_attn.tiles import same_order
from graphrt.backends.triton.kernels.quantize import rounding_options
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.memory import TORCH_TYPES
from graphrt.ops.soft_max import alibi_slopes

LOG2E = math.log2(math.e)
#: The most parts that the fixup reads at a time. A second time is a second wait for memory.
PARTS = 128


class Forward(AttentionKernel[Problem, MaskPlan]):
    """forward.py. config: given, or None for the one of configs.py's table."""

    name = kernel = "forward"
    file = "forward.py"

    def __init__(self, p: Problem, target: Target, force: str | None = None, config: Config | None = None) -> None:
        super().__init__(p, target, force)
        self.given = config

    def serves(self) -> str | None:
        return None

    @cached_property
    def config(self) -> Config:
        return self.given or config_for(self.p, self.p.n_q * self.p.gqa, self.target)

    @property
    def per_sm(self) -> int:
        return self.config.per_sm

    @property
    def why_no_blocks(self) -> str | None:
        return None if self.has_whole_groups else "tiles that share a KV head would read the cell while one writes it"

    def launches(self, plan: MaskPlan | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        part = scratch.part(self.choice.scratch_bytes)
        args = main_arguments(self.p, self.tiling, self.config, self.choice, plan, part, self.target)
        main = main_launch(args | (self.appended or {}), self.config, self.target)
        if self.appended is not None:
            main.options.update(rounding_options(self.p.k.kind, self.p.v.kind))
        return [main, fixup_launch(args, self.tiling, self.p, self.target)] if self.shares_out else [main]

    @property
    def workers(self) -> str:
        return warps_text(self.config.warps)

    @property
    def stages(self) -> int:
        return stages_of(self.p, self.config)

    @property
    def tile_order(self) -> tuple[int, bool]:
        return _section(self.p, self.tiling, self.target), True


def config_for(p: Problem, rows: int, target: Target) -> Config:
    """The table's for so many query rows that share a KV head."""
    if not (p.k.aligned and p.v.aligned) and target.is_nvidia:
        rows = min(rows, 16)  # Triton 3.6 fails to compile Hopper's products with K read by halves
    kinds = ("f32", "f32") if p.in_f32 else (p.k.kind, p.v.kind)
    return find_config(target.arch, rows, (p.k.d, p.v.d), *kinds, v_in_k=p.v_in_k)


def main_arguments(
    p: Problem, t: Tiling, config: Config, choice: Choice, plan: MaskPlan | None, part: torch.Tensor, target: Target
) -> dict[str, Any]:
    """The arguments of forward.py's flash_attn and of the fixup, by name. part: scratch of choice.scratch_bytes."""
    k, v, params = p.k, p.v, p.params
    # For what is absent any memory will do: nothing reads it. (p_bad has its own, since a repair writes it.)
    none = torch.zeros(1, dtype=torch.int32, device=target.device)
    absent = none.view(torch.float32)
    mask_strides = [n // 2 for n in p.mask_t.nb[1:]] if p.mask_t is not None else [0, 0, 0]
    bias = p.bias_t
    bias_strides = [n // bias.dtype.type_size for n in bias.nb[1:]] if bias is not None else [0, 0, 0]
    plan = plan or MaskPlan(none, none, none, none, none)
    ranges = choice.schedule != "tile"
    return {
        "p_q": p.memory(p.q_t, TORCH_TYPES[p.q_t.dtype.name]), "p_k": k.data, "p_v": v.data,
        "p_mask": p.memory(p.mask_t, torch.float16) if p.mask_t is not None else none.view(torch.float16),
        "p_bias": p.memory(bias, TORCH_TYPES[bias.dtype.name]) if bias is not None else absent,
        "p_sinks": p.memory(p.sinks_t, torch.float32) if p.sinks_t is not None else absent,
        "p_score": numbers_of(params, target.device), "SCORE": function_of(params),
        "p_slopes": torch.tensor(alibi_slopes(p.n_head, params.max_bias), device=target.device),
        "p_out": p.memory(p.out, torch.float32) if p.out is not None else absent,
        "p_lse": p.memory(p.lse, torch.float32) if p.lse is not None else absent,
        "p_tiles": none, "n_seq": p.n_seq, "VARLEN": False,
        "p_counts": plan.counts, "p_blocks": plan.blocks, "p_seen": plan.seen, "p_unit_start": plan.unit_start,
        "p_part": part, "p_bad": torch.zeros_like(none),
        **dict(zip(("sq_t", "sq_h", "sq_s"), (n // p.q_t.dtype.type_size for n in p.q_t.nb[1:]))),
        **dict(zip(("sk_n", "sk_h", "sk_s"), k.strides)), **dict(zip(("sv_n", "sv_h", "sv_s"), v.strides)),
        **dict(zip(("sm_t", "sm_h", "sm_s"), mask_strides)), **dict(zip(("sb_t", "sb_h", "sb_s"), bias_strides)),
        "b2": p.b2, "b3": p.b3, **dropout_arguments(params), "PANEL": k.panel[0], "s_panel": k.panel[1],
        "new": None, "caches": None,
        "n_q": p.n_q, "n_kv": p.n_kv, "n_head": p.n_head, "gqa": p.gqa, "n_groups": t.n_groups, "n_qt": t.n_qt,
        "n_blocks": t.n_blocks, "n_tiles": t.n_tiles, "m2": p.m2, "m3": p.m3, "mask_groups": t.mask_groups,
        "programs": choice.programs, "splits": choice.splits if choice.schedule == "split" else 0,
        "section": _section(p, t, target), **scaling(params),
        "softcap": params.softcap, "has_sinks": int(p.sinks_t is not None), "has_lse": int(p.lse is not None),
        "HAS_MASK": p.mask_t is not None, "HAS_BIAS": bias is not None,
        "DROPOUT": dropout_calls(params) if p.dropout_p else 0, "PER_HEAD": p.m2 > 1, "RANGES": ranges,
        "UNIFORM": t.uniform(p.mask_t is not None), "REPAIR": False, **constants(p, t, config, choice, target),
    }  # fmt: skip


def constants(p: Problem, t: Tiling, config: Config, choice: Choice, target: Target) -> dict[str, Any]:
    """What the kernels here are compiled for, as far as they have it in common."""
    k, v = p.k, p.v
    return {
        "D_K": k.d, "D_V": v.d, "DK0": k.parts[0], "DK1": k.parts[1], "DV0": v.parts[0], "DV1": v.parts[1],
        "K_KIND": k.kind, "V_KIND": v.kind, "K_ALIGNED": k.aligned, "V_ALIGNED": v.aligned, "K_DOT": k.dot,
        "V_DOT": v.dot, "BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "WAYS": config.ways,
        "SOFTCAP": p.params.softcap != 0, "V_IN_K": p.v_in_k, "HAS_V": p.out is not None, "PACK": t.pack,
        "BIG": not units_fit(t, choice.programs),
        "WIDE": max(k.strides[0] * t.block_n, v.strides[0] * t.block_n, k.panel[1] * k.d) >= 2**31,
        "PTX": int(target.arch[3:]) if target.is_nvidia else 0, "PDL": target.has_pdl,
        "PRECISION": "tf32x3" if target.is_nvidia and not config.ieee else "ieee", "STAGES": stages_of(p, config),
        "PRE_LOAD_V": config.pre_load_v and target.arch.startswith("gfx"),
    }  # fmt: skip


def main_launch(arguments: dict[str, Any], config: Config, target: Target, kernel: Any = flash_attn) -> Launch:
    """The kernel over its programs; with fewer stages where shared memory is too small for the config's. arguments: of
    the fixup's too, or of this kernel alone."""
    stages = range(config.stages, 0, -1)
    return Launch(
        kernel, (arguments["programs"],), known_to(kernel, arguments),
        launch_options(target, config.warps) | amd_options(config, target), tuple({"STAGES": n} for n in stages[1:]),
    )  # fmt: skip


def amd_options(config: Config, target: Target) -> dict[str, int]:
    """What a configuration asks of AMD's compiler; nothing elsewhere."""
    given = {name: getattr(config, name) for name in ("waves_per_eu", "matrix_instr_nonkdim")}
    return {name: value for name, value in given.items() if value and target.arch.startswith("gfx")}


def known_to(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """A kernel's own arguments among those of it and others."""
    return {name: arguments[name] for name in kernel.arg_names}


def repair_launch(arguments: dict[str, Any], bad: torch.Tensor, warps: int, target: Target) -> Launch:
    """The kernel over the tiles whose `bad` [tiles + 1] is set, one tile a program. The last number counts them."""
    # Few programs that look at many flags each: nearly always there is nothing to do.
    programs = min(bad.numel() - 1, target.sm_count)
    args = known_to(flash_attn, arguments) | {"p_bad": bad, "REPAIR": True, "RANGES": False}
    args |= {"programs": programs, "splits": 0}
    return Launch(flash_attn, (programs,), args, launch_options(target, warps), ({"STAGES": 1},))


def fixup_launch(main: dict[str, Any], t: Tiling, p: Problem, target: Target) -> Launch:
    """The fixup after a launch of these arguments.

    Many parts of few rows (decode) are cut along the columns too, since the time of one program is what it takes.
    """
    most = main["splits"] or max(main["programs"] // t.n_tiles, 1) + (0 if main["VARLEN"] else 2)
    parts = min(PARTS, max(2, 1 << (most - 1).bit_length()))
    width = 1 << (main["DV0"] + main["DV1"] - 1).bit_length()
    cols = max(16, min(width, 32 if parts >= 128 else 64 if parts >= 16 else 256))
    rows = max(1, min(4096 // (parts * cols), 16))
    used = min(t.block_m, p.n_q * t.pack)
    names = [name for name in flash_attn_fixup.arg_names if name not in ("ROWS", "PARTS", "COLS")]
    kind, aligned = same_order(main["V_KIND"], main["V_ALIGNED"])
    args = {**{name: main[name] for name in names}, "V_KIND": kind, "V_ALIGNED": aligned}
    args |= {"ROWS": rows, "PARTS": parts, "COLS": cols}
    return Launch(flash_attn_fixup, (t.n_tiles, -(-used // rows), -(-width // cols)), args, launch_options(target, 4))


def units_fit(t: Tiling, programs: int) -> bool:
    """Programs times units stay within 32 bits (the fixup counts a few programs past the last)."""
    return (programs + 64) * t.n_tiles * (t.n_blocks + 1) < 2**31


def stages_of(p: Problem, config: Config) -> int:
    """K-blocks in flight: the config's, where rows can be copied to shared memory while earlier ones are worked on.

    They can be 4 bytes at a time at least. Else there is nothing to pipeline, and products that take what lies in
    registers are not safe to overlap in Triton 3.6.
    """
    ahead = all(x.by_words and (x.kind in ("f32", "f16", "bf16") or not x.parts[1]) for x in (p.k, p.v))
    return config.stages if ahead else 1


def scaling(params: Any) -> dict[str, float]:
    """sign: of the scale, or 0, which q is multiplied with; factor: what is left of it, always positive."""
    sign = 0.0 if params.scale == 0 else math.copysign(1.0, params.scale)
    size = abs(params.scale) if params.scale else 1.0
    return {"sign": sign, "factor": size / params.softcap if params.softcap else size * LOG2E}


def _section(p: Problem, t: Tiling, target: Target) -> int:
    """Groups of heads whose tiles run at the same time, so that their K and V stay in the cache."""
    groups = t.n_groups * p.n_seq
    nbytes = sum(x.data_nbytes // (x.ne[2] * x.ne[3]) for x in (p.k_t, p.v_t) if x is not None)
    if p.panels:  # of a head, not of one of its panels
        nbytes += p.k_t.data_nbytes // (p.k_t.ne[2] * p.k_t.ne[3]) * (p.k.d // p.k_t.ne[0] - 1)
    fitting = max(1, int(0.6 * target.l2 / max(nbytes, 1))) * (p.gqa // t.pack)
    return max(s for s in range(1, groups + 1) if groups % s == 0 and (s <= fitting or s == 1))
