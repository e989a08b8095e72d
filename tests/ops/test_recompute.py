"""recompute=: less memory for the same bits, as little computed again as fits, and what does not fit."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from graphrt import Graph, Tensor, gradients, new_input, ops, prepare
from graphrt.errors import GraphError
from graphrt.ops.gradients import _built
from graphrt.ops.recompute import backward_order, cuts, peak_of, post_order, training_graph

LAYERS, WIDTH, TOKENS = 12, 16, 40


@cache
def _deep() -> tuple[Tensor, list[Tensor]]:
    """A residual stack whose layers have several times the stream's activations."""
    x, weights = new_input("f32", WIDTH, TOKENS, name="x"), []
    for il in range(LAYERS):
        up, down = (new_input("f32", a, b, name=f"{n}{il}") for n, a, b in (("up", 16, 64), ("down", 64, 16)))
        weights += [up, down]
        hidden = ops.unary(ops.mul_mat(up, ops.rms_norm(x, 1e-5)), "gelu", name=f"hidden-{il}")
        x = ops.add(ops.mul_mat(down, ops.sqr(hidden)), x, name=f"l_out-{il}")
    return ops.sum_rows(ops.reshape(ops.sqr(x), WIDTH * TOKENS)), weights


def _peak(loss: Tensor, found: list[Tensor]) -> int:
    return peak_of(post_order(loss, *backward_order(found)), [loss, *found])


def _run(loss: Tensor, weights: list[Tensor], found: list[Tensor]) -> tuple[list[np.ndarray], int]:
    exe = prepare(training_graph(loss, found), "cpu")
    rng = np.random.default_rng(0)
    for t in sorted(exe.graph.inputs, key=lambda t: t.name):
        exe.write(t, rng.normal(0, 0.2, t.shape).astype(np.float32))
    exe.run()
    plan = exe.arenas["cpu"].plan
    return [exe.read(t).copy() for t in found], plan.peak - sum(t.nbytes for t in exe.graph.inputs)


def test_less_memory_and_the_same_bits() -> None:
    loss, weights = _deep()
    kept = gradients(loss, weights)
    whole = _peak(loss, kept)
    expected, most = _run(loss, weights, kept)
    assert most <= whole
    own = sum(t.nbytes for t in kept)  # the gradients themselves, which stay
    for share in (0.7, 0.45):
        limit = own + int((whole - own) * share)
        found = gradients(loss, weights, recompute=limit)
        assert _peak(loss, found) <= limit
        actual, took = _run(loss, weights, found)
        assert took <= limit
        for a, b in zip(actual, expected):
            np.testing.assert_array_equal(a, b)


def _again(loss: Tensor, found: list[Tensor]) -> int:
    return sum(t.name.endswith("(again)") for t in post_order(loss, *found))


def test_no_more_is_computed_again_than_must_be() -> None:
    loss, weights = _deep()
    whole = _peak(loss, gradients(loss, weights))
    assert _again(loss, gradients(loss, weights, recompute=whole)) == 0
    assert 0 < _again(loss, gradients(loss, weights, recompute=whole - 1)) < 0.6 * len(post_order(loss))


def test_a_limit_that_nothing_fits_in() -> None:
    loss, weights = _deep()
    with pytest.raises(GraphError, match="at least .*, got 1000 B; raise it, or read fewer tokens"):
        gradients(loss, weights, recompute=1000)


def test_segments_are_cut_where_little_is_handed_over() -> None:
    loss, _ = _deep()
    order = post_order(loss)
    for n in (2, 4):
        starts = cuts(order, n)
        assert len(starts) == n - 1 and starts == sorted(set(starts))
        for i in starts:  # at the stream alone, or where a norm of it has just been taken
            assert order[i - 1].name.startswith("l_out") or order[i - 1].op == "RMS_NORM" or order[i].op == "RMS_NORM"


def test_gradients_are_computed_where_the_backward_comes_to_them() -> None:
    """The first layer's weights first would need all other layers' gradients of activations at once."""
    loss, weights = _deep()
    found = gradients(loss, weights)
    assert backward_order(found) == found[::-1]
    in_order, turned = (peak_of(post_order(loss, *f), [loss, *found]) for f in (backward_order(found), found))
    assert in_order < turned
    assert [t.name for t in training_graph(loss, found).outputs][1:] == [t.name for t in found[::-1]]


def test_what_writes_is_not_written_twice() -> None:
    """A cache that the forward fills is read again, not filled again."""
    x, ids, cache = new_input("f32", 8, 4, name="x"), new_input("i64", 4, name="ids"), new_input("f32", 8, 9, name="c")
    y = x
    for _ in range(6):
        y = ops.unary(y, "tanh")
    written = ops.set_rows(y, ids, cache)
    z = ops.view(written, (8, 9))
    for _ in range(6):
        z = ops.unary(z, "sigmoid")
    loss = ops.sum_rows(ops.reshape(z, 72))
    order, twins = post_order(loss), 0
    for start in range(1, len(order)):  # wherever the forward is cut
        nodes = post_order(loss, *_built(order, [start], loss, [x], None))
        assert sum(node.op == "SET_ROWS" for node in nodes) == 1
        twins += sum(node.name.endswith("(again)") or node.op == "UNARY" for node in nodes) > 12
    assert twins > 6


def test_what_is_read_at_the_end_counts_to_the_end() -> None:
    a = new_input("f32", 256, name="a")
    first, second = ops.sqr(a), ops.sqrt(a)
    assert peak_of([first, second], [first, second]) == 2 * first.nbytes
    assert peak_of([first, second], [second]) == first.nbytes
    assert peak_of([first, ops.view(first, (4,)), second], [second]) == first.nbytes


def test_post_order_is_a_graph_s() -> None:
    loss, weights = _deep()
    found = gradients(loss, weights)
    assert post_order(loss, *found) == Graph(loss, *found).nodes
