"""A graph in plain data: every leaf and node with all that is known of it, prepared or not. Tools show and save it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from graphrt import ops  # noqa: F401  (registers every op)
from graphrt.backend import Buffer, Group
from graphrt.errors import MemoryPlanError
from graphrt.execute import Executable
from graphrt.graph import Graph
from graphrt.op import Work, op_spec
from graphrt.tensor import Dims, Flag, Tensor
from graphrt.tools.inspect.op_params import words_of
from graphrt.work import group_work


@dataclass(frozen=True)
class ViewInfo:
    """of: the index of the tensor whose memory is looked at; offset: bytes from its start."""

    of: int
    offset: int


@dataclass(frozen=True)
class PlaceInfo:
    """buffer: its index; offset: of the tensor's first byte in it; nbytes: to its last one, gaps included; address: of
    the first byte in the memory of its device, in this process; None where it is planned only, or not told."""

    buffer: int
    offset: int
    nbytes: int
    address: int | None = None


@dataclass(frozen=True)
class TensorInfo:
    """One leaf (op "NONE") or node.

    index: its place in GraphInfo.tensors; params: by name, None for an op without; op_params: the same as ggml's words,
    None where it has none for them; nb: strides in bytes; src: indices,
    None for an absent one; layer: the model's layer that it belongs to, None outside of layers; flops, bytes: the work
    of a node by itself. Of a prepared graph: backend; split and group, None for leafs and views; place, None where it
    lives only inside its group.
    """

    index: int
    name: str
    op: str
    params: dict[str, Any] | None
    op_params: tuple[int, ...] | None
    dtype: str
    ne: Dims
    nb: Dims
    src: tuple[int | None, ...]
    view: ViewInfo | None
    flags: tuple[str, ...]
    layer: int | None
    flops: int
    bytes: int
    backend: str | None = None
    split: int | None = None
    group: int | None = None
    place: PlaceInfo | None = None

    @property
    def is_leaf(self) -> bool:
        return self.op == "NONE"

    def sources(self) -> list[int]:
        """The indices of the sources that are present, in order."""
        return [s for s in self.src if s is not None]

    def sources_by_name(self) -> dict[str, int]:
        """The same by the names that the op gives them."""
        names = () if self.is_leaf else op_spec(self.op).names
        return {name: s for name, s in zip(names, self.src) if s is not None}


@dataclass(frozen=True)
class CopyInfo:
    """source: index of a tensor that a split needs from another backend; once: prepare copies it, not every run."""

    source: int
    nbytes: int
    once: bool


@dataclass(frozen=True)
class SplitInfo:
    """Consecutive groups on one backend; copies: made before they run."""

    backend: str
    copies: tuple[CopyInfo, ...]


@dataclass(frozen=True)
class GroupInfo:
    """Nodes that run as one step. name: of the fusion, or of the op; members, results: indices of nodes; flops, bytes:
    the work as one step, where results that stay inside are not moved."""

    name: str
    split: int
    members: tuple[int, ...]
    results: tuple[int, ...]
    flops: int
    bytes: int


@dataclass(frozen=True)
class BufferInfo:
    """usage: "weights", "state" (a cache) or "compute" (an arena)."""

    backend: str
    usage: str
    nbytes: int


@dataclass(frozen=True)
class GraphInfo:
    """tensors: leafs, then nodes in the order of execution; outputs: indices. splits, groups, buffers: of a prepared
    graph, in the order of execution; buffers in the order of the tensors that lie in them."""

    title: str
    phase: str
    n_tokens: int
    tensors: tuple[TensorInfo, ...]
    outputs: tuple[int, ...]
    splits: tuple[SplitInfo, ...] = ()
    groups: tuple[GroupInfo, ...] = ()
    buffers: tuple[BufferInfo, ...] = ()

    @property
    def nodes(self) -> list[TensorInfo]:
        return [t for t in self.tensors if not t.is_leaf]

    @property
    def work(self) -> Work:
        """FLOPs and bytes of a step: of the groups where it is prepared, else of the nodes one by one."""
        parts: Sequence[GroupInfo | TensorInfo] = self.groups or self.tensors
        return Work(sum(p.flops for p in parts), sum(p.bytes for p in parts))


def describe(subject: Executable | Graph, title: str = "", phase: str = "graph", n_tokens: int = 0) -> GraphInfo:
    """The description of a graph, with backends, splits, groups and places where it is prepared."""
    graph = subject if isinstance(subject, Graph) else subject.graph
    order = [*graph.leafs, *graph.nodes]
    index = {t: i for i, t in enumerate(order)}
    layers = _layers(graph)
    tensors = tuple(_tensor(t, index, layers.get(t)) for t in order)
    info = GraphInfo(title, phase, n_tokens, tensors, tuple(index[t] for t in graph.outputs))
    return info if isinstance(subject, Graph) else _Prepared(subject, index).added_to(info)


def _tensor(t: Tensor, index: dict[Tensor, int], layer: int | None) -> TensorInfo:
    params = {f.name: getattr(t.params, f.name) for f in fields(t.params)} if t.params is not None else None
    view = ViewInfo(index[t.view_src], t.view_offs) if t.view_src is not None else None
    work = Work(0, 0) if t.is_leaf else op_spec(t.op).work(t)
    flags = tuple(f.name.lower() for f in (Flag.INPUT, Flag.OUTPUT) if t.flags & f and f.name)
    src = tuple(index[s] if s is not None else None for s in t.src)
    return TensorInfo(
        index[t], t.name, t.op, params, words_of(t.op, params), t.dtype.name, t.ne, t.nb, src, view, flags, layer,
        work.flops, work.bytes,
    )  # fmt: skip


# ---- layers ----

#: How models name what belongs to a layer: blk.7.attn_q.weight, cache_k_l7, cache_k_l7 (set), attn_norm-7.
_LAYER = re.compile(r"^blk\.(\d+)\.|^cache_[kv]_l(\d+)\b|-(\d+)$")
#: Names that a Graph gives to what has none.
_NO_NAME = re.compile(r"(?:node|leaf)_\d+$")


def _layers(graph: Graph) -> dict[Tensor, int]:
    """The layer of each tensor that has one: its name tells it, or without a name that of the first that reads it."""
    layers: dict[Tensor, int] = {}
    for t in [*graph.leafs, *graph.nodes]:
        match = _LAYER.search(t.name)
        if match:
            layers[t] = int(next(g for g in match.groups() if g is not None))
    for reader in reversed(graph.nodes):  # so that a chain without names is followed to its end
        for source in reader.sources():
            if reader in layers and _NO_NAME.match(source.name):
                layers[source] = min(layers[reader], layers.get(source, layers[reader]))
    return layers


# ---- what preparing adds ----


class _Prepared:
    """Looks an Executable's tensors up. index: of the graph's tensors; twins on other backends count as theirs."""

    def __init__(self, exe: Executable, index: dict[Tensor, int]) -> None:
        self.exe = exe
        self.index = index | {local: index[t] for t, local in exe.schedule.local.items()}
        self.buffers: dict[Buffer, int] = {}

    def added_to(self, info: GraphInfo) -> GraphInfo:
        groups = tuple(self._group(g, i) for i, split in enumerate(self.exe.splits) for g in split.groups)
        group_of = {node: i for i, group in enumerate(groups) for node in group.members}
        order = [*self.exe.graph.leafs, *self.exe.graph.nodes]
        tensors = []
        for t, plain in zip(order, info.tensors):
            group = group_of.get(plain.index)
            split = groups[group].split if group is not None else None
            place = self._place(t)
            tensors.append(replace(plain, backend=self._backend(t), split=split, group=group, place=place))
        buffers = tuple(BufferInfo(b.backend, b.usage.value, b.nbytes) for b in self.buffers)
        return replace(info, tensors=tuple(tensors), splits=self._splits(), groups=groups, buffers=buffers)

    def _group(self, group: Group, split: int) -> GroupInfo:
        name = group.kernel if isinstance(group.kernel, str) else group.label
        members = tuple(self.index[n] for n in group.nodes)
        return GroupInfo(name, split, members, tuple(self.index[n] for n in group.results), *group_work(group))

    def _splits(self) -> tuple[SplitInfo, ...]:
        return tuple(
            SplitInfo(
                split.backend.id,
                tuple(CopyInfo(self.index[c.source], c.source.data_nbytes, c.once) for c in split.copies),
            )
            for split in self.exe.splits
        )

    def _backend(self, t: Tensor) -> str | None:
        assigned = self.exe.schedule.assignments.get(t)
        if assigned is not None:
            return assigned.backend.id
        return self.exe.schedule.homes.get(self.exe.schedule.local.get(t, t).root)

    def _place(self, t: Tensor) -> PlaceInfo | None:
        try:
            buffer, offset = self.exe.place(t)
        except MemoryPlanError:  # fused away
            return None
        address = buffer.address + offset if buffer.address else None
        return PlaceInfo(self.buffers.setdefault(buffer, len(self.buffers)), offset, t.nbytes, address)
