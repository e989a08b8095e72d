"""Re-synced: each step of one side by itself, fed with what the other side, the reference, has there. What it is off by
then is its own doing and nothing that it inherits. One such piece is also what `graphrt diff --save` writes down.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Group, Usage
from graphrt.execute import Executable, plan_groups, prepare
from graphrt.graph import Graph
from graphrt.host import read_tensor
from graphrt.judge import PRECISIONS, Precision, precision
from graphrt.op import op_spec
from graphrt.schedule import with_sources
from graphrt.tensor import Flag, Tensor
from graphrt.testing import Inputs, dequantize, quantize
from graphrt.tools.conformance.run.reference import is_exact
from graphrt.tools.diff.file import Run
from graphrt.tools.diff.nodes import ORDERS, NodeDiff, compared, compared_bits
from graphrt.tools.diff.sides import Pair, RunSide
from graphrt.tools.inspect.traced_step import cuttable

Stored = npt.NDArray[np.generic]


@dataclass
class Piece:
    """Some nodes of a graph, members, that run by themselves. made: what stands for each tensor of the graph; inputs:
    that of what they read from outside. Weights are the graph's own leafs, or with own_weights inputs too."""

    members: Sequence[Tensor]
    own_weights: bool = False
    made: dict[Tensor, Tensor] = field(default_factory=dict)
    inputs: dict[Tensor, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inside = set(self.members)
        for node in self.members:
            self._copy(node)

    def _copy(self, t: Tensor) -> Tensor:
        if t in self.made:
            return self.made[t]
        if t in self._inside or (not t.is_leaf and op_spec(t.op).is_view):
            made = with_sources(t, [None if s is None else self._copy(s) for s in t.src])
            made.flags = Flag.NONE
        elif is_weight(t) and not self.own_weights:
            made = t
        else:
            made = self.inputs[t] = Tensor(t.dtype, t.ne, name=t.name, flags=Flag.INPUT)
        self.made[t] = made
        return made

    @property
    def is_sound(self) -> bool:
        """What is read from outside lies without gaps, so that views of it mean the same here."""
        return all(t.is_contiguous and t.view_offs == 0 and t.root.nbytes == t.nbytes for t in self.inputs)

    def run(
        self, backend: Backend, results: Sequence[Tensor], values: Mapping[str, Stored], forced: Group | None
    ) -> Executable:
        """Runs the piece. values: of the inputs by name, as stored; forced: the group that its nodes are to be, None to
        let the backend fuse them anew."""
        graph = Graph(*(self.made[t] for t in results))
        if forced is not None and len(plan_groups(graph, [backend])) > 1:
            backend = copy.copy(backend)
            alone = replace(forced.of(self.made.__getitem__), private=[])
            backend.fuse = lambda region: [alone]  # type: ignore[method-assign]
        exe = prepare(graph, backend)
        for leaf in self.inputs.values():
            if leaf in graph.leafs:
                exe.write(leaf, values[leaf.name])
        exe.run()
        exe.synchronize()
        return exe

    def saved(self, case: str, result: Tensor, values: Mapping[str, Stored]) -> Inputs:
        """The piece up to one result as a case that `graphrt replay` runs. It must own its weights."""
        inputs = Inputs(case, 0)
        inputs.node = self.made[result]
        needed = Graph(inputs.node).leafs
        inputs.values = {leaf: values[leaf.name] for leaf in self.inputs.values() if leaf in needed}
        return inputs


def is_weight(t: Tensor) -> bool:
    return t.is_leaf and t.buffer is not None and t.buffer.usage is Usage.WEIGHTS


class Resync:
    """The pieces of a pair's other side; the reference runs once more, with every node kept. cut: every node is a
    piece; kept: names of the nodes that can be kept without changing a fusion."""

    def __init__(self, pair: Pair, cut: bool, kept: Collection[str]) -> None:
        assert isinstance(pair.reference, RunSide) and isinstance(pair.other, RunSide)
        self.reference, self.other, self.low = pair.reference, pair.other, pair.low
        self.cut, self._kept = cut, kept
        self.reference.run.run(cuttable(self.reference.run.exe.graph))
        self._index = {key: i for i, key in enumerate(self.other.nodes)}
        self._low_nodes = self.low.nodes
        self._held = self.reference.nodes | {t.name: t for t in self.reference.run.exe.graph.leafs}

    def groups(self) -> list[Group]:
        """The steps of the other side, or all its nodes one by one."""
        graph = self.other.run.exe.graph
        if self.cut:
            return [Group([graph.nodes[i]]) for i in cuttable(graph)]
        by_name = {t.name: t for t in [*graph.leafs, *graph.nodes]}
        return [group.of(lambda t: by_name[t.name]) for group in self.other.groups]

    def compare(self, group: Group) -> list[NodeDiff]:
        """What a step gives of the reference's inputs, judged. Empty where an input can't be had."""
        piece = Piece(group.nodes)
        if not piece.is_sound:
            return []
        values = self.inputs_of(piece)
        honest = Piece([self._low_nodes[n.name] for n in group.nodes])
        low_values = self.inputs_of(honest)
        real = all(n.name in self._kept for n in group.results)
        backend = self._backend(group)
        exe = piece.run(backend, group.results, values, group if real and isinstance(group.kernel, str) else None)
        low = honest.run(self.low.run.backends[0], [self._low_nodes[n.name] for n in group.results], low_values, None)
        rule = self._rule(group)
        return [self._judged(n, piece, exe, honest, low, rule) for n in group.results]

    def _judged(
        self, node: Tensor, piece: Piece, exe: Executable, honest: Piece, low: Executable, rule: Precision
    ) -> NodeDiff:
        theirs, index = self._held[node.name], self._index[node.name]
        if len(piece.members) == 1 and is_exact(node) and theirs.dtype == node.dtype:
            read = self._cells(exe.read(piece.made[node]), node), self._cells(self.reference.run.exe.read(theirs), node)
            return compared_bits(node, index, node.name, *read)
        twin = self._low_nodes[node.name]
        actual = self._numbers(exe.read(piece.made[node]), node)
        honestly = self._numbers(low.read(honest.made[twin]), twin, self.low.run)
        expected, order = self.reference.run.values(theirs), None
        assert expected is not None
        if node.op in ORDERS:
            order = self.reference.run.values(theirs["a"])
        return compared(node, index, node.name, actual, expected, honestly, rule, order)

    def _cells(self, raw: Stored, node: Tensor, run: Run | None = None) -> Stored:
        """Of what lies in a cache only the cells that hold a token."""
        cells = (run or self.other.run).cells(node)
        return raw if cells is None else np.ascontiguousarray(raw[:, :, cells])

    def _numbers(self, raw: Stored, node: Tensor, run: Run | None = None) -> npt.NDArray[np.float64]:
        return np.asarray(dequantize(self._cells(raw, node, run), node.dtype), np.float64)

    def _backend(self, group: Group) -> Backend:
        """Who runs a step: the other side's schedule says."""
        return self.other.run.exe.schedule.assignments[group.nodes[-1]].backend

    def _rule(self, group: Group) -> Precision:
        """Each node may round by its band: of several nodes they add up."""
        found = [PRECISIONS[self._kind(n)] for n in group.nodes]
        return Precision(sum(p.band for p in found), sum(p.ceiling for p in found))

    def _kind(self, node: Tensor) -> str:
        """What a node is computed in, or rounded to on purpose by either side."""
        rounded = (side.rounds(node) for side in (self.other, self.reference))
        return next((kind for kind in rounded if kind is not None), precision(node))

    def inputs_of(self, piece: Piece) -> dict[str, Stored]:
        """The reference's values of a piece's inputs by name, in the types that the piece has. What the piece writes
        into is as it was before the step."""
        written = {n.root for n in piece.members if op_spec(n.op).writes is not None}
        found = {}
        for t, leaf in piece.inputs.items():
            theirs = self._held[t.name]
            if t in written and t.name in self.reference.state:
                raw = self.reference.state[t.name]
            elif is_weight(t):
                assert t.buffer is not None
                raw, theirs = read_tensor(t, t.buffer, t.offset), t
            else:
                raw = self.reference.run.exe.read(theirs)
            if theirs.dtype != leaf.dtype:
                raw = quantize(dequantize(raw, theirs.dtype), leaf.dtype)
            found[leaf.name] = raw
        return found
