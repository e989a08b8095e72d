"""A conversation with a model: questions and answers, and the session that holds their text. No terminal is needed.

Before each answer the whole conversation is rendered by the chat template, and its tokens are compared with those that
the session holds: only what differs is read, which in a growing conversation is the new question. Where a template
writes older turns otherwise than the model did, as those that leave thinking out, reading begins there. So an answer is
always the one that a new session would give, whatever was undone, loaded or stopped before.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from graphrt.errors import SessionError
from graphrt.models.chat import ChatTemplate
from graphrt.models.generation import Piece, TextRules
from graphrt.models.model import Model
from graphrt.models.sampling_params import SamplerParams
from graphrt.models.session import Session
from graphrt.tools.chat import saved
from graphrt.tools.chat.reading import Reader
from graphrt.tools.chat.saved import Turn, messages_of
from graphrt.tools.chat.settings import Settings

#: An answer that was stopped by Ctrl-C; what ended others is in Piece.finish.
STOPPED = "stopped"
#: Characters of a conversation that a template is given at most: what it makes may have 8 million.
MAX_RENDERED = 4 << 20


@dataclass
class Answer:
    """Figures of one answer. n_prompt: tokens of the conversation before it; n_read: those of them that were read, with
    those read again where the context was full; n_readings: how often something was read, once and each time that the
    context was full; n_made: tokens of the answer; n_left: turns that left the context for it; seconds: until the first
    token behind each reading, and of all other tokens."""

    n_prompt: int = 0
    n_read: int = 0
    n_readings: int = 0
    n_made: int = 0
    n_left: int = 0
    read_seconds: float = 0.0
    made_seconds: float = 0.0
    ended: str = STOPPED

    def add(self, seconds: float, reading: bool) -> None:
        """One more token. reading: the first behind tokens that were read for it."""
        self.n_made += 1
        if reading:
            self.n_readings += 1
            self.read_seconds += seconds
        else:
            self.made_seconds += seconds

    @property
    def read_rate(self) -> float:
        """Tokens/s of reading."""
        return self.n_read / self.read_seconds if self.read_seconds > 0 else 0.0

    @property
    def made_rate(self) -> float:
        """Tokens/s of those that nothing was read for; 0 where there are none."""
        return self.n_alone / self.made_seconds if self.made_seconds > 0 else 0.0

    @property
    def n_alone(self) -> int:
        """Tokens that nothing was read for: all but the first behind each reading."""
        return max(0, self.n_made - self.n_readings)


class Conversation:
    """Turns of one conversation, and the session in which they are read.

    template: the chat template; rules: fields of TextRules beside n, as stop texts; shifts: when the context
    is full the oldest turns leave it, else the answer ends there; reader: of the same model and session. turns: all of
    them; first: the oldest that the model still sees; answers: figures of all answers so far, undone ones included.
    """

    def __init__(
        self, model: Model, session: Session, template: ChatTemplate, settings: Settings = Settings(), *,
        system: str | None = None, rules: Mapping[str, Any] = MappingProxyType({}), shifts: bool = True,
        reader: Reader | None = None,
    ) -> None:  # fmt: skip
        self.model, self.session, self.template = model, session, template
        self.settings, self.system, self.rules, self.shifts = settings, system, rules, shifts
        self.reader = reader or Reader(model, session)
        self.turns: list[Turn] = []
        self.first = 0
        self.answers: list[Answer] = []

    @property
    def model_name(self) -> str:
        """The name of the model's file."""
        paths = self.model.file.paths
        return paths[0].name if paths else str(self.model.file)

    # ---- answers ----

    def ask(self, question: str) -> Iterator[str]:
        """The model's answer to a question, piece by piece; the turn is added when it ends, however it ends.

        A turn of which nothing was answered when it was stopped is not added. Raises SessionError for a question
        that is empty or does not fit the context, ChatTemplateError where the template refuses: then none is added.
        """
        if not question.strip():
            raise SessionError("a question must have some text, got none")
        answer, text = Answer(), ""
        self.answers.append(answer)
        try:
            with self.reader.interrupts.watched(), closing(self._made(question, answer)) as pieces:
                for piece in pieces:
                    text += piece.text
                    yield piece.text
        finally:
            if answer.n_made:
                self.turns.append(Turn(question, text))

    def regenerate(self) -> Iterator[str]:
        """Another answer to the last question, by other random numbers. Where it was stopped before its first token,
        the old one stays. Raises SessionError where nothing was asked yet."""
        if not self.turns:
            raise SessionError("there must be a question to answer again, there is none yet")
        old = self.turns.pop()
        n, self.first = len(self.turns), min(self.first, len(self.turns))
        try:
            yield from self.ask(old.question)
        finally:
            if len(self.turns) == n:
                self.turns.append(old)

    def undo(self) -> Turn:
        """Takes the last turn back and gives it. Raises SessionError where there is none."""
        if not self.turns:
            raise SessionError("there must be a turn to take back, there is none")
        turn = self.turns.pop()
        self.first = min(self.first, len(self.turns))
        return turn

    def clear(self) -> None:
        """Forgets all turns; the system message and the settings stay."""
        self.turns, self.first = [], 0

    # ---- files ----

    def save(self, path: str) -> None:
        """Writes all turns, also those that left the context, as saved.py has it. Raises SessionError."""
        saved.write(path, self.model_name, self.system, self.turns, self.settings.values())

    def load(self, path: str) -> saved.Saved:
        """Takes the conversation and the settings of a file, and gives what it read; nothing changes where it raises
        SessionError or GraphError."""
        found = saved.read(path)
        self.settings = self.settings.loaded(found.settings)
        self.system, self.turns, self.first = found.system, list(found.turns), 0
        return found

    # ---- from a question to tokens ----

    def _made(self, question: str, answer: Answer) -> Generator[Piece, None, None]:
        """The pieces of an answer. Where the context is full, turns leave it and the answer goes on."""
        begun, made = time.perf_counter(), list[int]()
        pieces = self.reader.begin(self._sampling(), TextRules(self.settings.predict, **self.rules))
        prompt = self._prompt(question, 0, answer)
        if prompt is None:
            raise SessionError(f"the context holds {self.session.n_ctx} tokens, this question has more; shorten it")
        answer.n_prompt = len(prompt)
        while prompt is not None:
            tokens, prompt, reading = [*prompt, *made], None, True
            with closing(self._behind(tokens, answer)) as chosen:
                for token in chosen:
                    made.append(token)
                    now = time.perf_counter()
                    answer.add(now - begun, reading)
                    begun, reading = now, False
                    full = self.session.n_past >= self.session.n_ctx
                    if full and self.shifts and not self.model.tokenizer.is_eog(token):
                        prompt = self._prompt(question, len(made), answer)
                    piece = pieces.add(token, full=full and prompt is None)
                    answer.ended = piece.finish or STOPPED
                    yield piece
                    if piece.finish:
                        return
                    if full:
                        break

    def _behind(self, tokens: Sequence[int], answer: Answer) -> Generator[int, None, None]:
        """The tokens that the model puts behind these, of which it reads those that the session does not hold."""
        n_before, most = answer.n_made, self.settings.predict
        n_read, found = self.reader.behind(tokens, most if most < 0 else most - n_before)
        with closing(found) as chosen:
            for token in chosen:
                if answer.n_made == n_before:
                    answer.n_read += n_read
                yield token

    def _sampling(self) -> SamplerParams:
        """The settings' samplers. A seed counts up with the answers: the same chat is the same again, and another
        answer to the same question is another one."""
        return self.settings.sampling.seeds(len(self.answers))[-1]

    def _prompt(self, question: str, n_made: int, answer: Answer) -> list[int] | None:
        """The tokens of the conversation, where n_made and one more fit the context behind them; else None.

        Where they don't, old turns leave: so many that those that stay take at most half of the room that the system
        message, the question and the answer leave them, so that it is a while until more must go. (llama.cpp drops half
        of the tokens behind the first ones; whole turns are what a chat template can write.)
        """
        n_ctx = self.session.n_ctx
        tokens = self._tokens(self.first, question, n_ctx - 1 - n_made)
        if tokens is not None:
            return tokens
        alone = self._tokens(len(self.turns), question, n_ctx - 1 - n_made)
        if alone is None:
            return None
        if not self.shifts:
            raise SessionError(
                f"the context holds {n_ctx} tokens, this conversation has more, and old turns are not to leave it; "
                f"/undo or /clear makes room"
            )
        fixed = len(alone) + n_made
        most = fixed + (n_ctx - fixed) // 2 - n_made
        places = range(self.first + 1, len(self.turns))
        first = self.first + 1 + bisect_left(places, True, key=lambda at: self._tokens(at, question, most) is not None)
        answer.n_left += first - self.first
        self.first = first
        return self._tokens(first, question, most)

    def _tokens(self, first: int, question: str, most: int) -> list[int] | None:
        """The tokens of the turns from `first` on and a question, None where they are more than `most`."""
        messages = [*messages_of(self.system, self.turns[first:]), {"role": "user", "content": question}]
        if most < 1 or sum(len(message["content"]) for message in messages) > MAX_RENDERED:
            return None
        try:
            return self.model.chat_tokens(self.template, messages, most)
        except SessionError:  # which is all that it refuses
            return None
