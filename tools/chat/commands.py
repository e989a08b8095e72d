"""The commands of a chat, by their names. Each gives what is to be said, and may give an answer to be streamed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphrt.errors import SessionError
from graphrt.printing import brief, count_text, human_bytes
from graphrt.tools.chat.conversation import Conversation
from graphrt.tools.chat.settings import SWITCH
from graphrt.tools.common import table_lines


@dataclass(frozen=True)
class Said:
    """What a command does: text to show, an answer to stream, or that the chat ends."""

    text: str = ""
    answer: Iterator[str] | None = None
    leaves: bool = False


@dataclass(frozen=True)
class Command:
    """usage: its arguments in words; what: one line for /help; run: with the conversation and the arguments."""

    usage: str
    what: str
    run: Callable[[Conversation, str], Said]


def run(conversation: Conversation, name: str, arguments: str) -> Said:
    """Runs a command by its name. Raises GraphrtError where it is unknown or can't be done."""
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean /{close[0]}?" if close else ""
        raise SessionError(
            f"a command must be one of {', '.join(f'/{known}' for known in COMMANDS)}, got {brief('/' + name)}{hint}\n"
            f"a message that begins with a slash is typed behind a space"
        )
    command = COMMANDS[name]
    if arguments and not command.usage:
        raise SessionError(f"/{name} takes no arguments, got {brief(arguments)}")
    return command.run(conversation, arguments)


def _help(conversation: Conversation, arguments: str) -> Said:
    rows = [(f"/{name} {command.usage}".rstrip(), command.what) for name, command in COMMANDS.items()]
    width = max(len(left) for left, _ in rows)
    lines = [f"{left:<{width}}  {what}" for left, what in rows]
    return Said("\n".join([*lines, "", " ".join(KEYS)]))


def _clear(conversation: Conversation, arguments: str) -> Said:
    n = len(conversation.turns)
    conversation.clear()
    return Said(f"forgot {count_text(n, 'turn')}")


def _undo(conversation: Conversation, arguments: str) -> Said:
    turn = conversation.undo()
    return Said(f"took back {brief(turn.question)}; {count_text(len(conversation.turns), 'turn')} left")


def _regenerate(conversation: Conversation, arguments: str) -> Said:
    return Said(answer=conversation.regenerate())


def _system(conversation: Conversation, arguments: str) -> Said:
    if not arguments:
        return Said(conversation.system or "no system message")
    conversation.system = None if arguments == "none" else arguments
    return Said("the system message is gone" if arguments == "none" else "the system message is set")


def _save(conversation: Conversation, arguments: str) -> Said:
    conversation.save(_file(arguments))
    return Said(f"wrote {count_text(len(conversation.turns), 'turn')} to {arguments}")


def _load(conversation: Conversation, arguments: str) -> Said:
    found = conversation.load(_file(arguments))
    mine = conversation.model_name
    other = "" if found.model == mine else f"; the answers in it are from {found.model}"
    return Said(f"read {count_text(len(found.turns), 'turn')} from {arguments}{other}")


def _file(arguments: str) -> str:
    if not arguments:
        raise SessionError("a file must be named, got none")
    return arguments


def _set(conversation: Conversation, arguments: str) -> Said:
    name, value = re.fullmatch(r"([^\s=]*)\s*=?\s*(.*?)\s*", arguments, re.DOTALL).groups()  # type: ignore[union-attr]
    if name and value:
        conversation.settings = conversation.settings.changed(name, value)
    shown = conversation.settings.values()
    if name:
        if name.replace("-", "_") not in shown:
            conversation.settings.changed(name, value)  # says what there is
        shown = {key: shown[key] for key in (name.replace("-", "_"),)}
    on = {switched: text for text, switched in SWITCH.items()}
    rows = [(key, on[value] if isinstance(value, bool) else str(value)) for key, value in shown.items()]
    return Said("\n".join(table_lines(("setting", "value"), rows)[1:]))


def _stats(conversation: Conversation, arguments: str) -> Said:
    answers, session = conversation.answers, conversation.session
    n_read, n_made = (sum(getattr(answer, name) for answer in answers) for name in ("n_read", "n_made"))
    read_s, made_s = (sum(getattr(answer, name) for answer in answers) for name in ("read_seconds", "made_seconds"))
    n_alone = sum(answer.n_alone for answer in answers)
    left = f", of which the model no longer sees {conversation.first}" if conversation.first else ""
    rows = [
        ("model", f"{conversation.model_name} on {', '.join(b.id for b in session.backends)}"),
        ("turns", f"{len(conversation.turns)}{left}"),
        ("cache", f"{session.n_past} of {session.n_ctx} tokens, {human_bytes(session.cache.nbytes)}"),
        ("read", f"{count_text(n_read, 'token')}, {_rate(n_read, read_s)}"),
        ("generated", f"{count_text(n_made, 'token')}, {_rate(n_alone, made_s)}"),
    ]
    return Said("\n".join(table_lines(("", ""), rows)[1:]))


def _rate(n: int, seconds: float) -> str:
    return f"{n / seconds:.1f} tokens/s" if n and seconds > 0 else "no rate yet"


def _exit(conversation: Conversation, arguments: str) -> Said:
    return Said(leaves=True)


COMMANDS = {
    "help": Command("", "this list", _help),
    "clear": Command("", "forget the conversation; the system message and the settings stay", _clear),
    "undo": Command("", "take back the last question and its answer", _undo),
    "regen": Command("", "answer the last question again", _regenerate),
    "system": Command("[TEXT]", "set the system message, none for no message; without TEXT show it", _system),
    "save": Command("FILE", "write the conversation and the settings as JSON", _save),
    "load": Command("FILE", "go on with a conversation that was saved", _load),
    "set": Command(
        "[NAME [VALUE]]", "show or change how tokens are drawn: /set temp 0.5, /set logit_bias 5-inf 7+1", _set
    ),
    "stats": Command("", "tokens in the cache, tokens read and generated, and how fast", _stats),
    "exit": Command("", "leave, as Ctrl-D does", _exit),
}
ALIASES = {"quit": "exit", "bye": "exit", "?": "help", "regenerate": "regen"}
KEYS = (
    "Ctrl-C stops an answer, and what came of it stays. A message of several lines: Alt-Enter begins a new line, so",
    'does Enter behind a backslash, and all that is typed between """ and """ is one message.',
)
