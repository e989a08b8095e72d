"""Arguments of wrong types and values: a GraphrtError that names them. The campaign is `python -m fuzz.run api`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from fuzz import api
from hypothesis import given, settings
from hypothesis import strategies as st

import graphrt
from graphrt import Graph, Tensor, new_input, ops
from graphrt.arguments import check_fields, checked
from graphrt.errors import BackendError, GraphError, GraphrtError, ModelError, SessionError
from graphrt.models.engine import SessionOptions


def _a() -> Tensor:
    return new_input("f32", 4, 3, name="a")


WRONG: list[tuple[Callable[[], object], type[GraphrtError], str]] = [
    (lambda: new_input("f32", 4.0, name="a"), GraphError, r"^new_input\(\): ne must be a whole number, got float 4.0$"),
    (lambda: new_input("f32", True, name="a"), GraphError, "ne must be a whole number, got bool True"),
    (lambda: new_input("f32", 2**57, name="a"), GraphError, "at most 2\\*\\*56 elements"),
    (lambda: new_input(None, 4, name="a"), GraphError, "dt must be a DType or a text, got None"),
    (
        lambda: ops.mul_mat(_a(), np.zeros((3, 4))),
        GraphError,
        r"x must be a Tensor, got a numpy.ndarray of shape \[3, 4\]",
    ),
    (lambda: ops.scale(_a(), "2"), GraphError, r"^scale\(\): s must be a number, got str '2'$"),
    (lambda: ops.reshape(_a(), [3, 4]), GraphError, r"ne must be a whole number, got list \[3, 4\]"),
    (lambda: ops.view(_a(), (2, 2), (16, 16, 16, 16)), GraphError, "nb has at most 3 strides"),
    (
        lambda: ops.rope(_a(), _a(), ops.RopeParams("4")),
        GraphError,
        "RopeParams: n_dims must be a whole number, got str",
    ),
    (lambda: Graph(1), GraphError, r"^Graph\(\): outputs must be a Tensor, got int 1$"),
    (lambda: graphrt.prepare(_a()), GraphError, "graph must be a Graph, got a graphrt.tensor.Tensor"),
    (
        lambda: graphrt.prepare(Graph(_a()), [1]),
        GraphError,
        "backends must be a list of Backend or a text or a Backend",
    ),
    (
        lambda: graphrt.prepare(Graph(ops.sqr(_a())), "cpu").read(3),
        GraphError,
        "tensor must be a Tensor or a text, got int 3",
    ),
    (lambda: graphrt.get_backend(3), BackendError, "name must be a text, got int 3"),
    (lambda: graphrt.load(3), ModelError, "model must be a text or a path or None, got int 3"),
    (lambda: SessionOptions(n_ctx="8"), SessionError, "SessionOptions: n_ctx must be a whole number, got str '8'"),
    (
        lambda: api._models()[0].generate(None),
        SessionError,
        "prompt must be a text or a list of whole numbers, got None",
    ),
    (lambda: api._models()[0].logits("abc"), SessionError, "tokens must be a list of whole numbers, got str 'abc'"),
    (lambda: next(api._models()[0].session().likeliest(2**31, 2)), SessionError, "a token id must be 0 to 328"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_arguments_are_named(call: Callable[[], object], error: type[GraphrtError], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_numpy_numbers_and_any_lists_will_do() -> None:
    t = new_input("f32", np.int64(4), np.int32(3), name="a")
    assert ops.scale(t, np.float32(2)).ne == ops.scale(t, 2).ne == (4, 3, 1, 1)
    assert ops.view(t, np.array([2, 2])).ne == ops.view(t, range(2, 4)[:1]).ne[:1] + (2, 1, 1)
    model = api._models()[0]
    rows = model.logits([1, 5, 9])
    assert np.array_equal(model.logits(np.array([1, 5, 9])), rows) and np.array_equal(model.logits((1, 5, 9)), rows)


@checked(SessionError)
def _all_kinds(
    a: Mapping[str, int], b: Callable[[], int] | None = None, *more: float, c: tuple[int, str] = (1, "a"), **d: Any
) -> Sequence[float]:
    return more


@pytest.mark.parametrize(
    ("args", "named", "message"),
    [
        ([[]], {}, "a must be a mapping, got list"),
        ([{1: 1}], {}, "a must be a mapping, got dict {1: 1}"),
        ([{}, 3], {}, "b must be a function or None, got int 3"),
        ([{}, None, 1.0, "x"], {}, "more must be a number, got str 'x'"),
        ([{}], {"c": (1, 2)}, "c must be a list of whole numbers, texts, got tuple"),
        ([{}], {"c": (1,)}, "c must be a list"),
    ],
    ids=str,
)
def test_kinds_of_annotations(args: list[Any], named: dict[str, Any], message: str) -> None:
    assert _all_kinds({"a": 1}, None, 1, 2.5, c=(2, "b"), anything=object()) == (1, 2.5)
    with pytest.raises(SessionError, match=message):
        _all_kinds(*args, **named)


def test_what_python_itself_says_stays() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        _all_kinds()  # type: ignore[call-arg]
    check_fields(SessionOptions(), SessionError)


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_random_calls_end_in_an_answer_or_an_error_of_ours(rng: random.Random) -> None:
    api.call(rng)
