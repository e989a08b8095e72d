"""A terminal's screen as a program writes it: as much of it as rich's live display uses."""

from __future__ import annotations

import re
import unicodedata

_PARTS = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|(\n)|(\r)|([^\x1b\n\r]+)|(.)", re.DOTALL)

#: Categories of characters that may steer a terminal or break a line, and marks that turn a line's direction around.
STEERING = {"Cc", "Cs", "Zl", "Zp"}
BIDI = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Emulated:
    """lines: all rows from the first that was ever written, those that scrolled off the top included; height: rows on
    the screen: the cursor can't go higher. Raises AssertionError for what it does not know."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.lines = [""]
        self._row = self._column = 0

    def write(self, text: str) -> int:
        for part in _PARTS.finditer(text):
            parameter, command, newline, back, shown, other = part.groups()
            assert not other, f"{other!r} must not reach a terminal"
            if newline:
                self._move_down()
                self._column = 0  # as a terminal's driver does with it
            elif back:
                self._column = 0
            elif shown:
                # Private characters, which fonts have icons at, and joiners, which emoji need, steer nothing.
                steering = [c for c in shown if unicodedata.category(c) in STEERING or c in BIDI]
                assert not steering, (steering, shown)
                self._put(shown)
            else:
                self._control(parameter, command)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True

    def _control(self, parameter: str, command: str) -> None:
        if command == "A":
            self._row = max(self._row - int(parameter or 1), len(self.lines) - self.height, 0)
        elif command == "K":
            assert parameter == "2"
            self.lines[self._row] = ""
        else:
            assert command == "m" or parameter == "?25", (parameter, command)  # colours; the cursor is hidden or shown

    def _put(self, text: str) -> None:
        for character in text:
            if self._column == self.width:
                self._move_down()
                self._column = 0
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _move_down(self) -> None:
        self._row += 1
        if self._row == len(self.lines):
            self.lines.append("")
