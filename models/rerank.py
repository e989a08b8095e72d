"""Ranker: how well texts answer a query, by an encoder that has read both as one text and has a head for that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError
from graphrt.models.arch.encoder import Encoder
from graphrt.models.gguf import GGUFFile
from graphrt.models.model import Model

Floats = npt.NDArray[np.float32]
#: A layer with tanh behind it, and the one that gives the score. A file may have either, or both.
_DENSE, _SCORE = "cls", "cls.output"


class Ranker:
    """A model with its head, which is small and runs on the host. Raises SessionError for a model that has none."""

    def __init__(self, model: Model, n_batch: int = 0) -> None:
        if not has_head(model):
            raise SessionError(
                "a model that ranks texts must be an encoder with a head that gives one score (cls.weight or "
                f"cls.output.weight), this one is {model.network.hp.arch} without one; /v1/embeddings gives vectors"
            )
        self._model, self._n_batch = model, n_batch
        self._layers = [
            (_affine(model.file, name), name == _DENSE)
            for name in (_DENSE, _SCORE)
            if f"{name}.weight" in model.file.tensors
        ]

    def pair(self, query: str, text: str) -> list[int]:
        """The tokens of both: each with its end behind it, the query with its beginning."""
        tokenizer = self._model.tokenizer
        first = tokenizer.encode(query)
        end = tokenizer.sep_id if tokenizer.model == "bert" else tokenizer.eos_id
        found = first if first[-1:] == [end] or end is None else [*first, end]
        return [*found, *tokenizer.encode(text, False), *([] if end is None else [end])]

    def scores(self, pairs: Sequence[Sequence[int]]) -> list[float]:
        """The head's number of each pair, higher where the text answers the query better. Raises SessionError for a
        pair that is too long."""
        rows = np.stack(self._model.embed(pairs, "cls", normalize=False, n_batch=self._n_batch))
        for (weight, bias), dense in self._layers:
            rows = rows @ weight.T + bias
            rows = np.tanh(rows) if dense else rows
        return [float(row[0]) for row in rows]


def has_head(model: Model) -> bool:
    """Whether a model ranks texts."""
    last = next((name for name in (_SCORE, _DENSE) if f"{name}.weight" in model.file.tensors), None)
    return isinstance(model.network, Encoder) and last is not None and _n_scores(model.file, last) == 1


def _n_scores(file: GGUFFile, name: str) -> int:
    ne = file.tensors[f"{name}.weight"].ne
    return ne[1] if len(ne) > 1 else 1


def _affine(file: GGUFFile, name: str) -> tuple[Floats, Floats]:
    weight = file.dequantize(f"{name}.weight")
    bias = f"{name}.bias"
    weight = weight.reshape(-1, weight.shape[-1])
    return weight, file.dequantize(bias).reshape(-1) if bias in file.tensors else np.zeros(len(weight), np.float32)
