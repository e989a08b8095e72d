"""Each pattern of fuse.py: that it is formed, that it isn't where it must not be, and fused equals unfused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

pytest.importorskip("triton")

import graphrt
from graphrt import Graph, Tensor, get_backend, new_input, ops
from graphrt.backends.triton import device
from graphrt.backends.triton.fuse import FUSIONS
from graphrt.backends.triton.kernels.norm_fusions import MAX_SUM
from graphrt.backends.triton.launch import Launch
from graphrt.errors import BackendError
from graphrt.execute import Executable
from graphrt.ops import RopeParams
from graphrt.testing import nmse, quantize

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

K, M = 64, 48
#: Sums in another order, as NMSE.
SAME = 1e-11
#: Eight bits in both, but of values that differ in their last f32 bit: a step more or less here and there. Also of one
#: that rounds activations to 8 bits against one that rounds them to f16.
STEPS = 1e-4
#: f16 of values that differ in their last f32 bit.
HALVES = 1e-9


def leaf(name: str, *ne: int, kind: str = "f32") -> Tensor:
    return new_input(kind, *ne, name=name)


def filled(exe: Executable, graph: Graph) -> Executable:
    """Random inputs, the same for equal graphs; indices count from 1, positions too."""
    rng = np.random.default_rng(11)
    for t in graph.inputs:
        if t.dtype.kind == "int":
            exe.write(t, np.arange(1, t.n_elements + 1).reshape(t.shape))
        elif t.dtype.is_quantized:
            exe.write(t, quantize(rng.standard_normal(t.shape).astype(np.float32), t.dtype, rng))
        else:
            exe.write(t, rng.standard_normal(t.shape))
    return exe


def prepared(graph: Graph) -> Executable:
    return graphrt.prepare(graph, [get_backend("triton", exact=False)])


def kernels(graph: Graph) -> list[str]:
    """What runs, in order: a fused group by its kernel, with ", private" if only products read its result; a node by
    its op."""
    (split,) = prepared(graph).splits
    groups = [group for group in split.groups if not group.label.startswith(("VIEW", "RESHAPE"))]
    return [(group.kernel or group.label) + ", private" * bool(group.private) for group in groups]


def launched(graph: Graph) -> list[str]:
    """The kernels of all steps, in order."""
    (split,) = prepared(graph).splits
    steps = [step for segment in split.run.segments for step in segment.steps]  # type: ignore[attr-defined]
    return [step.kernel.fn.__name__ for step in steps if isinstance(step, Launch)]


def results(graph: Graph) -> list[np.ndarray]:
    exe = filled(prepared(graph), graph)
    for _ in range(2):  # the second run finds the first one's memory
        exe.run()
    return [exe.read(t).astype(np.float64) for t in graph.outputs]


def check(make: Callable[[], Graph], wanted: str, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is there with all patterns on, not with none, and both give the same."""
    graph = make()
    assert wanted in kernels(graph), kernels(graph)
    fused = results(graph)
    monkeypatch.setenv("GRAPHRT_FUSE", "0")
    graph = make()
    assert not set(kernels(graph)) & {wanted, *(f.name for f in FUSIONS)}
    for a, b in zip(fused, results(graph)):
        assert nmse(a, b) <= limit


def x(n: int = 3) -> Tensor:
    return leaf("x", K, n)


def product(name: str, source: Tensor, kind: str = "q8_0", m: int = M) -> Tensor:
    return ops.mul_mat(leaf(name, source.ne[0], m, kind=kind), source)


def gate_up(kind: str, act: str, n: int) -> Graph:
    source = x(n)
    return Graph(ops.glu(product("gate", source, kind), product("up", source, kind), act))


def gate_up_down(n: int, size: float = 1.0) -> Graph:
    """A block's products, whose gated values pass f16's range if `size` is large."""
    source = ops.scale(x(n), size)
    gated = ops.glu(product("gate", source, m=K), product("up", source, "q4_0", K), "swiglu")
    return Graph(product("down", gated, m=K))


def capped(bias: float = 0.0, read: bool = False) -> Graph:
    """Logits as they are capped. bias: of the last step; read: what is capped is read before the last step too."""
    bent = ops.unary(ops.scale(x(), 1 / 0.7), "tanh")
    out = ops.scale(bent, 0.7, bias)
    return Graph(out, ops.sqr(bent)) if read else Graph(out)


def qkv(kind: str, n: int) -> Graph:
    source = x(n)
    return Graph(*(product(name, source, kind, m) for name, m in (("q", 48), ("k", 16), ("v", 16))))


def biased_qkv(kind: str, n: int, which: str = "qkv", v_kind: str | None = None) -> Graph:
    """q, k and v, those named with biases, of which each is an output of its own."""
    source, found = x(n), []
    for name, m in (("q", 48), ("k", 16), ("v", 16)):
        made = product(name, source, (v_kind if name == "v" else None) or kind, m)
        found.append(ops.add(made, leaf(f"{name}.bias", m)) if name in which else made)
    return Graph(*found)


def biased(kind: str, n: int, residual: bool = False, k: int = K) -> Graph:
    made = ops.add(product("w", leaf("x", k, n), kind), leaf("bias", M))
    return Graph(ops.add(made, leaf("r", M, n)) if residual else made)


def biased_sum_then_norm(n: int) -> Graph:
    """An attention's product with a bias, then the residual's sum and its norm, as gpt-oss has them."""
    total = ops.add(ops.add(product("o", x(n), m=K), leaf("bias", K)), leaf("r", K, n))
    return Graph(ops.add(product("down", normed(total), m=K), total))


def shared_bias(n: int) -> Graph:
    """A bias that two products have, and another node reads."""
    bias = leaf("bias", M)
    return Graph(*(ops.add(product(name, leaf(f"x_{name}", K, n)), bias) for name in "ab"), ops.sqr(bias))


def normed(source: Tensor, name: str = "weight", eps: float = 1e-5) -> Tensor:
    return ops.mul(ops.rms_norm(source, eps), leaf(name, source.ne[0]))


def sum_then_norm(n: int, post_norm: bool, swapped: bool = False, kind: str = "q8_0") -> Graph:
    """A residual's sum, after a norm of its own or not, and products of the sum's norm; the sum is read again later."""
    block, residual = x(n), leaf("r", K, n)
    sources = [normed(block, "post") if post_norm else block, residual]
    total = ops.add(*(reversed(sources) if swapped else sources))
    made = normed(total, eps=1e-6)
    down = ops.mul_mat(leaf("down", M, K), ops.glu(product("gate", made, kind), product("up", made), "swiglu"))
    return Graph(ops.add(down, total))


def shared_norm(pattern: str, n: int, kind: str = "q8_0", k: int = K, viewed: bool = False) -> Graph:
    """A norm that products of packed weights read and others, f32 weights and a node that is no product among them.

    viewed: of products one reads a view of all of it, another one of its last row."""
    source = leaf("x", k, n)
    if pattern == "norm_mul_add_norm":
        source = normed(source, "post")
    if pattern != "norm_mul":
        source = ops.add(source, leaf("r", k, n))
    made = normed(source, eps=1e-6)
    gated = ops.glu(product("gate", made, kind), product("up", made, kind), "swiglu")
    found = [gated, product("router", made, "f32", 5), product("half", made, "f16", 7), ops.sqr(made)]
    if viewed:
        found.append(product("whole", ops.reshape(made, k, 1, n), kind))
        found.append(product("last", ops.view(made, (k, 1), (4 * k,), 4 * k * (n - 1)), kind))
    return Graph(*found, *([] if pattern == "norm_mul" else [ops.sqr(source)]))


def two_shared_norms() -> Graph:
    """The second is made before the first is multiplied."""
    first, second = normed(x(), "weight"), normed(leaf("y", K, 3), "other")
    return Graph(ops.sqr(first), ops.sqr(second), product("a", first), product("b", second))


def norm_products(n: int) -> Graph:
    made = normed(x(n))
    return Graph(ops.glu(product("gate", made), product("up", made, "q4_0"), "swiglu"))


def rotated(
    kind: str = "f16", n: int = 3, n_seq: int = 1, norms: bool = False, params: RopeParams | None = None, d: int = 32
) -> tuple[Graph, dict[str, Tensor]]:
    """What a layer does with q, k and v: rotation, writing into caches, attention. n tokens of each sequence, cells
    from 1 on. norms: of the heads of q and k before."""
    heads, kv, cells, params = 4, 2, 32, params or RopeParams(32, "neox")
    positions, ids = leaf("positions", n * n_seq, kind="i32"), leaf("ids", n, n_seq, kind="i64")
    caches = [leaf(name, d * kv, cells, n_seq, kind=kind) for name in ("k_cache", "v_cache")]
    q, k = leaf("q", d, heads, n * n_seq), leaf("k", d, kv, n * n_seq)
    if norms:
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    q, k = (ops.rope(t, positions, params) for t in (q, k))
    new = [ops.reshape(t, d * kv, n, n_seq) for t in (k, leaf("v", d * kv, n * n_seq))]
    sets = [ops.set_rows(rows, ids, cache) for rows, cache in zip(new, caches)]
    looks = [ops.permute(ops.reshape(s, d, kv, cells, n_seq), 0, 2, 1, 3) for s in sets]
    out = ops.flash_attn_ext(ops.permute(ops.reshape(q, d, heads, n, n_seq), 0, 2, 1, 3), *looks, None, 0.2)
    return Graph(out, *sets), {"q": q, "k": k, "k_set": sets[0], "v_set": sets[1], "out": out}


def attention() -> Graph:
    q, k, v = leaf("q", 32, 3, 4), leaf("k", 32, 20, 2, kind="f16"), leaf("v", 32, 20, 2, kind="f16")
    mask = leaf("mask", 20, 3, kind="f16")
    return Graph(ops.flash_attn_ext(q, k, v, mask, 0.2), ops.flash_attn_lse(q, k, mask, 0.2))


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
    "attention and its sums": (attention, "attention_lse", SAME),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_fused_is_unfused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, wanted, limit = FORMS[form]
    check(make, wanted, limit, monkeypatch)


# -- where no group may be formed


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


@pytest.mark.parametrize("pattern", ["norm_mul", "add_norm", "norm_mul_add_norm"])
def test_a_norm_is_rounded_once_for_all_that_want_it(pattern: str) -> None:
    """By the launch that makes it, for few tokens; a view of a part of it is rounded by itself."""
    norm = "norm_rows" if pattern == "norm_mul" else "add_norm_rows"
    names = launched(shared_norm(pattern, 3))
    assert names.count(norm) == 1 and "round_rows" not in names
    assert launched(shared_norm(pattern, 3, viewed=True)).count("round_rows") == 0, "one row is rounded in the product"
    assert launched(shared_norm(pattern, 3, "q4_0", 2080, True)).count("round_rows") == 1
    assert "round_rows" in launched(shared_norm(pattern, 11)), "f16, by the products"


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


# -- order


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
    with pytest.raises(BackendError, match="names of expert_routing, .*gate_up_glu, .*, got 'matmul_ad'"):
        prepared(_all_patterns())


def test_an_exact_backend_fuses_what_rounds_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = [get_backend("triton", exact=True)]
    assert [g.kernel for g in graphrt.prepare(attention(), exact).splits[0].groups] == ["attention_lse"]
    assert not any(g.kernel for g in graphrt.prepare(_all_patterns(), exact).splits[0].groups)
