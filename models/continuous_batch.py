"""ContinuousBatch: sequences of a PagedEngine that come and go while others generate. A step reads chunks of prompts
together with the single tokens of those that generate; the next tokens are chosen on the device and found there by the
next step, so that steps are queued ahead of the host, which learns their tokens some steps later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.arguments import checked
from graphrt.backends.cpu import threads
from graphrt.errors import CacheFullError, SessionError
from graphrt.models.batch_reads import Going, Read, ReadPlan, rows_of, sources_of
from graphrt.models.choice_rows import Rows
from graphrt.models.engine import MAX_AHEAD, Ids
from graphrt.models.guesses import Guesser, Pace
from graphrt.models.paged_steps import PagedSteps
from graphrt.models.sampling_device import Drawn, candidates_of
from graphrt.models.step_chosen import Chooser, ChosenStep
from graphrt.models.step_paged import StepSize
from graphrt.models.step_times import StepTime

#: Steps whose times are kept until somebody takes them.
MOST_TIMES = 64
#: Steps that are queued while texts may be guessed but have nothing to guess: once they have, each of these that is
#: still under way gives a single token.
AHEAD_OF_GUESSES = 2


@dataclass(eq=False)
class Queued:
    """A step that was queued. rows: of what it leaves on the board from `start` on, those of each read's first token;
    of_rows: what they are chosen by, but for the numbers; answer: waits for its tokens, None until their choice is
    queued too; seconds: tells how long the device took, once it has been queued."""

    step: ChosenStep
    reads: list[Read]
    rows: list[int]
    start: int
    of_rows: Rows
    seconds: Callable[[], float] = lambda: 0.0
    answer: Callable[[], npt.NDArray[np.uint8]] | None = None


class ContinuousBatch:
    """Sequences of an engine that generate together, each one's tokens chosen in its own way. Use it as a context: it
    leaves the engine with the tokens that were given, but for each sequence's last, as read. An engine has one at a
    time; what else is done with its sequences meanwhile is refused for those that generate.

    A grammar's mask for a token follows from the one before. A step with one is queued before its masks are known, all
    but the choice of its tokens: the host finds the masks while the device reads, as soon as the tokens before are
    known, and queues the choice and one more step before it gives these. Guesses follow from the latest token too:
    where there is something to guess, the step with it is queued as soon as the tokens before are known, before the
    host gives these. Tokens are what they are without guesses, but for rounding. failed: sequences whose grammar let
    nothing through or took too much, which have ended, with the error. alone: steps tell nothing of other sequences:
    pieces of prompts, cut where n_batch divides them, are steps of their own, which have room for others of about one
    length, and all steps of single tokens have one size. pace: whether guesses pay, None where they are to be made in
    any case; size: of all steps, where it is more than they need; n_guesses: how often a sequence was guessed;
    n_guessed, n_right: tokens that were guessed, and those that were right; times: what the latest steps took.

        with ContinuousBatch(engine) as batch:
            batch.add(0, prompt, 64)
            while batch.going:
                for seq, tokens in batch.step().items(): ...    # and add() or end() any sequence, at any time
    """

    def __init__(
        self, engine: PagedSteps, pace: Pace | None = None, *, alone: bool = False, size: StepSize | None = None
    ) -> None:
        self.engine, self.pace = engine, pace
        self.n_guesses = self.n_guessed = self.n_right = 0
        self.failed: dict[int, SessionError] = {}
        self.times = deque[StepTime](maxlen=MOST_TIMES)
        self._going: dict[int, Going] = {}
        self._queued: deque[Queued] = deque()
        self._plan = ReadPlan(engine, self._going, pace, alone=alone, size=size)
        engine.begin(self)

    def __enter__(self) -> ContinuousBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def going(self) -> list[int]:
        """The sequences that have tokens to come."""
        return list(self._going)

    @checked(SessionError)
    def add(
        self,
        seq: int,
        tokens: Sequence[int] | Ids,
        n: int = -1,
        how: Drawn = Drawn(),
        guesser: Guesser | None = None,
        n_made: int = 0,
    ) -> None:
        """A sequence reads these tokens, of which it takes over what the cache has, and then generates n, -1: until its
        context is full. how: how they are chosen, the likeliest unless told; guesser: guesses them; n_made: of the
        tokens those at their end that were made and are no prompt's. Raises SessionError as PagedEngine.read() does and
        for an n of 0; CacheFullError where the cache has too few pages for the tokens; then nothing has changed."""
        engine = self.engine
        if n < -1 or n == 0:
            raise SessionError(f"a sequence generates at least 1 token, or -1, until its context is full, got {n}")
        with engine.alone():
            before = engine.cache.pool.of(seq).ids
            left = engine.after_what_is_known(engine.checked({seq: tokens}))[seq]
            most = engine.n_ctx + 1 - int(engine.lengths[seq]) - len(left)
            n = most if n < 0 else min(n, most)
            if not how.is_plain:
                engine.tables.begin(seq, how, [*before, *tokens] if before is not None else list(tokens))
            elif "tables" in vars(engine):
                engine.tables.begin(seq, how, ())
            self._going[seq] = Going(seq, left, n, n, how, guesser, max(0, len(left) - n_made))

    @checked(SessionError)
    def end(self, seq: int) -> None:
        """A sequence gives no more tokens. It keeps those that were given, but for the last, as read; add() goes on
        behind them. Raises SessionError for one that does not go on."""
        if seq not in self._going:
            raise SessionError(f"a sequence that ends must be going on, {self.going} are, got {seq}")
        with self.engine.alone():
            del self._going[seq]
            self.engine.forget([seq])

    def close(self) -> None:
        """Ends all, and leaves the engine to others."""
        seqs = self.going
        self._going.clear()
        self._queued.clear()
        self.engine.forget(seqs)
        self.engine.end(self)

    @checked(SessionError)
    def step(self) -> dict[int, list[int]]:
        """Reads on until there are tokens, and gives them by sequence, several where they were guessed; {} where
        nothing goes on. A sequence that has all that it wanted ends by itself. Raises CacheFullError where the next
        step's tokens have no pages: then all that was read stays, and once a sequence has ended and was freed, it goes
        on. Raises SessionError for logits that are no numbers, after which nothing goes on. !! A backend that queues
        its work doesn't look at these."""
        ahead = self._ahead()
        found: dict[int, list[int]] = {}
        while not found and not self.failed and (self._going or self._queued):
            with self.engine.alone():
                self._queue_ahead(ahead)
                if self._queued:
                    with self._all_or_none():
                        queued = self._queued.popleft()
                        n_texts = len(self._going)
                        found = self._taken(queued)
                        if self._queued and self._queued[-1].answer is None:
                            self._queue_ahead(ahead)
                        elif self.engine.home.asynchronous and self._guessers():
                            with suppress(CacheFullError):  # which the next call finds too, and tells
                                self._queue_ahead(self._ahead())
                        if self.pace is not None:
                            prompt = any(read.n > 1 + read.guessed for read in queued.reads)
                            guessed = any(read.guessed for read in queued.reads)
                            n_tokens = sum(map(len, found.values()))
                            self.pace.told(n_texts, n_tokens, guessed=guessed, counts=not prompt)
        if self.pace is not None and not self._going:
            self.pace.rests()
        return found

    def _guessers(self) -> list[Guesser]:
        """Of the sequences that may be guessed."""
        return [of.guesser for of in self._going.values() if of.guesser is not None and self._plan.may_guess(of)]

    def _ahead(self) -> int:
        """Steps that are to be queued: one alone where something can be guessed after the tokens that are known."""
        if not self.engine.home.asynchronous:
            return 1
        guessers = self._guessers()
        if not guessers:
            return MAX_AHEAD
        return 1 if any(guesser.is_ready for guesser in guessers) else AHEAD_OF_GUESSES

    def _queue_ahead(self, ahead: int) -> None:
        """Queues steps until there are `ahead` of them, or one's tokens can't be chosen yet: by grammars that is one
        step whose tokens are, and one more."""
        while True:
            last = self._queued[-1] if self._queued else None
            waits = last is not None and last.answer is None
            if last is not None and waits and not self._may_choose(last):
                return
            reads = self._plan.next() if len(self._queued) < ahead else []
            new = self._places(reads) if reads else None
            with self._all_or_none():
                queued = self._written(reads, new) if new is not None else None
                if last is not None and waits:
                    self._choose(last)
                if queued is None:
                    return
                self._run(queued)
                self._queued.append(queued)

    def _may_choose(self, queued: Queued) -> bool:
        """The host knows what the step's tokens are chosen by: of texts that wait for it, all tokens but the step's
        own."""
        return all(
            read.of.wanted - read.of.unasked == 1
            for read in queued.reads
            if read.chooses and read.of.how.waits and self._going.get(read.of.seq) is read.of
        )

    def _places(self, reads: Sequence[Read]) -> dict[int, int] | None:
        """Gives a step's tokens cells: how many of each sequence, None where they have no pages now. Raises
        CacheFullError where they have none and no step is under way, whose end could make some free."""
        new = {read.of.seq: read.n for read in reads}
        try:
            self.engine.cache.append(new)
        except CacheFullError:
            if not self._queued:
                raise
            return None
        return new

    def _written(self, reads: list[Read], new: dict[int, int]) -> Queued:
        """A step with its inputs written, which waits for nothing but its turn. new: tokens of each sequence."""
        engine = self.engine
        counts = np.fromiter(new.values(), np.int32, len(new))
        n, every = int(counts.sum()), any(read.guessed for read in reads)
        plan = engine.plan(new, every=every, size=self._plan.own_size(reads))
        hows = [read.of.how for read in reads]
        itself = engine.chooses_itself(plan.size) and not any(how.waits for how in hows)
        most = candidates_of(hows, itself=itself)
        step = engine.choosing(plan.size, most, adapted=engine.is_adapted(new), itself=itself)
        given = np.concatenate([read.ids for read in reads if read.ids is not None] or [np.zeros(0, np.int32)])
        wanted = np.arange(n, dtype=np.int32) if every else np.cumsum(counts, dtype=np.int32) - 1
        of_rows = rows_of(engine, reads, every=every)
        step.reads.write(new, sources_of(engine, reads, n), wanted, plan.prefixes.groups, of_rows)
        if len(given):
            buffer, offset = step.reads.exe.place(engine.board)
            buffer.write(offset + 4 * engine.given_at, given.view(np.uint8))
        rows = (np.cumsum(counts) - counts).tolist() if every else [read.of.seq for read in reads]
        for read in reads:
            if read.ids is not None:
                read.of.left = read.of.left[len(read.ids) :]
                read.of.n_prompt = max(0, read.of.n_prompt - len(read.ids))
            read.of.unasked -= read.chooses
            read.of.on_board = read.chooses and not every
        return Queued(step, reads, rows, engine.n_seq if every else 0, of_rows)

    def _run(self, queued: Queued) -> None:
        """Queues the reading of a step's tokens."""
        engine, several = self.engine, any(read.n > 1 for read in queued.reads)
        stopped = engine.home.stopwatch()
        with threads.using(engine.n_threads_batch if several else 0):
            queued.step.reads.exe.run()
        queued.seconds = stopped()

    def _choose(self, queued: Queued) -> None:
        """Queues the choice of a step's tokens, unless the step makes it, and their way to the host."""
        if queued.step.chooser is not None:
            self._choose_by(queued.step.chooser, queued)
        n = len(queued.of_rows.slots) if queued.start else self.engine.n_seq
        buffer, offset = queued.step.reads.exe.place(self.engine.board)
        queued.answer = buffer.read_later(offset + 4 * queued.start, 4 * n)

    def _choose_by(self, chooser: Chooser, queued: Queued) -> None:
        """Queues the choice. Where a sequence has ended since the step was, another one may have its number, which is
        left alone."""
        self._allow(queued.reads)
        rows, gone, at = queued.of_rows, set[int](), 0
        for read in queued.reads:
            n = read.n if queued.start else 1
            if self._going.get(read.of.seq) is not read.of:
                gone.update(range(at, at + n))
            at += n
        chooser.choose(rows.without(gone) if gone else rows)

    def _allow(self, reads: Sequence[Read]) -> None:
        """Has the device know what grammars let through, and what DRY takes off. Sequences that fail by it end."""
        here = [read for read in reads if read.chooses and self._going.get(read.of.seq) is read.of]
        for read in here:
            if read.of.how.costs is not None:
                new = [read.of.token] if read.ids is None else read.ids.tolist()
                text = [*self.engine.cache.pool.of(read.of.seq).ids, *new]
                self.engine.tables.deter(read.of.seq, read.of.how, text)
        asked = {read.of.seq: read.of for read in here if read.of.how.matcher is not None}
        if asked:
            for seq, error in self.engine.tables.allow({seq: of.how for seq, of in asked.items()}).items():
                self._fail(asked[seq], error)

    def _fail(self, going: Going, error: SessionError) -> None:
        self.failed[going.seq] = error
        del self._going[going.seq]
        self.engine.forget([going.seq])

    def _taken(self, queued: Queued) -> dict[int, list[int]]:
        """What a step has read counts as read from now on, but for sequences that have ended since, and guesses that
        were wrong. Its tokens."""
        engine, found = self.engine, dict[int, list[int]]()
        asked = time.perf_counter()
        assert queued.answer is not None
        tokens = queued.answer().view(np.int32)
        waited, device = time.perf_counter() - asked, queued.seconds()
        if not engine.home.asynchronous:  # it was waited for when it was queued
            waited += device
        self.times.append(StepTime(sum(read.n for read in queued.reads), device, waited))
        queued.step.reads.check_chosen(tokens if queued.start else tokens[queued.rows])
        commit, told = engine.cache.pool.commit, tokens.tolist()
        for read, row in zip(queued.reads, queued.rows):
            going, guessed = read.of, read.guessed
            seq = going.seq
            if self._going.get(seq) is not going:
                continue
            ids = [going.token] if read.ids is None else read.ids.tolist()
            right, chosen = 0, told[row : row + 1 + guessed]
            if guessed:
                right = next((i for i in range(guessed) if chosen[i] != ids[1 + i]), guessed)
                ids = ids[: len(ids) - guessed + right]
            commit(seq, ids)
            engine.lengths[seq] += len(ids)
            if right < guessed:
                engine.forget([seq])
            if read.chooses:
                found[seq] = chosen[: 1 + right]
                going.unasked -= right
                self._given(going, found[seq], guessed)
        return found

    def _given(self, going: Going, tokens: Sequence[int], guessed: int) -> None:
        """A sequence's next tokens are known, all but the last of which were guessed."""
        going.token = tokens[-1]
        going.wanted -= len(tokens)
        if going.how.uniforms is not None:
            going.how.uniforms.skip(going.n_uniforms * len(tokens))
        if going.how.matcher is not None and going.wanted:
            with suppress(SessionError):  # of which the next mask tells again
                going.how.matcher.accept(going.token)
        if going.guesser is not None:
            for token in tokens:
                going.guesser.push(token)
            if guessed:
                going.guesser.told(guessed, len(tokens) - 1)
                self.n_guesses += 1
                self.n_guessed += guessed
                self.n_right += len(tokens) - 1
        if not going.wanted:
            del self._going[going.seq]

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Where what is done inside fails, or is interrupted, nothing goes on, and what was read before stays."""
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                self.close()


def generated(batch: ContinuousBatch) -> Iterator[Ids]:
    """The tokens of all sequences of an engine, each of which generates as many: int32 [n_seq] after each step."""
    while batch.going:
        found = batch.step()
        yield np.array([found[seq][0] for seq in range(batch.engine.n_seq)], np.int32)
