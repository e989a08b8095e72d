"""Session: one sequence being read and written by a model. Prompt in batches, then token by token."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from graphrt.arguments import checked
from graphrt.backend import Backend
from graphrt.errors import SessionError
from graphrt.models import session_file
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.engine import Engine, Ids, SessionOptions
from graphrt.models.sampling import Uniforms
from graphrt.models.step import Logits
from graphrt.ops import SampleParams
from graphrt.printing import human_bytes

#: Logits of many tokens are made in pieces of at most this many bytes.
MAX_LOGITS_BYTES = 256 * 2**20


class Session(Engine):
    """An engine of one sequence. unread: tokens at its end that the cache does not hold yet, as the last generated one;
    they are read before those of the next call. One thread at a time may use a session: SessionError where another one
    is inside. Sessions of one model in several threads are fine."""

    def __init__(
        self, decoder: Decoder, backends: Sequence[Backend], options: SessionOptions = SessionOptions()
    ) -> None:
        super().__init__(decoder, backends, options)
        self.unread: list[int] = []
        self._ids = np.zeros(self.n_ctx, np.int32)  # those in the cache; written before `lengths` counts them

    def __repr__(self) -> str:
        waits = f", {len(self.unread)} of them unread" if self.unread else ""
        kind, v = self.options.type_k, self.options.type_v
        types = kind if kind == v or self.decoder.hp.latent is not None else f"{kind} and {v}"
        cache = human_bytes(self.cache.nbytes)
        return (
            f"<Session with {self.n_past} of {self.n_ctx} tokens{waits}; cache of {types}, {cache}, on {self.home.id}>"
        )

    @property
    def n_past(self) -> int:
        """Tokens of the sequence."""
        return int(self.lengths[0]) + len(self.unread)

    @property
    def tokens(self) -> list[int]:
        """The ids of all tokens of the sequence, n_past of them: read, generated, and those that are unread."""
        return [*self._ids[: self.lengths[0]].tolist(), *self.unread]

    def reset(self) -> None:
        """Forgets all tokens; what was prepared stays."""
        with self.alone():
            super().reset()
            self.unread = []

    @checked(SessionError)
    def rewind(self, n_past: int) -> None:
        """Forgets all but the first n_past tokens.

        Nothing is read anew, but where a sliding window's cache no longer holds what it needs, as after going back by
        more than a batch: then all n_past tokens are unread, and the next call reads them again. Raises SessionError
        for a number that is not 0 to n_past.
        """
        with self.alone():
            self._rewind(n_past)

    def _rewind(self, n_past: int) -> None:
        if not 0 <= n_past <= self.n_past:
            raise SessionError(f"a session goes back to 0 to {self.n_past} tokens, which it has, got {n_past}")
        tokens, n_read = self.tokens[:n_past], min(int(self.lengths[0]), int(n_past))
        if not all(cells.holds(n_read) for cells in self.cache.cells.values()):
            n_read = 0
        self.lengths[0] = n_read
        self.cache.forget_from(self.lengths)
        self.unread = tokens[n_read:]

    @checked(SessionError)
    def shift(self, keep: int, drop: int) -> None:
        """Drops `drop` tokens behind the first `keep`, so that those after them follow on these: what llama.cpp's
        context shift is for. The session then is as a new one that was given what stays: that is exact for every
        architecture, and the price is that the next call reads the tokens behind `keep` again. Raises SessionError for
        numbers under 0, or more tokens than there are.
        """
        keep, drop = int(keep), int(drop)  # numpy's would overflow in the sum
        with self.alone():
            if keep < 0 or drop < 0 or keep + drop > self.n_past:
                raise SessionError(
                    f"what is kept and what is dropped must be within the session's {self.n_past} tokens, got "
                    f"keep {keep} and drop {drop}"
                )
            if drop:
                behind = self.tokens[keep + drop :]
                self._rewind(keep)
                self.unread += behind

    @checked(SessionError)
    def keep_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Goes back to where the session and `tokens` part, and gives those of them that are yet to be read: at least
        the last, whose logits one wants. `generate(session.keep_prefix(tokens), session=session)` reads no more than
        that. Raises SessionError for no tokens.
        """
        if not len(tokens):
            raise SessionError("a prompt must have at least one token, got none; give some text")
        with self.alone():
            n = min(len(tokens) - 1, self.n_past)
            parts = (i for i, (held, wanted) in enumerate(zip(self.tokens[:n], tokens)) if held != wanted)
            n = next(parts, n)
            self._rewind(n)
            return list(tokens[n:])

    def copy(self) -> Session:
        """Another session that goes on from the same tokens by itself; it prepares its own graphs."""
        other = Session(self.decoder, self.backends, self.options)
        with self.alone():
            other.cache.copy_from(self.cache)
            other._take(self.tokens, int(self.lengths[0]))
        return other

    @checked(SessionError)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tokens and the cache to a file that Model.load_session() reads, readable by this user alone; in
        one step, so that a file that was there stays whole until then. Raises SessionError where that is not
        possible."""
        with self.alone():
            session_file.write(Path(path), self, self.tokens)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        decoder: Decoder,
        backends: Sequence[Backend],
        options: SessionOptions | None = None,
    ) -> Session:
        """A session that save() wrote: see Model.load_session()."""
        with session_file.SessionFile(Path(path), decoder, options) as file:
            session = cls(decoder, backends, file.options)
            session._take(file.fill(session), file.header.n_read)
        return session

    def _take(self, tokens: list[int], n_read: int) -> None:
        """The tokens of a cache that came from elsewhere, of which it holds the first n_read."""
        self._ids[:n_read], self.unread = tokens[:n_read], tokens[n_read:]
        self.lengths[0] = n_read

    def step(self, part: Mapping[int, Ids], *, every: bool = False, tail: int = 1, quiet: bool = False) -> Logits:
        start = int(self.lengths[0])
        self._ids[start : start + len(part[0])] = part[0]
        logits = super().step(part, every=every, tail=tail, quiet=quiet)
        self.unread = self.unread[len(part[0]) :]  # what is unread comes first
        return logits

    @checked(SessionError)
    def eval(self, tokens: Sequence[int]) -> Logits:
        """Reads tokens and returns the logits after the last one: f32 [n_vocab].

        Raises SessionError when they are none and none is unread, unknown, or do not fit the context.
        """
        last: Logits = self.read({0: [*self.unread, *tokens]})[0]
        return last

    @checked(SessionError)
    def next_logits(self, token: int) -> Logits:
        """As eval([token]), but the logits are valid until the next step only: they are no copy."""
        if self.unread:
            return self.eval([token])
        with self.alone():
            last: Logits = self.step(self.checked({0: [token]}))[0]
            return last

    @checked(SessionError)
    def eval_again(self, token: int) -> Logits:
        """The logits after the last token that was read, which was `token`, once more: f32 [n_vocab]."""
        with self.alone():
            self._rewind(int(self.lengths[0]) - 1)
        return self.eval([token])

    @checked(SessionError)
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
                    wanted = max(0, stop - max(start, first))
                    out = self.step({0: ids[start:stop]}, tail=max(1, wanted))
                    if wanted:
                        rows[stop - first - wanted : stop - first] = out
                    advance(stop - start)
            return rows

    @checked(SessionError)
    def likeliest(self, token: int, n: int) -> Iterator[int]:
        """Reads `token` and gives the likeliest next one, reads that, and so on: Engine.run_ahead()."""
        yield from self._ahead(token, n)

    @checked(SessionError)
    def drawn(self, token: int, n: int, sampling: SampleParams, uniforms: Uniforms) -> Iterator[int]:
        """The same with tokens that are drawn: those that a Sampler of these parameters chooses."""
        yield from self._ahead(token, n, sampling, uniforms)

    def _ahead(
        self, token: int, n: int, sampling: SampleParams | None = None, uniforms: Uniforms | None = None
    ) -> Iterator[int]:
        self.checked({0: [*self.unread, token]})
        if self.unread:
            self.read({0: self.unread})
        self._ids[self.lengths[0] : self.lengths[0] + 1] = token
        with closing(self.run_ahead(np.array([token], np.int32), n, sampling, uniforms)) as steps:
            for found in steps:
                token = int(found[0])
                self._ids[self.lengths[0] : self.lengths[0] + 1] = token  # read with the next step, if there is one
                yield token


def _batches(first: int, n: int, without: int, with_logits: int) -> Iterator[tuple[int, int]]:
    """Where batches start and stop: at most `without` tokens each, at most `with_logits` of them from `first` on."""
    start = 0
    while start < n:
        stop = min(start + without, n, max(start, first) + with_logits)
        yield start, stop
        start = stop
