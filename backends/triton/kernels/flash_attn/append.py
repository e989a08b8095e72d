"""The row of k and v that a step adds to the cache, inside of the portable kernel (forward.py) that attends it.

Nobody waits for the cell to be written. No program reads it: its key is left out of the cache's k-blocks, whatever the
cell holds meanwhile. The program that begins a tile takes the key from the step's own k and v, rounded as the cache
stores them, as one more part of the tile's sums; and of each KV head's tiles the first one's writes the cell, for later
launches. decode_append.py is the same for decode.py, with the rotation before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common.constants import LOG2E, NEG_INF
from graphrt.backends.triton.kernels.common.float8 import float8_codes, float8_values, is_float8
from graphrt.backends.triton.kernels.flash_attn.score_math import tanh
from graphrt.backends.triton.kernels.quantize import bf16_bits, store_plain


class NewRows(NamedTuple):
    """What one token of each sequence adds: in a kernel the first three are pointers.

    k, v: f32 or f16, a head's elements side by side; ids: i32 or i64, the cells, none of the n_cells for a token that
    is not written. Strides in elements, between heads and between sequences.
    """

    k: Any
    v: Any
    ids: Any
    k_head: int
    k_seq: int
    v_head: int
    v_seq: int
    n_cells: int


class Caches(NamedTuple):
    """Where they go, as quantize.stored() has it: the memory that the attention's k and v are views of, from its first
    cell on."""

    k: Any
    v: Any


@triton.jit
def new_cell(new, i_seq):
    """The cell of a sequence's new row, int32; -1 if it has none."""
    cell = tl.load(new.ids + i_seq)
    return tl.where((cell >= 0) & (cell < new.n_cells), cell, -1).to(tl.int32)


@triton.jit
def new_rows(new, i_seq, i_kv_head):
    """Where a head's new k and v begin."""
    i_seq = i_seq.to(tl.int64)
    return new.k + i_seq * new.k_seq + i_kv_head * new.k_head, new.v + i_seq * new.v_seq + i_kv_head * new.v_head


@triton.jit
def cell_of_head(p_cache, i_seq, i_kv_head, cell, s_seq, s_head, s_cell, UNITS: tl.constexpr = 1):
    """Where a head's first column of a cell lies. Strides in units, each of UNITS of the cache's elements."""
    at = i_seq.to(tl.int64) * s_seq + i_kv_head.to(tl.int64) * s_head + cell.to(tl.int64) * s_cell
    return p_cache + at * UNITS


@triton.jit
def as_stored(x, KIND: tl.constexpr):
    """f32 values as a cache of KIND gives them back."""
    if is_float8(KIND):
        return float8_values(float8_codes(x, KIND), KIND, 0).to(tl.float32)
    elif KIND == "bf16":
        return (bf16_bits(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "f16":
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def _columns(p_row, D: tl.constexpr, FROM: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    """SIZE columns from column FROM of a new row, [1, SIZE], as the cache stores them; 0 past D."""
    i_d = FROM + tl.arange(0, SIZE)
    return as_stored(tl.load(p_row + i_d, mask=i_d < D, other=0.0).to(tl.float32), KIND)[None, :]


@triton.jit
def with_new_key(
    m, l, acc0, acc1, q0, q1, p_k_row, p_v_row, cell, n_kv, p_mask_rows, m_row, p_slopes, factor, softcap,
    D_K: tl.constexpr, D_V: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, SOFTCAP: tl.constexpr, HAS_MASK: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """A tile's sums with the new key's, m in units of log2. q0, q1: its rows of Q, [BLOCK_M, .]; p_k_row, p_v_row: see
    new_rows(); p_mask_rows, p_slopes: of each row; factor, softcap: as forward.py's attend() has them.

    A row that does not see the key takes nothing of its value, which may be NaN.
    """
    s = tl.sum(q0.to(tl.float32) * _columns(p_k_row, D_K, 0, DK0, K_KIND), 1, keep_dims=True)
    if DK1 > 0:
        s += tl.sum(q1.to(tl.float32) * _columns(p_k_row, D_K, DK0, DK1, K_KIND), 1, keep_dims=True)
    s *= factor
    if SOFTCAP:
        s = (softcap * LOG2E) * tanh(s, ACCURATE)
    seen = m_row[:, None] & (cell >= 0) & (cell < n_kv)
    if HAS_MASK:
        added = tl.load(p_mask_rows[:, None] + cell, mask=seen, other=NEG_INF).to(tl.float32)
        slope = tl.load(p_slopes, mask=m_row, other=0.0)[:, None]
        seen &= added != NEG_INF
        s += (slope * LOG2E) * tl.where(seen, added, 0.0)
    s = tl.where(seen, s, NEG_INF)
    top = tl.maximum(m, s)
    top = tl.where(top == NEG_INF, 0.0, top)
    alpha = tl.exp2(m - top)
    p = tl.exp2(s - top)
    acc0 = acc0 * alpha + tl.where(seen, p * _columns(p_v_row, D_V, 0, DV0, V_KIND), 0.0)
    if DV1 > 0:
        acc1 = acc1 * alpha + tl.where(seen, p * _columns(p_v_row, D_V, DV0, DV1, V_KIND), 0.0)
    return tl.maximum(m, s), l * alpha + p, acc0, acc1


@triton.jit
def _write(
    p_row, p_cell, s_panel, D: tl.constexpr, FROM: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
    PANEL: tl.constexpr,
):  # fmt: skip
    """SIZE columns from column FROM of a new row into its cell, whose first column is at p_cell; PANEL, s_panel: see
    forward.py's load_kv."""
    i_d = FROM + tl.arange(0, SIZE)
    i_col = i_d if PANEL == 0 else (i_d // PANEL).to(tl.int64) * s_panel + i_d % PANEL
    x = tl.load(p_row + i_d, mask=i_d < D, other=0.0).to(tl.float32)
    store_plain(p_cell + i_col, x, i_d < D, KIND)


@triton.jit
def write_new_rows(
    p_k_row, p_v_row, p_k_cell, p_v_cell, s_panel, D_K: tl.constexpr, D_V: tl.constexpr, DK0: tl.constexpr,
    DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    PANEL: tl.constexpr,
):  # fmt: skip
    """A head's new k and v into their cell of the caches."""
    _write(p_k_row, p_k_cell, s_panel, D_K, 0, DK0, K_KIND, PANEL)
    if DK1 > 0:
        _write(p_k_row, p_k_cell, s_panel, D_K, DK0, DK1, K_KIND, PANEL)
    _write(p_v_row, p_v_cell, 0, D_V, 0, DV0, V_KIND, 0)
    if DV1 > 0:
        _write(p_v_row, p_v_cell, 0, D_V, DV0, DV1, V_KIND, 0)
