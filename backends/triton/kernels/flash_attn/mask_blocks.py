"""What mask.py's kernels find in a mask, of a mask on the host: for tools, and to test the kernels against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from graphrt.backends.triton.kernels.flash_attn.problem import Tiling

#: As in mask.py: hidden from every query of the tile, visible with nothing to add, or in parts.
SKIP, FULL, PARTIAL = 0, 1, 2


def block_kinds(mask: npt.NDArray[np.float16], t: Tiling, dense: bool = False) -> npt.NDArray[np.int8]:
    """The kinds of a tiling's k-blocks, int8 [mask tiles, n_blocks]. mask: f16 [m3, m2, n_q, n_kv]; dense: full
    blocks hide nothing, whatever they add."""
    m3, m2, n_q, n_kv = mask.shape
    spare = ((0, 0), (0, 0), (0, 0), (0, t.n_blocks * t.block_n - n_kv))
    blocks = np.pad(mask, spare, constant_values=-np.inf).reshape(m3, m2, n_q, t.n_blocks, t.block_n)
    hidden, plain = (blocks == -np.inf).all(-1), (blocks != -np.inf if dense else blocks == 0).all(-1)
    out = np.empty((t.n_mask_tiles, t.n_blocks), np.int8)
    for tile in range(t.n_mask_tiles):
        group, seq = tile // t.n_qt % t.mask_groups, tile // (t.n_qt * t.mask_groups)
        rows = np.arange(tile % t.n_qt * t.block_m, min((tile % t.n_qt + 1) * t.block_m, n_q * t.pack))
        heads = (group * t.pack + rows % t.pack) % m2
        seen = seq, heads, rows // t.pack
        out[tile] = np.where(hidden[seen].all(0), SKIP, np.where(plain[seen].all(0), FULL, PARTIAL))
    return out


def mask_tile(tile: int, t: Tiling, m3: int) -> int:
    """The mask tile of a tile. m3: sequences that have masks of their own."""
    seq, group = tile // (t.n_qt * t.n_groups), tile // t.n_qt % t.n_groups
    return (seq % m3 * t.mask_groups + group % t.mask_groups) * t.n_qt + tile % t.n_qt
