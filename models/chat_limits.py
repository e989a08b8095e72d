"""What a chat template may use: time, memory, output. chat_environment calls these checks at every step.

chat_arguments has those of filters, methods and formats, which depend on what each of them does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from types import MethodType
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined
from jinja2.utils import Namespace

MAX_VALUE = 4 << 20  # bytes of one value; a list counts everything in it, once per occurrence
MAX_DEPTH = 100  # lists in lists; Python hashes nested tuples on the C stack, and crashes some 100,000 deep
MAX_TOTAL = 64 << 20  # bytes of all values that one rendering makes
MAX_OUTPUT = 8 << 20  # characters of the result
MAX_INT_BITS = 4096
MAX_NODES = 12_000  # of the syntax tree; the longest published templates have about half. Compiling 1000 takes 90 ms

_ITERABLES: tuple[type[Collection[Any]], ...] = (
    *(list, tuple, set, frozenset),
    *(type({}.keys()), type({}.values()), type({}.items())),
)


class LimitError(TemplateRuntimeError):
    """The template exceeds a limit."""


class Stream:
    """What a filter like map yields, all made beforehand so that it can be weighed. Read once, as a generator is."""

    __slots__ = ("_at", "_items")

    def __init__(self, items: list[Any]) -> None:
        self._items, self._at = items, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._at >= len(self._items):
            raise StopIteration
        self._at += 1
        return self._items[self._at - 1]

    def rest(self) -> list[Any]:
        """What is not read yet."""
        return self._items[self._at :]


class Budget:
    """What one rendering may still use: seconds by the given clock, bytes, characters of output.

    The default clock counts the thread's own work, so that a busy machine stops no template.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
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

    def drain(self, values: Iterable[Any]) -> Stream:
        """All that a generator yields, as a Stream. What its items hold was there before or is counted elsewhere."""
        items: list[Any] = []
        total = 0
        for value in values:
            self.tick()
            total += 8 + weigh(value)
            expect(total)
            items.append(value)
        self.make(items)
        return Stream(items)

    def emit(self, value: Any) -> str:
        """Counts what goes into the output or a captured block, as text."""
        weigh(value)
        text: str = self.make(str(value))
        self._output += len(text)
        check_output(self._output)
        return text


def check_output(n_characters: int) -> None:
    """Raises LimitError if a result may not have that many characters."""
    if n_characters > MAX_OUTPUT:
        raise LimitError(f"it may write {MAX_OUTPUT} characters, and writes more")


def weigh(value: Any) -> int:
    """Bytes of a value, the same object counted each time it occurs: what printing or comparing it would cost.

    Raises LimitError above MAX_VALUE, which bounds [x, x] nested fifty deep, small only until it is used; below
    MAX_DEPTH levels; and for what has no size, as a loop.
    """
    total, depth, level = 0, 0, [value]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise LimitError(f"a value may hold lists {MAX_DEPTH} deep, and one is deeper")
        below: list[Any] = []
        for item in level:
            total += _own_weight(item, below)
            if total > MAX_VALUE:
                raise LimitError(f"one value may have {MAX_VALUE} bytes, and one has more")
        level = below
    return total


def _own_weight(item: Any, below: list[Any]) -> int:
    """Bytes of one object. What it holds goes to below."""
    if isinstance(item, str):
        return item.__sizeof__()
    if isinstance(item, int):
        return 8 + item.bit_length() // 3  # a digit takes 3.3 bits
    if item is None or isinstance(item, (float, complex, range, Undefined)):
        return 8
    if isinstance(item, _ITERABLES):
        below.extend(item)
        return 16 + 8 * len(item)
    if isinstance(item, dict):
        below.extend(item.keys())
        below.extend(item.values())
        return 64 + 16 * len(item)
    if isinstance(item, Stream):
        rest = item.rest()
        below.extend(rest)
        return 16 + 8 * len(rest)
    if isinstance(item, Macro):
        return 32 + len(item.name or "")  # printed with its name
    if isinstance(item, MethodType):
        below.append(item.__self__)  # printed with its owner
        return 32
    if callable(item) and not isinstance(item, (LoopContext, BlockReference)):
        return 32
    # these print or compare what they hold, which may be of any size
    name = {Namespace: "namespace", LoopContext: "loop"}.get(type(item), type(item).__name__)
    raise LimitError(f"a {name} may be read and set, not put in a list, printed or filtered")


def weigh_each(values: Iterable[Any]) -> None:
    """Weighs operands or arguments, among which a namespace or a loop may stand by itself."""
    weigh([value for value in values if not isinstance(value, (Namespace, LoopContext))])


def expect(n_bytes: int) -> None:
    """Raises LimitError if a value about to be made would have more than MAX_VALUE bytes."""
    if n_bytes > MAX_VALUE:
        raise LimitError(f"one value may have {MAX_VALUE} bytes, and one would have {n_bytes}")


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
