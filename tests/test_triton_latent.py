"""Latent attention on the triton backend, in Triton's interpreter: a matrix a head, alone and in fused groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import graphrt
from graphrt import Graph, Tensor, get_backend, new_input, ops
from graphrt.backends.triton import device
from graphrt.execute import Executable
from graphrt.testing import nmse, quantize

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton import context
from graphrt.backends.triton.kernels.mul_mat import dense, lower
from graphrt.backends.triton.kernels.mul_mat.heads import packed_head_gemv, plain_head_gemv
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.packing import PACKED_TYPES

#: f32 sums in another order, as NMSE; activations rounded to 8 bits in two parts; to f16.
SAME, TWO_PARTS, HALVES = 1e-11, 5e-9, 1e-6


def leaf(name: str, *ne: int, kind: str = "f32") -> Tensor:
    return new_input(kind, *ne, name=name)


def prepared(graph: Graph, backend: Any = None) -> Executable:
    return graphrt.prepare(graph, backend or [get_backend("triton", exact=False)])


def results(graph: Graph, backend: Any = None, sizes: dict[str, float] | None = None) -> list[np.ndarray]:
    """Outputs of random inputs, the same for equal graphs; indices count. sizes: of inputs by name, 1 for others."""
    exe = prepared(graph, backend)
    rng = np.random.default_rng(3)
    for t in graph.inputs:
        if t.dtype.kind == "int":
            exe.write(t, np.arange(1, t.n_elements + 1).reshape(t.shape))
            continue
        values = rng.standard_normal(t.shape).astype(np.float32) * (sizes or {}).get(t.name, 1.0)
        exe.write(t, quantize(values, t.dtype, rng))
    for _ in range(2):  # the second run finds the first one's memory
        exe.run()
    return [exe.read(t).astype(np.float64) for t in graph.outputs]


def launches(graph: Graph, backend: Any = None) -> dict[str, list[Any]]:
    """What the groups are lowered to, by their kernel or ops, functions for launches; less the packing of inputs."""
    (split,) = prepared(graph, backend).splits
    found: dict[str, list[Any]] = {}
    for segment in split.run.segments:
        steps = [s.kernel if isinstance(s, Launch) else getattr(s, "func", s) for s in segment.steps]
        found[segment.group.kernel or segment.group.label] = [s for s in steps if s is not context._pack_again]
    return found


# -- a matrix a head


def by_head(k: int, heads: int, n: int, rest: int = 8) -> Tensor:
    """The first k elements of each head, as heads lie in a token's row: [k, n, heads]."""
    x = leaf("x", k + rest, heads, n)
    return ops.permute(ops.view(x, (k, heads, n), x.nb[1:3]), 0, 2, 1, 3)


def product(kind: str, k: int, m: int, n: int, heads: int = 2) -> Tensor:
    return ops.mul_mat(leaf("w", k, m, heads, kind=kind), by_head(k, heads, n))


def side_by_side(kind: str, k: int, m: int, n: int, heads: int = 2) -> Graph:
    """The product, and what it found for a token in one row."""
    return Graph(ops.cont(ops.permute(product(kind, k, m, n, heads), 0, 2, 1, 3)))


#: kind, k, m, tokens: every type, heights that are no whole programs, one token to as many as there may be, rows that
#: each warp rounds for itself and that all round together.
FEW = [
    *((kind, 256, 5, 1) for kind in (*PACKED_TYPES, "bf16")), ("q5_0", 32, 18, 2), ("q5_0", 96, 17, 5),
    ("q5_1", 544, 5, 3), ("q8_0", 1056, 3, 2), ("q4_K", 2048, 2, 3),
    ("f16", 44, 20, 8), ("f32", 40, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "k", "m", "n"), FEW)
def test_few_tokens_take_one_launch(kind: str, k: int, m: int, n: int) -> None:
    kernel, limit = (packed_head_gemv, TWO_PARTS) if kind in PACKED_TYPES else (plain_head_gemv, SAME)
    graph = side_by_side(kind, k, m, n)
    assert launches(graph)["head_products"] == [kernel]
    (found,), (expected,) = results(graph), results(graph, "cpu")
    assert nmse(found, expected) < limit


@pytest.mark.parametrize("kind", ["q5_0", "f16"])
def test_a_product_by_itself(kind: str) -> None:
    graph = Graph(product(kind, 64, 17, 2))
    assert len(launches(graph)["MUL_MAT"]) == 1
    (found,), (expected,) = results(graph), results(graph, "cpu")
    assert nmse(found, expected) < TWO_PARTS


@pytest.mark.parametrize("kind", ["q5_0", "iq3_s", "f16", "f32"])
@pytest.mark.parametrize("size", [1.0, 3e6])
def test_many_tokens_are_written_in_place(kind: str, size: float) -> None:
    """size: of activations, which may pass f16's range."""
    k = 256 if kind == "iq3_s" else 64
    graph = side_by_side(kind, k, 20, 9)
    steps = launches(graph)["head_products"]
    assert steps.count(dense.multiply_each) == 1 and len(steps) <= 4
    (found,), (expected,) = (results(graph, backend, {"x": size}) for backend in (None, "cpu"))
    assert nmse(found, expected) < (SAME if kind == "f32" else HALVES)


def test_an_exact_backend_rounds_to_f16() -> None:
    exact = [get_backend("triton")]
    for kind, few in (("q8_0", False), ("f16", True)):
        found = launches(side_by_side(kind, 64, 8, 2), exact)
        assert "head_products" not in found and (plain_head_gemv in found["MUL_MAT"]) == few


def test_what_takes_which_way() -> None:
    fast = get_backend("triton", exact=False)

    def taken(kind: str, k: int = 256, n: int = 8, w: tuple[int, int] = (4, 1), x: tuple[int, int] = (4, 1)) -> bool:
        return lower.takes_head_gemv(Tensor(kind, (k, 8, *w)), Tensor("f32", (k, n, *x)), fast)

    assert taken("q4_K") and taken("f16") and not taken("iq3_s")
    assert taken("q4_K", 2048) and not taken("q4_K", 2304) and taken("f16", 2304)
    assert not taken("f16", n=9) and not taken("f16", w=(1, 1)) and not taken("f16", w=(2, 1))
    assert not taken("f16", w=(4, 2), x=(4, 2))
    assert not lower.takes_head_gemv(Tensor("f16", (64, 8, 4)), Tensor("f16", (64, 1, 4)), fast)


def _read_twice() -> Graph:
    made = product("q8_0", 64, 8, 2)
    return Graph(ops.cont(ops.permute(made, 0, 2, 1, 3)), ops.sqr(made))


def _output() -> Graph:
    made = product("q8_0", 64, 8, 2)
    return Graph(made, ops.cont(ops.permute(made, 0, 2, 1, 3)))


def _another_order() -> Graph:
    return Graph(ops.cont(ops.permute(product("q8_0", 64, 8, 2), 1, 0, 2, 3)))


def _some_heads() -> Graph:
    made = ops.permute(product("q8_0", 64, 8, 2, heads=3), 0, 2, 1, 3)
    return Graph(ops.cont(ops.view(made, (8, 2, 2), made.nb[1:3], made.nb[1])))


def _shared_matrices() -> Graph:
    made = ops.mul_mat(leaf("w", 64, 8, 2, kind="q8_0"), by_head(64, 4, 2))
    return Graph(ops.cont(ops.permute(made, 0, 2, 1, 3)))


def _made_weights() -> Graph:
    w = ops.sqr(leaf("w", 64, 8, 3))
    return Graph(ops.cont(ops.permute(ops.mul_mat(w, by_head(64, 3, 2)), 0, 2, 1, 3)))


UNFORMED: dict[str, tuple[Callable[[], Graph], str]] = {
    "a product read twice": (_read_twice, "head_products"),
    "a product that is an output": (_output, "head_products"),
    "a token's rows not side by side": (_another_order, "head_products"),
    "some of the heads": (_some_heads, "head_products"),
    "heads that share a matrix": (_shared_matrices, "head_products"),
    "weights that a node makes": (_made_weights, "head_products"),
    "weights of f64": (lambda: side_by_side("f64", 64, 8, 2), "head_products"),
}


@pytest.mark.parametrize("why", UNFORMED)
def test_no_group_is_formed(why: str) -> None:
    make, kernel = UNFORMED[why]
    graph = make()
    assert kernel not in launches(graph)
    for found, expected in zip(results(graph), results(graph, "cpu")):
        assert nmse(found, expected) < HALVES
