"""Where no group may be formed, and in what order groups run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("triton")

from graphrt import Graph, ops
from graphrt.backends.triton import device
from graphrt.backends.triton.kernels.norm_fusions import MAX_SUM
from graphrt.ops import RopeParams
from graphrt.testing import nmse

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.fused_graphs import (
    SAME,
    STEPS,
    K,
    M,
    capped,
    filled,
    gate_up,
    kernels,
    leaf,
    normed,
    prepared,
    product,
    results,
    rotated,
    shared_norm,
    x,
)


def _read_twice() -> Graph:
    made = product("w", x())
    return Graph(ops.add(made, leaf("r", M, 3)), ops.sqr(made))


def _output() -> Graph:
    made = product("w", x())
    return Graph(made, ops.add(made, leaf("r", M, 3)))


def _through_a_view() -> Graph:
    made = product("w", x())
    return Graph(ops.add(ops.transpose(made), leaf("r", 3, M)))


def _turned(first: bool) -> Graph:
    """A square product read as it is turned: of its shape, but not it."""
    made, other = ops.transpose(product("w", x(), m=3)), leaf("r", 3, 3)
    return Graph(ops.add(made, other) if first else ops.add(other, made))


def _norm_turned() -> Graph:
    made = ops.transpose(normed(leaf("x", K, K)))
    return Graph(ops.add(leaf("r", K, K), made))


def _gate_turned() -> Graph:
    source = x()
    gate, up = (product(name, source, m=3) for name in ("gate", "up"))
    return Graph(ops.glu(ops.cont(ops.transpose(gate)), up, "swiglu"), ops.glu(gate, up, "swiglu"))


def _capped_halves() -> Graph:
    return Graph(ops.scale(ops.unary(ops.scale(leaf("x", K, 3, kind="f16"), 0.1), "tanh"), 10.0))


def _seen_besides() -> Graph:
    made = product("w", x())
    return Graph(ops.add(made, leaf("r", M, 3)), ops.sqr(ops.view(made, (M, 1))))


def _bias_with_gaps() -> Graph:
    """Every other element of a row."""
    return Graph(ops.add(product("w", x()), ops.transpose(ops.view(leaf("b", 2, M), (1, M), (8,)))))


def _biased_product_is_read() -> Graph:
    made = product("w", x())
    return Graph(ops.add(made, leaf("bias", M)), ops.sqr(made))


def _biased_product_is_kept() -> Graph:
    source = x()
    q, k = (product(name, source) for name in "qk")
    return Graph(ops.add(q, leaf("q.bias", M)), q, ops.add(k, leaf("k.bias", M)))


def _itself() -> Graph:
    made = product("w", x())
    return Graph(ops.add(made, made))


def _gate_is_read() -> Graph:
    source = x()
    gate = product("gate", source)
    return Graph(ops.glu(gate, product("up", source), "swiglu"), ops.sqr(gate))


def _other_x() -> Graph:
    return Graph(ops.glu(product("gate", x()), product("up", leaf("y", K, 3)), "swiglu"))


def _one_gate() -> Graph:
    gate = product("gate", x())
    return Graph(ops.glu(gate, gate, "swiglu"))


def _norm_output() -> Graph:
    norm = ops.rms_norm(x(), 1e-5)
    return Graph(norm, ops.mul(norm, leaf("weight", K)))


def _norm_of_a_matrix() -> Graph:
    return Graph(ops.mul(ops.rms_norm(x(), 1e-5), leaf("weight", K, 3)))


def _norm_and_itself() -> Graph:
    made = normed(x())
    return Graph(ops.add(made, made))


def _norm_read_by_others() -> Graph:
    made = normed(x())
    return Graph(product("w", made), ops.sqr(made))


def _k_is_read() -> Graph:
    graph, parts = rotated()
    return Graph(*graph.outputs, ops.sqr(parts["k"]))


def _norms_of_two_eps() -> Graph:
    graph, parts = rotated("f32", norms=True)
    q, params = parts["q"], RopeParams(32, "neox")
    other = ops.rope(normed(leaf("q", 32, 4, 3), "q_norm", 1e-3), q.src[1], params)
    _, *sources = parts["out"].sources()
    return Graph(ops.flash_attn_ext(ops.permute(other, 0, 2, 1, 3), *sources, None, 0.2), *graph.outputs[1:])


def _shared_ids() -> Graph:
    """SET_ROWS of v in each sequence at the same rows, of k at each its own."""
    graph, parts = rotated("f32", 2, 2)
    v_rows, _, cache = parts["v_set"].sources()
    k_rows, _, k_cache = parts["k_set"].sources()
    ids = leaf("shared", 2, 1, kind="i64")
    sets = [ops.set_rows(rows, ids, where) for rows, where in ((k_rows, k_cache), (v_rows, cache))]
    looks = [ops.permute(ops.reshape(s, 32, 2, 32, 2), 0, 2, 1, 3) for s in sets]
    q = ops.permute(ops.reshape(parts["q"], 32, 4, 2, 2), 0, 2, 1, 3)
    return Graph(ops.flash_attn_ext(q, *looks, None, 0.2))


def _rotated_otherwise(what: str) -> Graph:
    """A layer whose k has positions or factors of its own, whose v goes to rows of its own, or into k's memory."""
    d, heads, kv, cells, n, params = 32, 4, 2, 32, 3, RopeParams(32, "neox")
    positions, ids = leaf("positions", n, kind="i32"), leaf("ids", n, kind="i64")
    others, rows = leaf("others", n, 2, kind="i32"), leaf("rows", n, 2, kind="i64")
    both = leaf("both", d * kv, 2 * cells)
    caches = [leaf("k_cache", d * kv, cells), leaf("v_cache", d * kv, cells)]
    if what == "memory":
        caches = [ops.view(both, (d * kv, cells), both.nb[1:2], i * cells * both.nb[1]) for i in range(2)]
    k_positions = ops.view(others, (n,), offs=4 * n) if what == "positions" else positions
    factors = leaf("factors", 16) if what == "factors" else None
    v_ids = ops.view(rows, (n,), offs=8 * n) if what == "rows" else ids
    q = ops.rope(leaf("q", d, heads, n), positions, params)
    k = ops.rope(leaf("k", d, kv, n), k_positions, params, factors)
    k_set = ops.set_rows(ops.reshape(k, d * kv, n), ids, caches[0])
    v_set = ops.set_rows(leaf("v", d * kv, n), v_ids, caches[1])
    looks = [ops.permute(ops.reshape(s, d, kv, cells), 0, 2, 1, 3) for s in (k_set, v_set)]
    return Graph(ops.flash_attn_ext(ops.permute(q, 0, 2, 1, 3), *looks, None, 0.2), k_set, v_set)


def _long_sum() -> Graph:
    """Rows of a sum that no program holds whole."""
    n = MAX_SUM + 32
    return Graph(normed(ops.add(leaf("x", n, 2), leaf("r", n, 2))))


def _scores(what: str) -> Graph:
    """An attention and the log-sum-exp of another mask, or of sinks that the attention lacks."""
    q, k, v = leaf("q", 32, 3, 4), leaf("k", 32, 20, 2, kind="f16"), leaf("v", 32, 20, 2, kind="f16")
    masks, sinks = [leaf(name, 20, 3, kind="f16") for name in ("mask", "other")], leaf("sinks", 4)
    lse = ops.flash_attn_lse(q, k, masks[what == "mask"], 0.2, sinks=sinks if what == "sinks" else None)
    return Graph(ops.flash_attn_ext(q, k, v, masks[0], 0.2), lse)


def _normed_head_is_read() -> Graph:
    graph, parts = rotated("f32", norms=True)
    return Graph(*graph.outputs, ops.sqr(parts["k"].src[0]))


def _sum_of_a_product() -> Graph:
    total = ops.add(product("w", x(), m=K), leaf("r", K, 3))
    return Graph(product("u", normed(total)), ops.sqr(total))


def _other_sums() -> Graph:
    q, k, v = leaf("q", 32, 3, 4), leaf("k", 32, 20, 2, kind="f16"), leaf("v", 32, 20, 2, kind="f16")
    return Graph(ops.flash_attn_ext(q, k, v, None, 0.2), ops.flash_attn_lse(q, k, None, 0.3))


UNFORMED: dict[str, tuple[Callable[[], Graph], str]] = {
    "a product read twice": (_read_twice, "matmul_add"),
    "a product that is an output": (_output, "matmul_add"),
    "a product read through a view": (_through_a_view, "matmul_add"),
    "a product that a view of is read": (_seen_besides, "matmul_add"),
    "a product that is turned, then added": (lambda: _turned(True), "matmul_add"),
    "a product that is added turned": (lambda: _turned(False), "matmul_add"),
    "a gate that is read turned too": (_gate_turned, "gate_up_glu"),
    "a norm that is added turned": (_norm_turned, "norm_mul_add"),
    "a sum of long rows, then a norm": (_long_sum, "add_norm"),
    "k at other positions": (lambda: _rotated_otherwise("positions"), "rope_cache"),
    "k by other factors": (lambda: _rotated_otherwise("factors"), "rope_cache"),
    "v into other rows": (lambda: _rotated_otherwise("rows"), "rope_cache"),
    "k and v in one memory": (lambda: _rotated_otherwise("memory"), "rope_cache"),
    "sums of another mask": (lambda: _scores("mask"), "attention_lse"),
    "sums with sinks": (lambda: _scores("sinks"), "attention_lse"),
    "a bias with gaps": (_bias_with_gaps, "matmul_add"),
    "a bias of a product that is read besides": (_biased_product_is_read, "matmul_add"),
    "a bias that is computed": (
        lambda: Graph(ops.add(product("w", x()), ops.sqr(leaf("r", M)))), "matmul_add",
    ),
    "a bias in f16": (lambda: Graph(ops.add(product("w", x()), leaf("r", M, kind="f16"))), "matmul_add"),
    "a bias of one element": (lambda: Graph(ops.add(product("w", x()), leaf("r", 1))), "matmul_add"),
    "a bias of each token": (lambda: Graph(ops.add(product("w", x()), leaf("r", 1, 3))), "matmul_add"),
    "a residual in f16": (lambda: Graph(ops.add(product("w", x()), leaf("r", M, 3, kind="f16"))), "matmul_add"),
    "a residual that is the product": (_itself, "matmul_add"),
    "a sum with the product repeated": (lambda: Graph(ops.add(leaf("r", M, 6), product("w", x()))), "matmul_add"),
    "x of two sequences": (
        lambda: Graph(ops.add(ops.mul_mat(leaf("w", K, M), leaf("x", K, 3, 2)), leaf("r", M, 3, 2))), "matmul_add",
    ),
    "a cap of f16": (_capped_halves, "softcap"),
    "a cap with a bias": (lambda: capped(0.5), "softcap"),
    "a cap whose tanh is read": (lambda: capped(read=True), "softcap"),
    "a gate read twice": (_gate_is_read, "gate_up_glu"),
    "gate and up of two sources": (_other_x, "gate_up_glu"),
    "one product as both": (_one_gate, "gate_up_glu"),
    "a gate with its own limit": (lambda: gate_up("q8_0", "swiglu_oai", 3), "gate_up_glu"),
    "four products of one x": (
        lambda: Graph(*(product(name, source) for source in [x()] for name in "abcd")), "projections",
    ),
    "a norm that is an output": (_norm_output, "norm_mul"),
    "a norm times a matrix": (_norm_of_a_matrix, "norm_mul"),
    "a norm added to itself": (_norm_and_itself, "norm_mul_add"),
    "a norm that not only products read": (_norm_read_by_others, "norm_mul, private"),
    "a norm for f16 weights": (lambda: Graph(product("w", normed(x()), "f16")), "norm_mul, private"),
    "k read besides": (_k_is_read, "rope_cache"),
    "ids that sequences share": (lambda: _shared_ids(), "rope_cache"),
    "heads' norms of two eps": (_norms_of_two_eps, "norm_rope_cache"),
    "a head's norm read besides": (_normed_head_is_read, "norm_rope_cache"),
    "blocks over two heads' norms": (
        lambda: rotated("q8_0", 2, norms=True, d=96)[0], "norm_rope_cache",
    ),
    "a product's sum and norm": (_sum_of_a_product, "add_norm"),
    "a sum of one row, then a norm": (
        lambda: Graph(product("w", normed(ops.add(x(), leaf("r", K))))), "add_norm",
    ),
    "a sum's norm that not only products read": (lambda: shared_norm("add_norm", 3), "add_norm, private"),
    "a norm's sum and norm that not only products read": (
        lambda: shared_norm("norm_mul_add_norm", 3), "norm_mul_add_norm, private",
    ),
    "sums of another scale": (_other_sums, "attention_lse"),
}  # fmt: skip


def test_a_bias_stays_apart_from_a_product_that_is_read() -> None:
    """Of two products of one x the one has its bias in the launch, of the other the sum without it is an output."""
    graph = _biased_product_is_kept()
    assert sorted(kernels(graph)) == ["ADD", "projections"]
    without = results(graph)[1]
    assert nmse(without, results(Graph(product("q", x())))[0]) <= SAME


@pytest.mark.parametrize("why", UNFORMED)
def test_no_group_is_formed(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, kernel = UNFORMED[why]
    graph = make()
    assert kernel not in kernels(graph)
    found = results(graph)
    monkeypatch.setenv("GRAPHRT_FUSE", "0")
    for a, b in zip(found, results(make())):
        assert nmse(a, b) <= STEPS


def test_a_cache_is_written_before_it_is_read_and_after_who_reads_what_was_there() -> None:
    graph, parts = rotated()
    cache = parts["k_set"].src[2]
    assert cache is not None
    before = ops.sqr(ops.view(cache, (32, 2))) if cache.dtype.name == "f32" else ops.cont(ops.view(cache, (32, 2)))
    both = Graph(before, *graph.outputs)
    exe = filled(prepared(both), both)
    order = [group.label for group in exe.splits[0].groups]
    fused = next(i for i, group in enumerate(exe.splits[0].groups) if group.kernel == "rope_cache")
    assert order.index(before.op) < fused < next(i for i, label in enumerate(order) if label.startswith("FLASH"))
    exe.run()
    unwritten = exe.read(before)
    exe.run()
    # Row 1 on is written by the first run; before it, the cells held their inputs. Row 0 nobody writes.
    assert np.isfinite(unwritten).all()


def test_what_was_in_a_cache_is_read_before_it_is_written_whatever_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product reads rows, others are written over them, and what is added to the product comes of these: it can't be
    one launch with the product."""
    found = []
    for fuse in ("1", "0"):
        monkeypatch.setenv("GRAPHRT_FUSE", fuse)
        cache = leaf("cache", K, 8)
        read = product("w", ops.view(cache, (K, 3), cache.nb[1:2]))
        written = ops.set_rows(leaf("rows", K, 3), leaf("ids", 3, kind="i64"), cache)
        added = ops.sqr(product("u", ops.view(written, (K, 3), cache.nb[1:2])))
        graph = Graph(ops.add(read, added))
        exe = filled(prepared(graph), graph)
        exe.run()
        found.append(exe.read(graph.outputs[0]))
    assert nmse(*found) <= STEPS


def test_a_group_that_waits_for_itself_is_taken_apart() -> None:
    """The second product's weights are fine, but its residual comes from the first of the same group's results."""
    source = x()
    first = product("a", source, m=K)
    second = ops.mul_mat(leaf("b", K, M, kind="q8_0"), source)
    gate = ops.mul_mat(leaf("c", K, M, kind="q8_0"), ops.add(first, leaf("r", K, 3)))
    graph = Graph(ops.glu(second, gate, "swiglu"))
    order = kernels(graph)
    assert sorted(order)[:1] != [] and "gate_up_glu" not in order
    assert np.isfinite(results(graph)[0]).all()
