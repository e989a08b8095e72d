"""Programs: what Backend.compile returns. A program runs a split's groups of nodes, and can be asked how.

    program()                       runs all groups once
    for step in program.steps:      one for each group that does work, in order
        step.group, step.launches   the nodes, and what is launched for them
        step.choice                 what the backend decided and why, and what it refused

Debug tools read programs and know no backend's classes. Describing is optional: a plain Program(groups, run) has one
step a group that tells nothing more. A backend that knows more subclasses Program and gives `steps` when asked, so that
preparing a graph does not pay for it.

This module knows no backend and no op: launches, choices and tiles are data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from graphrt.op import op_spec
from graphrt.tensor import Tensor

Run = Callable[[], object]
#: What a sentence is about, and the sentence: ("why", "not hopper: it takes rows of 64 to 256").
Fact = tuple[str, str]
#: The values of an attention's mask, f16 [ne3, ne2, n_q, n_kv], or None where they are not known.
MaskValues = npt.NDArray[np.float16] | None


@dataclass(eq=False)
class Group:
    """Nodes that run as one step. label: what runs ("RMS_NORM+MUL"). Only `results` must be in memory afterwards.

    fusion: the graphrt.fusion.Fusion that found it, None for a node by itself; captured: its nodes by name, in a record
    of the fusion's own, so that the lowering need not look for them again. private: those of the results that nobody
    but nodes of the same split reads, so that the backend may keep them in a form of its own; their memory is then not
    as the graph says."""

    nodes: list[Tensor]
    label: str = ""
    kernel: Any = None
    results: list[Tensor] = field(default_factory=list)
    private: list[Tensor] = field(default_factory=list)
    captured: Any = None
    fusion: Any = None

    def __post_init__(self) -> None:
        self.label = self.label or "+".join(n.op for n in self.nodes)
        self.results = self.results or [self.nodes[-1]]

    @property
    def working(self) -> list[Tensor]:
        """The nodes that compute something: all but views."""
        return [n for n in self.nodes if not op_spec(n.op).is_view]

    def of(self, twin: Callable[[Tensor], Tensor]) -> Group:
        """The same group of another graph's nodes. twin: gives the tensor there that stands for one of this graph."""

        def each(found: Any) -> Any:
            if isinstance(found, Tensor):
                return twin(found)
            if isinstance(found, tuple) and hasattr(found, "_fields"):
                return type(found)(*map(each, found))
            return type(found)(map(each, found)) if isinstance(found, (tuple, list)) else found

        nodes, results, private = each(self.nodes), each(self.results), each(self.private)
        return Group(nodes, self.label, self.kernel, results, private, each(self.captured), self.fusion)


@dataclass(frozen=True)
class Use:
    """Bytes [start, stop) of a storage that a launch touches.

    name: of the kernel's parameter; storage: a number that is the same for all looks at the same memory; early: touched
    before the launch has waited for the one before it; uncached: read past the nearest cache.
    """

    name: str
    storage: int
    start: int
    stop: int
    reads: bool
    writes: bool
    early: bool = False
    uncached: bool = False

    def meets(self, other: Use) -> bool:
        """They have bytes in common, and one of them writes."""
        shared = self.storage == other.storage and self.start < other.stop and other.start < self.stop
        return shared and (self.writes or other.writes)


@dataclass(frozen=True)
class LaunchInfo:
    """One launch of a step.

    name: the kernel's, or the library function's; grid: programs, None for a call of a library; warps: of a program;
    constants: what the kernel is compiled with; helper: it only prepares or finishes what the step's other launches do;
    uses: all memory that it touches. starts_early: it may begin before the launch before it has ended; waits: it waits
    for that one then; lets_go_early: it lets the next one begin before it has waited itself.
    """

    name: str
    grid: tuple[int, ...] | None = None
    warps: int | None = None
    constants: tuple[tuple[str, Any], ...] = ()
    helper: bool = False
    uses: tuple[Use, ...] = ()
    starts_early: bool = False
    waits: bool = True
    lets_go_early: bool = False


class TilePart(Protocol):
    """What a program does of one tile: units start..stop of it, counted from the tile's first.

    needs_fixup: it merges the parts that other programs have of the tile; is_fixup: it is such a part; neither: it has
    the whole tile. slot: where its partial result goes, None if it writes the result.
    """

    @property
    def tile(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def needs_fixup(self) -> bool: ...
    @property
    def is_fixup(self) -> bool: ...
    @property
    def slot(self) -> int | None: ...


@dataclass(frozen=True)
class Bar:
    """A program's work on one tile. start: of it, in units from the launch on."""

    program: int
    segment: TilePart
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.segment.stop - self.segment.start


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Which program of a launch has which part of each tile of a result, in units of work (an attention's k-blocks).

    kernel, schedule: their names; rows, keys: of a tile and of a unit; programs: of the launch; at_once: of them that
    the device runs side by side; join: who merges the parts of a tile, "fixup" for a launch of its own, "kernel" for
    the last of the tile's programs; k_blocks: units of each tile, what the mask leaves of them if its values are known;
    kinds: of units over all tiles whose masks differ ("skipped", "full", "partial"), None for a mask that is not known;
    masked: there is a mask; slots: what each place for a program does, one after the other.
    """

    kernel: str
    schedule: str
    rows: int
    keys: int
    programs: int
    at_once: int
    join: str
    masked: bool
    k_blocks: tuple[int, ...]
    kinds: dict[str, int] | None
    slots: tuple[tuple[Bar, ...], ...]

    @property
    def units(self) -> int:
        """Of all tiles: one with no k-block left takes one unit, to write its result."""
        return sum(max(n, 1) for n in self.k_blocks)

    @property
    def longest(self) -> int:
        """Units until the last program ends, parts' merging left out."""
        return max(slot[-1].stop for slot in self.slots if slot)

    @property
    def busy_percent(self) -> float:
        """The share of places and time in which units are visited."""
        return 100 * self.units / (self.at_once * self.longest)

    @property
    def idle_places(self) -> int:
        """Places that have no program: the launch is too small for the device."""
        return self.at_once - len(self.slots)

    @property
    def bars(self) -> list[Bar]:
        return [bar for slot in self.slots for bar in slot]

    def shared_tiles(self) -> dict[int, int]:
        """The tiles that several programs have parts of, each with how many: those that need fixup."""
        parts = Counter(bar.segment.tile for bar in self.bars)
        return {tile: n for tile, n in sorted(parts.items()) if n > 1}


class Choice:
    """What a backend decided for a step, and why. A backend with more to tell subclasses it.

    kernel: what does most of the work, "" for what the launches' names say; reasons: sentences for it; refused: why
    others that were asked do not serve, by name; schedule: how the work is shared out, "" where one program has each
    piece; mask: the tensor whose values facts() and tiles() can make use of.
    """

    def __init__(
        self,
        kernel: str = "",
        reasons: Sequence[str] = (),
        refused: Mapping[str, str] | None = None,
        schedule: str = "",
        mask: Tensor | None = None,
    ) -> None:
        self.kernel = kernel
        self.reasons = list(reasons)
        self.refused = dict(refused or {})
        self.schedule = schedule
        self.mask = mask

    def facts(self, mask: MaskValues = None) -> Iterable[Fact]:
        """All that people may want to know, in order. mask: values of self.mask."""
        if self.kernel:
            yield "kernel", self.kernel
        yield from (("why", reason) for reason in self.reasons)
        yield from (("why", f"not {name}: {reason}") for name, reason in self.refused.items())
        if self.schedule:
            yield "schedule", self.schedule

    def data(self, mask: MaskValues = None) -> dict[str, Any]:
        """The same for machines: what JSON can spell. Added to a step of `graphrt explain --json`."""
        return {}

    def walk(self, program: int, mask: MaskValues = None) -> Iterable[Fact] | None:
        """What one program of the launch does, in order, None where the step has no plan of tiles. Raises BackendError
        for a program that the launch lacks."""
        return None

    def walk_data(self, program: int, mask: MaskValues = None) -> dict[str, Any] | None:
        """The same for machines."""
        return None

    def tiles(self, mask: MaskValues = None) -> TilePlan | None:
        """Which program has which part of each tile, None where the step does not work in tiles that are planned."""
        return None


@dataclass(frozen=True, eq=False)
class StepInfo:
    """One group of nodes that does work.

    launches: in order, none where the work is calls on the host; runner: who does it then ("native gemv"); choice:
    None where there was nothing to decide. alone: gives what runs this step by itself, for a profiler; None: compiling
    its group by itself gives that. It is made when asked for, since it may take memory of its own.
    """

    group: Group
    launches: tuple[LaunchInfo, ...] = ()
    runner: str = ""
    choice: Choice | None = None
    alone: Callable[[], Run] | None = None

    @property
    def kernel(self) -> str:
        """What does most of the work, as people call it."""
        if self.choice is not None and self.choice.kernel:
            return self.choice.kernel
        names = [x.name for x in self.launches if not x.helper] or [x.name for x in self.launches]
        return " + ".join(dict.fromkeys(names)) or self.runner

    @property
    def schedule(self) -> str:
        """How the work is shared out, "" where one program has each piece."""
        return self.choice.schedule if self.choice is not None else ""


class Program:
    """A compiled split: calling it runs its groups once, in order; `run` does so. See the module's docstring."""

    def __init__(self, groups: Sequence[Group], run: Run) -> None:
        self.groups = list(groups)
        self._run = run

    def __call__(self) -> None:
        self._run()

    @property
    def steps(self) -> Sequence[StepInfo]:
        """One for each group that does work, in order. Made anew whenever it is asked for."""
        return [StepInfo(group, runner="it does not tell") for group in self.working_groups()]

    def working_groups(self) -> Iterator[Group]:
        """The groups with a node that is no view."""
        return (group for group in self.groups if group.working)

    def compile_ahead(self) -> None:
        """(optional) Begins to compile what the first run would, inside Backend.compiling()."""

    def kept_nbytes(self) -> int:
        """(optional) Bytes that it keeps from run to run beside the memory it was given, such as weights in another
        form."""
        return 0

    def redone(self) -> int:
        """(optional) How many pieces of results it has computed twice so far: a backend's fastest kernel may leave what
        it can't do (values that are not finite, say) to another one. The conformance tool holds it against the inputs,
        since a repair that they don't call for hides a defect."""
        return 0


def in_order(runs: Sequence[Run]) -> Run:
    """One function that runs all of them."""
    if len(runs) == 1:
        return runs[0]

    def run() -> None:
        for one in runs:
            one()

    return run
