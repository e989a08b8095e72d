"""A JSON schema whose objects have the properties that it names and no others.

JSON Schema lets an object have any others unless it says no. A model that may write any others writes them, a small one
without end, and nobody who names properties waits for more. llama.cpp and vLLM close objects too. What fits the closed
schema fits the one that was given.
"""

from __future__ import annotations

from typing import Any

#: Where these are, an object's properties may be named in several places: nothing is closed then.
_JOINING = frozenset(
    ("allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "extends")
)
#: The same beside properties.
_JOINED = frozenset(("anyOf", "oneOf", "$ref"))
#: An object that has one of these says itself what else it may have.
_SAYS = frozenset(("additionalProperties", "patternProperties", "dependentRequired", "dependencies"))
#: Keywords of schemas, of lists of them, and of mappings whose values are schemas.
_ONE = ("items", "additionalProperties", "contains", "additionalItems")
_LIST = ("anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "$defs", "definitions", "patternProperties")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its objects closed, or itself where that might leave nothing that fits it."""
    return schema if _joins(schema) else _closed(schema)


def _joins(part: Any) -> bool:
    if isinstance(part, dict):
        beside = "properties" in part and not _JOINED.isdisjoint(part)
        return beside or not _JOINING.isdisjoint(part) or any(map(_joins, part.values()))
    return isinstance(part, list) and any(map(_joins, part))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in _ONE:
        if isinstance(schema.get(name), dict):
            found[name] = _closed(schema[name])
    for name in _LIST:
        if isinstance(schema.get(name), list):
            found[name] = [_closed(each) for each in schema[name]]
    for name in _NAMED:
        if isinstance(schema.get(name), dict):
            found[name] = {key: _closed(each) for key, each in schema[name].items()}
    if _may_close(schema):
        found["additionalProperties"] = False
    return found


def _may_close(schema: dict[str, Any]) -> bool:
    """Whether an object names its properties, all that it needs among them."""
    names, required, least = schema.get("properties"), schema.get("required", []), schema.get("minProperties", 0)
    if not isinstance(names, dict) or not isinstance(required, list) or not isinstance(least, int | float):
        return False
    needed = all(isinstance(each, str) and each in names for each in required)
    return needed and least <= len(names) and _SAYS.isdisjoint(schema)
