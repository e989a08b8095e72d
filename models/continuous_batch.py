"""ContinuousBatch: sequences of a PagedEngine that come and go while others generate. A step reads chunks of prompts
together with the single tokens of those that generate; the next tokens are chosen on the device and found there by the
next step, so that steps are queued ahead of the host, which learns their tokens some steps later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphrt.arguments import checked
from graphrt.backends.cpu import threads
from graphrt.errors import CacheFullError, SessionError
from graphrt.models.engine import MAX_AHEAD, Ids
from graphrt.models.guesses import Guesser, Pace, guesses
from graphrt.models.paged_steps import PagedSteps
from graphrt.models.sampling_device import Drawn, candidates, place_of
from graphrt.models.step_paged import Filling, PagedStep, StepSize
from graphrt.models.step_times import StepTime

#: Steps whose times are kept until somebody takes them.
MOST_TIMES = 64


@dataclass(eq=False)
class Going:
    """A sequence that reads or generates. left: its tokens that no step reads yet, of which the first n_prompt are of a
    prompt and not made; row: where on the board the latest
    step leaves its next one; wanted, unasked: tokens that are still to be given, and of those the ones that no step has
    been queued for; token: the last one given; how: how its tokens are chosen; guesser: what guesses some of them, None
    for nothing."""

    seq: int
    left: Ids
    wanted: int
    unasked: int
    how: Drawn
    guesser: Guesser | None = None
    n_prompt: int = 0
    row: int = -1
    token: int = -1

    @property
    def guesses(self) -> bool:
        """Its next tokens may be guessed: then its latest one must be known."""
        steady = not self.how.waits and not self.how.settings.penalizes
        return self.guesser is not None and not self.guesser.pauses and steady


class Read(NamedTuple):
    """What a queued step reads of a sequence. ids: its tokens, None for the one that the step before leaves; chooses:
    the next one is wanted; guessed: how many of the tokens, at their end, are guesses. What is chosen after each of
    them is looked at: so far as guesses are what is chosen before them, they are the text's own."""

    of: Going
    ids: Ids | None
    chooses: bool
    guessed: int = 0

    @property
    def n(self) -> int:
        return 1 if self.ids is None else len(self.ids)


class Queued(NamedTuple):
    """A step that was queued, and what waits for its tokens. rows: where those of each read begin on the board;
    seconds: what tells how long the device took."""

    step: PagedStep
    reads: list[Read]
    rows: list[int]
    answer: Callable[[], npt.NDArray[np.uint8]]
    seconds: Callable[[], float]


class ContinuousBatch:
    """Sequences of an engine that generate together, each one's tokens chosen in its own way. Use it as a context: it
    leaves the engine with the tokens that were given, but for each sequence's last, as read. An engine has one at a
    time; what else is done with its sequences meanwhile is refused for those that generate.

    A grammar's mask for a token follows from the one before, and so do guesses: while a sequence has a grammar or is
    guessed, no step is queued ahead. Tokens are what they are without guesses, but for rounding. failed: sequences
    whose grammar let nothing through or took too much, which have ended, with the error. alone: steps tell nothing of
    other sequences: a piece of a prompt, cut where n_batch divides it, is a step by itself, and all steps of single
    tokens have one size. pace: whether guesses pay,
    None where they are to be made in any case; n_guessed, n_right: tokens that were guessed, and those that were right;
    times: what the latest steps took.

        with ContinuousBatch(engine) as batch:
            batch.add(0, prompt, 64)
            while batch.going:
                for seq, tokens in batch.step().items(): ...    # and add() or end() any sequence, at any time
    """

    def __init__(self, engine: PagedSteps, pace: Pace | None = None, *, alone: bool = False) -> None:
        self.engine, self.pace, self.alone = engine, pace, alone
        self._read_prompt = False  # by the last step, if steps are alone
        self._on_board = set[Going]()  # those whose next tokens the last step leaves
        self.n_guessed = self.n_right = 0
        self.failed: dict[int, SessionError] = {}
        self.times = deque[StepTime](maxlen=MOST_TIMES)
        self._going: dict[int, Going] = {}
        self._queued: deque[Queued] = deque()
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
        waits = any(going.how.waits or self._may_guess(going) for going in self._going.values())
        ahead = MAX_AHEAD if self.engine.home.asynchronous and not waits else 1
        found: dict[int, list[int]] = {}
        while not found and not self.failed and (self._going or self._queued):
            with self.engine.alone():
                while len(self._queued) < ahead and (reads := self._next_reads()) and self._has_room(reads):
                    with self._all_or_none():
                        if reads := self._allow(reads):
                            self._queued.append(self._queue(reads))
                if self._queued:
                    with self._all_or_none():
                        queued = self._queued.popleft()
                        n_texts = len(self._going)
                        found = self._taken(queued)
                        if self.pace is not None:
                            prompt = any(read.n > 1 + read.guessed for read in queued.reads)
                            self.pace.told(n_texts, sum(map(len, found.values())), counts=not prompt)
        if self.pace is not None and not self._going:
            self.pace.rests()
        return found

    def _next_reads(self) -> list[Read]:
        """What the next step reads: a token of each sequence that generates, and n_batch tokens of prompts, in the
        order in which they came; or, where there are no prompts, guesses."""
        if self.alone:
            return self._reads_alone()
        reads, room = [], self.engine.n_batch
        prompts = any(len(going.left) > 1 for going in self._going.values())
        guessed = {} if prompts else self._guesses()
        for going in self._going.values():
            if len(going.left):
                ids = going.left[: room if len(going.left) > 1 else 1]
                room -= len(ids) if len(going.left) > 1 else 0
                if len(ids):
                    reads.append(Read(going, ids, len(ids) == len(going.left)))
            elif going.unasked:
                guess = guessed.get(going.seq, [])
                asked = np.array([going.token, *guess], np.int32) if guess else None
                reads.append(Read(going, asked, True, len(guess)))
        place = {seq: i for i, seq in enumerate(self.engine.arranged([read.of.seq for read in reads]))}
        return sorted(reads, key=lambda read: place[read.of.seq])

    def _reads_alone(self) -> list[Read]:
        """A piece of one prompt, or else a token of each sequence that has read its own: in turns, where there are
        both. A token that the last step doesn't leave is read once it is known."""
        engine = self.engine
        singles = list[Read]()
        for going in self._going.values():
            if not going.n_prompt and len(going.left):
                singles.append(Read(going, going.left[:1], len(going.left) == 1))
            elif not going.n_prompt and going.unasked and going in self._on_board:
                singles.append(Read(going, None, True))
            elif not going.n_prompt and going.unasked == going.wanted:
                singles.append(Read(going, np.array([going.token], np.int32), True))
        prompt = next((going for going in self._going.values() if going.n_prompt), None)
        if prompt is None or (singles and self._read_prompt):
            return singles
        at = engine.cache.pool.of(prompt.seq).reserved
        piece = prompt.left[: min(prompt.n_prompt, engine.n_batch - at % engine.n_batch)]
        return [Read(prompt, piece, len(piece) == len(prompt.left))]

    def _own_size(self, reads: Sequence[Read]) -> StepSize | None:
        """That of a step that tells nothing of others, None where it may."""
        if not self.alone:
            return None
        self._read_prompt = bool(reads[0].of.n_prompt)
        return self.engine.own_size(reads[0].n if self._read_prompt else 0)

    def _may_guess(self, going: Going) -> bool:
        return going.guesses and (self.pace is None or self.pace.guesses(len(self._going)))

    def _guesses(self) -> dict[int, list[int]]:
        """The tokens that sequences may be about to say: those that they can still have, and that have pages without
        others giving any up."""
        engine, room, asked = self.engine, self.engine.n_batch, dict[Guesser, int]()
        going_on = [going for going in self._going.values() if going.unasked]
        for going in going_on:
            if going.guesser is None or len(going.left) or going.unasked < going.wanted or not self._may_guess(going):
                continue
            left = engine.n_ctx - int(engine.lengths[going.seq]) - 1
            n = min(room, going.guesser.size, going.unasked - 1, left)
            if n > 0:
                asked[going.guesser] = n
                room -= n
        made = guesses(asked) if asked else {}
        counts, found = {going.seq: 1 for going in going_on}, dict[int, list[int]]()
        for going in going_on:
            guess = made.get(going.guesser) if going.guesser is not None else None
            if not guess:  # room is asked for guess by guess, which takes as long as there are sequences
                continue
            try:
                engine.cache.pool.check_room(counts | {going.seq: 1 + len(guess)})
            except CacheFullError:
                continue
            counts[going.seq] += len(guess)
            found[going.seq] = guess
        return found

    def _has_room(self, reads: Sequence[Read]) -> bool:
        """Whether a step's tokens have pages now. Raises CacheFullError where they have none and no step is under way,
        whose end could make some free."""
        try:
            self.engine.cache.pool.check_room({read.of.seq: read.n for read in reads})
        except CacheFullError:
            if not self._queued:
                raise
            return False
        return True

    def _queue(self, reads: list[Read]) -> Queued:
        engine = self.engine
        new = {read.of.seq: read.n for read in reads}
        counts = np.array(list(new.values()), np.int32)
        n, every = int(counts.sum()), any(read.guessed for read in reads)
        engine.cache.append(new)
        plan = engine.plan(new, every=every, size=self._own_size(reads))
        drawn = any(not read.of.how.is_plain for read in reads)
        most = candidates(read.of.how.settings for read in reads) if drawn else 0
        step = engine.choosing(plan.size, most, adapted=engine.is_adapted(new))
        given = np.concatenate([read.ids for read in reads if read.ids is not None] or [np.zeros(0, np.int32)])
        wanted = np.arange(n, dtype=np.int32) if every else np.cumsum(counts, dtype=np.int32) - 1
        step.write(new, self._sources(reads, n), wanted, plan.prefixes.groups, self._choice(step, reads))
        buffer, offset = step.exe.place(engine.board)
        if len(given):
            buffer.write(offset + 4 * engine.most_tokens, given.view(np.uint8))
        stopped = engine.home.stopwatch()
        with threads.using(engine.n_threads_batch if n > len(reads) else 0):
            step.exe.run()
        seconds = stopped()
        rows = (np.cumsum(counts) - counts).tolist() if every else list(range(len(reads)))
        for row, read in zip(rows, reads):
            if read.ids is not None:
                read.of.left = read.of.left[len(read.ids) :]
                read.of.n_prompt = max(0, read.of.n_prompt - len(read.ids))
            read.of.unasked -= read.chooses
            read.of.row = row
        self._on_board = {read.of for read in reads if read.chooses}
        return Queued(step, reads, rows, buffer.read_later(offset, 4 * len(wanted)), seconds)

    def _sources(self, reads: Sequence[Read], n: int) -> npt.NDArray[np.int32]:
        """The row of the board in which each token is found: the step before leaves its own in the first ones, those
        that the host gives lie behind."""
        found = np.empty(n, np.int32)
        at, given = 0, self.engine.most_tokens
        for read in reads:
            if read.ids is None:
                found[at] = read.of.row
            else:
                found[at : at + read.n] = np.arange(given, given + read.n)
                given += read.n
            at += read.n
        return found

    def _choice(self, step: PagedStep, reads: Sequence[Read]) -> Filling | None:
        """What the next tokens are chosen by, where tables say it: numbers beyond the draws that are queued, and what
        grammars let through."""
        choice, pool = step.inputs.choice, self.engine.cache.pool
        if choice is None:
            return None
        every = any(read.guessed for read in reads)
        slots, lengths, uniforms, places = list[int](), list[int](), list[tuple[float, float]](), list[int]()
        for read in reads:
            going, how = read.of, read.of.how
            end, before = pool.of(going.seq).reserved, going.wanted - going.unasked
            for i in range(read.n if every else 1):
                numbers, place = (0.0, 0.0), -1
                if read.chooses and how.uniforms is not None:
                    first = (before + i) * how.n_uniforms
                    numbers = how.uniforms.peek(first + how.n_uniforms - 1), how.uniforms.peek(first)
                if read.chooses and how.settings.penalizes:
                    place = place_of(going.seq, end)
                slots.append(going.seq)
                lengths.append(end)
                uniforms.append(numbers)
                places.append(place)
        places += [-1] * (choice.places.ne[0] - len(places))
        return {
            choice.slots: np.array(slots, np.int32), choice.uniforms: np.array(uniforms),
            choice.lengths: np.array(lengths, np.int32), choice.places: np.array(places),
        }  # fmt: skip

    def _allow(self, reads: Sequence[Read]) -> list[Read]:
        """Has the device know what grammars let through, and what DRY takes off. The reads without those of sequences
        that fail by it."""
        for read in reads:
            if read.chooses and read.of.how.costs is not None:
                new = [read.of.token] if read.ids is None else read.ids.tolist()
                text = [*self.engine.cache.pool.of(read.of.seq).ids, *new]
                self.engine.tables.deter(read.of.seq, read.of.how, text)
        asked = {read.of.seq: read.of for read in reads if read.chooses and read.of.how.matcher is not None}
        if asked:
            for seq, error in self.engine.tables.allow({seq: of.how for seq, of in asked.items()}).items():
                self._fail(asked[seq], error)
        return [read for read in reads if self._going.get(read.of.seq) is read.of]

    def _fail(self, going: Going, error: SessionError) -> None:
        self.failed[going.seq] = error
        del self._going[going.seq]
        self.engine.forget([going.seq])

    def _taken(self, queued: Queued) -> dict[int, list[int]]:
        """What a step has read counts as read from now on, but for sequences that have ended since, and guesses that
        were wrong. Its tokens."""
        engine, found = self.engine, dict[int, list[int]]()
        asked = time.perf_counter()
        tokens = queued.answer().view(np.int32)
        waited, device = time.perf_counter() - asked, queued.seconds()
        if not engine.home.asynchronous:  # it was waited for when it was queued
            waited += device
        self.times.append(StepTime(sum(read.n for read in queued.reads), device, waited))
        queued.step.check_chosen(tokens)
        for read, row in zip(queued.reads, queued.rows):
            going, seq = read.of, read.of.seq
            if self._going.get(seq) is not going:
                continue
            ids = [going.token] if read.ids is None else read.ids.tolist()
            chosen = tokens[row : row + 1 + read.guessed].tolist()
            right = next((i for i in range(read.guessed) if chosen[i] != ids[1 + i]), read.guessed)
            ids = ids[: len(ids) - read.guessed + right]
            engine.cache.pool.commit(seq, ids)
            engine.lengths[seq] += len(ids)
            if right < read.guessed:
                engine.forget([seq])
            if read.chooses:
                found[seq] = chosen[: 1 + right]
                if read.guessed:  # else a later step may have been queued since
                    going.row, going.unasked = row + right, going.unasked - right
                self._given(going, found[seq], read.guessed)
        return found

    def _given(self, going: Going, tokens: Sequence[int], guessed: int) -> None:
        """A sequence's next tokens are known, all but the last of which were guessed."""
        going.token = tokens[-1]
        going.wanted -= len(tokens)
        for _ in range(going.how.n_uniforms * len(tokens)):
            going.how.uniforms.take()  # type: ignore[union-attr]
        if going.guesser is not None:
            for token in tokens:
                going.guesser.push(token)
            if guessed:
                going.guesser.told(guessed, len(tokens) - 1)
                self.n_guessed += guessed
                self.n_right += len(tokens) - 1
        if not going.wanted:
            del self._going[going.seq]
        self._accept(going)

    def _accept(self, going: Going) -> None:
        """A grammar goes on behind the token that was given."""
        if going.how.matcher is not None:
            try:
                going.how.matcher.accept(going.token)
            except SessionError as error:
                self.failed[going.seq] = error
                self._going.pop(going.seq, None)

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
