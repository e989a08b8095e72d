"""Latent attention on the triton backend, in Triton's interpreter: a matrix a head, alone and in fused groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import graphrt
from graphrt import Graph, Tensor, get_backend, new_input, ops
from graphrt.backends.triton import device
from graphrt.execute import Executable
from graphrt.ops import RopeParams
from graphrt.testing import nmse, quantize

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.planned import routed

from graphrt.backends.triton.kernels import latent_fusions
from graphrt.backends.triton.kernels.products.gemv import MAX_TOKENS
from graphrt.backends.triton.kernels.products.gemv_heads import packed_head_gemv, plain_head_gemv
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.packing import PACKED_TYPES

#: f32 sums in another order, as NMSE; activations rounded to 8 bits in two parts; to f16; blocks of values that differ
#: in a last bit.
SAME, TWO_PARTS, HALVES, STEPS = 1e-11, 5e-9, 1e-6, 1e-4


def leaf(name: str, *ne: int, kind: str = "f32") -> Tensor:
    return new_input(kind, *ne, name=name)


def prepared(graph: Graph, backend: Any = None) -> Executable:
    return graphrt.prepare(graph, backend or [get_backend("triton", exact=False)])


def results(graph: Graph, backend: Any = None, sizes: dict[str, float] | None = None) -> list[np.ndarray]:
    """Outputs of random inputs, the same for equal graphs; indices count. sizes: of inputs by name, 1 for others."""
    exe = prepared(graph, backend)
    rng = np.random.default_rng(3)
    for t in graph.inputs:
        if t.dtype.kind == "int":
            exe.write(t, np.arange(1, t.n_elements + 1).reshape(t.shape))
            continue
        values = rng.standard_normal(t.shape).astype(np.float32) * (sizes or {}).get(t.name, 1.0)
        exe.write(t, quantize(values, t.dtype, rng))
    for _ in range(2):  # the second run finds the first one's memory
        exe.run()
    return [exe.read(t).astype(np.float64) for t in graph.outputs]


def launches(graph: Graph, backend: Any = None) -> dict[str, list[Any]]:
    """What the groups are lowered to, by their kernel or ops, functions for launches; less the packing of inputs."""
    (split,) = prepared(graph, backend).splits
    found: dict[str, list[Any]] = {}
    for segment in split.run.segments:
        steps = [s.kernel if isinstance(s, Launch) else s.name for s in segment.steps]
        found[segment.group.kernel or segment.group.label] = [s for s in steps if s != "pack"]
    return found


# -- a matrix a head


def by_head(k: int, heads: int, n: int, rest: int = 8) -> Tensor:
    """The first k elements of each head, as heads lie in a token's row: [k, n, heads]."""
    x = leaf("x", k + rest, heads, n)
    return ops.permute(ops.view(x, (k, heads, n), x.nb[1:3]), 0, 2, 1, 3)


def product(kind: str, k: int, m: int, n: int, heads: int = 2) -> Tensor:
    return ops.mul_mat(leaf("w", k, m, heads, kind=kind), by_head(k, heads, n))


def side_by_side(kind: str, k: int, m: int, n: int, heads: int = 2) -> Graph:
    """The product, and what it found for a token in one row."""
    return Graph(ops.cont(ops.permute(product(kind, k, m, n, heads), 0, 2, 1, 3)))


#: kind, k, m, tokens: every type, heights that are no whole programs, one token to as many as there may be, rows that
#: each warp rounds for itself and that all round together.
FEW = [
    *((kind, 256, 5, 1) for kind in (*PACKED_TYPES, "bf16")), ("q5_0", 32, 18, 2), ("q5_0", 96, 17, 5),
    ("q5_1", 544, 5, 3), ("q8_0", 1056, 3, 2), ("q4_K", 2048, 2, 3),
    ("f16", 44, 20, 8), ("f32", 40, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "k", "m", "n"), FEW)
def test_few_tokens_take_one_launch(kind: str, k: int, m: int, n: int) -> None:
    kernel, limit = (packed_head_gemv, TWO_PARTS) if kind in PACKED_TYPES else (plain_head_gemv, SAME)
    graph = side_by_side(kind, k, m, n)
    assert launches(graph)["head_products"] == [kernel]
    (found,), (expected,) = results(graph), results(graph, "cpu")
    assert nmse(found, expected) < limit


@pytest.mark.parametrize("kind", ["q5_0", "f16"])
def test_a_product_by_itself(kind: str) -> None:
    graph = Graph(product(kind, 64, 17, 2))
    assert len(launches(graph)["MUL_MAT"]) == 1
    (found,), (expected,) = results(graph), results(graph, "cpu")
    assert nmse(found, expected) < TWO_PARTS


@pytest.mark.parametrize("kind", ["q5_0", "iq3_s", "f16", "f32"])
@pytest.mark.parametrize("size", [1.0, 3e6])
def test_many_tokens_are_written_in_place(kind: str, size: float) -> None:
    """size: of activations, which may pass f16's range."""
    k = 256 if kind == "iq3_s" else 64
    graph = side_by_side(kind, k, 20, 9)
    steps = launches(graph)["head_products"]
    assert steps.count("multiply_each") == 1 and len(steps) <= 4
    (found,), (expected,) = (results(graph, backend, {"x": size}) for backend in (None, "cpu"))
    assert nmse(found, expected) < (SAME if kind == "f32" else HALVES)


def test_an_exact_backend_rounds_to_f16() -> None:
    exact = [get_backend("triton")]
    for kind, few in (("q8_0", False), ("f16", True)):
        found = launches(side_by_side(kind, 64, 8, 2), exact)
        assert "head_products" not in found and (plain_head_gemv in found["MUL_MAT"]) == few


def test_what_takes_which_way() -> None:
    fast = get_backend("triton", exact=False)

    def taken(kind: str, k: int = 256, n: int = 8, w: tuple[int, int] = (4, 1), x: tuple[int, int] = (4, 1)) -> bool:
        node = ops.mul_mat(Tensor(kind, (k, 8, *w)), Tensor("f32", (k, n, *x)))
        return routed(node, fast).kernel.name == "gemv_heads"

    assert taken("q4_K") and taken("f16") and taken("iq3_s") and not taken("f64")
    assert taken("q4_K", 2048) and not taken("q4_K", 2304) and taken("f16", 2304)
    assert not taken("f16", n=9) and not taken("f16", w=(1, 1)) and not taken("f16", w=(2, 1))
    assert not taken("f16", w=(4, 2), x=(4, 2))
    half = ops.mul_mat(Tensor("f16", (64, 8, 4)), Tensor("f16", (64, 1, 4)))
    assert routed(half, fast).kernel.name != "gemv_heads"


# -- the query and the cache's row


@dataclass(frozen=True)
class Latent:
    """A layer's latent attention. kind: the cache's type; n: tokens of each of n_seq sequences.

    kv, d: elements of the two parts of a cache's row; width: of what a head's first part is made of; changed: what is
    not as the pattern wants it.
    """

    kind: str = "f32"
    n: int = 2
    n_seq: int = 1
    weights: str = "q8_0"
    params: RopeParams = RopeParams(16, "normal")
    heads: int = 2
    kv: int = 64
    d: int = 16
    width: int = 32
    factors: bool = False
    changed: str = ""

    @property
    def tokens(self) -> int:
        return self.n * self.n_seq

    def graph(self) -> Graph:
        """Outputs: the heads' v side by side, the query, the cache, and what is read besides."""
        angles = [leaf("positions", self.tokens, kind="i32")]
        angles += [leaf("factors", self.params.n_dims // 2)] if self.factors else []
        others = [leaf("other positions", self.tokens, kind="i32")] if self.changed == "positions" else angles
        q, q_inside = self.query(angles)
        row, row_inside = self.row(others)
        size, cells = self.kv + self.d, 32
        ids = leaf("ids", self.n, 1 if self.changed == "ids" else self.n_seq, kind="i64")
        cache = leaf("cache", size, cells, self.n_seq, kind=self.kind)
        k_set = ops.set_rows(ops.reshape(row, size, self.n, self.n_seq), ids, cache)
        keys = ops.permute(ops.reshape(k_set, size, 1, cells, self.n_seq), 0, 2, 1, 3)
        values = leaf("values", self.kv, cells, 1, self.n_seq)
        if self.changed != "the values":
            values = ops.view(keys, (self.kv, *keys.ne[1:]), keys.nb[1:])
        queries = ops.permute(ops.reshape(q, size, self.heads, self.n, self.n_seq), 0, 2, 1, 3)
        found = ops.reshape(ops.flash_attn_ext(queries, keys, values, None, 0.1), self.kv, self.heads, self.tokens)
        v = ops.mul_mat(leaf("v_b", self.kv, 8, self.heads, kind=self.weights), ops.permute(found, 0, 2, 1, 3))
        inside = {"the row": row, **q_inside, **row_inside}
        read = [ops.sqr(inside[self.changed])] if self.changed in inside else []
        return Graph(ops.cont(ops.permute(v, 0, 2, 1, 3)), q, k_set, *read)

    def query(self, angles: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The query, and what is inside by name."""
        both = leaf("q", self.width + self.d, self.heads, self.tokens)
        first = ops.view(both, (self.width, self.heads, self.tokens), both.nb[1:3])
        last = ops.view(both, (self.d, self.heads, self.tokens), both.nb[1:3], self.width * 4)
        k_b = leaf("k_b", self.width, self.kv, self.heads, kind=self.weights)
        absorbed = ops.mul_mat(k_b, ops.permute(first, 0, 2, 1, 3))
        rotated = self.rotated(last, angles, self.params)
        by_token = absorbed if self.changed == "heads for tokens" else ops.permute(absorbed, 0, 2, 1, 3)
        parts = [by_token, rotated]
        q = ops.concat(*(parts[::-1] if self.changed == "the order" else parts), 0)
        return q, {"the first part": absorbed, "the rotated part": rotated}

    def row(self, angles: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The cache's row, and what is inside by name."""
        both = leaf("kv", self.kv + self.d, self.tokens)
        first = ops.view(both, (self.kv, self.tokens), both.nb[1:2])
        last = ops.view(both, (self.d, 1, self.tokens), (both.nb[1], both.nb[1]), self.kv * 4)
        rows = (self.tokens,) if self.changed == "the weights" else ()
        normed = ops.mul(norm := ops.rms_norm(first, 1e-5), leaf("weight", self.kv, *rows))
        params = replace(self.params, freq_base=5e5) if self.changed == "the base" else self.params
        rotated = self.rotated(last, angles, params)
        row = ops.concat(ops.reshape(normed, self.kv, 1, self.tokens), rotated, 0)
        return row, {"the norm": norm, "the scaled norm": normed, "the row's end": rotated}

    def rotated(self, t: Tensor, angles: list[Tensor], params: RopeParams) -> Tensor:
        return ops.rope(t, angles[0], params, *angles[1:])


NEOX = RopeParams(16, "neox")
#: A layer, and how near fused and unfused must be.
LAYERS: dict[str, tuple[Latent, float]] = {
    "one token": (Latent(n=1), SAME),
    "f16": (Latent("f16", params=NEOX), HALVES),
    "bf16, f16 weights": (Latent("bf16", weights="f16"), STEPS),
    "sequences": (Latent(n=1, n_seq=2, params=NEOX), SAME),
    "sequences of several tokens": (Latent("f16", 2, 2), HALVES),
    "factors of angles": (Latent(factors=True, params=NEOX), SAME),
    "parts that are no powers of two": (
        Latent(weights="f32", kv=40, d=24, params=RopeParams(20, "neox"), heads=3), SAME,
    ),
    "pairs, parts that are no powers of two": (Latent(kv=72, d=40, params=RopeParams(24), weights="f16"), SAME),
    "blocks": (Latent("q8_0", d=32, params=RopeParams(32, "neox")), STEPS),
    "blocks of sequences": (Latent("q4_0", 1, 2, kv=96, d=32, params=RopeParams(32)), STEPS),
    "blocks that are no powers of two": (Latent("q5_1", kv=96, d=96, params=RopeParams(32)), STEPS),
    "many tokens": (Latent(n=9), HALVES),
    "many tokens of sequences, heads together": (Latent("f16", 6, 2, "f16", NEOX, heads=8), HALVES),
}  # fmt: skip


def formed(graph: Graph) -> set[str]:
    return {kernel for kernel in launches(graph) if kernel.islower()}


@pytest.mark.parametrize("name", LAYERS)
def test_fused_is_unfused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, limit = LAYERS[name]
    graph = layer.graph()
    assert formed(graph) == {"latent_rope_cache", "head_products"}
    if layer.tokens <= MAX_TOKENS:
        assert len(launches(graph)["latent_rope_cache"]) == 3  # the first of them fills the table of angles
    fused = results(graph)
    monkeypatch.setenv("GRAPHRT_FUSE", "0")
    assert not formed(graph)
    for a, b in zip(fused, results(graph)):
        assert nmse(a, b) <= limit


def test_a_query_beyond_f16() -> None:
    """Of many tokens, whose products are multiplied by their rows' factors where they lie: a row's end is not."""
    graph = Latent(n=9, weights="f16", heads=3).graph()
    sizes = {"q": 3e6}
    (_, q, cache), (_, cpus, cpus_cache) = results(graph, None, sizes), results(graph, "cpu", sizes)
    for part in (slice(0, 64), slice(64, None)):
        assert nmse(q[..., part], cpus[..., part]) < HALVES
    assert nmse(cache, cpus_cache) < SAME


def test_an_exact_backend_fuses_nothing() -> None:
    assert not {k for k in launches(Latent().graph(), [get_backend("triton")]) if k.islower()}


def test_each_pattern_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("latent_rope_cache", "head_products"):
        monkeypatch.setenv("GRAPHRT_FUSE", name)
        assert formed(Latent().graph()) == {name}


def test_only_rows_that_a_program_holds_are_normed_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, together in ((63, False), (64, True)):
        monkeypatch.setattr(latent_fusions, "MAX_ROW", most)
        assert ("latent_rope_cache" in formed(Latent(kv=64).graph())) == together


# -- where no group may be formed


def _read_twice() -> Graph:
    made = product("q8_0", 64, 8, 2)
    return Graph(ops.cont(ops.permute(made, 0, 2, 1, 3)), ops.sqr(made))


def _output() -> Graph:
    made = product("q8_0", 64, 8, 2)
    return Graph(made, ops.cont(ops.permute(made, 0, 2, 1, 3)))


def _another_order() -> Graph:
    return Graph(ops.cont(ops.permute(product("q8_0", 64, 8, 2), 1, 0, 2, 3)))


def _some_heads() -> Graph:
    made = ops.permute(product("q8_0", 64, 8, 2, heads=3), 0, 2, 1, 3)
    return Graph(ops.cont(ops.view(made, (8, 2, 2), made.nb[1:3], made.nb[1])))


def _shared_matrices() -> Graph:
    made = ops.mul_mat(leaf("w", 64, 8, 2, kind="q8_0"), by_head(64, 4, 2))
    return Graph(ops.cont(ops.permute(made, 0, 2, 1, 3)))


def _made_weights() -> Graph:
    w = ops.sqr(leaf("w", 64, 8, 3))
    return Graph(ops.cont(ops.permute(ops.mul_mat(w, by_head(64, 3, 2)), 0, 2, 1, 3)))


UNFORMED: dict[str, tuple[Callable[[], Graph], str]] = {
    "a product read twice": (_read_twice, "head_products"),
    "a product that is an output": (_output, "head_products"),
    "a token's rows not side by side": (_another_order, "head_products"),
    "some of the heads": (_some_heads, "head_products"),
    "heads that share a matrix": (_shared_matrices, "head_products"),
    "weights that a node makes": (_made_weights, "head_products"),
    "weights of f64": (lambda: side_by_side("f64", 64, 8, 2), "head_products"),
    **{
        f"{what} is read": (lambda what=what: Latent(changed=what).graph(), "latent_rope_cache")
        for what in (
            "the row", "the first part", "the rotated part", "the norm", "the scaled norm", "the row's end",
        )
    },
    "a query whose rotated part comes first": (lambda: Latent(changed="the order").graph(), "latent_rope_cache"),
    "a query with heads for tokens": (lambda: Latent(changed="heads for tokens").graph(), "latent_rope_cache"),
    "a norm times a matrix": (lambda: Latent(changed="the weights").graph(), "latent_rope_cache"),
    "a rotation by another base": (lambda: Latent(changed="the base").graph(), "latent_rope_cache"),
    "a rotation by other positions": (lambda: Latent(changed="positions").graph(), "latent_rope_cache"),
    "ids that sequences share": (lambda: Latent(n_seq=2, changed="ids").graph(), "latent_rope_cache"),
    "a block of both parts": (
        lambda: Latent("q8_0", weights="f16", kv=48, changed="the values").graph(), "latent_rope_cache",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", UNFORMED)
def test_no_group_is_formed(why: str) -> None:
    make, kernel = UNFORMED[why]
    graph = make()
    assert kernel not in launches(graph)
    for found, expected in zip(results(graph), results(graph, "cpu")):
        assert nmse(found, expected) < HALVES
