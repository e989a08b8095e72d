"""What a computation takes, in a measure that no other process on the machine can change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(work: Callable[[], object]) -> int:
    """How many instructions of Python's bytecode `work` executes, all the way down; loops written in C count as one."""
    n = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal n
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        n += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return n
