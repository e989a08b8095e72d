"""All kernels of attention's gradients, in the order in which they are asked: of what is wanted the first that serves
makes as much as it can, those after it the rest."""

from __future__ import annotations

from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.backward.kernel import BackKernel
from graphrt.backends.triton.kernels.flash_attn.backward.portable import Bias, FusedK, FusedQ, Sinks, SplitKV, SplitQ


def back_kernels_of(target: Target, form: str) -> tuple[type[BackKernel], ...]:
    """The list of a form. The portable kernels, at its end, serve every problem."""
    found: list[type[BackKernel]] = []
    if target.arch == "sm_90":  # Gluon is imported where it is used: other GPUs' Triton may lack it
        from graphrt.backends.triton.kernels.flash_attn.hopper.backward_kernels import (
            HopperBias,
            HopperFused,
            HopperKeys,
            HopperQueries,
        )
        from graphrt.backends.triton.kernels.flash_attn.hopper.backward_packed_kernels import (
            HopperPackedKeys,
            HopperPackedQueries,
        )
        from graphrt.backends.triton.kernels.flash_attn.hopper.backward_stored_kernels import HopperStored

        found += [
            HopperFused,
            HopperStored,
            HopperKeys,
            HopperQueries,
            HopperBias,
            HopperPackedKeys,
            HopperPackedQueries,
        ]
    found += [FusedQ, FusedK, SplitKV, SplitQ, Bias, Sinks]
    return tuple(kind for kind in found if form in kind.forms)
