"""The scheduler: which backend runs each node and why, where the graph is cut, and what is copied between backends.

Backends come in order of preference. A node that writes into a buffer runs where the buffer lies; any other node runs
on the first backend that supports it and whatever writes into its result later. Each assignment carries its cause, and
each refusal its reason.

Who runs a node is an instance; where a tensor lies is an instance's id, since its buffer may be of a backend that takes
no part in this graph. Two backends of one name are two as long as their ids differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphrt.backend import Backend, Usage, distinct
from graphrt.errors import UnsupportedError
from graphrt.graph import Graph
from graphrt.op import op_spec
from graphrt.tensor import MAX_NAME, Tensor


@dataclass(frozen=True)
class Assignment:
    """backend: who runs the node; cause: why it and no other."""

    backend: Backend
    cause: str


@dataclass(frozen=True, eq=False)
class Copy:
    """One tensor that another backend needs: `source` as the graph has it, `target` a contiguous twin of it.

    origin: the id of the backend where the source lies; once: the source never changes, so the copy is made by prepare
    and not by every run.
    """

    source: Tensor
    target: Tensor
    origin: str
    once: bool


@dataclass(eq=False)
class Split:
    """Consecutive nodes on one backend, and the copies to make before they run."""

    backend: Backend
    nodes: list[Tensor] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)


@dataclass
class Schedule:
    """splits in order; assignments by the graph's node; refusals: reasons by node and the backend's id.

    local: the tensor that stands for a graph's tensor on the backend that owns it. It is the tensor itself unless one
    of its sources had to be copied. homes: the id of the backend where each such tensor lies.
    """

    splits: list[Split]
    assignments: dict[Tensor, Assignment]
    refusals: dict[Tensor, dict[str, str]]
    local: dict[Tensor, Tensor]
    homes: dict[Tensor, str]


def schedule(graph: Graph, backends: Sequence[Backend]) -> Schedule:
    """Assigns every node and cuts the graph into splits. Raises UnsupportedError with every backend's reason,
    BackendError for two backends with one id."""
    return _Scheduler(graph, backends).run()


class _Scheduler:
    def __init__(self, graph: Graph, backends: Sequence[Backend]) -> None:
        self.graph = graph
        self.backends = distinct(backends)
        self.result = Schedule([], {}, {}, {}, {})
        self._copies: dict[tuple[Tensor, str], Tensor] = {}
        self._writers: dict[Tensor, list[Tensor]] = {}  # what writes into a tensor's memory after it is there
        for node in graph.nodes:
            if op_spec(node.op).writes is not None:
                self._writers.setdefault(node.root, []).append(node)

    def run(self) -> Schedule:
        homes = self.result.homes
        for leaf in self.graph.leafs:
            if leaf.buffer is not None:
                homes[leaf] = leaf.buffer.backend
            elif leaf in self._writers:  # an input lies where it can be written into
                able = (b.id for b in self.backends.values() if self._write_refusal(leaf, b) is None)
                homes[leaf] = next(able, next(iter(self.backends), ""))
        for node in self.graph.nodes:
            if op_spec(node.op).is_view:
                self._look(node)
            else:
                self._place(node)
        default = next(iter(self.backends))
        for leaf in self.graph.leafs:  # an input that nothing reads still needs a place
            homes.setdefault(leaf, default)
        return self.result

    def _look(self, node: Tensor) -> None:
        """A view of a node that has a twin looks at the twin."""
        (source,) = node.sources()
        twin = self.result.local.get(source, source)
        if twin is not source:
            self.result.local[node] = with_sources(node, [twin])

    def _place(self, node: Tensor) -> None:
        assignment = self._assign(node)
        self.result.assignments[node] = assignment
        homes, home = self.result.homes, assignment.backend.id
        for source in node.sources():  # an input lies where it is first read
            homes.setdefault(source.root, home)
        homes.setdefault(node.root, home)
        if not self.result.splits or self.result.splits[-1].backend is not assignment.backend:
            self.result.splits.append(Split(assignment.backend))
        split = self.result.splits[-1]
        local = self._localized(node, split, home)
        homes.setdefault(local, home)
        split.nodes.append(local)
        if op_spec(node.op).writes is not None:  # twins of what it wrote into are out of date
            self._copies = {key: twin for key, twin in self._copies.items() if key[0].root is not node.root}

    def _assign(self, node: Tensor) -> Assignment:
        writes = op_spec(node.op).writes
        owner = self.result.homes.get(node.root) if writes is not None else None
        candidates = [owner] if owner is not None else list(self.backends)
        refused: dict[str, str] = {}
        for home in candidates:
            reason = self._refusal(node, home)
            if reason is None:
                if refused:
                    self.result.refusals[node] = refused
                return Assignment(self.backends[home], _cause(owner, refused))
            refused[home] = reason
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        where = f" (it writes into {node.root.name!r}, which lies on {owner})" if owner is not None else ""
        raise UnsupportedError(
            f"every node needs a backend that supports it, none takes {node!r}{where}: {reasons}. Add the cpu backend"
        )

    def _refusal(self, node: Tensor, home: str) -> str | None:
        backend = self.backends.get(home)
        if backend is None:
            return "it is not among the backends of this prepare"
        return backend.supports(node) or self._write_refusal(node, backend)

    def _write_refusal(self, tensor: Tensor, backend: Backend) -> str | None:
        """Why a backend can't hold `tensor`: something writes into it later and must run there too."""
        for writer in self._writers.get(tensor, ()):
            reason = backend.supports(writer)
            if reason is not None:
                return f"{writer.name!r} writes into it later, and of that: {reason}"
        return None

    def _localized(self, node: Tensor, split: Split, home: str) -> Tensor:
        """`node` with its sources as they are on the split's backend, whose id is `home`."""
        sources = [self._source_on(s, split, home) if s is not None else None for s in node.src]
        same = all(a is b for a, b in zip(sources, node.src))
        local = node if same else with_sources(node, sources)
        self.result.local[node] = local
        return local

    def _source_on(self, source: Tensor, split: Split, home: str) -> Tensor:
        if self.result.homes[source.root] != home:
            return self._copied(source, split, home)
        return self.result.local.get(source, source)

    def _copied(self, source: Tensor, split: Split, home: str) -> Tensor:
        """The twin of `source` on the split's backend. It serves later splits too, until something writes into the
        memory that it was copied from."""
        key = (source, home)
        if key not in self._copies:
            target = Tensor(source.dtype, source.ne, name=f"{home}#{source.name}"[: MAX_NAME - 1])
            buffer = source.root.buffer
            once = buffer is not None and buffer.usage is Usage.WEIGHTS
            origin = self.result.homes[source.root]
            self._copies[key] = target
            self.result.homes[target] = home
            split.copies.append(Copy(self.result.local.get(source, source), target, origin, once))
        return self._copies[key]


def _cause(owner: str | None, refused: dict[str, str]) -> str:
    if owner is not None:
        return "it writes into a buffer there"
    if refused:
        return "refused by " + ", ".join(f"{name} ({reason})" for name, reason in refused.items())
    return "preferred, and supports it"


def with_sources(node: Tensor, sources: Sequence[Tensor | None]) -> Tensor:
    """A twin of `node` that reads `sources`. A view's twin looks at the memory of its new source."""
    spec = op_spec(node.op)
    base = next(node.sources()).view_offs if spec.is_view else node.view_offs
    return Tensor(
        node.dtype, node.ne, name=node.name, nb=node.nb, op=node.op, params=node.params, src=sources,
        view_src=spec.shares(sources), view_offs=node.view_offs - base, flags=node.flags,
    )  # fmt: skip
