"""Planned memory, in-place results, fusion and copies between backends against a naive evaluation of random graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from support.programs import RandomGraph, random_graphs
from support.toy import ToyBackend

import graphrt
from graphrt.backend import Backend, get_backend
from graphrt.op import op_spec

#: What to prepare on; a new form of a backend is tested by adding a row.
BACKENDS: dict[str, Callable[[], list[Backend]]] = {
    "cpu": lambda: [get_backend("cpu")],
    "cpu fast": lambda: [get_backend("cpu", exact=False)],
    "toy+cpu": lambda: [ToyBackend(), get_backend("cpu")],
}


def check(random: RandomGraph, backends: list[Backend]) -> None:
    """Each run of one Executable gives what the naive evaluation gives: with new inputs, and with the last ones."""
    exe = graphrt.prepare(random.graph, backends)
    rewritten = any(op_spec(node.op).writes is not None for node in random.graph.nodes)
    for run, seed in enumerate((0, 1, 1)):
        inputs = random.values(seed)
        for t, values in inputs.items() if run < 2 or rewritten else ():
            exe.write(t, values)
        exe.run()
        for t, expected in random.naive(inputs).items():
            np.testing.assert_allclose(exe.read(t), expected, rtol=2e-3, atol=2e-3, err_msg=f"{t!r} in run {run}")


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=200)
@given(random=random_graphs())
def test_prepared_equals_naive(name: str, random: RandomGraph) -> None:
    check(random, BACKENDS[name]())
