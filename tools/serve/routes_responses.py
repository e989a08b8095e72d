"""/v1/responses: a conversation's next answer in the form of OpenAI's newer API. Nothing is stored."""

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
from graphrt.tools.serve.responses_input import as_chat
from graphrt.tools.serve.routes_text import reader_of
from graphrt.tools.serve.said import Marks, Said
from graphrt.tools.serve.scheduler import Text
from graphrt.tools.serve.schemas import ChatRequest
from graphrt.tools.serve.schemas_responses import ResponsesRequest
from graphrt.tools.serve.state import State, events, json_response, key_of


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

        answer = Answer(self.state, body, asked, text, marks)
        if body.stream:
            return EventStream(answer.stream(inbox), leave, inbox, last="", told=self.state.metrics.writes.add)
        try:
            with watched(request.receive, leave):
                return json_response(await answer.whole(inbox))
        finally:
            leave()


class Answer:
    """What becomes of a request. asked: the same as a chat's; marks: of what the text thinks.

    Its output is what was thought, a message, and calls of tools, each an item; a text that is calls has no message."""

    def __init__(self, state: State, body: ResponsesRequest, asked: ChatRequest, text: Text, marks: Marks) -> None:
        self.state, self.body, self.text = state, body, text
        self._reader, self._said = reader_of(asked, marks), Said()
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
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

    def _read(self, piece: Piece) -> tuple[Said, list[dict[str, Any]]]:
        """What is new with a piece, and its token's log-probabilities where they were asked for."""
        new = self._reader.push(piece.text)
        if piece.finish:
            rest, calls = self._reader.end()
            new += rest
            self._calls = [_call(call) for call in calls]
        self._said += new
        told = answers.chat_logprobs([piece], self.state.model.tokenizer)
        logprobs = told["content"] if told and not new.reasoning else []
        self._logprobs += logprobs
        return new, logprobs

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
        given = body.model_dump(by_alias=True, exclude_none=True)
        form = given.get("text", {}).get("format", {"type": "text"})
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "background": False, "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "model": self.state.name,
            "output": self._output(status) if finish else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False, "temperature": body.temperature, "top_p": body.top_p, "text": {"format": form},
            "tool_choice": given.get("tool_choice", "auto"), "tools": given.get("tools", []),
            "top_logprobs": body.top_logprobs or 0, "truncation": "disabled", "usage": told, "user": body.user,
            "metadata": body.metadata or {},
        }  # fmt: skip

    def _output(self, status: str) -> list[dict[str, Any]]:
        thought, said = self._said
        found = [self._reasoning(thought, "completed")] if thought else []
        if said or not self._calls:
            found.append(self._message(said, status))
        return [*found, *self._calls]

    def _message(self, said: str | None, status: str) -> dict[str, Any]:
        content = [] if said is None else [self._part(said)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, said: str) -> dict[str, Any]:
        return {"type": "output_text", "text": said, "annotations": [], "logprobs": self._logprobs if said else []}

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
                new, logprobs = self._read(event.piece)
                if new.reasoning:
                    for each in self._thinks(new.reasoning, begins=not before.reasoning):
                        yield each
                if not answers_now and (new.content or finish):
                    for each in self._has_thought():
                        yield each
                if not answers_now and (new.content or (finish and not self._calls)):
                    answers_now = True
                    for each in self._begins():
                        yield each
                if new.content:
                    more = self._place | {"delta": new.content, "logprobs": logprobs}
                    yield self._event("response.output_text.delta", more)
        except ApiError as error:
            yield self._event("error", {"message": error.message, "code": error.code, "param": error.param})
            return
        whole = self._response(finish)
        if answers_now:
            for each in self._ends(whole["status"]):
                yield each
        for i, call in enumerate(self._calls, len(whole["output"]) - len(self._calls)):
            for each in self._tells_of(call, i):
                yield each
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

    def _has_thought(self) -> Iterator[str]:
        """What was thought is whole."""
        thought = self._said.reasoning
        if thought:
            place = {"item_id": self._thought, "output_index": 0, "content_index": 0}
            yield self._event("response.reasoning_text.done", place | {"text": thought})
            item = self._reasoning(thought, "completed")
            yield self._event("response.output_item.done", {"output_index": 0, "item": item})

    def _begins(self) -> Iterator[str]:
        item, place = self._message(None, "in_progress"), self._place
        yield self._event("response.output_item.added", {"output_index": place["output_index"], "item": item})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", place | {"part": part})

    def _ends(self, status: str) -> Iterator[str]:
        said, place = self._said.content, self._place
        yield self._event("response.output_text.done", place | {"text": said, "logprobs": self._logprobs})
        yield self._event("response.content_part.done", place | {"part": self._part(said)})
        last = {"output_index": place["output_index"], "item": self._message(said, status)}
        yield self._event("response.output_item.done", last)

    def _tells_of(self, call: Mapping[str, Any], i: int) -> Iterator[str]:
        """The call that is the i-th item."""
        begun = {**call, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", {"output_index": i, "item": begun})
        place, said = {"item_id": call["id"], "output_index": i}, call["arguments"]
        yield self._event("response.function_call_arguments.delta", place | {"delta": said})
        whole = place | {"name": call["name"], "arguments": said}
        yield self._event("response.function_call_arguments.done", whole)
        yield self._event("response.output_item.done", {"output_index": i, "item": call})

    def _event(self, kind: str, value: Mapping[str, Any]) -> str:
        """An event with its name, which some clients look at."""
        numbered = {"type": kind, "sequence_number": self._n_events, **value}
        self._n_events += 1
        return f"event: {kind}\ndata: {encoded(numbered)}"


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's call as an item."""
    return {
        "id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call["id"], "status": "completed",
        **call["function"],
    }  # fmt: skip
