"""Share: what a model that is cut over several ranks must know of the cut to build its graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphrt import ops
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

#: From where to where, of heads, rows or elements.
Span = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """ranks, rank: how many there are and whose this is; heads: of each layer, which heads of q each rank has; vocab:
    rows of the output matrix that each rank has; widths: of norms over all heads together, by the weight's name, how
    much of the row each rank has."""

    ranks: int
    rank: int
    heads: tuple[tuple[Span, ...], ...]
    vocab: tuple[int, ...]
    widths: Mapping[str, tuple[int, ...]]

    def joined(self, x: Tensor, name: str) -> Tensor:
        """The sum of all ranks' x."""
        return ops.all_reduce(x, ranks=self.ranks, rank=self.rank, name=name)

    def side_by_side(self, x: Tensor, sizes: Sequence[int], name: str = "") -> Tensor:
        """All ranks' x, [sizes[rank], ...], behind each other."""
        x = x if x.is_contiguous else ops.cont(x)
        return ops.all_gather(x, ranks=self.ranks, rank=self.rank, sizes=tuple(sizes), name=name)

    def over_all(self, x: Tensor, weight: str, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """This rank's part of the norm over the rows of all ranks. x: [widths[rank], n]; weight: the norm's name. Where
        ranks have copies of a head, each has as many, which changes no mean."""
        widths = self.widths[weight]
        whole = norm(self.side_by_side(x, widths))
        start = sum(widths[: self.rank])
        return ops.view(whole, (widths[self.rank], x.ne[1]), whole.nb[1:2], start * whole.nb[0])

    def agreed(self, chosen: Tensor) -> Tensor:
        """What rank 0 has chosen, i32 [n], on every rank."""
        n = chosen.n_elements
        everyones = self.side_by_side(ops.reshape(chosen, n), (n,) * self.ranks, "every_ranks_tokens")
        return ops.view(everyones, (n,))

    def mine(self, il: int) -> Span:
        """This rank's heads of layer il."""
        return self.heads[il][self.rank]

    def n_head(self, il: int) -> int:
        """The heads of layer il on all ranks."""
        return self.heads[il][-1][1]


@dataclass(frozen=True)
class Run:
    """Heads that one attention serves: the first of a rank's own, how many, and ALiBi's max_bias, which gives so many
    heads the slopes that these have."""

    first: int
    n: int
    max_bias: float


def alibi_runs(n_head: int, mine: Span, max_bias: float, group: int) -> list[Run]:
    """The heads `mine` of n_head in runs whose slopes are those that attention would give as many heads alone.

    group: heads of q to a head of k. A run is within a group or whole groups. Its first slope says what max_bias must
    be, 2^(-max_bias / n) for n the largest power of two in the run's length; a run of one head can have any slope.
    """
    slopes = alibi_slopes(n_head, max_bias)[mine[0] : mine[1]]
    runs: list[Run] = []
    first = 0
    while first < len(slopes):
        for n in range(len(slopes) - first, 0, -1):
            whole = first % group == n % group == 0 or first // group == (first + n - 1) // group
            bias = -(2 ** int(math.log2(n))) * math.log2(slopes[first])
            wanted = slopes[first : first + n]
            if whole and all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(alibi_slopes(n, bias), wanted)):
                runs.append(Run(first, n, bias))
                break
        first += runs[-1].n
    return runs
