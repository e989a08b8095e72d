"""A side of `graphrt diff` that is cut over ranks, as one that is not: what all ranks hold of a node, put together.

Ranks that have the same of a node agree in every bit. Parts of heads and of columns lie side by side. What ranks add up
is the whole behind the sum alone. The rest, as experts that are only some on each rank, can't be held against a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from graphrt.models.ranks.plan import RankPlan
from graphrt.tensor import Tensor
from graphrt.tools.diff.file import Run, node_keys
from graphrt.tools.inspect.node_stats import Values

#: How the graph of all ranks calls nodes of other ranks than the first.
_OF_RANK = re.compile(r"(.*)@(\d+)$", re.DOTALL)


class AllRanks:
    """The values of a run over ranks by the names of nodes of one rank. plan: how its weights are cut."""

    def __init__(self, run: Run, plan: RankPlan) -> None:
        self._run = run
        self._parts: dict[str, list[tuple[int, Tensor]]] = {}
        nodes = run.exe.graph.nodes
        for key, node in node_keys(run.exe.graph).items():
            name, rank = named(key)
            self._parts.setdefault(name, []).append((rank, node))
        self._joined = {source: node for node in nodes if node.op == "ALL_REDUCE" for source in node.sources()}
        #: What products with several matrices in one give lies in another order on ranks.
        self._mixed: set[Tensor] = set()
        several = {name for name, cut in plan.cuts.items() if cut.spans and len(cut.spans[0]) > 1}
        for node in nodes:
            sources = list(node.sources())
            if any(named(s.name)[0] in several or s in self._mixed and s.ne == node.ne for s in sources):
                self._mixed.add(node)

    def values(self, key: str, shape: tuple[int, ...]) -> Values | None:
        """What one rank has at its node of that key, whose values have this shape; None where ranks have nothing that
        is the same."""
        nodes = [node for _, node in sorted(self._parts.get(key, ()), key=lambda part: part[0])]
        if not nodes:
            return None
        if nodes[0] in self._joined:
            return self._run.values(self._joined[nodes[0]])
        parts = [self._run.values(node) for node in nodes]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or any(len(part.shape) != len(shape) for part in found):
            return None
        if all(part.shape == shape for part in found):
            alike = all(np.array_equal(part, found[0], equal_nan=True) for part in found)
            return found[0] if alike else None
        return None if any(node in self._mixed for node in nodes) else side_by_side(found, shape)


def side_by_side(parts: Sequence[Values], shape: tuple[int, ...]) -> Values | None:
    """Parts as the one of that shape that they are cut from along one of its sides; None where they are not."""
    cut = [i for i, n in enumerate(shape) if any(part.shape[i] != n for part in parts)]
    if len(cut) != 1 or sum(part.shape[cut[0]] for part in parts) != shape[cut[0]]:
        return None
    return np.concatenate(parts, cut[0])


def named(key: str) -> tuple[str, int]:
    """A tensor's name without its rank, and that; of `name@1#2` the second one of that name."""
    name, _, again = key.partition("#")
    found = _OF_RANK.match(name)
    if found is None:
        return key, 0
    return found[1] + (f"#{again}" if again else ""), int(found[2])
