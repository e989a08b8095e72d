"""Launches of what moves and rotates rows, as the lowerings make them for a GPU, to be compiled without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphrt import ops
from graphrt.backend import Group, Place, Usage
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels import collectives, kq_mask, latent, penalize, rope, rows, sample, sort
from graphrt.backends.triton.kernels.latent_fusions import LatentQuery, LatentRopeCache, LatentRow
from graphrt.backends.triton.kernels.norm_fusions import ScaledNorm
from graphrt.backends.triton.kernels.rope_fusions import RopeCache
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.ops.rope import RopeParams
from graphrt.tensor import Tensor
from support.aot_arch import target_of
from support.planned import lowered_group

Case = tuple[str, Any, dict[str, Any], dict[str, Any]]


def context(target: Target) -> Context:
    """Places every tensor in memory of its own, zeros."""
    places: dict[Tensor, TritonBuffer] = {}

    def place(t: Tensor) -> Place:
        if t.root not in places:
            places[t.root] = TritonBuffer(
                torch.zeros(t.root.nbytes, dtype=torch.uint8, device=target.device), Usage.COMPUTE
            )
        return places[t.root], t.view_offs

    return Context(place, target, exact=False)


def rope_cache_found(
    kind: str,
    n_tokens: int,
    mode: str,
    d: int = 128,
    n_dims: int = 128,
    heads: tuple[int, int] = (32, 8),
    cells: int = 64,
    n_seq: int = 1,
    norms: bool = False,
) -> RopeCache:
    """What the fusion rope_cache finds: heads: of q and of k; kind: of both caches. norms: for norm_rope_cache."""
    params, n = RopeParams(n_dims, mode), n_tokens // n_seq
    positions, ids = Tensor("i32", (n_tokens,)), Tensor("i64", (n, n_seq))
    sources = [Tensor("f32", (d, count, n_tokens)) for count in heads]
    before: list[ScaledNorm | None] = [None, None]
    if norms:
        made = [ops.rms_norm(t, 1e-6) for t in sources]
        sources = [ops.mul(t, Tensor("f32", (d,))) for t in made]
        before = [ScaledNorm(*both) for both in zip(made, sources)]
    q, k = (ops.rope(t, positions, params) for t in sources)
    k_cache, v_cache = (Tensor(kind, (d * heads[1], cells, n_seq)) for _ in "kv")
    k_set = ops.set_rows(ops.reshape(k, d * heads[1], n, n_seq), ids, k_cache)
    v_set = ops.set_rows(Tensor("f32", (d * heads[1], n, n_seq)), ids, v_cache)
    return RopeCache(q, k, k_set, v_set, *before)


def latent_group(kind: str, n: int, mode: str, n_seq: int = 1, d: int = 64, kv: int = 512) -> Group:
    """A group that the fusion latent_rope_cache finds, for a cache of the type `kind`.

    There are 16 heads, of 128 elements before their product.
    """
    params, tokens, heads = RopeParams(d, mode), n * n_seq, 16
    whole, both = Tensor("f32", (128 + d, heads, tokens)), Tensor("f32", (kv + d, tokens))
    first, positions = ops.view(whole, (128, heads, tokens), whole.nb[1:3]), Tensor("i32", (tokens,))
    product = ops.mul_mat(Tensor("f16", (128, kv, heads)), ops.permute(first, 0, 2, 1, 3))
    q = ops.rope(ops.view(whole, (d, heads, tokens), whole.nb[1:3], 512), positions, params)
    query = ops.concat(ops.permute(product, 0, 2, 1, 3), q, 0)
    norm = ops.rms_norm(ops.view(both, (kv, tokens), both.nb[1:2]), 1e-6)
    scaled = ops.mul(norm, Tensor("f32", (kv,)))
    k = ops.rope(ops.view(both, (d, 1, tokens), (both.nb[1], both.nb[1]), 4 * kv), positions, params)
    row = ops.concat(ops.reshape(scaled, kv, 1, tokens), k, 0)
    cache = Tensor(kind, (kv + d, 64, n_seq))
    k_set = ops.set_rows(ops.reshape(row, kv + d, n, n_seq), Tensor("i64", (n, n_seq)), cache)
    found = LatentRopeCache(LatentQuery(product, q, query), LatentRow(ScaledNorm(norm, scaled), k, row, k_set))
    return Group([product, q, query, norm, scaled, k, row, k_set], captured=found, fusion=latent.LATENT_ROPE_CACHE)


def _launches(target: Target) -> Iterator[tuple[str, list[Any]]]:
    for kind in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "f8_e4m3"):
        for n_tokens, mode in ((1, "neox"), (512, "normal")):
            nodes = rope_cache_found(kind, n_tokens, mode)
            yield f"rope_cache {kind} {mode} {n_tokens}", rope.lower_rope_cache(nodes, context(target))
    yield "rope_cache odd", rope.lower_rope_cache(rope_cache_found("q8_0", 33, "neox", 80, 20, (5, 2)), context(target))
    for kind in ("f16", "q8_0"):
        for n_tokens, n_seq in ((1, 1), (16, 16), (512, 1)):
            nodes = rope_cache_found(kind, n_tokens, "neox", 256, 256, (4, 1), n_seq=n_seq, norms=True)
            yield f"norm_rope_cache {kind} {n_tokens}", rope.lower_rope_cache(nodes, context(target))
    for kind in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "f8_e4m3"):
        for n, n_seq, mode in ((1, 1, "normal"), (256, 2, "neox")):
            steps = lowered_group(latent_group(kind, n, mode, n_seq), context(target))
            yield f"latent_rope_cache {kind} {mode}", [s for s in steps if isinstance(s, Launch)][-1:]
    steps = lowered_group(latent_group("q8_0", 3, "neox", 1, 96, 96), context(target))
    yield "latent_rope_cache odd", steps[-1:]
    for mode, kind in (("normal", "f32"), ("neox", "f16")):
        a, factors = Tensor(kind, (80, 5, 33, 2)), Tensor("f32", (10,))
        node = ops.rope(a, Tensor("i32", (33,)), RopeParams(20, mode), factors)
        yield f"rope {mode} {kind}", rope.lower_rope([node], context(target))
    node = ops.set_rows(Tensor("i32", (1, 64)), Tensor("i64", (64,)), Tensor("i32", (1, 4096)))
    yield "set_rows i32", rows.lower_set_rows([node], context(target))
    for kind in ("f32", "f16", "bf16", "q8_0", "q5_1", "f8_e4m3", "f8_e5m2"):
        node = ops.set_rows(Tensor("f32", (1024, 5, 3)), Tensor("i64", (5, 3)), Tensor(kind, (1024, 9, 3)))
        yield f"set_rows {kind}", rows.lower_set_rows([node], context(target))
    for kind in ("f32", "bf16", "i32", "f8_e4m3"):
        node = ops.get_rows(Tensor(kind, (1025, 9)), Tensor("i32", (5,)))
        yield f"get_rows {kind}", rows.lower_get_rows([node], context(target))
    for n in (1000, 128256, 262144):
        yield f"argmax {n}", sort.lower_argmax([ops.argmax(Tensor("f32", (n, 1)))], context(target))
    for n, k in ((1000, 1), (32000, 1024), (262144, 40), (262144, 1024)):
        node = ops.sample(Tensor("f32", (n, 1)), Tensor("f64", (1,)), ops.SampleParams(top_k=k))
        yield f"sample {n} {k}", sample.lower_sample([node], context(target))
    for n, m, most in ((128256, 1, 64), (128256, 64, 64), (32000, 8, 1024)):
        logits, slots, settings = Tensor("f32", (n, m)), Tensor("i32", (m,)), Tensor("f64", (16, 64))
        node = ops.sample_each(logits, Tensor("f64", (2, m)), slots, settings, most)
        yield f"sample_each {n} {m} {most}", sample.lower_sample_each([node], context(target))
        tables = Tensor("i32", (512, 64)), Tensor("f64", (512, 64)), Tensor("i32", (1024, 64))
        node = ops.penalize(logits, slots, settings, *tables, Tensor("i32", (m,)), Tensor("i32", (n // 32, 64)))
        yield f"penalize {n} {m}", penalize.lower_penalize([node], context(target))
    for kind, ranks in (("f32", 2), ("f32", 8), ("f16", 3), ("bf16", 4), ("f64", 2)):
        node = ops.all_reduce(*(Tensor(kind, (4096, 3)) for _ in range(ranks)), ranks=ranks, rank=0)
        steps = collectives.lower_all_reduce([node], context(target))
        yield f"all_reduce {kind} {ranks}", [s for s in steps if isinstance(s, Launch)]
    for n_cells, n_tokens in ((8192, 1), (8192, 512), (4097, 1), (4097, 9)):
        node = ops.kq_mask(Tensor("i32", (n_cells,)), Tensor("i32", (n_tokens,)), 512)
        yield f"kq_mask {n_cells} {n_tokens}", kq_mask.lower_kq_mask([node], context(target))


def aot_cases(arch: str) -> Iterator[Case]:
    """A name, a kernel, its arguments by name (tensors for pointers) and the options of its launch."""
    for name, launches in _launches(target_of(arch)):
        for launch in launches:
            assert isinstance(launch, Launch)
            yield f"{name}: {launch.kernel.fn.__name__}", launch.kernel, launch.args, launch.options
