"""A program on a pseudo-terminal, as somebody at a keyboard has it: what it writes is waited for, never the time."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")
#: Makes the terminal on its standard input the process's own, so that Ctrl-C reaches it, and goes on as the program.
_START = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.executable, sys.argv[1:])"


class PseudoTerminal:
    """size: rows and columns; seconds: how long anything may take, on a machine however busy. output: all that was
    written so far."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], size: tuple[int, int] = (24, 80), seconds: float = 240
    ) -> None:
        self._seconds = seconds
        self._end, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *argv], stdin=theirs, stdout=theirs, stderr=theirs, env=dict(env),
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.output = ""
        self._seen = 0

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def expect(self, text: str) -> None:
        """Waits until the program has written a text behind the last one that was expected; colours and the cursor's
        moves don't count."""
        deadline = time.monotonic() + self._seconds
        while (at := (plain := _ESCAPES.sub("", self.output)).find(text, self._seen)) < 0:
            assert self._read(deadline), f"{text!r} was waited for behind {plain[self._seen :]!r} of {self.output!r}"
        self._seen = at + len(text)

    def expect_raw(self, pattern: str) -> None:
        """Waits for what matches a regular expression, colours and moves included, from here on."""
        deadline, begun = time.monotonic() + self._seconds, len(self.output)
        while re.search(pattern, self.output[begun:], re.DOTALL) is None:
            assert self._read(deadline), f"{pattern!r} was waited for behind {self.output[begun:]!r}"

    def expect_editor(self) -> None:
        """Waits until the line editor has the terminal: what is typed earlier, the terminal itself would take apart."""
        deadline = time.monotonic() + self._seconds
        while self.output.rfind("\x1b[?2004h") <= self.output.rfind("\x1b[?2004l"):
            assert self._read(deadline), f"the editor was waited for behind {self.output!r}"

    @property
    def echoes(self) -> bool:
        """The terminal shows what is typed and reads whole lines, as it does where no line editor has it."""
        modes: int = termios.tcgetattr(self._end)[3]
        return bool(modes & termios.ECHO and modes & termios.ICANON)

    def code(self) -> int:
        """Waits until the program ends."""
        deadline = time.monotonic() + self._seconds
        while self._read(deadline):
            pass
        return self.process.wait(self._seconds)

    def _read(self, deadline: float) -> bool:
        """Takes what was written; False at its end, and where nothing comes."""
        ready, _, _ = select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._end, 1 << 16) if ready else b""
        except OSError:  # Linux: the program has closed it
            data = b""
        self.output += data.decode("utf-8", "replace")
        return bool(data)
