"""What is planned of products before anything is launched: kernels with their reasons, the forms of results, launches.
On memory of a GPU that is not here; nothing runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from support.planned import planned_products, routed

import graphrt
from graphrt import Graph, Tensor, new_input, ops
from graphrt.backends.triton import TritonBackend, device
from graphrt.backends.triton.segment import Segment
from graphrt.tensor import new_tensor
from graphrt.tools.explain.devices import known_device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.aot_rows import context

from graphrt.backends.triton.kernels.products.forms import Form, Stored
from graphrt.backends.triton.kernels.products.plan import Made
from graphrt.backends.triton.kernels.products.route import EXPERT_KERNELS, KERNELS


def _elsewhere(name: str, exact: bool = False) -> TritonBackend:
    return TritonBackend(exact=exact, target=device.Target.elsewhere(known_device(name).elsewhere))


FAST = {name: _elsewhere(name) for name in ("h100", "a100", "mi300x")}
EXACT = _elsewhere("h100", exact=True)
K = 512


def weight(kind: str, *ne: int, value: float = 1.0) -> Tensor:
    """Held as the backend holds weights; f32 ones are `value` throughout."""
    t = new_tensor(kind, *ne, name=f"w{kind}")
    data = np.full(ne[::-1], value, np.float32).view(np.uint8) if kind == "f32" else np.zeros(t.nbytes, np.uint8)
    t.buffer = FAST["h100"].hold(t, data.reshape(-1))
    return t


def norm(n: int, value: float = 1.0, k: int = K) -> Tensor:
    return ops.mul(ops.rms_norm(new_input("f32", k, n, name="x"), 1e-5), weight("f32", k, value=value))


def segments(*outputs: Tensor, backend: TritonBackend = FAST["h100"]) -> list[Segment]:
    (split,) = graphrt.prepare(Graph(*outputs), [backend]).splits
    return list(split.run.segments)  # type: ignore[attr-defined]


def stored(found: Sequence[Segment], op: str = "MUL") -> Stored:
    return next(s.stored or Stored() for s in found if s.group.nodes[-1].op == op)


def kernels(found: Sequence[Segment]) -> dict[str, Any]:
    """Routes by the names of weights."""
    parts = [part for s in found if s.products is not None for part in s.products.parts]
    return {p.weight.name: part.route for part in parts for p in part.products}


@pytest.mark.parametrize(
    ("n", "kinds", "form"),
    [
        (1, ("q4_K", "q6_K"), Form.Q8), (8, ("q4_K", "q2_K"), Form.Q8), (9, ("q4_K", "q6_K"), Form.F16_ORDERED),
        (64, ("q4_K", "q4_K"), Form.F16_ORDERED), (9, ("q4_K", "q2_K"), Form.F16),
        (256, ("q4_K", "q6_K"), Form.F16_ORDERED), (257, ("q4_K", "q6_K"), Form.F16),
        (9, ("q4_K", "f16"), Form.AS_IS), (9, ("q4_K", "iq2_xs"), Form.F16),
    ],
)  # fmt: skip
def test_a_norm_has_the_form_that_its_readers_agree_on(n: int, kinds: tuple[str, str], form: Form) -> None:
    x = norm(n)
    found = segments(*(ops.mul_mat(weight(kind, K, 64), x) for kind in kinds))
    assert stored(found) == Stored(form)
    parts = [part for s in found if s.products is not None for part in s.products.parts]
    assert all((part.made is Made.BY_PRODUCER) == (form is not Form.AS_IS) for part in parts)
    if form is Form.F16 and n == 9:  # the other product would have taken the order
        route = kernels(found)["wq4_K"]
        assert route.kernel.name == "gemm_small_mma" and "x lies in f16" in route.refused["gemm_small_wgmma"]


@pytest.mark.parametrize("n", [3, 9])
def test_what_others_read_too_stays_as_it_is(n: int) -> None:
    """For few tokens with a copy in 8 bits, if a product reads the same rows."""
    for other in (ops.sqr, lambda t: ops.mul_mat(weight("f32", K, 5), t)):
        x = norm(n)
        found = segments(ops.mul_mat(weight("q4_K", K, 64), x), other(x))
        assert stored(found) == Stored(Form.AS_IS, q8_copy=n == 3)
    x = norm(n)
    assert stored(segments(x, ops.mul_mat(weight("q4_K", K, 64), x))) == Stored(Form.AS_IS, q8_copy=n == 3)
    x = norm(n)
    last = ops.view(x, (K, 1), offs=4 * K * (n - 1))
    assert stored(segments(ops.mul_mat(weight("q4_K", K, 64), last), ops.sqr(x))) == Stored()
    x = norm(n)
    whole = ops.mul_mat(weight("q4_K", K, 64), ops.reshape(x, K, 1, n))
    assert stored(segments(whole, ops.sqr(x))) == Stored(q8_copy=n == 3)


@pytest.mark.parametrize(("value", "form"), [(65000 / K**0.5, Form.F16), (66000 / K**0.5, Form.AS_IS)])
def test_a_norm_that_may_pass_the_range_of_f16_stays_in_f32(value: float, form: Form) -> None:
    x = norm(257, value)
    assert stored(segments(ops.mul_mat(weight("q4_K", K, 64), x))).form is form


def block(n: int, kinds: tuple[str, str], m: int = 512) -> list[Segment]:
    x = norm(n)
    gated = ops.glu(*(ops.mul_mat(weight(kind, K, m), x) for kind in kinds), "swiglu")
    return segments(ops.mul_mat(weight("q5_K", m, 64), gated))


@pytest.mark.parametrize(
    ("n", "kinds", "joined", "form"),
    [
        (1, ("q4_K", "q6_K"), True, Form.AS_IS), (32, ("q4_K", "q4_K"), True, Form.AS_IS),
        (32, ("q4_K", "q6_K"), False, Form.F16_SCALED), (257, ("q4_K", "q4_K"), False, Form.F16_SCALED),
        (3, ("q4_K", "f16"), False, Form.AS_IS),
    ],
)  # fmt: skip
def test_a_gate_is_joined_or_rounded_in_a_launch_behind(
    n: int, kinds: tuple[str, str], joined: bool, form: Form
) -> None:
    found = block(n, kinds)
    (made,) = (s.products for s in found if s.group.kernel == "gate_up_glu")
    assert made is not None and [part.route.joined for part in made.parts] == ([True] if joined else [False, False])
    assert stored(found, "GLU").form is form


def test_weights_of_two_types_under_a_gate_leave_no_order_to_undo() -> None:
    """Each by itself would be wgmma's; together they are not, so the norm stores f16 in order of k."""
    found = block(32, ("q4_K", "q6_K"))
    assert stored(found).form is Form.F16
    assert {r.kernel.name for r in kernels(found).values()} == {"gemm_small", "gemm_small_mma"}


def test_kernels_are_asked_in_order_and_refuse_with_a_sentence() -> None:
    x, many = Tensor("f32", (K, 3)), Tensor("f32", (K, 100))
    ids, of_pairs = Tensor("i32", (4, 100)), Tensor("f32", (K, 1, 100))
    nodes = [ops.mul_mat(Tensor(kind, (K, 64)), t) for kind in ("q4_K", "q2_K", "f16", "iq3_s") for t in (x, many)]
    nodes += [ops.mul_mat_id(Tensor(kind, (K, 64, 8)), of_pairs, ids) for kind in ("q4_K", "f16", "iq3_s")]
    for backend in (*FAST.values(), EXACT):
        for node in nodes:
            route = routed(node, backend)
            names = [k.name for k in (KERNELS if node.op == "MUL_MAT" else EXPERT_KERNELS)]
            assert [*route.refused, route.kernel.name] == names[: len(route.refused) + 1]
            assert all(reason and reason[0].islower() and not reason.endswith(".") for reason in route.refused.values())
            assert route.reason.startswith(("3 tokens: ", "100 tokens: ", "400 pairs of token and expert: "))


@pytest.mark.parametrize(
    ("name", "n", "kernel"),
    [("h100", 32, "gemm_small_wgmma"), ("a100", 32, "gemm_small_mma"), ("mi300x", 32, "gemm_small"),
     ("h100", 3, "gemv"), ("h100", 256, "gemm_small_wgmma"), ("h100", 257, "gemm_large"), ("a100", 65, "gemm_large"),
     ("mi300x", 65, "gemm_large")],
)  # fmt: skip
def test_each_device_has_its_kernels(name: str, n: int, kernel: str) -> None:
    node = ops.mul_mat(Tensor("q4_K", (K, 64)), Tensor("f32", (K, n)))
    assert routed(node, FAST[name]).kernel.name == kernel
    if n == 3:
        exact = routed(node, EXACT)
        assert exact.kernel.name == "gemm_small_wgmma" and "to be exact" in exact.refused["gemv"]


@pytest.mark.parametrize(
    ("name", "n", "k", "kind", "kernel"),
    [("h100", 4, 4096, "q4_K", "gemv"), ("h100", 5, 4096, "q4_K", "gemm_small_wgmma"),
     ("h100", 8, 2304, "q6_K", "gemm_small_wgmma"), ("h100", 8, 2048, "q4_K", "gemv"),
     ("h100", 8, 4096, "q2_K", "gemv"), ("a100", 8, 4096, "q4_K", "gemv"), ("mi300x", 8, 4096, "q4_K", "gemv")],
)  # fmt: skip
def test_five_tokens_and_more_of_long_rows_are_wgmmas(name: str, n: int, k: int, kind: str, kernel: str) -> None:
    route = routed(ops.mul_mat(Tensor(kind, (k, 64)), Tensor("f32", (k, n))), FAST[name])
    assert route.kernel.name == kernel
    assert kernel == "gemv" or "more than 4 tokens" in route.refused["gemv"]


def test_a_norm_of_five_tokens_is_rounded_for_wgmma() -> None:
    x = norm(5, k=4096)
    found = segments(*(ops.mul_mat(weight(kind, 4096, 64), x) for kind in ("q4_K", "q6_K")))
    assert stored(found) == Stored(Form.F16_ORDERED)


def test_activations_in_f16_have_no_order() -> None:
    node = ops.mul_mat(Tensor("q4_K", (K, 64)), Tensor("f16", (K, 32)))
    route = routed(node, FAST["h100"])
    assert route.kernel.name == "gemm_small_mma" and "these are f16" in route.refused["gemm_small_wgmma"]


def test_products_of_one_launch() -> None:
    """Three at most, packed and plain ones apart; for more tokens of one type, with and without a bias apart."""
    ctx = context(FAST["h100"].target)
    kinds = ("q4_K", "f16", "q6_K", "q4_K", "f32", "q8_0")

    def parts(n: int, biased: Sequence[int] = ()) -> list[list[int]]:
        x = Tensor("f32", (K, n))
        weights = [Tensor(kind, (K, 64)) for kind in kinds]
        outs = [Tensor("f32", (64, n)) for _ in kinds]
        biases = [Tensor("f32", (64,)) if i in biased else None for i in range(len(kinds))]
        made = planned_products(weights, x, outs, ctx, biases=biases)
        numbers = {id(w): i for i, w in enumerate(weights)}
        return [[numbers[id(p.weight)] for p in part.products] for part in made.parts]

    assert parts(2) == [[0, 2, 3], [5], [1, 4]]
    assert parts(32) == [[0, 3], [2], [5], [1], [4]] and parts(32, [3]) == [[0], [2], [3], [5], [1], [4]]
    assert parts(257) == [[0], [1], [2], [3], [4], [5]]
