"""KQ_MASK: a mask from the positions of tokens and cells, in one launch at the speed of writing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.tensor import Tensor

#: Cells and tokens of one program; a single token is a form of its own.
_CELLS, _TOKENS = 1024, 8
#: Values of a 16-byte store.
_VECTOR = 8


@accesses(reads="p_cells p_pos", writes="p_out")
@triton.jit(do_not_specialize=["n_cells", "n_tokens", "sc", "sp", "window"])
def kq_mask(
    p_cells, p_pos, p_out, n_cells, n_tokens, sc, sp, window,
    ALIBI: tl.constexpr, EVEN: tl.constexpr, CELLS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j, s) writes CELLS cells of TOKENS rows of sequence s.

    cells: i32 [n_cells, n_seq] with stride sc; pos: i32 [n_tokens, n_seq] with stride sp; out: f16 [n_cells, n_tokens,
    n_seq], contiguous. ALIBI: what is seen holds minus its distance. EVEN: n_cells and sc are multiples of 8.
    """
    take_turn(PDL)
    seq = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    j = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    at_cells = seq * sc
    at_rows = (seq * n_tokens + j) * n_cells
    m_cells = i < n_cells
    if EVEN:  # nothing is known of numbers that are not specialized, and whole vectors are loaded and stored
        at_cells = tl.multiple_of(at_cells, 8)
        at_rows = tl.multiple_of(at_rows, 8)
        m_cells = i // 8 < n_cells // 8
    m_tokens = j < n_tokens
    # Before position -1 nobody stands, and from there on all differences keep within int32.
    held = tl.maximum(tl.load(p_cells + at_cells + i, mask=m_cells, other=-1), -1)
    last = tl.maximum(tl.load(p_pos + seq * sp + j, mask=m_tokens, other=-1), -1)
    first = tl.where(window == 0, 0, tl.maximum(last - tl.maximum(window - 1, 0), 0))
    sees = (held[None, :] >= first[:, None]) & (held[None, :] <= last[:, None])
    seen = (held[None, :] - tl.maximum(last, 0)[:, None]).to(tl.float32) if ALIBI else 0.0
    out = tl.where(sees, seen, float("-inf")).to(tl.float16)
    tl.store(p_out + at_rows[:, None] + i[None, :], out, mask=m_tokens[:, None] & m_cells[None, :])


def lower_kq_mask(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """KQ_MASK."""
    node = nodes[0]
    cells, pos = ctx.view(node["cells"]), ctx.view(node["pos"])
    n_cells, n_tokens, _, n_seq = node.ne
    tokens = 1 if n_tokens == 1 else _TOKENS
    args = {
        "p_cells": cells.data, "p_pos": pos.data, "p_out": ctx.view(node).data, "n_cells": n_cells,
        "n_tokens": n_tokens, "sc": cells.strides[1], "sp": pos.strides[1], "window": node.params.window,
        "ALIBI": node.params.alibi,
        "EVEN": n_cells % _VECTOR == 0 and cells.strides[1] % _VECTOR == 0, "CELLS": _CELLS, "TOKENS": tokens,
        "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    grid = (-(-n_cells // _CELLS), -(-n_tokens // tokens), n_seq)
    return [Launch(kq_mask, grid, args, launch_options(ctx.target, 4))]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {"KQ_MASK": lower_kq_mask}
