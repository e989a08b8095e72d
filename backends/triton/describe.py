"""What a compiled split tells of its steps: launches, and what was chosen for attentions and products, with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from typing import Any

from graphrt.backends.triton.device import Target, current
from graphrt.backends.triton.kernels.flash_attn.backward.facts import gradient_data, gradient_facts
from graphrt.backends.triton.kernels.flash_attn.backward.launcher import BackChosen
from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen
from graphrt.backends.triton.kernels.flash_attn.facts import attention_facts, block_rule_facts, split_cost_facts
from graphrt.backends.triton.kernels.flash_attn.tile_plan import AttentionPlan, attention_plan
from graphrt.backends.triton.kernels.flash_attn.walk import walk_data, walk_facts
from graphrt.backends.triton.kernels.products.forms import Form, Stored
from graphrt.backends.triton.kernels.products.plan import Part, Planned
from graphrt.backends.triton.segment import Segment
from graphrt.program import Choice, Fact, LaunchInfo, MaskValues, Run, StepInfo, in_order


def step_info(segment: Segment, target: Target) -> StepInfo:
    """A segment for those who ask. target: that it was compiled for."""
    launches = tuple(step.info() for step in segment.steps)
    choice: Choice | None = None
    if isinstance(segment.chosen, BackChosen):
        choice = GradientsChoice(segment.chosen)
    elif segment.chosen is not None:
        choice = AttentionChoice(segment.chosen, target)
    elif segment.joined is not None:
        choice = segment.joined
    elif segment.products is not None or segment.stored is not None:
        choice = ProductsChoice(segment.products, segment.stored, _split(launches))
    elif _split(launches):
        choice = Choice(schedule=_split(launches))
    return StepInfo(segment.group, launches, choice=choice, alone=partial(_alone, segment, target))


def _alone(segment: Segment, target: Target) -> Run:
    launches = in_order(segment.steps)

    def run() -> None:
        with current(target.device):
            launches()

    return run


def _split(launches: Sequence[LaunchInfo]) -> str:
    """In how many parts products' inner dimension is split, "" for one."""
    most = max((dict(x.constants).get("n_splits", 1) for x in launches), default=1)
    return f"k split in {most}" if most > 1 else ""


class AttentionChoice(Choice):
    """An attention's kernel, tiles and schedule."""

    def __init__(self, chosen: Chosen, target: Target) -> None:
        schedule = f"{chosen.choice.schedule}, {chosen.programs} programs"
        reasons = (*chosen.choice.reasons, *chosen.problem.built_in)
        super().__init__(chosen.kernel, reasons, chosen.refused, schedule, chosen.problem.mask_t)
        self.chosen, self.target = chosen, target

    def tiles(self, mask: MaskValues = None) -> AttentionPlan:
        return attention_plan(self.chosen, self.target.sm_count, mask)

    def facts(self, mask: MaskValues = None) -> Iterator[Fact]:
        yield from attention_facts(self.tiles(mask))
        yield from split_cost_facts(self.tiles(mask))
        yield from block_rule_facts(self.chosen.problem, self.target.shared_memory)

    def walk(self, program: int, mask: MaskValues = None) -> Iterator[Fact]:
        return walk_facts(self.tiles(mask), program, mask)

    def walk_data(self, program: int, mask: MaskValues = None) -> dict[str, Any]:
        return walk_data(self.tiles(mask), program, mask)

    def data(self, mask: MaskValues = None) -> dict[str, Any]:
        c, plan = self.chosen, self.tiles(mask)
        config = {f.name: getattr(c.config, f.name) for f in fields(c.config)} if is_dataclass(c.config) else None
        choice = asdict(c.choice)
        del choice["efficiency_percent"]  # the chooser's estimate, beside which busy_percent would be a second figure
        return {"attention": {
            "kernel": c.kernel, "refused": dict(c.refused), "workers": c.workers, "stages": c.stages, "config": config,
            "shared_bytes": c.shared, "tiling": asdict(c.tiling), "choice": choice, "programs": c.programs,
            "at_once": plan.at_once, "join": c.join or None, "repairs": c.repairs, "k_blocks": list(plan.k_blocks),
            "mask_blocks": plan.kinds, "longest": plan.longest, "busy_percent": plan.busy_percent,
            "idle_places": plan.idle_places,
            "fixup_tiles": [{"tile": tile, "parts": n} for tile, n in plan.shared_tiles().items()],
            "bars": [
                [b.program, b.start, s.tile, s.start, s.stop, s.needs_fixup, s.is_fixup, s.slot]
                for b in plan.bars for s in [b.segment]
            ],
        }}  # fmt: skip


class GradientsChoice(Choice):
    """The kernels of an attention's gradients, and their form."""

    def __init__(self, chosen: BackChosen) -> None:
        names = ", ".join(kernel.name for kernel in chosen.kernels)
        super().__init__(names, (), chosen.refused, f"form {chosen.form}", chosen.problem.mask_t)
        self.chosen = chosen

    def facts(self, mask: MaskValues = None) -> Iterator[Fact]:
        return gradient_facts(self.chosen)

    def data(self, mask: MaskValues = None) -> dict[str, Any]:
        return {"gradients": gradient_data(self.chosen)}


class ProductsChoice(Choice):
    """What was planned of a step's matrix products (kernels/products/plan.py), and how its result is stored."""

    def __init__(self, planned: Planned | None, stored: Stored | None, schedule: str) -> None:
        self.parts: Sequence[Part] = planned.parts if planned is not None else ()
        refused = {name: f"it {reason}" for part in self.parts for name, reason in part.route.refused.items()}
        super().__init__("", [part.route.reason for part in self.parts], refused, schedule)
        self.stored = stored

    def facts(self, mask: MaskValues = None) -> Iterator[Fact]:
        """Kernels, why these and not others, in what form they read activations; how the result is stored."""
        for part in self.parts:
            of = ", ".join(p.weight.name for p in part.products)
            yield "kernel", part.route.kernel.name + (f", for {of}" if len(self.parts) > 1 else "")
            yield "why", part.route.reason
            for name, reason in part.route.refused.items():
                yield "why", f"not {name}: it {reason}"
            yield "activations", f"read {_read_as(part)}: {part.made.value}"
        if self.parts and self.schedule:
            yield "schedule", self.schedule
        if self.stored is not None and self.stored.form is not Form.AS_IS:
            yield "result", f"stored in {self.stored.form.value}, as all products that read it want it"
        elif self.stored is not None and self.stored.q8_copy:
            yield "result", "stored as the graph has it, and beside that in 8 bits for the products that want them"

    def data(self, mask: MaskValues = None) -> dict[str, Any]:
        products = [
            {
                "kernel": part.route.kernel.name, "reason": part.route.reason, "refused": dict(part.route.refused),
                "weights": [p.weight.name for p in part.products], "form": part.route.form.value,
                "made": part.made.value,
            }
            for part in self.parts
        ]  # fmt: skip
        return {"products": products, "stored": self.stored.form.value if self.stored is not None else None}


def _read_as(part: Part) -> str:
    return "as they are" if part.route.form is Form.AS_IS else f"in {part.route.form.value}"
