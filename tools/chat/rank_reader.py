"""A chat over several ranks: the first one talks and keeps the conversation, and tells the others which tokens to read
next. They do the same with their parts of the model, and know nothing of turns, commands or files.

An answer may end anywhere: at a stop text, at its most tokens, by Ctrl-C. So before each token, and behind each batch
of a prompt, the first rank says whether all go on: no rank stops at a place where another one does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TypeVar

from graphrt import progress
from graphrt.errors import GraphrtError, RankError
from graphrt.models.engine import READING
from graphrt.models.generation import Pieces, TextRules
from graphrt.models.model import Model
from graphrt.models.sampling_params import SamplerParams
from graphrt.models.session import Session
from graphrt.progress import Advance
from graphrt.ranks import Ranks
from graphrt.tools.chat.interrupts import Interrupts
from graphrt.tools.chat.reading import Reader
from graphrt.tools.ranks.turns import turns

T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """What ranks read next, as Reader.behind() has it. text: of a new text, whose seed is set, None while one goes on;
    digest: of the tokens that the first rank's session holds before."""

    tokens: Sequence[int]
    most: int
    text: tuple[SamplerParams, TextRules] | None
    digest: int


def digest_of(session: Session) -> int:
    """Ranks whose sessions hold other tokens have another one."""
    return zlib.crc32(repr((session.tokens, len(session.unread))).encode())


class Together(Interrupts):
    """Ctrl-C is the first rank's, and ends an answer on all ranks at the same place: never inside a step."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def between(self, steps: Iterator[T]) -> Generator[T, None, None]:
        while self._go_on():
            try:
                with _together(), self._batches():
                    step = next(steps)
            except StopIteration:
                return
            except KeyboardInterrupt:  # behind a batch of a prompt, on all ranks
                return
            try:
                yield step
            except GeneratorExit:  # the text has ended, which the others don't know
                self.ranks.told(False)
                raise

    def _go_on(self) -> bool:
        """The first rank says whether Ctrl-C was pressed there."""
        return bool(self.ranks.told(not self.stopped))

    @contextmanager
    def _batches(self) -> Iterator[None]:
        """Behind each batch of a prompt KeyboardInterrupt is raised on all ranks where Ctrl-C was pressed."""
        shown = progress.display()

        @contextmanager
        def asks(title: str, total: int, unit: str) -> Iterator[Advance]:
            with progress.shown_by(shown), progress.task(title, total, unit) as advance:
                yield advance if title != READING else lambda n=1: self._advance(advance, n)

        with progress.shown_by(asks):
            yield

    def _advance(self, advance: Advance, n: int) -> None:
        advance(n)
        if not self._go_on():
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True


@contextmanager
def _together() -> Iterator[None]:
    """What fails in a step on one rank, the others don't know: it ends the chat on all of them."""
    try:
        yield
    except RankError:
        raise
    except GraphrtError as error:
        raise RankError(f"all ranks must make the same steps, this one can't: {error}") from error


class LeadingReader(Reader):
    """The first rank's."""

    def __init__(self, model: Model, session: Session, ranks: Ranks) -> None:
        super().__init__(model, session, Together(ranks))
        self.ranks = ranks
        self._text: tuple[SamplerParams, TextRules] | None = None

    def begin(self, params: SamplerParams, rules: TextRules) -> Pieces:
        pieces = super().begin(params, rules)
        self._text = replace(params, seed=self.sampler.seed), rules
        return pieces

    def behind(self, tokens: Sequence[int], most: int) -> tuple[int, Generator[int, None, None]]:
        text, self._text = self._text, None
        self.ranks.told(Turn(tokens, most, text, digest_of(self.session)))
        return super().behind(tokens, most)


def follow(ranks: Ranks, model: Model, session: Session) -> None:
    """Does what the first rank does, until that ends the chat. Raises RankError where it is gone, or holds other
    tokens."""
    reader = Reader(model, session, Together(ranks))
    for turn in turns(ranks, lambda: digest_of(session), "hold", "tokens", "what was typed"):
        if turn.text is not None:
            reader.begin(*turn.text)
        _, tokens = reader.behind(turn.tokens, turn.most)
        for _ in tokens:
            pass
