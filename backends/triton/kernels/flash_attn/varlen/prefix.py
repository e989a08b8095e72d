"""Results of what sequences share and of their own keys become one (cascade): a mean by the weight of both parts."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.kernels.common.pdl import take_turn


@accesses(writes="p_lse", helper=True)
@triton.jit(do_not_specialize=["n_rows"])
def no_prefix(p_lse, n_rows, ROWS: tl.constexpr):
    """The log of the denominators over no keys: lse f32 [n_rows] = -inf, for rows that no group has."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(p_lse + row, tl.full([ROWS], float("-inf"), tl.float32), mask=row < n_rows)


@accesses(reads="p_out p_lse p_shared p_shared_lse", writes="p_out p_lse", helper=True)
@triton.jit(do_not_specialize=["n_rows"])
def join_prefix(
    p_out, p_lse, p_shared, p_shared_lse, n_rows, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out, shared: f32 [n_rows, D]; lse, shared_lse: f32 [n_rows]. Rows whose shared_lse is -inf stay as they are, and
    their `shared` is not read."""
    take_turn(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_d = tl.arange(0, WIDTH)
    inside = row < n_rows
    a = tl.load(p_lse + row, mask=inside, other=0.0)
    b = tl.load(p_shared_lse + row, mask=inside, other=float("-inf"))
    has = inside & (b != float("-inf"))
    at = row.to(tl.int64)[:, None] * D + i_d[None, :]
    used = has[:, None] & (i_d < D)[None, :]
    x = tl.load(p_out + at, mask=used, other=0.0)
    y = tl.load(p_shared + at, mask=used, other=0.0)
    top = tl.where(has, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL), 0.0)
    of_own = tl.exp(a - top)
    of_shared = tl.exp(b - top)
    total = tl.where(has, of_own + of_shared, 1.0)
    result = (x * of_own[:, None] + y * of_shared[:, None]) / total[:, None]
    tl.store(p_out + at, result, mask=used)
    tl.store(p_lse + row, top + tl.log(total), mask=has)
