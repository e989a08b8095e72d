"""/invocations, where some clouds send all requests: which route one is for shows in its fields."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.http import data_of
from graphrt.tools.serve.state import State


class InvocationsRoute:
    """The route. endpoints: of requests that have a field; the first one counts."""

    def __init__(self, state: State, endpoints: Mapping[str, Callable[[Request], Awaitable[Response]]]) -> None:
        self.state, self._endpoints = state, endpoints

    async def invoked(self, request: Request) -> Response:
        limits = self.state.limits
        data = await data_of(request, limits.max_body, limits.body_seconds)
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            raise ApiError("a body must be JSON; send a JSON object", code="invalid_json") from None
        name = next((name for name in self._endpoints if isinstance(body, dict) and name in body), None)
        if name is None:
            raise ApiError(f"a request must have one of the fields {', '.join(self._endpoints)}, by which it is known "
                           "what it asks for; give one")  # fmt: skip
        unread = [data]

        async def receive() -> Message:
            return {"type": "http.request", "body": unread.pop()} if unread else await request.receive()

        return await self._endpoints[name](Request(request.scope, receive))
