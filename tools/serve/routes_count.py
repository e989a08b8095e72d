"""How many tokens the prompt of a request would have: of a chat, by llama-server's name, of one to /v1/responses, and
of one in Anthropic's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from graphrt.tools.serve import messages_input, responses_input
from graphrt.tools.serve.http import body_of
from graphrt.tools.serve.schemas import ChatRequest
from graphrt.tools.serve.schemas_messages import CountRequest
from graphrt.tools.serve.schemas_responses import ResponsesRequest
from graphrt.tools.serve.state import State, json_response
from graphrt.tools.serve.texts import MOST_COUNTED

B = TypeVar("B", bound=BaseModel)


class CountRoutes:
    """The routes."""

    def __init__(self, state: State) -> None:
        self.state = state

    async def chat(self, request: Request) -> Response:
        n = await self._counted(request, ChatRequest, lambda body: body)
        return json_response({"object": "chat.completion.input_tokens", "input_tokens": n})

    async def responses(self, request: Request) -> Response:
        n = await self._counted(request, ResponsesRequest, responses_input.as_chat)
        return json_response({"object": "response.input_tokens", "input_tokens": n})

    async def messages(self, request: Request) -> Response:
        return json_response({"input_tokens": await self._counted(request, CountRequest, messages_input.as_chat)})

    async def _counted(self, request: Request, form: type[B], as_chat: Callable[[B], ChatRequest]) -> int:
        """Raises ApiError."""
        state, limits = self.state, self.state.limits
        maker = state.generator()
        body = await body_of(request, form, limits.max_body, limits.body_seconds)
        state.check_model(getattr(body, "model", None))
        asked = as_chat(body)
        return await state.aside(lambda: len(maker.chat_ids(maker.prompt_of(asked), MOST_COUNTED)))
