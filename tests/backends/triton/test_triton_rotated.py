"""Projections of q, k and v whose launch rotates q and k and writes k and v into a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.fused_graphs import HALVES, SAME, STEPS, kernels, launched, leaf

import graphrt
from graphrt import Graph, Tensor, get_backend, ops
from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.fuse import wanted_fusions
from graphrt.backends.triton.kernels.flash_attn import block_fusions
from graphrt.backends.triton.kernels.products import rotated, rotated_fusions
from graphrt.backends.triton.kernels.products.gemv import config_for
from graphrt.backends.triton.kernels.products.lower import PROJECTIONS
from graphrt.backends.triton.kernels.products.rotated import ROTATED_PROJECTIONS
from graphrt.backends.triton.launch import Launch
from graphrt.ops import RopeParams
from graphrt.testing import dequantize, nmse, quantize
from graphrt.tools.explain.devices import DEVICES

NAME, CELLS = "rotated_projections", 32
#: Roundings of k and v to 8-bit floats, where one more or less goes the other way.
FLOATS8 = 1e-4


@dataclass(frozen=True)
class Step:
    """n new tokens of each of n_seq sequences. kinds: of the weights of q, k and v; cache: of k and v; d: of heads,
    n_dims of which are rotated; size: of x; read: a projection that somebody else reads too."""

    n: int = 1
    n_seq: int = 1
    kinds: tuple[str, str, str] = ("q4_0", "q4_0", "q4_0")
    cache: tuple[str, str] = ("f16", "f16")
    mode: str = "normal"
    d: int = 32
    n_dims: int = 32
    heads: tuple[int, int] = (6, 2)
    size: int = 256
    biased: bool = False
    read: str = ""
    layers: int = 2
    ids: tuple[int, ...] = ()


def layer(s: Step, source: Tensor, positions: Tensor, ids: Tensor, name: str) -> list[Tensor]:
    """An attention and both caches, as a model has them."""
    made = {}
    for which, kind, m in zip("qkv", s.kinds, (s.heads[0], s.heads[1], s.heads[1])):
        made[which] = ops.mul_mat(leaf(f"{name}{which}.weight", s.size, m * s.d, kind=kind), source)
        if s.biased:
            made[which] = ops.add(made[which], leaf(f"{name}{which}.bias", m * s.d))
    n = s.n * s.n_seq
    params = RopeParams(s.n_dims, s.mode)
    q, k = (ops.rope(ops.reshape(made[x], s.d, m, n), positions, params) for x, m in zip("qk", s.heads))
    new = [ops.reshape(t, s.d * s.heads[1], s.n, s.n_seq) for t in (k, made["v"])]
    caches = [leaf(f"{name}{x}_cache", s.d * s.heads[1], CELLS, s.n_seq, kind=kind) for x, kind in zip("kv", s.cache)]
    sets = [ops.set_rows(rows, ids, cache) for rows, cache in zip(new, caches)]
    looks = [ops.permute(ops.reshape(t, s.d, s.heads[1], CELLS, s.n_seq), 0, 2, 1, 3) for t in sets]
    turned = ops.permute(ops.reshape(q, s.d, s.heads[0], s.n, s.n_seq), 0, 2, 1, 3)
    return [ops.flash_attn_ext(turned, *looks, None, 0.2), *sets, *([ops.sqr(made[s.read])] if s.read else [])]


def step(s: Step) -> Graph:
    """Layers of which the first fills the table of angles, so that the others' launches need not wait for it."""
    n = s.n * s.n_seq
    positions, ids = leaf("positions", n, kind="i32"), leaf("ids", s.n, s.n_seq, kind="i64")
    xs = [leaf(f"{i}.x", s.size, n) for i in range(s.layers)]
    return Graph(*(t for i, x in enumerate(xs) for t in layer(s, x, positions, ids, f"{i}.")))


def pairs(kind: str, m: int, k: int, n: int, single: bool = False) -> Any:
    """A configuration that has two rows a lane, of matrices that are too small for it."""
    return replace(config_for(kind, m, k, n, single), r=2)


def results(graph: Graph, s: Step, backend: Any) -> list[np.ndarray]:
    exe, rng = graphrt.prepare(graph, [backend]), np.random.default_rng(5)
    for t in graph.inputs:
        values = rng.standard_normal(t.shape).astype(np.float32)
        count = np.arange(1, t.n_elements + 1).reshape(t.shape)
        exe.write(t, count if t.dtype.kind == "int" else quantize(values, t.dtype, rng))
    if s.ids:
        exe.write(next(t for t in graph.inputs if t.name == "ids"), np.array(s.ids).reshape(1, 1, s.n_seq, s.n))
    exe.run()
    return [dequantize(exe.read(t), t.dtype) for t in graph.outputs]


STEPS_OF = {
    "one token": Step(),
    "halves of heads": Step(mode="neox"),
    "halves of larger heads": Step(mode="neox", d=64, n_dims=64, heads=(3, 1), kinds=("q4_K", "q4_K", "q6_K")),
    "tokens": Step(n=3, biased=True, kinds=("q4_0", "q4_1", "q8_0")),
    "sequences": Step(n=2, n_seq=2, mode="neox", biased=True, cache=("f32", "bf16")),
    "as many as it takes": Step(n=1, n_seq=4, cache=("bf16", "f32")),
    "rows in one part": Step(size=2304, mode="neox", heads=(2, 1)),
    "8-bit floats": Step(n=2, cache=("f8_e4m3", "f8_e5m2"), layers=1),
    "tokens that are not written": Step(n=3, ids=(4, -1, CELLS), cache=("f32", "f32")),
}


@pytest.mark.parametrize("what", STEPS_OF)
def test_it_is_what_launches_of_their_own_give(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = STEPS_OF[what]
    for module in (rotated, rotated_fusions):
        monkeypatch.setattr(module, "config_for", pairs)
    monkeypatch.setenv("GRAPHRT_FUSE", NAME)
    graph = step(s)
    assert kernels(graph).count(NAME) == s.layers
    assert launched(graph).count("rotated_gemv") == s.layers and "rotate_and_write" not in launched(graph)
    fused = results(graph, s, get_backend("triton", exact=False))
    monkeypatch.setenv("GRAPHRT_FUSE", "0")
    graph = step(s)
    assert NAME not in kernels(graph)
    limit = SAME if {*s.cache} == {"f32"} else FLOATS8 if s.cache[0].startswith("f8") else HALVES
    for a, b in zip(fused, results(graph, s, get_backend("triton", exact=False))):
        assert (found := nmse(a, b)) <= limit, found
    for a, b in zip(fused, results(graph, s, get_backend("cpu"))):
        assert (found := nmse(a, b)) <= (5e-3 if s.cache[0].startswith("f8") else 10 * STEPS), found


BLOCKS = {
    "one token": Step(cache=("q8_0", "q8_0")),
    "sequences": Step(n_seq=3, mode="neox", biased=True, cache=("q8_0", "q4_0"), ids=(4, -1, CELLS - 1), layers=1),
}


@pytest.mark.parametrize("what", BLOCKS)
def test_the_attention_writes_a_cache_of_blocks(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is asked for, products rotate q and k, and the attention rounds and writes."""
    s = BLOCKS[what]
    for module in (rotated, rotated_fusions):
        monkeypatch.setattr(module, "config_for", pairs)
    monkeypatch.setenv("GRAPHRT_FUSE", "block_append")
    graph = step(s)
    assert kernels(graph).count(NAME) == kernels(graph).count("block_append") == s.layers
    assert launched(graph).count("rotated_gemv") == s.layers
    assert not {"write_rows", "rotate_and_write"} & {*launched(graph)}
    fused = results(graph, s, get_backend("triton", exact=False))
    for a, b in zip(fused, results(graph, s, get_backend("cpu"))):
        assert (found := nmse(a, b)) <= 10 * STEPS, found


def test_a_rotation_of_its_own_writes_the_cache_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_FUSE", "block_append,projections,rope_cache")
    s = Step(cache=("q8_0", "q8_0"), n_dims=16)
    found = kernels(step(s))
    assert "rope_cache" in found and not {NAME, "block_append"} & {*found}


LONG = Step(d=128, n_dims=128, heads=(4, 2), cache=("q4_0", "q4_0"), layers=1)
#: What was not timed in long rings, or lost there: the step, the cells from which on a ring is long, the device.
SHORT: dict[str, tuple[Step, int, str]] = {
    "a shorter ring": (LONG, CELLS + 1, "h200"), "another GPU": (LONG, CELLS, "a100"),
    "two types": (replace(LONG, cache=("q8_0", "q4_0")), CELLS, "h200"),
    "other blocks": (replace(LONG, cache=("q5_0", "q5_0")), CELLS, "h200"),
    "sequences": (replace(LONG, n_seq=2), CELLS, "h200"), "tokens": (replace(LONG, n=2), CELLS, "h200"),
    "smaller heads": (replace(LONG, d=64, n_dims=64), CELLS, "h200"),
    "more heads of a KV head": (replace(LONG, heads=(9, 1)), CELLS, "h200"),
    "a rotation of its own": (replace(LONG, n_dims=64), CELLS, "h200"),
}  # fmt: skip


def groups_on(s: Step, long: int, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The groups' kernels on a GPU that is not here, nothing being asked for. long: the cells of a long ring."""
    for module in (rotated, rotated_fusions):
        monkeypatch.setattr(module, "config_for", pairs)
    monkeypatch.setattr(block_fusions, "LONG_RING", long)
    monkeypatch.delenv("GRAPHRT_FUSE", raising=False)
    backend = TritonBackend(exact=False, target=device.Target.elsewhere(DEVICES[name].elsewhere))
    (split,) = graphrt.prepare(step(s), [backend]).splits
    return [group.kernel for group in split.groups]


def test_the_attention_writes_a_long_ring_of_blocks_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = groups_on(LONG, CELLS, "h200", monkeypatch)
    assert found.count("block_append") == found.count(NAME) == 1


@pytest.mark.parametrize("what", SHORT)
def test_what_was_not_timed_in_long_rings_is_as_it_was(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = groups_on(*SHORT[what], monkeypatch)
    assert "block_append" not in found and "rope_cache" in found


NOT_FORMED = {
    "a part of heads is rotated": (Step(n_dims=16), "rope_cache"),
    "a cache of blocks": (Step(cache=("f16", "q8_0")), "rope_cache"),
    "more tokens": (Step(n=5), "rope_cache"),
    "weights as they are": (Step(kinds=("f16", "f16", "f16")), "rope_cache"),
    "one that is not packed": (Step(kinds=("q4_0", "q4_0", "f16")), "rope_cache"),
    "k before its rotation is read": (Step(read="k"), "rope_cache"),
    "q before its rotation is read": (Step(read="q"), "rope_cache"),
    "v is read": (Step(read="v"), "rope_cache"),
}


@pytest.mark.parametrize("what", NOT_FORMED)
def test_no_group_is_formed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s, instead = NOT_FORMED[what]
    monkeypatch.setattr(rotated_fusions, "config_for", pairs)
    monkeypatch.setenv("GRAPHRT_FUSE", f"{NAME},{instead}")
    found = kernels(step(s))
    assert NAME not in found and instead in found, found


def test_a_row_a_lane_is_not_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of the weights are shared out one a lane, and so they stay."""
    monkeypatch.setenv("GRAPHRT_FUSE", f"{NAME},projections,rope_cache")
    assert {"projections", "rope_cache"} <= {*kernels(step(Step()))}


def test_it_waits_for_a_table_that_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and angles are read before the launch before has ended only where that one does not fill the table."""
    for module in (rotated, rotated_fusions):
        monkeypatch.setattr(module, "config_for", pairs)
    monkeypatch.setenv("GRAPHRT_FUSE", NAME)
    elsewhere = device.Target.elsewhere(DEVICES["h100"].elsewhere)
    (split,) = graphrt.prepare(step(Step(layers=3)), [TritonBackend(exact=False, target=elsewhere)]).splits
    steps = [x for segment in split.run.segments for x in segment.steps if isinstance(x, Launch)]  # type: ignore[attr-defined]
    assert [x.args["EARLY"] for x in steps if x.name == "rotated_gemv"] == [False, True, True]


def test_it_is_there_unasked_and_exact_ones_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHRT_FUSE", raising=False)
    wanted = wanted_fusions(False)
    assert wanted.index(ROTATED_PROJECTIONS) < wanted.index(PROJECTIONS), "who is asked first has the products"
    assert ROTATED_PROJECTIONS not in wanted_fusions(True)
