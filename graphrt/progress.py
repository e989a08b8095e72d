"""How far long work is: whoever works opens a task, whoever waits may show it.

    with progress.task("reading the prompt", len(tokens), "tokens") as advance:
        ...
        advance(512)

Nothing is shown unless `shown_by` has named a display, as the command line does. A task inside another one is a part
of that and shows nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol


class Advance(Protocol):
    def __call__(self, n: int = 1, /) -> None:
        """So many more units are done."""


#: Shows one task, given its title, its total and the unit of both ("" for none), from entry to exit.
Display = Callable[[str, int, str], AbstractContextManager[Advance]]

#: Of this thread: a thread that is started inside a task shows nothing.
_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def task(title: str, total: int, unit: str = "") -> Iterator[Advance]:
    """Work of `total` units, "tokens" or "bytes" for instance. What it gives is called with the units just done."""
    shown = display()
    if shown is None:
        yield ignore
        return
    with shown_by(None), shown(title, total, unit) as advance:
        yield advance


@contextmanager
def shown_by(shown: Display | None) -> Iterator[None]:
    """Tasks that this thread opens inside are shown by `shown`, or by none."""
    before = _display.get()
    _display.set(shown)
    try:
        yield
    finally:
        _display.set(before)


def display() -> Display | None:
    """What shows this thread's tasks."""
    return _display.get()


def ignore(n: int = 1, /) -> None:
    """What a task gives that nobody shows."""
