"""/v1/responses: a conversation's next answer as text, in the form of OpenAI's newer API. Nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from graphrt.models.generation import Piece
from graphrt.tools.serve import answers
from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.http import EventStream, body_of, encoded, watched
from graphrt.tools.serve.inbox import Inbox
from graphrt.tools.serve.said import Marks, Reader, Said
from graphrt.tools.serve.scheduler import Text
from graphrt.tools.serve.schemas import (
    ChatRequest,
    Item,
    JsonSchema,
    Message,
    Part,
    ResponseFormat,
    ResponsesRequest,
)
from graphrt.tools.serve.state import State, events, json_response, key_of

#: Types of the parts of an input's content that are text.
_TEXTS = ("input_text", "output_text", "text")


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
        inbox = self.state.submit([text])

        def leave() -> None:
            self.state.worker.cancel([text])

        answer = Answer(self.state, body, text, marks)
        if body.stream:
            return EventStream(answer.stream(inbox), leave, inbox, last="", told=self.state.metrics.writes.add)
        try:
            with watched(request.receive, leave):
                return json_response(await answer.whole(inbox))
        finally:
            leave()


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same as a request for a chat. Raises ApiError for what has no text."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    given = [Item(content=body.input)] if isinstance(body.input, str) else body.input
    for i, item in enumerate(given):
        place, found = f"input[{i}]", item.model_dump(exclude_none=True)
        content = found.get("content")
        if found.get("type", "message") != "message" or content is None:
            raise ApiError("an item of the input must be a message with content", param=f"{place}.type")
        if not isinstance(content, str):
            for j, part in enumerate(content):
                if part["type"] not in _TEXTS or not isinstance(part.get("text"), str):
                    raise ApiError("a part of a message must be a text: models read text alone",
                                   param=f"{place}.content[{j}].type")  # fmt: skip
            content = [Part(type="text", text=part["text"]) for part in content]
        messages.append(Message(role=found["role"], content=content))
    form = body.text.format if body.text is not None else None
    wanted = None
    if form is not None:
        schema = JsonSchema(schema=form.schema_) if form.type == "json_schema" else None
        wanted = ResponseFormat(type=form.type, json_schema=schema, schema=None)
    return ChatRequest(
        messages=messages, max_completion_tokens=body.max_output_tokens, temperature=body.temperature,
        top_p=body.top_p, response_format=wanted, reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )  # fmt: skip


class Answer:
    """What becomes of a request. marks: of what the text thinks."""

    def __init__(self, state: State, body: ResponsesRequest, text: Text, marks: Marks) -> None:
        self.state, self.body, self.text = state, body, text
        self._reader, self._said = Reader(marks), Said()
        self._id, self._item, self._thought = (f"{kind}_{secrets.token_hex(12)}" for kind in ("resp", "msg", "rs"))
        self._created = int(time.time())
        self._n_events = 0

    async def whole(self, inbox: Inbox) -> dict[str, Any]:
        """All of it."""
        finish = ""
        async for _, event in events([self.text], inbox):
            assert event.piece is not None
            self._read(event.piece)
            finish = event.piece.finish
        return self._response(finish)

    def _read(self, piece: Piece) -> Said:
        """What is new with a piece."""
        new = self._reader.push(piece.text)
        if piece.finish:
            new += self._reader.end()[0]
        self._said += new
        return new

    def _response(self, finish: str = "") -> dict[str, Any]:
        """finish: why the text ended, "" while it goes on."""
        body, cut = self.body, finish in ("length", "context")
        status = "in_progress" if not finish else "incomplete" if cut else "completed"
        told = None
        if finish:
            usage = answers.usage([self.text], self._reader.n_reasoning)
            told = {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": usage["completion_tokens_details"],
            }  # fmt: skip
        form = body.text.format.model_dump(by_alias=True) if body.text and body.text.format else {"type": "text"}
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "model": self.state.name,
            "output": self._output(status) if finish else [], "parallel_tool_calls": True,
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": False,
            "temperature": body.temperature, "top_p": body.top_p, "text": {"format": form}, "tool_choice": "auto",
            "tools": [], "truncation": "disabled", "usage": told, "user": body.user, "metadata": body.metadata or {},
        }  # fmt: skip

    def _output(self, status: str) -> list[dict[str, Any]]:
        thought, said = self._said
        return [*([self._reasoning(thought, "completed")] if thought else []), self._message(said, status)]

    def _message(self, said: str | None, status: str) -> dict[str, Any]:
        content = [] if said is None else [_part(said)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _reasoning(self, said: str | None, status: str) -> dict[str, Any]:
        content = [] if said is None else [{"type": "reasoning_text", "text": said}]
        return {"id": self._thought, "type": "reasoning", "summary": [], "status": status, "content": content}

    async def stream(self, inbox: Inbox) -> AsyncIterator[str]:
        """Event by event."""
        yield self._event("response.created", {"response": self._response()})
        yield self._event("response.in_progress", {"response": self._response()})
        finish, answers_now = "", False
        try:
            async for _, event in events([self.text], inbox):
                assert event.piece is not None
                before, finish = self._said, event.piece.finish
                new = self._read(event.piece)
                if new.reasoning:
                    for each in self._thinks(new.reasoning, begins=not before.reasoning):
                        yield each
                if not answers_now and (new.content or finish):
                    answers_now = True
                    for each in self._begins():
                        yield each
                if new.content:
                    more = self._place | {"delta": new.content, "logprobs": []}
                    yield self._event("response.output_text.delta", more)
        except ApiError as error:
            yield self._event("error", {"message": error.message, "code": error.code, "param": error.param})
            return
        whole = self._response(finish)
        yield self._event("response.output_text.done", self._place | {"text": self._said.content, "logprobs": []})
        yield self._event("response.content_part.done", self._place | {"part": _part(self._said.content)})
        last = {"output_index": self._place["output_index"], "item": whole["output"][-1]}
        yield self._event("response.output_item.done", last)
        yield self._event(f"response.{whole['status']}", {"response": whole})

    @property
    def _place(self) -> dict[str, Any]:
        """Where the answer stands: behind what was thought."""
        return {"item_id": self._item, "output_index": int(bool(self._said.reasoning)), "content_index": 0}

    def _thinks(self, text: str, *, begins: bool) -> Iterator[str]:
        """More of what is thought."""
        if begins:
            item = self._reasoning(None, "in_progress")
            yield self._event("response.output_item.added", {"output_index": 0, "item": item})
        place = {"item_id": self._thought, "output_index": 0, "content_index": 0}
        yield self._event("response.reasoning_text.delta", place | {"delta": text})

    def _begins(self) -> Iterator[str]:
        """The answer begins, and what was thought is whole."""
        thought = self._said.reasoning
        if thought:
            place = {"item_id": self._thought, "output_index": 0, "content_index": 0}
            yield self._event("response.reasoning_text.done", place | {"text": thought})
            item = self._reasoning(thought, "completed")
            yield self._event("response.output_item.done", {"output_index": 0, "item": item})
        item, place = self._message(None, "in_progress"), self._place
        yield self._event("response.output_item.added", {"output_index": place["output_index"], "item": item})
        yield self._event("response.content_part.added", place | {"part": _part("")})

    def _event(self, kind: str, value: Mapping[str, Any]) -> str:
        """An event's data, and behind it its name: the order of an event's lines is free."""
        numbered = {"type": kind, "sequence_number": self._n_events, **value}
        self._n_events += 1
        return f"{encoded(numbered)}\nevent: {kind}"


def _part(said: str) -> dict[str, Any]:
    return {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
