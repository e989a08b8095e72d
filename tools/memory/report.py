"""What a prepared graph takes of memory: weights, cache, and each backend's arena with its peak. Bytes throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphrt.backend import Usage
from graphrt.execute import Executable
from graphrt.tensor import Tensor
from graphrt.tools.inspect.subject import Subject
from graphrt.tools.memory.lifetimes import ArenaLives, Life, Step, Violation, arenas_of, steps_of, violations

LARGEST = 10


@dataclass(frozen=True)
class Row:
    """Bound tensors that are alike. what: the weights' type, or the cache's kind and side ("full k"); nbytes: as they
    are stored; share: of all weights, or of the whole cache, from 0 to 1."""

    what: str
    dtype: str
    backend: str
    count: int
    nbytes: int
    share: float


@dataclass(frozen=True)
class Peak:
    """The first step at which the most is alive. nbytes: of what is alive, with the rounding up to the alignment; top:
    the highest byte in use there; lives: what is alive, the largest first."""

    step: int
    nbytes: int
    top: int
    lives: tuple[Life, ...]

    @property
    def gaps(self) -> int:
        """Bytes between what is alive, which nothing uses at that step: fragmentation."""
        return self.top - self.nbytes


@dataclass(frozen=True)
class ArenaReport:
    """arena: what lies where and when; alone: the sum of all tensors if each had its own bytes; wrong: violations."""

    arena: ArenaLives
    alone: int
    peak: Peak
    wrong: tuple[Violation, ...]

    @property
    def saved(self) -> int:
        """What reuse saved."""
        return self.alone - self.arena.nbytes

    @property
    def largest(self) -> list[Life]:
        """The largest tensors, the largest first."""
        return sorted(self.arena.lives, key=lambda x: (-x.nbytes, x.first, x.offset))[:LARGEST]


@dataclass(frozen=True)
class MemoryReport:
    """The plan of a subject. steps: what runs, in order. kept: what backends keep from run to run beside all else, by
    the backend: weights in f16 (--keep-weights)."""

    weights: tuple[Row, ...]
    cache: tuple[Row, ...]
    arenas: tuple[ArenaReport, ...]
    steps: tuple[Step, ...]
    kept: dict[str, int] = field(default_factory=dict)

    @property
    def wrong(self) -> list[Violation]:
        """Every violation of every arena."""
        return [v for arena in self.arenas for v in arena.wrong]


def report(subject: Subject) -> MemoryReport:
    """The report of what a tool looks at."""
    exe = subject.executable
    weights, states = (bound_leafs(exe, usage) for usage in (Usage.WEIGHTS, Usage.STATE))
    arenas = tuple(arena_report(arena) for arena in arenas_of(exe))
    return MemoryReport(
        rows([("", t) for t in weights]),
        rows([(_kind(t, subject), t) for t in states]),
        arenas,
        steps_of(exe),
        kept_by_backend(exe),
    )


def kept_by_backend(exe: Executable) -> dict[str, int]:
    """Bytes that programs keep beside weights, cache and arenas, of each backend that keeps any."""
    kept: dict[str, int] = {}
    for split in exe.splits:
        if nbytes := split.run.kept_nbytes():
            kept[split.backend.id] = kept.get(split.backend.id, 0) + nbytes
    return kept


# ---- weights and cache ----


def bound_leafs(exe: Executable, usage: Usage) -> list[Tensor]:
    """Leafs of a graph that lie in buffers of that use."""
    return [t for t in exe.graph.leafs if t.buffer is not None and t.buffer.usage is usage]


def stored_bytes(leaf: Tensor) -> int:
    """What a bound leaf takes where it lies: the backend may keep it in another form."""
    buffer = leaf.buffer
    assert buffer is not None
    return buffer.footprint if buffer.nbytes == leaf.nbytes else leaf.nbytes


def rows(named: Sequence[tuple[str, Tensor]]) -> tuple[Row, ...]:
    """Bound leafs by what they are called, their type and backend, the largest first."""
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for what, leaf in named:
        assert leaf.buffer is not None
        kinds.setdefault((what, leaf.dtype.name, leaf.buffer.backend), []).append(stored_bytes(leaf))
    total = sum(map(sum, kinds.values())) or 1
    made = [Row(*key, len(sizes), sum(sizes), sum(sizes) / total) for key, sizes in kinds.items()]
    return tuple(sorted(made, key=lambda row: -row.nbytes))


def _kind(leaf: Tensor, subject: Subject) -> str:
    """`full k`: the cells that a layer's cache uses, and keys or values; of a step of training what it trains, and the
    optimizer's means of it; "state" for what belongs to no session."""
    holder = subject.session or subject.engine
    for layer in holder.cache.layers if holder is not None else ():
        if any(leaf is mine for mine in layer.leafs):
            return f"{layer.kind} {'k' if leaf is layer.k else 'v'}"
    kinds = {"lora_a": "adapters", "lora_b": "adapters", "m": "optimizer", "v": "optimizer"}
    return kinds.get(leaf.name.rpartition(".")[2], "state")


# ---- arenas ----


def arena_report(arena: ArenaLives) -> ArenaReport:
    """An arena's figures and what is wrong with it."""
    alone = sum(_padded(x.nbytes, arena) for x in arena.lives)
    return ArenaReport(arena, alone, peak(arena), tuple(violations(arena)))


def peak(arena: ArenaLives) -> Peak:
    """Where the most is alive. Something new is alive only where a life begins, so only those steps are looked at."""
    best = Peak(0, 0, 0, ())
    for step in sorted({x.first for x in arena.lives}):
        alive = arena.at(step)
        nbytes, top = _covered(alive, arena)
        if nbytes > best.nbytes:
            best = Peak(step, nbytes, top, tuple(sorted(alive, key=lambda x: (-x.nbytes, x.offset))))
    return best


def _covered(alive: Sequence[Life], arena: ArenaLives) -> tuple[int, int]:
    """Bytes that lives, by offset, cover together, and the end of the highest; bytes that two share count once."""
    covered = top = 0
    for x in alive:
        end = x.offset + _padded(x.nbytes, arena)
        covered += max(0, end - max(top, x.offset))
        top = max(top, end)
    return covered, top


def _padded(nbytes: int, arena: ArenaLives) -> int:
    return -(-nbytes // arena.alignment) * arena.alignment


def alive_by_node(report: MemoryReport) -> dict[str, float]:
    """The bytes that are alive in all arenas while a step runs, by the name of its last result."""
    return {
        step.name: float(sum(x.nbytes for part in report.arenas for x in part.arena.at(i)))
        for i, step in enumerate(report.steps)
    }
