"""A conversation without a terminal: what is read, what stays, what fits, on a tiny model."""

from __future__ import annotations

import io
import itertools
import os
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.talks import EOS, FakeScreen, answer, says, talk
from support.tiny import CHAT, write_model

from graphrt.errors import ChatTemplateError, SessionError
from graphrt.models import Model, load
from graphrt.models.engine import AnyEngine
from graphrt.models.session import Session
from graphrt.tools.chat.conversation import STOPPED, Conversation
from graphrt.tools.chat.loop import converse
from graphrt.tools.chat.saved import Turn, messages_of
from graphrt.tools.chat.terminal import Terminal

#: Leaves thinking out of older answers, as templates of models that think do.
FORGETFUL = CHAT.replace("{{ m.content }}", "{{ m.content.split('!')[-1] }}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = write_model(tmp_path_factory.mktemp("conversation") / "spm.gguf", "llama", tokenizer="spm", chat=CHAT)
    return load(path, "cpu", exact=True)


@pytest.fixture(autouse=True)
def host_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests here put words into the model's mouth where the host chooses tokens."""
    monkeypatch.setattr(AnyEngine, "runs_ahead", False)


@pytest.fixture
def read_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that steps of sessions read from now on, in their order."""
    found: list[int] = []
    step = Session.step

    def counted(self: Session, part: Any, **how: Any) -> Any:
        found.extend(int(token) for token in np.asarray(part[0]))
        return step(self, part, **how)

    monkeypatch.setattr(Session, "step", counted)
    return found


END, LENGTH, FULL = "eog", "length", "context"


def fresh(model: Model, like: Conversation, question: str, n_ctx: int = 160) -> str:
    """The answer of a new session that is given the turns that the model of another conversation sees."""
    other = talk(model, n_ctx, like.settings.predict)
    other.system, other.turns = like.system, like.turns[like.first :]
    return answer(other, question)


def prompt_of(conversation: Conversation, question: str) -> list[int]:
    messages = [*messages_of(conversation.system, conversation.turns), {"role": "user", "content": question}]
    return conversation.model.chat_tokens(conversation.template, messages)


# ---- what is read ----


def test_only_what_is_new_is_read(model: Model, monkeypatch: pytest.MonkeyPatch, read_tokens: list[int]) -> None:
    says(monkeypatch, model, "the sea", "rain in the sea", "on and on")
    conversation = talk(model, predict=-1, n_ctx=0, system="he sees")
    for question, said in (("hello", "the sea"), ("again", "rain in the sea"), ("more", "on and on")):
        prompt, before = prompt_of(conversation, question), conversation.session.tokens
        read_tokens.clear()
        assert answer(conversation, question) == said
        figures = conversation.answers[-1]
        assert figures.n_prompt == len(prompt) and figures.ended == END
        # the end of the answer before is the template's too, but was never read; the answer's own end is not read yet
        n_known = max(0, len(before) - 1)
        if before:
            assert before[-1] == EOS and prompt[:n_known] == before[:n_known]
        made = conversation.session.tokens[len(prompt) :]
        assert read_tokens == [*prompt[n_known:], *made[:-1]]
        assert figures.n_read == len(prompt) - n_known and figures.n_made == len(made)


def test_what_a_template_rewrites_is_read_again(
    model: Model, monkeypatch: pytest.MonkeyPatch, read_tokens: list[int]
) -> None:
    says(monkeypatch, model, "i see!the sea", "rain")
    conversation = talk(model, chat=FORGETFUL, predict=20)
    assert answer(conversation, "hello") == "i see!the sea"
    held = conversation.session.tokens
    read_tokens.clear()
    answer(conversation, "again")
    prompt = conversation.session.tokens[: conversation.answers[-1].n_prompt]
    n_common = next(i for i, (a, b) in enumerate(zip(held, prompt)) if a != b)
    assert n_common >= conversation.answers[0].n_prompt, "all up to the answer stays"
    assert read_tokens[: len(prompt) - n_common] == prompt[n_common:]
    assert conversation.answers[-1].n_read == len(prompt) - n_common


def test_answers_are_those_of_a_new_session(model: Model) -> None:
    """Whatever was asked, taken back or stopped before."""
    conversation = talk(model)
    for i, question in enumerate(["hello", "the sea", "rain", "again", "on"]):
        wanted = fresh(model, conversation, question)
        assert answer(conversation, question) == wanted
        if i == 1:
            conversation.undo()
        if i == 2:
            conversation.system = "he sees the rain"
        if i == 3:
            pieces = conversation.ask("stopped")
            next(pieces)
            pieces.close()
            assert conversation.turns.pop().question == "stopped"
    assert [turn.question for turn in conversation.turns] == ["hello", "rain", "again", "on"]


def test_another_answer_is_drawn_by_other_numbers(model: Model) -> None:
    def answers() -> list[str]:
        conversation = talk(model)
        conversation.settings = conversation.settings.changed("temp", "3").changed("seed", "5")
        first = answer(conversation, "hello")
        again = "".join(conversation.regenerate())
        assert conversation.turns == [Turn("hello", again)]
        return [first, again]

    assert answers() == answers(), "a seed makes all of a chat the same"
    assert answers()[0] != answers()[1]


def test_a_limit_and_an_end(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = talk(model, predict=3)
    answer(conversation, "hello")
    assert conversation.answers[-1].ended == LENGTH and conversation.answers[-1].n_made == 3
    says(monkeypatch, model, "")
    assert answer(conversation, "hello") == "" and conversation.answers[-1].ended == END
    assert conversation.turns[-1] == Turn("hello", ""), "an empty answer is one"


def test_characters_that_span_tokens_come_whole(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, model, [*(3 + byte for byte in "é日".encode()), EOS], [3 + 0xE6, EOS])
    conversation = talk(model, predict=9)
    assert list(filter(None, conversation.ask("hello"))) == ["é", "日"]
    assert answer(conversation, "hello") == "\ufffd"


# ---- a full context ----


def test_the_oldest_turns_leave_a_full_context(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = talk(model, n_ctx=100, predict=4, system="he")
    n_left = 0
    for i in range(8):
        question = f"the sea {i}"
        texts = answer(conversation, question)
        turn = conversation.turns.pop()
        assert turn == Turn(question, texts)
        assert texts == fresh(model, conversation, question, 100), "the model sees what stays, and nothing else"
        conversation.turns.append(turn)
        figures = conversation.answers[-1]
        assert figures.n_prompt + figures.n_made <= 100 and figures.ended == LENGTH
        n_left += figures.n_left
        assert conversation.first == n_left
    assert n_left > 2 and len(conversation.turns) == 8, "all turns are kept for /save"
    leaving = [i for i, figures in enumerate(conversation.answers) if figures.n_left]
    assert min(b - a for a, b in zip(leaving, leaving[1:])) > 1, "half of them leave, so that not every turn must"


def test_turns_leave_while_an_answer_is_made(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = talk(model, n_ctx=160, predict=6)
    for i in range(3):
        answer(conversation, f"sea {i}")
    n_prompt = len(prompt_of(conversation, "go on"))
    assert n_prompt < 160 and conversation.first == 0
    made = [300 + i % 20 for i in range(60)]
    says(monkeypatch, model, [*made, EOS])
    conversation.settings = conversation.settings.changed("predict", "-1")
    text = answer(conversation, "go on")
    figures = conversation.answers[-1]
    assert (figures.ended, figures.n_made) == (END, 61) and n_prompt + 61 > 160
    assert text == b"".join(model.tokenizer.piece(token) for token in made).decode()
    assert conversation.first == figures.n_left > 0
    alone = talk(model, n_ctx=256)
    alone.turns = conversation.turns[conversation.first : -1]
    assert conversation.session.tokens == [*prompt_of(alone, "go on"), *made, EOS]


def test_rates_where_turns_leave_while_an_answer_is_made(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read again is reading, at the tokens/s of reading; a look at this clock takes a second."""
    conversation = talk(model, n_ctx=160, predict=6)
    for i in range(3):
        answer(conversation, f"sea {i}")
    seconds = itertools.count()
    monkeypatch.setattr("graphrt.tools.chat.conversation.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    says(monkeypatch, model, [*(300 + i % 20 for i in range(60)), EOS])
    conversation.settings = conversation.settings.changed("predict", "-1")
    answer(conversation, "go on")
    figures = conversation.answers[-1]
    assert figures.n_readings == 2
    assert figures.read_rate == figures.n_read / 2 and figures.made_rate == 1.0 and figures.n_alone == 59
    out = io.StringIO()
    terminal = Terminal.__new__(Terminal)  # without its line editor, which needs a terminal
    monkeypatch.setattr(terminal, "_console", Console(file=out, width=40), raising=False)
    terminal.figures(figures, 100, 160)
    assert f"read {figures.n_read} tokens in 2 parts, " in out.getvalue()
    terminal.say("the context of 512 tokens was full: the model no longer sees 7 turns")
    assert "\nthe context of 512 tokens was full: the \nmodel no longer sees" in out.getvalue(), "words stay whole"


def test_an_answer_that_fills_the_context_alone_ends(model: Model) -> None:
    conversation = talk(model, n_ctx=60, predict=-1)
    answer(conversation, "hello")
    figures = conversation.answers[-1]
    assert figures.ended == FULL and figures.n_prompt + figures.n_made == 61, "the last token comes of a full context"
    conversation.settings = conversation.settings.changed("predict", "5")
    assert answer(conversation, "again") and conversation.first == 1


def test_without_shifts_a_full_context_is_told(model: Model) -> None:
    conversation = talk(model, n_ctx=60, predict=-1, shifts=False)
    answer(conversation, "hello")
    assert conversation.answers[-1].ended == FULL
    with pytest.raises(SessionError, match="holds 60 tokens, this conversation has more.*\n?.*/undo or /clear"):
        answer(conversation, "again")
    assert len(conversation.turns) == 1
    conversation.clear()
    conversation.settings = conversation.settings.changed("predict", "5")
    assert answer(conversation, "again")


def test_a_question_longer_than_the_context(model: Model) -> None:
    conversation = talk(model, n_ctx=60)
    answer(conversation, "hello")
    for question in ("sea " * 60, "x" * 10_000_000):
        with pytest.raises(SessionError, match="context holds 60 tokens, this question has more"):
            answer(conversation, question)
    assert len(conversation.turns) == 1 and conversation.first == 0
    assert answer(conversation, "hello")


def test_a_refused_question_is_no_turn(model: Model) -> None:
    conversation = talk(model, chat="{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}" + CHAT)
    answer(conversation, "hello")
    with pytest.raises(ChatTemplateError, match="one only"):
        answer(conversation, "again")
    for empty in ("", " \n"):
        with pytest.raises(SessionError, match="must have some text"):
            answer(conversation, empty)
    with pytest.raises(ChatTemplateError):
        list(conversation.ask("again"))
    assert [turn.question for turn in conversation.turns] == ["hello"]
    assert "".join(conversation.regenerate()) == conversation.turns[0].answer


# ---- Ctrl-C ----


def raising(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: int) -> None:
    """Sends this process Ctrl-C in the at-th call of a method."""
    method, calls = getattr(owner, name), iter(range(1000))

    def interrupted(*args: Any, **how: Any) -> Any:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return method(*args, **how)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(("owner", "name", "n_made"), [(Model, "next_token", 3), (Session, "step", 3)])
def test_ctrl_c_within_a_step(model: Model, owner: type, name: str, n_made: int) -> None:
    conversation = talk(model, predict=30)
    whole = answer(conversation, "hello")
    conversation.undo()
    with pytest.MonkeyPatch.context() as patch:
        raising(patch, owner, name, n_made)
        text = answer(conversation, "hello")
    assert conversation.answers[-1].ended == STOPPED and conversation.answers[-1].n_made == n_made
    assert text and whole.startswith(text) and conversation.turns == [Turn("hello", text)]
    wanted = fresh(model, conversation, "again")
    assert answer(conversation, "again") == wanted, "the session holds what it did before"


def test_ctrl_c_while_a_prompt_is_read(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = talk(model)
    conversation.session.n_batch = 4
    with pytest.MonkeyPatch.context() as patch:
        raising(patch, Session, "step", 2)
        assert answer(conversation, "hello the sea") == ""
    assert conversation.turns == [] and conversation.answers[-1].ended == STOPPED
    assert answer(conversation, "hello") == fresh(model, conversation, "hello") or conversation.turns
    assert answer(talk(model), "hello") == conversation.turns[0].answer


def test_ctrl_c_between_steps(model: Model) -> None:
    conversation = talk(model, predict=30)
    pieces, found = conversation.ask("hello"), []
    for piece in pieces:
        found.append(piece)
        if len(found) == 3:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)  # who is impatient presses twice
            except KeyboardInterrupt:
                pytest.fail("what is done with a token must not be interrupted")
    assert conversation.answers[-1].ended == STOPPED and conversation.answers[-1].n_made == 3
    assert conversation.turns == [Turn("hello", "".join(found))]


def test_ctrl_c_is_as_before_behind_an_answer(model: Model) -> None:
    conversation = talk(model)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    try:
        answer(conversation, "hello")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_answer_that_was_stopped_at_once_leaves_the_first(model: Model) -> None:
    conversation = talk(model)
    first = answer(conversation, "hello")
    with pytest.MonkeyPatch.context() as patch:
        raising(patch, Model, "next_token", 0)
        assert "".join(conversation.regenerate()) == ""
    assert conversation.turns == [Turn("hello", first)]


def test_ctrl_c_at_the_prompt_and_in_a_pipe(model: Model) -> None:
    screen = FakeScreen(["hello", KeyboardInterrupt(), "again"])
    assert converse(talk(model), screen) == 0
    assert len(screen.answers) == 2 and screen.said[1] == "(Ctrl-D or /exit leaves)"
    with pytest.raises(KeyboardInterrupt):
        converse(talk(model), FakeScreen([KeyboardInterrupt()], waits=False))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        raising(patch, Model, "next_token", 2)
        converse(talk(model), FakeScreen(["hello", "again"], waits=False))


# ---- what a text may be ----


def test_penalties_see_the_whole_conversation(model: Model) -> None:
    def hot(conversation: Conversation) -> Conversation:
        conversation.settings = conversation.settings.changed("repeat_penalty", "4").changed("repeat_last_n", "-1")
        return conversation

    conversation = hot(talk(model))
    first = answer(conversation, "hello")
    other = hot(talk(model))
    other.turns = list(conversation.turns)
    second = answer(conversation, "again")
    assert second == answer(other, "again") and first != answer(talk(model), "hello")


def test_stop_texts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, model, "rain in the sea")
    conversation = talk(model, predict=-1, rules={"stop": ["the"]})
    assert answer(conversation, "hello") == "rain in " == conversation.turns[0].answer
    assert conversation.answers[-1].ended == "stop"
    says(monkeypatch, model, "rain")
    assert answer(conversation, "again") == "rain"
