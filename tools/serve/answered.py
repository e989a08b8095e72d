"""What all routes that generate do with texts once they are made of a request: a stream, or one answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from graphrt.tools.serve.events import Text
from graphrt.tools.serve.http import EventStream, watched
from graphrt.tools.serve.inbox import Inbox
from graphrt.tools.serve.state import State, json_response


async def answered(
    state: State,
    request: Request,
    texts: Sequence[Text],
    whole: Callable[[Inbox], Awaitable[Any]],
    stream: Callable[[Inbox], AsyncIterator[str]] | None,
    last: str = "",
) -> Response:
    """Has the texts made; when the client goes, they end. whole: gives all of the answer as JSON has it; stream: its
    events, None where none are asked for; last: data of a stream's last event, "" for none. Raises ApiError."""
    inbox = state.submit(texts)

    def leave() -> None:
        state.worker.cancel(texts)

    if stream is not None:
        return EventStream(stream(inbox), leave, inbox, last=last, told=state.metrics.writes.add)
    try:
        with watched(request.receive, leave):
            return json_response(await whole(inbox))
    finally:
        leave()
