"""Which of Hopper's own kernels a prefill gets, and its launch. Imports Gluon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphrt.backends.triton.accesses import Call
from graphrt.backends.triton.kernels.flash_attn import hopper_launch, hopper_mla, hopper_quant
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

#: Who does what in a program of each kernel.
WORKERS = {
    "hopper": "warpgroups multiply, a warp brings K and V by TMA",
    "hopper_quant": "warpgroups multiply, one unpacks K and V",
    "hopper_mla": "a warpgroup scores, 2 add up halves of V, a warp brings K by TMA",
}


@dataclass(frozen=True)
class Kernel:
    """name: of the function that launches it; config: of its own kind, with block_m and block_n; pack: heads a tile;

    shared: bytes of shared memory of a program; workers: who does what in it; run: called as run(q, out=out,
    **keywords) with torch tensors; kv: K and V, which are bound in it already."""

    name: str
    config: Any
    pack: int
    shared: int
    workers: str
    run: partial[None]
    kv: tuple[torch.Tensor, ...]

    def launch(
        self, p: Problem, plan: MaskPlan | None, bad: torch.Tensor | None, ranges: hopper_mla.Ranges | None = None
    ) -> Call:
        """The launch over a problem. plan: of its mask, None without one; bad [tiles]: set where it is to do again;

        ranges: for the form that shares tiles out."""
        assert p.out is not None
        q = _as_torch(p.q_t, p.memory(p.q_t, torch.float32))
        out = p.memory(p.out, torch.float32).view(p.n_seq, p.n_q, p.n_head, p.v.d)
        keywords: dict[str, Any] = {"scale": p.params.scale, "softcap": p.params.softcap, "config": self.config}
        keywords["sinks"] = p.memory(p.sinks_t, torch.float32) if p.sinks_t is not None else None
        keywords["bad"] = bad
        keywords["lse"] = p.memory(p.lse, torch.float32) if p.lse is not None else None
        if plan is not None and p.mask_t is not None:
            slopes = torch.tensor(alibi_slopes(p.n_head, p.params.max_bias), device=out.device)
            keywords |= {
                "mask": _as_torch(p.mask_t, p.memory(p.mask_t, torch.float16)), "counts": plan.counts,
                "blocks": plan.blocks, "slopes": slopes if p.params.max_bias > 0 else None,
            }  # fmt: skip
        if ranges is not None:
            keywords["ranges"] = ranges
        reads = [q, *self.kv, *(keywords.get(name) for name in ("sinks", "mask", "counts", "blocks", "slopes"))]
        reads += [ranges.seen, ranges.unit_start] if ranges is not None else []
        writes = [out, bad, keywords["lse"], ranges.part if ranges is not None else None]
        run = partial(self.run, q, out=out, **keywords)
        return Call(self.run.func.__name__, run, reads, writes, starts_early=ranges is not None and ranges.pdl)


def find(p: Problem, refused: dict[str, str] | None = None) -> Kernel | None:
    """The kernel for a problem, None where none serves. refused: gets the reasons of those that don't, by name."""
    for name, make in _KERNELS.items():
        kernel = make(p)
        if isinstance(kernel, Kernel):
            return kernel
        if refused is not None:
            refused[name] = kernel
    return None


def find_shared_out(p: Problem, refused: dict[str, str] | None = None) -> Kernel | None:
    """The kernel for a problem of few tiles, which programs share; None where none serves. refused: as find's."""
    config = hopper_mla.shared_out_config_for(p)
    if not isinstance(config, str):
        return _mla_kernel(p, config)
    if refused is not None:
        refused["hopper_mla, tiles shared out"] = config
    return None


def ranges_of(args: dict[str, Any]) -> hopper_mla.Ranges:
    """How the portable kernel's arguments (portable.py) share the tiles out. One program a tile is a split in one."""
    return hopper_mla.Ranges(
        part=args["p_part"], programs=args["programs"], splits=args["splits"] if args["RANGES"] else 1,
        seen=args["p_seen"] if args["HAS_MASK"] else None, unit_start=None if args["UNIFORM"] else args["p_unit_start"],
        uniform=args["UNIFORM"] or not args["HAS_MASK"], pdl=args["PDL"],
    )  # fmt: skip


def _mla(p: Problem) -> Kernel | str:
    config = hopper_mla.config_for(p)
    return config if isinstance(config, str) else _mla_kernel(p, config)


def _mla_kernel(p: Problem, config: hopper_mla.Config) -> Kernel:
    k, pack = _as_torch(p.k_t, p.k.data), Tiling.of(p, config.block_m, config.block_n).pack
    run = partial(hopper_mla.hopper_mla_attn, k=k, pack=pack)
    return Kernel("hopper_mla", config, pack, hopper_mla.shared_bytes(config), WORKERS["hopper_mla"], run, (k,))


def _half(p: Problem) -> Kernel | str:
    config = hopper_launch.config_for(p)
    if isinstance(config, str):
        return config
    assert p.v_t is not None
    k, v = _as_torch(p.k_t, p.k.data), _as_torch(p.v_t, p.v.data)
    # Heads that share a mask's rows share a tile: a mask is then read once for all of them.
    pack = max(n for n in (1, 2, 4, 8) if p.gqa % n == 0) if p.mask_t is not None and p.m2 == 1 else 1
    run = partial(hopper_launch.hopper_flash_attn, k=k, v=v, pack=pack)
    workers = f"{config.n_wg} {WORKERS['hopper']}"
    return Kernel("hopper", config, pack, hopper_launch.shared_bytes(p.k.d, config), workers, run, (k, v))


def _quantized(p: Problem) -> Kernel | str:
    config = hopper_quant.config_for(p)
    if isinstance(config, str):
        return config
    k, v = p.k, p.v
    run = partial(
        hopper_quant.hopper_quant_attn, k_words=k.data, v_words=v.data, k_kind=k.kind, v_kind=v.kind,
        k_strides=k.strides, v_strides=v.strides, n_kv=p.n_kv, n_head_kv=p.n_head // p.gqa,
    )  # fmt: skip
    workers = f"{config.n_wg} {WORKERS['hopper_quant']}"
    return Kernel("hopper_quant", config, 1, hopper_launch.shared_bytes(k.d, config), workers, run, (k.data, v.data))


#: By the module's name and form, in the order in which they are asked.
_KERNELS: dict[str, Callable[[Problem], Kernel | str]] = {
    "hopper_mla, a tile each": _mla, "hopper": _half, "hopper_quant": _quantized,
}  # fmt: skip


def _as_torch(t: Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A tensor in torch's shape and strides over its memory."""
    size = t.dtype.type_size
    return memory.as_strided(t.shape, [n // size for n in t.nb[::-1]])
