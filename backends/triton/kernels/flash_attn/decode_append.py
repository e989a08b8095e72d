"""The row of k and v that a step adds to the cache, inside of the decode kernel that attends it (decode.py).

Rows are f16 or bf16; a tuple `row` has what new_row found. rope.py rotates the same way where this kernel does not.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphrt.backends.triton.kernels.common.gluon_layouts import axis_index, axis_layout
from graphrt.backends.triton.kernels.flash_attn.decode_layouts import (
    ROWS,
    dot_dtype,
    half_copy_layout,
    mma_layout,
    query_layout,
)
from graphrt.backends.triton.kernels.flash_attn.gluon_visits import block_of_run


@gluon.jit
def new_row(
    new, i_seq, i_group, n_kv, BLOCK_N: gl.constexpr, D: gl.constexpr, K_KIND: gl.constexpr, V_KIND: gl.constexpr,
    PAIRS: gl.constexpr, N_DIMS: gl.constexpr,
):  # fmt: skip
    """(k rotated and v of the tile's KV head, in shared memory as they are stored; the token's angles; the cell; the
    k-block that has it) of a sequence's token.

    Of a token that is not written the cell is -1, of a cell that the attention does not read the block.
    """
    p_k_new, p_v_new, p_ids, p_cos, p_sin, s_id, n_cells, kn_t, kn_h, vn_t = new
    LAYOUT: gl.constexpr = gl.BlockedLayout([D // 32], [32], [gl.num_warps()], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    token = i_seq.to(gl.int64)
    cell = gl.load(p_ids + token * s_id)
    cell = gl.where((cell >= 0) & (cell < n_cells), cell, -1).to(gl.int32)
    block = gl.where((cell >= 0) & (cell < n_kv), cell // BLOCK_N, -1)
    p_cos += token * (N_DIMS // 2)
    p_sin += token * (N_DIMS // 2)
    column = gl.arange(0, D, layout=LAYOUT)
    k = turned(p_k_new + (token * kn_t + i_group * kn_h), column, column >= 0, p_cos, p_sin, PAIRS, N_DIMS)
    v = gl.load(p_v_new + (token * vn_t + i_group * D) + column)
    k_row = gl.allocate_shared_memory(dot_dtype(K_KIND), [D], FLAT, k.to(dot_dtype(K_KIND)))
    v_row = gl.allocate_shared_memory(dot_dtype(V_KIND), [D], FLAT, v.to(dot_dtype(V_KIND)))
    return k_row, v_row, p_cos, p_sin, cell, block


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
def load_turned_q(
    queries, row, i_group, D: gl.constexpr, KIND: gl.constexpr, PACK: gl.constexpr, PAIRS: gl.constexpr,
    N_DIMS: gl.constexpr,
):  # fmt: skip
    """load_q of rows that have not been rotated yet: each element is rotated once, by one of all threads."""
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    OPERAND: gl.constexpr = query_layout(D, W, KIND)
    p_q, sq_t, sq_h, row0, n_q, sign = queries
    _, _, p_cos, p_sin, _, _ = row
    i_row = axis_index(L, 2, 0, ROWS)
    column = axis_index(L, 2, 1, D)
    token = (row0 + i_row) // PACK
    head = i_group * PACK + (row0 + i_row) % PACK
    p_row = token.to(gl.int64) * sq_t + head.to(gl.int64) * sq_h
    q = turned(p_q + p_row, column, (token < n_q) & (column >= 0), p_cos, p_sin, PAIRS, N_DIMS) * sign
    shared = gl.allocate_shared_memory(
        dot_dtype(KIND), [ROWS, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]), q.to(dot_dtype(KIND))
    )
    q = gl.expand_dims(shared.load(gl.SliceLayout(0, OPERAND)), 0)
    q, _ = gl.broadcast(q, gl.full([W, ROWS, D], 0.0, dot_dtype(KIND), layout=OPERAND))
    return gl.convert_layout(q, gl.DotOperandLayout(0, mma_layout(W), 2), assert_trivial=True)


@gluon.jit
def write_row(row, p_kh, p_vh, sk_n: gl.constexpr, sv_n: gl.constexpr, D: gl.constexpr):
    """Writes the row into its cell, if it has one. p_kh, p_vh: the KV head's keys and values of the sequence."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([D // 32], [32], [gl.num_warps()], [0])
    k_row, v_row, _, _, cell, _ = row
    column = gl.arange(0, D, layout=LAYOUT)
    stored = (cell >= 0) & (column >= 0)
    gl.store(p_kh + (cell.to(gl.int64) * sk_n + column), k_row.load(LAYOUT), mask=stored)
    gl.store(p_vh + (cell.to(gl.int64) * sv_n + column), v_row.load(LAYOUT), mask=stored)


@gluon.jit
def has_row(row, visits, i, SEES: gl.constexpr):
    """Whether the i-th k-block of the list, if it is visited, is the one with the row's cell."""
    p_list, run_first, run, _, high = visits
    _, _, _, _, _, block = row
    i_kb = i
    if SEES == "mask":
        i_kb = block_of_run(p_list, gl.minimum(i, gl.maximum(high - 1, 0)), run_first, run)
    return (i < high) & (i_kb == block)


@gluon.jit
def key_of_row(row, caches, visits, i, BLOCK_N: gl.constexpr, SEES: gl.constexpr):
    """Which key of its k-block, the i-th of the list, the row is; -1 where the mask hides it: it may hold NaN."""
    _, _, _, _, p_bits, _ = caches
    _, _, _, n_full, _ = visits
    _, _, _, _, cell, block = row
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
