"""All ranks of a model in one process and one graph: what tests, `trace`, `diff` and `explain` look at."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphrt.backend import Backend
from graphrt.errors import SessionError
from graphrt.graph import Graph
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.cache import LayerCache
from graphrt.models.gguf import GGUFFile
from graphrt.models.hparams import HParams
from graphrt.models.ranks.plan import RankPlan
from graphrt.models.ranks.weights import RankWeights
from graphrt.models.step import AnyInputs, StepInputs
from graphrt.models.weights import Weights
from graphrt.ops.linked import linked
from graphrt.progress import Advance, ignore
from graphrt.tensor import Flag, Tensor


@dataclass(frozen=True)
class _RankCache:
    """A rank's layers of a cache of all ranks: what a rank's graph asks of its cache."""

    layers: list[LayerCache]
    n_ctx: int
    n_seq: int
    flash_attn: bool
    prec: int


class PlayedWeights(Weights):
    """The parts of all ranks, by `name@rank` but for the first rank's."""

    def __init__(self, parts: list[RankWeights]) -> None:
        super().__init__(parts[0].file, parts[0].backend)
        self.plan = parts[0].plan
        for rank, part in enumerate(parts):
            self.loaded |= {f"{name}@{rank}" if rank else name: leaf for name, leaf in part.loaded.items()}


class PlayedDecoder(Decoder):
    """A decoder whose graph is that of all ranks, which meet in it. ranks: their decoders."""

    def __init__(self, hp: HParams, ranks: list[Decoder], weights: PlayedWeights) -> None:
        self.hp, self.ranks, self.weights, self.share = hp, ranks, weights, None
        first = ranks[0]
        self.token_embd, self.position_embd, self.layers = first.token_embd, first.position_embd, first.layers
        self.output, self.output_bias, self.output_norm = first.output, first.output_bias, first.output_norm

    @property
    def cached(self) -> list[HParams]:
        return [hp for rank in self.ranks for hp in rank.cached]

    def result(self, step: AnyInputs) -> Tensor:
        """The first rank's logits, which are every rank's."""
        if not isinstance(step, StepInputs):
            raise SessionError("ranks that are played in one process have rings of cells, not pages; leave page at 0")
        cache, first, graphs = step.cache, 0, []
        for rank, hp in zip(self.ranks, self.cached):
            stop = first + hp.n_layer
            mine = _RankCache(cache.layers[first:stop], cache.n_ctx, cache.n_seq, cache.flash_attn, cache.prec)
            graphs.append(Graph(rank.result(replace(step, cache=mine))))  # type: ignore[arg-type]
            first = stop
        share = self.ranks[0].share
        logits = linked(graphs, share.stages if share is not None else 1).outputs[0]
        logits.flags &= ~Flag.OUTPUT  # whoever builds the graph says what is one
        return logits


def play(
    cls: type[Decoder], plan: RankPlan, file: GGUFFile, backend: Backend, advance: Advance = ignore
) -> PlayedDecoder:
    """The decoder of all of a plan's ranks. Raises ArchError for tensors that the file lacks or has too many of."""
    parts, ranks = [], []
    for rank in range(plan.size):
        weights = RankWeights(file, backend, plan, rank, advance)
        ranks.append(cls(plan.hparams(rank), weights))
        weights.check()
        parts.append(weights)
    return PlayedDecoder(plan.hp, ranks, PlayedWeights(parts))
