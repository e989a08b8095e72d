"""How tokens' biases and texts with a meaning are typed: as values of flags, and behind `/set` in a chat."""

from __future__ import annotations

import re
from collections.abc import Iterable

from graphrt.errors import SessionError
from graphrt.printing import brief

NONE = "none"
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\"}
_SHOWN = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}


def unescaped(text: str) -> str:
    """With \\n, \\r, \\t, \\", \\', \\\\ and \\xHH as what they stand for, as in llama.cpp; others stay."""
    return re.sub(
        r"\\(?:x([0-9a-fA-F]{2})|([nrt\"'\\]))", lambda m: chr(int(m[1], 16)) if m[1] else _ESCAPES[m[2]], text
    )


def bias(text: str) -> tuple[int, float]:
    """ "15043+1.5" as (15043, 1.5). Raises SessionError."""
    found = re.fullmatch(r"(\d{1,9})([+-](?:inf|\d*\.?\d+(?:e[+-]?\d{1,3})?))", text)
    if found is None or found[2] == "+inf":
        raise SessionError(f"a bias must be as 15043+1, 15043-1.5 or 15043-inf, got {brief(text)}")
    return int(found[1]), float(found[2])


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """Several with spaces between, "none" for none. Raises SessionError."""
    return () if text == NONE else tuple(bias(word) for word in text.split())


def shown_biases(pairs: Iterable[tuple[int, float]]) -> str:
    """What biases() reads."""
    return " ".join(f"{token}{value:+}" for token, value in pairs) or NONE


def texts(text: str) -> tuple[str, ...]:
    """Several texts with spaces between, in which \\x20 is a space; "none" for none."""
    return () if text == NONE else tuple(unescaped(word) for word in re.findall(r"[^ \t\r\n]+", text))


def shown_texts(values: Iterable[str]) -> str:
    """What texts() reads."""
    words = ["".join(_SHOWN.get(c) or (f"\\x{ord(c):02x}" if _is_hidden(c) else c) for c in text) for text in values]
    return " ".join(words).replace(NONE, r"\x6eone") if words == [NONE] else " ".join(words) or NONE


def _is_hidden(c: str) -> bool:
    """A space or a control character, which ends a word or shows as nothing."""
    return ord(c) < 256 and (c.isspace() or not c.isprintable())
