"""LoRA adapters of a model that is cut over ranks: each rank has the part of A and B that its part of a matrix meets.

Of a matrix whose rows a rank has, it has the same rows of B, and all of A; of one that sums over a part of its input it
has the same columns of A, so that B (g * (A x)) is a part of the sum as the product itself is. It reads no more of the
file than that, and nothing of matrices that another stage has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from graphrt.backend import Backend
from graphrt.errors import RankError
from graphrt.models.adapters import F32, SIDES, AdapterFile, Adapters, both_sides, read_adapter
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.gguf import GGUFFile
from graphrt.models.ranks.played import PlayedDecoder
from graphrt.models.ranks.share import Span
from graphrt.models.ranks.weights import RankWeights, part_of
from graphrt.models.weights import Weights
from graphrt.printing import brief
from graphrt.ranks import Ranks
from graphrt.tensor import new_tensor


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


def use_adapters(
    decoder: Decoder, given: Mapping[str, Path], scales: Sequence[float], home: Backend, ranks: Ranks | None
) -> None:
    """Gives a rank's decoder, or those of all ranks that are played, their parts of adapters, files by names. Raises as
    Model.use_adapters() does."""
    parts = decoder.ranks if isinstance(decoder, PlayedDecoder) else [decoder]
    for part in parts:
        weights = cast(RankWeights, part.weights)
        whole, reads = WholeShapes(weights), partial(_own_sides, weights)
        files = [read_adapter(path, name, decoder.hp.arch, whole, reads) for name, path in given.items()]
        if ranks is not None:
            check_adapters(ranks, files, scales)
        part.adapters = Adapters(files, scales, weights, home)
    decoder.adapters = parts[0].adapters


def _own_sides(weights: RankWeights, file: GGUFFile, stem: str) -> tuple[F32, F32] | None:
    """(a [rank, k], b [m, rank]) of a rank's part of a matrix, None of one that another stage has."""
    if stem not in weights.loaded:
        return None
    cut = weights.plan.cuts[stem]
    if not cut.spans:
        return both_sides(file, stem)
    side, whole = (stem + SIDES[i] for i in (cut.dim, 1 - cut.dim))
    info, spans = file.tensors[side], cut.spans[weights.own]
    if cut.dim == 0 and any(place % info.dtype.block_size for span in spans for place in span):
        mine = file.dequantize(side)[:, _places(spans)]  # cuts of the matrix are no cuts between an adapter's blocks
    else:
        n_rows = cut.ne(info.ne, weights.own)[1]
        mine = file.dequantize(side, part_of(file, side, cut, weights.own).reshape(n_rows, -1))
    return (mine, file.dequantize(whole)) if cut.dim == 0 else (file.dequantize(whole), mine)


def _places(spans: Sequence[Span]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.arange(first, stop) for first, stop in spans])
