"""A file's network: whole, a rank's part, or all ranks' parts played in one process."""

from __future__ import annotations

from graphrt.backend import Backend
from graphrt.errors import ArchError
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.arch.transformer import Transformer
from graphrt.models.gguf import GGUFFile
from graphrt.models.hparams import HParams
from graphrt.models.ranks.plan import RankPlan, plan_ranks
from graphrt.models.ranks.played import play
from graphrt.models.ranks.weights import RankWeights
from graphrt.models.weights import Weights
from graphrt.progress import Advance, ignore
from graphrt.ranks import Ranks


def network_of(
    cls: type[Transformer], hp: HParams, file: GGUFFile, backend: Backend, ranks: Ranks | int, advance: Advance = ignore
) -> Transformer:
    """The architecture with its weights in memory. ranks: this process's place, or how many are played. Raises
    ArchError for tensors that the file lacks or has too many of, and for a model that can't be cut so."""
    n = ranks.size if isinstance(ranks, Ranks) else ranks
    if n == 1:
        weights = Weights(file, backend, advance)
        network = cls(hp, weights)
        weights.check()
        return network
    plan, decoder = plan_of(cls, hp, file, n)
    if isinstance(ranks, int):
        return play(decoder, plan, file, backend, advance)
    mine = RankWeights(file, backend, plan, ranks.rank, advance)
    network = decoder(plan.hparams(ranks.rank), mine)
    mine.check()
    return network


def plan_of(cls: type[Transformer], hp: HParams, file: GGUFFile, n: int) -> tuple[RankPlan, type[Decoder]]:
    """The plan for n ranks, and the family as the decoder that it must be. Raises ArchError."""
    if not issubclass(cls, Decoder):
        raise ArchError(f"only decoders are cut over ranks, {hp.arch} models are encoders; run them on one")
    return plan_ranks(hp, cls.layout, file.tensors, n), cls
