"""The fast form of the CPU backend on the conformance cases of every op that it has a form of."""

from __future__ import annotations

import numpy as np
import pytest
from support.judging import ROUNDED, Judged

from graphrt import Graph, get_backend, new_input, ops, prepare
from graphrt.backends.cpu import fast
from graphrt.backends.cpu.lower import _METHODS
from graphrt.dtypes import dtype
from graphrt.testing import Case, all_cases, nmse, quantize

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)

CASES = [case for case in all_cases() if case.op in _METHODS and not case.needs_bytes]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fast_form_is_right(case: Case) -> None:
    judged = Judged(case, rounds=16)
    exe = judged.run(get_backend("cpu", exact=False))
    judged.check(exe)
    judged.check_sources_unchanged(exe)


PRODUCTS = [case for case in CASES if case.op in ROUNDED][::10]


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
@pytest.mark.parametrize("bits", [8, 32])
def test_products_with_other_roundings(case: Case, bits: int) -> None:
    if bits == 8 and fast.form_of("q8_0", 8).parts != 1:
        pytest.skip("this machine's instructions take 16 bits")
    judged = Judged(case, rounds=bits if bits < 32 else None)
    judged.check(judged.run(get_backend("cpu", exact=False, activation_bits=bits)))


@pytest.mark.parametrize("tokens", [2, 11])
@pytest.mark.parametrize(("kind", "biased"), [("q8_0", False), ("q8_0", True), ("f32", True)])
def test_experts_change_between_runs(kind: str, biased: bool, tokens: int) -> None:
    """A prepared graph; numbers of no expert leave nothing of the run before in their rows."""
    x, ids = new_input("f32", 32, 1, tokens, name="x"), new_input("i32", 2, tokens, name="ids")
    out = ops.mul_mat_id(new_input(kind, 32, 5, 4, name="w"), x, ids)
    if biased:
        out = ops.add_id(out, new_input("f32", 5, 4, name="bias"), ids)
    exe = prepare(Graph(out), get_backend("cpu", exact=False))
    rng = np.random.default_rng(tokens)
    w = rng.integers(-127, 128, (4, 5, 32)).astype(np.float32)
    w[..., 0] = 127  # so that q8_0 holds them as they are
    exe.write("w", w if kind == "f32" else quantize(w, dtype(kind)))
    bias = rng.standard_normal((4, 5)).astype(np.float32)
    if biased:
        exe.write("bias", bias)
    for least, most in ((0, 4), (-1, 5), (1, 3)):
        values, chosen = rng.standard_normal((tokens, 1, 32)), rng.integers(least, most, (tokens, 2))
        chosen[0] = least, most - 1
        exe.write("x", values)
        exe.write("ids", chosen)
        exe.run()
        known = (chosen >= 0) & (chosen < 4)
        expert = np.where(known, chosen, 0)
        expected = np.einsum("tsmk,tk->tsm", w[expert].astype(np.float64), values[:, 0]) + biased * bias[expert]
        found = exe.read(out).reshape(expected.shape)
        # q8_0's activations are rounded to 16 bits
        assert nmse(found[known], expected[known]) < (1e-8 if kind == "q8_0" else 1e-12)
        assert np.isnan(found[~known]).all()


def test_experts_of_two_layers() -> None:
    """Each product takes its own experts, whatever the one before was given; two with the same ones too."""
    tokens, rng = 11, np.random.default_rng(3)
    x, w = new_input("f32", 32, 1, tokens, name="x"), new_input("q8_0", 32, 5, 4, name="w")
    first, second = (new_input("i32", 2, tokens, name=name) for name in ("first", "second"))
    graph = Graph(*(ops.mul_mat_id(w, x, ids, name=f"y{i}") for i, ids in enumerate((first, first, second, first))))
    values = {"x": rng.standard_normal((tokens, 32)), "w": quantize(rng.standard_normal((4, 5, 32)), dtype("q8_0"))}
    values |= {name: rng.integers(0, 4, (tokens, 2)) for name in ("first", "second")}
    found = []
    for exact in (False, True):
        exe = prepare(graph, get_backend("cpu", exact=exact))
        exe.write_all(values)
        exe.run()
        found.append([exe.read(t) for t in graph.outputs])
    for got, wanted in zip(*found):
        assert nmse(got, wanted) < 1e-8


@pytest.mark.parametrize("tokens", [2, 11])
@pytest.mark.parametrize("why", ["other experts", "fewer biases", "read twice"])
def test_biases_that_are_not_the_products(why: str, tokens: int) -> None:
    """ADD_ID behind MUL_MAT_ID that is no part of it."""
    x, ids = new_input("f32", 32, 1, tokens, name="x"), new_input("i32", 2, tokens, name="ids")
    product = ops.mul_mat_id(new_input("f32", 32, 5, 4, name="w"), x, ids)
    bias = new_input("f32", 5, 3 if why == "fewer biases" else 4, name="bias")
    other = new_input("i32", 2, tokens, name="other")
    total = ops.add_id(product, bias, other if why == "other experts" else ids)
    graph = Graph(ops.add(total, product) if why == "read twice" else total)
    exes = [prepare(graph, get_backend("cpu", exact=exact)) for exact in (False, True)]
    rng = np.random.default_rng(tokens)
    for leaf in graph.inputs:
        values = rng.standard_normal(leaf.ne[::-1])
        if leaf.dtype.kind == "int":
            values = rng.integers(0, 4, leaf.ne[::-1])
            values.flat[0] = 3
        for exe in exes:
            exe.write(leaf, values)
    for exe in exes:
        exe.run()
    found, expected = (exe.read(graph.outputs[0]) for exe in exes)
    wrong = np.isnan(expected)
    assert np.array_equal(np.isnan(found), wrong)
    assert wrong.any() == (why == "fewer biases")
    assert nmse(found[~wrong], expected[~wrong]) < 1e-12
