"""Calls of tools on their way to a model: the schema that makes it write one, and those of earlier turns. What it
writes is read by call_finder.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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
