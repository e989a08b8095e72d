"""Errors as OpenAI's API has them: {"error": {"message", "type", "param", "code"}}, with the field that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from graphrt.errors import GraphrtError, RankError
from graphrt.printing import brief
from graphrt.tools.serve.events import Cancelled, ServerEnds

#: The status of a request whose client has left, as other servers log it.
LEFT = 499
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 503: "overloaded_error"}


class ApiError(Exception):
    """A request that is refused. param: the field that is wrong; headers: of the answer."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.headers = message, status, param, code, headers

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))

    def anthropic_body(self) -> dict[str, Any]:
        """The same as Anthropic's API has it, and the field."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message, "param": self.param}}

    def anthropic_response(self) -> JSONResponse:
        return JSONResponse(self.anthropic_body(), self.status, dict(self.headers or {}))


def of_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, by its place in it."""
    first = _most_telling(error.errors(include_url=False, include_context=False))
    if first["type"] == "json_invalid":
        return ApiError(f"a body must be JSON: {first['msg']}; send a JSON object", code="invalid_json")
    param = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        said = f"a request has no field {param!r} here; leave it out"
    elif first["type"] == "missing":
        said = f"a request must have the field {param!r}, this one has it not; give it"
    else:
        said = f"{param or 'a body'}: {first['msg'].removeprefix('Value error, ')}, got {brief(first['input'])}"
    return ApiError(said, param=param or None, code=first["type"])


def _most_telling(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first error; of a field that may be of several types one that says more than that it isn't of the first."""
    first = errors[0]
    alike = (each for each in errors if each["loc"][:1] == first["loc"][:1]) if first["type"].endswith("_type") else ()
    return next((each for each in alike if not each["type"].endswith("_type")), first)


def _place(loc: Iterable[int | str]) -> str:
    """messages[0].content of ("messages", 0, "content"); names of alternatives, which pydantic adds, are left out."""
    found = ""
    for part in loc:
        if isinstance(part, int):
            found += f"[{part}]"
        elif part.isidentifier() and part[:1].islower() and part not in ("str", "int", "float", "bool", "list", "dict"):
            found += f".{part}" if found else part
    return found


def of_runtime(error: GraphrtError, param: str | None = None) -> ApiError:
    """What the runtime refuses is the request's fault. param: the field, where it is known; else it is found by its
    name in the sentence's beginning."""
    message = str(error)
    if isinstance(error, RankError):  # but for this
        said = "all ranks of this server must answer, one has not, and they are started again; try again in a while"
        return ApiError(said, status=503, code="rank_lost", headers={"retry-after": "10"})
    if isinstance(error, ServerEnds):
        return ApiError(message, status=503, code="server_ends", headers={"retry-after": "10"})
    if isinstance(error, Cancelled):  # nobody reads it, but it is counted
        return ApiError(message, status=LEFT)
    return ApiError(message, param=param or _FIELDS.get(message.split(" ", 1)[0].rstrip(":,")))


#: The first word of the runtime's sentences -> the field that it is about.
_FIELDS = {
    name: name
    for name in (
        *("top_p", "top_k", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty", "seed"),
        *("frequency_penalty", "dry_multiplier", "dry_base", "mirostat", "xtc_probability", "logit_bias", "regex"),
    )
} | {"temp": "temperature"}
