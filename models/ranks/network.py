"""A file's network: whole, a rank's part, or all ranks' parts played in one process."""

from __future__ import annotations

import hashlib

from graphrt.backend import Backend
from graphrt.errors import ArchError, RankError
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
    cls: type[Transformer], hp: HParams, file: GGUFFile, backend: Backend, ranks: Ranks | int,
    advance: Advance = ignore, stages: int = 1, ep: bool = False,
) -> Transformer:  # fmt: skip
    """The architecture with its weights in memory. ranks: this process's place, or how many are played, in so many
    stages; ep: as plan_ranks() has it. Raises ArchError for tensors that the file lacks or has too many of, and for a
    model that can't be cut so."""
    n = ranks.size if isinstance(ranks, Ranks) else ranks
    stages, ep = (ranks.stages, ranks.ep) if isinstance(ranks, Ranks) else (stages, ep)
    if n == 1:
        weights = Weights(file, backend, advance)
        network = cls(hp, weights)
        weights.check()
        return network
    if isinstance(ranks, Ranks):
        check_alike(ranks, hp, file, backend)
    plan, decoder = plan_of(cls, hp, file, n, stages, ep)
    if isinstance(ranks, int):
        return play(decoder, plan, file, backend, advance)
    mine = RankWeights(file, backend, plan, ranks.rank, advance)
    network = decoder(plan.hparams(ranks.rank), mine)
    mine.check()
    return network


def check_alike(ranks: Ranks, hp: HParams, file: GGUFFile, backend: Backend) -> None:
    """Raises RankError on every rank unless all have one file, by names, shapes, keys and samples of the data; of its
    vocabulary what is no list, such as the ids that end a text, since lists take long to read."""
    words = {key: file.metadata[key] for key in file.metadata if key.startswith("tokenizer.") and _is_single(file, key)}
    mine = {
        "keys": hashlib.sha256(repr(hp).encode()).hexdigest()[:12],
        "vocabularies": hashlib.sha256(repr(sorted(words.items())).encode("utf-8", "replace")).hexdigest()[:12],
        "tensors": Weights(file, backend).fingerprint.hex()[:12],
    }
    everyones = ranks.everyones(mine)
    for what, of_first in everyones[0].items():
        others = {rank: said[what] for rank, said in enumerate(everyones) if said[what] != of_first}
        if others:
            named = ", ".join(f"rank {rank} {value}" for rank, value in others.items())
            raise RankError(
                f"all ranks must have one file, their {what} differ: rank 0 has {of_first}, {named}; give all the same"
            )


def _is_single(file: GGUFFile, key: str) -> bool:
    return file.metadata.array_length(key) is None and key != "tokenizer.chat_template"


def plan_of(
    cls: type[Transformer], hp: HParams, file: GGUFFile, n: int, stages: int = 1, ep: bool = False
) -> tuple[RankPlan, type[Decoder]]:
    """The plan for n ranks in so many stages, and the family as the decoder that it must be. Raises ArchError."""
    if not issubclass(cls, Decoder):
        raise ArchError(f"only decoders are cut over ranks, {hp.arch} models are encoders; run them on one")
    return plan_ranks(hp, cls.layout, file.tensors, n, stages, ep), cls
