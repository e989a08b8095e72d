"""A region's nodes as the fusion patterns ask for them: who reads what, through which views."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from graphrt.backend import Group, Region
from graphrt.op import op_spec
from graphrt.tensor import Tensor


def is_view(node: Tensor) -> bool:
    """A look at another tensor's memory, which takes no step. SET_ROWS and the like are none: they write."""
    return not node.is_leaf and op_spec(node.op).is_view


def looked_at(t: Tensor) -> Tensor:
    """The tensor whose memory `t` looks at, through any chain of views."""
    while is_view(t):
        source = t.src[0]
        assert source is not None
        t = source
    return t


def added_to(t: Tensor, total: Tensor) -> Tensor:
    """What an ADD of `t` and another tensor adds to it."""
    other = total.src[1] if total.src[0] is t else total.src[0]
    assert other is not None
    return other


def is_row(weight: Tensor | None, of: Tensor) -> bool:
    """`weight` is one contiguous f32 row as long as `of`'s."""
    return (
        weight is not None and weight.dtype.name == "f32" and weight.ne == (of.ne[0], 1, 1, 1) and weight.is_contiguous
    )


def is_bias(t: Tensor, of: Tensor) -> bool:
    """`t` is a row that all tokens of a product get alike, and no kernel writes it."""
    return t.is_leaf and is_row(t, of)


class Nodes:
    """A region's nodes as patterns ask for them. Views are not among them: what reads a view reads what it looks at."""

    def __init__(self, region: Region) -> None:
        self.all = [n for n in region.nodes if not is_view(n)]
        self.kept = region.kept
        self._readers: dict[Tensor, list[Tensor]] = {}
        self._viewed: set[Tensor] = set()
        for node in self.all:
            for source in dict.fromkeys(node.sources()):
                seen = looked_at(source)
                readers = self._readers.setdefault(seen, [])
                if node not in readers:
                    readers.append(node)
                if seen is not source:
                    self._viewed.add(seen)

    def of(self, op: str) -> Iterator[Tensor]:
        return (n for n in self.all if n.op == op)

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


Pattern = Callable[[Nodes], Iterator[Group]]


def scaled_by_row(nodes: Nodes, norm: Tensor) -> Tensor | None:
    """The MUL by a row of weights that alone reads a norm."""
    scaled = nodes.only_reader(norm)
    if scaled is None or scaled.op != "MUL" or scaled.src[0] is not norm or not is_row(scaled.src[1], norm):
        return None
    return scaled
