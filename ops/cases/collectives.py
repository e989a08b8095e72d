"""Conformance cases of ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, all ranks played: types, ranks, uneven parts, gaps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

from graphrt.ops.cases.gaps import gapped
from graphrt.ops.collectives import all_gather, all_reduce, reduce_scatter
from graphrt.tensor import Dims, Tensor
from graphrt.testing import Case, Inputs, register_cases


def _part(inputs: Inputs, i: int, dt: str, ne: Dims, gaps: bool) -> Tensor:
    return gapped(inputs, f"a{i}", dt, ne) if gaps else inputs(f"a{i}", dt, ne)


def _make_reduce(inputs: Inputs, ranks: int, dt: str, ne: Dims, gaps: bool) -> Tensor:
    return all_reduce(*(_part(inputs, i, dt, ne, gaps) for i in range(ranks)), ranks=ranks, rank=0)


def _reduce_cases() -> Iterator[Case]:
    shapes: tuple[Dims, ...] = ((5, 4, 3, 2), (129, 33, 1, 1))
    for ranks, dt, ne, gaps in itertools.product((2, 3, 8), ("f32", "f16", "bf16"), shapes, (False, True)):
        make = partial(_make_reduce, ranks=ranks, dt=dt, ne=ne, gaps=gaps)
        yield Case("ALL_REDUCE", {"ranks": ranks, "type": dt, "ne": ne, "gaps": gaps}, make)


def _make_gather(inputs: Inputs, sizes: tuple[int, ...], dt: str, n: int, gaps: bool) -> Tensor:
    parts = [_part(inputs, i, dt, (size, n, 2, 1), gaps) for i, size in enumerate(sizes)]
    return all_gather(*parts, ranks=len(sizes), rank=0, sizes=sizes)


#: Of two, three and eight ranks, even and uneven.
_SIZES = ((4, 4), (65, 1), (3, 7, 5), (2, 2, 2, 2, 1, 2, 3, 2))


def _gather_cases() -> Iterator[Case]:
    for sizes, dt, n, gaps in itertools.product(_SIZES, ("f32", "f16", "i32"), (1, 3), (False, True)):
        make = partial(_make_gather, sizes=sizes, dt=dt, n=n, gaps=gaps)
        yield Case("ALL_GATHER", {"sizes": sizes, "type": dt, "n": n, "gaps": gaps}, make)


def _make_scatter(inputs: Inputs, sizes: tuple[int, ...], rank: int, dt: str, gaps: bool) -> Tensor:
    parts = [_part(inputs, i, dt, (sum(sizes), 3, 2, 1), gaps) for i in range(len(sizes))]
    return reduce_scatter(*parts, ranks=len(sizes), rank=rank, sizes=sizes)


def _scatter_cases() -> Iterator[Case]:
    for sizes, dt, gaps in itertools.product(_SIZES, ("f32", "f16"), (False, True)):
        for rank in (0, len(sizes) - 1):
            make = partial(_make_scatter, sizes=sizes, rank=rank, dt=dt, gaps=gaps)
            yield Case("REDUCE_SCATTER", {"sizes": sizes, "rank": rank, "type": dt, "gaps": gaps}, make)


register_cases("ALL_REDUCE", quick=_reduce_cases)
register_cases("ALL_GATHER", quick=_gather_cases)
register_cases("REDUCE_SCATTER", quick=_scatter_cases)
