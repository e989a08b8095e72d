"""The row of k and v that a step adds to a cache of blocks, inside of the portable kernel (forward.py) that attends it.

All heads of a KV head are in one tile here, so one program alone reads the k-block with the new cell. It writes the
cell before it reads any key, with SET_ROWS' own rounding, and its threads wait for each other; from then on the cell
is a key as others are, so the sums are those of separate launches. Where nobody reads the k-block, the program that
begins the tile writes the cell, for later launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.kernels.common.blocks import is_quantized
from graphrt.backends.triton.kernels.flash_attn.append import cell_of_head, new_rows
from graphrt.backends.triton.kernels.quantize import store_part

#: K-blocks of a list that are looked at in a round.
_ROUND = tl.constexpr(128)


@triton.jit
def is_writer(cell, n_kv, p_list, low, high, n_all, BLOCK_N: tl.constexpr, HAS_MASK: tl.constexpr):
    """Whether the program of k-blocks low .. high - 1 of a tile's list of n_all writes the cell: -1 is none."""
    block = tl.where(cell < n_kv, cell // BLOCK_N, -1)
    at = block  # where the list has it; -1: nowhere
    if HAS_MASK:
        at = tl.full([], -1, tl.int32)
        for first in range(low, tl.where(low == 0, n_all, high), _ROUND):
            i = first + tl.arange(0, _ROUND)
            listed = tl.load(p_list + i, mask=i < n_all, other=-2)
            at = tl.maximum(at, tl.max(tl.where(listed == block, i, -1), 0))
    return (cell >= 0) & (((at >= low) & (at < high)) | ((at < 0) & (low == 0)))


@triton.constexpr_function
def _covering(d):
    """The power of two, from a block on, that covers a head."""
    return max(32, 1 << (d - 1).bit_length())


@triton.constexpr_function
def _units(KIND, ALIGNED):
    """Units of what is written in a unit of what is read: rows of blocks are read by words, written by halves."""
    return 2 if is_quantized(KIND) and ALIGNED else 1


@triton.jit
def write_cell(
    new, caches, i_seq, i_kv_head, cell, sk_s, sk_h, sk_n, sv_s, sv_h, sv_n, D_K: tl.constexpr, D_V: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_ALIGNED: tl.constexpr, V_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Writes a head's new k and v; all threads of the program may read them behind it."""
    p_k_row, p_v_row = new_rows(new, i_seq, i_kv_head)
    p_k_cell = cell_of_head(caches.k, i_seq, i_kv_head, cell, sk_s, sk_h, sk_n, _units(K_KIND, K_ALIGNED))
    p_v_cell = cell_of_head(caches.v, i_seq, i_kv_head, cell, sv_s, sv_h, sv_n, _units(V_KIND, V_ALIGNED))
    store_part(p_k_row, 1, p_k_cell, 0, D_K, K_KIND, _covering(D_K))
    store_part(p_v_row, 1, p_v_cell, 0, D_V, V_KIND, _covering(D_V))
    tl.debug_barrier()
