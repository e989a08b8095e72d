"""gemv_packed.py's products of q, k and v whose programs rotate q and k and write k and v into a cache's rows.

A lane has two rows of W: of q and k those of one pair that a rotation turns together, of v any two. So nothing of what
is rotated ever leaves its registers, and a step of few tokens needs no launch for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.products.gemv_packed import products
from graphrt.backends.triton.kernels.quantize import store_plain


@triton.jit
def rows_of_pair(pair, HALF: tl.constexpr, NEOX: tl.constexpr):
    """The two rows, int32 [1, W, 2, 1], whose results are turned together. pair: int32 [1, W, 1, 1], counted over all
    heads of 2 * HALF rows: neighbours, or (NEOX) half a head apart."""
    second = tl.arange(0, 2)[None, None, :, None]
    if NEOX:
        row = pair // HALF * (2 * HALF) + pair % HALF + second * HALF
    else:
        row = 2 * pair + second
    return tl.max_contiguous(row, (1, 1, 1, 1))  # hidden, or stores would have another layout than what they store


@triton.jit
def angles(p_cos, p_sin, pair, token, HALF: tl.constexpr, G: tl.constexpr):
    """Cosine and sine of each pair and token, f32 [G, W, 1, N]: each lane of a row loads for itself."""
    W: tl.constexpr = pair.shape[1]
    N: tl.constexpr = token.shape[0]
    # That rows have neighbouring angles is hidden, or the loads would have another layout than what they multiply.
    at = tl.max_contiguous(token[None, None, None, :] * HALF + pair % HALF, (1, 1, 1, 1))
    at = tl.broadcast_to(at, (G, W, 1, N))
    return tl.load(p_cos + at, cache_modifier=".cg"), tl.load(p_sin + at, cache_modifier=".cg")


@triton.jit
def turned(y, cos, sin):
    """Products [W, 2, N] of pairs of rows, rotated: [G, W, 2, N]."""
    first = tl.arange(0, 2)[None, :, None] == 0
    # Sums of one number and 0, which stay in a lane where tl.split would go through shared memory.
    a = tl.sum(tl.where(first, y, 0.0), 1)[None, :, None, :]
    b = tl.sum(tl.where(first, 0.0, y), 1)[None, :, None, :]
    return tl.where(first[None], a * cos - b * sin, a * sin + b * cos)


@triton.jit
def places_of(p_ids, token, n_new, s_id, s_id_seq, s_row, s_seq, n_cells):
    """Where each token's row begins, int64 [N], and whether it is stored. n_new tokens are of one sequence, whose rows
    begin s_seq apart; ids say which rows, None: a token's own."""
    if p_ids is None:
        return token.to(tl.int64) * s_row, token >= 0
    else:
        seq = (token // n_new).to(tl.int64)
        at = seq * s_id_seq + (token % n_new).to(tl.int64) * s_id
        cell = tl.load(p_ids + at, cache_modifier=".cg").to(tl.int64)
        return seq * s_seq + cell * s_row, (cell >= 0) & (cell < n_cells)


@triton.jit
def store_rows(y, p_out, place, row, live, KIND: tl.constexpr):
    """Stores y [G, W, 2, N] in rows `row` [1, W, 2, 1] of what begins at `place` [N], by the first of a row's lanes."""
    G: tl.constexpr = y.shape[0]
    W: tl.constexpr = y.shape[1]
    N: tl.constexpr = y.shape[3]
    g = tl.arange(0, G)[:, None, None, None]
    row = tl.broadcast_to(row, (G, W, 2, N))
    store_plain(p_out + place[None, None, None, :] + row, y, live & (g == 0), KIND)


@triton.jit
def multiply_and_store(
    packed, p_bias, p_out, m, i_program, p_q, p_d, p_s, p_x, x_row, p_norm, eps, p_ids, p_cos, p_sin,
    s_id, s_id_seq, s_row, s_seq, n_cells, n_new, n, KIND: tl.constexpr, OUT_KIND: tl.constexpr, TURNS: tl.constexpr,
    HALF: tl.constexpr, NEOX: tl.constexpr, EARLY: tl.constexpr, X_FORM: tl.constexpr, PARTS: tl.constexpr,
    NG: tl.constexpr, N: tl.constexpr, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The i_program-th 2 * W of a matrix's m rows times x; TURNS: in pairs that are rotated."""
    token = tl.minimum(tl.arange(0, N), n - 1)
    lane = tl.arange(0, W)[None, :, None, None]
    if TURNS:
        i_pair = i_program * W + lane
        pair = tl.minimum(i_pair, m // 2 - 1)
        row = rows_of_pair(pair, HALF, NEOX)
        live = i_pair < m // 2
    else:
        i_row = i_program * (2 * W) + tl.arange(0, 2)[None, None, :, None] * W + lane
        row = tl.max_contiguous(tl.minimum(i_row, m - 1), (1, 1, 1, 1))
        live = i_row < m
    if EARLY:
        place, kept = places_of(p_ids, token, n_new, s_id, s_id_seq, s_row, s_seq, n_cells)
        if TURNS:
            cos, sin = angles(p_cos, p_sin, pair, token, HALF, G)
    y, _ = products(
        packed, None, row, token, n, p_q, p_d, p_s, p_x, x_row, p_norm, eps,
        KIND, "", X_FORM, PARTS, NG, U, G, PTX, PDL, p_bias,
    )  # fmt: skip
    if not EARLY:
        place, kept = places_of(p_ids, token, n_new, s_id, s_id_seq, s_row, s_seq, n_cells)
        if TURNS:
            cos, sin = angles(p_cos, p_sin, pair, token, HALF, G)
    if TURNS:
        y = turned(y, cos, sin)
    else:
        y = tl.broadcast_to(y[None], (G, W, 2, N))
    live = live & (kept & (tl.arange(0, N) < n))[None, None, None, :]
    store_rows(y, p_out, place, row, live, OUT_KIND)


#: Numbers that vary between a model's matrices and between runs, and make no difference to a kernel.
GENERAL = [
    "m0", "m1", "m2", "out_stride", "s_id", "s_id_seq", "s_k", "s_k_seq", "s_v", "s_v_seq", "n_cells", "n_new", "n"
]  # fmt: skip


@accesses(
    reads=("packed0 packed1 packed2 p_q p_d p_s p_x p_norm p_bias0 p_bias1 p_bias2 p_ids p_cos p_sin"),
    writes="p_out0 p_out1 p_out2",
    early=("packed0 packed1 packed2 p_bias0 p_bias1 p_bias2"),
    early_if={"EARLY": "p_ids p_cos p_sin"},
    uncached="p_ids p_cos p_sin",
)
@triton.jit(do_not_specialize=GENERAL)
def rotated_gemv(
    packed0, p_out0, m0, packed1, p_out1, m1, packed2, p_out2, m2,
    p_q, p_d, p_s, p_x, x_row, p_norm, eps, p_bias0, p_bias1, p_bias2, p_ids, p_cos, p_sin,
    out_stride, s_id, s_id_seq, s_k, s_k_seq, s_v, s_v_seq, n_cells, n_new, n,
    KIND0: tl.constexpr, KIND1: tl.constexpr, KIND2: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    HALF: tl.constexpr, NEOX: tl.constexpr, EARLY: tl.constexpr, X_FORM: tl.constexpr, PARTS: tl.constexpr,
    NG: tl.constexpr, N: tl.constexpr, U: tl.constexpr, W: tl.constexpr, G: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Matrices 0, 1 and 2 give q, k and v of n tokens. Programs: 2 * W rows each, matrix after matrix; what is not told
    here is as packed_gemv's.

    out0: f32 [n, heads of 2 * HALF elements], tokens out_stride apart; out1, out2: caches as quantize.stored() has
    them, rows s_k and s_v apart; those of each sequence, to which n_new tokens belong, s_k_seq and s_v_seq apart. A
    token whose id is none of the n_cells rows is left out. cos, sin: f32 [n, HALF].
    EARLY: ids and angles are older than the launch before this one, so that they need not be waited for. They are read
    past the L1 cache, which may still have those of the step before.
    """
    i_program = tl.program_id(0)
    programs0 = (m0 + (2 * W - 1)) // (2 * W)
    programs1 = (m1 + (2 * W - 1)) // (2 * W)
    if i_program < programs0:
        multiply_and_store(
            packed0, p_bias0, p_out0, m0, i_program, p_q, p_d, p_s, p_x, x_row, p_norm, eps, None, p_cos, p_sin,
            s_id, s_id_seq, out_stride, 0, n_cells, n_new, n,
            KIND0, "f32", True, HALF, NEOX, EARLY, X_FORM, PARTS, NG, N, U, W, G, PTX, PDL,
        )  # fmt: skip
    elif i_program < programs0 + programs1:
        multiply_and_store(
            packed1, p_bias1, p_out1, m1, i_program - programs0, p_q, p_d, p_s, p_x, x_row, p_norm, eps, p_ids, p_cos,
            p_sin, s_id, s_id_seq, s_k, s_k_seq, n_cells, n_new, n,
            KIND1, K_KIND, True, HALF, NEOX, EARLY, X_FORM, PARTS, NG, N, U, W, G, PTX, PDL,
        )  # fmt: skip
    else:
        multiply_and_store(
            packed2, p_bias2, p_out2, m2, i_program - programs0 - programs1, p_q, p_d, p_s, p_x, x_row, p_norm, eps,
            p_ids, None, None, s_id, s_id_seq, s_v, s_v_seq, n_cells, n_new, n,
            KIND2, V_KIND, False, HALF, NEOX, EARLY, X_FORM, PARTS, NG, N, U, W, G, PTX, PDL,
        )  # fmt: skip
