"""Scheduler: which texts an engine's next step reads, and what becomes of their tokens. No threads and no HTTP: one
thread calls it.

A text waits until a sequence and pages for its whole prompt are free, and until a text that begins as it does has read
what they share, where that is much of it. It then takes over what the cache's tree has of
its beginning, reads the rest in chunks beside those that generate, and generates. Where pages run out the text that
came last gives its pages back and waits again: its tokens are read anew, or taken over where the tree still has them.
No new text begins until one has ended, so that two don't take each other's pages in turn.

Where the device can choose all texts' tokens and the engine gains by it, a ContinuousBatch does; else the host reads
logits and each text's own sampler chooses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graphrt.errors import CacheFullError, GraphrtError, RankError, SessionError
from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.draft import DraftedText
from graphrt.models.engine import Ids
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.guesses import Drafts, Guesser, Pace
from graphrt.models.prompt_lookup import PromptLookup
from graphrt.models.sampling_device import Drawn, drawn
from graphrt.models.sampling_logprobs import logprobs_of
from graphrt.models.step import Logits
from graphrt.models.step_paged import StepSize
from graphrt.models.step_times import StepTime
from graphrt.tools.serve import host_guesses
from graphrt.tools.serve.events import ENDED, GENERATING, READING, WAITING, Cancelled, Event, Text
from graphrt.tools.serve.fair_queue import FairQueue

log = logging.getLogger(__name__)

#: Tokens of a prompt whose log-probabilities are told that a step reads: a row of logits is kept for each.
SCORED = 128
#: The part of its tokens that a text must be spared to wait for another one that reads them.
LEAST_SPARED = 0.25


@dataclass
class Counts:
    """Since the beginning. looked_up_tokens: of prompts, that the cache was searched for; busy_texts: that were read
    or generated, of all steps together; guesses: of so many guessed tokens one after the other."""

    prompt_tokens: int = 0
    looked_up_tokens: int = 0
    cached_tokens: int = 0
    made_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_texts: int = 0
    guesses: int = 0
    guessed_tokens: int = 0
    right_tokens: int = 0


class Scheduler:
    """The texts of one engine. most_guessed: tokens of a text that are guessed at a time, 0 for none; drafter: what
    guesses them, None for prompt lookup; pace: when they are guessed, None for always.

    deterministic: a text's tokens and log-probabilities are the same bits whatever else is made, on a backend whose
    rows stand alone. Pieces of prompts are steps of their own, and steps of single tokens all have one size; a text
    that gave its pages back reads what it has made one token at a time, as it was made; and the engine shares no pages,
    since those of tokens that were made are not those of prompts. Texts whose tokens a device can choose have steps of
    their own, and so have those whose tokens the host must choose: who chooses depends on a text alone."""

    def __init__(
        self,
        engine: PagedEngine,
        most_guessed: int = 0,
        drafter: Drafts | None = None,
        pace: Pace | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.deterministic = deterministic
        self.engine, self.most_guessed, self.drafter = engine, most_guessed, drafter
        self.pace = pace if most_guessed else None
        self.waiting: FairQueue[Text] = FairQueue()
        self.running: dict[int, Text] = {}  # by sequence, in the order in which they began
        self.counts = Counts()
        self._batch: ContinuousBatch | None = None
        self.times: list[StepTime] = []
        self._blocked = False  # until a text ends
        self._events: list[Event] = []
        self._most_tokens = self.most_tokens
        self._host_guesses = bool(most_guessed) and not deterministic and not engine.home.asynchronous
        self._runs_ahead = engine.runs_ahead and (not deterministic or engine.home.asynchronous)

    @property
    def most_tokens(self) -> int:
        """Of a text with its prompt: what the context and all pages together hold."""
        sizes = self.engine.cache.sizes
        return min(self.engine.n_ctx, min(sizes.n_pages.get("full", 1 << 31), 1 << 31) * sizes.page)

    @property
    def is_idle(self) -> bool:
        return not self.running and not len(self.waiting)

    @property
    def pages(self) -> tuple[int, int]:
        """Those in use by texts, and all, of the kind of which most are in use."""
        kinds = self.engine.cache.pool.kinds.values()
        return max(((k.n - k.available, k.n) for k in kinds), key=lambda found: found[0] / found[1])

    # ---- coming and going ----

    def add(self, text: Text) -> None:
        """A text waits for its turn."""
        text.came = text.came or time.monotonic()
        text.tokens, text.how = list(text.prompt), self._on_device(text)
        self.waiting.put(text.key, text)

    def cancel(self, text: Text) -> None:
        """A text ends, whether it waits or is made; one that has ended stays so."""
        if text.state != ENDED:
            self._fail(text, Cancelled("whoever asked for this text has left"))

    def step(self) -> list[Event]:
        """Begins what can begin, reads on, and gives what has become of texts since the last call; `times` has then
        what the steps took. Raises nothing: where a step fails, so do the texts that it was for."""
        self.times = []
        try:
            self._admit()
            if self.running:
                n_busy = len(self.running)
                self._read()
                self.counts.steps += 1
                self.counts.busy_texts += n_busy
        except CacheFullError as error:
            self._make_room(error)
        except RankError as error:
            self._fail_all(error)
        except Exception as error:  # whatever it is, the texts of other steps go on
            log.exception("a step failed, and with it %d texts", len(self.running))
            self._fail_all(error)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """All texts end."""
        for text in [*self.waiting, *self.running.values()]:
            self.cancel(text)
        self._leave_batch()

    # ---- who is read ----

    def _admit(self) -> None:
        while not self._blocked and len(self.running) < self.engine.n_seq:
            text = self.waiting.take(lambda text: text.may_begin and not self._awaits(text))
            if text is None:
                return
            seq = next(i for i in range(self.engine.n_seq) if i not in self.running)
            try:
                self._begin(seq, text)
            except CacheFullError as error:
                if self.running:
                    self.waiting.put_first(text.key, text)
                    return
                self._fail(text, error)
            except SessionError as error:
                self._fail(text, error)

    def _awaits(self, text: Text) -> bool:
        """Another text is reading what this one can take over soon, and is spared much by."""
        engine = self.engine
        if text.awaited is not None:
            other, n = text.awaited
            if other.state == READING and engine.lengths[other.seq] < n:
                return True
            text.awaited = None
        if not engine.options.share or text.scored is not None:
            return False
        page = engine.cache.sizes.page
        for seq, other in self.running.items():
            alike = other.adapters == text.adapters and other.tokens[:page] == text.tokens[:page]
            if other.state != READING or not alike:
                continue
            n = min(n_alike(other.tokens, text.tokens), len(text.tokens) - 1) // page * page
            spared = n - engine.cache.pool.n_known(seq, text.tokens)
            if engine.lengths[seq] < n and spared >= LEAST_SPARED * len(text.tokens):
                text.awaited = other, n
                return True
        return False

    def _begin(self, seq: int, text: Text) -> None:
        """Raises CacheFullError where the pages that nobody has, and no text that has begun still needs for its prompt,
        are too few; then nothing has changed."""
        engine = self.engine
        if text.adapters is not None:
            engine.use_adapters(seq, text.adapters)
        promised = {s: len(self._unread(t)) for s, t in self.running.items()}
        with engine.alone():
            left = engine.checked({seq: text.tokens})[seq]
            if text.scored is None:
                left = engine.after_what_is_known({seq: left})[seq]
        try:
            engine.cache.pool.check_room(promised | {seq: len(left)}, windowed=False)
        except CacheFullError:
            engine.free(seq)
            raise
        if text.n_cached < 0:
            text.n_cached = len(text.tokens) - len(left)
            self.counts.prompt_tokens += len(text.tokens)
            self.counts.cached_tokens += text.n_cached
            if engine.options.share and text.scored is None:
                self.counts.looked_up_tokens += len(text.tokens)
        text.seq, text.state = seq, READING
        text.read = text.read or time.monotonic()
        self.running[seq] = text
        if self._batch is not None:
            self._join_batch(text)

    def _unread(self, text: Text) -> list[int]:
        """A running text's tokens that the cache does not hold."""
        return text.tokens[int(self.engine.lengths[text.seq]) :]

    # ---- reading ----

    def _on_device(self, text: Text) -> Drawn | None:
        """How a device chooses a text's tokens, None where it can't or gains nothing by it."""
        how = drawn(text.sampler, self.engine.n_ctx) if self._runs_ahead and text.scored is None else None
        return how if how is not None and (self.engine.home.asynchronous or how.is_plain) else None

    def _read(self) -> None:
        by_host = any(text.how is None for text in self.running.values())
        if by_host and not self.deterministic:
            self._leave_batch()
        if by_host:
            self._step_by_host()
        if (self.deterministic or not by_host) and any(text.how is not None for text in self.running.values()):
            self._step_batch()

    def _step_batch(self) -> None:
        """The tokens that a device has chosen next."""
        if self._batch is None:
            self._batch = ContinuousBatch(self.engine, self.pace, alone=self.deterministic)
            for text in self.running.values():
                self._join_batch(text)
        found = self._batch.step()
        self.times += self._batch.times
        self._batch.times.clear()
        for seq, tokens in found.items():
            text = self.running[seq]
            for token in tokens:
                if text.state != ENDED:
                    self._made(text, token)
        if self._batch is not None:
            self._count_guesses()
        while self._batch is not None and self._batch.failed:
            seq, error = self._batch.failed.popitem()
            if seq in self.running:
                self._fail(self.running[seq], error)

    def _join_batch(self, text: Text) -> None:
        assert self._batch is not None
        if text.how is None:
            if not self.deterministic:
                self._leave_batch()
            return
        room = self.most_tokens + 1 - len(text.tokens)
        left = room if text.most < 0 else min(room, text.most - text.n_made)
        text.guesser = self._guesser(text)
        unread = self._unread(text)
        n_made = min(len(unread), len(text.tokens) - len(text.prompt))
        self._batch.add(text.seq, unread, left, text.how, text.guesser, n_made)

    def _guesser(self, text: Text) -> Guesser | None:
        most = self.most_guessed if text.most_guessed is None else min(self.most_guessed, text.most_guessed)
        if not most:
            return None
        if self.drafter is None:
            return PromptLookup(text.tokens, most)
        return DraftedText(self.drafter, text.seq, text.tokens, most)

    def _leave_batch(self) -> None:
        """What the device has chosen and nobody was told is chosen again."""
        if self._batch is not None:
            self._count_guesses()
            self._batch.close()
            self._batch = None
            for text in self.running.values() if self._host_guesses else ():
                text.guesser = self._guesser(text)

    def _count_guesses(self) -> None:
        batch = self._batch
        assert batch is not None
        self.counts.guesses += batch.n_guesses
        self.counts.guessed_tokens += batch.n_guessed
        self.counts.right_tokens += batch.n_right
        batch.n_guesses = batch.n_guessed = batch.n_right = 0

    def _step_by_host(self) -> None:
        """All texts', or where steps tell nothing of others those whose tokens the host must choose: pieces of prompts,
        each by itself, and a token of each text that has read its own."""
        if not self.deterministic:
            self._read_or_guess(self._part())
            return
        engine, room = self.engine, self.engine.n_batch
        texts = {seq: text for seq, text in self.running.items() if text.how is None}
        for seq, text in texts.items():
            at = int(engine.lengths[seq])
            piece = text.prompt[at : (at // engine.n_batch + 1) * engine.n_batch]
            if 0 < len(piece) <= room:
                room -= len(piece)
                self._read_part({seq: np.array(piece, np.int32)}, engine.own_size(len(piece)))
        lengths = {seq: int(engine.lengths[seq]) for seq in texts if seq in self.running}
        singles = {
            seq: np.array(texts[seq].tokens[at : at + 1], np.int32)
            for seq, at in lengths.items()
            if at >= len(texts[seq].prompt)
        }
        if singles:
            self._read_part(singles, engine.own_size())

    def _read_or_guess(self, part: dict[int, Ids]) -> None:
        """A step, with guesses where texts have some and they pay."""
        if not self._host_guesses:
            self._read_part(part, None)
            return
        n_made, is_prompt = self.counts.made_tokens, any(len(ids) > 1 for ids in part.values())
        guessed = host_guesses.guesses_of(self.engine, self.running, part, self.pace)
        if guessed:
            self._read_guessed(part, guessed)
        else:
            self._read_part(part, None)
        if self.pace is not None:
            n_made = self.counts.made_tokens - n_made
            self.pace.told(len(part), n_made, guessed=bool(guessed), counts=not is_prompt)
            if not self.running:
                self.pace.rests()

    def _read_guessed(self, part: Mapping[int, Ids], guessed: Mapping[int, list[int]]) -> None:
        """A step of single tokens and guesses behind them, and its tokens."""
        engine, began = self.engine, time.perf_counter()
        try:
            rows = host_guesses.read(engine, part, guessed)
            took = time.perf_counter() - began
            self.times.append(StepTime(sum(map(len, rows.values())), took, took))
            for seq, ids in part.items():
                self._go_on(self.running[seq], int(ids[0]), guessed.get(seq, []), rows[seq])
        finally:  # nothing stays of guesses that were wrong
            engine.forget(part)

    def _go_on(self, text: Text, latest: int, guess: list[int], rows: Logits) -> None:
        """What the host chooses behind a text's latest token, and behind what is guessed to follow, as far as that is
        right."""
        guesser, n_right = text.guesser, 0
        for token, row, expected in zip([latest, *guess], rows, [*guess, -1]):
            host_guesses.took(self.engine, text.seq, token)
            chosen = self._choose(text, row)
            if chosen != expected:
                break
            n_right += 1
            if text.state == ENDED:
                break
        if guess and guesser is not None:
            guesser.told(len(guess), n_right)
            self.counts.guesses += 1
            self.counts.guessed_tokens += len(guess)
            self.counts.right_tokens += n_right

    def _choose(self, text: Text, row: Logits) -> int | None:
        """The host chooses a text's next token. None where none is left to choose: then the text has failed."""
        try:
            token = text.sampler.sample(row, text.tokens)
        except SessionError as error:
            self._fail(text, error)
            return None
        if text.guesser is not None:
            text.guesser.push(token)
        elif self._host_guesses:
            text.guesser = self._guesser(text)
            if text.guesser is not None:
                text.guesser.push(token)
        self._made(text, token)
        return token

    def _part(self) -> dict[int, Ids]:
        """What the next step reads: chunks of prompts, n_batch tokens in all, and the last tokens of the others."""
        part, room = {}, self.engine.n_batch
        for seq, text in self.running.items():
            left = self._unread(text)
            if len(left) > 1:
                left = left[: room if text.scored is None else min(room, SCORED)]
                room -= len(left)
            if left:
                part[seq] = np.array(left, np.int32)
        return part

    def _read_part(self, part: Mapping[int, Ids], size: StepSize | None) -> None:
        engine = self.engine
        every = any(self.running[seq].scored is not None for seq in part)
        if every and size is not None:
            size = size._replace(n_outputs=size.n_tokens)
        began = time.perf_counter()
        with engine.alone():
            rows = engine.step(part, every=every, size=size)
        took = time.perf_counter() - began
        self.times.append(StepTime(sum(map(len, part.values())), took, took))
        if every:
            rows = self._score(part, rows)
        for seq, row in zip(list(part), rows):
            text = self.running[seq]
            if engine.lengths[seq] == len(text.tokens):
                self._choose(text, row)

    def _score(self, part: Mapping[int, Ids], rows: Logits) -> Logits:
        """Tells texts their prompts' log-probabilities. rows: the logits after every token of a step; those after each
        text's last one."""
        ends = np.cumsum([len(ids) for ids in part.values()])
        for (seq, ids), end in zip(part.items(), ends):
            text = self.running[seq]
            if text.scored is None:
                continue
            at = int(self.engine.lengths[seq]) - end  # a row's place in the text, less its number
            known = min(int(self.engine.lengths[seq]), len(text.prompt) - 1)
            for i in range(len(text.scores), known):  # some are known where a text has begun anew
                if i - at >= end - len(ids):
                    text.scores.append(logprobs_of(rows[i - at], text.prompt[i + 1], text.scored))
        last: Logits = rows[ends - 1]
        return last

    def _made(self, text: Text, token: int) -> None:
        """A text's next token."""
        full = len(text.tokens) >= self._most_tokens
        text.tokens.append(token)
        text.state = GENERATING
        piece = text.pieces.add(token, text.sampler.logprobs, full=full)
        self.counts.made_tokens += 1
        text.last = time.monotonic()
        text.began = text.began or text.last
        self._events.append(Event(text, piece))
        if piece.finish:
            self._end(text)

    # ---- ends ----

    def _end(self, text: Text) -> None:
        self._give_back(text)
        text.state = ENDED
        self._blocked = False

    def _give_back(self, text: Text) -> None:
        """A running text's sequence is free; full pages stay in the tree."""
        if text.seq < 0:
            return
        if self._batch is not None and text.seq in self._batch.going:
            self._batch.end(text.seq)
        if text.guesser is not None:
            text.guesser.end()
            text.guesser = None
        self.engine.free(text.seq)
        del self.running[text.seq]
        text.seq = -1

    def _fail(self, text: Text, error: GraphrtError) -> None:
        self.waiting.remove(text.key, text)
        self._end(text)
        self._events.append(Event(text, None, error))

    def _fail_all(self, error: Exception) -> None:
        said = error if isinstance(error, GraphrtError) else SessionError(f"a step failed: {type(error).__name__}")
        self._leave_batch()
        for text in list(self.running.values()):
            self._fail(text, said)
        self.engine.reset()

    def _make_room(self, error: CacheFullError) -> None:
        """The text that began last waits again, as the first; a text that has all pages to itself ends."""
        self._leave_batch()
        text = list(self.running.values())[-1]
        if len(self.running) == 1:
            self._fail(text, error)
            return
        self._give_back(text)
        text.state = WAITING
        self.waiting.put_first(text.key, text)
        self._blocked = True
        self.counts.preemptions += 1


def n_alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n], np.int32) != np.asarray(b[:n], np.int32))
    return int(differ[0]) if len(differ) else n
