"""A conversation as a JSON file: {"format": "graphrt chat", "model", "messages", "settings"}.

messages are [{"role": "user", "content": "..."}, ...], maybe a system message, then questions and answers in turn. A
file may come from a stranger: it is read field by field.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrt import private_files
from graphrt.errors import GraphError, SessionError
from graphrt.printing import brief
from graphrt.tools.common import check_writable, not_writable, read_text
from graphrt.tools.inspect.checked_json import Checked, parsed, plain

FORMAT = "graphrt chat"
#: Messages of a file, and characters of each, that are taken.
MAX_MESSAGES, MAX_CONTENT = 20_000, 1 << 22


@dataclass(frozen=True)
class Turn:
    """What was asked and answered; an answer that was stopped is as far as it came."""

    question: str
    answer: str


@dataclass(frozen=True)
class Saved:
    """What a file holds. settings: fields that Settings.loaded() reads."""

    model: str
    system: str | None
    turns: Sequence[Turn]
    settings: Mapping[str, Checked]


def messages_of(system: str | None, turns: Sequence[Turn]) -> list[dict[str, str]]:
    """The messages as chat templates take them."""
    messages = [] if system is None else [_message("system", system)]
    for turn in turns:
        messages += [_message("user", turn.question), _message("assistant", turn.answer)]
    return messages


def write(path: str, model: str, system: str | None, turns: Sequence[Turn], settings: Mapping[str, Any]) -> None:
    """Writes a conversation; an older one of that name is replaced, another file is not. Raises SessionError."""
    check_writable(path)
    if os.path.exists(path) and not _is_chat(path):
        raise SessionError(f"a conversation replaces only a file that is one, {path!r} is another; give another name")
    value = {"format": FORMAT, "model": model, "messages": messages_of(system, turns), "settings": plain(settings)}
    try:
        private_files.write(Path(path), (json.dumps(value, indent=1) + "\n").encode())
    except OSError as error:
        raise not_writable(path, error.strerror) from error


def read(path: str) -> Saved:
    """Reads a conversation. Raises SessionError where the file can't be read, GraphError for what it holds."""
    return understood(read_text(path))


def understood(text: str) -> Saved:
    """The conversation that a file's text is. Raises GraphError."""
    fields = parsed(text, "a saved chat").fields("format", "model", "messages", "settings")
    fields["format"].one_of([FORMAT])
    messages = [item.fields("role", "content") for item in fields["messages"].items(MAX_MESSAGES)]
    system = None
    if messages and messages[0]["role"].value == "system":
        system = _text(messages.pop(0)["content"])
    for i, message in enumerate(messages):
        message["role"].one_of([("user", "assistant")[i % 2]])
    if len(messages) % 2:
        messages[-1]["role"].refuse("followed by the assistant's answer")
    texts = [_text(message["content"]) for message in messages]
    turns = [Turn(question, answer) for question, answer in zip(texts[::2], texts[1::2])]
    settings = fields["settings"]
    if not isinstance(settings.value, dict):
        settings.refuse("an object of settings")
    named = {name: Checked(value, f"{settings.path}.{brief(name)}") for name, value in settings.value.items()}
    return Saved(fields["model"].text(4000), system, turns, named)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _is_chat(path: str) -> bool:
    try:
        read(path)
    except (GraphError, SessionError):
        return False
    return True


def _text(content: Checked) -> str:
    """A message's text: any characters, but no halves of a pair, which no UTF-8 has."""
    text = content.value
    if not isinstance(text, str) or len(text) > MAX_CONTENT:
        content.refuse(f"a text of at most {MAX_CONTENT} characters")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        content.refuse("a text of whole characters")
    return str(text)
