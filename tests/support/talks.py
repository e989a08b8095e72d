"""What tests of `graphrt chat` share: a tiny model's conversation, a model that says what it is told, a screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from graphrt.models import Model, SamplerParams
from graphrt.models.chat import ChatTemplate
from graphrt.models.engine import SessionOptions
from graphrt.models.session import Session
from graphrt.tools.chat.conversation import Answer, Conversation
from graphrt.tools.chat.settings import Settings
from support.tiny import CHAT

GREEDY = SamplerParams(temp=0.0)
EOS = 2  # of tiny.py's SPM vocabulary
F32 = {"type_k": "f32", "type_v": "f32"}


def talk(
    model: Model, n_ctx: int = 160, predict: int = 5, chat: str = CHAT, n_batch: int = 512,
    session: Session | None = None, **how: Any,
) -> Conversation:  # fmt: skip
    """A new conversation with greedy answers of at most `predict` tokens, in a new session unless given."""
    session = session or model.session(SessionOptions(n_ctx=n_ctx, n_batch=n_batch, **F32))
    return Conversation(model, session, ChatTemplate(chat, "<s>", "</s>"), Settings(GREEDY, predict), **how)


def answer(conversation: Conversation, question: str) -> str:
    return "".join(conversation.ask(question))


def says(monkeypatch: pytest.MonkeyPatch, model: Model, *answers: str | Sequence[int]) -> None:
    """Makes the model say these, one after the other, each as the tokenizer spells it and with an end; ids without."""

    def spelled(said: str | Sequence[int]) -> list[int]:
        if not isinstance(said, str):
            return list(said)
        encoded = model.tokenizer.encode("\n" + said, add_bos=False)  # as behind the line break of the template
        return [*encoded[encoded.index(13) + 1 :], EOS]

    ids = iter([token for said in answers for token in spelled(said)])
    monkeypatch.setattr(Model, "next_token", lambda *args: next(ids))


@dataclass
class FakeScreen:
    """typed: what read() gives, an exception is raised; then the input ends. The rest: what the chat did."""

    typed: list[str | BaseException]
    waits: bool = True
    answers: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    shown: list[Answer] = field(default_factory=list)

    def read(self) -> str:
        if not self.typed:
            raise EOFError
        typed = self.typed.pop(0)
        if isinstance(typed, BaseException):
            raise typed
        return typed

    def show(self, pieces: Iterator[str], markdown: bool) -> None:
        self.answers.append("")
        for piece in pieces:
            self.answers[-1] += piece

    def figures(self, answer: Answer, n_past: int, n_ctx: int) -> None:
        self.shown.append(answer)

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)
