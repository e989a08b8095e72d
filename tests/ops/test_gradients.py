"""gradients(): every op's rule against finite differences, what is refused, and steps that train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphrt import Graph, Tensor, get_backend, gradients, new_input, new_tensor, ops, prepare
from graphrt.backend import Usage
from graphrt.errors import GraphError
from graphrt.op import op_spec, register_backward, registered_ops
from graphrt.ops.opt_step import adamw_moments
from graphrt.testing import all_cases
from graphrt.tools.conformance.run.grad import check_case

CASES = {str(case): case for case in all_cases(which="grad")}


def f32(name: str, *ne: int) -> Tensor:
    return new_input("f32", *ne, name=name)


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_what_finite_differences_say(name: str) -> None:
    assert check_case(CASES[name], get_backend("cpu"), most=12) == ""


def test_every_op_has_a_gradient_or_a_sentence() -> None:
    with_rule = {name for name, spec in registered_ops().items() if not isinstance(spec.backward, str)}
    assert with_rule == {case.op for case in CASES.values()}
    for name, spec in registered_ops().items():
        if isinstance(spec.backward, str):
            assert spec.backward.startswith(f"{name} ") and "no rule" not in spec.backward, name


def test_an_op_has_one_rule() -> None:
    with pytest.raises(GraphError, match="one rule for its gradient, ADD has one already"):
        register_backward("ADD", "ADD has none")
    assert not isinstance(op_spec("ADD").backward, str)


def _values(outputs: list[Tensor], given: dict[str, Any]) -> list[np.ndarray]:
    exe = prepare(Graph(*outputs), "cpu")
    for name, value in given.items():
        exe.write(name, value)
    exe.run()
    return [np.array(exe.read(t)).reshape([n for n in t.shape if n > 1] or [1]) for t in outputs]


# -- the walk


def test_what_is_read_twice_has_the_sum() -> None:
    a, b = f32("a", 3), f32("b", 3)
    shared = ops.mul(a, b)
    loss = ops.sum_rows(ops.add(ops.mul(shared, shared), ops.scale(shared, 3.0)))
    of_a, of_shared = gradients(loss, [a, shared])
    x, y = np.array([1.0, -2.0, 0.5], np.float32), np.array([3.0, 1.0, 2.0], np.float32)
    found = _values([of_a, of_shared], {"a": x, "b": y})
    np.testing.assert_allclose(found[1], 2 * x * y + 3, rtol=1e-6)
    np.testing.assert_allclose(found[0], (2 * x * y + 3) * y, rtol=1e-6)


def test_the_loss_by_itself_and_by_a_leaf_that_it_is() -> None:
    a = f32("a", 1)
    (one,) = gradients(a, [a])
    assert _values([one], {"a": [5.0]})[0].tolist() == [1.0]
    d = f32("d", 1)
    assert _values(gradients(a, [a], d_loss=d), {"d": [7.0]})[0].tolist() == [7.0]


def test_a_gradient_of_its_own_for_each() -> None:
    """Both summands have the same one, and each is named after its tensor."""
    a, b = f32("a", 2), f32("b", 2)
    of = gradients(ops.sum_rows(ops.add(a, b)), [a, b])
    assert [t.name for t in of] == ["grad for a", "grad for b"] and of[0] is not of[1]
    given = {name: np.zeros(2, np.float32) for name in ("a", "b")}
    assert [v.tolist() for v in _values(of, given)] == [[1.0, 1.0]] * 2


def _refused() -> dict[str, tuple[Callable[[], object], str]]:
    a, b, mask = f32("a", 4, 3), f32("b", 4), new_input("f16", 7, 3, name="mask")
    one = ops.sum_rows(ops.reshape(a, 12))
    q, k = f32("q", 8, 3), f32("k", 8, 7)
    attn = ops.flash_attn_ext(q, k, k, mask, 1.0)
    q8 = new_input("q8_0", 32, 4, name="q8")
    chosen = ops.get_rows(f32("table", 2, 4), ops.top_k(b, 1))
    pages, n = f32("pages", 8, 16, 1, 2), new_input("i32", 2, name="starts")
    paged = ops.flash_attn_varlen(
        q, pages, pages, n, 1.0, lengths=new_input("i32", 1, name="l"),
        block_table=new_input("i32", 2, 1, name="t"),
    )  # fmt: skip
    packed = ops.flash_attn_varlen(q, k, k, n, 1.0, k_starts=n, mask=new_input("f16", 9, 3, name="m"))
    total = ops.sum_rows(ops.reshape(attn, 24))
    return {
        "a loss of many": (lambda: gradients(ops.sqr(a), [a]), "a loss is one number"),
        "d_loss of another shape": (lambda: gradients(ops.sqr(a), [a], d_loss=b), "in the loss's shape"),
        "not f32": (lambda: gradients(ops.sqr(new_input("f16", 1, name="h")), []), "taken of f32"),
        "not in it": (lambda: gradients(one, [b]), r"does not on b \(f32\[4\]\)"),
        "integers": (lambda: gradients(one, [n]), "of a plain float type, got starts"),
        "quantized": (lambda: gradients(one, [q8]), "of a plain float type, got q8"),
        "a mask": (lambda: gradients(total, [mask]), "'mask': a mask is a constant"),
        "pages": (lambda: gradients(paged, [q], d_loss=f32("d", 8, 1, 3)), "pages are of a cache"),
        "a mask of packed sequences": (
            lambda: gradients(packed, [q], d_loss=f32("d", *packed.ne)), "with an explicit mask there is none"),
        "a second one": (lambda: gradients(gradients(one, [a])[0], [a], d_loss=f32("d", 4, 3)), "does not on a"),
        "a second one, on the way": (
            lambda: gradients(ops.sum_rows(ops.silu_back(b, b)), [b]), "SILU_BACK is a gradient itself"),
        "labels": (lambda: gradients(ops.cross_entropy_loss(b, f32("l", 4)), [b.__class__("f32", (4,))]), "depend on"),
        "only what chooses": (lambda: gradients(chosen, [b], d_loss=f32("d", 2)), r"does not on b"),
    }  # fmt: skip


@pytest.mark.parametrize("what", _refused())
def test_what_is_refused(what: str) -> None:
    make, message = _refused()[what]
    with pytest.raises(GraphError, match=message):
        make()


def test_quantized_weights_and_tables_are_refused_by_name() -> None:
    weights, x = new_tensor("q8_0", 32, 4), f32("x", 32, 3)
    node = ops.mul_mat(weights, x, name="ffn_up")
    rule = op_spec("MUL_MAT").backward
    assert not isinstance(rule, str)
    with pytest.raises(GraphError, match="MUL_MAT of ffn_up gives no gradient of 'weights': they are q8_0"):
        rule(node, f32("d", 4, 3), frozenset({"weights"}))
    assert list(rule(node, f32("d", 4, 3), frozenset({"x"}))) == ["x"]


# -- attention


def test_what_no_query_sees_has_no_gradient_at_all() -> None:
    """Padding: exact zeros, whatever the cells hold."""
    q, k, v = f32("q", 8, 3, 2), f32("k", 8, 9, 1), f32("v", 8, 9, 1)
    mask = new_input("f16", 9, 3, name="mask")
    out = ops.flash_attn_ext(q, k, v, mask, 0.3)
    d, rng = f32("d", *out.ne), np.random.default_rng(0)
    given = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in (q, k, v, d)}
    given["k"][:, :, 6:], given["v"][:, :, 6:] = np.nan, np.inf
    given["mask"] = np.zeros(mask.shape, np.float16)
    given["mask"][..., 6:] = -np.inf
    of_q, of_k, of_v = _values(gradients(out, [q, k, v], d_loss=d), given)
    assert (of_k[6:] == 0).all() and (of_v[6:] == 0).all() and np.isfinite(of_q).all() and (of_k[:6] != 0).all()


def test_a_row_that_sees_nothing_gives_nothing() -> None:
    q, k, v, sinks = f32("q", 8, 3), f32("k", 8, 4), f32("v", 8, 4), f32("sinks", 1)
    mask = new_input("f16", 4, 3, name="mask")
    out = ops.flash_attn_ext(q, k, v, mask, 0.3, sinks=sinks)
    d, rng = f32("d", *out.ne), np.random.default_rng(0)
    given = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in (q, k, v, d, sinks)}
    given["mask"] = np.full(mask.shape, -np.inf, np.float16)
    for found in _values(gradients(out, [q, k, v, sinks], d_loss=d), given):
        assert (found == 0).all()


def test_a_gradient_is_the_same_bits_each_time() -> None:
    case = CASES["FLASH_ATTN_EXT(grad=allofit)"]
    node = case.build().result
    q = node["q"]
    d = f32("d", *node.ne)
    exe = prepare(Graph(*gradients(node, [q, node["k"], node["v"]], d_loss=d)), "cpu")
    inputs = case.build()
    for t, values in inputs.values.items():
        if t.name in {leaf.name for leaf in exe.graph.inputs}:
            exe.write(t.name, values)
    exe.write("d", np.ones(d.shape, np.float32))
    runs = []
    for _ in range(3):
        exe.run()
        runs.append([exe.read(t).copy() for t in exe.graph.outputs])
    for again in runs[1:]:
        for a, b in zip(runs[0], again):
            np.testing.assert_array_equal(a, b)


# -- training


def _mlp() -> tuple[Tensor, list[Tensor], dict[str, np.ndarray]]:
    """A small network with weights in memory that steps may write."""
    backend, rng = get_backend("cpu"), np.random.default_rng(1)
    weights = []
    for name, ne in (("up", (6, 8)), ("down", (8, 3)), ("scale", (8,))):
        leaf = new_tensor("f32", *ne, name=name)
        leaf.buffer = backend.alloc(leaf.nbytes, Usage.STATE)
        leaf.buffer.write(0, rng.normal(size=leaf.shape).astype(np.float32).reshape(-1).view(np.uint8))
        weights.append(leaf)
    x, labels = f32("x", 6, 5), f32("labels", 3, 5)
    hidden = ops.mul(ops.rms_norm(ops.unary(ops.mul_mat(weights[0], x), "silu"), 1e-6), weights[2])
    loss = ops.cross_entropy_loss(ops.mul_mat(weights[1], hidden), labels, name="loss")
    given = {"x": rng.normal(size=(5, 6)).astype(np.float32), "labels": np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1]]}
    return loss, weights, given


def _torch_loss(weights: list[torch.Tensor], given: dict[str, np.ndarray]) -> torch.Tensor:
    up, down, scale = weights
    x, labels = (torch.tensor(given[name]).double() for name in ("x", "labels"))
    hidden = torch.nn.functional.silu(x @ up.T)
    hidden = torch.nn.functional.rms_norm(hidden, (8,), eps=1e-6) * scale
    return torch.nn.functional.cross_entropy(hidden @ down.T, labels)


def _read(leaf: Tensor) -> np.ndarray:
    assert leaf.buffer is not None
    return leaf.buffer.read(0, leaf.nbytes).view(np.float32).reshape([n for n in leaf.shape if n > 1])


def _moment(like: Tensor, name: str) -> Tensor:
    leaf = new_tensor("f32", *like.ne, name=name)
    leaf.buffer = get_backend("cpu").alloc(leaf.nbytes, Usage.STATE)
    leaf.buffer.write(0, np.zeros(leaf.nbytes, np.uint8))
    return leaf


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_are_torch_s(optimizer: str) -> None:
    """Four steps of a graph that writes its weights, each with another learning rate."""
    loss, weights, given = _mlp()
    theirs = [torch.tensor(_read(w)).double().requires_grad_() for w in weights]
    hyper = f32("hyper", 5 if optimizer == "adamw" else 2)
    found = gradients(loss, weights)
    graph = Graph(loss, *found)
    for w, g in zip(weights, found):
        if optimizer == "adamw":
            m, v = adamw_moments(g, _moment(w, f"{w.name}.m"), _moment(w, f"{w.name}.v"), 0.8, 0.95)
            graph.expand(ops.cpy(ops.opt_step_adamw(w, m, v, hyper), w))
        else:
            graph.expand(ops.cpy(ops.opt_step_sgd(w, g, hyper), w))
    exe = prepare(graph, "cpu")
    exe.write_all(given)
    kinds: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(theirs, lr=1.0, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1),
        "sgd": lambda: torch.optim.SGD(theirs, lr=1.0, weight_decay=0.0),
    }
    optim, losses = kinds[optimizer](), []
    for step in range(1, 5):
        alpha = 0.1 / step
        rest = (1e-5, 0.1, 1 / (1 - 0.8**step), 1 / (1 - 0.95**step)) if optimizer == "adamw" else (0.0,)
        exe.write("hyper", np.array([alpha, *rest], np.float32))
        exe.run()
        losses.append(float(exe.read(loss).reshape(())))
        optim.param_groups[0]["lr"] = alpha
        optim.zero_grad()
        their_loss = _torch_loss(theirs, given)
        their_loss.backward()
        assert losses[-1] == pytest.approx(their_loss.item(), rel=1e-5)
        optim.step()
    assert losses == sorted(losses, reverse=True)
    for w, t in zip(weights, theirs):
        np.testing.assert_allclose(_read(w), t.detach().numpy(), rtol=1e-4, atol=1e-5)
