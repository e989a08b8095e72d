"""Calls of tools that are written as JSON: an object, or a list of objects, with "name" and "arguments" (Llama's say
"parameters").

They are read as they are made. Once an object's name is that of a tool and its arguments begin, it is a call, and the
arguments are told piece by piece as they were written. Arguments that come before the name, or that are no object, are
told at their end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container

from graphrt.tools.serve.call_parts import CallPart, Stage

_ARGUMENTS = ("arguments", "parameters")
#: What JSON may have outside of its texts, beside white space, letters and digits.
_PLAIN = frozenset("{}[],:+-.")


class _Value:
    """Finds where a JSON value ends. Brackets are counted, and their kinds not looked at. broken: it ends where
    something is no JSON."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped, self.broken = 0, False, False, False

    def end(self, text: str, at: int) -> tuple[int, bool]:
        """How far it goes in a text from there, and whether that is its end."""
        for i in range(at, len(text)):
            char = text[i]
            if self._quoted:
                if self._in_quotes(char):
                    return i + 1, True
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                if self._depth <= 1:  # its own, or what stands behind a number
                    return i + self._depth, True
                self._depth -= 1
            elif not self._depth and (char == "," or char.isspace()):
                return i, True
            elif not (char in _PLAIN or char.isalnum() or char.isspace()):
                self.broken = True
                return i, True
        return len(text), False

    def _in_quotes(self, char: str) -> bool:
        """Whether the value ends with this character of a text."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False
            return not self._depth
        return False


class JsonCalls:
    """Reads an object or a list. names: of the tools."""

    def __init__(self, names: Container[str]) -> None:
        self.stage, self.rest = Stage.OPEN, ""
        self._names, self._is_list = names, False
        self._step: Callable[[str, int], int] = self._outside
        self._parts: list[CallPart] = []
        self._begin()

    def _begin(self) -> None:
        """An object."""
        self._key, self._name, self._arguments = "", "", ""
        self._told = False  # its call has begun
        self._parted = True  # from what stands before, by a bracket, a comma or a colon
        self._value, self._held = _Value(), list[str]()

    def push(self, text: str) -> list[CallPart]:
        """More of it."""
        at = 0
        while at < len(text) and self.stage in (Stage.OPEN, Stage.CALL):
            at = self._step(text, at)
        self.rest = text[at:]
        found, self._parts = self._parts, []
        return found

    def end(self) -> list[CallPart]:
        """Nothing is made up for what is missing."""
        return []

    # ---- steps: each reads on in a text, and gives the place behind what it has read ----

    def _breaks(self, at: int) -> int:
        """What comes is no call, or no JSON."""
        self.stage = Stage.NONE if self.stage is Stage.OPEN else Stage.LOST
        return at

    def _outside(self, text: str, at: int) -> int:
        if text[at] in "{[":
            self._is_list = text[at] == "["
            self._step = self._between if self._is_list else self._inside
        elif not text[at].isspace():
            return self._breaks(at)
        return at + 1

    def _between(self, text: str, at: int) -> int:
        """Objects of a list."""
        if text[at] == "{":
            self._begin()
            self._step = self._inside
        elif text[at] == "]":
            self._end()
        elif text[at] != "," and not text[at].isspace():
            return self._breaks(at)
        return at + 1

    def _inside(self, text: str, at: int) -> int:
        """Keys of an object."""
        if text[at] == '"' and self._parted:
            self._value, self._held = _Value(), []
            self._step = self._in_key
            return at
        if text[at] == "}":
            return self._object_ends(at)
        if text[at] == ",":
            self._parted = True
        elif not text[at].isspace():
            return self._breaks(at)
        return at + 1

    def _in_key(self, text: str, at: int) -> int:
        end, ended = self._value.end(text, at)
        self._held.append(text[at:end])
        if ended:
            self._key, self._step, self._parted = _text("".join(self._held)), self._before_value, False
        return end

    def _before_value(self, text: str, at: int) -> int:
        if text[at] == ":" or text[at].isspace():
            self._parted = self._parted or text[at] == ":"
            return at + 1
        if not self._parted:
            return self._breaks(at)
        self._value, self._held = _Value(), []
        told = self._key in _ARGUMENTS and bool(self._name) and text[at] == "{" and not self._told
        if told:
            self._call()
        self._step = self._in_arguments if told else self._in_value
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        """That are told as they come."""
        end, ended = self._value.end(text, at)
        self._parts.append(CallPart(arguments=text[at:end], whole=ended and not self._value.broken))
        return self._behind(end, ended)

    def _in_value(self, text: str, at: int) -> int:
        end, ended = self._value.end(text, at)
        self._held.append(text[at:end])
        if ended and not self._value.broken and not self._takes("".join(self._held)):
            return self._breaks(end)
        return self._behind(end, ended)

    def _behind(self, end: int, ended: bool) -> int:
        """Behind a value, if that has ended there."""
        if self._value.broken:
            return self._breaks(end)
        if ended:
            self._step, self._parted = self._inside, False
        return end

    def _takes(self, value: str) -> bool:
        """A key's value; whether there may be a call with it."""
        if self._key == "name":
            self._name = _text(value)
            return self._name in self._names
        if self._key in _ARGUMENTS and not self._arguments and value != "null":
            self._arguments = _text(value) if value.startswith('"') else value
        return True

    def _object_ends(self, at: int) -> int:
        if not self._told:
            if not self._name:
                return self._breaks(at)
            self._call()
            self._parts.append(CallPart(arguments=self._arguments or "{}", whole=True))
        if self._is_list:
            self._step = self._between
        else:
            self._end()
        return at + 1

    def _call(self) -> None:
        self.stage, self._told = Stage.CALL, True
        self._parts.append(CallPart(name=self._name))

    def _end(self) -> None:
        self.stage = Stage.ENDED if self.stage is Stage.CALL else Stage.NONE


def _text(value: str) -> str:
    """The text that a JSON value is, "" for others and for what is none."""
    try:
        return json.loads(value) if value.startswith('"') else ""
    except ValueError:
        return ""
