"""A mask's plan turned round: for each block of keys, which blocks of queries there are to do."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.flash_attn.mask import FULL, PARTIAL, SKIP


@accesses(reads="p_class", writes="p_counts p_blocks", helper=True)
@triton.jit(do_not_specialize=["n_qt", "n_blocks"])
def list_query_blocks(p_class, p_counts, p_blocks, n_qt, n_blocks, CHUNK: tl.constexpr):
    """Program (i, j) lists the query tiles of the i-th mask that key block j is to be done with: those for which it is
    full in order, then those for which it is partial. class: int32 [masks, n_qt, n_blocks], classify_blocks'; counts:
    int32 [masks, n_blocks, 2], how many of each; blocks: int32 [masks, n_blocks, n_qt]."""
    i_list = tl.program_id(0) * n_blocks + tl.program_id(1)
    p_class += tl.program_id(0).to(tl.int64) * n_qt * n_blocks + tl.program_id(1)
    p_blocks += i_list.to(tl.int64) * n_qt
    n_full = 0
    for base in range(0, n_qt, CHUNK):
        i = base + tl.arange(0, CHUNK)
        kind = tl.load(p_class + i * n_blocks, mask=i < n_qt, other=SKIP)
        n_full += tl.sum((kind == FULL).to(tl.int32), 0)
    done_full = 0
    done_partial = n_full
    for base in range(0, n_qt, CHUNK):
        i = base + tl.arange(0, CHUNK)
        kind = tl.load(p_class + i * n_blocks, mask=i < n_qt, other=SKIP)
        is_full = (kind == FULL).to(tl.int32)
        is_partial = (kind == PARTIAL).to(tl.int32)
        tl.store(p_blocks + done_full + tl.cumsum(is_full, 0) - 1, i, mask=kind == FULL)
        tl.store(p_blocks + done_partial + tl.cumsum(is_partial, 0) - 1, i, mask=kind == PARTIAL)
        done_full += tl.sum(is_full, 0)
        done_partial += tl.sum(is_partial, 0)
    tl.store(p_counts + 2 * i_list, n_full)
    tl.store(p_counts + 2 * i_list + 1, done_partial - n_full)
