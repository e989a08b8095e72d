"""A prepared graph step by step: who runs each group of nodes, in which launches, and what it takes at the ceilings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphrt.backend import Backend
from graphrt.execute import Executable
from graphrt.op import Work
from graphrt.program import Choice, Fact, LaunchInfo, MaskValues, StepInfo, TilePlan
from graphrt.tensor import Tensor
from graphrt.tools.explain.devices import Cost, KnownDevice, device_called
from graphrt.tools.explain.masks import default_depth, masks_of
from graphrt.tools.inspect.describe import GraphInfo, describe
from graphrt.tools.inspect.subject import Subject
from graphrt.tools.profile.masks import shares_of
from graphrt.work import group_work, mask_name


@dataclass(frozen=True, eq=False)
class Step:
    """One group of nodes. group: its index in the description; nodes: those that do work; cause: why this backend;
    refused: other backends' reasons; told: what the backend's program tells of it; mask: values of the mask that its
    choice can make use of, None where they are not known; cost: None where the device's ceilings are not known."""

    group: int
    nodes: tuple[Tensor, ...]
    backend: Backend
    cause: str
    refused: dict[str, str]
    told: StepInfo
    mask: MaskValues
    work: Work
    cost: Cost | None

    @property
    def launches(self) -> tuple[LaunchInfo, ...]:
        return self.told.launches

    @property
    def runner(self) -> str:
        """The function, of a backend that launches nothing."""
        return self.told.runner

    @property
    def kernel(self) -> str:
        """What does most of the work."""
        return self.told.kernel

    @property
    def schedule(self) -> str:
        """How the work is shared out, "" where one program has each piece."""
        return self.told.schedule

    @property
    def _choice(self) -> Choice:
        return self.told.choice if self.told.choice is not None else Choice()

    @property
    def facts(self) -> list[Fact]:
        """What the backend decided, and why."""
        return list(self._choice.facts(self.mask))

    @property
    def data(self) -> dict[str, Any]:
        """The same for machines."""
        return self._choice.data(self.mask)

    def walk(self, program: int) -> Iterable[Fact] | None:
        """What one program of the launch does, None for what works without a plan of tiles."""
        return self._choice.walk(program, self.mask)

    def walk_data(self, program: int) -> dict[str, Any] | None:
        """The same for machines."""
        return self._choice.walk_data(program, self.mask)

    @property
    def tiles(self) -> TilePlan | None:
        """Which program has which part of each tile, None for what works without a plan of tiles."""
        return self._choice.tiles(self.mask)


@dataclass(frozen=True, eq=False)
class Explained:
    """subject; info: its description; device: whose ceilings are meant, None for unknown ones; planned: for a GPU that
    need not be here; depth: tokens in the cache before; steps in order."""

    subject: Subject
    info: GraphInfo
    device: KnownDevice | None
    planned: bool
    depth: int
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float | None:
        """What all steps take at the ceilings; those whose ceilings are not known left out; None if all are."""
        return seconds_of(self.steps)


def seconds_of(steps: Sequence[Step]) -> float | None:
    """What steps take at the ceilings, as far as these are known; None for none."""
    costs = [step.cost.seconds for step in steps if step.cost is not None]
    return sum(costs) if costs else None


def explained(subject: Subject, depth: int | None = None, device: KnownDevice | None = None) -> Explained:
    """What runs. depth: see masks_of(); device: that it was planned for, None for the one that is here.

    Raises SessionError for a depth that does not fit.
    """
    exe, masks = subject.executable, masks_of(subject, depth)
    seen = {name: shares_of(mask) for name, mask in masks.items()}
    info = describe(exe, subject.title, subject.phase, subject.n_tokens)
    steps: list[Step] = []
    first, meant = 0, device
    for split in exe.splits:
        numbers = {id(group): first + i for i, group in enumerate(split.groups)}
        first += len(split.groups)
        known = _ceilings(split.backend, device)
        meant = meant or known
        steps += [_step(exe, split.backend, t, numbers[id(t.group)], masks, seen, known) for t in split.run.steps]
    held = default_depth(subject) if depth is None else depth
    return Explained(subject, info, meant, device is not None, held, tuple(steps))


def _ceilings(backend: Backend, planned: KnownDevice | None) -> KnownDevice | None:
    """What a backend's device does at best: the one that was planned for, of a backend whose device is not here."""
    if backend.device is None or planned is not None:
        return planned if backend.device is None else None
    return device_called(backend.device.description)


def _step(
    exe: Executable,
    backend: Backend,
    told: StepInfo,
    number: int,
    masks: Mapping[str, Any],
    seen: Mapping[str, tuple[float, float]],
    device: KnownDevice | None,
) -> Step:
    nodes = tuple(told.group.working)
    local = {v: k for k, v in exe.schedule.local.items()}
    asked = local.get(nodes[0], nodes[0])
    mask = told.choice.mask if told.choice is not None else None
    work = _work(exe, told, seen)
    return Step(
        number, nodes, backend, exe.schedule.assignments[asked].cause, exe.schedule.refusals.get(asked, {}), told,
        masks.get(mask_name(mask)) if mask is not None else None, work,
        device.cost(work, len(told.launches)) if device is not None else None,
    )  # fmt: skip


def _work(exe: Executable, told: StepInfo, seen: Mapping[str, tuple[float, float]]) -> Work:
    """A group's work, with weights as they lie in memory."""
    flops, moved = group_work(told.group, seen)
    for node in told.group.working:
        if node.op == "MUL_MAT":
            buffer = exe.place(node["weights"])[0]
            moved += buffer.footprint - buffer.nbytes
    return Work(flops, moved)
