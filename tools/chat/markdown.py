"""Markdown as a model writes it, rendered on a terminal while it arrives, without losing any of its text.

Blocks that are complete are written once and for good, so that they scroll as all output does. The last block, which
may still grow, is drawn anew below them: of one that is taller than the screen, its last lines. When it is complete it
is written for good in its turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from types import TracebackType
from typing import ClassVar

from markdown_it import MarkdownIt  # rich brings it along and parses with it
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from graphrt.printing import terminal_text

#: Drawing takes at most this share of the time, and there are at most so many drawings in a second.
SHARE, PER_SECOND = 0.1, 20
#: Columns that a level of lists and quotes takes, and a column of a table at least; where there are fewer, the text
#: is shown as it stands.
LEVEL, COLUMN = 4, 5

# Of CommonMark without what hides text: HTML, targets of links that stand elsewhere, pictures; and without escapes, as
# models write formulas in \( \). "maxNesting": text that is nested deeper would be left out.
_PARSER = MarkdownIt("commonmark", {"html": False, "maxNesting": 1000})
_PARSER.enable(["table", "strikethrough"]).disable(["reference", "image", "escape"])


class _WholeTable(TableElement):
    """A table whose cells fold words that are too long, where rich cuts them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            if isinstance(part, Table):
                for column in part.columns:
                    column.overflow = "fold"
            yield part


class _Rendered(Markdown):
    """Markdown of which all text is shown, and which keeps the lines of a paragraph: verses are lines."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": _WholeTable}

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"

    def fits(self, width: int) -> bool:
        """Whether so many columns are enough for its lists and tables."""
        deepest = max((token.level for token in self.parsed), default=0)
        n_columns = max(_columns(self.parsed), default=0)
        return deepest * LEVEL <= width // 2 and n_columns * COLUMN <= width


def _columns(tokens: Iterable[Token]) -> Iterator[int]:
    n = 0
    for token in tokens:
        n = 0 if token.type == "tr_open" else n + (token.type in ("th_open", "td_open"))
        yield n


class _Safe:
    """What is rendered, without anything that could steer the terminal: parsing may have made more of it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rendered = _Rendered(self._text)
        shown = rendered if rendered.fits(options.max_width) else Text(self._text, overflow="fold")
        for line in console.render_lines(shown, options.update(height=None), pad=False):
            yield from (Segment(terminal_text(segment.text), segment.style) for segment in _without_filling(line))
            yield Segment.line()


def _without_filling(line: list[Segment]) -> list[Segment]:
    """A line without the spaces at its end that no colour shows: they would be copied with the text."""
    while line and not (line[-1].style and line[-1].style.bgcolor):
        last = line.pop()
        if text := last.text.rstrip(" "):
            return [*line, Segment(text, last.style)]
    return line


class _End:
    """The last lines of something, as many as the screen has."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()


def blocks(text: str) -> list[str]:
    """The text in pieces, a paragraph, list, table or the like in each."""
    starts = [
        token.map[0] for token in _PARSER.parse(text, {}) if token.level == 0 and token.map and token.nesting >= 0
    ]
    lines = text.splitlines(keepends=True)
    edges = [0, *starts[1:], len(lines)]
    return ["".join(lines[start:stop]) for start, stop in pairwise(edges)]


def split_complete(text: str) -> tuple[list[str], str]:
    """The blocks at the beginning that no further text can change, and the rest, of which the last line may be
    unfinished."""
    complete = blocks(text[: text.rfind("\n") + 1])[:-1]
    return complete, text[sum(map(len, complete)) :]


class MarkdownStream:
    """Renders an answer on a console as it arrives. Use it as a context; all of the text stands there at its end."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._text = ""  # what is not written for good
        self._wrote = False
        self._next = clock()
        self._live = Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="visible",
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip

    def __enter__(self) -> MarkdownStream:
        self._live.start()
        return self

    def push(self, text: str) -> None:
        """More of the answer."""
        self._text += terminal_text(text)
        begun = self._clock()
        if begun < self._next:
            return
        complete, self._text = split_complete(self._text)
        for block in complete:
            self._write(block)
        self._live.update(_End(_Safe(self._text)) if self._text.strip() else "", refresh=True)
        now = self._clock()
        self._next = now + max((now - begun) / SHARE, 1 / PER_SECOND)

    def _write(self, text: str) -> None:
        if text.strip():
            if self._wrote:
                self._console.print()
            self._console.print(_Safe(text))
            self._wrote = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.update("")
        self._live.stop()
        for block in blocks(self._text):
            self._write(block)
