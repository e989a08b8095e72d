"""The standard input of the process that starts ranks, for the first one of them; Python gives a process that it starts
an empty one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.reduction import DupFd
from typing import Any

from graphrt.errors import GraphrtError

try:
    import termios
except ImportError:  # not a system with terminals of this kind
    termios = None  # type: ignore[assignment]

#: Shows the cursor again, and ends the mode in which a terminal brackets what is pasted.
SHOWN = "\x1b[?25h\x1b[?2004l"


class StandardInput:
    """Travels to processes that are started: there take() makes it theirs."""

    def __init__(self) -> None:
        self._number = os.dup(0)  # by another number: a process that is started closes 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_sent": DupFd(self._number)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._number = state["_sent"].detach()

    def take(self) -> None:
        sys.stdin.close()
        os.dup2(self._number, 0)
        sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 (it stays open)
        self.close()

    def close(self) -> None:
        os.close(self._number)


@contextmanager
def left_as_it_is() -> Iterator[None]:
    """Afterwards the terminal is as it was before, whatever a line editor made of it that was killed meanwhile."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(0)
    try:
        yield
    except GraphrtError:
        sys.stdout.write("\n")  # the line editor's own is not finished
        raise
    finally:
        with suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, before)
        if sys.stdout.isatty():
            sys.stdout.write(SHOWN)
            sys.stdout.flush()
