"""A server over several ranks: the first one serves, and tells the others what it does next; they do the same with
their parts of the model, and say nothing.

Each rank has a scheduler of its own, and all make the same texts: what is told before each step is what has come since
the last one, as data, and the time, by which it is found whether guesses pay. Logits have the same bits on all ranks
and texts the same seeds; prompt lookup guesses by a text's own tokens, and a draft model's guesses are the first
rank's (models/ranks/drafts.py). So nothing else need be told; that it is so is held against a digest of the first
rank's texts, step by step.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from graphrt.errors import GraphrtError, RankError
from graphrt.models.generation import TextRules
from graphrt.models.model import Model
from graphrt.models.sampling_params import SamplerParams
from graphrt.ranks import Ranks
from graphrt.tools.ranks.turns import turns
from graphrt.tools.serve.events import ENDED, Event, Text
from graphrt.tools.serve.scheduler import Scheduler


class TextData(NamedTuple):
    """What a text is made of. number: which one it is; leader: the number of another one, -1 for none; the rest as Text
    has it. seed is set in params."""

    number: int
    prompt: list[int]
    most: int
    params: SamplerParams
    rules: TextRules
    key: str
    leader: int
    most_guessed: int | None
    adapters: tuple[float, ...] | None
    scored: int | None


@dataclass(frozen=True)
class Turn:
    """What ranks do next. commands: texts that are added, and numbers of those that nobody wants any more; digest: of
    the texts as they are before; began: by the first rank's clock; embedded: texts of which vectors are wanted, and no
    step is made."""

    commands: list[TextData | int]
    digest: int
    began: float = 0.0
    embedded: Sequence[Sequence[int]] | None = None


def digest_of(scheduler: Scheduler | None) -> int:
    """Of what is running: ranks whose texts differ have another one."""
    if scheduler is None:
        return 0
    running = [(seq, len(text.tokens), text.tokens[-1]) for seq, text in scheduler.running.items()]
    return zlib.crc32(repr((scheduler.counts, len(scheduler.waiting), running)).encode())


class TurnClock:
    """What a rank's scheduler takes for a clock: the time when the turn began, as the first rank has told it. Ranks
    that looked at clocks of their own would guess in different steps."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        self.began = 0.0
        if scheduler is not None and scheduler.pace is not None:
            scheduler.pace.clock = lambda: self.began


def lost(events: Sequence[Event]) -> RankError | None:
    """The error of a rank that is gone, if a step came to it."""
    return next((event.error for event in events if isinstance(event.error, RankError)), None)


class Leader:
    """What the first rank tells the others. All of it is for the thread that runs the scheduler."""

    def __init__(self, ranks: Ranks, scheduler: Scheduler | None) -> None:
        self.ranks, self.scheduler, self._clock = ranks, scheduler, TurnClock(scheduler)
        self._numbers: WeakKeyDictionary[Text, int] = WeakKeyDictionary()
        self._next = 0

    def tell(self, commands: Sequence[tuple[Callable[[Text], None], Text]]) -> None:
        """Before the scheduler is given these, and makes a step. Raises RankError."""
        assert self.scheduler is not None or not commands
        said = [
            self._data(text) if self.scheduler is not None and command == self.scheduler.add else self._numbers[text]
            for command, text in commands
        ]
        self._clock.began = time.perf_counter()
        self.ranks.told(Turn(said, digest_of(self.scheduler), self._clock.began))

    def embeds(self, embed: Callable[[Sequence[Sequence[int]]], list[Any]]) -> Callable[..., list[Any]]:
        """What gives vectors on all ranks. embed: does on this one."""

        def together(ids: Sequence[Sequence[int]]) -> list[Any]:
            self.ranks.told(Turn([], digest_of(self.scheduler), embedded=ids))
            return embed(ids)

        return together

    def end(self) -> None:
        """The others have nothing more to do."""
        with contextlib.suppress(RankError):
            self.ranks.told(None)

    def _data(self, text: Text) -> TextData:
        assert text.rules is not None
        number, self._next = self._next, self._next + 1
        self._numbers[text] = number
        leader = -1 if text.leader is None else self._numbers[text.leader]
        params = replace(text.sampler.params, seed=text.sampler.seed)
        return TextData(
            number, list(text.prompt), text.most, params, text.rules, text.key, leader, text.most_guessed,
            text.adapters, text.scored,
        )  # fmt: skip


def follow(
    ranks: Ranks, model: Model, scheduler: Scheduler | None, embed: Callable[[Sequence[Sequence[int]]], list[Any]]
) -> None:
    """Does what the first rank does, until that ends. Raises RankError where it is gone, or makes other texts."""
    texts: dict[int, Text] = {}
    clock = TurnClock(scheduler)
    for turn in turns(ranks, lambda: digest_of(scheduler), "make", "texts", "what was asked for"):
        clock.began = turn.began
        if turn.embedded is not None:
            with _refused():
                embed(turn.embedded)
        elif scheduler is not None:
            _step(model, scheduler, turn, texts)
    if scheduler is not None:
        scheduler.close()


def _step(model: Model, scheduler: Scheduler, turn: Turn, texts: dict[int, Text]) -> None:
    """Makes the same step as the first rank. texts: by their numbers, those that have not ended. Raises RankError."""
    for command in turn.commands:
        if isinstance(command, TextData):
            texts[command.number] = text = _text(model, command, texts)
            scheduler.add(text)
        elif command in texts:  # it may have ended
            scheduler.cancel(texts[command])
    gone = lost(scheduler.step())
    if gone is not None:
        raise gone
    for number in [number for number, text in texts.items() if text.state == ENDED]:
        del texts[number]


@contextlib.contextmanager
def _refused() -> Any:
    """What the model refuses, the first rank answers."""
    try:
        yield
    except RankError:
        raise
    except GraphrtError:
        return


def _text(model: Model, data: TextData, texts: dict[int, Text]) -> Text:
    sampler, pieces = model.new_text(data.params, data.rules)
    leader = texts.get(data.leader)  # one that has ended is waited for by nobody
    return Text(
        data.prompt, data.most, sampler, pieces, data.key, leader, data.most_guessed, data.adapters, data.rules,
        data.scored,
    )  # fmt: skip
