"""From nodes to launches: which kernel an attention gets, and what it launches."""

from __future__ import annotations

from collections.abc import Callable

from graphrt.backend import Place
from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen
from graphrt.backends.triton.kernels.flash_attn.configs import Config
from graphrt.backends.triton.kernels.flash_attn.fusions import Attention, attention_lse
from graphrt.backends.triton.kernels.flash_attn.kernel import AttentionKernel, Scratch
from graphrt.backends.triton.kernels.flash_attn.kernels import kernels_of, not_of
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlans
from graphrt.backends.triton.kernels.flash_attn.portable import Forward
from graphrt.backends.triton.kernels.flash_attn.problem import Problem
from graphrt.fusion import Fusion
from graphrt.tensor import Tensor


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
        self.scratch = Scratch(target.device)
        self.chosen: dict[Tensor, Chosen] = {}

    def launches(self, attention: Attention) -> list[Step]:
        """The launches of FLASH_ATTN_EXT, FLASH_ATTN_LSE, or both of the same sources."""
        p = Problem(attention, self.place)
        kernel, refused = self._first(p)
        plan, steps = None, list[Step]()
        if p.mask_t is not None:
            plan, made = self.masks.plan(p, kernel.tiling, kernel.needs_units)
            steps += made
        steps += kernel.launches(plan, plan is not None and not steps, self.scratch)
        self.chosen.update(dict.fromkeys(p.nodes, kernel.chosen(refused)))
        return steps

    def _first(self, p: Problem) -> tuple[AttentionKernel, dict[str, str]]:
        """The first kernel that serves a problem, and why those before it do not."""
        kinds, refused = kernels_of(self.target), not_of(self.target)
        if self.config is not None:
            refused = {kind.name: "the portable kernel's config is forced" for kind in kinds if kind is not Forward}
            return Forward(p, self.target, self.schedule, self.config), refused
        for kind in kinds:
            kernel = kind(p, self.target, self.schedule)
            reason = kernel.serves()
            if reason is None:
                break
            refused[kernel.name] = reason
        return kernel, refused


#: Lowered by a Launcher, as attentions by themselves are.
ATTENTION_LSE = Fusion("attention_lse", attention_lse, exact=True)
