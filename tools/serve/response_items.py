"""What the output of /v1/responses is made of: what was thought, messages, and calls of tools. Each is told as it is
made, by events, and whole at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphrt.tools.serve.ids import new_id

#: An event's name, and what it says.
Told = tuple[str, dict[str, Any]]


class Item:
    """One of them. place: in the output; said: its text so far; status: "in_progress" until it is done."""

    prefix: str

    def __init__(self, place: int) -> None:
        self.id, self.said, self.status = new_id(f"{self.prefix}_"), "", "in_progress"
        self.place = place

    @property
    def is_done(self) -> bool:
        return self.status != "in_progress"

    def told(self) -> dict[str, Any]:
        """As it is now."""
        raise NotImplementedError

    def begins(self) -> Iterator[Told]:
        yield "response.output_item.added", {"output_index": self.place, "item": self.told()}

    def more(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[Told]:
        """More of its text, and its tokens' log-probabilities where they are told."""
        raise NotImplementedError

    def ends(self, status: str) -> Iterator[Told]:
        """Nothing more comes of it."""
        self.status = status
        yield from self._whole()
        yield "response.output_item.done", {"output_index": self.place, "item": self.told()}

    def _whole(self) -> Iterator[Told]:
        """Its text once more."""
        raise NotImplementedError

    def _at(self) -> dict[str, Any]:
        """Which item an event is of."""
        return {"item_id": self.id, "output_index": self.place}


class Thought(Item):
    """What was thought."""

    prefix = "rs"

    def told(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self.said}] if self.said else []
        return {"id": self.id, "type": "reasoning", "summary": [], "status": self.status, "content": content}

    def more(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[Told]:
        self.said += text
        yield "response.reasoning_text.delta", self._at() | {"content_index": 0, "delta": text}

    def _whole(self) -> Iterator[Told]:
        yield "response.reasoning_text.done", self._at() | {"content_index": 0, "text": self.said}


class Message(Item):
    """A message, of one part."""

    prefix = "msg"

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self._logprobs: list[Mapping[str, Any]] = []

    def told(self) -> dict[str, Any]:
        content = [self._part()] if self.is_done else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.said, "annotations": [], "logprobs": self._logprobs}

    def begins(self) -> Iterator[Told]:
        yield from super().begins()
        yield "response.content_part.added", self._at() | {"content_index": 0, "part": self._part()}

    def more(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[Told]:
        self.said += text
        self._logprobs += logprobs
        yield "response.output_text.delta", self._at() | {"content_index": 0, "delta": text, "logprobs": logprobs}

    def _whole(self) -> Iterator[Told]:
        place = self._at() | {"content_index": 0}
        yield "response.output_text.done", place | {"text": self.said, "logprobs": self._logprobs}
        yield "response.content_part.done", place | {"part": self._part()}


class Called(Item):
    """A call of a tool. call_id: by which its result is sent."""

    prefix = "fc"

    def __init__(self, place: int, name: str, call_id: str) -> None:
        super().__init__(place)
        self._name, self._call_id = name, call_id

    def told(self) -> dict[str, Any]:
        return {
            "id": self.id, "type": "function_call", "call_id": self._call_id, "status": self.status,
            "name": self._name, "arguments": self.said,
        }  # fmt: skip

    def more(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[Told]:
        self.said += text
        yield "response.function_call_arguments.delta", self._at() | {"delta": text}

    def _whole(self) -> Iterator[Told]:
        yield "response.function_call_arguments.done", self._at() | {"name": self._name, "arguments": self.said}
