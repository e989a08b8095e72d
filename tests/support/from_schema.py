"""Values of JSON schemas, and values that are a little wrong: what a fuzzer of an API sends."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

#: What may stand where something else should.
WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    2**40,
    1.5,
    1e308,
    "",
    "x" * 300,
    "\u0000\ud83d\ude00",
    [],
    {},
    [[]],
    {"a": None},
]
_TEXTS = ["hello", "the sea", "", " ", "a" * 50, "{}", "\u00e9\u4e2d", "<tool_call>"]


class Maker:
    """schemas: those that references name; draws: what chooses. Values are a few levels deep."""

    def __init__(self, schemas: Mapping[str, Any], draws: random.Random) -> None:
        self.schemas, self.draws = schemas, draws

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """One that the schema lets through, as far as it says so."""
        draws = self.draws
        if "$ref" in schema:
            return self.value(self.schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self.value(draws.choice(schema["anyOf"]), depth)
        if "enum" in schema or "const" in schema:
            return draws.choice(schema.get("enum", [schema.get("const")]))
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            least = schema.get("minItems", 0)
            most = min(schema.get("maxItems", 3), least + 2)
            items = schema.get("items", {"type": "string"})
            return [self.value(items, depth + 1) for _ in range(draws.randint(least, most) if depth < 6 else least)]
        if kind == "integer":
            return draws.randint(int(schema.get("minimum", -2)), int(min(schema.get("maximum", 6), 6)))
        if kind == "number":
            return draws.choice([0.0, 0.5, 1.0, draws.uniform(schema.get("minimum", -2), 2)])
        return {"boolean": draws.random() < 0.5, "null": None}.get(str(kind), draws.choice(_TEXTS))

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        rare = 0.15 if depth < 4 else 0.0
        found = {
            name: self.value(of, depth + 1)
            for name, of in schema.get("properties", {}).items()
            if name in required or self.draws.random() < rare
        }
        return found

    def spoiled(self, value: Any) -> Any:
        """The same with one part of it wrong, missing or too much."""
        draws = self.draws
        if isinstance(value, dict) and value and draws.random() < 0.8:
            name = draws.choice(list(value))
            if draws.random() < 0.2:
                return {other: each for other, each in value.items() if other != name}
            return value | {name: self.spoiled(value[name])}
        if isinstance(value, list) and value and draws.random() < 0.8:
            place = draws.randrange(len(value))
            return [*value[:place], self.spoiled(value[place]), *value[place + 1 :]]
        return draws.choice(WRONG)
