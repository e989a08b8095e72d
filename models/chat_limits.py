"""What a chat template may use: time, memory, output. chat_environment calls these checks at every step."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.utils import Namespace

MAX_VALUE = 4 << 20  # bytes of one value; a list counts everything in it, once per occurrence
MAX_TOTAL = 64 << 20  # bytes of all values that one rendering makes
MAX_OUTPUT = 8 << 20  # characters of the result
MAX_ARGUMENT = 10_000  # a number given to a filter or method: widths, counts
MAX_INT_BITS = 4096

_WIDE_FORMAT = re.compile(r"%.*?(?:\d{4}|\*)", re.DOTALL)
_WIDE_FIELD = re.compile(r"\{[^}]*(?:\d{4}|\{)")


class LimitError(TemplateRuntimeError):
    """The template exceeds a limit."""


class Budget:
    """What one rendering may still use: seconds by the given clock, bytes, characters of output."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._deadline = clock() + seconds
        self._total = self._output = 0

    def tick(self) -> None:
        """Raises LimitError past the deadline."""
        if self._clock() > self._deadline:
            raise LimitError(f"it may run for {self.seconds:g} s, and is not done")

    def make(self, value: Any, deep: bool = False) -> Any:
        """Counts a value just made, and returns it. deep: what a list holds was made with it."""
        self.tick()
        weight = weigh(value)
        self._total += weight if deep or not isinstance(value, (list, tuple, dict)) else 16 + 8 * len(value)
        if self._total > MAX_TOTAL:
            raise LimitError(f"it may make {MAX_TOTAL} bytes of values, and makes more")
        return value

    def emit(self, value: Any) -> str:
        """Counts what goes into the output or a captured block, as text."""
        weigh(value)
        text: str = self.make(str(value))
        self._output += len(text)
        if self._output > MAX_OUTPUT:
            raise LimitError(f"it may write {MAX_OUTPUT} characters, and writes more")
        return text


def weigh(value: Any) -> int:
    """Bytes of a value, the same object counted each time it occurs: what printing or comparing it would cost.

    Raises LimitError above MAX_VALUE. That bounds [x, x] nested fifty deep, which is small only until it is used.
    """
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += item.__sizeof__()
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += 16 + 8 * len(item)
            stack.extend(item)
        elif isinstance(item, dict):
            total += 64 + 16 * len(item)
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, Namespace):
            raise LimitError("a namespace may be read and set, not put in a list, printed or filtered")
        else:
            total += 8
        if total > MAX_VALUE:
            raise LimitError(f"one value may have {MAX_VALUE} bytes, and one has more")
    return total


def expect(n_bytes: int) -> None:
    """Raises LimitError if a value about to be made would have more than MAX_VALUE bytes."""
    if n_bytes > MAX_VALUE:
        raise LimitError(f"one value may have {MAX_VALUE} bytes, and one would have {n_bytes}")


def check_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a filter or method call whose result could be far larger than what goes in. args[0]: the receiver."""
    for arg in (*args[1:], *kwargs.values()):
        if isinstance(arg, (int, float)) and not -MAX_ARGUMENT <= arg <= MAX_ARGUMENT:
            raise LimitError(f"a number given to {name} must be at most {MAX_ARGUMENT}, got {arg:.6g}")
    weights = [weigh(arg) for arg in (*args, *kwargs.values())]
    subject, rest = args[0], args[1:]
    if name == "replace" and len(rest) >= 2 and isinstance(subject, str):
        times = subject.count(str(rest[0])) if rest[0] else len(subject) + 1
        expect(weights[0] + times * len(str(rest[1])))
    elif name == "join" and rest:
        method = isinstance(subject, str) and not isinstance(rest[0], str)
        items, gap = (rest[0], subject) if method else (subject, rest[0])
        expect(weigh(items) + (len(items) if hasattr(items, "__len__") else MAX_ARGUMENT) * len(str(gap)))
    elif name == "indent":
        width = next((arg for arg in (*rest, kwargs.get("width", 4)) if isinstance(arg, (int, str))), 4)
        step = len(width) if isinstance(width, str) else int(width)
        expect(weights[0] + (str(subject).count("\n") + 1) * step * 4)
    elif name == "int" and isinstance(subject, str) and len(subject) > 1000:
        raise LimitError("a number may have 1000 digits")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def check_product(left: Any, right: Any) -> None:
    """Checks `left * right` beforehand."""
    if _bits(left) + _bits(right) > MAX_INT_BITS:
        raise LimitError(f"a number may have {MAX_INT_BITS} bits")
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            expect((len(sequence) if isinstance(sequence, str) else weigh(sequence)) * max(times, 0))


def check_power(left: Any, right: Any) -> None:
    """Checks `left ** right` beforehand."""
    if _bits(left) * (abs(right) if isinstance(right, int) else 1) > MAX_INT_BITS:
        raise LimitError(f"a number may have {MAX_INT_BITS} bits")


def check_percent(form: str, values: Any) -> None:
    """Checks `form % values` beforehand."""
    if _WIDE_FORMAT.search(form):
        raise LimitError("a width in a % format may have 3 digits")
    expect(weigh(form) * 4 + weigh(values) * (form.count("%") + 1))


def check_format(form: str, values: tuple[Any, ...]) -> None:
    """Checks `form.format(*values)` beforehand."""
    if _WIDE_FIELD.search(form):
        raise LimitError("a width in a format may have 3 digits, and fields may not be nested")
    expect(weigh(form) + weigh(values) * form.count("{"))
