"""What guesses a text's next tokens, which one step then reads together: how much of a text, for how long not, and
whether it pays at all.

Which tokens a text gets does not depend on guesses: what is chosen after each guessed token is looked at, and a guess
counts as far as it is what is chosen.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Protocol

from graphrt.errors import CacheFullError

if TYPE_CHECKING:
    from graphrt.models.paging.pool import PagePool

#: Guesses are left out for so many tokens when the latest so many were all wrong; then for twice as many, and so on up
#: to the most.
PATIENCE, PAUSE, LONGEST_PAUSE = 4, 16, 256
#: How many times longer a guess is than what was right of the last one. (Steps of the load "summary" of bench serve,
#: up to 15 tokens guessed, counted as a GPU's server queues them: 83 by 2, 74 by 3 and 73 by 4.)
GROWTH = 3
#: Steps that are looked at with guesses and as many without; those at the beginning of either that don't count; and
#: steps after that until both are looked at again.
LOOKED_AT, UNSETTLED, SETTLED = 32, 4, 512
#: A step's time against the median.
MUCH_LONGER = 10
#: Tokens of a step with guesses, unless there are more texts than that: steps of up to so many are prepared at start.
MOST_ROWS = 96


class Guesser(ABC):
    """Guesses of one text. most: tokens of a guess.

    A guess is GROWTH times as long as what was right of the last one, at least 2 tokens, so that little is read in
    vain.
    """

    #: What makes the guesses of several texts together, None where each makes its own.
    drafter: Drafts | None = None

    def __init__(self, most: int) -> None:
        self.most = most
        self._size = min(2, most)
        self._wrong, self._pause, self._left_out = 0, PAUSE, 0

    @property
    def size(self) -> int:
        """Tokens of the next guess."""
        return self._size

    @property
    def pauses(self) -> bool:
        """Nothing is guessed for now."""
        return self._left_out > 0

    @property
    def is_ready(self) -> bool:
        """There may be something to guess after the latest token, so that no step is to be queued before it."""
        return True

    def push(self, token: int) -> None:
        """The text's next token."""
        self._left_out = max(0, self._left_out - 1)

    @abstractmethod
    def guess(self, room: int) -> list[int]:
        """The tokens that may come next, at most `room`; none where there is nothing to guess by."""

    def told(self, guessed: int, right: int) -> None:
        """So many tokens of a guess were the text's own."""
        self._size = max(2, min(self.most, GROWTH * right)) if self.most > 1 else 1
        if right:
            self._wrong, self._pause = 0, PAUSE
            return
        self._wrong += 1  # however long it was: a long guess stands for long ones before it that were right
        if self._wrong >= PATIENCE:
            self._left_out, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._wrong = 0

    def end(self) -> None:  # noqa: B027, most hold nothing
        """The text has ended."""


class Drafts(Protocol):
    """Makes guesses of several texts in one go: at most so many tokens of each. leave: a text has ended."""

    def draft(self, asked: Any, /) -> dict[Any, list[int]]: ...
    def leave(self, text: Any, /) -> None: ...


def guesses(asked: Mapping[Guesser, int]) -> dict[Guesser, list[int]]:
    """The guesses of several texts, at most so many tokens each; those of one drafter are made together."""
    drafted: dict[Drafts, dict[Guesser, int]] = {}
    found: dict[Guesser, list[int]] = {}
    for guesser, room in asked.items():
        if guesser.drafter is None:
            found[guesser] = guesser.guess(room)
        else:
            drafted.setdefault(guesser.drafter, {})[guesser] = room
    for drafter, texts in drafted.items():
        found |= drafter.draft(texts)
    return found


def that_fit(pool: PagePool, singles: Iterable[int], made: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Of guesses by sequence those that have pages beside a token of each of `singles`, without others giving any up:
    the earlier ones first. Room is asked for guess by guess, which takes as long as there are sequences."""
    counts, found = dict.fromkeys(singles, 1), dict[int, list[int]]()
    for seq, guess in made.items():
        if not guess:
            continue
        try:
            pool.check_room(counts | {seq: 1 + len(guess)})
        except CacheFullError:
            continue
        counts[seq] += len(guess)
        found[seq] = guess
    return found


class Pace:
    """Whether guesses pay, by how many tokens steps gave in which time with guesses and without: both are looked at,
    and the faster way is kept for a while. A step in which nothing was guessed is one without, so that texts of which
    there is nothing to guess say nothing against guesses. For each load by itself, numbers of texts in powers of two,
    since guesses cost more the fuller steps are. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._loads: dict[int, _Load] = {}
        self._last: float | None = None

    def guesses(self, n_texts: int) -> bool:
        """Whether the next step may guess."""
        return self._load(n_texts).guesses

    def told(self, n_texts: int, n_tokens: int, *, guessed: bool, counts: bool) -> None:
        """A step has given so many tokens. guessed: it read guesses; counts: it read no prompt, so that its time says
        something."""
        now = self.clock()
        if counts and self._last is not None:
            self._load(n_texts).step(n_tokens, now - self._last, guessed)
        self._last = now if counts else None

    def rests(self) -> None:
        """Nothing goes on: the time until the next step is nobody's."""
        self._last = None

    def _load(self, n_texts: int) -> _Load:
        return self._loads.setdefault(n_texts.bit_length(), _Load())


class _Load:
    """The ways of one load. guesses: whether the next step may guess."""

    def __init__(self) -> None:
        self.guesses = True
        self._settled = 0
        self._seen: dict[bool, list[tuple[int, float]]] = {True: [], False: []}

    def step(self, n_tokens: int, seconds: float, guessed: bool) -> None:
        if self._settled:
            self._settled -= 1
            if not self._settled:
                self.__init__()  # type: ignore[misc]
            return
        seen, enough = self._seen[guessed], UNSETTLED + LOOKED_AT
        if len(seen) < enough:
            seen.append((n_tokens, seconds))
        self.guesses = len(self._seen[True]) < enough
        if not self.guesses and len(self._seen[False]) == enough:
            self.guesses, self._settled = self._speed(True) > self._speed(False), SETTLED

    def _speed(self, guesses: bool) -> float:
        """Tokens a second. A step that took MUCH_LONGER than most counts as that: other work lay before it."""
        seen = self._seen[guesses][UNSETTLED:]
        longest = MUCH_LONGER * median(seconds for _, seconds in seen)
        return fmean(n for n, _ in seen) / max(fmean(min(seconds, longest) for _, seconds in seen), 1e-9)
