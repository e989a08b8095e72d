"""Which of Hopper's own kernels a prefill gets, and its launch. Imports Gluon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphrt.backends.triton.kernels.flash_attn import hopper, hopper_mla
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.kernels.flash_attn.problem import Problem
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor


@dataclass(frozen=True)
class Kernel:
    """config: of its own kind, with block_m and block_n; pack: heads a tile, None for as many as fit; run: called as

    run(q, k, v, out, **keywords) with torch tensors."""

    config: Any
    pack: int | None
    run: Callable[..., None]

    def launch(self, p: Problem, plan: MaskPlan | None, bad: torch.Tensor | None) -> Callable[[], None]:
        """The launch over a problem. plan, bad: of its mask, None without one."""
        assert p.v_t is not None and p.out is not None
        q = _as_torch(p.q_t, p.memory(p.q_t, torch.float32))
        k, v = _as_torch(p.k_t, p.k.data), _as_torch(p.v_t, p.v.data)
        out = p.memory(p.out, torch.float32).view(p.n_seq, p.n_q, p.n_head, p.v.d)
        keywords: dict[str, Any] = {"scale": p.params.scale, "softcap": p.params.softcap, "config": self.config}
        keywords["sinks"] = p.memory(p.sinks_t, torch.float32) if p.sinks_t is not None else None
        keywords["lse"] = p.memory(p.lse, torch.float32) if p.lse is not None else None
        if plan is not None and p.mask_t is not None:
            slopes = torch.tensor(alibi_slopes(p.n_head, p.params.max_bias), device=out.device)
            keywords |= {
                "mask": _as_torch(p.mask_t, p.memory(p.mask_t, torch.float16)), "counts": plan.counts,
                "blocks": plan.blocks, "bad": bad, "slopes": slopes if p.params.max_bias > 0 else None,
            }  # fmt: skip
        return partial(self.run, q, k, v, out, **keywords)


def find(p: Problem) -> Kernel | None:
    """The kernel for a problem, None where none serves."""
    mla = hopper_mla.config_for(p)
    if mla is not None:
        pack = max(n for n in range(1, min(p.gqa, mla.block_m) + 1) if p.gqa % n == 0)
        return Kernel(mla, pack, partial(_mla, pack))
    config = hopper.config_for(p)
    return None if config is None else Kernel(config, 1, hopper.hopper_flash_attn)


def _mla(pack: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, **keywords: Any) -> None:
    hopper_mla.hopper_mla_attn(q, k, out, pack=pack, **keywords)


def _as_torch(t: Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A tensor in torch's shape and strides over its memory."""
    size = t.dtype.type_size
    return memory.as_strided(t.shape, [n // size for n in t.nb[::-1]])
