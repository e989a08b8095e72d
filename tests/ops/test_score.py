"""Score functions by themselves: what expressions are, their text, their derivative, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import score64

from graphrt import gradients, ops, prepare
from graphrt.backend import get_backend
from graphrt.backends.cpu.score import value
from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.ops import score
from graphrt.ops.cases.scores import SCORES
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.ops.score_calculus import derivative
from graphrt.ops.score_text import parsed
from graphrt.ops.score_tree import packed
from graphrt.tensor import Tensor, new_input
from graphrt.tools.inspect.describe import describe
from graphrt.tools.inspect.graph_json import graph_of, loads, to_json

S, B, H, QUERY, KEY = score.symbols()
SHAPE = (2, 4, 3, 50)


@pytest.mark.parametrize("name", SCORES)
def test_value_and_derivative_against_python_s_own_reading(name: str) -> None:
    """The text is Python: eval() of it with numbers that carry their slope, in float64."""
    e = SCORES[name](4, 50)
    text, numbers = packed(e)
    p = SimpleNamespace(score=text, score_numbers=numbers)
    s = torch.from_numpy(np.random.default_rng(0).normal(size=SHAPE) * 3)
    mine, slope = value(e, s), value(derivative(e), s)
    for b, h in np.ndindex(2, 4):
        found = score64.scored(p, s[b, h].numpy(), b, h, np.arange(50))
        assert found is not None
        np.testing.assert_allclose(mine[b, h], found.x, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(slope[b, h], found.d, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", SCORES)
def test_the_derivative_is_what_differences_say(name: str) -> None:
    e, step = SCORES[name](4, 50), 1e-6
    s = torch.from_numpy(np.random.default_rng(1).normal(size=SHAPE) * 2)
    if name == "branches":  # not over its corners
        s = torch.where(torch.minimum(s.abs(), torch.minimum((s - 2).abs(), (2 * s - 2).abs())) < 1e-3, 0.5, s)
    with np.errstate(invalid="ignore"):
        middle = (value(e, s + step) - value(e, s - step)) / (2 * step)
    slope = value(derivative(e), s)
    seen = value(e, s) > -math.inf
    np.testing.assert_allclose(slope[seen], middle[seen], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", SCORES)
def test_text_and_numbers_are_the_expression(name: str) -> None:
    e = SCORES[name](4, 50)
    assert parsed(*packed(e)) == e
    assert packed(e)[0] in repr(e)


def test_operators_bind_as_in_python() -> None:
    made = [
        S - (1 - S), (S - 1) - S, S / (2 * S), -(S + 1) * 2, -S * 2, S * -2.0, S - -2.0,
        (QUERY - KEY) % 3 + QUERY // 2 * S, score.where((QUERY < KEY) | (H > 1) & (B <= 0), S, 2),
        score.where(QUERY.equals(KEY), S, -S),
    ]  # fmt: skip
    for e in made:
        text, numbers = packed(e)
        assert parsed(text, numbers) == e
    assert packed(made[0])[0] == "s - (1.0 - s)" and packed(made[1])[0] == "s - 1.0 - s"


def test_written_numbers_are_folded() -> None:
    assert packed(S * (score.tanh(0.0) + 2))[0] == "s * 2.0"
    assert packed(S + 7 // 2 * QUERY)[0] == "s + 3 * i"


def test_other_numbers_are_the_same_code() -> None:
    assert packed(score.softcap(2.0))[0] == packed(score.softcap(50.0))[0]
    assert packed(S * score.number(2.0) + score.number(2.0))[1] == (2.0,)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: S if S < 1 else 0, "score.where"),
        (lambda: score.where(S, 1, 2), "truth"),
        (lambda: S + (S < 1), "not truths"),
        (lambda: S // 2, "whole"),
        (lambda: QUERY % -3, "over 0"),
        (lambda: QUERY // KEY, "written"),
        (lambda: score.table([1.0])[S], "whole number"),
        (lambda: score.table([])[QUERY], "1 to 4096"),
        (lambda: score.number(math.inf), "finite"),
        (lambda: S * 1e39, "finite"),
        (lambda: S + 2**40, "32 bits"),
        (lambda: S + True, "bool"),
        (lambda: S + "1", "str"),
        (lambda: score.log(0.0), "no number"),
        (lambda: score.relative([1.0, 2.0]), "odd"),
        (lambda: score.temperature([1.0, 0.0]), "over 0"),
        (lambda: score.as_params(_long(300)), "parts"),
        (lambda: score.as_params(score.table(range(4000))[QUERY] + score.table(range(1, 2000))[KEY] + S), "4096"),
        (lambda: score.as_params(1.0 * QUERY), "depends on s"),
        (lambda: score.as_params(S < 1), "depends on s"),
    ],
)
def test_what_is_no_score_function(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        make()


def _long(n: int) -> score.Expr:
    e = S
    for _ in range(n):
        e = e + 1.0
    return e


def test_doubling_ends() -> None:
    """A tree of 2^60 parts is told from its counts alone."""
    e = S
    for _ in range(60):
        e = e * e
    with pytest.raises(GraphError, match="parts"):
        score.as_params(e)
    assert "parts" in repr(e)


@pytest.mark.parametrize(
    "text, numbers",
    [
        ("s", ()), ("__import__('os')", ()), ("s.real", ()), ("s +", ()), ("s+1.0", ()), ("p[0] * s", ()),
        ("s * p[1]", (1.0, 2.0)), ("t[0:9, i] + s", (1.0,)), ("t[0:1, s] + s", (1.0,)), ("s if s else s", ()),
        ("(" * 400 + "s" + ")" * 400, ()), ("-" * 1000 + "s", ()), ("tanh(s, s)", ()), ("[s for s in s]", ()),
        ("s * 1e400", ()), ("s * p[0]", (math.nan,)), ("s" * 2000, ()), ("x", ()), ("s < 1.0 < 2.0", ()), ("s\n", ()),
    ],
)  # fmt: skip
def test_a_stranger_s_text_is_refused(text: str, numbers: tuple[float, ...]) -> None:
    with pytest.raises(GraphError):
        score.check_params(text, numbers, dict.fromkeys("bhij", range(1)))


def _attention(function: score.Expr | None, n_kv: int = 40, **given: Any) -> tuple[Tensor, list[Tensor]]:
    q = new_input("f32", 8, 3, 4, name="q")
    k, v = (new_input("f32", 8, n_kv, 2, name=name) for name in "kv")
    return ops.flash_attn_ext(q, k, v, None, 0.5, score=function, **given), [q, k, v]


def test_the_score_itself_is_no_function() -> None:
    assert _attention(score.identity())[0].params == _attention(None)[0].params


def test_whole_numbers_stay_within_32_bits() -> None:
    _attention(S + 1.0 * (QUERY * KEY * 1000))
    with pytest.raises(GraphError, match="32 bits"):
        _attention(S + 1.0 * (QUERY * KEY * 100_000_000))


def test_a_softcap_written_and_built_in() -> None:
    results = []
    for node, leaves in (_attention(score.softcap(1.5)), _attention(None, softcap=1.5)):
        exe = prepare(Graph(node), get_backend("cpu"))
        rng = np.random.default_rng(0)
        for t in leaves:
            exe.write(t, rng.normal(size=t.shape).astype(np.float32))
        exe.run()
        results.append(np.asarray(exe.read(node)))
    np.testing.assert_array_equal(*results)


def test_a_graph_of_one_goes_through_json() -> None:
    node, _ = _attention(score.relative([0.5, -1.25, 3.0]))
    again = graph_of(loads(json.dumps(to_json(describe(Graph(node))))))
    (made,) = [t for t in again.nodes if t.op == "FLASH_ATTN_EXT"]
    assert made.params == node.params


def test_who_computes_it_on_the_cpu_and_why() -> None:
    """What the op's softcap stands for is native, as that is; any other function is the reference's."""
    said = []
    for function in (score.sigmoid_gate(2.0), score.softcap(2.0)):
        exe = prepare(Graph(_attention(function)[0]), get_backend("cpu", exact=False))
        (split,) = exe.splits
        (step,) = split.run.steps
        said.append(step.runner)
    assert said[0] == "reference flash_attn_ext (native attention has no score function)"
    assert said[1].startswith("native attn")


def test_what_a_parameter_of_the_op_stands_for() -> None:
    """The softcap of either sign, to the bit, where the op has none itself and it is not 0."""
    params = FlashAttnParams(0.5)
    for cap in (2.0, -2.0):
        found = _attention(score.softcap(cap))[0].params
        assert score.built_in(found) == replace(params, softcap=2.0)
        s = torch.linspace(-30, 30, 999).reshape(1, 1, 1, -1)
        e = score.of_params(found.score, found.score_numbers)
        assert e is not None and torch.equal(value(e, s), 2.0 * torch.tanh(s / 2.0))
    other = _attention(score.alibi(4))[0].params
    for kept in (replace(found, softcap=5.0), replace(found, score_numbers=(0.0,)), other):
        assert score.built_in(kept) is kept
    assert score.built_in(params) is params


def test_packed_sequences_have_functions_of_positions_without_gradients() -> None:
    q, k, v = (new_input("f32", 8, n, 2, name=name) for name, n in (("q", 5), ("k", 6), ("v", 6)))
    starts = [new_input("i32", 3, name=name) for name in ("q_starts", "k_starts")]
    _, _, _, i, j = score.symbols()
    s = score.symbols()[0]
    for function, works in ((score.softcap(3.0), True), (s + 0.5 * (i - j), False)):
        out = ops.flash_attn_varlen(q, k, v, starts[0], 0.5, k_starts=starts[1], score=function)
        if works:
            assert gradients(out, [q], d_loss=new_input("f32", *out.ne, name="d"))
        else:
            with pytest.raises(GraphError, match="one by one"):
                gradients(out, [q], d_loss=new_input("f32", *out.ne, name="d"))
    with pytest.raises(GraphError, match="32 bits"):  # i begins at -5 here
        ops.flash_attn_varlen(q, k, v, starts[0], 0.5, k_starts=starts[1], score=s + (i * 2**30))
