"""Each fusion of fuse.py: that its group is formed, that fused equals unfused, and how fusions are switched off."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

pytest.importorskip("triton")

import graphrt
from graphrt import Graph, get_backend, ops
from graphrt.backends.triton import device
from graphrt.backends.triton.kernels.products import trained_fusions
from graphrt.errors import BackendError
from graphrt.ops import RopeParams

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.fused_graphs import (
    HALVES,
    SAME,
    STEPS,
    K,
    M,
    adapted,
    attention,
    biased,
    biased_qkv,
    biased_sum_then_norm,
    capped,
    check,
    gate_up,
    gate_up_down,
    gradient_of_one,
    gradients_sum,
    kernels,
    launched,
    leaf,
    norm_products,
    normed,
    prepared,
    product,
    qkv,
    rotated,
    shared_bias,
    shared_norm,
    sum_then_norm,
    trained,
    two_shared_norms,
    x,
)

#: Products whose two factors one way rounds to f16, and the other may not, or elsewhere, as kernels of few tokens do:
#: four roundings of 2**-11 at most, evenly spread.
ROUNDED = 4 * 2.0**-22 / 3

#: Adapters' two products on a GPU of NVIDIA's: its matrix units cut each of four factors off at 10 bits.
CUT_OFF = SAME if device.interpreting() else (4 * 2.0**-10) ** 2

FORMS: dict[str, tuple[Callable[[], Graph], str, float]] = {
    "gate and up": (lambda: gate_up("q8_0", "swiglu", 3), "gate_up_glu", SAME),
    "gate and up, 4 bits": (lambda: gate_up("q4_0", "geglu", 1), "gate_up_glu", SAME),
    "gate and up, f16": (lambda: gate_up("f16", "reglu", 2), "gate_up_glu", SAME),
    "gate and up, many tokens": (lambda: gate_up("q8_0", "swiglu", 11), "gate_up_glu", SAME),
    "gate, up and down, many tokens": (lambda: gate_up_down(11), "gate_up_glu, private", SAME),
    "gate, up and down, large": (lambda: gate_up_down(9, 3e3), "gate_up_glu, private", SAME),
    "gate, up and down, few tokens": (lambda: gate_up_down(3), "gate_up_glu, private", SAME),
    "softcap": (lambda: capped(), "softcap", SAME),
    "q, k, v": (lambda: qkv("q8_0", 1), "projections", SAME),
    "q, k, v, f16": (lambda: qkv("f16", 3), "projections", SAME),
    "norm": (lambda: Graph(ops.sqr(normed(x()))), "norm_mul", SAME),
    "norm and residual": (lambda: Graph(ops.add(normed(x()), leaf("r", K, 3))), "norm_mul_add", SAME),
    "norm for products": (lambda: norm_products(3), "norm_mul, private", STEPS),
    "norm for products, one token": (lambda: norm_products(1), "norm_mul, private", STEPS),
    "norm for products, many tokens": (lambda: norm_products(11), "norm_mul, private", STEPS),
    "norm, residual, norm": (lambda: sum_then_norm(3, True), "norm_mul_add_norm, private", STEPS),
    "norm, residual, norm, one token": (
        lambda: sum_then_norm(1, True, True, "q4_0"), "norm_mul_add_norm, private", STEPS,
    ),
    "norm, residual, norm, many tokens": (lambda: sum_then_norm(11, True), "norm_mul_add_norm, private", STEPS),
    "sum and norm": (lambda: sum_then_norm(2, False), "add_norm, private", STEPS),
    "sum and norm, many tokens": (lambda: sum_then_norm(11, False, True), "add_norm, private", STEPS),
    "two norms that others read too": (two_shared_norms, "norm_mul", STEPS),
    **{
        f"{pattern} that others read too, {kind}, {n} tokens of {k}": (
            partial(shared_norm, pattern, n, kind, k, viewed), pattern, STEPS,
        )
        for pattern in ("norm_mul", "add_norm", "norm_mul_add_norm")
        for kind, n, k, viewed in (
            ("q8_0", 1, 64, False), ("q4_0", 3, 2080, True), ("q4_K", 8, 256, True), ("q8_0", 11, 64, True),
            ("f16", 3, 40, False),
        )
    },
    "residual": (lambda: Graph(ops.add(leaf("r", M, 3), product("w", x()))), "matmul_add", SAME),
    "residual, f32": (lambda: Graph(ops.add(product("w", x(2), "f32"), leaf("r", M, 2))), "matmul_add", SAME),
    "residual, many tokens": (lambda: Graph(ops.add(product("w", x(11)), leaf("r", M, 11))), "matmul_add", SAME),
    **{
        f"q, k, v with biases, {kind}, {n} tokens": (partial(biased_qkv, kind, n), "projections", SAME)
        for kind in ("f32", "f16", "q4_0", "q8_0") for n in (1, 3, 9, 80)
    },
    **{
        f"a bias, {kind}, {n} tokens": (partial(biased, kind, n, k=256), "matmul_add", SAME)
        for kind in ("f32", "f16", "q4_0", "q4_K", "q8_0", "iq2_xxs") for n in (1, 3, 9, 80)
    },
    **{
        f"a bias and a residual, {kind}, {n} tokens": (partial(biased, kind, n, True), "matmul_add", SAME)
        for kind in ("f32", "q4_0") for n in (1, 3, 9, 80)
    },
    "q and v with biases": (lambda: biased_qkv("q8_0", 3, "qv"), "projections", SAME),
    "k with a bias": (lambda: biased_qkv("q4_0", 1, "k"), "projections", SAME),
    "k with a bias, many tokens": (lambda: biased_qkv("f16", 70, "k"), "projections", SAME),
    "biases of two types": (lambda: biased_qkv("q8_0", 2, v_kind="f16"), "projections", SAME),
    "biases of two types, many tokens": (lambda: biased_qkv("q8_0", 12, "qv", v_kind="f16"), "projections", SAME),
    "a bias, then the residual's sum and norm": (lambda: biased_sum_then_norm(3), "add_norm, private", STEPS),
    "a bias before that": (lambda: biased_sum_then_norm(2), "matmul_add", STEPS),
    "a bias of two products": (lambda: shared_bias(3), "matmul_add", SAME),
    "rotation and cache": (lambda: rotated()[0], "rope_cache", SAME),
    "rotation and cache, one token": (lambda: rotated("q8_0", 1)[0], "rope_cache", STEPS),
    "rotation and cache, sequences": (lambda: rotated(n_seq=3)[0], "rope_cache", SAME),
    "rotation and cache, sequences, blocks": (lambda: rotated("q4_0", 1, 4)[0], "rope_cache", STEPS),
    "norms, rotation and cache": (lambda: rotated(norms=True)[0], "norm_rope_cache", HALVES),
    "norms, rotation and cache, f32": (lambda: rotated("f32", norms=True)[0], "norm_rope_cache", SAME),
    "norms, rotation and cache, one token": (lambda: rotated("f32", 1, norms=True)[0], "norm_rope_cache", SAME),
    "norms, rotation and cache, blocks": (lambda: rotated("q8_0", 2, norms=True, d=64)[0], "norm_rope_cache", STEPS),
    "norms, rotation and cache, blocks of one head": (
        lambda: rotated("q5_1", 9, 2, True, RopeParams(24, "normal"))[0], "norm_rope_cache", STEPS,
    ),
    "norms, rotation and cache, parts of heads": (
        lambda: rotated("f32", 2, 2, True, RopeParams(20, "neox"), 48)[0], "norm_rope_cache", SAME,
    ),
    "norms, rotation and cache, pairs": (
        lambda: rotated("f32", 9, 1, True, RopeParams(40, "normal"), 64)[0], "norm_rope_cache", SAME,
    ),
    **{
        f"a gradient added to another one, {a} by {b}": (partial(gradients_sum, a, b), "out_prod_add", SAME)
        for a, b in (((260, 16), (300, 16)), ((16, 600), (260, 600)), ((300, 260), (9, 260)))
    },
    "a product of a short side and a residual": (
        lambda: Graph(ops.add(product("w", leaf("x", 16, 300), "f32", 260), leaf("r", 260, 300))), "matmul_add", SAME,
    ),
    "attention and its sums": (attention, "attention_lse", SAME),
    **{
        f"adapters of {which}, {n} tokens of {k}, rank {rank}": (
            partial(adapted, n, which, k=k, rank=rank, each=each), "adapters", CUT_OFF,
        )
        for which, n, k, rank, each in (
            ("q", 1, 64, 16, True), ("qkv", 3, 96, 48, True), ("qkvo", 17, 64, 64, True), ("gate", 2, 544, 32, False),
        )
    },
    **{
        f"trained {which}, {kind}, {k}, rank {rank}": (
            partial(trained, which, k=k, rank=rank, kind=kind), "trained_products", ROUNDED,
        )
        for which, kind, k, rank in (
            ("q", "q8_0", 64, 16), ("qk", "q4_K", 256, 32), ("qkv", "q6_K", 768, 16), ("qkvo", "q8_0", 64, 64),
        )
    },
    "trained, sums past f16's range": (
        partial(trained, "q", k=64, rank=16, scale=1e5), "trained_products", ROUNDED,
    ),
    **{
        f"gradient of an x of {len(rows)} products, {kind}, {k}, rank {rank}": (
            partial(gradient_of_one, rows, k=k, rank=rank, kind=kind), "gradient_of_x", ROUNDED,
        )
        for rows, kind, k, rank in (
            ((70,), "q8_0", 64, 16), ((33, 300), "q4_K", 256, 32), ((70, 16, 33), "q6_K", 256, 16),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_fused_is_unfused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_fusions, "MORE_THAN_TOKENS", 64)  # Hopper's kernels for up to 256 are not here
    make, wanted, limit = FORMS[form]
    check(make, wanted, limit, monkeypatch)


def test_adapters_take_two_launches() -> None:
    """Of q, k and v together, whose own products are still joined; a fourth takes two more."""
    found = kernels(adapted(3))
    assert [name for name in found if name != "UNARY"] == ["projections", "adapters"]
    names = launched(adapted(3, "qkvo"))
    assert names.count("adapter_down") == names.count("adapter_up") == 2


@pytest.mark.parametrize("pattern", ["norm_mul", "add_norm", "norm_mul_add_norm"])
def test_a_norm_is_rounded_once_for_all_that_want_it(pattern: str) -> None:
    """By the launch that makes it, for few tokens; a view of a part of it is rounded by itself."""
    norm = "norm_rows" if pattern == "norm_mul" else "add_norm_rows"
    names = launched(shared_norm(pattern, 3))
    assert names.count(norm) == 1 and "round_rows" not in names
    assert launched(shared_norm(pattern, 3, viewed=True)).count("round_rows") == 0, "one row is rounded in the product"
    assert launched(shared_norm(pattern, 3, "q4_0", 2080, True)).count("round_rows") == 1
    assert "round_rows" in launched(shared_norm(pattern, 11)), "f16, by the products"


# -- the switch


def _all_patterns() -> Graph:
    made = normed(x())
    return Graph(
        ops.add(product("w", made), leaf("r", M, 3)), ops.mul(ops.rms_norm(leaf("y", K, 2), 1e-5), leaf("u", K))
    )


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("1", {"norm_mul", "norm_mul, private", "matmul_add"}), ("", {"norm_mul", "norm_mul, private", "matmul_add"}),
        ("0", set()), ("matmul_add", {"matmul_add"}), ("norm_mul, attention_lse", {"norm_mul", "norm_mul, private"}),
    ],
)  # fmt: skip
def test_graphrt_fuse(value: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_FUSE", value)
    assert {k for k in kernels(_all_patterns()) if k.islower()} == wanted


def test_a_name_that_is_no_pattern_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_FUSE", "norm_mul,matmul_ad")
    with pytest.raises(BackendError, match="names of .*expert_routing, .*gate_up_glu, .*, got 'matmul_ad'"):
        prepared(_all_patterns())


def test_an_exact_backend_fuses_what_rounds_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = [get_backend("triton", exact=True)]
    assert [g.kernel for g in graphrt.prepare(attention(), exact).splits[0].groups] == ["attention_lse"]
    assert not any(g.kernel for g in graphrt.prepare(_all_patterns(), exact).splits[0].groups)
