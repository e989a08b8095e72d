"""From groups of nodes to steps: kernel launches with all their arguments, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphrt.backend import Group
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels import (
    collectives,
    copy,
    elementwise,
    kq_mask,
    norm,
    penalize,
    rope,
    rows,
    sample,
    soft_max,
    sort,
)
from graphrt.backends.triton.kernels.backward import loss, movement
from graphrt.backends.triton.kernels.backward import rows as rows_back
from graphrt.backends.triton.kernels.backward import steps as opt_steps
from graphrt.backends.triton.kernels.experts import back as experts_back
from graphrt.backends.triton.kernels.experts import lower as experts
from graphrt.backends.triton.kernels.flash_attn.append_fusions import BlockAppend, PanelAppend
from graphrt.backends.triton.kernels.flash_attn.fusions import BACK, Gradients, attention_of
from graphrt.backends.triton.kernels.flash_attn.launcher import Launcher
from graphrt.backends.triton.kernels.products import lower as products
from graphrt.backends.triton.kernels.products.plan import planned
from graphrt.backends.triton.kernels.products.rotated import lower_rotated_projections
from graphrt.backends.triton.kernels.products.rotated_fusions import RotatedProjections
from graphrt.backends.triton.kernels.rope_fusions import RopeCacheAttention
from graphrt.backends.triton.segment import Segment
from graphrt.tensor import Tensor

Lowering = Callable[[Sequence[Tensor], Context], list[Step]]

#: By op, for nodes that run by themselves.
OPS: dict[str, Lowering] = {
    **elementwise.LOWERINGS, **norm.LOWERINGS, **soft_max.LOWERINGS, **rows.LOWERINGS, **copy.LOWERINGS,
    **rope.LOWERINGS, **sample.LOWERINGS, **penalize.LOWERINGS, **sort.LOWERINGS, **kq_mask.LOWERINGS,
    **products.LOWERINGS, **experts.LOWERINGS, **rows_back.LOWERINGS, **movement.LOWERINGS, **loss.LOWERINGS,
    **opt_steps.LOWERINGS, **experts_back.LOWERINGS, **collectives.LOWERINGS,
}  # fmt: skip


def lower(groups: Sequence[Group], ctx: Context, attention: Launcher) -> list[Segment]:
    """The steps of a split, group by group. attention: makes the launches of all FLASH_ATTN ops."""
    segments: list[Segment] = []
    plan = ctx.plan = planned(groups, ctx)
    for group in groups:
        nodes = group.working
        if not nodes:
            continue
        if nodes[0].op.startswith("FLASH_ATTN"):
            alone = Gradients((nodes[0],)) if nodes[0].op in BACK else attention_of(nodes[0])
            steps = attention.launches(group.captured or alone)
        elif isinstance(group.captured, RopeCacheAttention):
            steps = attention.appended(group.captured, ctx)
        elif isinstance(group.captured, PanelAppend):
            steps = attention.panel_append(group.captured, ctx)
        elif isinstance(group.captured, BlockAppend):
            steps = attention.block_append(group.captured, ctx)
        elif isinstance(group.captured, RotatedProjections):
            steps = lower_rotated_projections(group.captured, ctx)
        elif group.fusion is not None:
            steps = group.fusion.lower(group.captured, ctx)
        else:
            steps = OPS[nodes[0].op](nodes, ctx)
        made = next((plan.products[n] for n in nodes if n in plan.products), None)
        stored = plan.stored.get(group.results[-1])
        of_last = attention.chosen.get(nodes[-1])  # an attention behind what is done with it
        chosen = attention.chosen.get(nodes[0]) or of_last or attention.backward.chosen.get(nodes[0])
        segments.append(Segment(group, steps, chosen, made, stored, ctx.choices.get(nodes[0])))
    return segments
