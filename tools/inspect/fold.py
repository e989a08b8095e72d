"""Folding: layers that are alike but for their names become one with a count, so that a model fits on a screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from graphrt.errors import SessionError
from graphrt.tools.inspect.describe import GraphInfo, GroupInfo, TensorInfo


@dataclass(frozen=True)
class Section:
    """A stretch of a graph: what lies before, after or outside layers, or layers that are alike.

    layers: their numbers, none outside of layers; tensors: indices, those of the first layer.
    """

    title: str
    layers: tuple[int, ...]
    tensors: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many stretches it stands for."""
        return max(len(self.layers), 1)


@dataclass(frozen=True)
class Folded:
    """sections in the order in which they run; shown_as: for each tensor the one that stands for it in a section."""

    sections: tuple[Section, ...]
    shown_as: tuple[int, ...]


def fold(info: GraphInfo, opened: int | None = None, *, alike: bool = True) -> Folded:
    """The sections of a graph. opened: a layer that stays by itself; alike: False leaves every layer by itself.

    Raises SessionError for a layer that is not there.
    """
    by_layer = _by_layer(info)
    if opened is not None and opened not in by_layer:
        has = f"the graph has layers {ranges(sorted(by_layer))}" if by_layer else "the graph has none by its names"
        raise SessionError(f"a layer to open (--layer) must be in the graph, got {opened}; {has}")
    kinds: dict[object, list[int]] = {}
    for layer in sorted(by_layer):
        key = _signature(info, by_layer, layer) if alike and layer != opened else layer
        kinds.setdefault(key, []).append(layer)
    shown_as = list(range(len(info.tensors)))
    for first, *others in kinds.values():
        for layer in others:
            for ours, shown in zip(by_layer[layer], by_layer[first]):
                shown_as[ours] = shown
    sections = [Section(_title(layers), tuple(layers), by_layer[layers[0]]) for layers in kinds.values()]
    before, after = _outside(info, by_layer)
    if before:
        sections.insert(0, Section("before the layers" if by_layer else "the graph", (), before))
    if after:
        sections.append(Section("after the layers", (), after))
    return Folded(tuple(sections), tuple(shown_as))


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _title(layers: Sequence[int]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {ranges(layers)}: {len(layers)} alike"


def _by_layer(info: GraphInfo) -> dict[int, tuple[int, ...]]:
    """The tensors of each layer, nodes after leafs, leafs in the order in which its nodes read them: as `blk.7.attn_q`
    may come first in one layer's graph and last in another's."""
    read: dict[int, int] = {}
    for node in info.nodes:
        for source in node.sources():
            read.setdefault(source, len(read))
    found: dict[int, list[TensorInfo]] = {}
    for t in info.tensors:
        if t.layer is not None:
            found.setdefault(t.layer, []).append(t)
    order = {
        layer: sorted(ts, key=lambda t: (not t.is_leaf, read.get(t.index, 0) if t.is_leaf else t.index))
        for layer, ts in found.items()
    }
    return {layer: tuple(t.index for t in ts) for layer, ts in order.items()}


def _outside(info: GraphInfo, by_layer: dict[int, tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tensors outside of layers that come before the last layer ends or are read there, and the others."""
    last = max((i for tensors in by_layer.values() for i in tensors), default=len(info.tensors))
    early = {s for node in info.nodes if node.index <= last for s in node.sources()}
    outside = [t for t in info.tensors if t.layer is None]
    before = [t.index for t in outside if (t.index in early if t.is_leaf else t.index <= last)]
    return tuple(before), tuple(t.index for t in outside if t.index not in set(before))


# ---- what makes layers alike ----


def _signature(info: GraphInfo, by_layer: dict[int, tuple[int, ...]], layer: int) -> str:
    """Everything of a layer but names, numbers and offsets: two layers with one signature do the same work.

    What a layer reads of others counts by its type and shape alone.
    """
    tensors = [info.tensors[i] for i in by_layer[layer]]
    position = {t.index: i for i, t in enumerate(tensors)}
    splits = [t.split for t in tensors if t.split is not None]
    places = _Places(info, by_layer, layer)

    def seen(index: int | None) -> object:
        if index is None or index in position:
            return index if index is None else position[index]
        other = info.tensors[index]
        return other.dtype, other.ne, other.nb, other.is_leaf

    def signed(t: TensorInfo) -> object:
        own = t.op, t.params, t.dtype, t.ne, t.nb, t.flags, t.backend
        view = (seen(t.view.of), t.view.offset) if t.view else None
        split = t.split - splits[0] if t.split is not None else None
        group = places.of(info.groups[t.group]) if t.group is not None else None
        memory = info.buffers[t.place.buffer].usage if t.place is not None else None
        return own, [seen(s) for s in t.src], view, split, group, memory

    return repr([signed(t) for t in tensors])


@dataclass(frozen=True)
class _Places:
    """Where a group's members stand, seen from a layer: a group may reach into the next one."""

    info: GraphInfo
    by_layer: dict[int, tuple[int, ...]]
    layer: int

    def of(self, group: GroupInfo) -> object:
        members = [self._place(self.info.tensors[i]) for i in group.members]
        return group.name, members, [self._place(self.info.tensors[i]) for i in group.results]

    def _place(self, t: TensorInfo) -> object:
        if t.layer is None:
            return t.op
        return t.layer - self.layer, self.by_layer[t.layer].index(t.index)
