"""The loop of a chat: read, run a command or answer, again. It knows neither the terminal nor how an answer is made."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.errors import GraphrtError, RankError
from graphrt.printing import count_text
from graphrt.tools.chat import commands
from graphrt.tools.chat.conversation import STOPPED, Conversation
from graphrt.tools.chat.screen import Screen
from graphrt.tools.chat.typed import understood


def converse(conversation: Conversation, screen: Screen) -> int:
    """Until the input ends or a command leaves. Gives how many times something could not be done.

    Raises KeyboardInterrupt for Ctrl-C where nobody waits at the screen, RankError where a rank is lost.
    """
    n_failed = 0
    while True:
        try:
            if not _turn(conversation, screen, screen.read()):
                return n_failed
        except EOFError:
            return n_failed
        except RankError:
            raise
        except GraphrtError as error:
            n_failed += 1
            screen.warn(str(error))
        except KeyboardInterrupt:
            if not screen.waits:
                raise
            screen.say("(Ctrl-D or /exit leaves)")


def _turn(conversation: Conversation, screen: Screen, typed: str) -> bool:
    """Answers what was typed; whether the chat goes on."""
    name, text = understood(typed)
    if not name:
        if text:
            _answer(conversation, screen, conversation.ask(text))
        return True
    said = commands.run(conversation, name, text)
    if said.text:
        screen.say(said.text)
    if said.answer is not None:
        _answer(conversation, screen, said.answer)
    return not said.leaves


def _answer(conversation: Conversation, screen: Screen, pieces: Iterator[str]) -> None:
    screen.show(pieces, conversation.settings.markdown)
    answer, session = conversation.answers[-1], conversation.session
    n_ctx, longest = session.n_ctx, session.decoder.hp.n_ctx_train
    more = f"-c gives a longer one, up to {longest}" if n_ctx < longest else "this model goes no further"
    if answer.n_left:
        left = count_text(answer.n_left, "turn")
        screen.say(f"(the context of {n_ctx} tokens was full: the model no longer sees the oldest {left}; {more})")
    why = {
        STOPPED: "(stopped)" if answer.n_made else "(stopped; nothing was answered, and the question is not kept)",
        "length": f"(stopped after {count_text(answer.n_made, 'token')}: /set predict -1 takes that limit away)",
        "context": f"(stopped: the context of {n_ctx} tokens is full; {more})",
    }.get(answer.ended, "")
    if why:
        screen.say(why)
    screen.figures(answer, session.n_past, n_ctx)
    if answer.ended == STOPPED and not screen.waits:
        raise KeyboardInterrupt
