"""Hopper's kernels for the launcher: which problems each serves, and its launches."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn import dropout_launch, gluon_score, portable, score_code
from graphrt.backends.triton.kernels.flash_attn.chooser import Choice
from graphrt.backends.triton.kernels.flash_attn.configs import Config as PortableConfig
from graphrt.backends.triton.kernels.flash_attn.hopper.configs import (
    D_K,
    D_V,
    FP8,
    HALF,
    HEADROOM,
    MLA,
    PRODUCERS,
    QUANT,
    Config,
    MlaConfig,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.fp8 import hopper_fp8_attn
from graphrt.backends.triton.kernels.flash_attn.hopper.half import hopper_flash_attn
from graphrt.backends.triton.kernels.flash_attn.hopper.launch import (
    MAX_SHARED_BYTES,
    as_torch,
    box_descriptor,
    common_arguments,
    constants_of,
    mask_descriptor,
    programs_of,
    score_numbers,
    side_by_side,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.mla import hopper_mla_attn
from graphrt.backends.triton.kernels.flash_attn.hopper.mla_parts import PART, REST
from graphrt.backends.triton.kernels.flash_attn.hopper.quant import hopper_quant_attn
from graphrt.backends.triton.kernels.flash_attn.hopper.softcap import LARGE_CAP
from graphrt.backends.triton.kernels.flash_attn.hopper.specs import WG_ROWS, MlaSpec, TileSpec
from graphrt.backends.triton.kernels.flash_attn.kernel import AttentionKernel, Scratch
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.kernels.flash_attn.problem import Operand, Problem, Tiling, with_bias_as_mask
from graphrt.backends.triton.kernels.flash_attn.turned import BLOCK, turn_values
from graphrt.backends.triton.launch import Launch
from graphrt.dtypes import FLOATS8
from graphrt.ops.flash_attn_ext import PREC_F8
from graphrt.tensor import Tensor

#: A tile of so many k-blocks is done as soon as its parts would be joined.
SHORT = 8
#: Fewer queries than this leave most of a tile of half.py and quant.py empty.
MIN_QUERIES = 48
#: Fewer query rows of a KV head than this leave most of a tile of mla.py empty.
MIN_ROWS = 64
HALF_KINDS = ("f16", "bf16")
QUANT_KINDS = ("q8_0", "q4_0", *FLOATS8)


class HopperKernel(AttentionKernel[Problem, MaskPlan]):
    """What all of them have. scores: it has score functions."""

    scores: ClassVar[bool] = False

    def serves(self) -> str | None:
        if self.p.out is None or self.p.v_t is None:
            return "the log-sum-exp alone is the portable kernel's"
        reason = self._portable_only or (None if self.scores else score_code.why_not(self.p.params))
        reason = reason or self._why_not()
        if reason is None and self.p.params.scale < 0:
            reason = f"the scale must not be negative, it is {self.p.params.scale:g}"
        return reason

    @property
    def _portable_only(self) -> str | None:
        return self.p.portable_only

    @abstractmethod
    def _why_not(self) -> str | None:
        """serves(), as far as kernels differ in it."""

    def _unaligned(self, *sources: Tensor) -> bool:
        """TMA takes addresses and strides of whole 16 bytes."""
        return any(n % 16 for t in sources for n in (*t.nb[1:], self.p.place(t)[1]))

    def _again(self) -> PortableConfig:
        """The portable kernel's config over the same tiles."""
        return PortableConfig(self.tiling.block_m, self.tiling.block_n, 8, 1)

    def _portable(self, plan: MaskPlan | None, part: torch.Tensor) -> dict[str, Any]:
        """The portable kernel's arguments for the same tiles."""
        return portable.main_arguments(self.p, self.tiling, self._again(), self.choice, plan, part, self.target)


class WholeTiles(HopperKernel):
    """Kernels whose programs have whole tiles, for many queries: the portable kernel does bad tiles again.

    V may hold NaN in cells that the mask hides, and logits may be very large; that kernel reads no hidden cell and
    subtracts before it scales.
    """

    repairs = True

    def serves(self) -> str | None:
        if self.force not in (None, "tile"):
            return f"its programs have whole tiles, the schedule {self.force} is asked for"
        reason = super().serves()
        if reason is None and self.force is None:
            t, n = self.tiling, self.target.sm_count
            if t.n_tiles < n // 2 and t.n_blocks > SHORT:  # few long tiles
                reason = f"{t.n_tiles} tiles of {t.n_blocks} k-blocks for {n} multiprocessors: shared out, "
                reason += "they are done sooner"
        return reason

    @cached_property
    def choice(self) -> Choice:
        choice, t = self._choose("tile"), self.tiling
        if self.force is not None:
            return choice
        enough = f"{t.n_tiles} tiles for {self.target.sm_count} multiprocessors, {t.n_blocks} k-blocks each at most"
        return replace(choice, reasons=(f"{enough}: enough, or short enough, not to be shared out",))

    @property
    def programs(self) -> int:
        return programs_of(self.tiling.n_tiles, self.config.persistent, self.target.sm_count)

    @property
    def tile_order(self) -> tuple[int, bool]:
        return side_by_side(self.p, self.tiling), self.p.mask_t is not None

    def launches(self, plan: MaskPlan | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        bad = scratch.flags(self.tiling.n_tiles)
        main = self.main_launch(plan, bad[: self.tiling.n_tiles])
        again = self._portable(plan, scratch.part(0))
        return [main, portable.repair_launch(again, bad, self._again().warps, self.target)]

    @abstractmethod
    def main_launch(self, plan: MaskPlan | None, bad: torch.Tensor) -> Launch:
        """The kernel's own launch. bad: int32 [tiles], see common_arguments."""


class RowTiles(WholeTiles):
    """half.py and quant.py: K and V of one head size, in tiles of 64 query rows for each consumer warpgroup."""

    #: By head size.
    configs: ClassVar[dict[int, Config]]

    @cached_property
    def config(self) -> Config:
        return self.configs[self.p.k.d]

    def _few(self) -> str | None:
        n = self.p.n_q
        return f"it takes {MIN_QUERIES} queries or more, here {n}" if n < MIN_QUERIES else None

    @property
    def shared(self) -> int:
        return self.config.shared_bytes(self.p.k.d)

    def spec(self, k_kind: str = "", v_kind: str = "", mask_stages: int = 0) -> TileSpec:
        """The kernel's constants. k_kind, v_kind, mask_stages: see TileSpec."""
        c = self.config
        return TileSpec(
            d=self.p.k.d, block_n=c.block_n, stages=c.stages, n_wg=c.n_wg, pingpong=c.pingpong,
            persistent=c.persistent, k_kind=k_kind, v_kind=v_kind, mask_stages=mask_stages, visits_one=True,
            large_cap=k_kind == "" and self.p.params.softcap >= LARGE_CAP, **constants_of(self.p, self.tiling, True),
            **gluon_score.functions_of(self.p.params),
        )  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": 4, "maxnreg": self.config.registers_at_start}


class HalfTiles(RowTiles):
    """half.py: f16 and bf16."""

    name = kernel = "hopper"
    file = "hopper/half.py"
    configs = HALF
    scores = True

    def __init__(self, p: Problem, target: Target, force: str | None = None) -> None:
        super().__init__(with_bias_as_mask(p), target, force)

    @property
    def _portable_only(self) -> str | None:
        if self.p.dropout_p and self.p.params.score:
            return f"it has a score function or dropout, not both; dropout is {self.p.dropout_p:g} here"
        return self.p.portable_but_dropout or dropout_launch.too_many(self.p)

    def _why_not(self) -> str | None:
        p, k, v = self.p, self.p.k_t, self.p.v_t
        assert v is not None
        if k.dtype is not v.dtype or k.dtype.name not in HALF_KINDS:
            return f"K and V must both be f16 or both bf16, they are {k.dtype.name} and {v.dtype.name}"
        if k.ne[0] != v.ne[0] or k.ne[0] not in HALF:
            return f"heads must be of {', '.join(map(str, HALF))}, they are of {k.ne[0]} and {v.ne[0]}"
        if p.n_q < MIN_QUERIES:
            return self._few()
        return "addresses and strides of K and V must be whole 16 bytes" if self._unaligned(k, v) else None

    @cached_property
    def tiling(self) -> Tiling:
        p, c = self.p, self.config
        # Heads that share a mask's rows share a tile: a mask is then read once for all of them.
        # Of dropout's bits each head has its own.
        shares = p.mask_t is not None and p.m2 == 1 and not p.dropout_p
        pack = max(n for n in (1, 2, 4, 8) if p.gqa % n == 0) if shares else 1
        return Tiling.of(p, c.block_m, c.block_n, pack)

    @property
    def workers(self) -> str:
        return f"{self.config.n_wg} warpgroups multiply, a warp brings K and V by TMA"

    def launches(self, plan: MaskPlan | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        if not self.p.dropout_p:
            return super().launches(plan, plan_is_old, scratch)
        kept, _, drawn = scratch.kept.of(self.p, self.target, False)
        main, *others = super().launches(plan, plan_is_old, scratch)
        assert isinstance(main, Launch)
        main.args["kept"] = kept
        return [*drawn, main, *others]

    def main_launch(self, plan: MaskPlan | None, bad: torch.Tensor) -> Launch:
        p, c, d = self.p, self.config, self.p.k.d
        assert p.v_t is not None
        rows = mask_descriptor(p, self.tiling.pack, WG_ROWS, c.block_n)
        # As many buffers of the mask as fit beside the rest, at most two.
        left = MAX_SHARED_BYTES - self.shared
        mask_stages = min(2, left // (2 * c.block_m // self.tiling.pack * c.block_n)) if rows is not None else 0
        args = common_arguments(p, self.tiling, plan, bad) | {
            "k_desc": box_descriptor(as_torch(p.k_t, p.k.data), c.block_n, d, idle=d),
            "v_desc": box_descriptor(as_torch(p.v_t, p.v.data), c.block_n, d, idle=d),
            "mask_desc": rows if mask_stages else None, "kept": None, "inverse": 1.0 / (1.0 - p.dropout_p),
            "spec": replace(self.spec(mask_stages=mask_stages), has_dropout=p.dropout_p > 0.0),
            "score": score_numbers(p),
        }  # fmt: skip
        return Launch(hopper_flash_attn, (self.programs,), args, self.options)


class QuantTiles(RowTiles):
    """quant.py: q8_0, q4_0 and 8-bit floats."""

    name = kernel = "hopper_quant"
    file = "hopper/quant.py"
    configs = QUANT

    def _why_not(self) -> str | None:
        p = self.p
        if p.k.kind not in QUANT_KINDS or p.v.kind not in QUANT_KINDS:
            return f"K and V must be one of {', '.join(QUANT_KINDS)}, they are {p.k.kind} and {p.v.kind}"
        if p.k.d != p.v.d or p.k.d not in QUANT:
            return f"heads must be of {', '.join(map(str, QUANT))}, they are of {p.k.d} and {p.v.d}"
        if not (p.k.aligned and p.v.aligned):
            return "rows of K and V must start on 4 bytes"
        if self._unaligned(*(t for t in (p.k_t, p.v_t) if t is not None and t.dtype.is_float8)):
            return "rows of 8-bit floats must start on 16 bytes"
        return self._few()

    @cached_property
    def tiling(self) -> Tiling:
        return Tiling.of(self.p, self.config.block_m, self.config.block_n, 1)

    @property
    def workers(self) -> str:
        return f"{self.config.n_wg} warpgroups multiply, one unpacks K and V"

    def main_launch(self, plan: MaskPlan | None, bad: torch.Tensor) -> Launch:
        k, v = self.p.k, self.p.v
        unit_values, registers = PRODUCERS[k.d]
        (k_words, k_strides), (v_words, v_strides) = in_words(k), in_words(v)
        args = common_arguments(self.p, self.tiling, plan, bad) | {
            "k_words": k_words, "v_words": v_words, **dict(zip(("sk_n", "sk_h", "sk_s"), k_strides)),
            **dict(zip(("sv_n", "sv_h", "sv_s"), v_strides)),
            "parts": max(1, self.config.block_n * k.d // unit_values), "producer_registers": registers,
            "spec": self.spec(k.kind, v.kind),
        }  # fmt: skip
        return Launch(hopper_quant_attn, (self.programs,), args, self.options)


class Float8Tiles(RowTiles):
    """fp8.py: products of 8-bit floats, where the node allows them."""

    name = kernel = "hopper_fp8"
    file = "hopper/fp8.py"
    configs = FP8

    def _why_not(self) -> str | None:
        p = self.p
        if getattr(p.params, "prec", 0) != PREC_F8:
            return "it rounds queries and weights to 8 bits, which prec does not allow"
        if p.k.kind != "f8_e4m3" or p.v.kind != "f8_e4m3":
            return f"K and V must both be f8_e4m3, they are {p.k.kind} and {p.v.kind}"
        if p.k.d != p.v.d or p.k.d not in FP8:
            return f"heads must be of {', '.join(map(str, FP8))}, they are of {p.k.d} and {p.v.d}"
        if p.params.softcap or p.params.max_bias:
            return "it has neither soft cap nor ALiBi"
        return self._few() or ("addresses and strides of K must be whole 16 bytes" if self._unaligned(p.k_t) else None)

    @cached_property
    def tiling(self) -> Tiling:
        return Tiling.of(self.p, self.config.block_m, self.config.block_n, 1)

    @property
    def shared(self) -> int:
        return self.config.shared_bytes(self.p.k.d) // 2 + 512

    @property
    def workers(self) -> str:
        return f"{self.config.n_wg} warpgroups multiply 8-bit floats, a warp brings K and the transposed V by TMA"

    def launches(self, plan: MaskPlan | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        p = self.p
        n_blocks = -(-p.n_kv // BLOCK)
        heads = p.n_seq * (p.n_head // p.gqa)
        width = n_blocks * BLOCK
        turned = scratch.part(heads * p.v.d * width).view(torch.uint8)[: heads * p.v.d * width]
        self.turned = turned.view(p.n_seq, p.n_head // p.gqa, p.v.d, width)
        args = {
            "p_v": p.v.data, "p_turned": turned, **dict(zip(("sv_n", "sv_h", "sv_s"), p.v.strides)), "n_kv": p.n_kv,
            "n_head": p.n_head // p.gqa, "D": p.v.d, "BLOCK": BLOCK,
        }  # fmt: skip
        return [Launch(turn_values, (n_blocks, heads), args), *super().launches(plan, plan_is_old, scratch)]

    def main_launch(self, plan: MaskPlan | None, bad: torch.Tensor) -> Launch:
        p, c, d = self.p, self.config, self.p.k.d
        rows = mask_descriptor(p, 1, WG_ROWS, c.block_n)
        left = MAX_SHARED_BYTES - self.shared
        mask_stages = min(2, left // (2 * c.block_m * c.block_n)) if rows is not None else 0
        e4m3 = torch.float8_e4m3fn
        args = common_arguments(p, self.tiling, plan, bad) | {
            "k_desc": box_descriptor(as_torch(p.k_t, p.k.data).view(e4m3), c.block_n, d, idle=d),
            "v_desc": box_descriptor(self.turned.view(e4m3), d, c.block_n, idle=BLOCK),
            "mask_desc": rows if mask_stages else None,
            "spec": replace(self.spec("f8_e4m3", "f8_e4m3", mask_stages), headroom=HEADROOM),
        }  # fmt: skip
        return Launch(hopper_fp8_attn, (self.programs,), args, self.options)


def in_words(x: Operand) -> tuple[torch.Tensor, tuple[int, ...]]:
    """K or V and its strides in words of 4 bytes."""
    if x.kind not in FLOATS8:
        return x.data, x.strides
    return x.data.view(torch.int32), tuple(n // 4 for n in x.strides)


class Mla(HopperKernel):
    """mla.py: MLA's shape, 16 bits."""

    kernel = "hopper_mla"
    file = "hopper/mla.py"

    def _why_not(self) -> str | None:
        p, k = self.p, self.p.k_t
        if p.k.d != D_K or p.v.d != D_V:
            return f"heads must be of {D_K} and {D_V}, they are of {p.k.d} and {p.v.d}"
        if not p.v_in_k or k.dtype.name not in HALF_KINDS:
            return "V must be the first columns of K's rows, in f16 or bf16"
        return "addresses and strides of K must be whole 16 bytes" if self._unaligned(k) else None

    @cached_property
    def config(self) -> MlaConfig:
        return MLA

    @property
    def shared(self) -> int:
        return self.config.shared_bytes

    @property
    def workers(self) -> str:
        return "a warpgroup scores, 2 add up halves of V, a warp brings K by TMA"

    def launch(self, arguments: dict[str, Any], programs: int, has_bad: bool, **constants: Any) -> Launch:
        """arguments: beside K's; constants: of its Spec, of work that is shared out."""
        p, c = self.p, self.config
        k = as_torch(p.k_t, p.k.data)
        spec = MlaSpec(
            n_wg=1, block_n=c.block_n, stages=c.stages, persistent=c.persistent, d_v=D_V, early_decay=c.early_decay,
            **constants_of(p, self.tiling, has_bad), **({"rows": WG_ROWS} | constants),
        )  # fmt: skip
        args = arguments | {
            "part_desc": box_descriptor(k, c.block_n, PART.value, idle=D_K),
            "rest_desc": box_descriptor(k, c.block_n, REST.value, idle=D_K), "programs": programs,
            "n_tiles": self.tiling.n_tiles, "spec": spec,
        }  # fmt: skip
        # 128 registers: of the 512 threads at the start, before setmaxnreg, an even share.
        options = {"num_warps": 4, "maxnreg": 128, **({"launch_pdl": True} if spec.pdl else {})}
        return Launch(hopper_mla_attn, (programs,), args, options)


class MlaTiles(WholeTiles, Mla):
    """mla.py with a tile for each program at a time."""

    name = "hopper_mla, a tile each"

    def _why_not(self) -> str | None:
        rows = self.p.n_q * self.p.gqa
        few = f"it takes {MIN_ROWS} query rows of a KV head or more, here {rows}" if rows < MIN_ROWS else None
        return Mla._why_not(self) or few

    def main_launch(self, plan: MaskPlan | None, bad: torch.Tensor) -> Launch:
        none = {"splits": 0, "part": None, "seen": None, "unit_start": None}
        return self.launch(common_arguments(self.p, self.tiling, plan, bad) | none, self.programs, True)


class MlaShared(Mla):
    """mla.py with tiles shared out; it leaves nothing to do again."""

    name = "hopper_mla, tiles shared out"

    def _why_not(self) -> str | None:
        reason = Mla._why_not(self)
        if reason is None and self.p.params.scale == 0:
            reason = "the scale must be positive, it is 0"
        if reason is None and not portable.units_fit(self.tiling, self.choice.programs):
            reason = "programs times units pass 2^31"
        return reason

    @property
    def needs_units(self) -> bool:
        return not self.tiling.uniform(True)  # one program a tile is a split in one part: it needs them too

    def launches(self, plan: MaskPlan | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        p, t, choice = self.p, self.tiling, self.choice
        part = scratch.part(choice.scratch_bytes)
        uniform = t.uniform(p.mask_t is not None)
        args = common_arguments(p, t, plan, None) | {
            "splits": 0 if choice.schedule == "stream_k" else choice.splits, "part": part,
            "seen": plan.seen if plan is not None else None,
            "unit_start": plan.unit_start if plan is not None and not uniform else None,
        }  # fmt: skip
        few = p.n_q * t.pack <= 16
        main = self.launch(
            args, choice.programs, False, ranges=True, uniform=uniform, pdl=self.target.has_pdl,
            rows=16 if few else WG_ROWS,
        )  # fmt: skip
        return (
            [main, portable.fixup_launch(self._portable(plan, part), t, p, self.target)] if self.shares_out else [main]
        )
