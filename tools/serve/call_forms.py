"""Calls of tools that are written in marks, not as JSON: between <tool_call> and </tool_call> some models name a
function and then each of its arguments. Qwen3-Coder writes

    <function=rain>
    <parameter=place>
    Oslo
    </parameter>
    </function>

and GLM

    rain
    <arg_key>place</arg_key>
    <arg_value>Oslo</arg_value>
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def marked_call(body: str, tools: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments of a call that is written so, None for what is none. tools: the schemas of their
    parameters, by their names."""
    body = body.strip()
    if body.startswith("<function="):
        name, _, rest = body.removeprefix("<function=").partition(">")
        pairs = _parameters(rest.partition("</function>")[0])
    else:
        name, mark, rest = body.partition("<arg_key>")
        pairs = _keys_and_values(mark + rest)
    name = name.strip()
    if name not in tools:
        return None
    kinds = tools[name].get("properties")
    return name, {key: _value(said, kinds.get(key) if isinstance(kinds, dict) else None) for key, said in pairs}


def _parameters(rest: str) -> Iterator[tuple[str, str]]:
    for part in rest.split("<parameter=")[1:]:
        key, _, said = part.partition(">")
        yield key.strip(), said.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")


def _keys_and_values(rest: str) -> Iterator[tuple[str, str]]:
    for part in rest.split("<arg_key>")[1:]:
        key, _, said = part.partition("</arg_key>")
        yield key.strip(), said.partition("<arg_value>")[2].partition("</arg_value>")[0]


def _value(said: str, schema: Any) -> Any:
    """What a text stands for: itself where the schema wants a text, else JSON, where it is some."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return said
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        return said
