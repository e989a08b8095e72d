"""A JSON schema of which what can't be followed is left out, as llama-server does.

Schemas of tools come from many languages, with formats that nobody knows, sets (uniqueItems), conditions and the bounds
of 64-bit numbers. OpenAI has a word for those who want all of a schema or an error: "strict": true."""

from __future__ import annotations

from typing import Any

_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
#: What is no schema, however much it looks like one.
_VALUES = frozenset(("const", "enum", "default", "examples"))
#: Up to here all whole numbers are exact in JSON's usual form; llguidance has no patterns for much larger bounds.
_LARGEST = 1 << 53


def loose(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as llguidance follows it as far as it can."""
    try:
        found = _within_bounds(schema)
    except RecursionError:  # it is refused as too deep, where it is read
        return schema
    return {**found, "x-guidance": {"lenient": True}}


def _within_bounds(part: Any) -> Any:
    if isinstance(part, list):
        return [_within_bounds(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        name: value if name in _VALUES else _within_bounds(value)
        for name, value in part.items()
        if not (name in _BOUNDS and isinstance(value, int | float) and abs(value) > _LARGEST)
    }
