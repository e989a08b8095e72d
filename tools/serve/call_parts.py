"""What readers of calls have in common: the pieces that a call of a tool comes in, and how far a reader is."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol


class CallPart(NamedTuple):
    """A piece of a call. name: of a call that begins with it; arguments: more of them, a piece of a JSON text; whole:
    nothing more comes of this call. number, id: which call it is, for those who are told of it."""

    name: str = ""
    arguments: str = ""
    whole: bool = False
    number: int = 0
    id: str = ""


class Stage(Enum):
    """Whether what is read is a call: nobody knows yet; it is one, or it is none; it has ended; or it was one and went
    wrong, so that nothing of the rest is known."""

    OPEN, CALL, NONE, ENDED, LOST = range(5)


class CallReader(Protocol):
    """Reads calls that are written in one form. rest: what stands behind them, once they have ended."""

    stage: Stage
    rest: str

    def push(self, text: str) -> list[CallPart]: ...

    def end(self) -> list[CallPart]:
        """Of a text that ended by itself."""
        ...
