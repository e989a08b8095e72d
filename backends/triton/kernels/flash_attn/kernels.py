"""All attention kernels of a GPU, in the order in which they are asked: the first that serves a problem gets it."""

from __future__ import annotations

from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.kernel import AttentionKernel
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.kernels.flash_attn.portable import Forward
from graphrt.backends.triton.kernels.flash_attn.problem import Problem
from graphrt.backends.triton.kernels.flash_attn.varlen.launch import VarlenForward, VarlenKernel


def kernels_of(target: Target) -> tuple[type[AttentionKernel[Problem, MaskPlan]], ...]:
    """The list. Gluon is imported where it is used: other GPUs' Triton may lack it."""
    found: list[type[AttentionKernel[Problem, MaskPlan]]] = []
    if target.arch == "sm_90":
        from graphrt.backends.triton.kernels.flash_attn.hopper.kernels import (
            Float8Tiles,
            HalfTiles,
            MlaShared,
            MlaTiles,
            QuantTiles,
        )

        found += [MlaTiles, HalfTiles, Float8Tiles, QuantTiles, MlaShared]
    if target.is_nvidia:
        from graphrt.backends.triton.kernels.flash_attn.decode_launch import Decode

        found.append(Decode)
    return (*found, Forward)


def varlen_kernels_of(target: Target) -> tuple[type[VarlenKernel], ...]:
    """The list of those that take packed queries of sequences of any length."""
    found: list[type[VarlenKernel]] = []
    if target.is_nvidia:
        from graphrt.backends.triton.kernels.flash_attn.varlen.decode_launch import VarlenDecode

        found.append(VarlenDecode)
    if target.arch == "sm_90":
        from graphrt.backends.triton.kernels.flash_attn.varlen.hopper_launch import VarlenLatent, VarlenTiles

        found += [VarlenLatent, VarlenTiles]
    return (*found, VarlenForward)


def not_of(target: Target) -> dict[str, str]:
    """Why kernels that other GPUs have are not in its list, by their names."""
    missing = {}
    if target.arch != "sm_90":
        missing["hopper kernels"] = f"they are sm_90's, this is {target.arch}"
    if not target.is_nvidia:
        missing["decode"] = "it is NVIDIA's"
    return missing
