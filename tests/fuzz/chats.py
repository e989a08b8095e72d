"""Saved chats: valid ones with their fields, values and bytes changed at random, and messages of Markdown and marks.

An input is the file's bytes. It must be read or refused in a sentence, and what its messages hold must neither steer
the terminal that it is rendered on nor fail to render.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from rich.console import Console
from support.screens import Emulated

from graphrt.errors import GraphrtError
from graphrt.tools.chat import saved
from graphrt.tools.chat.markdown import MarkdownStream
from graphrt.tools.chat.settings import Settings

NAME = "chats"
LONGEST = 4000  # characters of an error
VALUES = (None, True, 0, -1, 1.5, 1e308, 10**400, "", "user", "nan", "\x1b[2J", [], {}, [[]], {"role": "user"})
PIECES = (
    *("word ", "# ", "- ", "1. ", "> ", "```", "`", "**", "_", "|", "|---|\n", "    ", "\n", "\n\n", "<b>", "[a](b)"),
    *("![", "]", "&#27;", "&#x202e;", "\\", "~~", "\t", "é", "日本", "\x1b[2J", "\x9b", "\u202e", "\u2028", "\r"),
    *("\x00", "99999999. ", "* "),
)


def make(seed: int) -> bytes:
    """A saved chat of up to some 100 KB."""
    rng = random.Random(f"chats {seed}")
    roles = ["user", "assistant"] * rng.randrange(4)
    system = ["system"] * rng.randrange(2)
    messages = [{"role": role, "content": _text(rng)} for role in system + roles]
    value: Any = {"format": saved.FORMAT, "model": "m", "messages": messages, "settings": Settings().values()}
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        value = _changed(value, rng)
    data = bytearray(json.dumps(value).encode())
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.05 else data)


def attempt(data: bytes) -> str:
    """Reads it, and shows what it says."""
    try:
        found = saved.understood(data.decode("utf-8", "replace"))
        Settings().loaded(found.settings)
    except GraphrtError as error:
        message = str(error)
        assert len(message) <= LONGEST and message.replace("\n", "").isprintable(), f"unfit to print: {message!r:.2000}"
        return "refused"
    for turn in found.turns:
        for text in (turn.question, turn.answer):
            _show(text)
    return "shown" if found.turns else "read"


def _show(text: str) -> None:
    screen = Emulated(60, 10)  # it takes nothing that could steer it
    console = Console(file=screen, force_terminal=True, width=60, height=10, color_system=None)  # type: ignore[arg-type]
    with MarkdownStream(console) as stream:
        for start in range(0, len(text), 500):
            stream.push(text[start : start + 500])


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) * rng.choice((1, 1, 1, 2, 9)) for _ in range(rng.choice((0, 3, 30, 300))))


def _changed(value: Any, rng: random.Random) -> Any:
    """The same with one value in it replaced, left out, doubled or renamed."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        kind = rng.random()
        if kind < 0.7:
            value[key] = _changed(value[key], rng)
        elif kind < 0.8:
            del value[key]
        elif isinstance(value, list):
            value.append(copy.deepcopy(value[key]))
        else:
            value[rng.choice(("x", "role", "\x1b[2J", "k" * 9999))] = value[key]
        return value
    return copy.deepcopy(rng.choice(VALUES))
