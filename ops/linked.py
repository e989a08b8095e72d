"""The graphs of all ranks as one: what one process runs, and tools look at, where the ranks are not there."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.op import build, op_spec
from graphrt.ops.collectives import COLLECTIVES, MAX_PLAYED
from graphrt.schedule import with_sources
from graphrt.tensor import MAX_NAME, Flag, Tensor


def linked(graphs: Sequence[Graph]) -> Graph:
    """One graph that computes what these do, the ranks' own graphs in their order, as if they met over a link.

    Collectives become nodes with a source of each rank. Inputs of one name are the first rank's for all; other leafs
    and all nodes stay each rank's own, called `name@rank` but for the first rank's. Outputs: all ranks', rank by rank.
    Raises GraphError for graphs that don't meet at the same collectives, and for more ranks than can be played.
    """
    if not 2 <= len(graphs) <= MAX_PLAYED:
        raise GraphError(f"one graph plays 2 to {MAX_PLAYED} ranks, got {len(graphs)}; start processes for more")
    return _Linker(graphs).run()


class _Linker:
    def __init__(self, graphs: Sequence[Graph]) -> None:
        self.graphs = graphs
        self.made: list[dict[Tensor, Tensor]] = [{} for _ in graphs]
        self.inputs = {t.name: t for t in graphs[0].inputs}

    def run(self) -> Graph:
        pieces = [_up_to_collectives(graph) for graph in self.graphs]
        if len({len(p) for p in pieces}) > 1:
            met = [len(p) - 1 for p in pieces]
            raise GraphError(f"all ranks must meet at as many collectives, these graphs have {met}; build them alike")
        for meeting in zip(*pieces):
            for rank, nodes in enumerate(meeting):
                for node in nodes[:-1]:
                    self.made[rank][node] = self._copied(rank, node)
            last = [nodes[-1] for nodes in meeting]
            if all(node is not None and node.op in COLLECTIVES for node in last):
                self._meet([node for node in last if node is not None])
        ends = [self._of(rank, t) for rank, graph in enumerate(self.graphs) for t in graph.outputs]
        return Graph(*dict.fromkeys(ends))

    def _of(self, rank: int, t: Tensor) -> Tensor:
        if t.is_leaf:
            return self.inputs.get(t.name, t) if t.flags & Flag.INPUT else t
        return self.made[rank][t]

    def _copied(self, rank: int, node: Tensor) -> Tensor:
        twin = with_sources(node, [None if s is None else self._of(rank, s) for s in node.src])
        twin.name = _name(node.name, rank)
        return twin

    def _meet(self, nodes: list[Tensor]) -> None:
        """The nodes of all ranks for which the ranks meet once."""
        kinds = {(node.op, tuple(getattr(node.params, "sizes", ())), node.params.ranks) for node in nodes}
        if len(kinds) > 1 or nodes[0].params.ranks != len(nodes):
            raise GraphError(
                f"ranks must meet at one collective of {len(nodes)} ranks, got "
                f"{', '.join(f'{n.op} {n.name!r} of {n.params.ranks}' for n in nodes)}; build their graphs alike"
            )
        parts = [self._of(rank, next(node.sources())) for rank, node in enumerate(nodes)]
        spec, shared = op_spec(nodes[0].op), nodes[0].op != "REDUCE_SCATTER"
        for rank, node in enumerate(nodes):
            if rank and shared:  # all ranks have the same bits
                self.made[rank][node] = self.made[0][nodes[0]]
                continue
            made = build(spec, *parts, params=node.params, name=_name(node.name, rank))
            made.flags |= node.flags
            self.made[rank][node] = made


def _up_to_collectives(graph: Graph) -> list[list[Tensor | None]]:
    """The nodes in pieces that each end with a collective, the last one with None."""
    pieces: list[list[Tensor | None]] = [[]]
    for node in graph.nodes:
        pieces[-1].append(node)
        if node.op in COLLECTIVES:
            pieces.append([])
    pieces[-1].append(None)
    return pieces


def _name(name: str, rank: int) -> str:
    return name if rank == 0 else f"{name[: MAX_NAME - 8]}@{rank}"
