"""Digits and letters of regular expressions: as in JSON schemas' patterns and on most servers, \\d is 0 to 9 and \\w a
letter of ASCII, a digit or _. To llguidance they are those of all scripts, which a program that reads an answer seldom
expects."""

from __future__ import annotations

_RANGES = {"d": "0-9", "w": "A-Za-z0-9_"}


def ascii_classes(pattern: str) -> str:
    """The pattern with these classes written out."""
    found: list[str] = []
    depth = i = 0  # depth: of the brackets around a place
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            ranges = _RANGES.get(pattern[i + 1 : i + 2])
            found.append(pattern[i : i + 2] if ranges is None else ranges if depth else f"[{ranges}]")
            i += 2
            continue
        if char == "[":
            depth += 1
            size = 2 if pattern[i + 1 : i + 2] == "^" else 1
            size += pattern[i + size : i + size + 1] == "]"  # there it is a character of the class
            found.append(pattern[i : i + size])
            i += size
            continue
        depth -= char == "]" and depth > 0
        found.append(char)
        i += 1
    return "".join(found)
