"""Graph: the nodes that some outputs need, in an order in which each comes after its sources."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from graphrt.arguments import checked
from graphrt.drawing import svg
from graphrt.errors import GraphError
from graphrt.printing import brief_name, count_text
from graphrt.tensor import Flag, Tensor

#: Inputs and outputs that a graph's repr names.
MAX_LISTED = 6


class Graph:
    """Nodes in post-order, their leafs, and how often each tensor is used.

    nodes: results of ops, sources before users, left to right. leafs: tensors without an op. outputs: the tensors the
    graph was built from, marked OUTPUT. Unnamed tensors are named `node_N` and `leaf_N`, as ggml does.
    """

    @checked(GraphError)
    def __init__(self, *outputs: Tensor) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._uses: dict[Tensor, int] = {}
        self._seen: set[Tensor] = set()
        self._key: str | None = None
        for output in outputs:
            self.expand(output)

    @checked(GraphError)
    def expand(self, output: Tensor) -> Tensor:
        """Adds `output` and all it needs that is not in the graph yet; returns it, marked as an output."""
        self.outputs.append(output.as_output())
        self._key = None
        stack: list[tuple[Tensor, Iterator[Tensor]]] = []
        self._enter(output, stack)
        while stack:  # a loop, not recursion: a model's graph is deeper than Python's stack
            tensor, rest = stack[-1]
            source = next(rest, None)
            if source is None:
                stack.pop()
                self._append(tensor)
            else:
                self._uses[source] = self._uses.get(source, 0) + 1
                self._enter(source, stack)
        return output

    def _enter(self, tensor: Tensor, stack: list[tuple[Tensor, Iterator[Tensor]]]) -> None:
        if tensor not in self._seen:
            self._seen.add(tensor)
            stack.append((tensor, tensor.sources()))

    def _append(self, tensor: Tensor) -> None:
        kind, group = ("leaf", self.leafs) if tensor.is_leaf else ("node", self.nodes)
        if not tensor.name:
            tensor.named(f"{kind}_{len(group)}")
        group.append(tensor)

    @checked(GraphError)
    def uses(self, tensor: Tensor) -> int:
        """How many source slots of the graph's nodes hold `tensor`."""
        return self._uses.get(tensor, 0)

    @property
    def inputs(self) -> list[Tensor]:
        """The leafs that are written from outside."""
        return [leaf for leaf in self.leafs if leaf.flags & Flag.INPUT]

    @property
    def kept(self) -> list[Tensor]:
        """The tensors to be readable after a run: the outputs, and whatever else is marked OUTPUT."""
        return [t for t in [*self.leafs, *self.nodes] if t.flags & Flag.OUTPUT]

    @checked(GraphError)
    def tensor(self, name: str) -> Tensor | None:
        """The first leaf or node of that name."""
        return next((t for t in [*self.leafs, *self.nodes] if t.name == name), None)

    def __repr__(self) -> str:
        inputs, outputs = (_listed(of) for of in (self.inputs, self.outputs))
        return f"<Graph of {count_text(len(self.nodes), 'node')}: {inputs or 'no inputs'} -> {outputs}>"

    def _repr_svg_(self) -> str:
        """What notebooks show: the nodes in their order, with arcs from sources to readers."""
        return svg([*self.leafs, *self.nodes], self.inputs, self.outputs)

    @property
    def key(self) -> str:
        """A digest of everything but data: two graphs with one key run the same prepared way.

        Leafs that hold data count by the place of it, since that place is bound in prepare. Of the names only those
        of inputs and outputs count, since a prepared graph is written and read by them.
        """
        if self._key is None:
            index = {t: i for i, t in enumerate([*self.leafs, *self.nodes])}
            digest = hashlib.sha256()
            for tensor in index:
                digest.update(repr(_signature(tensor, index)).encode())
            digest.update(repr([index[t] for t in self.outputs]).encode())
            self._key = digest.hexdigest()
        return self._key


def _listed(tensors: Sequence[Tensor]) -> str:
    """A few tensors by name and type: "a f32[4, 3], b f32[4]"."""
    shown = ", ".join(f"{brief_name(t.name, 40)} {t.describe()}" for t in tensors[:MAX_LISTED])
    return shown + (f" and {len(tensors) - MAX_LISTED} more" if len(tensors) > MAX_LISTED else "")


def _signature(t: Tensor, index: dict[Tensor, int]) -> tuple[object, ...]:
    sources = tuple(index[s] if s is not None else None for s in t.src)
    root = index.get(t.view_src) if t.view_src is not None else None
    place = (id(t.buffer), t.offset) if t.buffer is not None else None
    name = t.name if t.flags else ""
    return (t.op, t.dtype.name, t.ne, t.nb, t.params, sources, root, t.view_offs, int(t.flags), name, place)
