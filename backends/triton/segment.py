"""A group of nodes with the steps that do its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphrt.program import Choice, Group

if TYPE_CHECKING:  # they import Triton, which whoever lists backends must not wait for
    from graphrt.backends.triton.accesses import Step
    from graphrt.backends.triton.kernels.flash_attn.backward.launcher import BackChosen
    from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen
    from graphrt.backends.triton.kernels.products.forms import Stored
    from graphrt.backends.triton.kernels.products.plan import Planned


@dataclass(frozen=True, eq=False)
class Segment:
    """A group of nodes and the steps that do its work, in order: what a profiler runs and names by itself.

    chosen: of an attention its kernel and schedule (flash_attn/chosen.py), of gradients of one
    those (backward/launcher.py); products: of matrix products their routes
    (kernels/products/plan.py); stored: how the last result lies in memory; joined: of a sum over ranks how
    it is added up."""

    group: Group
    steps: Sequence[Step]
    chosen: Chosen | BackChosen | None = None
    products: Planned | None = None
    stored: Stored | None = None
    joined: Choice | None = None
