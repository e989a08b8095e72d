"""What ranks would hold and tell each other, said before any of them is there: nothing is read or allocated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from graphrt.backend import Backend, Buffer, Bytes, Usage
from graphrt.models.arch import architecture, read_file
from graphrt.models.cache import KVCache
from graphrt.models.engine import SessionOptions, check_options
from graphrt.models.gguf import GGUFFile
from graphrt.models.hparams import HParams
from graphrt.models.ranks.network import plan_of
from graphrt.models.ranks.plan import Cut, RankPlan
from graphrt.models.ranks.weights import RankWeights
from graphrt.ops.send_recv import link_bytes, on_link
from graphrt.ranks import Ranks
from graphrt.tensor import Tensor

_LAYER = re.compile(r"blk\.[0-9]+\.")


@dataclass(frozen=True)
class RankNeeds:
    """One rank's part. stage: of a pipeline, from 0; layers: how many it has, from `first` on; heads, kv_heads,
    columns: of the first layer (columns: of each expert, where there are some); weights, cache: bytes; link: bytes that
    it hands to the others, or takes from them, for each token; meetings: how often it needs them."""

    rank: int
    stage: int
    first: int
    layers: int
    heads: int
    kv_heads: int
    columns: int
    weights: int
    cache: int
    link: int
    meetings: int


@dataclass(frozen=True)
class CutTensors:
    """Tensors that are cut alike. name: with * for the layer; ne: the whole shape; parts: the ranks' shapes."""

    name: str
    by: str
    ne: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    count: int


class _Nowhere:
    """Takes requests for memory and gives none: shapes remain."""

    def alloc(self, nbytes: int, usage: Usage) -> None:
        return None


class _Planned(RankWeights):
    """A rank's weights without their bytes."""

    def _bound(self, leaf: Tensor, source: str) -> Buffer:
        return cast(Buffer, None)

    def _held(self, leaf: Tensor, data: Bytes) -> Buffer:
        return cast(Buffer, None)


def rank_needs(
    file: GGUFFile, ranks: int, options: SessionOptions, stages: int = 1, ep: bool = False
) -> tuple[list[RankNeeds], list[CutTensors]]:
    """Of each of so many ranks, in so many stages, and how each kind of tensor is cut. ep: as plan_ranks() has it.
    Raises ArchError for a model that can't be, and SessionError for options that can't."""
    hp = read_file(file)
    plan, decoder = plan_of(architecture(hp.arch), hp, file, ranks, stages, ep)
    n_ctx, n_batch = check_options(options, hp)
    nowhere, found = cast(Backend, _Nowhere()), []
    for rank in range(ranks):
        mine, weights = plan.hparams(rank), _Planned(file, nowhere, plan, rank)
        network = decoder(mine, weights)
        weights.check()
        held, (first, stop) = network.cached[0], plan.stages[rank // plan.ranks]
        cache = KVCache(held, nowhere, mine.windowed, n_ctx, n_batch, options.type_k, options.type_v)
        met = [node for node in network.graph(1, 1, cache).nodes if on_link(node)]
        columns = mine.experts.n_ff if mine.experts is not None else held.n_ff[0]
        link = sum(link_bytes(node) for node in met)
        found.append(
            RankNeeds(
                rank, rank // plan.ranks, first, stop - first, held.n_head[0], held.n_head_kv[0], columns,
                weights.nbytes, cache.nbytes, link, len(met),
            )
        )  # fmt: skip
    return found, list(_kinds(plan, file))


def rank_part(file: GGUFFile, ranks: Ranks) -> tuple[HParams, int, int]:
    """What a rank has of a file: its hyperparameters, the bytes of its weights, and those of them that do not lie
    together in the file, so that they are copied even where others are read in place. Raises ArchError."""
    hp = read_file(file)
    plan, decoder = plan_of(architecture(hp.arch), hp, file, ranks.size, ranks.stages, ranks.ep)
    weights = _Planned(file, cast(Backend, _Nowhere()), plan, ranks.rank)
    mine = plan.hparams(ranks.rank)
    network = decoder(mine, weights)
    weights.check()
    copied = sum(t.nbytes for t in weights.loaded.values() if not _lies_together(plan.cuts[t.name], t, weights.own))
    return network.cached[0], weights.nbytes, copied


def _lies_together(cut: Cut, part: Tensor, rank: int) -> bool:
    if cut.by == "rank 0" and rank:
        return False
    outermost = all(n == 1 for n in part.ne[cut.dim + 1 :])
    return not cut.spans or (outermost and len(cut.spans[rank]) == 1)


def _kinds(plan: RankPlan, file: GGUFFile) -> Iterable[CutTensors]:
    counts: Counter[tuple[str, Cut, tuple[int, ...]]] = Counter()
    for name, cut in plan.cuts.items():
        info = file.tensors.get(name) or file.tensors["token_embd.weight"]
        counts[_LAYER.sub("blk.*.", name), Cut(cut.by, cut.dim, cut.spans), info.ne] += 1
    for (name, cut, ne), count in counts.items():
        yield CutTensors(name, cut.by, ne, tuple(cut.ne(ne, rank) for rank in range(plan.ranks)), count)
