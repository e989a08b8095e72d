"""Calls of tools that are written in marks, not as JSON: between <tool_call> and </tool_call> some models name a
function and then each of its arguments. Qwen3-Coder writes:

    <function=rain>
    <parameter=place>
    Oslo
    </parameter>
    </function>

and GLM:

    rain
    <arg_key>place</arg_key>
    <arg_value>Oslo</arg_value>

What such a value is, text or JSON, shows at its end: arguments are told one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from graphrt.tools.serve.call_parts import CallPart, Stage

_FUNCTION = "<function="


class _Marks(NamedTuple):
    """argument: what an argument begins with; key_end: what its key ends with; value, value_end: the marks around its
    value; ends: what a call ends with."""

    argument: str
    key_end: str
    value: str
    value_end: str
    ends: tuple[str, ...]


_QWEN = _Marks("<parameter=", ">", "", "</parameter>", ("</function>", "</tool_call>"))
_GLM = _Marks("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", ("</tool_call>",))


class MarkedCall:
    """Reads one call, from behind <tool_call> on. tools: the schemas of their parameters, by their names."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.stage, self.rest = Stage.OPEN, ""
        self._tools, self._kinds = tools, dict[str, Any]()
        self._marks, self._n_told = _GLM, 0
        self._step: Callable[[], list[CallPart] | None] = self._named

    def push(self, text: str) -> list[CallPart]:
        """More of it."""
        self.rest += text
        found: list[CallPart] = []
        while self.stage in (Stage.OPEN, Stage.CALL):
            parts = self._step()
            if parts is None:
                break
            found += parts
        return found

    def end(self) -> list[CallPart]:
        """Models leave out the last marks at times."""
        return self.push(self._marks.ends[-1])

    # ---- steps: None where more has to come ----

    def _named(self) -> list[CallPart] | None:
        begun = self.rest.lstrip()
        if begun.startswith(_FUNCTION):
            self._marks = _QWEN
            at, mark = _first(begun, (">", *_QWEN.ends))
            name, behind = begun[len(_FUNCTION) : at], at + 1
        elif _FUNCTION.startswith(begun):
            return None
        else:
            at, mark = _first(begun, (_GLM.argument, *_GLM.ends))
            name, behind = begun[:at], at
        if at < 0:
            return None
        name = name.strip()
        if name not in self._tools or (self._marks is _QWEN and mark != ">"):
            self.stage = Stage.NONE
            return []
        kinds = self._tools[name].get("properties")
        self._kinds = kinds if isinstance(kinds, dict) else {}
        self.rest, self.stage, self._step = begun[behind:], Stage.CALL, self._argument
        return [CallPart(name=name)]

    def _argument(self) -> list[CallPart] | None:
        """An argument, or the end."""
        marks = self._marks
        at, mark = _first(self.rest, (marks.argument, *marks.ends))
        if at < 0:
            return None
        behind = self.rest[at + len(mark) :]
        if mark != marks.argument:
            self.stage, self.rest = Stage.ENDED, behind
            return [CallPart(arguments="}" if self._n_told else "{}", whole=True)]
        key, has_key, said = behind.partition(marks.key_end)
        end, value_mark = _first(said, (marks.value_end, marks.argument, *marks.ends)) if has_key else (-1, "")
        if end < 0:
            return None
        self.rest = said[end + len(value_mark) :] if value_mark == marks.value_end else said[end:]
        value = (
            said[:end].partition(marks.value)[2] if marks.value else said[:end].removeprefix("\n").removesuffix("\n")
        )
        return [self._told(key.strip(), value)]

    def _told(self, key: str, said: str) -> CallPart:
        value = _value(said, self._kinds.get(key))
        before, self._n_told = ", " if self._n_told else "{", self._n_told + 1
        return CallPart(arguments=f"{before}{_json(key)}: {_json(value)}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of these marks stands in a text, and which one it is; -1 where there is none."""
    return min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=(-1, ""))


def _value(said: str, schema: Any) -> Any:
    """What a text stands for: itself where the schema wants a text, else JSON, where it is some."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return said
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        return said
