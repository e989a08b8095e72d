"""KQ_MASK: who sees which cell of a cache, by the positions of tokens and cells, as attention adds it to its logits."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.dtypes import F16
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, register, require
from graphrt.tensor import Tensor

#: The largest position there is.
MAX_POSITION = 2**31 - 1


@dataclass(frozen=True)
class KqMaskParams:
    """window: how many positions back a token sees, itself included; 0 for all. alibi: a cell that is seen holds minus
    its distance, which attention multiplies by each head's slope (max_bias), instead of 0."""

    window: int = 0
    alibi: bool = False


def _infer(params: KqMaskParams, cells: Tensor, pos: Tensor) -> Result:
    op = "KQ_MASK"
    for what, t in (("the cells' positions", cells), ("the tokens' positions", pos)):
        plain = t.dtype.name == "i32" and t.ne[2] == t.ne[3] == 1
        require(plain, op, f"{what} must be an i32 matrix, a row for each sequence", t)
        require(t.has_contiguous_rows, op, f"{what} must lie side by side; make them so with ops.cont", t)
    require(cells.ne[1] == pos.ne[1], op, "cells and tokens must be of equally many sequences", cells, pos)
    known = 0 <= params.window <= MAX_POSITION
    require(known, op, f"window must be 0, for none, to {MAX_POSITION}, got {params.window}")
    return Result(F16, (cells.ne[0], pos.ne[0], 1, cells.ne[1]))


KQ_MASK = register(OpSpec("KQ_MASK", _infer, elementwise_work(3), ("cells", "pos"), params=KqMaskParams))


@checked(GraphError)
def kq_mask(cells: Tensor, pos: Tensor, window: int = 0, alibi: bool = False, name: str = "") -> Tensor:
    """The mask of an attention over a cache: result[c, t] = 0 where token t sees cell c, else -inf.

    A token sees the cells of positions up to its own, with a window only the last so many of these: 0 <= cells[c] <=
    pos[t], and pos[t] - cells[c] < window. cells: i32 [n_cells, n_seq], the position that each cell holds, -1 for an
    empty one; pos: i32 [n_tokens, n_seq]; window: 0 for none; alibi: cells[c] - pos[t] instead of 0. The result is f16
    [n_cells, n_tokens, 1, n_seq]. !! f16 rounds distances over 2048, and those of 65520 or more become -inf, as in
    llama.cpp. Source: llama.cpp's llm_graph_input_attn_kv, which fills it on the CPU; ggml has no such op. Raises
    GraphError for other types, shapes and windows.
    """
    return build(KQ_MASK, cells, pos, params=KqMaskParams(int(window), bool(alibi)), name=name)
