"""ROPE and ROPE_BACK: a table of cosines and sines, made once a run for all layers that share it, and the rotations
that read it.

The fused form rotates q, rotates k into its cache's rows and writes v into its own, in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.common.blocks import halves_a_block, is_quantized
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.common.reduce import over_rms
from graphrt.backends.triton.kernels.quantize import (
    BLOCK,
    block_elements,
    store_blocks,
    store_part,
    store_plain,
    stored,
    writing_options,
)
from graphrt.backends.triton.kernels.rope_fusions import RopeCache, norm_rope_cache, rope_cache, rope_cache_attention
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.memory import overlap
from graphrt.dtypes import WRITABLE
from graphrt.fusion import Fusion
from graphrt.ops.rope import RopeParams, rope_frequencies
from graphrt.tensor import Tensor

#: Elements of the table that one program makes, and most elements that one program of a rotation takes.
_TABLE, _MOST = 128, 1024


@dataclass(frozen=True, eq=False)
class RopeTable:
    """cos, sin: f32 [n_tokens, n_dims/2], times the magnitude, in device memory; filled by rope_table()'s steps."""

    params: RopeParams
    cos: torch.Tensor
    sin: torch.Tensor


@triton.constexpr_function
def power_of_two(N):
    """The least power of two that is not less."""
    return triton.next_power_of_2(N)


@accesses(reads="p_positions p_theta p_factors", writes="p_cos p_sin", helper=True)
@triton.jit
def fill_table(
    p_positions, p_theta, p_factors, p_cos, p_sin, s_position, s_factor, n_tokens,
    HALF: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i makes SIZE elements of the table. theta: f64 [HALF + 1], angles at position 1, then the magnitude.

    Angles in f64: at position 131071 one in f32 would have an error of a hundredth.
    """
    take_turn(PDL)
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    live = i < n_tokens * HALF
    pair = i % HALF
    angle = tl.load(p_theta + pair, mask=live, other=0.0)
    if p_factors is not None:
        angle /= tl.load(p_factors + pair * s_factor, mask=live, other=1.0).to(tl.float64)
    angle *= tl.load(p_positions + (i // HALF).to(tl.int64) * s_position, mask=live, other=0).to(tl.float64)
    magnitude = tl.load(p_theta + HALF)
    tl.store(p_cos + i, (tl.cos(angle) * magnitude).to(tl.float32), mask=live)
    tl.store(p_sin + i, (tl.sin(angle) * magnitude).to(tl.float32), mask=live)


@triton.jit
def rotate_heads(
    p_in, s0, s1, p_out, so1, head, n_head, p_cos, p_sin, p_weight, eps,
    D: tl.constexpr, N_DIMS: tl.constexpr, NEOX: tl.constexpr, HEADS: tl.constexpr, KIND: tl.constexpr,
    BACK: tl.constexpr = False,
):  # fmt: skip
    """Rotates HEADS heads of one token from `head` on. p_in, p_out: head 0; p_cos, p_sin: the token's angles; BACK: by
    their negatives.

    p_weight: f32 [D]: heads are normalized and multiplied with it before; None: they aren't.
    Every element is read once, by whoever writes it: out may be in.
    """
    HALF: tl.constexpr = N_DIMS // 2
    WIDTH: tl.constexpr = power_of_two(HALF)
    i_head = head + tl.arange(0, HEADS)
    m_head = (i_head < n_head)[:, None]
    p_in += i_head.to(tl.int64)[:, None] * s1
    p_out += i_head.to(tl.int64)[:, None] * so1
    pair = tl.arange(0, WIDTH)
    cos = tl.load(p_cos + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(p_sin + pair, mask=pair < HALF, other=0.0)[None, :]
    if BACK:
        sin = -sin
    i_rest = N_DIMS + tl.arange(0, power_of_two(max(D - N_DIMS, 1)))[None, :]
    if D > N_DIMS:
        rest = tl.load(p_in + i_rest.to(tl.int64) * s0, mask=m_head & (i_rest < D), other=0.0).to(tl.float32)
    if NEOX:
        live = m_head & (pair < HALF)[None, :]
        x = tl.load(p_in + pair.to(tl.int64)[None, :] * s0, mask=live, other=0.0).to(tl.float32)
        y = tl.load(p_in + (pair.to(tl.int64)[None, :] + HALF) * s0, mask=live, other=0.0).to(tl.float32)
        if p_weight is not None:
            total = tl.sum(x * x + y * y, 1)
            if D > N_DIMS:
                total += tl.sum(rest * rest, 1)
            factor = over_rms(total, D, eps)[:, None]
            x *= factor * tl.load(p_weight + pair, mask=pair < HALF, other=0.0)[None, :]
            y *= factor * tl.load(p_weight + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
        store_plain(p_out + pair[None, :], x * cos - y * sin, live, KIND)
        store_plain(p_out + pair[None, :] + HALF, x * sin + y * cos, live, KIND)
    else:
        i = tl.arange(0, 2 * WIDTH)[None, :]
        live = m_head & (i < N_DIMS)
        both = tl.load(p_in + i.to(tl.int64) * s0, mask=live, other=0.0).to(tl.float32)
        if p_weight is not None:
            total = tl.sum(both * both, 1)
            if D > N_DIMS:
                total += tl.sum(rest * rest, 1)
            factor = over_rms(total, D, eps)[:, None]
            both *= factor * tl.load(p_weight + i, mask=i < N_DIMS, other=0.0)
        x, y = tl.split(tl.reshape(both, (HEADS, WIDTH, 2)))
        turned = tl.reshape(tl.join(x * cos - y * sin, x * sin + y * cos), (HEADS, 2 * WIDTH))
        store_plain(p_out + i, turned, live, KIND)
    if D > N_DIMS:
        if p_weight is not None:
            rest *= factor * tl.load(p_weight + i_rest, mask=i_rest < D, other=0.0)
        store_plain(p_out + i_rest, rest, m_head & (i_rest < D), KIND)


@triton.jit
def rotate_into_blocks(
    p_in, s0, s1, p_out, part, n, p_cos, p_sin, p_weight, eps,
    D: tl.constexpr, N_DIMS: tl.constexpr, NEOX: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Rotates and rounds elements part * SIZE on of all heads of a token, n elements, side by side in a row of blocks.

    A block may hold parts of two heads: each element finds its partner by itself. p_weight: as rotate_heads; SIZE is
    whole heads then, and a head whole blocks.
    """
    HALF: tl.constexpr = N_DIMS // 2
    i_block = part * (SIZE // 32) + tl.arange(0, SIZE // 32)
    m_block = i_block < n // 32
    flat = i_block[:, None, None] * 32 + block_elements(KIND)[None, :, :]
    i = flat % D
    if NEOX:
        first = i < HALF
        partner = tl.where(first, i + HALF, i - HALF)
        pair = tl.where(first, i, partner)
    else:
        first = i % 2 == 0
        partner = i ^ 1
        pair = i // 2
    live = m_block[:, None, None] & (i < D)
    turns = live & (i < N_DIMS)
    p_head = p_in + (flat // D).to(tl.int64) * s1
    x = tl.load(p_head + i.to(tl.int64) * s0, mask=live, other=0.0).to(tl.float32)
    y = tl.load(p_head + partner.to(tl.int64) * s0, mask=turns, other=0.0).to(tl.float32)
    cos = tl.load(p_cos + pair, mask=turns, other=1.0)
    sin = tl.load(p_sin + pair, mask=turns, other=0.0)
    if p_weight is not None:
        tl.static_assert(SIZE % D == 0 and D % 32 == 0)
        squares = tl.reshape(tl.sum(tl.sum(x * x, 2), 1), (SIZE // D, D // 32))
        factor = over_rms(tl.sum(squares, 1), D, eps)[:, None]
        factor = tl.reshape(tl.broadcast_to(factor, (SIZE // D, D // 32)), (SIZE // 32,))[:, None, None]
        x *= factor * tl.load(p_weight + i)
        y *= factor * tl.load(p_weight + partner, mask=turns, other=0.0)
    store_blocks(
        p_out + i_block.to(tl.int64) * halves_a_block(KIND), x * cos + tl.where(first, -y, y) * sin, m_block, KIND
    )


@accesses(reads="p_in p_cos p_sin", writes="p_out")
@triton.jit
def rotate(
    p_in, p_out, p_cos, p_sin, n_head, n_tokens, s0, s1, s2, s3, so1, so2, so3,
    D: tl.constexpr, N_DIMS: tl.constexpr, NEOX: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, i) rotates HEADS heads. in, out: f32 or f16 [D, n_head, n_tokens, n_seq] with strides s, so."""
    take_turn(PDL)
    token, i_seq = tl.program_id(0) % n_tokens, (tl.program_id(0) // n_tokens).to(tl.int64)
    at = token.to(tl.int64) * s2 + i_seq * s3
    out_at = token.to(tl.int64) * so2 + i_seq * so3
    angles = token.to(tl.int64) * (N_DIMS // 2)
    rotate_heads(
        p_in + at, s0, s1, p_out + out_at, so1, tl.program_id(1) * HEADS, n_head, p_cos + angles, p_sin + angles,
        None, 0.0, D, N_DIMS, NEOX, HEADS, "f32", BACK,
    )  # fmt: skip


@accesses(reads="p_q p_k p_v p_ids p_cos p_sin p_q_weight p_k_weight", writes="p_q_out p_k_cache p_v_cache")
@triton.jit
def rotate_and_write(
    p_q, p_q_out, p_k, p_k_cache, p_v, p_v_cache, p_ids, p_cos, p_sin, p_q_weight, p_k_weight, eps, n_head, n_head_kv,
    n_v, q_parts, k_parts, n, sq0, sq1, sq2, sqo1, sqo2, sk0, sk1, sk2, sv0, sv1, sv2, s_id, s_id_seq,
    s_k_cache, s_k_seq, s_v_cache, s_v_seq, n_cells,
    D: tl.constexpr, N_DIMS: tl.constexpr, NEOX: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, i) rotates HEADS heads of q; past q_parts of k into row ids[token] of the k cache (SIZE elements
    of it where that is quantized); past k_parts more it writes SIZE elements of v into the same row of the v cache.
    q: [D, n_head, n_tokens]; k: [D, n_head_kv, n_tokens]; v: [n_v, n, n_seq]; caches: as quantize.stored() has them.
    SEQUENCES: there are several, with n tokens each, one after the other; ids, v and caches are theirs. p_q_weight,
    p_k_weight: f32 [D] or None: heads are normalized first. A token whose id is none of the n_cells rows is left out.
    """
    take_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    p_cos += token * (N_DIMS // 2)
    p_sin += token * (N_DIMS // 2)
    if part < q_parts:
        p_from, p_to = p_q + token * sq2, p_q_out + token * sqo2
        rotate_heads(
            p_from, sq0, sq1, p_to, sqo1, part * HEADS, n_head, p_cos, p_sin, p_q_weight, eps,
            D, N_DIMS, NEOX, HEADS, "f32",
        )  # fmt: skip
    else:
        part -= q_parts
        p_k += token * sk2
        if SEQUENCES:
            i_seq = token // n
            token -= i_seq * n
            p_ids += i_seq * s_id_seq
            p_v += i_seq * sv2
            p_k_cache += i_seq * s_k_seq
            p_v_cache += i_seq * s_v_seq
        row = tl.load(p_ids + token * s_id).to(tl.int64)
        if (row >= 0) & (row < n_cells):
            if part < k_parts:
                p_to = p_k_cache + row * s_k_cache
                if is_quantized(K_KIND):
                    rotate_into_blocks(
                        p_k, sk0, sk1, p_to, part, n_head_kv * D, p_cos, p_sin, p_k_weight, eps,
                        D, N_DIMS, NEOX, SIZE, K_KIND,
                    )  # fmt: skip
                else:
                    rotate_heads(
                        p_k, sk0, sk1, p_to, D, part * HEADS, n_head_kv, p_cos, p_sin, p_k_weight, eps,
                        D, N_DIMS, NEOX, HEADS, K_KIND,
                    )  # fmt: skip
            else:
                store_part(p_v + token * sv1, sv0, p_v_cache + row * s_v_cache, part - k_parts, n_v, V_KIND, SIZE)


def rope_table(node: Tensor, ctx: Context) -> tuple[RopeTable, list[Step]]:
    """The table of a ROPE's rotation, and the steps that fill it: none if they were made for an earlier node."""
    positions, params, factors = node["positions"], node.params, node["factors"]
    key = ("rope table", positions, params, factors)
    if key in ctx.shared:
        return ctx.shared[key], []
    theta, magnitude = rope_frequencies(params)
    half, n_tokens = params.n_dims // 2, positions.ne[0]
    table = RopeTable(params, *(ctx.scratch((n_tokens, half), torch.float32) for _ in range(2)))
    ctx.shared[key] = table
    at, by = ctx.view(positions), ctx.view(factors) if factors is not None else None
    args = {
        "p_positions": at.data, "p_factors": by.data if by is not None else None, "p_cos": table.cos,
        "p_theta": torch.tensor([*theta, magnitude], dtype=torch.float64, device=ctx.target.device),
        "p_sin": table.sin, "s_position": at.strides[0], "s_factor": by.strides[0] if by is not None else 0,
        "n_tokens": n_tokens, "HALF": half, "SIZE": _TABLE, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return table, [Launch(fill_table, (-(-n_tokens * half // _TABLE),), args, launch_options(ctx.target, 4))]


def heads_a_program(n_head: int, n_tokens: int, d: int, ctx: Context) -> int:
    """One where there are few heads of few tokens; else more, which share the angles."""
    heads, enough = 1, 4 * ctx.target.sm_count
    while 2 * heads <= n_head and 2 * heads * d <= _MOST and n_tokens * n_head // (2 * heads) >= enough:
        heads *= 2
    return heads


def warps_of(heads: int, d: int) -> int:
    """Warps of a program that rotates so many heads of d elements."""
    return max(1, min(4, 1 << (heads * d // 256).bit_length() >> 1))


def rotation_constants(params: RopeParams, d: int, heads: int, ctx: Context) -> dict[str, Any]:
    """What kernels that rotate HEADS heads of d elements are compiled with."""
    return {
        "D": d, "N_DIMS": params.n_dims, "NEOX": params.mode == "neox", "HEADS": heads, "PDL": ctx.target.has_pdl
    }  # fmt: skip


def lower_rope(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """ROPE."""
    node = nodes[0]
    table, steps = rope_table(node, ctx)
    return [*steps, _rotate_launch(ctx.view(node["a"]), ctx.view(node), table, ctx)]


def lower_rope_back(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """ROPE_BACK: it reads the table of the ROPE whose gradient it is."""
    node = nodes[0]
    table, steps = rope_table(node, ctx)
    return [*steps, _rotate_launch(ctx.view(node["d"]), ctx.view(node), table, ctx, back=True)]


def _rotate_launch(a: View, out: View, table: RopeTable, ctx: Context, back: bool = False) -> Launch:
    d, n_head, n_tokens, n_seq = a.ne
    heads = heads_a_program(n_head, n_tokens * n_seq, d, ctx)
    s0, s1, s2, s3 = a.strides
    args = {
        "p_in": a.data, "p_out": out.data, "p_cos": table.cos, "p_sin": table.sin, "n_head": n_head,
        "n_tokens": n_tokens, "s0": s0, "s1": s1, "s2": s2, "s3": s3, "so1": out.strides[1], "so2": out.strides[2],
        "so3": out.strides[3], "BACK": back, **rotation_constants(table.params, d, heads, ctx),
    }  # fmt: skip
    grid = (n_tokens * n_seq, -(-n_head // heads))
    return Launch(rotate, grid, args, launch_options(ctx.target, warps_of(heads, d)))


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """RMS norms of the heads of q and of k. q, k: f32 [d], what the heads are multiplied with."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


def lower_rope_set_rows(
    q: View, q_out: View, k: View, k_cache: View, v: View, v_cache: View, ids: View, table: RopeTable, ctx: Context,
    norms: HeadNorms | None = None,
) -> list[Step]:  # fmt: skip
    """One launch: q rotated into q_out, k rotated into rows `ids` of k_cache, v written into these rows of v_cache.

    q, k: f32 or f16 [d, n_head or n_head_kv, n_seq * n]; q_out: q's shape and type, may be q's memory (or k's, which
    takes two launches, and no norms); v: f32 or f16 [n_v, n, n_seq]; ids: i32 or i64 [n, n_seq]; k_cache: [d *
    n_head_kv, cells, n_seq], v_cache: [n_v, cells, n_seq], of types in WRITABLE, without common elements. Strides are
    free but for the rows of q_out and the caches, which are contiguous. norms: before the rotation; for a quantized
    k_cache d is then a power of two from 32 on.
    """
    assert k_cache.kind in WRITABLE and v_cache.kind in WRITABLE
    d, n_head, n_tokens, _ = q.ne
    n_head_kv, n_v = k.ne[1], v.ne[0]
    heads = heads_a_program(n_head, n_tokens, d, ctx)
    size = max(BLOCK, triton.next_power_of_2(heads * d))
    (k_memory, (s_k, s_k_seq, _)), (v_memory, (s_v, s_v_seq, _)) = stored(k_cache), stored(v_cache)
    k_parts = -(-n_head_kv * d // size) if k_cache.tensor.dtype.is_quantized else -(-n_head_kv // heads)
    together = not any(overlap(q_out.data, x.data) for x in (k, v))
    assert together or norms is None
    q_parts = -(-n_head // heads) if together else 0
    args = {
        "p_q": q.data, "p_q_out": q_out.data, "p_k": k.data, "p_k_cache": k_memory, "p_v": v.data,
        "p_v_cache": v_memory, "p_ids": ids.data, "p_cos": table.cos, "p_sin": table.sin,
        "p_q_weight": norms and norms.q, "p_k_weight": norms and norms.k, "eps": norms.eps if norms else 0.0,
        "n_head": n_head, "n_head_kv": n_head_kv, "n_v": n_v, "q_parts": q_parts, "k_parts": k_parts, "n": v.ne[1],
        "sq0": q.strides[0], "sq1": q.strides[1], "sq2": q.strides[2], "sqo1": q_out.strides[1],
        "sqo2": q_out.strides[2], "sk0": k.strides[0], "sk1": k.strides[1], "sk2": k.strides[2],
        "sv0": v.strides[0], "sv1": v.strides[1], "sv2": v.strides[2], "s_id": ids.strides[0],
        "s_id_seq": ids.strides[1], "s_k_cache": s_k, "s_k_seq": s_k_seq, "s_v_cache": s_v, "s_v_seq": s_v_seq,
        "n_cells": k_cache.ne[1], "SIZE": size, "K_KIND": k_cache.kind, "V_KIND": v_cache.kind,
        "SEQUENCES": v.ne[2] > 1,
        **rotation_constants(table.params, d, heads, ctx),
    }  # fmt: skip
    options = launch_options(ctx.target, warps_of(heads, d))
    for cache in (k_cache, v_cache):
        options |= writing_options(ctx.target, warps_of(heads, d), cache.kind)
    launch = Launch(rotate_and_write, (n_tokens, q_parts + k_parts + -(-n_v // size)), args, options)
    return [launch] if together else [launch, _rotate_launch(q, q_out, table, ctx)]


def lower_rope_cache(found: RopeCache, ctx: Context) -> list[Step]:
    """The rotation of q and of k, after their heads' norms if there are any, and k and v written into the caches."""
    q, k, norms = found.q["a"], found.k["a"], None
    if found.q_norm is not None and found.k_norm is not None:
        (q_norm, q_scaled, _), (k_norm, k_scaled, _) = found.q_norm, found.k_norm
        q, k = q_norm["a"], k_norm["a"]
        norms = HeadNorms(ctx.view(q_scaled["b"]).data, ctx.view(k_scaled["b"]).data, q_norm.params.eps)
    table, steps = rope_table(found.q, ctx)
    k_set, v_set, look = found.k_set, found.v_set, ctx.view
    return steps + lower_rope_set_rows(
        look(q), look(found.q), look(k), look(k_set["target"]), look(v_set["rows"]), look(v_set["target"]),
        look(k_set["ids"]), table, ctx, norms,
    )  # fmt: skip


def appended_arguments(found: RopeCache, table: RopeTable, ctx: Context) -> dict[str, Any]:
    """What an attention is given that rotates q and k and writes k and v itself (decode_append.py), in the place of its
    own of these names: of the caches all cells, which begin where those begin that it reads. One token a sequence."""
    q, k, v, ids = (ctx.view(t) for t in (found.q["a"], found.k["a"], found.v_set["rows"], found.k_set["ids"]))
    n_seq = found.q.ne[2]
    return {
        "p_k": ctx.view(found.k_set["target"]).data, "p_v": ctx.view(found.v_set["target"]).data,
        "p_q": q.data, "sq_t": 0, "sq_h": q.strides[1], "sq_s": q.strides[2], "p_k_new": k.data, "p_v_new": v.data,
        "p_ids": ids.data, "p_cos": table.cos, "p_sin": table.sin, "s_id": ids.strides[1] if n_seq > 1 else 0,
        "n_cells": found.k_set["target"].ne[1], "kn_t": k.strides[2], "kn_h": k.strides[1], "vn_t": v.strides[2],
        "APPEND": table.params.mode, "N_DIMS": table.params.n_dims,
    }  # fmt: skip


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "ROPE": lower_rope, "ROPE_BACK": lower_rope_back,
}  # fmt: skip

ROPE_CACHE = Fusion("rope_cache", rope_cache, lower_rope_cache)
#: Lowered by the attentions' Launcher.
ROPE_CACHE_ATTENTION = Fusion("rope_cache_attention", rope_cache_attention)
NORM_ROPE_CACHE = Fusion("norm_rope_cache", norm_rope_cache, lower_rope_cache)
