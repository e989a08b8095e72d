# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""What mask.py found, for programs that own keys: which tiles of queries see a k-block, and when its turn comes."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.flash_attn.mask import FULL, PARTIAL, SKIP


@accesses(reads="p_class", writes="p_counts p_columns", helper=True)
@triton.jit(do_not_specialize=["n_qt", "n_blocks"])
def list_seeing_tiles(p_class, p_counts, p_columns, n_qt, n_blocks, CHUNK: tl.constexpr):
    """Program (j, i) lists the tiles of queries that see k-block j of mask i: full ones in order, then partial ones.

    class: int32 [masks, n_qt, n_blocks]; counts: int32 [masks, n_blocks, 2], how many of each; columns: int32 [masks,
    n_blocks, n_qt].
    """
    i_kb, i_mask = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_class += i_mask * n_qt * n_blocks + i_kb
    p_columns += (i_mask * n_blocks + i_kb) * n_qt
    n_full = 0
    for base in range(0, n_qt, CHUNK):
        i = base + tl.arange(0, CHUNK)
        kind = tl.load(p_class + i.to(tl.int64) * n_blocks, mask=i < n_qt, other=SKIP)
        n_full += tl.sum((kind == FULL).to(tl.int32), 0)
    done_full = 0
    done_partial = n_full
    for base in range(0, n_qt, CHUNK):
        i = base + tl.arange(0, CHUNK)
        kind = tl.load(p_class + i.to(tl.int64) * n_blocks, mask=i < n_qt, other=SKIP)
        is_full = (kind == FULL).to(tl.int32)
        is_partial = (kind == PARTIAL).to(tl.int32)
        tl.store(p_columns + done_full + tl.cumsum(is_full, 0) - 1, i, mask=kind == FULL)
        tl.store(p_columns + done_partial + tl.cumsum(is_partial, 0) - 1, i, mask=kind == PARTIAL)
        done_full += tl.sum(is_full, 0)
        done_partial += tl.sum(is_partial, 0)
    p_own = p_counts + 2 * (i_mask * n_blocks + i_kb)
    tl.store(p_own, n_full)
    tl.store(p_own + 1, done_partial - n_full)


@accesses(reads="p_class", writes="p_ranks", helper=True)
@triton.jit(do_not_specialize=["n_blocks"])
def rank_blocks(p_class, p_ranks, n_blocks, CHUNK: tl.constexpr):
    """ranks: int32 [mask tiles, n_blocks], how many k-blocks before it a tile of queries sees. A program a tile."""
    at = tl.program_id(0).to(tl.int64) * n_blocks
    before = 0
    for base in range(0, n_blocks, CHUNK):
        i = base + tl.arange(0, CHUNK)
        seen = (tl.load(p_class + at + i, mask=i < n_blocks, other=SKIP) != SKIP).to(tl.int32)
        tl.store(p_ranks + at + i, before + tl.cumsum(seen, 0) - seen, mask=i < n_blocks)
        before += tl.sum(seen, 0)
