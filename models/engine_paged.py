"""PagedEngine: an engine whose sequences share pages. A step reads any mix of prompts and single tokens."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import numpy as np

from graphrt.arguments import checked
from graphrt.errors import SessionError
from graphrt.models import session_file
from graphrt.models.adapters import AdapterTable, check_scales
from graphrt.models.cache_paged import Swapped
from graphrt.models.continuous_batch import ContinuousBatch, generated
from graphrt.models.engine import Ids
from graphrt.models.paged_steps import PagedSteps
from graphrt.models.sampling import Uniforms
from graphrt.models.sampling_device import Drawn
from graphrt.models.step import Logits
from graphrt.ops import RowSettings, SampleParams


class PagedEngine(PagedSteps):
    """Sequences in the pages of one cache, each as long as it is. A sequence that begins as another one takes its pages
    over (options.share), so that fewer tokens may be read than are given."""

    @checked(SessionError)
    def read(self, tokens: Mapping[int, Sequence[int] | Ids]) -> Logits:
        with self.alone():
            given = self.checked(tokens)
            left = self.after_what_is_known(given)
            found: dict[int, Logits] = {}
            with self.reading(sum(map(len, left.values()))) as advance:
                while left:
                    part = self._next_part(left)
                    found |= zip(part, self.step(part).copy())  # a sequence's last step is the one that stays
                    left = {seq: ids[len(part.get(seq, ())) :] for seq, ids in left.items()}
                    left = {seq: ids for seq, ids in left.items() if len(ids)}
                    advance(sum(map(len, part.values())))
            return np.stack([found[seq] for seq in given])

    def _next_part(self, left: Mapping[int, Ids]) -> dict[int, Ids]:
        """What the next step reads: the last tokens that sequences have, and n_batch tokens of the other ones'
        prompts, in the order given."""
        part = {seq: ids for seq, ids in left.items() if len(ids) == 1}
        room = self.n_batch
        for seq, ids in left.items():
            if len(ids) > 1 and room:
                part[seq] = ids[:room]
                room -= len(part[seq])
        return part

    def run_ahead(
        self, tokens: Ids, n: int, sampling: SampleParams | None = None, uniforms: Uniforms | None = None
    ) -> Generator[Ids, None, None]:
        self.checked(dict(enumerate(tokens[:, None])))
        most = min(n, int(self.n_ctx - self.lengths.max()))
        how = Drawn() if sampling is None else Drawn(RowSettings.of(sampling), uniforms)
        with ContinuousBatch(self) as batch:
            for seq, token in enumerate(tokens[:, None] if most > 0 else ()):
                batch.add(seq, token, most, how)
            yield from generated(batch)

    def reset(self) -> None:
        if self.batch is not None:
            self.batch.close()
        super().reset()

    # ---- sequences ----

    @checked(SessionError)
    def use_adapters(self, seq: int, scales: Sequence[float]) -> None:
        """An empty sequence has the model's adapters at these scales from now on, 0 for not at all; unless told those
        that the model was loaded with. Raises SessionError for another number of them than the model has, and for a
        sequence that is not empty."""
        with self.alone():
            table = self._adapters()
            self.cache.pool.put_below(self.known(seq), table.adapters.key(check_scales(scales, len(table.of(seq)))))
            table.give(seq, scales)

    def _adapters(self) -> AdapterTable:
        if self.adapters is None:
            raise SessionError("adapters are those that a model was loaded with, this one has none; load it with some")
        return self.adapters

    def tokens(self, seq: int) -> list[int]:
        """The tokens of a sequence that have been read."""
        if not 0 <= seq < self.n_seq:
            raise SessionError(f"a sequence must be 0 to {self.n_seq - 1}, got {seq}")
        return list(self.cache.pool.of(seq).ids)

    @checked(SessionError)
    def truncate(self, seq: int, n: int) -> int:
        """Forgets a sequence's tokens behind the first n, and gives how many stay: n, or 0 where a sliding window would
        need what it no longer has. Raises SessionError for an unknown one, or more tokens than it has."""
        with self.alone():
            have = int(self.lengths[self.known(seq)])
            if not 0 <= n <= have:
                raise SessionError(f"a sequence goes back to 0 to {have} tokens, which it has, got {n}")
            return self.cut(seq, n)

    @checked(SessionError)
    def free(self, seq: int) -> None:
        """Forgets a sequence; what others share stays."""
        self.truncate(seq, 0)

    @checked(SessionError)
    def fork(self, seq: int, into: int) -> None:
        """The empty sequence `into` goes on from the tokens of `seq` by itself. Nothing is copied but, once one of them
        goes on, the page that is not full. Raises SessionError where it is not empty."""
        with self.alone():
            self.cache.pool.fork(self.known(seq), self.known(into))
            if self.adapters is not None:
                self.adapters.give(into, self.adapters.of(seq))
            self.lengths[into] = self.lengths[seq]

    @checked(SessionError)
    def swap_out(self, seq: int) -> Swapped:
        """Moves a sequence to host memory, and empties it: its pages are free for others."""
        with self.alone():
            away = self.cache.swap_out(self.known(seq))
            self.lengths[seq] = 0
            return away

    @checked(SessionError)
    def swap_in(self, seq: int, away: Swapped) -> None:
        """Brings a sequence of this engine back, to any empty one that has the same adapters. Raises CacheFullError
        where pages are missing, and SessionError where it is not empty; then nothing has changed."""
        with self.alone():
            if away.key != self.cache.pool.key(self.known(seq)):
                raise SessionError("a sequence comes back with the adapters that it had; call use_adapters() first")
            self.cache.swap_in(self.known(seq), away)
            self.lengths[seq] = len(away.ids)

    @checked(SessionError)
    def save(self, seq: int, path: str | os.PathLike[str]) -> None:
        """Writes a sequence to a file, as Session.save() does: sessions and engines of this model can read it."""
        with self.alone():
            session_file.write(Path(path), self, self.tokens(seq), seq)

    @checked(SessionError)
    def load(self, seq: int, path: str | os.PathLike[str]) -> list[int]:
        """Fills an empty sequence from a file, and gives the tokens at its end that are not read yet. Raises
        SessionError for a file that is none, of another model or of other cache types, CacheFullError where pages are
        missing; then the sequence is empty."""
        with self.alone():
            if self.lengths[self.known(seq)]:
                raise SessionError(
                    f"a file is read into an empty sequence, {seq} has {self.lengths[seq]} tokens; free it"
                )
            with self.emptied_where_it_fails() as began:
                began.append(seq)
                with session_file.SessionFile(Path(path), self.decoder, self.options, self.adapter_key(seq)) as file:
                    ids = file.fill(self, seq)
                    self.lengths[seq] = n = file.header.n_read
                self.cache.pool.commit(seq)
            return ids[n:]
