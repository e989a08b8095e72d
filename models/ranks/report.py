"""What ranks would hold and tell each other, said before any of them is there: nothing is read or allocated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from graphrt.backend import Backend, Buffer, Usage
from graphrt.models.arch import architecture, read_file
from graphrt.models.cache import KVCache
from graphrt.models.engine import SessionOptions, check_options
from graphrt.models.gguf import GGUFFile
from graphrt.models.hparams import HParams
from graphrt.models.ranks.network import plan_of
from graphrt.models.ranks.plan import Cut, RankPlan
from graphrt.models.ranks.weights import RankWeights
from graphrt.ops.collectives import COLLECTIVES, sent_bytes
from graphrt.ranks import Ranks
from graphrt.tensor import Tensor

_LAYER = re.compile(r"blk\.[0-9]+\.")


@dataclass(frozen=True)
class RankNeeds:
    """One rank's part. heads, kv_heads, columns: of the first layer (columns: of each expert, where there are some);
    weights, cache: bytes; link: bytes that it hands to the others, or takes from them, for each token; meetings: how
    often it waits for them."""

    rank: int
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


def rank_needs(file: GGUFFile, ranks: int, options: SessionOptions) -> tuple[list[RankNeeds], list[CutTensors]]:
    """Of each of so many ranks, and how each kind of tensor is cut. Raises ArchError for a model that can't be, and
    SessionError for options that can't."""
    hp = read_file(file)
    plan, decoder = plan_of(architecture(hp.arch), hp, file, ranks)
    n_ctx, n_batch = check_options(options, hp)
    nowhere, found = cast(Backend, _Nowhere()), []
    for rank in range(ranks):
        mine, weights = plan.hparams(rank), _Planned(file, nowhere, plan, rank)
        network = decoder(mine, weights)
        weights.check()
        cache = KVCache(mine, nowhere, mine.windowed, n_ctx, n_batch, options.type_k, options.type_v)
        met = [node for node in network.graph(1, 1, cache).nodes if node.op in COLLECTIVES]
        columns = mine.experts.n_ff if mine.experts is not None else mine.n_ff[0]
        link = sum(sent_bytes(node) for node in met)
        found.append(
            RankNeeds(
                rank, mine.n_head[0], mine.n_head_kv[0], columns, weights.nbytes, cache.nbytes, link, len(met)
            )
        )  # fmt: skip
    return found, list(_kinds(plan, file))


def rank_part(file: GGUFFile, ranks: Ranks) -> tuple[HParams, int, int]:
    """What a rank has of a file: its hyperparameters, the bytes of its weights, and those of them that do not lie
    together in the file, so that they are copied even where others are read in place. Raises ArchError."""
    hp = read_file(file)
    plan, decoder = plan_of(architecture(hp.arch), hp, file, ranks.size)
    weights = _Planned(file, cast(Backend, _Nowhere()), plan, ranks.rank)
    mine = plan.hparams(ranks.rank)
    decoder(mine, weights)
    weights.check()
    copied = sum(t.nbytes for t in weights.loaded.values() if not _lies_together(plan.cuts[t.name], t, ranks.rank))
    return mine, weights.nbytes, copied


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
