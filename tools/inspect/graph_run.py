"""A saved case or a script's graph that can be run again with some of its nodes kept, as traced_step.Step has it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend
from graphrt.errors import MemoryPlanError
from graphrt.execute import Executable, prepare
from graphrt.graph import Graph
from graphrt.models.hparams import HParams
from graphrt.op import op_spec
from graphrt.tensor import Flag, Tensor
from graphrt.testing import AnyArray, Inputs, dequantize
from graphrt.tools.conformance.cases.model import operand_of
from graphrt.tools.conformance.cases.operands import init_of
from graphrt.tools.conformance.run.saved import load_failure
from graphrt.tools.inspect.subject import script_graph, script_of
from graphrt.tools.inspect.traced_step import Values, keeping

Make = Callable[[], tuple[Graph, Inputs]]


def made_from(text: str, seed: int) -> Make:
    """What gives the graph that `text` names, anew each time, with its inputs' values: those of a saved case, or for a
    script random ones that depend on the script's function, the seed and the input's name alone."""
    if text.endswith(".npz"):

        def saved() -> tuple[Graph, Inputs]:
            inputs = load_failure(Path(text))
            return inputs.graph(), inputs

        return saved
    path, function = script_of(text)

    def script() -> tuple[Graph, Inputs]:
        graph, inputs = script_graph(path, function), Inputs(f"{path.name}:{function}", seed)
        for leaf in graph.leafs:
            if leaf.buffer is None:
                _draw(inputs, leaf, graph)
        return graph, inputs

    return script


def _draw(inputs: Inputs, leaf: Tensor, graph: Graph) -> None:
    """Values that make sense to the first node that reads the leaf, straight or through views."""
    for node in graph.nodes:
        at = [i for i, s in enumerate(node.src) if s is not None and s.root is leaf]
        if at and not op_spec(node.op).is_view:
            roots: dict[Tensor, int] = {}
            operands = [None if s is None else operand_of(s, roots) for s in node.src]
            inputs.draw(leaf, init_of(node.op, at[0], operands))
            return
    inputs.draw(leaf)


class GraphRun:
    """A graph with known inputs on some backends. exe: of the latest run."""

    exe: Executable
    hp: HParams | None = None

    def __init__(self, make: Make, backends: Sequence[Backend]) -> None:
        self._make = make
        self.backends = list(backends)

    def inputs(self) -> dict[Tensor, AnyArray]:
        """The inputs' values, as stored."""
        return self._make()[1].values

    def graph(self, keep: Collection[int] = ()) -> Graph:
        """The graph anew, with the nodes at `keep` kept."""
        return keeping(self._make()[0], keep)

    def run(self, keep: Collection[int] | None = None) -> Executable:
        """Prepares the graph with the nodes at `keep` kept, writes its inputs and runs it."""
        graph, inputs = self._make()
        for leaf in inputs.values:  # written from outside, whatever a script calls it
            leaf.flags |= Flag.INPUT
        self.exe = prepare(keeping(graph, keep or ()), self.backends)
        inputs.fill(self.exe)
        self.exe.run()
        self.exe.synchronize()
        return self.exe

    def values(self, t: Tensor) -> Values | None:
        """The elements of a tensor after the latest run: float64 in torch's shape, None where it was not kept."""
        try:
            raw = self.exe.read(t)
        except MemoryPlanError:
            return None
        return np.asarray(dequantize(raw, t.dtype), np.float64)

    def cells(self, t: Tensor) -> npt.NDArray[np.int64] | None:
        """None: no tensor here is a cache's."""
        return None
