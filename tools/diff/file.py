"""A side of `graphrt diff` that does not run: values from a .npz file, matched to nodes by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.tensor import Tensor
from graphrt.tools.inspect.graph_run import GraphRun
from graphrt.tools.inspect.llama_names import llama_name
from graphrt.tools.inspect.node_stats import Values
from graphrt.tools.inspect.npz import open_npz
from graphrt.tools.inspect.traced_step import Step

Run = Step | GraphRun


def node_keys(graph: Graph) -> dict[str, Tensor]:
    """The nodes by name; a name that comes again gets #2, #3 and so on, as `graphrt trace -o` writes it."""
    found: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for node in graph.nodes:
        counts[node.name] = n = counts.get(node.name, 0) + 1
        found[node.name if n == 1 else f"{node.name}#{n}"] = node
    return found


@dataclass
class FileSide:
    """Values from elsewhere by name. They are found under graphrt's names, else under llama.cpp's: there `Qcur-0` alone
    is the last node that has the name and as many elements, and with `Qcur-0#2` beside it the first."""

    title: str
    arrays: dict[str, Values]

    def by_key(self, run: Run) -> dict[str, Values]:
        """The values of a graph's nodes, in the shape that the run's own have."""
        nodes, self._run = node_keys(run.exe.graph), run
        found: dict[str, Values] = {}
        theirs: dict[str, list[str]] = {}
        for key, node in nodes.items():
            theirs.setdefault(llama_name(node), []).append(key)
            self._take(found, key, node, key)
        for name, keys in theirs.items():
            if f"{name}#2" in self.arrays:
                for i, key in enumerate(keys):
                    self._take(found, key, nodes[key], f"{name}#{i + 1}" if i else name)
            elif not any(key in found for key in keys):
                for key in reversed(keys):
                    if self._take(found, key, nodes[key], name):
                        break
        return found

    def _take(self, found: dict[str, Values], key: str, node: Tensor, name: str) -> bool:
        array = self.arrays.get(name)
        cells = self._run.cells(node)
        shape = node.shape if cells is None else (*node.shape[:2], len(cells), node.ne[0])
        if array is None or key in found or _trimmed(array.shape) != _trimmed(shape):
            return False
        found[key] = array.reshape(shape)
        return True


def _trimmed(shape: Sequence[int]) -> list[int]:
    """Without the ones in front, which files may leave out."""
    kept = list(shape)
    while kept and kept[0] == 1:
        kept.pop(0)
    return kept


def file_side(path: str) -> FileSide:
    """The arrays of a .npz file as float64. Raises GraphError."""
    with open_npz(path, "values as `graphrt trace -o` writes them") as file, np.errstate(invalid="ignore"):
        arrays, left = {}, file.most
        for name in file.names:
            values = file.array(name)
            left -= 8 * values.size
            if left < 0:
                raise GraphError(
                    f"values of this file may take {file.most} bytes as float64, they need more from {name[:80]!r} on; "
                    f"save fewer nodes, or without packing them"
                )
            arrays[name] = values.astype(np.float64)
    return FileSide(path, arrays)
