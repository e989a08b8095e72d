"""Random small graphs from hypothesis, and their naive evaluation.

The naive evaluation gives every tensor that is no view memory of its own for good, and computes node by node with
reference64. Whatever a planner, an in-place result, a fusion or a copy between backends gets wrong shows against it.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from graphrt import Tensor
from graphrt.execute import host_type
from graphrt.op import op_spec
from graphrt.tools.conformance.cases import programs
from graphrt.tools.conformance.cases.programs import KINDS, SHAPES, make_graph
from support.judging import addresses, stored
from support.reference64 import REFERENCE64


class RandomGraph(programs.RandomGraph):
    """A graph with its naive evaluation."""

    def naive(self, inputs: dict[Tensor, np.ndarray]) -> dict[Tensor, np.ndarray]:
        """Every output's final value, each root in memory of its own."""
        memory: dict[Tensor, np.ndarray] = {t: v.copy().reshape(-1).view(np.uint8) for t, v in inputs.items()}
        for node in self.graph.nodes:
            spec = op_spec(node.op)
            if spec.is_view:
                continue
            sources = [stored(s, memory[s.root]).astype(np.float64 if s.dtype.kind == "float" else np.int64)
                       if s is not None else None for s in node.src]  # fmt: skip
            result = REFERENCE64[node.op](node, *sources).astype(host_type(node.dtype))
            if node.root not in memory:
                memory[node.root] = np.zeros(node.root.nbytes, np.uint8)
            flat = np.ascontiguousarray(result).view(np.uint8).reshape(*node.shape[:3], -1)
            memory[node.root][addresses(node)] = flat
        return {t: stored(t, memory[t.root]) for t in self.graph.outputs}


@st.composite
def random_graphs(draw: st.DrawFn, max_nodes: int = 14) -> RandomGraph:
    """A program of up to `max_nodes` instructions; its last tensor and up to two more are outputs."""
    shapes = draw(st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=4))
    number = st.integers(0, 11)
    instructions = draw(st.lists(st.tuples(st.sampled_from(KINDS), number, number, number), max_size=max_nodes))
    made = make_graph(shapes, instructions, draw(st.lists(number, max_size=2)))
    return RandomGraph(made.graph, made.bounds)
