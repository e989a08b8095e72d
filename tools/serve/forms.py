"""The form that a request asks for, whatever it calls it: OpenAI's response_format, llama-server's grammar and
json_schema, vLLM's guided_json and structured_outputs, SGLang's regex and ebnf."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.loose_schema import loose
from graphrt.tools.serve.schemas import Generating, ResponseFormat

_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/")
_OBJECT = {"type": "object"}


class Form(NamedTuple):
    """What a text must be; the field that says so. One of the others is given, or none for a free text."""

    field: str | None = None
    grammar: str | None = None
    schema: dict[str, Any] | None = None
    regex: str | None = None


def form_of(request: Generating) -> Form:
    """Raises ApiError for several, and for what is no schema."""
    found = list(_forms(request))
    if len(found) > 1:
        raise ApiError(
            f"a text may have one form, got several: {', '.join(form.field or '' for form in found)}; give one of them",
            param=found[0].field,
        )
    return found[0] if found else Form()


def _forms(request: Generating) -> Iterator[Form]:
    format_ = request.response_format
    if format_ is not None and format_.type == "regex":
        if not isinstance(format_.value, str):
            raise ApiError("a response_format of regex must have it as value, a text", param="response_format.value")
        yield Form("response_format", regex=format_.value)
    elif format_ is not None and format_.type != "text":
        yield Form("response_format", schema=_of_format(format_))
    if request.json_schema is not None:
        yield Form("json_schema", schema=_schema(request.json_schema, "json_schema"))
    for name in ("grammar", "guided_grammar", "ebnf"):
        if getattr(request, name) is not None:
            yield Form(name, grammar=getattr(request, name))
    for name in ("regex", "guided_regex"):
        if getattr(request, name) is not None:
            yield Form(name, regex=getattr(request, name))
    if request.guided_json is not None:
        yield Form("guided_json", schema=_schema(request.guided_json, "guided_json"))
    if request.guided_choice is not None:
        yield Form("guided_choice", regex=one_of(request.guided_choice))
    wanted = request.structured_outputs
    if wanted is None:
        return
    if wanted.json_ is not None:
        place = "structured_outputs.json"
        yield Form(place, schema=_schema(wanted.json_, place))
    if wanted.json_object:
        yield Form("structured_outputs.json_object", schema=_OBJECT)
    if wanted.regex is not None:
        yield Form("structured_outputs.regex", regex=wanted.regex)
    if wanted.grammar is not None:
        yield Form("structured_outputs.grammar", grammar=wanted.grammar)
    if wanted.choice is not None:
        yield Form("structured_outputs.choice", regex=one_of(wanted.choice))


def _of_format(given: ResponseFormat) -> dict[str, Any]:
    value = None if given.value is None else _schema(given.value, "response_format.value")
    if given.type in ("json_object", "json"):
        return loose(given.schema_) if given.schema_ else value or _OBJECT
    if given.json_schema is None and value is not None:
        inner = value.get("schema")  # of a name beside it, as in OpenAI's json_schema
        return loose(inner) if isinstance(inner, dict) else value
    schema = given.json_schema.schema_ if given.json_schema is not None else None
    if schema is None:
        raise ApiError("a response_format of json_schema must have a schema, got none; give one",
                       param="response_format.json_schema.schema")  # fmt: skip
    return schema if given.json_schema is not None and given.json_schema.strict else loose(schema)


def _schema(given: str | dict[str, Any], place: str) -> dict[str, Any]:
    """A schema that may be given as a text. Raises ApiError."""
    if isinstance(given, dict):
        return loose(given)
    try:
        read = json.loads(given)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise ApiError(f"{place} must be a JSON schema, or its text, got a text that is no JSON object", param=place)
    return loose(read)


def one_of(texts: Sequence[str]) -> str:
    """The regular expression of these texts and no other."""
    return "|".join("".join(f"\\{char}" if char in _SPECIAL else char for char in text) for text in texts)
