"""LoRA adapters of a model that is cut over ranks: each rank has the part of A and B that its part of a matrix meets.

Of a matrix whose rows a rank has, it has the same rows of B, and all of A; of one that sums over a part of its input it
has the same columns of A, so that B (g * (A x)) is a part of the sum as the product itself is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from graphrt.backend import Backend
from graphrt.errors import RankError
from graphrt.models.adapters import F32, AdapterFile, Adapters
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.ranks.played import PlayedDecoder
from graphrt.models.ranks.share import Span
from graphrt.models.ranks.weights import RankWeights
from graphrt.models.weights import Weights
from graphrt.printing import brief
from graphrt.ranks import Ranks
from graphrt.tensor import Tensor, new_tensor


class WholeShapes(Weights):
    """A file's tensors as they are there, without memory: what an adapter's matrices are held against."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights.file, weights.backend)
        self.loaded = {name: new_tensor(t.dtype, *t.ne, name=name) for name, t in weights.file.tensors.items()}


def check_adapters(ranks: Ranks, files: Sequence[AdapterFile], scales: Sequence[float]) -> None:
    """Raises RankError on every rank unless all have the same adapters, and as much of each."""
    everyones = ranks.everyones([(file.name, file.fingerprint.hex()[:12]) for file in files] + [*map(float, scales)])
    other = next((rank for rank, said in enumerate(everyones) if said != everyones[0]), None)
    if other is not None:
        raise RankError(
            f"all ranks must have the same adapters, rank 0 has {brief(everyones[0])}, rank {other} "
            f"{brief(everyones[other])}; give all the same files"
        )


def use_adapters(decoder: Decoder, files: Sequence[AdapterFile], scales: Sequence[float], home: Backend) -> None:
    """Gives a rank's decoder, or those of all ranks that are played, their parts of these."""
    parts = decoder.ranks if isinstance(decoder, PlayedDecoder) else [decoder]
    for part in parts:
        weights = cast(RankWeights, part.weights)
        part.adapters = Adapters([_part(file, weights) for file in files], scales, weights, home)
    decoder.adapters = parts[0].adapters


def _part(file: AdapterFile, weights: RankWeights) -> AdapterFile:
    pairs = {
        stem: _cut(pair, weights, weights.loaded[stem]) for stem, pair in file.pairs.items() if stem in weights.loaded
    }
    return replace(file, pairs=pairs)


def _cut(pair: tuple[F32, F32], weights: RankWeights, weight: Tensor) -> tuple[F32, F32]:
    """(a [rank, k], b [m, rank]) of a rank's part of a matrix."""
    (a, b), cut = pair, weights.plan.cuts[weight.name]
    if not cut.spans:
        return a, b
    places = _places(cut.spans[weights.own])
    return (a[:, places], b) if cut.dim == 0 else (a, b[places])


def _places(spans: Sequence[Span]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.arange(first, stop) for first, stop in spans])
