"""Masks of attention, from the positions of tokens and cells."""

from __future__ import annotations

from functools import cache

from graphrt.backends.cpu.fast.ir import F16, F32, I16, I32, I64, Fn, Val
from graphrt.backends.cpu.fast.jit import Kernel
from graphrt.backends.cpu.fast.pool import Entry, Step

_HIDDEN = -1024  # the bits of -inf in f16


def _build_kq_mask(f: Fn, alibi: bool) -> None:
    dst, cells, pos, n_cells, n_tokens, n_seq = f.args("dst", "cells", "pos", "n_cells", "n_tokens", "n_seq")
    cells_nb, pos_nb, window = f.args("cells_nb", "pos_nb", "window")
    start, stop = f.share(n_tokens * n_seq)
    with f.range(start, stop) as r:
        seq, token = r // n_tokens, r % n_tokens
        held, row = cells + seq * cells_nb, dst + r * n_cells * 2
        last = f.load(pos + seq * pos_nb + token * 4, I32)
        first = f.select(window.eq(0), 0, f.max_int(last.sext(I64) - window + 1, 0)).trunc(I32)

        def one(i: Val, lanes: int) -> None:
            cell = f.load(held + i * 4, I32, lanes)
            hidden = (cell < f.splat(first, lanes)) | (cell > f.splat(last, lanes))
            seen = (cell - f.splat(last, lanes)).to(F32).to(F16).as_bits(I16) if alibi else f.zeros(I16, lanes)
            f.store(row + i * 2, f.select(hidden, f.zeros(I16, lanes) + _HIDDEN, seen))

        f.elements(n_cells, one)


@cache
def _kernel(alibi: bool) -> Kernel:
    names = ("dst", "cells", "pos", "n_cells", "n_tokens", "n_seq", "cells_nb", "pos_nb", "window")
    return Kernel("kq_mask_alibi" if alibi else "kq_mask", names, lambda f: _build_kq_mask(f, alibi))


def kq_mask(
    *, dst: int, cells: int, pos: int, n_cells: int, n_tokens: int, n_seq: int, cells_nb: int, pos_nb: int,
    window: int, alibi: bool = False,
) -> Step:  # fmt: skip
    """dst[s, t, c] = 0 where token t of sequence s sees cell c, else -inf: f16 [n_seq, n_tokens, n_cells].

    cells: n_seq rows of n_cells i32, the positions held, -1 for none; pos: n_seq rows of n_tokens i32. A token sees
    positions up to its own, with a window other than 0 the last so many of these. alibi: minus the distance, not 0.
    """
    kernel = _kernel(alibi)
    block = kernel.pack(
        dst=dst, cells=cells, pos=pos, n_cells=n_cells, n_tokens=n_tokens, n_seq=n_seq, cells_nb=cells_nb,
        pos_nb=pos_nb, window=window,
    )  # fmt: skip
    return Step([Entry(kernel, block)], n_seq * n_tokens * n_cells * 2)
