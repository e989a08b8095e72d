"""Embeddings of texts by an encoder: several texts a run, one after the other, as many as a batch has room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend
from graphrt.errors import SessionError
from graphrt.execute import Executable, prepare
from graphrt.models.arch.encoder import Encoder
from graphrt.models.engine import MAX_PREPARED
from graphrt.models.paging.ladder import close_rung, rung
from graphrt.models.recent import Recent

Floats = npt.NDArray[np.float32]
Ids = Sequence[int]

#: Tokens of one run unless told: on the host as many as its caches like, on a device that queues its work as many as
#: keep it busy.
HOST_BATCH, DEVICE_BATCH = 512, 16384
#: How the embedding of a text is made of those of its tokens; "none": not at all.
POOLINGS = ("none", "mean", "cls", "last")


def check_pooling(wanted: str, of_file: str) -> str:
    """The pooling to use: what is wanted, else what the file names. Raises SessionError when neither is known."""
    kind = wanted or of_file
    if not kind:
        raise SessionError(f"the file names no pooling; choose one as pooling: {', '.join(POOLINGS)}")
    if kind not in POOLINGS:
        raise SessionError(f"the pooling must be one of {', '.join(POOLINGS)}, got {kind!r}; give one of them")
    return kind


class Embedder:
    """Runs an encoder. n_batch: tokens of one run, where no single text has more; 0: as many as suit the backend."""

    def __init__(self, encoder: Encoder, backends: Sequence[Backend], n_batch: int = 0) -> None:
        if n_batch < 0:
            raise SessionError(f"n_batch must be at least 1, or 0 for what suits the backend, got {n_batch}")
        n_batch = n_batch or (DEVICE_BATCH if backends[0].asynchronous else HOST_BATCH)
        self.encoder = encoder
        self.backends = list(backends)
        self.n_batch = n_batch
        self._prepared = Recent[tuple[int, int, str], Executable](MAX_PREPARED)

    def embed(self, texts: Sequence[Ids], pooling: str = "", *, normalize: bool = True) -> list[Floats]:
        """The embedding of each text of token ids: float32 [n_embd], or [n_tokens, n_embd] with the pooling "none".

        pooling: "" for the file's own; normalize: to length 1. Raises SessionError for a text that is empty, longer
        than the model's context or has unknown ids, and for a pooling that there is not.
        """
        kind = check_pooling(pooling, self.encoder.hp.pooling)
        for ids in texts:
            self._check(ids)
        found = [row for batch in _batches(texts, self.n_batch) for row in self._run(batch, kind)]
        return [normalized(row) for row in found] if normalize else found

    def executable(self, n_tokens: int, n_texts: int, pooling: str) -> Executable:
        """The prepared graph for up to so many tokens and texts; made on first use."""
        key = (n_tokens, n_texts, pooling)
        return self._prepared.made(key, lambda: prepare(self.encoder.graph(*key), self.backends))

    def _check(self, ids: Ids) -> None:
        hp = self.encoder.hp
        if not 1 <= len(ids) <= hp.n_ctx_train:
            raise SessionError(
                f"a text must have 1 to {hp.n_ctx_train} tokens, the model's own limit, got {len(ids)}; "
                f"{'cut it into shorter ones' if ids else 'give some text'}"
            )
        bad = next((t for t in ids if not 0 <= t < hp.n_vocab), None)
        if bad is not None:
            raise SessionError(f"a token id must be 0 to {hp.n_vocab - 1}, got {bad}")

    def values(
        self, texts: Sequence[Ids], starts: npt.NDArray[np.int32], n_tokens: int, n_texts: int, pooling: str
    ) -> dict[str, npt.NDArray[np.generic]]:
        """What a graph for so many tokens and texts may be given, by name. starts: the texts' first tokens, and the end
        of the last."""
        lengths = np.diff(starts)
        owner = np.repeat(np.arange(len(texts)), lengths)
        mean = np.zeros((n_texts, n_tokens) if pooling == "mean" else (0, 0), np.float32)
        if pooling == "mean":
            mean[owner, np.arange(len(owner))] = 1 / lengths[owner]
        parts: dict[str, tuple[int, npt.NDArray[np.generic]]] = {
            "inp_tokens": (n_tokens, np.concatenate([np.asarray(ids, np.int32) for ids in texts])),
            "inp_pos": (n_tokens, np.arange(len(owner), dtype=np.int32) - starts[owner]),
            "inp_cls": (n_texts, (starts[:-1] if pooling == "cls" else starts[1:] - 1)),
        }
        values = {name: np.pad(value, (0, n - len(value))) for name, (n, value) in parts.items()}
        values["attn_inp_q_starts"] = np.pad(starts, (0, n_texts - len(texts)), "edge")
        values["inp_mean"] = mean
        return values

    def _run(self, texts: Sequence[Ids], pooling: str) -> list[Floats]:
        starts = np.cumsum([0, *(len(ids) for ids in texts)], dtype=np.int32)
        n_tokens, n_texts = close_rung(int(starts[-1])), rung(len(texts))
        exe = self.executable(n_tokens, n_texts, pooling)
        values = self.values(texts, starts, n_tokens, n_texts, pooling)
        asked = {leaf.name for leaf in exe.graph.inputs}
        exe.write_all({name: value for name, value in values.items() if name in asked})
        exe.run()
        name = "result_embd" if pooling == "none" else "result_embd_pooled"
        rows = np.array(exe.read(name), np.float32).reshape(-1, self.encoder.hp.n_embd)
        return np.split(rows[: starts[-1]], starts[1:-1]) if pooling == "none" else list(rows[: len(texts)])


def normalized(rows: Floats) -> Floats:
    """Rows of length 1; one of zeros stays."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
    scaled: Floats = (rows / np.where(norms > 0, norms, 1)).astype(np.float32)
    return scaled


def _batches(texts: Sequence[Ids], most: int) -> Iterator[list[Ids]]:
    """The texts in order, cut where the next one would be a token too many."""
    batch: list[Ids] = []
    for ids in texts:
        if batch and sum(map(len, batch)) + len(ids) > most:
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch
