"""Conformance cases of KQ_MASK: rings of cells that are part full, full, wrapped or broken, windows, ALiBi."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from graphrt.ops.cases.gaps import gapped
from graphrt.ops.kq_mask import MAX_POSITION, kq_mask
from graphrt.tensor import Tensor
from graphrt.testing import AnyArray, Case, Inputs, grid, register_cases


@dataclass(frozen=True)
class _Axes:
    """One point: a cache of n_cells cells a sequence, and n_tokens tokens that look at it.

    last: the position of the first sequence's last token, -1 if it has none; each further sequence's is 5 less. broken:
    some cells are empty or hold later positions, and tokens have any positions, as no session would leave them. gaps:
    between the rows of both inputs. window, alibi: see KqMaskParams.
    """

    n_cells: int
    n_tokens: int
    n_seq: int = 1
    window: int = 0
    last: int = 20
    broken: bool = False
    gaps: bool = False
    alibi: bool = False


@dataclass(frozen=True)
class _Cells:
    """The positions that a ring of cells holds: the last ones up to `last`, each in the cell position modulo size.

    broken: some cells are empty, some hold a later position.
    """

    last: int
    broken: bool

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        last, size = _last(self.last, shape), shape[-1]
        held = last - (last - np.arange(size)) % size
        held = np.where((last < 0) | (held < 0), -1, held)
        if self.broken:
            later = np.minimum(held + size, MAX_POSITION)
            held = np.choose(rng.integers(0, 4, shape), [held, held, np.full_like(held, -1), later])
        return np.broadcast_to(held, shape)


@dataclass(frozen=True)
class _Tokens:
    """The last positions in order; broken: positions up to three times as far back, in any order."""

    last: int
    broken: bool

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        last, n = _last(self.last, shape), shape[-1]
        back = rng.integers(0, 3 * n, shape) if self.broken else n - 1 - np.arange(n)
        return np.broadcast_to(np.maximum(last - back, 0), shape)


def _last(last: int, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The last position of each sequence: int64 [n_seq, 1]."""
    return np.maximum(last - 5 * np.arange(shape[-2], dtype=np.int64), -1)[:, None]


def _axes() -> Iterator[_Axes]:
    # Lasts: most cells are empty; all but one are full, all; wrapped by one, and often; the end of int32.
    lasts = (6, 31, 32, 33, 1000, MAX_POSITION)
    yield from grid(_Axes(33, 7), {"last": lasts, "window": (0, 1, 5, 32, 100), "broken": (False, True)})
    yield from grid(_Axes(64, 1), {"n_tokens": (1, 8, 9), "last": (8, 40, 700), "window": (0, 5, MAX_POSITION)})
    yield from grid(_Axes(40, 3, n_seq=4), {"n_cells": (40, 41), "n_tokens": (1, 3), "window": (0, 5), "last": (8, 50)})
    yield from grid(_Axes(40, 3, n_seq=3, gaps=True), {"n_cells": (40, 41), "broken": (False, True)})
    yield from grid(_Axes(1, 1), {"last": (-1, 0, 9), "window": (0, 1)})
    yield from grid(_Axes(1100, 33, last=1600, window=300), {"n_cells": (1100, 1101, 2048), "broken": (False, True)})
    yield _Axes(2056, 1, last=2000)
    alibi = _Axes(33, 7, alibi=True)
    yield from grid(alibi, {"last": lasts, "window": (0, 5), "broken": (False, True)})
    yield from grid(replace(alibi, n_cells=40, last=700), {"n_tokens": (1, 9), "n_seq": (1, 3)})
    yield replace(alibi, n_cells=5000, n_tokens=2, last=4800)  # distances that f16 rounds
    yield replace(alibi, n_cells=70000, n_tokens=1, last=69000)  # and that it has no finite number for


def _full_axes() -> Iterator[_Axes]:
    yield from _axes()
    big = _Axes(4096, 512, last=3000)
    yield from (big, replace(big, window=1024, last=9000), replace(big, n_cells=8191, n_seq=2, broken=True))


def _cases(full: bool = False) -> Iterator[Case]:
    for axes in _full_axes() if full else _axes():
        shown = {name: value for name, value in asdict(axes).items() if name != "alibi" or value}
        yield Case("KQ_MASK", shown, partial(_make, axes=axes))


def _make(inputs: Inputs, axes: _Axes) -> Tensor:
    leaf = partial(gapped, inputs) if axes.gaps else inputs
    cells = leaf("cells", "i32", (axes.n_cells, axes.n_seq), _Cells(axes.last, axes.broken))
    pos = leaf("pos", "i32", (axes.n_tokens, axes.n_seq), _Tokens(axes.last, axes.broken))
    return kq_mask(cells, pos, axes.window, axes.alibi)


register_cases("KQ_MASK", quick=_cases, full=partial(_cases, full=True))
