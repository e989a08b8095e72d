"""From nodes to launches: which kernels make the gradients of an attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graphrt.backend import Place
from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.backward.kernel import BackKernel
from graphrt.backends.triton.kernels.flash_attn.backward.kernels import back_kernels_of
from graphrt.backends.triton.kernels.flash_attn.backward.problem import BackProblem
from graphrt.backends.triton.kernels.flash_attn.backward.shared import Shared
from graphrt.backends.triton.kernels.flash_attn.fusions import Gradients
from graphrt.tensor import Tensor


@dataclass(frozen=True, eq=False)
class BackChosen:
    """What was decided for the gradients of an attention. kernels: in the order of their launches; refused: why kernels
    that were asked before do not serve, by name."""

    form: str
    problem: BackProblem
    kernels: tuple[BackKernel, ...]
    refused: Mapping[str, str]


class BackLauncher:
    """Makes the launches of a program's gradients of attention. form: one of FORMS. chosen: what each node got."""

    def __init__(self, target: Target, place: Callable[[Tensor], Place], form: str) -> None:
        self.target = target
        self.place = place
        self.form = form
        self.shared = Shared(target)
        self.chosen: dict[Tensor, BackChosen] = {}

    def launches(self, gradients: Gradients) -> list[Step]:
        """Those of one or several gradients of an attention."""
        p = BackProblem(gradients.nodes, self.place)
        left, kernels, refused = list(p.of), list[BackKernel](), dict[str, str]()
        for kind in back_kernels_of(self.target, self.form):
            wanted = [of for of in left if of in kind.makes]
            if not wanted:
                continue
            kernel = kind(p, wanted, self.target)
            reason = kernel.serves()
            if reason is not None:
                refused[kernel.name] = reason
                continue
            kernels.append(kernel)
            left = [of for of in left if of not in wanted]
        assert not left, left
        steps = [step for kernel in kernels for step in kernel.launches(self.shared)]
        self.chosen.update(dict.fromkeys(p.nodes, BackChosen(self.form, p, tuple(kernels), refused)))
        return steps
