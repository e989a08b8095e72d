"""The gradient of attention's bias from gradients of scores that lie in memory, by a launch of plain Triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.flash_attn.mask import SKIP


@accesses(reads="p_scores p_kinds p_scales", writes="p_result")
@triton.jit(do_not_specialize=["n_q", "n_kv", "n_head", "n_seq", "b2", "b3", "kind_groups", "n_qt", "n_blocks"])
def attention_back_bias_sum(
    p_scores, p_kinds, p_scales, p_result, n_q, n_kv, n_head, n_seq, b2, b3, kind_groups, n_qt, n_blocks,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """result f32 [b3, b2, n_q, n_kv]: dS over scales[1], summed over the heads and sequences that share an element,
    sequence by sequence. Program (i, j, b): KEYS keys of QUERIES queries of a bias.

    scores: dS^T of 16 bits [n_seq, n_head, blocks of queries, n_kv, QUERIES]; kinds: int32 [b3, kind_groups, n_qt,
    n_blocks], mask.py's of tiles of TILE queries and BLOCK keys, whole numbers of QUERIES and KEYS: of tiles that
    nobody sees, dS is not there and counts as 0.
    """
    take_turn(PDL)
    i_qt, i_kb, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_q = i_qt * QUERIES + tl.arange(0, QUERIES)
    i_k = i_kb * KEYS + tl.arange(0, KEYS)
    tile = (i_b // b2 * kind_groups + i_b % b2 % kind_groups) * n_qt + i_qt * QUERIES // TILE
    kind = tl.load(p_kinds + tile.to(tl.int64) * n_blocks + i_kb * KEYS // BLOCK)
    there = (i_k < n_kv)[:, None] & (i_q < n_q)[None, :] & (kind != SKIP)
    at = i_k[:, None] * QUERIES + tl.arange(0, QUERIES)[None, :]
    total = tl.zeros([KEYS, QUERIES], tl.float32)
    heads = n_head // b2
    for turn in tl.range(0, heads * (n_seq // b3), loop_unroll_factor=4):
        head = i_b % b2 + turn % heads * b2
        seq = i_b // b2 + turn // heads * b3
        first = ((seq * n_head + head) * tl.num_programs(0) + i_qt).to(tl.int64) * n_kv * QUERIES
        total += tl.load(p_scores + first + at, mask=there, other=0.0).to(tl.float32)
    found = tl.trans(total) / tl.load(p_scales + 1)
    p_rows = p_result + (i_b.to(tl.int64) * n_q + i_q)[:, None] * n_kv + i_k[None, :]
    tl.store(p_rows, found, mask=(i_q < n_q)[:, None] & (i_k < n_kv)[None, :])
