"""The exact CPU backend: a row's result is the same bits, however many others there are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from graphrt import Graph, ops, prepare
from graphrt.ops import RopeParams
from graphrt.ops.unary import UNARY_KINDS
from graphrt.tensor import Tensor, new_input

RNG = np.random.default_rng(0)
MOST = 37
COUNTS = (1, 2, 3, 4, 7, 16, 17, 33)


def x(n: int, *width: int) -> Tensor:
    return new_input("f32", *width, n, name="x")


#: What is made of n rows; the last dimension is the rows'.
MADE: dict[str, Callable[[int], Tensor]] = {
    "product": lambda n: ops.mul_mat(new_input("f32", 72, 40, name="w"), x(n, 72)),
    "product with one column": lambda n: ops.mul_mat(new_input("f32", 72, 1, name="w"), x(n, 72)),
    "long product": lambda n: ops.mul_mat(new_input("f32", 1000, 33, name="w"), x(n, 1000)),
    "experts": lambda n: ops.mul_mat_id(
        new_input("f32", 24, 20, 3, name="w"), x(n, 24, 1), new_input("i32", 2, n, name="ids")
    ),
    "norm": lambda n: ops.rms_norm(x(n, 52), 1e-6),
    "layer norm": lambda n: ops.norm(x(n, 52), 1e-6),
    "softmax": lambda n: ops.soft_max(x(n, 13), None, scale=0.7),
    "gate": lambda n: ops.glu(x(n, 26), None, "swiglu"),
    "rotation": lambda n: ops.rope(x(n, 10, 3), new_input("i32", n, name="positions"), RopeParams(10)),
    **{kind: lambda n, kind=kind: ops.unary(x(n, 13), kind) for kind in UNARY_KINDS},
}


@pytest.mark.parametrize("name", MADE)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    first = Graph(MADE[name](MOST)).inputs
    values: dict[str, np.ndarray] = {}
    for leaf in first:
        ints = {"ids": 3, "positions": 5000}.get(leaf.name)
        shape = leaf.shape
        values[leaf.name] = (
            RNG.integers(0, ints, shape).astype(np.int32) if ints else RNG.normal(size=shape).astype(np.float32)
        )

    def run(n: int) -> np.ndarray:
        exe = prepare(Graph(MADE[name](n).named("out")), "cpu")
        for leaf in exe.graph.inputs:
            value = values[leaf.name]
            if leaf.name != "w":  # its first n rows: along the last dimension that it has
                value = value.reshape(-1)[: leaf.n_elements].reshape(leaf.shape)
            exe.write(leaf, value)
        exe.run()
        return np.array(exe.read("out")).reshape(n, -1)

    whole = run(MOST)
    for n in COUNTS:
        assert np.array_equal(run(n), whole[:n]), f"{n} rows"
