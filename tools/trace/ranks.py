"""Where ranks part: the first node of which all ranks should have the same bits, and one has others.

Ranks have the same of what is made of whole weights, inputs and what they have told each other; of a part of a weight,
and of the cache of a rank's own heads, each has its own. What is compared cuts no fusion: it is what `run` does.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphrt.graph import Graph
from graphrt.models.ranks.plan import RankPlan
from graphrt.ranks import Ranks
from graphrt.tensor import Flag, Tensor
from graphrt.tools.diff.file import node_keys
from graphrt.tools.diff.nodes import UNNAMED, readable
from graphrt.tools.diff.sides import RunSide
from graphrt.tools.inspect.node_stats import Values
from graphrt.tools.inspect.traced_step import Step

#: Ops whose results are the same on all ranks of a stage, whatever they were given: another stage passes on the same.
_ALIKE = ("ALL_REDUCE", "ALL_GATHER", "RECV")


@dataclass(frozen=True)
class Parted:
    """node, op: the first that differs; rank: the first one that has others than the first of its stage; largest: the
    difference there; differ: how many elements do, of so many."""

    node: str
    op: str
    rank: int
    largest: float
    differ: int
    elements: int


def same_on_all(graph: Graph, plan: RankPlan) -> set[Tensor]:
    """The nodes of a rank's graph of which the ranks of its stage have the same bits."""
    same = {leaf for leaf in graph.leafs if leaf.flags & Flag.INPUT}
    for leaf in graph.leafs:
        cut = plan.cuts.get(leaf.name)
        if cut is not None and not cut.spans:  # a bias that is added once is added to a part: the sum is no one's
            same.add(leaf)
    for node in graph.nodes:
        if node.op in _ALIKE or (not _is_part(node) and all(source in same for source in node.sources())):
            same.add(node)
    return same - set(graph.leafs)


def _is_part(node: Tensor) -> bool:
    """Of what all ranks have, each takes its own."""
    return node.op == "REDUCE_SCATTER" or (node.op == "VIEW" and node.n_elements != next(node.sources()).n_elements)


def first_parted(ranks: Ranks, step: Step, plan: RankPlan) -> tuple[int, Parted | None]:
    """How many nodes of this rank were compared, and the first of any stage that differs. All ranks call it together.
    Raises RankError."""
    graph = step.run(readable(RunSide("", step))).graph
    same = same_on_all(graph, plan)
    # names by places in the graph may be other nodes' on other ranks
    named = {key: node for key, node in node_keys(graph).items() if node in same and not UNNAMED.match(key)}
    values = {key: step.values(node) for key, node in named.items()}
    found = {key: value for key, value in values.items() if value is not None}
    said = ranks.everyones({key: zlib.crc32(np.ascontiguousarray(value).tobytes()) for key, value in found.items()})
    each = ranks.size // ranks.stages
    for first in range(0, ranks.size, each):
        for key, digest in said[first].items():
            others = [rank for rank in range(first, first + each) if said[rank].get(key) != digest]
            if others:
                return len(found), _told(ranks, key, first, others[0], found, graph)
    return len(found), None


def _told(ranks: Ranks, key: str, first: int, other: int, found: dict[str, Values], graph: Graph) -> Parted:
    """All ranks are told by how much one differs from the first of its stage."""
    told: list[Any] = ranks.everyones(found.get(key) if ranks.rank in (first, other) else None)
    here, there = (np.asarray(told[rank] if told[rank] is not None else np.nan) for rank in (first, other))
    differ = here != there
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(here - there).max())
    node = next((n for k, n in node_keys(graph).items() if k == key), None)
    return Parted(key, "" if node is None else node.op, other, largest, int(differ.sum()), int(differ.size))


def lines(n: int, parted: Parted | None, ranks: Ranks) -> list[str]:
    """The verdict in words."""
    if parted is None:
        return [f"all {ranks.size} ranks have the same bits of what they should: {n} nodes of the first one's"]
    return [
        f"ranks part first at {parted.node}{f', {parted.op}' if parted.op else ''}: rank {parted.rank} of {ranks.size} "
        f"has other bits, {parted.differ} of {parted.elements} elements differ, by up to {parted.largest:.3g}"
    ]
