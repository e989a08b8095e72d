"""Latent attention around the attention itself: the query and the cache's row in two launches, and v of what was found.

What attends is a query of two parts, the head's own multiplied with its matrix and a rotated one behind it; the cache's
row is the token's, normalized, and behind it what all heads rotate alike. The first part is heads.py's; one launch
rotates the queries' ends and writes the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.common.blocks import halves_a_block, is_quantized
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.common.reduce import over_rms
from graphrt.backends.triton.kernels.latent_fusions import (
    HeadProducts,
    LatentRopeCache,
    head_products,
    latent_rope_cache,
)
from graphrt.backends.triton.kernels.products import emit
from graphrt.backends.triton.kernels.products.plan import plan_of
from graphrt.backends.triton.kernels.quantize import (
    BLOCK,
    block_elements,
    store_blocks,
    store_plain,
    stored,
    writing_options,
)
from graphrt.backends.triton.kernels.rope import (
    RopeTable,
    heads_a_program,
    rope_table,
    rotate_heads,
    rotate_into_blocks,
    rotation_constants,
    warps_of,
)
from graphrt.backends.triton.launch import Launch
from graphrt.dtypes import WRITABLE
from graphrt.fusion import Fusion


@triton.jit
def _write_normed(p_in, p_weight, eps, p_out, N: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    """A row of N <= SIZE elements, over its root mean square and times the weights, rounded and stored."""
    if is_quantized(KIND):
        i_block = tl.arange(0, SIZE // 32)
        i = i_block[:, None, None] * 32 + block_elements(KIND)[None, :, :]
        x = tl.load(p_in + i, mask=i < N, other=0.0)
        factor = over_rms(tl.sum(tl.sum(tl.sum(x * x, 2), 1), 0), N, eps)
        x = x * factor * tl.load(p_weight + i, mask=i < N, other=0.0)
        store_blocks(p_out + i_block * halves_a_block(KIND), x, i_block < N // 32, KIND)
    else:
        i = tl.arange(0, SIZE)
        x = tl.load(p_in + i, mask=i < N, other=0.0)
        x = x * over_rms(tl.sum(x * x, 0), N, eps) * tl.load(p_weight + i, mask=i < N, other=0.0)
        store_plain(p_out + i, x, i < N, KIND)


@triton.jit
def _write_rotated(
    p_in, p_out, p_cos, p_sin, D: tl.constexpr, N_DIMS: tl.constexpr, NEOX: tl.constexpr, SIZE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """One head of D <= SIZE elements, rotated, rounded and stored."""
    if is_quantized(KIND):
        rotate_into_blocks(p_in, 1, 0, p_out, 0, D, p_cos, p_sin, None, 0.0, D, N_DIMS, NEOX, SIZE, KIND)
    else:
        rotate_heads(p_in, 1, 0, p_out, 0, 0, 1, p_cos, p_sin, None, 0.0, D, N_DIMS, NEOX, 1, KIND)


@accesses(reads="p_q p_kv p_k p_weight p_ids p_cos p_sin", writes="p_q_out p_cache")
@triton.jit
def rotate_and_write_row(
    p_q, p_q_out, p_kv, p_k, p_weight, eps, p_cache, p_ids, p_cos, p_sin, n_head, q_parts, n,
    sq1, sq2, sqo1, sqo2, s_kv, s_k, s_id, s_id_seq, s_cache, s_cache_seq, n_cells,
    D: tl.constexpr, N_DIMS: tl.constexpr, NEOX: tl.constexpr, HEADS: tl.constexpr, N_KV: tl.constexpr,
    KV_SIZE: tl.constexpr, K_SIZE: tl.constexpr, KIND: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, i) rotates HEADS heads of q; the two programs past q_parts write a row of the cache.

    One of them writes kv, normalized and times weight, into row ids[token], the other k, rotated, behind that. q: f32
    [D, n_head, n_tokens]; kv: f32 [N_KV, n_tokens]; k: f32 [D, n_tokens]; cache: as quantize.stored() has it.
    SEQUENCES: there are several, with n tokens each, one after the other; ids and caches are theirs. A token whose id
    is none of the n_cells rows is not written.
    """
    take_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    p_cos += token * (N_DIMS // 2)
    p_sin += token * (N_DIMS // 2)
    if part < q_parts:
        rotate_heads(
            p_q + token * sq2, 1, sq1, p_q_out + token * sqo2, sqo1, part * HEADS, n_head, p_cos, p_sin, None, 0.0,
            D, N_DIMS, NEOX, HEADS, "f32",
        )  # fmt: skip
    else:
        p_kv += token * s_kv
        p_k += token * s_k
        if SEQUENCES:
            i_seq = token // n
            token -= i_seq * n
            p_ids += i_seq * s_id_seq
            p_cache += i_seq * s_cache_seq
        row = tl.load(p_ids + token * s_id).to(tl.int64)
        p_row = p_cache + row * s_cache
        BEHIND: tl.constexpr = N_KV // 32 * halves_a_block(KIND) if is_quantized(KIND) else N_KV
        if (row >= 0) & (row < n_cells):
            if part == q_parts:
                _write_normed(p_kv, p_weight, eps, p_row, N_KV, KV_SIZE, KIND)
            else:
                _write_rotated(p_k, p_row + BEHIND, p_cos, p_sin, D, N_DIMS, NEOX, K_SIZE, KIND)


@dataclass(frozen=True, eq=False)
class Row:
    """What a token's row of the cache is made of.

    kv: f32 [n_kv, n_tokens], to be normalized and multiplied with `weight`, f32 [n_kv]; k: f32 [d, 1, n_tokens], to be
    rotated."""

    kv: View
    weight: torch.Tensor
    eps: float
    k: View


def rotate_and_write_launch(
    q: View, q_out: torch.Tensor, row: Row, cache: View, ids: View, table: RopeTable, ctx: Context
) -> Launch:
    """q rotated into q_out, and the rows written into rows `ids` of the cache.

    q: f32 [d, heads, n_seq * n]; q_out: f32 [n_seq * n, heads, d], strided; ids: i32 or i64 [n, n_seq]; cache: [n_kv +
    d, cells, n_seq] of a type in WRITABLE, whose blocks hold elements of one part. All rows' elements lie side by side.
    """
    assert cache.kind in WRITABLE
    (d, n_head, n_tokens, _), n_kv = q.ne, row.kv.ne[0]
    heads = heads_a_program(n_head, n_tokens, d, ctx)
    q_parts = -(-n_head // heads)
    memory, (s_cache, s_cache_seq, _) = stored(cache)
    kv_size, k_size = (max(BLOCK, triton.next_power_of_2(size)) for size in (n_kv, d))
    args = {
        "p_q": q.data, "p_q_out": q_out, "p_kv": row.kv.data, "p_k": row.k.data, "p_weight": row.weight,
        "eps": row.eps, "p_cache": memory, "p_ids": ids.data, "p_cos": table.cos, "p_sin": table.sin,
        "n_head": n_head, "q_parts": q_parts, "n": ids.ne[0], "sq1": q.strides[1], "sq2": q.strides[2],
        "sqo1": q_out.stride(1), "sqo2": q_out.stride(0), "s_kv": row.kv.strides[1], "s_k": row.k.strides[2],
        "s_id": ids.strides[0], "s_id_seq": ids.strides[1], "s_cache": s_cache, "s_cache_seq": s_cache_seq,
        "n_cells": cache.ne[1], "N_KV": n_kv, "KV_SIZE": kv_size, "K_SIZE": k_size, "KIND": cache.kind,
        "SEQUENCES": ids.ne[1] > 1,
        **rotation_constants(table.params, d, heads, ctx),
    }  # fmt: skip
    warps = max(warps_of(heads, d), warps_of(1, kv_size))
    return Launch(rotate_and_write_row, (n_tokens, q_parts + 2), args, writing_options(ctx.target, warps, cache.kind))


def lower_latent_rope_cache(found: LatentRopeCache, ctx: Context) -> list[Step]:
    """A query's product, rotation and CONCAT; RMS_NORM and MUL, rotation, CONCAT and SET_ROWS of the cache's row."""
    query, row = found
    out, m = ctx.view(query.out).torch()[0], query.product.ne[0]
    steps = emit.head_products(plan_of(ctx).of(query.product), out[:, :, :m].transpose(0, 1), ctx)
    table, filling = rope_table(query.rotated, ctx)
    norm, scaled, _ = row.kv
    made = Row(ctx.view(norm["a"]), ctx.view(scaled["b"]).data, norm.params.eps, ctx.view(row.rotated["a"]))
    ids, cache = ctx.view(row.k_set["ids"]), ctx.view(row.k_set["target"])
    last = rotate_and_write_launch(ctx.view(query.rotated["a"]), out[:, :, m:], made, cache, ids, table, ctx)
    return [*filling, *steps, last]


def lower_head_products(found: HeadProducts, ctx: Context) -> list[Step]:
    """MUL_MAT of a matrix a head, and the CONT that puts the heads' results side by side for each token."""
    m, n, heads, _ = found.product.ne
    by_token = ctx.view(found.out).data.view(n, heads, m)
    return emit.head_products(plan_of(ctx).of(found.product), by_token.transpose(0, 1), ctx)


LATENT_ROPE_CACHE = Fusion("latent_rope_cache", latent_rope_cache, lower_latent_rope_cache)
HEAD_PRODUCTS = Fusion("head_products", head_products, lower_head_products)
