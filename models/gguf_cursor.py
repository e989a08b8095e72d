"""Reads numbers and strings from a byte range, and can't be made to read outside of it."""

from __future__ import annotations

import mmap
import struct
from typing import Any, NoReturn, TypeAlias

from graphrt.errors import GGUFError
from graphrt.printing import brief

#: What a parse reads from: an address range that can be indexed and sliced.
Buffer: TypeAlias = mmap.mmap | bytearray

AGAIN = "Download the file again: it is damaged, incomplete or made to look like a model."
MAX_STRING = 1 << 30  # bytes


class Cursor:
    """A position in the file that can't leave it. label names the file in errors; order: "<" or ">"."""

    def __init__(self, buf: Buffer, label: str) -> None:
        self.buf = buf
        self.label = label
        self.size = len(buf)
        self.pos = 0
        self.order = "<"

    @property
    def remaining(self) -> int:
        return self.size - self.pos

    def fail(self, problem: str, step: str = AGAIN) -> NoReturn:
        raise GGUFError(f"{self.label}: {problem}.\n{step}")

    def need(self, n: int, what: str) -> None:
        if n > self.remaining:
            self.fail(f"{what} needs {n} bytes at offset {self.pos}, but only {self.remaining} are left in the file")

    def scalar(self, code: str, what: str) -> Any:
        n = struct.calcsize("<" + code)
        self.need(n, what)
        value = struct.unpack_from(self.order + code, self.buf, self.pos)[0]
        self.pos += n
        return value

    def string(self, what: str, limit: int = MAX_STRING) -> bytes:
        n = self.scalar("Q", f"the length of {what}")
        if n > limit:
            self.fail(f"{what} may be at most {limit} bytes long, got {n}")
        self.need(n, what)
        value = bytes(self.buf[self.pos : self.pos + n])
        self.pos += n
        return value

    def name(self, what: str, limit: int) -> str:
        """A key or a tensor's name: not empty, valid UTF-8."""
        raw = self.string(what, limit)
        if not raw:
            self.fail(f"{what} must not be empty")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} must be valid UTF-8, got {brief(raw)}")
