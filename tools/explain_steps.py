"""A prepared graph step by step: who runs each group of nodes, in which launches, and what it takes at the ceilings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from graphrt.backend import Backend, Buffer, Group
from graphrt.backends.cpu import CpuBackend
from graphrt.backends.triton import TritonBackend
from graphrt.backends.triton.accesses import Call
from graphrt.backends.triton.capture import Captured, Segment
from graphrt.backends.triton.packing import PackedBuffer
from graphrt.execute import Executable, PreparedSplit
from graphrt.op import Work, op_spec
from graphrt.tensor import Tensor
from graphrt.tools.describe import GraphInfo, describe
from graphrt.tools.explain_attention import AttentionPlan, attention_plan
from graphrt.tools.explain_devices import Cost, KnownDevice, device_called
from graphrt.tools.explain_masks import default_depth, mask_name, masks_of
from graphrt.tools.profile import group_work, shares_of
from graphrt.tools.subject import Subject

if TYPE_CHECKING:
    from graphrt.backends.triton.kernels.products.forms import Stored
    from graphrt.backends.triton.kernels.products.plan import Planned

#: Launches that only prepare or finish what the others do; they name a step where it has no others.
HELPERS = {
    "round_rows", "finish", "finish_rounded", "rescale_rows", "classify_blocks", "list_blocks", "sum_units",
    "flash_attn_fixup", "copy", "fill_table",
}  # fmt: skip


@dataclass(frozen=True)
class LaunchInfo:
    """kernel: the function; grid: programs, None for a call of torch; warps: of a program; constants: what the kernel
    is compiled with."""

    kernel: str
    grid: tuple[int, ...] | None = None
    warps: int | None = None
    constants: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Step:
    """One group of nodes. group: its index in the description; nodes: those that do work; cause: why this backend;
    refused: other backends' reasons; launches: in order; runner: the function, of a backend that launches nothing;
    attention: its plan; products, stored: of a step of the GPU backend what it planned of matrix products, and how the
    result is stored; cost: None where the device's ceilings are not known."""

    group: int
    nodes: tuple[Tensor, ...]
    backend: Backend
    cause: str
    refused: dict[str, str]
    launches: tuple[LaunchInfo, ...]
    runner: str
    attention: AttentionPlan | None
    products: Planned | None
    stored: Stored | None
    work: Work
    cost: Cost | None

    @property
    def kernel(self) -> str:
        """What does most of the work."""
        names = [x.kernel for x in self.launches]
        if self.attention is not None:
            names = [self.attention.chosen.kernel]
        return " + ".join(dict.fromkeys([n for n in names if n not in HELPERS] or names)) or self.runner

    @property
    def schedule(self) -> str:
        """How the work is shared out, "" where one program has each piece."""
        if self.attention is not None:
            choice = self.attention.chosen.choice
            return f"{choice.schedule}, {self.attention.chosen.programs} programs"
        splits = [dict(x.constants).get("n_splits", 1) for x in self.launches]
        return f"k split in {max(splits)}" if max(splits, default=1) > 1 else ""


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
    planned, exe = device is not None, subject.executable
    device = device or _device_here(exe)
    masks = masks_of(subject, depth)
    seen = {name: shares_of(mask) for name, mask in masks.items()}
    info = describe(exe, subject.title, subject.phase, subject.n_tokens)
    steps, first = [], 0
    for split in exe.splits:
        numbers = {id(group): first + i for i, group in enumerate(split.groups)}
        first += len(split.groups)
        for group, segment in _groups(split):
            steps.append(_Maker(exe, split.backend, group, segment, device).step(numbers[id(group)], masks, seen))
    held = default_depth(subject) if depth is None else depth
    return Explained(subject, info, device, planned, held, tuple(steps))


def _device_here(exe: Executable) -> KnownDevice | None:
    """The GPU that runs a part of the graph, if its ceilings are known."""
    backends = [split.backend for split in exe.splits]
    places = [b.target.device for b in backends if isinstance(b, TritonBackend) and b.target.device.startswith("cuda")]
    return device_called(torch.cuda.get_device_name(places[0])) if places else None


def _groups(split: PreparedSplit) -> list[tuple[Group, Segment | None]]:
    """The groups that do work; of the GPU backend with what they were lowered to."""
    if isinstance(split.run, Captured):
        return [(segment.group, segment) for segment in split.run.segments]
    return [(g, None) for g in split.groups if not all(op_spec(n.op).is_view for n in g.nodes)]


@dataclass(frozen=True, eq=False)
class _Maker:
    exe: Executable
    backend: Backend
    group: Group
    segment: Segment | None
    device: KnownDevice | None

    def step(self, number: int, masks: dict[str, Any], seen: dict[str, tuple[float, float]]) -> Step:
        nodes = tuple(n for n in self.group.nodes if not op_spec(n.op).is_view)
        launches = tuple(self._launch(s) for s in self.segment.steps) if self.segment is not None else ()
        local = {v: k for k, v in self.exe.schedule.local.items()}
        asked = local.get(nodes[0], nodes[0])
        work = self._work(nodes, seen)
        on_gpu = self.device is not None and isinstance(self.backend, TritonBackend)
        cost = self.device.cost(work, len(launches)) if self.device is not None and on_gpu else None
        return Step(
            number, nodes, self.backend, self.exe.schedule.assignments[asked].cause,
            self.exe.schedule.refusals.get(asked, {}), launches, self._runner(), self._attention(masks),
            self.segment.products if self.segment else None, self.segment.stored if self.segment else None, work, cost,
        )  # fmt: skip

    def _launch(self, step: Callable[[], None]) -> LaunchInfo:
        info, chosen = launch_info(step), self.segment.chosen if self.segment is not None else None
        if chosen is not None and info.grid is None:  # Hopper's kernels are launched by functions of their own
            config = tuple((f.name.upper(), getattr(chosen.config, f.name)) for f in fields(chosen.config))
            return replace(info, grid=(chosen.programs,), constants=config)
        return info

    def _work(self, nodes: Sequence[Tensor], seen: dict[str, tuple[float, float]]) -> Work:
        """A group's work, with weights as they lie packed."""
        flops, moved = group_work(self.group, seen)
        for node in nodes:
            weight = node.src[0]
            if node.op == "MUL_MAT" and weight is not None and (buffer := self._packed(weight)) is not None:
                moved += buffer.footprint - buffer.nbytes
        return Work(flops, moved)

    def _packed(self, weight: Tensor) -> PackedBuffer | None:
        buffer: Buffer = self.exe.place(weight)[0]
        return buffer if isinstance(buffer, PackedBuffer) else None

    def _runner(self) -> str:
        if isinstance(self.backend, CpuBackend):
            return self.backend.runner(self.group, self.exe.place)
        return "" if self.segment is not None else "it does not tell"

    def _attention(self, masks: dict[str, Any]) -> AttentionPlan | None:
        if self.segment is None or self.segment.chosen is None:
            return None
        assert isinstance(self.backend, TritonBackend)
        mask = self.segment.chosen.problem.mask_t
        known = masks.get(mask_name(mask)) if mask is not None else None
        return attention_plan(self.segment.chosen, self.backend.target.sm_count, known)


def launch_info(step: Callable[[], None]) -> LaunchInfo:
    """What a step of the GPU backend launches: a kernel with its arguments, or a function that calls torch."""
    from graphrt.backends.triton.launch import Launch  # imports Triton, which is there where something is lowered

    if isinstance(step, Launch):
        args = step.args | (vars(step.args["form"]) if "form" in step.args else {})  # a kernel's choices in one record
        chosen = {k for k in args if k.isupper() or k == "n_splits" or k not in step.args}
        constants = tuple((k, v) for k, v in args.items() if k in chosen and _is_plain(v))
        return LaunchInfo(step.kernel.__name__, tuple(step.grid), step.options.get("num_warps", 4), constants)
    assert isinstance(step, Call)
    return LaunchInfo(step.name)


def _is_plain(value: object) -> bool:
    """Worth showing: a number or a word that says something."""
    return isinstance(value, (int, float, str)) and value is not False and value != ""
