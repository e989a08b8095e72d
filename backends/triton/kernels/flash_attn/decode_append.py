"""The row of k and v that a step adds to the cache, inside of the decode kernel that attends it (decode.py).

Rows are f16 or bf16; a tuple `row` has what turned_rows found. rope.py rotates the same way where this kernel does not.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index, axis_layout
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import (
    ROWS,
    dot_dtype,
    half_copy_layout,
    mma_layout,
    query_layout,
)
from graphrt.backends.triton.kernels.flash_attn.decode_operands import row_mask
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import block_of_run, first_row


@gluon.jit
def turned_rows(
    queries, new, i_seq, i_group, n_kv, BLOCK_N: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr,
    V_KIND: gl.constexpr, PACK: gl.constexpr, PAIRS: gl.constexpr, N_DIMS: gl.constexpr,
):  # fmt: skip
    """A tile's rows of Q, rotated, as the first operand of Q K^T; and its sequence's new row: (k rotated and v of the
    tile's KV head, in shared memory as they are stored; the cell; the k-block that has it).

    new: flash_attn_decode_append's k_new, v_new, ids, cos, sin, s_id, n_cells, kn_t, kn_h and vn_t. Of a token that is
    not written the cell is -1, of a cell that the attention does not read the block. Everything is asked for before
    anything is waited for, and each element is rotated once, by one of all threads.
    """
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([D // 32], [32], [W], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    OPERAND: gl.constexpr = query_layout(D, W, K_KIND)
    p_k_new, p_v_new, p_ids, p_cos, p_sin, s_id, n_cells, kn_t, kn_h, vn_t = new
    p_q, sq_t, sq_h, row0, n_q, sign = queries
    token = i_seq.to(gl.int64)
    p_cos += token * (N_DIMS // 2)
    p_sin += token * (N_DIMS // 2)
    cell = gl.load(p_ids + token * s_id)

    i_row = axis_index(L, 2, 0, ROWS)
    i_token = (row0 + i_row) // PACK
    head = i_group * PACK + (row0 + i_row) % PACK
    p_row = i_token.to(gl.int64) * sq_t + head.to(gl.int64) * sq_h
    column = axis_index(L, 2, 1, D)
    q = turned(p_q + p_row, column, (i_token < n_q) & (column >= 0), p_cos, p_sin, PAIRS, N_DIMS) * sign
    column = gl.arange(0, D, layout=LINE)
    k = turned(p_k_new + (token * kn_t + i_group * kn_h), column, column >= 0, p_cos, p_sin, PAIRS, N_DIMS)
    v = gl.load(p_v_new + (token * vn_t + i_group * D) + column)

    shared = gl.allocate_shared_memory(
        dot_dtype(K_KIND), [ROWS, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]), q.to(dot_dtype(K_KIND))
    )
    k_line = gl.allocate_shared_memory(dot_dtype(K_KIND), [D], FLAT, k.to(dot_dtype(K_KIND)))
    v_line = gl.allocate_shared_memory(dot_dtype(V_KIND), [D], FLAT, v.to(dot_dtype(V_KIND)))
    q = gl.expand_dims(shared.load(gl.SliceLayout(0, OPERAND)), 0)
    q, _ = gl.broadcast(q, gl.full([W, ROWS, D], 0.0, dot_dtype(K_KIND), layout=OPERAND))
    q = gl.convert_layout(q, gl.DotOperandLayout(0, mma_layout(W), 2), assert_trivial=True)
    cell = gl.where((cell >= 0) & (cell < n_cells), cell, -1).to(gl.int32)
    block = gl.where((cell >= 0) & (cell < n_kv), cell // BLOCK_N, -1)
    return q, (k_line, v_line, cell, block)


@gluon.jit
def turned(p, column, mask, p_cos, p_sin, PAIRS: gl.constexpr, N_DIMS: gl.constexpr):
    """Columns of an f32 row rotated by a token's angles. PAIRS: "neox" or "normal", see rope.py."""
    HALF: gl.constexpr = N_DIMS // 2
    if PAIRS == "neox":
        first = column < HALF
        partner = gl.where(first, column + HALF, column - HALF)
        pair = gl.where(first, column, partner)
    else:
        first = column % 2 == 0
        partner = column ^ 1
        pair = column // 2
    turns = mask & (column < N_DIMS)
    x = gl.load(p + column, mask=mask, other=0.0)
    y = gl.load(p + partner, mask=turns, other=0.0)
    cos = gl.load(p_cos + pair, mask=turns, other=1.0)
    sin = gl.load(p_sin + pair, mask=turns, other=0.0)
    return x * cos + gl.where(first, -y, y) * sin


@gluon.jit
def write_row(
    row, new, caches, i_seq, i_group, low, sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Writes the row into its cell, if it has one: by the program that begins the tile."""
    LINE: gl.constexpr = gl.BlockedLayout([D // 32], [32], [gl.num_warps()], [0])
    k_line, v_line, cell, _ = row
    _, _, p_kh, p_vh, _, _ = caches
    if (low == 0) & (cell >= 0):
        column = gl.arange(0, D, layout=LINE)
        gl.store(p_kh + (cell.to(gl.int64) * sk_n + column), k_line.load(LINE))
        gl.store(p_vh + (cell.to(gl.int64) * sv_n + column), v_line.load(LINE))


@gluon.jit
def copy_fresh(
    ring, p, left, hidden, STRIDE: gl.constexpr, NW: gl.constexpr, D: gl.constexpr, HIDES: gl.constexpr, slot
):
    """copy_tile of rows of f16 or bf16, masked, past the L1 cache."""
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = half_copy_layout(D, W)
    tiles, _ = ring
    key = axis_index(L, 3, 0, W) * NW + axis_index(L, 3, 1, NW)
    pointers = gl.multiple_of(p, 16) + (key * STRIDE + axis_index(L, 3, 2, D))
    mask = row_mask(L, 3, key, left, hidden, NW, HIDES)
    async_copy.async_copy_global_to_shared(tiles.index(slot), pointers, mask, cache_modifier=".cg")


@gluon.jit
def copy_early(
    caches, visits, low, sk_n: gl.constexpr, sv_n: gl.constexpr, NW: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, SEES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """decode.py's first copies, of STAGES k-blocks, for who has not waited for the launch before: all is read past the
    L1 cache, which may hold a cell as it was before an earlier step wrote it."""
    ring_k, ring_v, p_kh, p_vh, p_bits, n_kv = caches
    p_list, run_first, run, n_full, high = visits
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0]))
    SKIP: gl.constexpr = "bits" if SEES == "mask" else ""
    for buffer in range(STAGES):
        i = low + buffer
        if i < high:
            i_kb = i
            hidden = i
            if SEES == "mask":
                i_kb = gl.load(p_list + i, mask=i >= run, other=run_first + i, cache_modifier=".cg")
                first = gl.arange(0, W, layout=L) * NW
                p_words = p_bits + i_kb * (BLOCK_N // 32) + first // 32
                partial = (i >= n_full) & (first >= 0)
                words = gl.load(p_words, mask=partial, other=-1, cache_modifier=".cg") >> (first % 32)
                hidden = (words, p_words, partial)  # as seen_bits has them
            left = n_kv - i_kb * BLOCK_N
            at = first_row(i_kb, BLOCK_N).to(gl.int64)
            copy_fresh(ring_k, p_kh + at * sk_n, left, hidden, sk_n, NW, D, SKIP, buffer)
            async_copy.commit_group()
            copy_fresh(ring_v, p_vh + at * sv_n, left, hidden, sv_n, NW, D, SKIP, buffer)
        else:
            async_copy.commit_group()
        async_copy.commit_group()


@gluon.jit
def has_row(row, visits, i, SEES: gl.constexpr):
    """Whether the i-th k-block of the list, if it is visited, is the one with the row's cell."""
    p_list, run_first, run, _, high = visits
    _, _, _, block = row
    i_kb = i
    if SEES == "mask":
        i_kb = block_of_run(p_list, gl.minimum(i, gl.maximum(high - 1, 0)), run_first, run)
    return (i < high) & (i_kb == block)


@gluon.jit
def key_of_row(row, caches, visits, i, BLOCK_N: gl.constexpr, SEES: gl.constexpr):
    """Which key of its k-block, the i-th of the list, the row is; -1 where the mask hides it: it may hold NaN."""
    _, _, _, _, p_bits, _ = caches
    _, _, _, n_full, _ = visits
    _, _, cell, block = row
    key = cell - block * BLOCK_N
    if SEES == "mask":
        p_word = p_bits + block * (BLOCK_N // 32) + key // 32
        word = gl.load(p_word, mask=i >= n_full, other=-1)
        key = gl.where(((word >> (key % 32)) & 1) != 0, key, -1)
    return key


@gluon.jit
def put_row(ring, slot, key, line, NW: gl.constexpr, D: gl.constexpr):
    """Puts k or v of the row, `line`, into a buffer of the ring, as the k-block's key `key`; nowhere if that is -1."""
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = half_copy_layout(D, W)
    tiles, _ = ring
    x = gl.expand_dims(gl.expand_dims(line.load(axis_layout(L, 3, 2)), 0), 1)
    # Eight keys of each way at a time: few registers, and whole periods of the order in which rows lie.
    for first in gl.static_range(0, NW, 8):
        if (key >= 0) & (key % NW // 8 == first // 8):
            some = tiles.index(slot).slice(first, 8, dim=1)
            i_key = axis_index(L, 3, 0, W) * NW + axis_index(L, 3, 1, 8) + first
            some.store(gl.where(i_key == key, x, some.load(L)))
