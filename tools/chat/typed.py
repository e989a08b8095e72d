"""What is typed: where a message of several lines ends, and what is a command.

A message goes on with the next line after a line that ends with a backslash, and between two times three double quotes.
"""

from __future__ import annotations

from typing import NamedTuple

QUOTES = '"""'


class Typed(NamedTuple):
    """A message, or a command: its name without the slash, "" for a message, and the text or its arguments."""

    command: str
    text: str


def unfinished(typed: str) -> bool:
    """Whether what was typed goes on with another line."""
    _, rest = _split(typed)
    if rest.startswith(QUOTES):
        return QUOTES not in rest[len(QUOTES) :]
    return rest.endswith("\\")


def understood(typed: str) -> Typed:
    """What finished lines say. A text that begins with a slash is a command; behind a space, or in quotes, it isn't."""
    command, rest = _split(typed)
    if rest.startswith(QUOTES):
        text, _, behind = rest[len(QUOTES) :].partition(QUOTES)
        return Typed(command, text.removeprefix("\n").removesuffix("\n") + behind.rstrip())
    return Typed(command, rest.replace("\\\n", "\n").removesuffix("\\").strip())


def _split(typed: str) -> tuple[str, str]:
    """The name of a command, "" where there is none, and the rest."""
    if not typed.startswith("/"):
        return "", typed.lstrip() if typed.lstrip().startswith(QUOTES) else typed
    name, *rest = typed[1:].split(maxsplit=1)[:2] if typed[1:].strip() else [""]
    return name or "?", rest[0] if rest else ""
