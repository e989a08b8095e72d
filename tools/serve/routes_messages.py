"""/v1/messages: Anthropic's form of a chat."""

from __future__ import annotations

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
from graphrt.tools.serve.message_blocks import Block, Called, Said, Thought, Told
from graphrt.tools.serve.messages_input import as_chat
from graphrt.tools.serve.routes_text import reader_of
from graphrt.tools.serve.said import Marks
from graphrt.tools.serve.schemas import ChatRequest
from graphrt.tools.serve.schemas_messages import MessagesRequest
from graphrt.tools.serve.state import State, events, key_of


class MessagesRoute:
    """The route."""

    def __init__(self, state: State) -> None:
        self.state = state

    async def messages(self, request: Request) -> Response:
        limits, maker = self.state.limits, self.state.generator()
        body = await body_of(request, MessagesRequest, limits.max_body, limits.body_seconds)
        self.state.check_model(body.model)
        asked, key = as_chat(body, body.max_tokens), key_of(request)
        asked.model = body.model
        (text,), marks = await self.state.aside(lambda: maker.chat(asked, key))
        answer = Answer(self.state, asked, text, marks)
        return await answered(self.state, request, [text], answer.whole, answer.stream if body.stream else None)


class Answer:
    """What becomes of a request. asked: the same as a chat's; marks: of what the text thinks. One block after the other
    is made."""

    def __init__(self, state: State, asked: ChatRequest, text: Text, marks: Marks) -> None:
        self.state, self.text = state, text
        self._reader, self._blocks = reader_of(asked, marks), list[Block]()
        self._id = new_id("msg_")

    async def whole(self, inbox: Inbox) -> dict[str, Any]:
        """All of it."""
        last: Piece | None = None
        async for _, event in events([self.text], inbox):
            last = event.piece
            assert last is not None
            list(self._read(last))
        assert last is not None
        found = self._message(self._usage())
        return found | {"content": [block.told() for block in self._blocks]} | self._ended(last)

    async def stream(self, inbox: Inbox) -> AsyncIterator[str]:
        """Event by event."""
        # how much of the prompt the cache has is known once the text begins: until then all of it counts as read
        begun = {"input_tokens": len(self.text.prompt), "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        yield _event("message_start", {"message": self._message(begun | {"output_tokens": 0})})
        last: Piece | None = None
        try:
            async for _, event in events([self.text], inbox):
                last = event.piece
                assert last is not None
                for kind, value in self._read(last):
                    yield _event(kind, value)
        except ApiError as error:
            yield _event("error", error.anthropic_body())
            return
        assert last is not None
        yield _event("message_delta", {"delta": self._ended(last), "usage": self._usage()})
        yield _event("message_stop", {})

    def _message(self, usage: Mapping[str, int]) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self.state.name, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip

    def _ended(self, piece: Piece) -> dict[str, str | None]:
        """Why."""
        if self._reader.calls_end_it:
            reason = "tool_use"
        elif piece.finish in answers.CUT:
            reason = "max_tokens"
        else:
            reason = "stop_sequence" if piece.word else "end_turn"
        return {"stop_reason": reason, "stop_sequence": piece.word or None}

    def _usage(self) -> dict[str, int]:
        """Tokens of the prompt that were read and are kept in whole pages, those that the cache had, and the rest."""
        scheduler, text = self.state.worker.scheduler, self.text
        assert scheduler is not None
        engine, n, cached = scheduler.engine, len(text.prompt), max(0, text.n_cached)
        page = engine.cache.sizes.page
        kept = max(0, n // page * page - cached) if engine.options.share else 0
        return {
            "input_tokens": n - cached - kept, "cache_creation_input_tokens": kept, "cache_read_input_tokens": cached,
            "output_tokens": text.n_made,
        }  # fmt: skip

    # ---- blocks, and the events that tell of them ----

    def _read(self, piece: Piece) -> Iterator[Told]:
        """What is new with a piece."""
        new = self._reader.push(piece.text)
        if piece.finish:
            new += self._reader.end(cut=piece.finish in answers.CUT)
        if new.reasoning:
            yield from self._more(Thought, new.reasoning)
        if new.content:
            yield from self._more(Said, new.content)
        for part in new.calls:
            yield from self._called(part)
        if piece.finish:
            if all(isinstance(block, Thought) for block in self._blocks):
                yield from self._begin(Said(len(self._blocks)))
            yield from self._close()

    def _more(self, kind: type[Thought | Said], text: str) -> Iterator[Told]:
        if not self._blocks or self._blocks[-1].is_done or not isinstance(self._blocks[-1], kind):
            yield from self._begin(kind(len(self._blocks)))
        yield from self._blocks[-1].more(text)

    def _called(self, part: CallPart) -> Iterator[Told]:
        """A piece of a call."""
        if part.name:
            yield from self._begin(Called(len(self._blocks), part.name, part.id))
        if part.arguments:
            yield from self._blocks[-1].more(part.arguments)
        if part.whole:
            yield from self._close()

    def _begin(self, block: Block) -> Iterator[Told]:
        yield from self._close()
        self._blocks.append(block)
        yield from block.begins()

    def _close(self) -> Iterator[Told]:
        """The last block is done, if it is not so already."""
        if self._blocks and not self._blocks[-1].is_done:
            yield from self._blocks[-1].ends()


def _event(kind: str, value: Mapping[str, Any]) -> str:
    """An event with its name."""
    return f"event: {kind}\ndata: {encoded({'type': kind, **value})}"
