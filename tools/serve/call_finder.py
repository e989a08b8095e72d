"""Calls of tools found in what a model writes, as it is written.

Models write calls as their templates taught them: <tool_call>{"name", "arguments"}</tool_call> (Qwen, Hermes), or a
JSON object or list of such from the beginning on (Llama, whose objects say "parameters", and Mistral). Between the
marks there may be marks again (call_forms.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphrt.tools.serve.call_forms import MarkedCall
from graphrt.tools.serve.call_parts import CallPart, CallReader, Stage
from graphrt.tools.serve.json_calls import JsonCalls
from graphrt.tools.serve.schemas import Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class CallFinder:
    """Tells calls from text. tools: that there are; where there are none, all is text. What is no call of one of them
    stays text; white space between calls is dropped, and so is what of a call goes wrong after it was told."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.function.name: tool.function.parameters or {} for tool in tools}
        self._held, self._text, self._parts = "", "", list[CallPart]()
        self._behind = False  # a call
        self._reader: CallReader | None = None
        self._unsure = ""  # what the reader has, until it is a call
        self._step: Callable[[], bool] = self._begins

    def push(self, text: str) -> tuple[str, list[CallPart]]:
        """More of it. What is text for certain, and pieces of calls."""
        if not self._tools:
            return text, []
        self._held += text
        self._loop()
        return self._taken()

    def end(self, *, cut: bool = False) -> tuple[str, list[CallPart]]:
        """The rest. cut: the text did not end by itself."""
        while self._reader is not None:
            if not cut:
                self._took(self._reader.end())
            if self._reader is not None and self._reader.stage is Stage.OPEN:
                self._is_text()
            if self._reader is not None:  # a call that is not whole
                break
            self._loop()
        if self._step == self._lost or (self._step == self._begins and self._behind):
            self._held = ""
        self._text, self._held = self._text + self._held, ""
        return self._taken()

    def _loop(self) -> None:
        while self._step():
            pass

    def _taken(self) -> tuple[str, list[CallPart]]:
        found, self._text, self._parts = (self._text, self._parts), "", []
        return found

    # ---- steps: whether there is something to do for the next one ----

    def _begins(self) -> bool:
        """The text, or what comes behind a call: JSON may be one without marks."""
        begun = self._held.lstrip()
        if self._behind and begun.startswith(_CLOSE):
            self._held = begun.removeprefix(_CLOSE)
            return True
        if not begun or (self._behind and _CLOSE.startswith(begun)):
            return False
        if self._behind and begun[0] == "<":
            self._held = begun
        if begun[0] in "{[":
            return self._reads(JsonCalls(self._tools), "")
        self._step = self._in_text
        return True

    def _in_text(self) -> bool:
        at = self._held.find(_OPEN)
        end = at if at >= 0 else len(self._held) - overlap(self._held, _OPEN)
        self._text, self._held = self._text + self._held[:end], self._held[end:]
        if at >= 0:
            self._step = self._opened
        return at >= 0

    def _opened(self) -> bool:
        """Behind a mark."""
        body = self._held.removeprefix(_OPEN)
        begun = body.lstrip()
        if not begun:
            return False
        self._held = body
        return self._reads(JsonCalls(self._tools) if begun[0] in "{[" else MarkedCall(self._tools), _OPEN)

    def _reads(self, reader: CallReader, before: str) -> bool:
        self._reader, self._unsure, self._step = reader, before, self._in_call
        return True

    def _in_call(self) -> bool:
        held, self._held = self._held, ""
        assert self._reader is not None
        if self._reader.stage is Stage.OPEN:
            self._unsure += held
        self._took(self._reader.push(held))
        return self._reader is None

    def _took(self, parts: list[CallPart]) -> None:
        """What a reader has found."""
        assert self._reader is not None
        self._parts += parts
        stage = self._reader.stage
        if stage is Stage.NONE:
            self._is_text()
        elif stage in (Stage.ENDED, Stage.LOST):
            self._held, self._reader, self._behind = self._reader.rest, None, True
            self._step = self._begins if stage is Stage.ENDED else self._lost

    def _is_text(self) -> None:
        """What was held for a call: its first character, or mark. In the rest there may be calls."""
        n = len(_OPEN) if self._unsure.startswith(_OPEN) else 1
        self._text += self._unsure[:n]
        self._held, self._reader, self._step = self._unsure[n:], None, self._in_text

    def _lost(self) -> bool:
        """Up to a mark that a call begins or ends with."""
        found = [at for at in map(self._held.find, (_OPEN, _CLOSE)) if at >= 0]
        if not found:
            self._held = self._held[len(self._held) - max(overlap(self._held, mark) for mark in (_OPEN, _CLOSE)) :]
            return False
        self._held, self._step = self._held[min(found) :], self._begins
        return True


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
