"""Sums over ranks that travel while the product that makes their parts goes on: which ones, and in what bands.

A product's tokens are cut into bands. Once a band is multiplied, its sum starts, and the next band is multiplied
meanwhile; behind the last one all sums are waited for. Product and sum are one group of nodes (graphrt/fusion.py), so
that nothing else of a graph knows of it, and the planner keeps the memory of both until the sums are there. A token's
products and sums are those of the whole, and so are their bits.

What is cut depends on the sum alone, its size and what makes it, which is the same on all ranks: ranks must start the
same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from graphrt.env import OVERLAP
from graphrt.errors import BackendError
from graphrt.fusion import Nodes, is_bias
from graphrt.ops.collectives import is_played
from graphrt.program import Group
from graphrt.tensor import Tensor

#: More bands than this are refused: each costs calls of the link and a product of its own.
MOST_BANDS = 64


class Band(NamedTuple):
    """Tokens `start` up to `stop` of a product."""

    start: int
    stop: int


class OverlappedSum(NamedTuple):
    """A MUL_MAT, the ALL_REDUCE of it, and the bands of tokens in which both are made. bias: a row that is added to the
    product before, or None; part: what ranks add up, the product or that sum."""

    product: Tensor
    part: Tensor
    total: Tensor
    bands: tuple[Band, ...]
    bias: Tensor | None = None


@dataclass(frozen=True)
class Bands:
    """What a backend asks of bands. bytes: the least that one's sum has, as shorter ones are over before they pay for
    the calls that start them; tokens: each but the last has a multiple of so many, and none has fewer; takes: why a
    product can't be made band by band, None if it can, which must depend on nothing in which ranks differ."""

    bytes: int
    tokens: int
    takes: Callable[[Tensor], str | None]

    def why_whole(self, total: Tensor) -> str | None:
        """Why an ALL_REDUCE is not cut into bands, None if it is."""
        return "all ranks are played in this graph" if is_played(total) else self._why_not(total)

    def told(self, total: Tensor) -> str:
        """For people: whether an ALL_REDUCE is cut, or would be over a link where all ranks are played."""
        why, lead = self._why_not(total), "over a link " * is_played(total)
        return lead + (described(self.of(total)) if why is None else f"waited for, not in bands of tokens: {why}")

    def _why_not(self, total: Tensor) -> str | None:
        product, _ = _product_and_bias(total["a"])
        wanted = wanted_bands()
        if not wanted:
            return f"{OVERLAP.flag} ({OVERLAP.name}) asks for none"
        if product.op != "MUL_MAT":
            return f"it takes the sum of a MUL_MAT, with a bias or without, this is one of {product.op or 'a leaf'}"
        if total.dtype.name != "f32" or total.ne[2] != 1 or total.ne[3] != 1:
            return "it takes one row of f32 for each token"
        if self._count(total, wanted) < 2:
            needed = f"two bands of {self.tokens} tokens and {self.bytes >> 10} KB at least"
            return f"it takes {needed}, there are {total.ne[1]} tokens and {total.data_nbytes >> 10} KB"
        return self.takes(product)

    def of(self, total: Tensor) -> tuple[Band, ...]:
        """The bands of an ALL_REDUCE that is cut: as even as whole steps of tokens let them be."""
        n, steps, tokens = self._count(total, wanted_bands()), total.ne[1] // self.tokens, total.ne[1]
        starts = [i * steps // n * self.tokens for i in range(n)]
        return tuple(Band(start, stop) for start, stop in zip(starts, [*starts[1:], tokens]))

    def _count(self, total: Tensor, wanted: int) -> int:
        """How many bands of `wanted` are large enough."""
        row = total.data_nbytes // total.ne[1]
        step = max(1, -(-self.bytes // (row * self.tokens)))  # of bands: so many steps of tokens have enough bytes
        return min(wanted, total.ne[1] // self.tokens // step)

    def sums(self, nodes: Nodes) -> Iterator[Group]:
        """MUL_MAT, ADD of a bias if there is one, and the ALL_REDUCE of that over ranks, in bands of tokens."""
        here = set(nodes.of("MUL_MAT"))
        for total in nodes.of("ALL_REDUCE"):
            product, bias = _product_and_bias(part := total["a"])
            alone = product is part or nodes.only_reader(product) is part
            if product in here and alone and self.why_whole(total) is None:
                found = OverlappedSum(product, part, total, self.of(total), bias)
                members = list(dict.fromkeys([product, part, total]))
                yield Group(members, kernel="overlapped_sum", results=[part, total], captured=found)


def _product_and_bias(part: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a bias is added to, and the bias; else the tensor itself, and None."""
    if part.op == "ADD" and part["a"].op == "MUL_MAT" and is_bias(part["b"], part["a"]):
        return part["a"], part["b"]
    return part, None


def wanted_bands() -> int:
    """How many bands are asked for, 0 for none. Raises BackendError for what is no such number."""
    text = OVERLAP.get() or "0"
    n = int(text) if text.isdecimal() and len(text) < 4 else -1
    if n == 1 or not 0 <= n <= MOST_BANDS:
        raise BackendError(
            f"{OVERLAP.name} must be 0, for none, or a number of bands from 2 to {MOST_BANDS}, got {text[:40]!r}; give "
            f"4, say"
        )
    return n


def described(bands: tuple[Band, ...]) -> str:
    """For people: how many bands there are, and of how many tokens."""
    sizes = [band.stop - band.start for band in bands]
    each = f"{min(sizes)}" if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
    return f"in {len(bands)} bands of {each} tokens: the sum of one is under way while the next is multiplied"
