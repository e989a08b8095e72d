"""Text of files as it may be printed: what could steer a terminal or turn a line around is escaped, and all is cut.
Sizes and counts in words.

A file's keys, strings, tensor names and architecture names come from a stranger. Messages name a value with brief(), a
name that stands without quotes with brief_name(); errors escape and cut their whole text once more (errors.py). What a
model writes goes to a terminal through terminal_text().
"""

from __future__ import annotations

import re

#: Characters of a value or a name in a message, and of a whole message.
MOST, MOST_OF_MESSAGE = 80, 4000


def printable(text: str) -> str:
    """Control characters, bidirectional marks, all that is invisible and surrogates become escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


#: What a terminal may act on: control characters but newline and tab, marks that turn a line's direction around, other
#: line ends, surrogates. Joiners, marks and wide spaces stay: texts in many languages are made with them.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def terminal_text(text: str) -> str:
    """Text of a model, with its lines and tabs, as a terminal may get it: what could steer it becomes escapes."""
    text = text.replace("\r\n", "\n")
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cut(text: str, most: int = MOST) -> str:
    """The beginning and the end of a text of more than `most` characters."""
    tail = most // 6
    return text if len(text) <= most else text[: most - tail - 3] + "..." + text[-tail:]


def brief(value: object) -> str:
    """repr, in at most MOST characters."""
    # the repr of a gigabyte is not needed for its ends
    if isinstance(value, str) and len(value) > 2 * MOST:
        return cut(repr(value[:MOST] + value[-MOST:]))
    if isinstance(value, bytes) and len(value) > 2 * MOST:
        return cut(repr(value[:MOST] + value[-MOST:]))
    return cut(repr(value))


def brief_name(text: str, most: int = MOST) -> str:
    """A name that stands without quotes, in at most `most` characters."""
    ends = text if len(text) <= 2 * most else text[:most] + text[-most:]
    return cut(printable(ends), most)


def message(text: str) -> str:
    """The text of an error: its lines stay, each escaped, in at most MOST_OF_MESSAGE characters together."""
    if len(text) > 2 * MOST_OF_MESSAGE:
        text = text[:MOST_OF_MESSAGE] + "..." + text[-MOST_OF_MESSAGE:]
    return cut("\n".join(map(printable, text.split("\n"))), MOST_OF_MESSAGE)


# ---- numbers as people read them ----


def human_bytes(n: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def count_text(n: int, what: str) -> str:
    """`1 tile`, `2 tiles`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
