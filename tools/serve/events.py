"""A text that a server makes, and what happens to it: what the scheduler gives the worker, and the worker the event
loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphrt.errors import GraphrtError
from graphrt.models.generation import Piece, Pieces, TextRules
from graphrt.models.guesses import Guesser
from graphrt.models.sampling import Sampler
from graphrt.models.sampling_device import Drawn
from graphrt.models.sampling_logprobs import Logprobs

#: Where a text stands.
WAITING, READING, GENERATING, ENDED = "waiting", "reading", "generating", "ended"


@dataclass(eq=False)
class Text:
    """A text to be made. prompt: its tokens, at least one; most: tokens to be made, -1 for any number; sampler, pieces:
    what chooses its tokens and makes text of them; key: who asked, for a fair order; leader: a text of the same
    prompt that reads it first; most_guessed: tokens of it that may be guessed at a time, None for what the server has;
    adapters: the scale of each of the model's, None of a model without any; rules: what sampler and pieces are made by,
    for other ranks; scored: the prompt's log-probabilities are told beside those of so many of the likeliest tokens,
    None: they are not told; n_choices: texts of this prompt that one request asks for.

    While it is made: tokens: prompt and made ones; n_cached: of the prompt, taken over from the cache, -1
    until it begins; seq: of the engine, -1 for none; how: how the device chooses its tokens, None where it can't;
    guesser: what guesses them; awaited: a text that reads what this one begins with too, and how many tokens that is;
    scores: of the prompt's tokens behind the first one, as far as they are known;
    came, read, began, last: when it came, when reading it began, when its first and its
    latest token were made, seconds by the clock, 0 while it has not happened."""

    prompt: Sequence[int]
    most: int
    sampler: Sampler
    pieces: Pieces
    key: str = ""
    leader: Text | None = None
    most_guessed: int | None = None
    adapters: tuple[float, ...] | None = None
    rules: TextRules | None = None
    scored: int | None = None
    n_choices: int = 1
    state: str = WAITING
    tokens: list[int] = field(default_factory=list)
    n_cached: int = -1
    seq: int = -1
    how: Drawn | None = None
    guesser: Guesser | None = None
    awaited: tuple[Text, int] | None = None
    scores: list[Logprobs] = field(default_factory=list)
    came: float = 0.0
    read: float = 0.0
    began: float = 0.0
    last: float = 0.0

    @property
    def n_made(self) -> int:
        return max(0, len(self.tokens) - len(self.prompt))

    @property
    def may_begin(self) -> bool:
        """Its leader, if it has one, has read the prompt."""
        return self.leader is None or self.leader.state in (GENERATING, ENDED)


class Event(NamedTuple):
    """What has become of a text: a piece, of which the last one has a `finish`, or an error, after which nothing
    comes."""

    text: Text
    piece: Piece | None
    error: GraphrtError | None = None


class Cancelled(GraphrtError):
    """Whoever asked for a text has left."""


class ServerEnds(GraphrtError):
    """Before a text has."""
