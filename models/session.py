"""Session: one sequence being read and written by a model. Prompt in batches, then token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

import numpy as np

from graphrt.backend import Backend
from graphrt.errors import SessionError
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.engine import Engine, Ids, SessionOptions
from graphrt.models.sampling import Uniforms
from graphrt.models.step import Logits
from graphrt.ops import SampleParams

#: Logits of many tokens are made in pieces of at most this many bytes.
MAX_LOGITS_BYTES = 256 * 2**20


class Session(Engine):
    """An engine of one sequence. unread: tokens at its end that the cache does not hold yet, as the last generated one;
    the next that are read come behind them."""

    def __init__(
        self, decoder: Decoder, backends: Sequence[Backend], options: SessionOptions = SessionOptions()
    ) -> None:
        super().__init__(decoder, backends, options)
        self.unread: list[int] = []

    @property
    def n_past(self) -> int:
        """Tokens of the sequence."""
        return int(self.lengths[0]) + len(self.unread)

    def reset(self) -> None:
        super().reset()
        self.unread = []

    def step(self, part: Mapping[int, Ids], *, every: bool = False) -> Logits:
        logits = super().step(part, every=every)
        self.unread = self.unread[len(part[0]) :]  # what is unread comes first
        return logits

    def eval(self, tokens: Sequence[int]) -> Logits:
        """Reads tokens and returns the logits after the last one: f32 [n_vocab].

        Raises SessionError when they are none and none is unread, unknown, or do not fit the context.
        """
        last: Logits = self.read({0: [*self.unread, *tokens]})[0]
        return last

    def eval_again(self, token: int) -> Logits:
        """The logits after the last token that was read, which was `token`, once more: f32 [n_vocab]."""
        with self.alone():
            self.lengths[0] -= 1
            self.cache.forget_from(self.lengths)
        return self.eval([token])

    def eval_rows(self, tokens: Sequence[int], first: int = 0) -> Logits:
        """Reads tokens and returns the logits after each from index `first` on: f32 [n - first, n_vocab].

        Raises SessionError as eval() does, and for a `first` outside 0 to n.
        """
        if not 0 <= first <= len(tokens):
            raise SessionError(f"the first wanted row must be 0 to {len(tokens)}, the number of tokens, got {first}")
        with self.alone():
            ids = self.checked({0: [*self.unread, *tokens]})[0]
            first += len(self.unread)
            rows = np.empty((len(ids) - first, self.decoder.hp.n_vocab), np.float32)
            batch = max(1, min(self.n_batch, MAX_LOGITS_BYTES // (4 * self.decoder.hp.n_vocab)))
            with self.reading(len(ids)) as advance:
                for start, stop in _batches(first, len(ids), self.n_batch, batch):
                    wanted = start >= first
                    out = self.step({0: ids[start:stop]}, every=wanted)
                    if wanted:
                        rows[start - first : stop - first] = out
                    advance(stop - start)
            return rows

    def likeliest(self, token: int, n: int) -> Iterator[int]:
        """Reads `token` and gives the likeliest next one, reads that, and so on: Engine.run_ahead()."""
        yield from self._ahead(token, n)

    def drawn(self, token: int, n: int, sampling: SampleParams, uniforms: Uniforms) -> Iterator[int]:
        """The same with tokens that are drawn: those that a Sampler of these parameters chooses."""
        yield from self._ahead(token, n, sampling, uniforms)

    def _ahead(
        self, token: int, n: int, sampling: SampleParams | None = None, uniforms: Uniforms | None = None
    ) -> Iterator[int]:
        if self.unread:
            self.read({0: self.unread})
        with closing(self.run_ahead(np.array([token], np.int32), n, sampling, uniforms)) as steps:
            for found in steps:
                yield int(found[0])


def _batches(first: int, n: int, without: int, with_logits: int) -> Iterator[tuple[int, int]]:
    """Where batches start and stop: at most `without` tokens before index `first`, `with_logits` from there on."""
    edges = [*range(0, first, without), *range(first, n, with_logits), n]
    yield from zip(edges, edges[1:])
