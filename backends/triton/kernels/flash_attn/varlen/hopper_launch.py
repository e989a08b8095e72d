"""Hopper's varlen kernels for the launcher: which problems they serve, and their launches."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, ClassVar

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.kernels.flash_attn import gluon_score, portable, score_code
from graphrt.backends.triton.kernels.flash_attn.configs import Config as PortableConfig
from graphrt.backends.triton.kernels.flash_attn.hopper.configs import D_K, D_V, MLA, Config, MlaConfig
from graphrt.backends.triton.kernels.flash_attn.hopper.kernels import HALF_KINDS
from graphrt.backends.triton.kernels.flash_attn.hopper.launch import (
    aligned,
    as_torch,
    box_descriptor,
    score_numbers,
    strides_in,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.softcap import LARGE_CAP
from graphrt.backends.triton.kernels.flash_attn.hopper.specs import WG_ROWS, MlaSpec, TileSpec
from graphrt.backends.triton.kernels.flash_attn.kernel import Scratch
from graphrt.backends.triton.kernels.flash_attn.problem import Operand, Tiling
from graphrt.backends.triton.kernels.flash_attn.varlen.attend_hopper import hopper_varlen_attn
from graphrt.backends.triton.kernels.flash_attn.varlen.attend_latent import hopper_varlen_mla
from graphrt.backends.triton.kernels.flash_attn.varlen.hopper_rings import PANEL, rows_of_box
from graphrt.backends.triton.kernels.flash_attn.varlen.launch import VarlenKernel, main_arguments
from graphrt.backends.triton.kernels.flash_attn.varlen.plan import VarlenPlan
from graphrt.backends.triton.launch import Launch
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

#: Of attend_hopper.py by head size.
HALF: dict[int, Config] = {
    64: Config(block_n=128, stages=2, n_wg=2, pingpong=True),
    128: Config(block_n=128, stages=2, n_wg=2),
    256: Config(block_n=64, stages=2, n_wg=2),
}
#: Up to so many query rows a KV head most of a tile is empty.
FEW_ROWS = 16
#: Registers of the warps that bring K and V, and where a k-block lies in several pages, by how many at least.
PRODUCER_REGISTERS = {1: 24, 4: 40}


class VarlenHopper(VarlenKernel):
    """What both have. scores: it has score functions."""

    rounds = True
    scores: ClassVar[bool] = False

    def serves(self) -> str | None:
        p = self.p
        if p.out is None or p.v_t is None:
            return "the log-sum-exp alone is the portable kernel's"
        if p.why_portable:
            return p.why_portable
        reason = (None if self.scores else score_code.why_not(p.params)) or self._why_not()
        if reason is None and p.params.scale <= 0:
            reason = f"the scale must be positive, it is {p.params.scale:g}"
        if reason is None and any(n % 16 for t in (p.k_t, p.v_t) for n in (*t.nb[1:], p.place(t)[1])):
            reason = "addresses and strides of K and V must be whole 16 bytes"
        return reason or self.too_many_units

    @abstractmethod
    def _why_not(self) -> str | None:
        """serves(), as far as kernels differ in it."""

    def launches(self, plan: VarlenPlan | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        assert plan is not None
        part = scratch.part(self.choice.scratch_bytes)
        main = self.main_launch(self._arguments(plan, part))
        if not self.shares_out:
            return [main]
        same = PortableConfig(self.tiling.block_m, self.tiling.block_n, 8, 1)
        args = main_arguments(self.p, self.tiling, same, self.choice, plan, part, self.target)
        return [main, portable.fixup_launch(args, self.tiling, self.p, self.target)]

    @abstractmethod
    def main_launch(self, arguments: dict[str, Any]) -> Launch:
        """The kernel's own launch. arguments: those that both have."""

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q and out in torch's shapes."""
        p = self.p
        assert p.out is not None
        q = as_torch(p.q_t, p.memory(p.q_t, torch.float32))
        return q, p.memory(p.out, torch.float32).view(1, p.n_q, p.n_head, p.v.d)

    @cached_property
    def _vec(self) -> int:
        q, out = self._operands()
        return 4 if aligned(q, 4) and aligned(out, 4) else 1

    def _arguments(self, plan: VarlenPlan, part: torch.Tensor) -> dict[str, Any]:
        p, t, params, table = self.p, self.tiling, self.p.params, self.p.table_t
        q, out = self._operands()
        slopes = torch.tensor(alibi_slopes(p.n_head, params.max_bias), device=out.device)
        return {
            "q": q, "out": out, "lse": p.memory(p.lse, torch.float32) if p.lse is not None else None,
            "slopes": slopes if params.max_bias > 0 else None,
            "sinks": p.memory(p.sinks_t, torch.float32) if p.sinks_t is not None else None, "tiles": plan.tiles,
            "table": p.memory(table, torch.int32) if table is not None else None, "unit_start": plan.unit_start,
            "part": part, "scale": float(params.scale), "softcap": float(params.softcap),
            **dict(zip(("sq_t", "sq_h"), strides_in(self._vec, q, (2, 1)))),
            **dict(zip(("so_t", "so_h"), strides_in(self._vec, out, (1, 2)))),
            "n_head": p.n_head, "gqa": p.gqa, "n_groups": t.n_groups, "n_tiles": t.n_tiles, "n_seq": p.n_seq,
            "n_pages": p.k_t.ne[3], "max_blocks": table.ne[0] if table is not None else 1,
            "s_table": table.nb[1] // 4 if table is not None else 0, "window": params.window,
            "splits": 0 if self.choice.schedule == "stream_k" else self.choice.splits,
        }  # fmt: skip

    def _constants(self) -> dict[str, Any]:
        """Of both kernels' Specs."""
        p, params = self.p, self.p.params
        return {
            "block_n": self.tiling.block_n, "stages": self.config.stages, "persistent": True, "reversed_order": False,
            "pack": self.tiling.pack, "q_vec": self._vec, "mask_vec": 1, "has_mask": False,
            "has_softcap": params.softcap != 0.0, "has_alibi": params.max_bias > 0, "has_sinks": p.sinks_t is not None,
            "has_bad": False, "has_lse": p.lse is not None, "ranges": True, "uniform": False,
            "pdl": self.target.has_pdl, "varlen": True, "page": p.page, "causal": params.causal,
            "window": params.window > 0,
        }  # fmt: skip

    def _boxes(self, t: Tensor, x: Operand) -> TensorDescriptor:
        """Of K or V, see PageRing.fill."""
        rows = rows_of_box(self.p.page, self.tiling.block_n)
        return box_descriptor(as_torch(t, x.data), rows, PANEL.value, idle=x.d)

    def _options(self, registers: int) -> dict[str, Any]:
        """registers: of a thread at launch, before setmaxnreg."""
        return {"num_warps": 4, "maxnreg": registers, **({"launch_pdl": True} if self.target.has_pdl else {})}


class VarlenTiles(VarlenHopper):
    """attend_hopper.py: heads of 64, 128 and 256, f16 and bf16."""

    name = kernel = "hopper_varlen"
    file = "varlen/attend_hopper.py"
    turn = 12
    scores = True

    def _why_not(self) -> str | None:
        k, v = self.p.k_t, self.p.v_t
        assert v is not None
        if k.dtype is not v.dtype or k.dtype.name not in HALF_KINDS:
            return f"K and V must both be f16 or both bf16, they are {k.dtype.name} and {v.dtype.name}"
        if k.ne[0] != v.ne[0] or k.ne[0] not in HALF:
            return f"heads must be of {', '.join(map(str, HALF))}, they are of {k.ne[0]} and {v.ne[0]}"
        rows = self.p.mean_queries * self.p.gqa
        if self.p.params.score and rows <= FEW_ROWS:
            return f"of few query rows a KV head, here {rows}, the portable kernel has score functions"
        return None

    @cached_property
    def config(self) -> Config:
        return HALF[self.p.k.d]

    @cached_property
    def tiling(self) -> Tiling:
        pack = max(n for n in (1, 2, 4, 8) if self.p.gqa % n == 0)
        return self.p.tiling(self.config.block_m, self.config.block_n, pack)

    @property
    def shared(self) -> int:
        return self.config.shared_bytes(self.p.k.d)

    @property
    def workers(self) -> str:
        return f"{self.config.n_wg} warpgroups multiply, a warp brings K, one V by TMA"

    def main_launch(self, arguments: dict[str, Any]) -> Launch:
        p, c = self.p, self.config
        assert p.v_t is not None
        spec = TileSpec(
            visits_one=True,
            d=p.k.d,
            n_wg=c.n_wg,
            pingpong=c.pingpong,
            large_cap=p.params.softcap >= LARGE_CAP,
            **self._constants(),
            **gluon_score.functions_of(p.params),
        )
        pieces = c.block_n // rows_of_box(p.page, c.block_n)
        args = arguments | {
            "k_desc": self._boxes(p.k_t, p.k), "v_desc": self._boxes(p.v_t, p.v),
            "registers": max(n for at_least, n in PRODUCER_REGISTERS.items() if pieces >= at_least), "spec": spec,
            "score": score_numbers(p),
        }  # fmt: skip
        return Launch(hopper_varlen_attn, (self.choice.programs,), args, self._options(c.registers_at_start))


class VarlenLatent(VarlenHopper):
    """attend_latent.py: MLA's shape."""

    name = kernel = "hopper_varlen_mla"
    file = "varlen/attend_latent.py"
    turn = 5
    more = 1

    def _why_not(self) -> str | None:
        p = self.p
        if p.k.d != D_K or p.v.d != D_V:
            return f"heads must be of {D_K} and {D_V}, they are of {p.k.d} and {p.v.d}"
        if not p.v_in_k or p.k.kind not in HALF_KINDS:
            return "V must be the first columns of K's rows, in f16 or bf16"
        return None

    @cached_property
    def config(self) -> MlaConfig:
        return MLA

    @property
    def shared(self) -> int:
        return self.config.shared_bytes

    @property
    def workers(self) -> str:
        return "a warpgroup scores, 2 add up halves of V, 2 warps bring K by TMA"

    def main_launch(self, arguments: dict[str, Any]) -> Launch:
        p, c = self.p, self.config
        few = p.n_q * self.tiling.pack <= 16
        spec = MlaSpec(n_wg=1, d_v=D_V, early_decay=c.early_decay, rows=16 if few else WG_ROWS, **self._constants())
        args = arguments | {"k_desc": self._boxes(p.k_t, p.k), "spec": spec}
        # 128 registers: of the 512 threads at the start an even share.
        return Launch(hopper_varlen_mla, (self.choice.programs,), args, self._options(128))
