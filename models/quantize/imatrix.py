"""Importance matrices: how large the inputs of a model's products are, on text. llama.cpp's file format.

A file has for each weight W the tensors W.in_sum2, f32 [n, n_mat], the sums of squares of each of the n inputs that a
row of W is multiplied with, and W.counts, f32 [1, n_mat], how many inputs were summed. n_mat is the number of experts
of a weight that has some, else 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphrt.dtypes import F32
from graphrt.errors import GGUFError
from graphrt.models import gguf_write
from graphrt.models.gguf import GGUFFile, TensorInfo
from graphrt.models.gguf_write import Planned, writing
from graphrt.printing import brief

Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]

_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass
class Entry:
    """What was seen of one weight's inputs. sums: float64 [n_mat, n]; counts: float64 [n_mat, or 1 for all]."""

    sums: Sums
    counts: Sums


@dataclass(frozen=True)
class Importance:
    """An importance matrix. rows: by weight the mean squares of its inputs, float32 [n_mat, n], 1 for experts that no
    input reached; n_chunks: pieces of text that it was made from; source: its file; datasets: the texts' files."""

    rows: Mapping[str, Floats]
    n_chunks: int
    source: str
    datasets: tuple[str, ...]

    def of(self, info: TensorInfo) -> Floats | None:
        """That of a weight, float32 [n_mat, ne[0]]; None where there is none. Raises GGUFError for one of another
        shape."""
        found = self.rows.get(info.name)
        if found is None:
            return None
        n_mat = int(np.prod(info.ne[2:]))
        if found.shape == (1, info.ne[0]) or found.shape == (n_mat, info.ne[0]):
            return found
        if info.name == "token_embd.weight":  # of an output that shares its matrix with the embedding, or nothing
            return None
        raise GGUFError(
            f"{self.source}: {info.name} needs importances of {n_mat} x {info.ne[0]} inputs, got "
            f"{' x '.join(map(str, found.shape))}. Make the importance matrix with this very model."
        )


def save(
    path: Path, entries: Mapping[str, Entry], *, n_chunks: int, chunk_size: int, datasets: Sequence[str] = ()
) -> None:
    """Writes an importance matrix. chunk_size: tokens of a chunk. Raises GGUFError where that can't be done."""
    keys = {
        "general.type": gguf_write.string("imatrix"),
        "imatrix.datasets": gguf_write.strings(datasets),
        "imatrix.chunk_count": gguf_write.u32(n_chunks),
        "imatrix.chunk_size": gguf_write.u32(chunk_size),
    }
    data: dict[Planned, Floats] = {}
    for name, entry in sorted(entries.items()):
        n_mat, n = entry.sums.shape
        data[Planned(name + _SUMS, F32, (n, n_mat))] = entry.sums.astype(np.float32)
        data[Planned(name + _COUNTS, F32, (1, len(entry.counts)))] = entry.counts.astype(np.float32)
    with writing(path, keys, list(data)) as out:
        for planned, values in data.items():
            out.tensor(planned, [values.view(np.uint8).reshape(-1)])


def load(path: str | os.PathLike[str]) -> Importance:
    """Reads an importance matrix. Raises GGUFError for a file that is none, or damaged."""
    with GGUFFile.open(path) as file:
        if file.get("general.type", str, "") != "imatrix":
            raise GGUFError(f"{path}: an importance matrix must have the general.type imatrix. Is it the right file?")
        rows = dict(_rows(file, str(path)))
        if not rows:
            raise GGUFError(f"{path}: an importance matrix must have tensors named ...{_SUMS}, this file has none.")
        datasets = file.metadata.get("imatrix.datasets", [])
        known = tuple(datasets) if isinstance(datasets, list) else ()
        return Importance(rows, file.get("imatrix.chunk_count", int, 0), str(path), known)


def _rows(file: GGUFFile, label: str) -> Iterator[tuple[str, Floats]]:
    for name, info in file.tensors.items():
        if not name.endswith(_SUMS):
            continue
        weight = name.removesuffix(_SUMS)
        counts = file.tensors.get(weight + _COUNTS)
        if counts is None or info.dtype != F32 or counts.dtype != F32 or not info.nbytes:
            raise GGUFError(f"{label}: {brief(name)} must be f32 and have counts beside it. Make the file again.")
        sums = file.data(name).view(np.float32).reshape(-1, info.ne[0]).astype(np.float64)
        n = file.data(weight + _COUNTS).view(np.float32).astype(np.float64)
        if len(n) not in (1, len(sums)) or not np.isfinite(sums).all() or not np.isfinite(n).all():
            raise GGUFError(
                f"{label}: {brief(name)} must be finite, with a count or one for each of {len(sums)} matrices, got "
                f"{len(n)}. Make the file again."
            )
        if len(n) == 1 and len(sums) > 1:  # one count for matrices that all saw as many inputs
            n = np.repeat(n, len(sums))
        means = np.where(n[:, None] > 0, sums / np.where(n > 0, n, 1)[:, None], 1.0)
        yield weight, means.astype(np.float32)
