"""What of a forward is kept for its backward, and what is computed again: the choice under a limit of memory.

The forward is cut into segments. What one of them hands to another is kept; all else of a segment but the last is
computed a second time when the backward comes to it. More segments keep less, and compute no more: every node but the
last segment's runs twice, whatever the number. Peaks are those of the planner for the nodes in the order of
training_graph(), without results that take over a source's memory: the runtime's own plan is at most that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.op import build, op_spec
from graphrt.plan import Request, plan_memory
from graphrt.printing import human_bytes
from graphrt.tensor import Tensor

#: Numbers of segments that are tried, the fewest first; 1 keeps everything.
SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def post_order(*results: Tensor) -> list[Tensor]:
    """All nodes that some results are made of, sources before users, as Graph orders them; leafs are left out."""
    done: set[Tensor] = set()
    order: list[Tensor] = []
    for result in results:
        stack: list[tuple[Tensor, Iterator[Tensor]]] = [] if result in done else [(result, result.sources())]
        done.add(result)
        while stack:  # a loop, not recursion: a model's graph is deeper than Python's stack
            tensor, rest = stack[-1]
            source = next(rest, None)
            if source is None:
                stack.pop()
                if not tensor.is_leaf:
                    order.append(tensor)
            elif source not in done:
                done.add(source)
                stack.append((source, source.sources()))
    return order


def backward_order(found: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the order in which a backward comes to them: those that need fewer nodes first."""
    sizes = {t: len(post_order(t)) for t in found}
    return sorted(found, key=sizes.__getitem__)


def training_graph(loss: Tensor, found: Sequence[Tensor]) -> Graph:
    """The graph of a loss and its gradients in the order that needs the least memory: each gradient is computed where
    the backward comes to it, and not after all that later ones need."""
    return Graph(loss, *backward_order(found))


def peak_of(nodes: Sequence[Tensor], kept: Sequence[Tensor]) -> int:
    """The bytes that the results of nodes take at once in this order. kept: those that are read at the end."""
    at = {node: i for i, node in enumerate(nodes)}
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    for node, i in at.items():
        for t in (node, *node.sources()):
            if not t.root.is_leaf:
                first.setdefault(t.root, i)
                last[t.root] = i
    for t in kept:
        last[t.root] = len(nodes)
    return plan_memory([Request(t, t.nbytes, first[t], last[t]) for t in first]).peak


def _handed_over(order: Sequence[Tensor]) -> list[int]:
    """By position, the bytes that nodes before it hand to nodes from it on."""
    at = {node: i for i, node in enumerate(order)}
    ends: dict[Tensor, int] = {}
    for i, node in enumerate(order):
        for t in node.sources():
            if not t.root.is_leaf:
                ends[t.root] = i
    change = [0] * (len(order) + 1)
    for root, end in ends.items():
        change[at[root] + 1] += root.nbytes
        change[end + 1 if end < len(order) else end] -= root.nbytes
    total, found = 0, []
    for step in change:
        total += step
        found.append(total)
    return found


def cuts(order: Sequence[Tensor], n: int) -> list[int]:
    """Where n segments of about equally many bytes of results begin, but for the first: each where little is handed
    over, within half a segment around its place."""
    handed, total, sizes = _handed_over(order), 0, []
    for node in order:
        total += 0 if node.view_src is not None else node.nbytes
        sizes.append(total)
    found: list[int] = []
    for k in range(1, n):
        low, high = (total * (2 * k + side) / (2 * n) for side in (-0.5, 0.5))
        near = [i for i, size in enumerate(sizes) if low <= size <= high and i > (found[-1] if found else 0)]
        if near:
            found.append(min(near, key=lambda i: handed[i]))
    return found


class Again:
    """The second computing of segments: of(node) is what the backward reads instead of a node.

    starts: where segments begin in `order`, but for the first. Nodes of the last segment stay, and so do those that
    write into a leaf, whose results lie there.
    """

    def __init__(self, order: Sequence[Tensor], starts: Sequence[int]) -> None:
        self._segment: dict[Tensor, int] = {}
        segment, begins = 0, set(starts)
        for i, node in enumerate(order):
            segment += i in begins
            self._segment[node] = segment
        self._last = segment
        self._made: dict[Tensor, Tensor] = {}

    def of(self, node: Tensor) -> Tensor:
        """A node's twin, whose sources within its segment are twins too."""
        segment = self._segment.get(node, self._last)
        if segment == self._last or op_spec(node.op).writes is not None:
            return node
        todo = [node]
        while todo:
            t = todo[-1]
            inside = [s for s in t.sources() if self._is_inside(s, segment)]
            missing = [s for s in inside if s not in self._made]
            if missing:
                todo += missing
                continue
            todo.pop()
            if t not in self._made:
                src = [s if s is None or s not in inside else self._made[s] for s in t.src]
                twin = build(op_spec(t.op), *src, params=t.params)
                self._made[t] = twin.named(f"{t.name[:50]} (again)") if t.name else twin
        return self._made[node]

    def _is_inside(self, t: Tensor, segment: int) -> bool:
        return self._segment.get(t) == segment and op_spec(t.op).writes is None


def chosen(
    order: Sequence[Tensor], limit: int, loss: Tensor, make: Callable[[Sequence[int]], list[Tensor]]
) -> list[Tensor]:
    """The gradients that make(starts) gives for the fewest segments whose peak is at most `limit` bytes. Raises
    GraphError where none is."""
    least, tried = -1, set[tuple[int, ...]]()
    for n in SEGMENTS:
        starts = tuple(cuts(order, n))
        if starts in tried:
            continue
        tried.add(starts)
        found = make(starts)
        peak = peak_of(post_order(loss, *backward_order(found)), [loss, *found])
        if peak <= limit:
            return found
        least = peak if least < 0 else min(least, peak)
    raise GraphError(
        f"recompute must leave memory for one segment and for what segments hand over, at least {human_bytes(least)}, "
        f"got {human_bytes(limit)}; raise it, or read fewer tokens at once"
    )
