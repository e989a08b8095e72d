"""What a chat is seen through: a terminal (terminal.py), or lines of a pipe, which is here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import BinaryIO, Protocol, TextIO

from graphrt.errors import SessionError
from graphrt.printing import terminal_text
from graphrt.tools.chat.conversation import Answer
from graphrt.tools.chat.typed import unfinished
from graphrt.tools.common import print_text

#: Bytes of a line from a pipe: more than any model's context.
MAX_LINE = 1 << 24


class Screen(Protocol):
    """Where messages come from and answers go. waits: somebody sits there, for whom an error or Ctrl-C does not end the
    chat."""

    waits: bool

    def read(self) -> str:
        """What is typed next, finished as typed.unfinished() has it. Raises EOFError at the end, and KeyboardInterrupt
        for Ctrl-C, which takes back what was typed; SessionError for what is no text."""

    def show(self, pieces: Iterator[str], markdown: bool) -> None:
        """Streams an answer. markdown: it may be rendered. Raises what the pieces raise."""

    def figures(self, answer: Answer, n_past: int, n_ctx: int) -> None:
        """What an answer took."""

    def say(self, text: str) -> None:
        """The program's own words, which may hold text of files."""

    def warn(self, text: str) -> None:
        """What could not be done."""


class Plain:
    """A message a line, answers and nothing else to `out`; the program's own words go to `err`."""

    waits = False

    def __init__(self, lines: BinaryIO, out: TextIO, err: TextIO) -> None:
        self._lines, self._out, self._err = lines, out, err

    def read(self) -> str:
        typed = self._line()
        while unfinished(typed):
            try:
                typed = f"{typed}\n{self._line()}"
            except EOFError:
                break
        return typed

    def _line(self) -> str:
        line = self._lines.readline(MAX_LINE + 1)
        if not line:
            raise EOFError
        if len(line) > MAX_LINE:
            raise SessionError(f"a line may have {MAX_LINE} bytes, got one with more")
        try:
            return line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise SessionError(f"a line must be UTF-8, got one that is not (byte {error.start})") from error

    def show(self, pieces: Iterator[str], markdown: bool) -> None:
        for piece in pieces:
            print_text(piece, self._out)
        print_text("\n", self._out)

    def figures(self, answer: Answer, n_past: int, n_ctx: int) -> None:
        pass

    def say(self, text: str) -> None:
        print(terminal_text(text), file=self._err, flush=True)

    def warn(self, text: str) -> None:
        print(f"graphrt chat: {terminal_text(text)}", file=self._err, flush=True)


def standard() -> Plain:
    """Standard input, output and error."""
    return Plain(sys.stdin.buffer, sys.stdout, sys.stderr)
