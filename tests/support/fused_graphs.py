"""Graphs that the triton backend fuses, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import graphrt
from graphrt import Graph, Tensor, get_backend, new_input, ops
from graphrt.backends.triton.fuse import FUSIONS
from graphrt.backends.triton.launch import Launch
from graphrt.execute import Executable
from graphrt.ops import RopeParams
from graphrt.testing import nmse, quantize

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
        assert (found := nmse(a, b)) <= limit, found


def x(n: int = 3) -> Tensor:
    return leaf("x", K, n)


def product(name: str, source: Tensor, kind: str = "q8_0", m: int = M) -> Tensor:
    return ops.mul_mat(leaf(name, source.ne[0], m, kind=kind), source)


def gradients_sum(a: tuple[int, int], b: tuple[int, int]) -> Graph:
    """OUT_PROD of matrices of f32, b's rows side by side, and another gradient."""
    made = ops.out_prod(leaf("a", *a), ops.transpose(leaf("b", b[1], b[0])))
    return Graph(ops.add(leaf("d", *made.ne[:2]), made))


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


def adapted(n: int, which: str = "qkv", kind: str = "q8_0", k: int = K, rank: int = 16, each: bool = True) -> Graph:
    """Products with what adapters add: of q, k and v, of more than one step takes, or of gate and up before a GLU.

    each: every token has gates of its own; some are 0."""
    source, gates = leaf("x", k, n), ops.unary(leaf("gates", rank, n if each else 1), "relu")

    def made(name: str, m: int) -> Tensor:
        low = ops.mul(ops.mul_mat(leaf(f"{name}.a", k, rank), source), gates)
        return ops.add(product(name, source, kind, m), ops.mul_mat(leaf(f"{name}.b", rank, m), low))

    if which == "gate":
        return Graph(ops.glu(made("gate", M), made("up", M), "swiglu"))
    return Graph(*(made(name, m) for name, m in zip(which, (70, 16, 33, 7))))


def trained(
    which: str = "qkv", n: int = 70, k: int = K, rank: int = 16, kind: str = "q8_0", scale: float = 2.5
) -> Graph:
    """Products of many tokens with adapters that are trained, whose scaled sums others read too: of q, k and v, of more
    than one step takes, or of one. scale: of their sums, which pass f16's range if it is large."""
    source, found = leaf("x", k, n), list[Tensor]()
    for name, m in list(zip("qkvo", (70, 16, 33, 7)))[: len(which)]:
        low = ops.scale(ops.mul_mat(leaf(f"{name}.a", k, rank), source), scale)
        out = ops.add(product(name, source, kind, m), ops.mul_mat(leaf(f"{name}.b", rank, m), low))
        found += [out, ops.sqr(low)]
    return Graph(*found)


def gradient_of_one(rows: tuple[int, ...], n: int = 70, k: int = K, rank: int = 16, kind: str = "q8_0") -> Graph:
    """The sum of the gradients of an x that so many products of weights and of adapters read."""
    total: Tensor | None = None
    for i, m in enumerate(rows):
        of_weight = ops.out_prod(leaf(f"w{i}", k, m, kind=kind), ops.transpose(leaf(f"d{i}", m, n)))
        of_adapter = ops.out_prod(leaf(f"a{i}", k, rank), ops.transpose(leaf(f"v{i}", rank, n)))
        total = of_weight if total is None else ops.add(total, of_weight)
        total = ops.add(total, of_adapter)
    assert total is not None
    return Graph(total)


def attention() -> Graph:
    q, k, v = leaf("q", 32, 3, 4), leaf("k", 32, 20, 2, kind="f16"), leaf("v", 32, 20, 2, kind="f16")
    mask = leaf("mask", 20, 3, kind="f16")
    return Graph(ops.flash_attn_ext(q, k, v, mask, 0.2), ops.flash_attn_lse(q, k, mask, 0.2))
