"""/openapi.json: the server described for programs, by the same models that bodies are checked by."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from graphrt import __version__
from graphrt.tools.serve.errors import ApiError

Endpoint = Callable[[Request], Awaitable[Response]]
_REF = "#/components/schemas/"
_NULLABLE = {"type": ["string", "null"]}
#: OpenAI's form of an error.
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"}, "param": _NULLABLE, "code": _NULLABLE,
            },
        }
    },
}  # fmt: skip
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "param"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}, "param": _NULLABLE},
        },
    },
}


class Served(NamedTuple):
    """What a path has. form: of the body; said: what it does; refused: makes an answer of an error."""

    method: str
    path: str
    endpoint: Endpoint
    said: str
    form: type[BaseModel] | None = None
    refused: Callable[[ApiError], Response] = ApiError.response


def description(served: Sequence[Served]) -> dict[str, Any]:
    """As OpenAPI 3.1 has it. Paths are those of Starlette."""
    forms = list(dict.fromkeys(each.form for each in served if each.form is not None))
    _, made = models_json_schema([(form, "validation") for form in forms], ref_template=_REF + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for each in served:
        path = re.sub(r":\w+}", "}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "graphrt serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**made.get("$defs", {}), "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(each: Served, path: str) -> dict[str, Any]:
    error = "AnthropicError" if each.refused == ApiError.anthropic_response else "Error"
    refused = {"description": "an error", "content": {"application/json": {"schema": {"$ref": _REF + error}}}}
    found: dict[str, Any] = {
        "summary": each.said,
        "responses": {"200": {"description": "what is asked for"}, "4XX": refused},
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if each.form is not None:
        content = {"application/json": {"schema": {"$ref": _REF + each.form.__name__}}}
        found["requestBody"] = {"required": True, "content": content}
    return found
