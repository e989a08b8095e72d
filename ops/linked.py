"""The graphs of all ranks as one: what one process runs, and tools look at, where the ranks are not there."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.op import build, op_spec
from graphrt.ops.collectives import COLLECTIVES, MAX_PLAYED
from graphrt.ops.send_recv import LINKED, RECV, SEND, SendParams
from graphrt.schedule import with_sources
from graphrt.tensor import MAX_NAME, Flag, Tensor


def linked(graphs: Sequence[Graph], stages: int = 1) -> Graph:
    """One graph that computes what these do, the ranks' own graphs in their order, as if they met over a link.

    Collectives become nodes with a source of each rank of a stage, of which there are so many, each of as many ranks;
    what one rank receives is what another one sends. Inputs of one name are the first rank's that has it, for all;
    other leafs and all nodes stay each rank's own, called `name@rank` but for the first rank's. Outputs: all ranks',
    rank by rank. Raises GraphError for graphs that don't meet at the same collectives, that wait for what nobody sends,
    and for more ranks than can be played.
    """
    if not 2 <= len(graphs) <= MAX_PLAYED or len(graphs) % stages:
        raise GraphError(
            f"one graph plays 2 to {MAX_PLAYED} ranks in stages of as many, got {len(graphs)} in {stages}; start "
            f"processes for more"
        )
    return _Linker(graphs, stages).run()


class _Linker:
    def __init__(self, graphs: Sequence[Graph], stages: int) -> None:
        self.graphs = graphs
        self.made: list[dict[Tensor, Tensor]] = [{} for _ in graphs]
        self.inputs: dict[str, Tensor] = {}
        for graph in graphs:
            for leaf in graph.inputs:
                self.inputs.setdefault(leaf.name, leaf)
        each = len(graphs) // stages
        self.stages = [range(first, first + each) for first in range(0, len(graphs), each)]
        self.left = [deque(graph.nodes) for graph in graphs]
        self.sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)  # by sender and receiver

    def run(self) -> Graph:
        for stage in self.stages:
            met = [sum(node.op in COLLECTIVES for node in self.graphs[rank].nodes) for rank in stage]
            if len(set(met)) > 1:
                raise GraphError(
                    f"all ranks must meet at as many collectives, these graphs have {met}; build them alike"
                )
        going = True
        while going:  # each rank as far as it comes by itself, then those that meet
            alone = [self._advance(rank) for rank in range(len(self.graphs))]
            going = any([*alone, *[self._meet(list(stage)) for stage in self.stages]])
        waiting = {rank: nodes[0].name for rank, nodes in enumerate(self.left) if nodes}
        if waiting:
            raise GraphError(
                f"what a rank receives must have been sent, these wait for ever, by rank: {waiting}; build their "
                f"graphs so that each send() has its recv()"
            )
        ends = [self._of(rank, t) for rank, graph in enumerate(self.graphs) for t in graph.outputs]
        return Graph(*dict.fromkeys(ends))

    def _of(self, rank: int, t: Tensor) -> Tensor:
        if t.is_leaf:
            return self.inputs.get(t.name, t) if t.flags & Flag.INPUT else t
        return self.made[rank][t]

    def _advance(self, rank: int) -> bool:
        """Makes a rank's nodes up to one for which others are not there yet; whether there was one."""
        left, made = self.left[rank], 0
        while left and left[0].op not in COLLECTIVES:
            node = left[0]
            if node.op == "RECV" and not self.sent[node.params.other, rank]:
                break
            self.made[rank][left.popleft()] = self._copied(rank, node)
            made += 1
        return made > 0

    def _copied(self, rank: int, node: Tensor) -> Tensor:
        sources = [None if s is None else self._of(rank, s) for s in node.src]
        if node.op not in LINKED:
            twin = with_sources(node, sources)
            twin.name = name_on(node.name, rank)
            return twin
        if node.op == "SEND":
            params = SendParams(node.params.rank, node.params.other, played=True)
            made = build(SEND, *sources, params=params, name=name_on(node.name, rank))
            self.sent[rank, node.params.other].append(made)
        else:
            sent = self.sent[node.params.other, rank].popleft()
            made = build(RECV, sources[0], sent, params=node.params, name=name_on(node.name, rank))
        made.flags |= node.flags
        return made

    def _meet(self, stage: list[int]) -> bool:
        """The nodes of a stage's ranks for which these meet once, where all have come to one."""
        if not all(self.left[rank] and self.left[rank][0].op in COLLECTIVES for rank in stage):
            return False
        nodes = [self.left[rank].popleft() for rank in stage]
        kinds = {(node.op, tuple(getattr(node.params, "sizes", ())), node.params.ranks) for node in nodes}
        if len(kinds) > 1 or nodes[0].params.ranks != len(nodes):
            raise GraphError(
                f"ranks must meet at one collective of {len(nodes)} ranks, got "
                f"{', '.join(f'{n.op} {n.name!r} of {n.params.ranks}' for n in nodes)}; build their graphs alike"
            )
        parts = [self._of(rank, next(node.sources())) for rank, node in zip(stage, nodes)]
        spec, shared = op_spec(nodes[0].op), nodes[0].op != "REDUCE_SCATTER"
        for rank, node in zip(stage, nodes):
            if rank != stage[0] and shared:  # all ranks have the same bits
                self.made[rank][node] = self.made[stage[0]][nodes[0]]
                continue
            made = build(spec, *parts, params=node.params, name=name_on(node.name, rank))
            made.flags |= node.flags
            self.made[rank][node] = made
        return True


def name_on(name: str, rank: int) -> str:
    """What a rank's node is called where one graph has all ranks."""
    return name if rank == 0 else f"{name[: MAX_NAME - 8]}@{rank}"
