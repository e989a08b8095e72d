"""Several ops at once: random small graphs as the runtime prepares them, fused and unfused, against a naive evaluation.

Here the planner, in-place results, fusion and copies between backends are part of what is tested. What a backend does
not take runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import graphrt
from graphrt.backend import Backend, Group, Region, get_backend
from graphrt.backends.cpu import evaluate
from graphrt.backends.cpu.blocks import encode
from graphrt.backends.cpu.memory import strided
from graphrt.op import op_spec
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs
from graphrt.tools.conformance.cases.fused import FusedCase, run_fused
from graphrt.tools.conformance.cases.programs import RandomGraph, seeded_graph
from graphrt.tools.conformance.run.grad import GradientCase, run_gradient
from graphrt.tools.conformance.run.reference import as_stored, computing_nodes, raw_bytes
from graphrt.tools.conformance.run.step import Outcome, outcome_of, run_case

Array = npt.NDArray[np.generic]
#: Absolute and relative difference that rounding may make through a dozen ops: values are at most 64.
TOLERANCE = 2e-3


def _no_single_node(inputs: Inputs) -> Tensor:
    raise AssertionError("a case of several ops has no single node")


@dataclass(frozen=True)
class GraphCase(Case):
    """A random graph by its number. fused: as the backend's fuse() groups it, else node by node."""

    number: int = 0
    fused: bool = True


def graph_cases(n: int) -> Iterator[GraphCase]:
    """n graphs, each fused and unfused."""
    for i in range(n):
        for fused in (True, False):
            yield GraphCase("GRAPH", {"number": i, "fused": fused}, _no_single_node, number=i, fused=fused)


def run_any(case: Case, backend: Backend, seed: int, saved: Path | None) -> Outcome:
    """Runs a case of one op or of several."""
    if isinstance(case, FusedCase):
        return run_fused(case, backend, seed)
    if isinstance(case, GradientCase):
        return run_gradient(case, backend, seed)
    return run_graph(case, backend, seed) if isinstance(case, GraphCase) else run_case(case, backend, seed, saved=saved)


def run_graph(case: GraphCase, backend: Backend, seed: int) -> Outcome:
    """Prepares and runs a random graph three times: on inputs, on others, and on the last ones as they were left."""
    random = seeded_graph(case.number + 1_000_003 * seed)
    values = [random.values(run) for run in (0, 1)]
    runs = [(inputs, naive(random, inputs)) for inputs in (*values, values[1])]
    return outcome_of(case, lambda: _compare(random, runs, backend, case.fused))


_Values = dict[Tensor, Array]


def _compare(random: RandomGraph, runs: list[tuple[_Values, _Values]], backend: Backend, fused: bool) -> str:
    """What differs from the naive evaluation, "" when nothing does."""
    original = backend.fuse
    if not fused:
        setattr(backend, "fuse", _one_by_one)  # noqa: B010 (the backend is somebody else's class)
    try:
        exe = graphrt.prepare(random.graph, [backend, get_backend("cpu")] if backend.name != "cpu" else [backend])
    finally:
        if not fused:
            setattr(backend, "fuse", original)  # noqa: B010
    rewritten = any(op_spec(node.op).writes is not None for node in random.graph.nodes)
    for run, (inputs, outputs) in enumerate(runs):
        for t, values in inputs.items() if run < 2 or rewritten else ():
            exe.write(t, values)
        exe.run()
        for t, expected in outputs.items():
            actual = exe.read(t)
            if not np.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                return f"{t!r} differs in run {run}; ops: {' '.join(n.op for n in random.graph.nodes)}"
    return ""


def _one_by_one(region: Region) -> list[Group]:
    return [Group([node]) for node in region.nodes]


def naive(random: RandomGraph, inputs: dict[Tensor, Array]) -> dict[Tensor, Array]:
    """Every output's final value, each root in memory of its own, node by node in float64."""
    memory = {t: np.ascontiguousarray(v).reshape(-1).view(np.uint8).copy() for t, v in inputs.items()}
    for node in computing_nodes(random.graph):
        sources = [
            strided(torch.from_numpy(memory[s.root]), s.view_offs, s) if s is not None else None for s in node.src
        ]
        result = evaluate(node, sources)
        if op_spec(node.op).writes is None:
            memory[node.root] = raw_bytes(encode(result, node.dtype))
    return {t: as_stored(t, memory[t.root], t.view_offs) for t in random.graph.outputs}
