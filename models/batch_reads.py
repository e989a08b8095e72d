"""What the next step of a ContinuousBatch reads: which tokens of which sequences, where they are found, and by what the
next ones are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from graphrt.models.choice_rows import Rows
from graphrt.models.engine import Ids
from graphrt.models.guesses import MOST_ROWS, Guesser, Pace, guesses, that_fit
from graphrt.models.paged_steps import PagedSteps
from graphrt.models.sampling_device import Drawn, place_of
from graphrt.models.step_paged import StepSize

#: Steps of single tokens that pieces of prompts, each step of which tells nothing of others, wait for as many as a step
#: has room for: it takes as long with one.
MOST_WAITS = 4


@dataclass(eq=False)
class Going:
    """A sequence that reads or generates. left: its tokens that no step reads yet, of which the first n_prompt are of a
    prompt and not made; on_board: the latest step leaves its next token on the board's row of this sequence; wanted,
    unasked: tokens that are still to be given, and of those the ones that no step has been queued for; token: the last
    one given; how: how its tokens are chosen; guesser: what guesses some of them, None for nothing."""

    seq: int
    left: Ids
    wanted: int
    unasked: int
    how: Drawn
    guesser: Guesser | None = None
    n_prompt: int = 0
    on_board: bool = False
    token: int = -1

    def __post_init__(self) -> None:  # of `how`, once and not each step
        self.n_uniforms, self.penalizes = self.how.n_uniforms, self.how.settings.penalizes

    @property
    def guesses(self) -> bool:
        """Its next tokens may be guessed: then its latest one must be known."""
        if self.guesser is None or self.guesser.pauses:
            return False
        return not self.how.waits and not self.penalizes

    @property
    def is_known(self) -> bool:
        """The host knows all of its tokens."""
        return self.unasked == self.wanted


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


class ReadPlan:
    """Chooses what steps of an engine read. going: its sequences by number; the others as ContinuousBatch has them."""

    def __init__(
        self,
        engine: PagedSteps,
        going: Mapping[int, Going],
        pace: Pace | None = None,
        *,
        alone: bool = False,
        size: StepSize | None = None,
    ) -> None:
        self.engine, self.going, self.pace, self.alone, self.size = engine, going, pace, alone, size
        self._room = engine.n_batch  # alone: tokens of prompts that may be read until single ones have their turn
        self._waits = 0  # alone: steps of single tokens that pieces have waited for others

    def next(self) -> list[Read]:
        """What the next step reads: a token of each sequence that generates, and n_batch tokens of prompts, in the
        order in which they came; or, where there are no prompts, guesses."""
        if self.alone:
            return self._next_alone()
        reads, room = [], self.engine.n_batch
        prompts = any(len(going.left) > 1 for going in self.going.values())
        guessed = {} if prompts else self._guesses()
        for going in self.going.values():
            if len(going.left):
                ids = going.left[: room if len(going.left) > 1 else 1]
                room -= len(ids) if len(going.left) > 1 else 0
                if len(ids):
                    reads.append(Read(going, ids, len(ids) == len(going.left)))
            else:
                reads += self._single(going, guessed.get(going.seq, []))
        place = {seq: i for i, seq in enumerate(self.engine.arranged([read.of.seq for read in reads]))}
        return sorted(reads, key=lambda read: place[read.of.seq])

    def _single(self, going: Going, guess: list[int]) -> list[Read]:
        """The latest token of a sequence that generates, with what is guessed to follow it."""
        if not going.unasked:
            return []
        if going.on_board and not guess:
            return [Read(going, None, True)]
        return [Read(going, np.array([going.token, *guess], np.int32), True, len(guess))] if going.is_known else []

    def _next_alone(self) -> list[Read]:
        """A piece of one prompt, or of as many as a step of such pieces has room for, or else a token of each sequence
        that has read its own: in turns of n_batch tokens of prompts and a step of single ones, where there are both.
        Fewer pieces than there is room for let single ones go ahead some times."""
        engine = self.engine
        singles = list[Read]()
        for going in self.going.values():
            if not going.n_prompt and len(going.left):
                singles.append(Read(going, going.left[:1], len(going.left) == 1))
            elif not going.n_prompt:
                singles += self._single(going, [])
        pieces = [self._piece(going) for going in self.going.values() if going.n_prompt]
        if pieces:
            size = engine.own_size(pieces[0].n)
            alike = [read for read in pieces if engine.own_size(read.n) == size][: size.n_seq]
            in_turn = pieces[0].n <= self._room and (len(alike) == size.n_seq or self._waits >= MOST_WAITS)
            if in_turn or not singles:
                self._room -= sum(read.n for read in alike) if singles else 0
                self._waits = 0
                return alike
            self._waits += 1
        self._room = engine.n_batch
        return singles

    def _piece(self, going: Going) -> Read:
        """The next piece of a prompt, which ends where n_batch divides it."""
        n_batch = self.engine.n_batch
        at = self.engine.cache.pool.of(going.seq).reserved
        piece = going.left[: min(going.n_prompt, n_batch - at % n_batch)]
        return Read(going, piece, len(piece) == len(going.left))

    def own_size(self, reads: list[Read]) -> StepSize | None:
        """That of a step that tells nothing of others, None where it may."""
        if not self.alone:
            return self.size
        return self.engine.own_size(reads[0].n if reads[0].of.n_prompt else 0)

    def may_guess(self, going: Going) -> bool:
        """Its next tokens may be guessed, and guesses pay."""
        return going.guesses and (self.pace is None or self.pace.guesses(len(self.going)))

    def _guesses(self) -> dict[int, list[int]]:
        """The tokens that sequences may be about to say: those that they can still have, and that have pages without
        others giving any up."""
        engine, asked = self.engine, dict[Guesser, int]()
        going_on = [going for going in self.going.values() if going.unasked]
        room = min(engine.n_batch, MOST_ROWS - len(going_on))
        for going in going_on:
            if going.guesser is None or len(going.left) or not going.is_known or not self.may_guess(going):
                continue
            left = engine.n_ctx - int(engine.lengths[going.seq]) - 1
            n = min(room, going.guesser.size, going.unasked - 1, left)
            if n > 0:
                asked[going.guesser] = n
                room -= n
        made = guesses(asked) if asked else {}
        by_seq = {going.seq: made[going.guesser] for going in going_on if going.guesser in made}
        return that_fit(engine.cache.pool, (going.seq for going in going_on), by_seq)


def sources_of(engine: PagedSteps, reads: Sequence[Read], n: int) -> Ids:
    """The row of the board in which each of n tokens is found: its sequence's, or behind all that steps leave those
    that the host gives."""
    found = np.empty(n, np.int32)
    at, given = 0, engine.given_at
    for read in reads:
        if read.ids is None:
            found[at] = read.of.seq
        else:
            found[at : at + read.n] = np.arange(given, given + read.n)
            given += read.n
        at += read.n
    return found


def rows_of(engine: PagedSteps, reads: Sequence[Read], *, every: bool) -> Rows:
    """What each wanted row's token is chosen by, with numbers beyond the draws that are queued, and where it goes.
    every: all tokens' rows are wanted."""
    pool, rows = engine.cache.pool, Rows([], [], [], [], [])
    for read in reads:
        going, chooses = read.of, read.chooses
        seq, uniforms = going.seq, going.how.uniforms if chooses else None
        end, before = pool.of(seq).reserved, going.wanted - going.unasked
        for i in range(read.n if every else 1):
            numbers = 0.0, 0.0
            if uniforms is not None:
                first = (before + i) * going.n_uniforms
                last = uniforms.peek(first + going.n_uniforms - 1)
                numbers = last, last if going.n_uniforms == 1 else uniforms.peek(first)
            rows.slots.append(seq)
            rows.lengths.append(end)
            rows.uniforms.append(numbers)
            rows.places.append(place_of(seq, end) if chooses and going.penalizes else -1)
            rows.targets.append(engine.n_seq + len(rows.targets) if every else seq if chooses else -1)
    return rows
