"""What an answer of /v1/messages is made of: texts, what was thought, and calls of tools. Each is told as it is made,
by events, and whole at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

#: An event's name, and what it says.
Told = tuple[str, dict[str, Any]]


class Block:
    """One of them. place: in the answer; said: its text so far."""

    #: The event's type that brings more of it, and the name of the text there.
    delta: tuple[str, str]

    def __init__(self, place: int) -> None:
        self.place, self.said, self.is_done = place, "", False

    def told(self) -> dict[str, Any]:
        """As it is now."""
        raise NotImplementedError

    def begins(self) -> Iterator[Told]:
        yield "content_block_start", {"index": self.place, "content_block": self.told()}

    def more(self, text: str) -> Iterator[Told]:
        """More of its text."""
        self.said += text
        yield self._changed(*self.delta, text)

    def ends(self) -> Iterator[Told]:
        """Nothing more comes of it."""
        self.is_done = True
        yield "content_block_stop", {"index": self.place}

    def _changed(self, kind: str, name: str, text: str) -> Told:
        return "content_block_delta", {"index": self.place, "delta": {"type": kind, name: text}}


class Said(Block):
    """A text."""

    delta = "text_delta", "text"

    def told(self) -> dict[str, Any]:
        return {"type": "text", "text": self.said, "citations": None}


class Thought(Block):
    """What was thought. Its signature, by which Anthropic's servers know their own, is empty."""

    delta = "thinking_delta", "thinking"

    def told(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": self.said, "signature": ""}

    def ends(self) -> Iterator[Told]:
        yield self._changed("signature_delta", "signature", "")
        yield from super().ends()


class Called(Block):
    """A call of a tool. id: by which its result is sent."""

    delta = "input_json_delta", "partial_json"

    def __init__(self, place: int, name: str, id: str) -> None:
        super().__init__(place)
        self._name, self._id = name, id

    def told(self) -> dict[str, Any]:
        """Of arguments that were cut nothing is told: they are no JSON."""
        try:
            given = json.loads(self.said or "{}")
        except (ValueError, RecursionError):
            given = {}
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": given}
