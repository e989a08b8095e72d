"""Fusion: which nodes of a region become one step. Shared by backends: each has its own list of Fusions.

A Fusion's `find` walks a region's Nodes, which know who reads what, and yields the Groups that can be one step. The
nodes of a group need not follow one another in the graph: groups are put in an order that keeps dependencies.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphrt.backend import Region
from graphrt.op import made_by, op_spec
from graphrt.program import Group
from graphrt.tensor import Tensor


def added_to(t: Tensor, total: Tensor) -> Tensor:
    """What an ADD of `t` and another tensor adds to it."""
    return total["b"] if total["a"] is t else total["a"]


def is_row(weight: Tensor, of: Tensor) -> bool:
    """`weight` is one contiguous f32 row as long as `of`'s."""
    return weight.dtype.name == "f32" and weight.ne == (of.ne[0], 1, 1, 1) and weight.is_contiguous


def is_bias(t: Tensor, of: Tensor) -> bool:
    """`t` is a row that all tokens of a product get alike, and no kernel writes it."""
    return t.is_leaf and is_row(t, of)


class Nodes:
    """A region's nodes as patterns ask for them. Views are not among them: what reads a view reads what it looks at."""

    def __init__(self, region: Region) -> None:
        self.all = [n for n in region.nodes if not op_spec(n.op).is_view]
        self.kept = region.kept
        self._readers: dict[Tensor, list[Tensor]] = {}
        self._viewed: set[Tensor] = set()
        for node in self.all:
            for source in dict.fromkeys(node.sources()):
                seen = made_by(source)
                readers = self._readers.setdefault(seen, [])
                if node not in readers:
                    readers.append(node)
                if seen is not source:
                    self._viewed.add(seen)

    def of(self, *ops: str) -> Iterator[Tensor]:
        return (n for n in self.all if n.op in ops)

    def readers(self, t: Tensor) -> list[Tensor]:
        """Who reads `t` or a view of it, in order."""
        return self._readers.get(t, [])

    def only_as_it_is(self, t: Tensor) -> bool:
        """`t` is no output, and nobody reads a view of it."""
        return t not in self._viewed and not self.kept(t)

    def only_reader(self, t: Tensor) -> Tensor | None:
        """The one node that reads `t`, and not through a view; None if there are others, or it is an output."""
        readers = self.readers(t)
        return readers[0] if len(readers) == 1 and self.only_as_it_is(t) else None


def scaled_by_row(nodes: Nodes, norm: Tensor) -> Tensor | None:
    """The MUL by a row of weights that alone reads a norm."""
    scaled = nodes.only_reader(norm)
    if scaled is None or scaled.op != "MUL" or scaled["a"] is not norm or not is_row(scaled["b"], norm):
        return None
    return scaled


def sum_of(nodes: Nodes, t: Tensor) -> Tensor | None:
    """The ADD, of t's shape, of t and another tensor, if nobody else reads t."""
    total = nodes.only_reader(t)
    same = total is not None and total.op == "ADD" and total.ne == t.ne and total["a"] is not total["b"]
    return total if same else None


class GateUpGlu(NamedTuple):
    """Two MUL_MATs of one x, and the GLU that alone reads them."""

    gate: Tensor
    up: Tensor
    out: Tensor


def gated_products(nodes: Nodes) -> Iterator[GateUpGlu]:
    """Gates and ups of feed-forwards, joined by one of the GLUs that have no numbers of their own."""
    for out in nodes.of("GLU"):
        gate, up = out["gate"], out["value"]
        if up is None or gate is up or gate.op != "MUL_MAT" or up.op != "MUL_MAT":
            continue
        alone = nodes.only_reader(gate) is out and nodes.only_reader(up) is out
        same_x = gate["x"] is up["x"] and gate.ne == up.ne
        if alone and same_x and out.params.kind in ("swiglu", "geglu", "reglu"):
            yield GateUpGlu(gate, up, out)


class Softcap(NamedTuple):
    """inner: SCALE by 1/cap; bent: its tanh; out: SCALE by cap."""

    inner: Tensor
    bent: Tensor
    out: Tensor


def softcaps(nodes: Nodes) -> Iterator[Softcap]:
    """SCALE, tanh and SCALE, without biases, as logits are capped; the scales may be any."""
    for inner in nodes.of("SCALE"):
        bent = nodes.only_reader(inner)
        if bent is None or bent.op != "UNARY" or bent.params.kind != "tanh":
            continue
        out = nodes.only_reader(bent)
        if out is not None and out.op == "SCALE" and not inner.params.bias and not out.params.bias:
            yield Softcap(inner, bent, out)


@dataclass(frozen=True)
class Fusion:
    """One kind of step made of several nodes.

    find: yields the groups of a region, in the graph's order, with what each captured (Group.captured); its docstring
    says which nodes. lower: what the backend compiles such a group with; it gets what was captured, and what else it
    gets and gives is the backend's own business. exact: the result has the
    bits of its nodes run one by one, so that an exact backend may use it too.
    """

    name: str
    find: Callable[[Nodes], Iterator[Group]]
    lower: Callable[..., Any] | None = None
    exact: bool = False


@dataclass(frozen=True, order=True)
class _Ready:
    first: int
    index: int


def fuse(region: Region, fusions: Iterable[Fusion]) -> list[Group]:
    """The region cut into groups, in an order in which every group comes after what it reads. A node belongs to the
    first group that takes it; what no fusion takes is a group by itself."""
    nodes = Nodes(region)
    groups: list[Group] = []
    owner: dict[Tensor, int] = {}

    def take(group: Group) -> None:
        owner.update(dict.fromkeys(group.nodes, len(groups)))
        groups.append(group)

    for fusion in fusions:
        for group in fusion.find(nodes):
            if not any(n in owner for n in group.nodes):
                group.fusion = fusion
                take(group)
    for node in region.nodes:
        if node not in owner:
            take(Group([node]))
    return _ordered(region.nodes, groups, owner)


def _by_writing(nodes: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of nodes that must keep their order because one of them writes into what the other reads or writes."""
    touching: dict[Tensor, list[tuple[int, Tensor]]] = {}
    for i, node in enumerate(nodes):
        for root in dict.fromkeys(s.root for s in node.sources()):
            touching.setdefault(root, []).append((i, node))
    for i, node in enumerate(nodes):
        if op_spec(node.op).writes is not None:
            for j, other in touching[node.root]:
                if other is not node:
                    yield (other, node) if j < i else (node, other)


def _ordered(nodes: Sequence[Tensor], groups: list[Group], owner: dict[Tensor, int]) -> list[Group]:
    """The groups in a topological order, the one with the earliest node first among those that are ready.

    A group that waits for itself through others (its nodes can't run together) is taken apart.
    """
    position = {node: i for i, node in enumerate(nodes)}
    needs = [{owner[made_by(s)] for n in group.nodes for s in n.sources() if made_by(s) in owner} for group in groups]
    for earlier, later in _by_writing(nodes):
        needs[owner[later]].add(owner[earlier])
    needs = [wanted - {i} for i, wanted in enumerate(needs)]
    feeds: list[list[int]] = [[] for _ in groups]
    for i, wanted in enumerate(needs):
        for j in wanted:
            feeds[j].append(i)
    ready = [_Ready(min(position[n] for n in g.nodes), i) for i, g in enumerate(groups) if not needs[i]]
    heapq.heapify(ready)
    left = [len(wanted) for wanted in needs]
    order: list[Group] = []
    while ready:
        i = heapq.heappop(ready).index
        order.append(groups[i])
        for j in feeds[i]:
            left[j] -= 1
            if not left[j]:
                heapq.heappush(ready, _Ready(min(position[n] for n in groups[j].nodes), j))
    if len(order) == len(groups):
        return order
    stuck = next(i for i, n in enumerate(left) if n and len(groups[i].nodes) > 1)
    apart = [g for i, g in enumerate(groups) if i != stuck] + [Group([n]) for n in groups[stuck].nodes]
    return _ordered(nodes, apart, {n: i for i, g in enumerate(apart) for n in g.nodes})
