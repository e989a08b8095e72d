"""When each tensor of an arena is alive and where it lies, found by walking what runs; the planner is not asked.

A step is a group of nodes, numbered as `graphrt dump` numbers groups. A tensor is alive from the step that writes it to
the last one that reads or writes it, both included. What must stay for the caller (inputs, outputs, copies of weights)
is alive to the end, which is the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphrt.backend import Group
from graphrt.execute import Executable
from graphrt.op import op_spec
from graphrt.schedule import Copy
from graphrt.tensor import Flag, Tensor
from graphrt.tools.inspect.describe import describe


@dataclass(frozen=True)
class Step:
    """name: of the group's last result; label: the ops that run; layer: the model's, None outside of layers."""

    name: str
    label: str
    backend: str
    layer: int | None


@dataclass(frozen=True)
class Life:
    """One tensor of an arena. op: what makes it, of fused nodes all ops ("MUL_MAT+ADD"), "input" or "copy" where no
    node does; offset, nbytes: its bytes there; first, last: steps. number: tells it from others,
    names need not; in_place: numbers of the tensors whose bytes it may take at `first`, if that is their last step."""

    number: int
    name: str
    op: str
    backend: str
    offset: int
    nbytes: int
    first: int
    last: int
    in_place: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The offset behind its last byte."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class ArenaLives:
    """One backend's arena. nbytes: its size; alignment: what every offset is a multiple of."""

    backend: str
    nbytes: int
    alignment: int
    lives: tuple[Life, ...]

    def at(self, step: int) -> list[Life]:
        """What is alive at a step, by offset."""
        return sorted((x for x in self.lives if x.first <= step <= x.last), key=lambda x: (x.offset, x.first))


def steps_of(exe: Executable) -> tuple[Step, ...]:
    """What runs, in order."""
    info = describe(exe)
    steps = []
    for group in info.groups:
        result = info.tensors[group.results[-1]]
        steps.append(Step(result.name, group.name, info.splits[group.split].backend, result.layer))
    return tuple(steps)


def arenas_of(exe: Executable) -> tuple[ArenaLives, ...]:
    """The arenas of a prepared graph, in the order of the backends."""
    lives = _Walk(exe).lives()
    return tuple(
        ArenaLives(name, arena.buffer.nbytes, arena.alignment, tuple(x for x in lives if x.backend == name))
        for name, arena in exe.arenas.items()
    )


@dataclass
class _Open:
    """A life that is being followed."""

    op: str
    first: int
    last: int
    in_place: tuple[Tensor, ...] = ()


@dataclass
class _Walk:
    """Follows the steps of an Executable once. found: by the tensor that owns the memory."""

    exe: Executable
    found: dict[Tensor, _Open] = field(default_factory=dict)

    def lives(self) -> list[Life]:
        exe = self.exe
        end = sum(len(split.groups) for split in exe.splits)
        for leaf in exe.graph.inputs:
            if leaf.buffer is None:
                self.found[leaf] = _Open("input", 0, end)
        step = 0
        for split in exe.splits:
            for copy in split.copies:
                self._copy(copy, step, end)
            for group in split.groups:
                self._group(group, step)
                step += 1
        for kept in exe.graph.kept:
            self._use(exe.schedule.local.get(kept, kept), end)
        numbers = {tensor: i for i, tensor in enumerate(self.found)}
        return [self._life(tensor, numbers) for tensor in self.found]

    def _copy(self, copy: Copy, step: int, end: int) -> None:
        """Copies are made before the first step of their split; those of weights, once for all runs."""
        self._use(copy.source, step)
        self.found[copy.target] = _Open("copy", 0, end) if copy.once else _Open("copy", step, step)

    def _group(self, group: Group, step: int) -> None:
        for node in group.nodes:
            for source in node.sources():
                self._use(source, step)
        for node in group.results:
            root = node.root
            if root.buffer is None and root not in self.found:
                alone = len(group.nodes) == 1
                ops = "+".join(dict.fromkeys(n.op for n in group.nodes))
                self.found[root] = _Open(ops, step, step, in_place_sources(node) if alone else ())
            self._use(root, step)

    def _use(self, tensor: Tensor, step: int) -> None:
        seen = self.found.get(tensor.root)
        if seen is not None:
            seen.last = max(seen.last, step)

    def _life(self, tensor: Tensor, numbers: dict[Tensor, int]) -> Life:
        seen = self.found[tensor]
        buffer, offset = self.exe.place(tensor)
        takes = tuple(numbers[t] for t in seen.in_place if t in numbers)
        return Life(
            numbers[tensor], tensor.name, seen.op, buffer.backend, offset, tensor.nbytes, seen.first, seen.last, takes
        )


def in_place_sources(node: Tensor) -> tuple[Tensor, ...]:
    """The tensors whose bytes a node that runs by itself may overwrite: the op computes each element from the
    one in the same place, both are laid out alike and whole, it reads the source once, and the source is no input."""
    roots = [s.root for s in node.sources()]
    named = node.sources_by_name()
    slots = [named[name] for name in op_spec(node.op).inplace if name in named]
    return tuple(s.root for s in slots if roots.count(s.root) == 1 and _same_bytes(s, node))


def _same_bytes(source: Tensor, node: Tensor) -> bool:
    """`source` is all of its memory, laid out as `node` is, and the caller does not need it again."""
    whole = source.view_offs == 0 and source.root.nbytes == node.nbytes
    return whole and (source.ne, source.nb) == (node.ne, node.nb) and not source.root.flags & Flag.INPUT


# ---- the check ----


@dataclass(frozen=True)
class Violation:
    """rule: what is broken; tensors: the one or two lives that break it."""

    rule: str
    tensors: tuple[Life, ...]

    def __str__(self) -> str:
        return f"{self.rule}: " + " and ".join(map(_where, self.tensors))


def _where(life: Life) -> str:
    return f"{life.name!r} ({life.op}) at bytes {life.offset} to {life.end - 1}, steps {life.first} to {life.last}"


def violations(arena: ArenaLives) -> list[Violation]:
    """What is wrong with an arena: a tensor outside of it or unaligned, or two alive at one step that share bytes.

    Two may share them where the younger is made in place of the older: it starts at the same byte at the older's last
    step, and its op may overwrite that source.
    """
    wrong = [
        Violation(f"a tensor must lie in the arena of {arena.nbytes} bytes, aligned to {arena.alignment}", (x,))
        for x in arena.lives
        if x.offset % arena.alignment or not 0 <= x.offset <= x.end <= arena.nbytes
    ]
    return wrong + [
        Violation("two tensors that are alive at one step must not share bytes", pair)
        for pair in _sharing(arena.lives)
        if not _in_place(*pair)
    ]


def _sharing(lives: Sequence[Life]) -> list[tuple[Life, Life]]:
    """Pairs that share bytes and a step, the older first."""
    pairs = []
    below: list[Life] = []
    for life in sorted(lives, key=lambda x: x.offset):
        below = [x for x in below if x.end > life.offset]
        pairs += [(x, life) for x in below if x.first <= life.last and life.first <= x.last]
        below.append(life)
    return [(a, b) if a.first <= b.first else (b, a) for a, b in pairs]


def _in_place(older: Life, younger: Life) -> bool:
    return older.last == younger.first and older.offset == younger.offset and older.number in younger.in_place
