"""A product and its sum over ranks in bands of tokens, of which one's sum is under way while the next is multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from graphrt import ops
from graphrt.backends.cpu.lowering import Lowering
from graphrt.backends.cpu.products import matmul_into, one_matrix
from graphrt.fusion import Fusion, Nodes
from graphrt.ops.overlap import Band, Bands, OverlappedSum
from graphrt.program import Choice, Group, in_order
from graphrt.ranks import RankSum, current
from graphrt.tensor import Tensor


def why_not_by_bands(product: Tensor) -> str | None:
    """Why a MUL_MAT is not made band by band, None if it is."""
    plain = one_matrix(product) is not None and product.is_contiguous
    return None if plain else "it takes the product of one matrix of a known type and even rows of f32"


#: Gloo's calls take some tenths of a millisecond each, in which a link of 10 Gbit/s carries half a megabyte; a band of
#: 64 tokens is made by the kernels that make all of them, which take others for up to 8.
BANDS = Bands(1 << 20, 64, why_not_by_bands)


def overlapped_sums(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT, ADD of a bias if there is one, and the ALL_REDUCE of that over ranks, of many tokens, where bands are
    asked for."""
    return BANDS.sums(nodes)


def choice_of(group: Group) -> Choice | None:
    """For those who ask: how a group's sum over ranks is cut, or why it is not; None for one without."""
    total = group.nodes[-1]
    return Choice(reasons=[BANDS.told(total)]) if total.op == "ALL_REDUCE" else None


class _Made(NamedTuple):
    """A band: what multiplies it, the memory of its part, and that of its sum."""

    multiply: Callable[[], object]
    part: torch.Tensor
    total: torch.Tensor


def lower_overlapped(low: Lowering, found: OverlappedSum) -> Callable[[], None]:
    """Sums go on step by step between the bands' products: a band's parts cross the link while the next band is
    multiplied, its sum while the one after that is."""
    n_ranks, bands = found.total.params.ranks, [_made(low, found, band) for band in found.bands]

    def run() -> None:
        ranks, sums = current(n_ranks), list[RankSum]()
        for band in bands:
            band.multiply()
            sums.append(ranks.sum_begun(band.part))
            if len(sums) > 1:
                sums[-2].go_on()
        for band, each in zip(bands, sums):
            band.total.copy_(each.there())

    return run


def _made(low: Lowering, found: OverlappedSum, band: Band) -> _Made:
    product = ops.mul_mat(found.product["weights"], _tokens(found.product["x"], band))
    part = _tokens(found.part, band)
    steps, memory = matmul_into(low, product, part), low.look(part)[0, 0]
    multiply = low.program(steps) if isinstance(steps, list) else steps
    assert multiply is not None, "why_not_by_bands() has asked"
    if found.bias is not None:
        multiply = in_order([multiply, partial(memory.add_, low.look(found.bias)[0, 0])])
    return _Made(multiply, memory, low.look(_tokens(found.total, band))[0, 0])


def _tokens(t: Tensor, band: Band) -> Tensor:
    """A band's rows of a tensor, where they lie."""
    start, stop = band
    return ops.view(t, (t.ne[0], stop - start), t.nb[1:2], start * t.nb[1])


OVERLAPPED_SUM = Fusion("overlapped_sum", overlapped_sums, lower_overlapped)
