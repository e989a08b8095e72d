"""What a model says, told apart: its reasoning, its answer, and calls of tools.

Models write these as their templates taught them. Most put what they think between two marks, <think> and </think>
(DeepSeek, Qwen) or others of that kind; some templates write the first of them at a prompt's end. gpt-oss gives each
message a channel: "<|channel|>analysis<|message|>" and what it thinks, "final" and the answer, "commentary
to=functions.f" and the arguments of a call. What a template doesn't mention is not looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from graphrt.tools.serve.call_finder import CallFinder, overlap
from graphrt.tools.serve.call_parts import CallPart
from graphrt.tools.serve.ids import new_id
from graphrt.tools.serve.schemas import Tool

#: The marks around what models think.
_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
#: What ends a message of a channel.
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)


class Marks(NamedTuple):
    """How a text tells what it thinks. pair: the marks around it, None for none; opened: the prompt has the first of
    them at its end; channels: in a channel."""

    pair: tuple[str, str] | None = None
    opened: bool = False
    channels: bool = False


#: All that is said is the answer.
PLAIN = Marks()


def marks_of(template: str, prompt: str) -> Marks:
    """Those of a text that goes on from this prompt, which a chat template has made."""
    if _CHANNEL in template and _MESSAGE in template:
        return Marks(channels=True)
    pair = next((pair for pair in _PAIRS if pair[1] in template or pair[0] in template), None)
    return Marks(pair, pair is not None and prompt.rstrip().endswith(pair[0]))


class Said(NamedTuple):
    """A piece of each. calls: pieces of calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPart, ...] = ()

    def __add__(self, other: object) -> Said:
        assert isinstance(other, Said)
        return Said(self.reasoning + other.reasoning, self.content + other.content, self.calls + other.calls)


class _Splitter(Protocol):
    """Tells what is thought from what is answered. thinks: what comes next is thought, as far as is known."""

    thinks: bool

    def push(self, text: str) -> Said: ...

    def end(self) -> Said: ...


@dataclass
class Call:
    """A call of a tool, as far as it is made. whole: nothing more comes of it."""

    id: str
    name: str
    arguments: str = ""
    whole: bool = False

    @property
    def told(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Reader:
    """Reads one text as it is made. marks: of its reasoning; tools: that may be called; one_call: of several calls the
    first counts; must_call: what of a text is no call was cut before it was one, and is not told. n_reasoning: pieces
    that were thought; calls: what was called so far."""

    def __init__(
        self, marks: Marks = PLAIN, tools: Sequence[Tool] = (), *, one_call: bool = False, must_call: bool = False
    ) -> None:
        names = {tool.function.name for tool in tools}
        self._split: _Splitter = _Channels(names) if marks.channels else _Pair(marks)
        # models with channels call tools in them, and in no other way
        self._finder = CallFinder(() if marks.channels else tools)
        self._one, self._must = one_call, must_call
        self.n_reasoning, self._n_begun, self.calls = 0, 0, list[Call]()

    def push(self, text: str) -> Said:
        """More of it; what is known for certain."""
        self.n_reasoning += self._split.thinks
        return self._read(self._split.push(text))

    def end(self, *, cut: bool = False) -> Said:
        """The rest. cut: the text did not end by itself."""
        said = self._read(self._split.end())
        said += self._told("", *self._finder.end(cut=cut))
        if self.calls and not cut and not self.calls[-1].whole:
            said += Said(calls=(self._counted(CallPart(whole=True)),))
        return said

    @property
    def calls_end_it(self) -> bool:
        """The text ended with a call, and was not cut in the middle of it."""
        return bool(self.calls) and self.calls[-1].whole

    def _read(self, said: Said) -> Said:
        content, parts = self._finder.push(said.content)
        return self._told(said.reasoning, content, [*said.calls, *parts])

    def _told(self, reasoning: str, content: str, parts: Sequence[CallPart]) -> Said:
        found = [self._counted(part) for part in parts if self._is_told(part)]
        return Said(reasoning, "" if self._must else content, tuple(found))

    def _is_told(self, part: CallPart) -> bool:
        """Whether it is of a call that counts."""
        self._n_begun += bool(part.name)
        return self._n_begun <= 1 or not self._one

    def _counted(self, part: CallPart) -> CallPart:
        """A piece with its call's number, and where that begins with the call's id."""
        if part.name:
            self.calls.append(Call(new_id("call_"), part.name))
        call = self.calls[-1]
        if part.whole and not (call.arguments + part.arguments).strip():
            part = part._replace(arguments="{}")
        call.arguments += part.arguments
        call.whole = call.whole or part.whole
        return part._replace(number=len(self.calls) - 1, id=call.id if part.name else "")


class _Pair:
    """Marks around what is thought, at the text's beginning. White space beside the marks belongs to neither."""

    def __init__(self, marks: Marks) -> None:
        self._marks, self._held, self._fresh = marks.pair, "", True
        self._step: Callable[[], Said] = self._before
        self.thinks = False
        if marks.pair is None:
            self._step = self._after
            self._fresh = False
        elif marks.opened:
            self._think()

    def push(self, text: str) -> Said:
        self._held += text
        return self._step()

    def end(self) -> Said:
        held, self._held = self._held, ""
        return Said(reasoning=held.rstrip()) if self.thinks else Said(content=held)

    def _think(self) -> None:
        self._step, self.thinks, self._fresh = self._inside, True, True

    def _before(self) -> Said:
        assert self._marks is not None
        begun = self._held.lstrip()
        if begun.startswith(self._marks[0]):
            self._held = begun[len(self._marks[0]) :]
            self._think()
        elif self._marks[0].startswith(begun):
            return Said()
        else:
            self._step, self._fresh = self._after, False
        return self._step()

    def _inside(self) -> Said:
        assert self._marks is not None
        self._drop_space()
        at = self._held.find(self._marks[1])
        if at >= 0:
            thought, self._held = self._held[:at].rstrip(), self._held[at + len(self._marks[1]) :]
            self._step, self.thinks, self._fresh = self._after, False, True
            return Said(reasoning=thought) + self._step()
        shown = self._held[: len(self._held) - overlap(self._held, self._marks[1])].rstrip()
        self._held = self._held[len(shown) :]
        return Said(reasoning=shown)

    def _after(self) -> Said:
        self._drop_space()
        held, self._held = self._held, ""
        return Said(content=held)

    def _drop_space(self) -> None:
        if self._fresh:
            self._held = self._held.lstrip()
            self._fresh = not self._held


class _Channels:
    """Messages with channels. A text that does not begin with one is an answer, and so is a message to a tool that
    there is not. names: of the tools."""

    def __init__(self, names: Container[str]) -> None:
        self._held, self._header, self._first = "", True, True
        self._names, self._calls = names, False
        self.thinks = False

    def push(self, text: str) -> Said:
        self._held += text
        said = Said()
        while True:
            more = self._head() if self._header else self._body()
            if more is None:
                return said
            said += more

    def end(self) -> Said:
        held, self._held = self._held, ""
        unmarked = self._first and _CHANNEL not in held and _START not in held
        return self._told(held) if unmarked or not self._header else Said()

    def _head(self) -> Said | None:
        """Past a message's header; None where it isn't whole."""
        at = self._held.find(_MESSAGE)
        begun = self._held.lstrip()
        if self._first and not any(begun.startswith(m) or m.startswith(begun) for m in (_CHANNEL, _START, "to=")):
            self._header = self._first = False
            return Said()
        if at < 0:
            return None
        head, self._held = self._held[:at], self._held[at + len(_MESSAGE) :]
        channel = head.partition(_CHANNEL)[2].split()
        to = re.search(r"to=functions\.([\w.-]+)", head)
        self._header = self._first = False
        self._calls = to is not None and to[1] in self._names
        self.thinks = to is None and channel[:1] == ["analysis"]
        return Said(calls=(CallPart(name=to[1]),)) if to is not None and self._calls else Said()

    def _body(self) -> Said | None:
        """What a message says; None where no more of it is known."""
        at = min((i for i in map(self._held.find, _ENDS) if i >= 0), default=-1)
        if at < 0:
            n = len(self._held) - max(overlap(self._held, mark) for mark in _ENDS)
            shown, self._held = self._held[:n], self._held[n:]
            return self._told(shown) if shown else None
        shown, self._held = self._held[:at], self._held[at:]
        said = self._told(shown)
        if self._calls:
            said += Said(calls=(CallPart(whole=True),))
        self._header, self.thinks, self._calls = True, False, False
        return said

    def _told(self, text: str) -> Said:
        if self._calls:
            return Said(calls=(CallPart(arguments=text),) if text else ())
        return Said(reasoning=text) if self.thinks else Said(content=text)
