"""/v1/responses: a conversation's next answer in the form of OpenAI's newer API. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from graphrt.models.generation import Piece
from graphrt.tools.serve import answers
from graphrt.tools.serve.answered import answered
from graphrt.tools.serve.call_parts import CallPart
from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.events import Text
from graphrt.tools.serve.http import body_of, encoded
from graphrt.tools.serve.ids import new_id
from graphrt.tools.serve.inbox import Inbox
from graphrt.tools.serve.response_items import Called, Item, Message, Thought, Told
from graphrt.tools.serve.responses_input import as_chat
from graphrt.tools.serve.routes_text import reader_of
from graphrt.tools.serve.said import Marks
from graphrt.tools.serve.schemas import ChatRequest
from graphrt.tools.serve.schemas_responses import ResponsesRequest
from graphrt.tools.serve.spelling import Spelling
from graphrt.tools.serve.state import State, events, key_of


class ResponsesRoute:
    """The route."""

    def __init__(self, state: State) -> None:
        self.state = state

    async def responses(self, request: Request) -> Response:
        limits, maker = self.state.limits, self.state.generator()
        body = await body_of(request, ResponsesRequest, limits.max_body, limits.body_seconds)
        self.state.check_model(body.model)
        asked, key = as_chat(body), key_of(request)
        (text,), marks = await self.state.aside(lambda: maker.chat(asked, key))
        answer = Answer(self.state, body, asked, text, marks)
        return await answered(self.state, request, [text], answer.whole, answer.stream if body.stream else None)


class Answer:
    """What becomes of a request. asked: the same as a chat's; marks: of what the text thinks.

    Its output is a list of items: what was thought, messages, and calls of tools. One after the other is made, and a
    text that is calls has no message."""

    def __init__(self, state: State, body: ResponsesRequest, asked: ChatRequest, text: Text, marks: Marks) -> None:
        self.state, self.body, self.text = state, body, text
        self._reader = reader_of(asked, marks)
        self._items, self._logprobs = list[Item](), list[Mapping[str, Any]]()  # the latter of what is not told yet
        self._id = new_id("resp_")
        self._created = int(time.time())
        self._n_events = 0

    async def whole(self, inbox: Inbox) -> dict[str, Any]:
        """All of it."""
        finish = ""
        async for _, event in events([self.text], inbox):
            assert event.piece is not None
            list(self._read(event.piece))
            finish = event.piece.finish
        return self._response(finish)

    async def stream(self, inbox: Inbox) -> AsyncIterator[str]:
        """Event by event."""
        yield self._event("response.created", {"response": self._response()})
        yield self._event("response.in_progress", {"response": self._response()})
        finish = ""
        try:
            async for _, event in events([self.text], inbox):
                assert event.piece is not None
                finish = event.piece.finish
                for kind, value in self._read(event.piece):
                    yield self._event(kind, value)
        except ApiError as error:
            yield self._event("error", {"message": error.message, "code": error.code, "param": error.param})
            return
        whole = self._response(finish)
        yield self._event(f"response.{whole['status']}", {"response": whole, **self._timings(finish)})

    def _response(self, finish: str = "") -> dict[str, Any]:
        """finish: why the text ended, "" while it goes on."""
        body, status = self.body, _status(finish)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told = None
        if finish:
            usage = answers.usage([self.text], self._reader.n_reasoning)
            told = {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": usage["completion_tokens_details"],
            }  # fmt: skip
        given = body.model_dump(by_alias=True, exclude_none=True)
        form = given.get("text", {}).get("format", {"type": "text"})
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "background": False, "incomplete_details": cut,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "model": self.state.name,
            "output": [item.told() for item in self._items] if finish else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False, "temperature": body.temperature, "top_p": body.top_p, "text": {"format": form},
            "tool_choice": given.get("tool_choice", "auto"), "tools": given.get("tools", []),
            "top_logprobs": body.top_logprobs or 0, "truncation": "disabled", "usage": told, "user": body.user,
            "metadata": body.metadata or {},
        } | self._timings(finish)  # fmt: skip

    def _timings(self, finish: str) -> dict[str, Any]:
        """Of a text that has ended, where they are asked for."""
        return {"timings": answers.timings([self.text])} if finish and self.body.timings_per_token else {}

    # ---- items, and the events that tell of them ----

    def _read(self, piece: Piece) -> Iterator[Told]:
        """What is new with a piece."""
        new = self._reader.push(piece.text)
        if piece.finish:
            new += self._reader.end(cut=piece.finish in answers.CUT)
        told = answers.chat_logprobs([piece], Spelling(self.state.model.tokenizer))
        self._logprobs += told["content"] if told and not new.reasoning else []
        if new.reasoning:
            yield from self._open(Thought)
            yield from self._items[-1].more(new.reasoning)
        if new.content:
            yield from self._open(Message)
            yield from self._items[-1].more(new.content, self._logprobs)
            self._logprobs = []
        for part in new.calls:
            yield from self._called(part)
        if piece.finish:
            if all(isinstance(item, Thought) for item in self._items):
                yield from self._open(Message)
            yield from self._close(_status(piece.finish))

    def _open(self, kind: type[Thought | Message]) -> Iterator[Told]:
        """Has an item of this kind be the last one, and no other that is not done."""
        if self._items and isinstance(self._items[-1], kind) and not self._items[-1].is_done:
            return
        yield from self._begin(kind(len(self._items)))

    def _begin(self, item: Item) -> Iterator[Told]:
        yield from self._close()
        self._items.append(item)
        yield from item.begins()

    def _called(self, part: CallPart) -> Iterator[Told]:
        """A piece of a call."""
        self._logprobs = []  # of no message
        if part.name:
            yield from self._begin(Called(len(self._items), part.name, part.id))
        if part.arguments:
            yield from self._items[-1].more(part.arguments)
        if part.whole:
            yield from self._close()

    def _close(self, status: str = "completed") -> Iterator[Told]:
        """The last item is done, if it is not so already."""
        if self._items and not self._items[-1].is_done:
            yield from self._items[-1].ends(status)

    def _event(self, kind: str, value: Mapping[str, Any]) -> str:
        """An event with its name, which some clients look at."""
        numbered = {"type": kind, "sequence_number": self._n_events, **value}
        self._n_events += 1
        return f"event: {kind}\ndata: {encoded(numbered)}"


def _status(finish: str) -> str:
    return "in_progress" if not finish else "incomplete" if finish in answers.CUT else "completed"
