"""Share: what a model that is cut over several ranks must know of the cut to build its graph.

Ranks are numbered stage by stage: those of a pipeline's first stage are 0 to ranks - 1. What a stage makes of tokens
goes from each of its ranks to the one in the same place of the next stage, since all of a stage have the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphrt import ops
from graphrt.models.hparams import HParams
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

#: From where to where, of heads, rows or elements.
Span = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """ranks, rank: how many a stage has, and which of them this is; heads: of each layer, which heads of q each rank
    has; vocab: rows of the output matrix that each rank has; widths: of norms over all heads together, by the weight's
    name, how much of the row each rank has; stages, stage: how many a pipeline has, and whose this is; layers: which
    ones it has, () for all; experts: which ones each rank has whole, () where it has a part of every one."""

    ranks: int
    rank: int
    heads: tuple[tuple[Span, ...], ...]
    vocab: tuple[int, ...]
    widths: Mapping[str, tuple[int, ...]]
    stages: int = 1
    stage: int = 0
    layers: tuple[int, ...] = ()
    experts: tuple[Span, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def held(self, hp: HParams) -> HParams:
        """Of the model's hyperparameters, or a rank's, those of the layers that this stage has: what a cache is of."""
        if not self.layers:
            return hp
        own = slice(self.layers[0], self.layers[-1] + 1)
        return replace(
            hp, n_layer=len(self.layers), n_head=hp.n_head[own], n_head_kv=hp.n_head_kv[own], n_ff=hp.n_ff[own],
            windowed=hp.windowed[own],
        )  # fmt: skip

    def given(self, x: Tensor, stage: int, name: str = "") -> Tensor:
        """x, which another stage is given."""
        mine, other = self._link(stage)
        return ops.send(x if x.is_contiguous else ops.cont(x), rank=mine, other=other, name=name)

    def taken(self, after: Tensor, stage: int, kind: str, ne: Sequence[int], name: str = "") -> Tensor:
        """What another stage gives this one. after: what this one gave or took before."""
        mine, other = self._link(stage)
        return ops.recv(after, rank=mine, other=other, type=kind, ne=ne, name=name)

    def _link(self, stage: int) -> tuple[int, int]:
        """This rank, and the one in its place of another stage, by their numbers among all."""
        return self.stage * self.ranks + self.rank, stage * self.ranks + self.rank

    def everywhere(self, x: Tensor, source: int, name: str, ne: Sequence[int] = (), kind: str = "") -> Tensor:
        """x of the stage `source`, on all stages; of the others x is what they gave or took before. ne, kind: of what
        they take, where x has another shape or type."""
        if self.stage != source:
            return self.taken(x, source, kind or x.dtype.name, ne or x.ne, name)
        others = [stage for stage in range(self.stages) if stage != source]
        x = x.named(f"{name} (own)") if others else x
        for stage in others:
            x = self.given(x, stage, name if stage == others[-1] else f"{name} (to {stage})")
        return x

    def joined(self, x: Tensor, name: str) -> Tensor:
        """The sum of all ranks' x."""
        if self.ranks == 1:
            return x
        return ops.all_reduce(x, ranks=self.ranks, rank=self.rank, name=name)

    def side_by_side(self, x: Tensor, sizes: Sequence[int], name: str = "") -> Tensor:
        """All ranks' x, [sizes[rank], ...], behind each other."""
        if self.ranks == 1:
            return x
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
        first = ops.view(everyones, (n,))
        return first if self.stages == 1 else self.everywhere(ops.cont(first), 0, "first_ranks_tokens")

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
