"""Calls of tools: the schema that makes a model write one, and calls found in what it has written.

Models write calls as their templates taught them: <tool_call>{"name", "arguments"}</tool_call> (Qwen, Hermes), or a
JSON object or list of such and nothing else (Llama, whose objects say "parameters", and Mistral). Between the marks
there may be marks again (call_forms.py).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from graphrt.tools.serve.call_forms import marked_call
from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.loose_schema import loose
from graphrt.tools.serve.schemas import Tool, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
#: What a tool takes that tells of no parameters.
_NONE = {"type": "object", "additionalProperties": False}


def schema_of(tools: Sequence[Tool], name: str | None, *, several: bool = False) -> dict[str, Any] | None:
    """What a text must be that is a call of the tool of that name, "" for any; None where it need not be one. several:
    or a list of calls. Of tools that aren't strict what can't be followed is left out."""
    if name is None:
        return None
    wanted = [tool.function for tool in tools if name in ("", tool.function.name)]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each.name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, each in enumerate(wanted)
    ]
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    whole = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]} if several else one
    # a tool's own references begin at its own schema
    forms = {f"{i}": _moved(each.parameters or _NONE, f"#/$defs/{i}") for i, each in enumerate(wanted)}
    found = {**whole, "$defs": forms}
    return found if all(each.strict for each in wanted) else loose(found)


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references hold where it has become a part of another one. Raises ApiError."""
    try:
        if isinstance(schema, dict):
            return {
                key: place + value[1:]
                if key == "$ref" and isinstance(value, str) and value.startswith("#")
                else _moved(value, place)
                for key, value in schema.items()
            }
        return [_moved(value, place) for value in schema] if isinstance(schema, list) else schema
    except RecursionError:
        raise ApiError("a tool's parameters are nested too deeply; make them flatter", param="tools") from None


def plain(call: ToolCall, message: int, index: int) -> dict[str, Any]:
    """A call of an earlier turn as templates know them. message, index: its place. Raises ApiError."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        place = f"messages[{message}].tool_calls[{index}].function.arguments"
        raise ApiError("a call's arguments must be JSON", param=place) from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


class CallFinder:
    """Tells calls from text in what a model writes. names: of the tools that there are; where there are none, all is
    text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.function.name: tool.function.parameters or {} for tool in tools}
        self._held = ""
        self._begun = False  # some text was given

    def push(self, text: str) -> str:
        """More of it; what is text for certain."""
        if not self._tools:
            return text
        self._held += text
        if not self._begun and (not self._held.strip() or self._held.lstrip()[0] in "{["):
            return ""
        at = self._held.find(_OPEN)
        if at < 0:
            at = len(self._held) - overlap(self._held, _OPEN)
        shown, self._held = self._held[:at], self._held[at:]
        self._begun = self._begun or bool(shown)
        return shown

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest: text, and the calls in OpenAI's form. What is no call of a tool that there is stays text."""
        held, self._held = self._held, ""
        if not self._tools:
            return held, []
        if _OPEN in held:
            bodies = [part.partition(_CLOSE)[0] for part in held.split(_OPEN)[1:]]
            found = [call for body in bodies for call in self._calls(body) or self._marked(body)]
        else:
            found = self._calls(held)
        return ("", found) if found else (held, [])

    def _calls(self, body: str) -> list[dict[str, Any]]:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return []
        found = []
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict) or each.get("name") not in self._tools:
                return []
            arguments = each.get("arguments", each.get("parameters", {}))
            said = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            found.append(self.call(each["name"], said))
        return found

    def _marked(self, body: str) -> list[dict[str, Any]]:
        found = marked_call(body, self._tools)
        return [] if found is None else [self.call(found[0], json.dumps(found[1], ensure_ascii=False))]

    @staticmethod
    def call(name: str, arguments: str) -> dict[str, Any]:
        """A call in OpenAI's form."""
        function = {"name": name, "arguments": arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
