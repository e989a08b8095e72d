"""A server over several ranks: the first one serves, and tells the others what it does next; they do the same with
their parts of the model, and say nothing.

Each rank has a scheduler of its own, and all make the same texts: what is told before each step is what has come since
the last one, as data. Logits have the same bits on all ranks and texts the same seeds, so that nothing else need be
told; that it is so is held against a digest of the first rank's texts, step by step.
"""

from __future__ import annotations

import contextlib
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
from graphrt.tools.serve.scheduler import ENDED, Event, Scheduler, Text


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
    scored: int | None


@dataclass(frozen=True)
class Turn:
    """What ranks do next. commands: texts that are added, and numbers of those that nobody wants any more; digest: of
    the texts as they are before; embedded: texts of which vectors are wanted, and no step is made."""

    commands: list[TextData | int]
    digest: int
    embedded: Sequence[Sequence[int]] | None = None


def digest_of(scheduler: Scheduler | None) -> int:
    """Of what is running: ranks whose texts differ have another one."""
    if scheduler is None:
        return 0
    running = [(seq, len(text.tokens), text.tokens[-1]) for seq, text in scheduler.running.items()]
    return zlib.crc32(repr((scheduler.counts.made_tokens, len(scheduler.waiting), running)).encode())


def lost(events: Sequence[Event]) -> RankError | None:
    """The error of a rank that is gone, if a step came to it."""
    return next((event.error for event in events if isinstance(event.error, RankError)), None)


class Leader:
    """What the first rank tells the others. All of it is for the thread that runs the scheduler."""

    def __init__(self, ranks: Ranks, scheduler: Scheduler | None) -> None:
        self.ranks, self.scheduler = ranks, scheduler
        self._numbers: WeakKeyDictionary[Text, int] = WeakKeyDictionary()
        self._next = 0

    def tell(self, commands: Sequence[tuple[Callable[[Text], None], Text]]) -> None:
        """Before the scheduler is given these, and makes a step. Raises RankError."""
        assert self.scheduler is not None or not commands
        said = [
            self._data(text) if self.scheduler is not None and command == self.scheduler.add else self._numbers[text]
            for command, text in commands
        ]
        self.ranks.told(Turn(said, digest_of(self.scheduler)))

    def embeds(self, embed: Callable[[Sequence[Sequence[int]]], list[Any]]) -> Callable[..., list[Any]]:
        """What gives vectors on all ranks. embed: does on this one."""

        def together(ids: Sequence[Sequence[int]]) -> list[Any]:
            self.ranks.told(Turn([], digest_of(self.scheduler), ids))
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
        return TextData(number, list(text.prompt), text.most, params, text.rules, text.key, leader, text.scored)


def follow(
    ranks: Ranks, model: Model, scheduler: Scheduler | None, embed: Callable[[Sequence[Sequence[int]]], list[Any]]
) -> None:
    """Does what the first rank does, until that ends. Raises RankError where it is gone, or makes other texts."""
    texts: dict[int, Text] = {}
    while True:
        turn: Turn | None = ranks.told(None)
        if turn is None:
            return
        ranks.check_alike(turn.digest, digest_of(scheduler), "make", "texts", "what was asked for")
        if turn.embedded is not None:
            with _refused():
                embed(turn.embedded)
            continue
        if scheduler is None:
            continue
        for command in turn.commands:
            if isinstance(command, TextData):
                texts[command.number] = text = _text(model, command, texts)
                scheduler.add(text)
            elif command in texts:  # it may have ended
                scheduler.cancel(texts[command])
        events = scheduler.step()
        gone = lost(events)
        if gone is not None:
            raise gone
        texts = {number: text for number, text in texts.items() if text.state != ENDED}


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
    return Text(data.prompt, data.most, sampler, pieces, data.key, leader, rules=data.rules, scored=data.scored)
