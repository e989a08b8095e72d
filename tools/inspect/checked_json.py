"""JSON from outside, read field by field: whatever does not fit is refused with the path of the field. And plain() for
the way out, so that what is written can be read again."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from graphrt.errors import GraphError

T = TypeVar("T")

#: Longer texts are refused before they are parsed.
MAX_CHARS = 256 * 2**20
#: No count, size or offset is larger: sums and products of a few stay sensible numbers.
MAX_WHOLE = 2**53
MAX_FLOAT = sys.float_info.max


def parsed(text: str, what: str) -> Checked:
    """The whole of a text that must be strict JSON. what: the text in an error, "a graph". Raises GraphError."""
    if len(text) > MAX_CHARS:
        raise GraphError(
            f"{what} must be at most {MAX_CHARS} characters of JSON, got {len(text)}; is it the right file?"
        )
    try:
        return Checked(json.loads(text, parse_constant=_no_constant))
    except RecursionError:
        raise GraphError(f"{what} must be JSON of few levels, it is nested too deeply; is it the right file?") from None
    except ValueError as error:  # what json raises, and Python for a number of thousands of digits
        raise GraphError(f"{what} must be JSON, it is not: {str(error)[:200]}; is it the right file?") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not strict JSON")


class Checked:
    """A value and its path from the root, "$"."""

    def __init__(self, value: Any, path: str = "$") -> None:
        self.value = value
        self.path = path

    def refuse(self, rule: str) -> NoReturn:
        """Raises GraphError: the path, what must be there, and what is."""
        value = self.value[:80] if isinstance(self.value, str) else self.value
        shown = repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
        raise GraphError(f"{self.path} must be {rule}, got {shown[:80]}; mend the file or write it anew")

    def fields(self, *names: str) -> dict[str, Checked]:
        """The fields of an object that must have these names and no other."""
        if not isinstance(self.value, dict):
            self.refuse(f"an object with {', '.join(names)}")
        for name in names:
            if name not in self.value:
                raise GraphError(
                    f"{self.path} must have the field {name!r}, it has none; mend the file or write it anew"
                )
        for name in self.value:
            if name not in names:
                raise GraphError(f"{self.path} must have no field {name[:80]!r}, only {', '.join(names)}; take it out")
        return {name: Checked(self.value[name], f"{self.path}.{name}") for name in names}

    def items(self, most: int = MAX_WHOLE) -> Iterator[Checked]:
        """The elements of an array of at most so many."""
        if not isinstance(self.value, list) or len(self.value) > most:
            self.refuse("an array" if most == MAX_WHOLE else f"an array of at most {most}")
        return (Checked(value, f"{self.path}[{i}]") for i, value in enumerate(self.value))

    def whole(self, low: int = 0, high: int = MAX_WHOLE) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            self.refuse(f"a whole number from {low} to {high}")
        return int(self.value)

    def wholes(self, n: int, low: int = 0, high: int = MAX_WHOLE) -> tuple[int, ...]:
        """An array of exactly n whole numbers."""
        if not isinstance(self.value, list) or len(self.value) != n:
            self.refuse(f"an array of {n} whole numbers")
        return tuple(item.whole(low, high) for item in self.items())

    def text(self, most: int) -> str:
        """A text that can be printed: control characters could steer a terminal."""
        if not isinstance(self.value, str) or len(self.value) > most or not self.value.isprintable():
            self.refuse(f"a text of at most {most} characters, none of them a control character")
        return str(self.value)

    def one_of(self, values: Collection[str]) -> str:
        if not isinstance(self.value, str) or self.value not in values:
            self.refuse(f"one of {', '.join(values)}")
        return self.value

    def true_or_false(self) -> bool:
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def number(self) -> float:
        """A number that a float can hold, or "inf", "-inf", "nan", which JSON has no numbers for."""
        if self.value in SPECIAL:
            return float(self.value)
        number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not number or not abs(self.value) <= MAX_FLOAT:
            self.refuse(f"a number or one of {', '.join(SPECIAL)}")
        return float(self.value)

    def optional(self, read: Callable[[Checked], T]) -> T | None:
        """None for null, else what `read` makes of it."""
        return None if self.value is None else read(self)


#: How a JSON file spells numbers that JSON does not know.
SPECIAL: Sequence[str] = ("inf", "-inf", "nan")


def plain(value: Any) -> Any:
    """Objects, arrays and plain values of strict JSON, as parsed() takes them."""
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
