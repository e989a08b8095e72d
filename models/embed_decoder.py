"""Embeddings of texts by a decoder: of what it holds of each token before the logits are made of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphrt.backend import Backend
from graphrt.errors import SessionError
from graphrt.execute import prepare
from graphrt.graph import Graph
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.embed import Floats, Ids, check_pooling, normalized
from graphrt.models.engine import SessionOptions
from graphrt.models.paging.ladder import rung
from graphrt.models.session import Session
from graphrt.models.step import PreparedStep

#: Which of a text's rows each pooling takes.
_ROWS = {"cls": slice(0, 1), "last": slice(-1, None)}


class _Hidden(Session):
    """A session whose steps end before the logits, of all rounded-up sizes to 4096 tokens."""

    most_prepared = 24

    def prepared(self, n: int, n_outputs: int) -> PreparedStep:
        def make() -> PreparedStep:
            inputs = self.decoder.inputs(n, n_outputs, self.cache)
            return PreparedStep(inputs, prepare(Graph(self.decoder.hidden(inputs)), self.backends))

        return self._prepared.made((n, n_outputs), make)

    def rows(self, ids: Ids) -> Floats:
        """What the model holds of each token of a text of its own: float32 [n_tokens, n_embd].

        Steps are of rounded-up sizes, so that few are prepared: behind the text's end come tokens 0, which no token
        before them sees."""
        self.reset()
        found = []
        with self.alone():
            given = self.checked({0: ids})[0]
            for start in range(0, len(given), self.n_batch):
                part = given[start : start + self.n_batch]
                size = min(rung(len(part), self.n_batch), self.n_ctx - start)
                exe = self.feed({0: np.pad(part, (0, size - len(part)))}, every=True).exe
                exe.run()
                self.lengths[0] += len(part)
                rows = np.asarray(exe.read(exe.graph.outputs[0]), np.float32).reshape(size, -1)
                found.append(rows[: len(part)])
        return np.concatenate(found)


def embed(
    decoder: Decoder,
    backends: Sequence[Backend],
    texts: Sequence[Ids],
    pooling: str = "",
    *,
    normalize: bool = True,
    n_batch: int = 512,
) -> list[Floats]:
    """The embedding of each text of token ids by a decoder, as Embedder.embed() gives an encoder's; "mean" is over all
    tokens, "last" of the one that has seen all others. Raises SessionError as it does."""
    kind = check_pooling(pooling, decoder.hp.pooling)
    longest = max(map(len, texts), default=0)
    if longest > decoder.hp.n_ctx_train:
        raise SessionError(
            f"a text must have 1 to {decoder.hp.n_ctx_train} tokens, the model's own limit, got {longest}; cut it into "
            f"shorter ones"
        )
    n_ctx = rung(max(1, longest), decoder.hp.n_ctx_train)
    session = _Hidden(decoder, backends, SessionOptions(n_ctx, n_batch, "f16", "f16"))
    found = [_pooled(session.rows(ids), kind) for ids in texts]
    return [normalized(row) for row in found] if normalize else found


def _pooled(rows: Floats, kind: str) -> Floats:
    if kind == "none":
        return rows
    mean: Floats = rows[_ROWS.get(kind, slice(None))].mean(0, dtype=np.float64).astype(np.float32)
    return mean
